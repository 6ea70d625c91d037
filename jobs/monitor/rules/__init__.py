"""Rules that turn a snapshot into a verdict. `judge.judge` evaluates them in order.

All pure: a rule reads nothing but the snapshot. Imports the model, the known log lines and Slurm's
reasons.
"""
