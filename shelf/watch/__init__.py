"""Poll a job, print, notify and act: `vjob watch`. `desk.run_watch` is the entry point.

Imports the monitor's model and readers, the conf, the runs and the schedulers.
"""
