"""Convert shell scripts of other launchers to conf.yaml, without starting anything that they name.

`translate.translate_source` takes a file or a folder (`tree` finds the scripts to begin with).
`bash` lets bash itself find what the scripts start, `script` brings the recordings into one form,
`launchers` splits each command line into wrappers, launcher and program. `draft.Draft` collects the
keys: `program`, `nodes`, `container` and `copies` build their sections, by the tables in `values`
and `megatron_options`; `fit` removes the keys that the checks refuse. `compare` compares a plan's
words with the script's. Imports the conf and its checks.
"""
