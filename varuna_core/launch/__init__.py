"""`python -m varuna_core.launch`: a training run on machines over ssh, or on this one.

What srun and the batch script are to a Slurm job, this package is to a list of machines. The node
agent that it starts on each of them is the one that jobs start. It imports no torch.
"""
