"""Data of the monitor: `snapshot.Snapshot` and `snapshot.Verdict`, and `text.render` to print them.

Imports the records alone.
"""
