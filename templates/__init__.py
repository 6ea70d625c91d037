"""Jinja templates for `jobs/submit/scripts.py` (batch, node) and `reports` (the page).

Layout only, with `if present` and `for`; decisions and quoting are in the code that renders them.
"""
