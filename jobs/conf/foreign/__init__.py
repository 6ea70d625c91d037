"""Shell scripts of other launchers as conf.yaml; nothing of them is executed.

`translate.translate_source` takes a file or a folder. `shell.parse_shell_conf` reads a text and
works out its variables, `launchers.sort_commands` finds what its command lines start and where,
`megatron_options.KEYS` are the options that are keys of the conf. Imports the conf, its checks, and
the programs.
"""
