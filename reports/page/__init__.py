"""Figures and tables to one HTML file: `run_page` and `comparison` each render one.

Imports `analysis` and `load`.
"""
