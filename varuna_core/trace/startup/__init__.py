"""Folder put on PYTHONPATH for a rank's Python to import first, for a timeline (trace/hook.py)."""
