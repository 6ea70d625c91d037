"""Figures to one HTML page: `run_page`, `plan_page`, `comparison`.

Imports `analysis` and `load`.
"""
