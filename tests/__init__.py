"""The tests mirror the tree; ROOT is the checkout.

cluster/ is a real Slurm lab, programs/ what test runs start, ranks/ and models/ what tests of the
runtime train. Helpers that several folders share lie here: command.py, documents.py, and so on.
Only tests/benchmarks imports benchmarks.
"""

from pathlib import Path

ROOT = Path(__file__).parent.parent
PATIENCE = 3
"""How many times as long as on a quiet machine a test waits before it takes something for hung."""
