"""`vjob watch`: polls a job, prints, notifies and acts. `desk.run_watch` is the entry point.

Imports the monitor's model and readers, the conf, the runs and the schedulers.
"""
