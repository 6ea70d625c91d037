"""Shell scripts of other launchers as conf.yaml; nothing that they name is started.

`translate.translate_source` takes a file or a folder (`tree` finds where a folder begins). `bash`
lets bash itself find what the scripts start, `script` brings that into one form, `launchers` parts
each line in wrappers, launcher and program. `draft.Draft` collects the keys: `program`, `nodes`,
`container` and `copies` build their sections, by the tables in `values` and `megatron_options`;
`fit` leaves out what the checks refuse. `compare` holds a plan's words against the script's.
Imports the conf and its checks.
"""
