"""The tests mirror the tree; ROOT is the checkout.

cluster/ is a real Slurm lab, programs/ what test runs start, ranks/ and models/ what tests of the
runtime train. Helpers that several folders share lie here: command.py, documents.py, and so on.
Only tests/benchmarks imports benchmarks.
"""

from pathlib import Path

ROOT = Path(__file__).parent.parent
