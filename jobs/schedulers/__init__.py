"""Slurm, and this machine in its place: submit, look, cancel. `choose.choose_executor` opens one;
`slurm_commands` builds commands and parses answers. Imports the conf and the records.
"""
