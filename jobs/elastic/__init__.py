"""Nodes that join and leave a running job.

`membership.grow` and `membership.shrink` serve a user, `autoscale.run_autoscaler` asks by itself.
Imports the runs, the schedulers, the submit and, for the pace of a run, the monitor.
"""
