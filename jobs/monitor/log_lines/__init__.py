"""Lines of logs: parsed, classified by the table of known lines, merged by time, printed.

`errors.classify_line` names the kind of an error; `print_logs` is `vjob logs`. Imports the model,
the containers' known failures and, for printing, the runs and the schedulers.
"""
