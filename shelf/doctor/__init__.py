"""`vjob doctor`: what of this machine, its Slurm and its containers would trouble a job.

`doctor.examine` looks at everything, `containers.examine_containers` at the container runtimes.
Imports the conf, the programs, the schedulers, the images, the containers and the agent's checks.
"""
