"""Shell scripts of other launchers as conf.yaml; nothing of them is executed.

`translate.translate_source` takes a file or a folder. `shell.parse_shell_conf` reads a text and
works out its variables, `launchers.sort_commands` finds what its command lines start and where.
`draft.Draft` collects the keys: `program`, `nodes` and `container` build their sections, by the
tables in `values` and `megatron_options`; `fit` leaves out what the checks refuse. Imports the conf
and its checks.
"""
