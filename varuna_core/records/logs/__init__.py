"""Formats of what ranks and agents write while they run, each with its writer and its reader.

`training_log` is the contract of training lines, `progress.parse_progress` reads those of any
trainer and `steps.StepReader` what follows from one after the other; `literals` finds the cheap
test before a pattern; `trace` holds events of steps, `gpu_text` samples of GPUs, `times` clocks and
marks, `tail` the ends of logs, `slow_ranks` the one rule for which ranks are slow. Standard library
only, Python 3.8: agents read and write these too.
"""
