"""Programs started from a conf, our own and those of others: their arguments and their files.

`start` serves every kind. Pure but for `start.Starter.read_files`. Imports the conf and the
records.
"""
