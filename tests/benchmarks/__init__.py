"""Tests of benchmarks/: the only ones that import it. What others share lies in tests/."""
