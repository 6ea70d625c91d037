"""Formats of what ranks and agents write while they run, each with its writer and its reader.

`training_log` is the contract of training lines and `progress.parse_progress` reads those of any
trainer; `trace` holds events of steps, `gpu_text` samples of GPUs, `times` clocks and marks, `tail`
the ends of logs, `slow_ranks` the one rule for which ranks are slow. Standard library only, Python
3.8: agents read and write these too.
"""
