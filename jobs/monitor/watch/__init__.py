"""`vjob watch`: polls a job, prints, notifies and acts. `desk.run_watch` is the entry point.

Imports the monitor's model and readers, and the runs to cancel them.
"""
