"""`vjob doctor`: what of this machine, its Slurm and its containers would trouble a job."""
