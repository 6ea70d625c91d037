"""Parse lines of logs, classify them by the table of known lines, merge them by time and print
them.

`errors.classify_line` returns the kind of an error line; `print_logs` implements `vjob logs`.
Imports the model, the containers' known failures and, for printing, the runs and the schedulers.
"""
