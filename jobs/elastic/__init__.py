"""Nodes that join and leave a running job.

`membership.grow` and `membership.shrink` serve users and the autoscaler of `shelf`. Imports the
conf, the runs, the schedulers and the submit.
"""
