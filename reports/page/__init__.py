"""Figures and tables to one HTML file: `run_page`, `comparison` and `plan_page` each render one.

Imports `analysis` and `load`.
"""
