"""Start programs from a conf, built-in ones and those of others: their arguments and files.

`start` serves every kind. Pure except for `start.Starter.read_files`. Imports the conf and the
records.
"""
