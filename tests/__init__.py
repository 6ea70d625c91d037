"""The tests mirror the tree; ROOT is the checkout."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
