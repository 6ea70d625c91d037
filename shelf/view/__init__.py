"""View model of the live views (screen, web): rows, columns and number formats, without a layout.

`job.View.make` prepares a snapshot, and `runs.RUN_COLUMNS` are the columns of the list of runs.
Imports the monitor's model.
"""
