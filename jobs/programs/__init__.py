"""Programs started from a conf, our own and those of others: their arguments and their files.

`start` serves every kind; `shell_export.build_scripts` writes one as shell scripts. Pure but for
`start.Starter.read_files`. Imports the conf and the records.
"""
