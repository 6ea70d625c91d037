"""Write and read the files that ranks and agents write while they run.

`training_log` defines our training lines, `progress.parse_progress` parses a line of any trainer
and `steps.StepReader` a sequence of lines; `literals` finds cheap tests to run before patterns;
`trace` holds events of steps, `gpu_text` samples of GPUs, `times` clocks and marks, `tail` the ends
of logs, `slow_ranks` the rule for which ranks are slow. Standard library only, Python 3.8: agents
read and write these too.
"""
