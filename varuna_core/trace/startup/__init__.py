"""This folder is put on PYTHONPATH, so that a rank's Python imports the hook for a timeline first
(trace/hook.py)."""
