"""Record the user's code for a run: its commit and changes, a copy of its files, and the packages.

`find_repository` and `read_state` (git), `list_tree` and `copy_tree` (files), `list_packages`.
Imports from `jobs` the processes, the errors, and the conf's redaction of secrets.
"""
