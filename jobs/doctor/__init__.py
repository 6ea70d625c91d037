"""`vjob doctor`: what of this machine, its Slurm and its containers would trouble a job.

`doctor.examine` looks at everything, `containers.examine_containers` at the container runtimes.
Imports the schedulers, the images and the containers.
"""
