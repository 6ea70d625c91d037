"""`vjob report` and `vjob compare`: `report.write_report` and `compare.compare_jobs` find a job's
files and hand them to `vjob.reports`, which is imported late: pandas and plotly take a second.
"""
