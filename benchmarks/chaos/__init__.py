"""Fault injection: a training that is disturbed must end with the weights of an undisturbed one.

`python -m benchmarks.chaos` draws faults from a seed and applies them to one run, on this machine
or on the Slurm lab; `python -m benchmarks.chaos.summary` makes results/chaos.md from its reports.
`python -m benchmarks.chaos.statistics` counts faults by the phase that they hit. Both use the lab
of tests/cluster and the command of tests/command.py.
"""
