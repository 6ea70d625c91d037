"""The report outside a page: `tables.load_job` for Python, `figures.timeline` for notebooks.

`formats` lists the forms of `--export`.
Files by `tables.write_csv`, `perfetto.write_perfetto` and `kineto.write_kineto`; for a terminal
`text.render_text`. Imports `analysis`, `load` and `page`.
"""
