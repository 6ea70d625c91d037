"""The user's code as a run has it: its commit and changes, a copy of its files, and the packages.

`find_repository` and `read_state` (git), `list_tree` and `copy_tree` (files), `list_packages`.
Imports of `jobs` the processes, the errors, and of the conf how secrets are hidden.
"""
