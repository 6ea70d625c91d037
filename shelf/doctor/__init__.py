"""Examine what in this machine, its Slurm and its containers would trouble a job: `vjob doctor`.

`doctor.examine` checks everything, `containers.examine_containers` the container runtimes;
`nodes.examine_nodes` measures the nodes of a conf by a run of the profiler's probe.py on them.
Imports the API, the conf, the programs, the schedulers, the images, the containers and the agent's
checks.
"""
