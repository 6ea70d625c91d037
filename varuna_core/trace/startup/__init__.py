"""A folder for PYTHONPATH: what a rank's Python reads first, for a timeline (trace/hook.py)."""
