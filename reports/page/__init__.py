"""Render figures and tables as one HTML file: `run_page` for a job, `comparison` for several.

Imports `analysis` and `load`.
"""
