"""Turn a run's tables into figures and findings: `measures.analyse` computes every figure of a
report, and `findings.find_all` writes a sentence for each one that matters.

All files are read through `load`. Imports `load` and, from `varuna_core`, the records and
schedules.
"""
