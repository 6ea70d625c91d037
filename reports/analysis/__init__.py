"""Tables to figures and findings: `measures.analyse` computes every figure of a report, and
`findings.find_all` writes those worth a sentence.

Reads no file but through `load`. Imports `load`, and of `varuna_core` the records and schedules.
"""
