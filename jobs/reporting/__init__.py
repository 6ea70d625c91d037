"""`vjob report` and `vjob compare`: finds a job's files and hands them to `vjob.reports`.

That is imported late: pandas and plotly take a second.
"""
