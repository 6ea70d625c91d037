"""Every number that the project states, as a ratio measured in one run: `python -m benchmarks`.

ROOT is the checkout, RESULTS the folder of the pages that the benchmarks write. Benchmarks may use
the helpers of tests/; of the tests only tests/benchmarks imports benchmarks.
"""

from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
