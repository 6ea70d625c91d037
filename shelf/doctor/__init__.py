"""Examine what in this machine, its Slurm and its containers would trouble a job: `vjob doctor`.

`doctor.examine` checks everything, `containers.examine_containers` the container runtimes. Imports
the conf, the programs, the schedulers, the images, the containers and the agent's checks.
"""
