"""The report outside a page: `tables.load_job` for Python, `figures.losses` for notebooks.

`formats` lists the forms of `--export`. Files by `tables.write_csv` and
`perfetto.write_perfetto`; for a terminal `text.render_text`. Imports `analysis`, `load` and `page`.
"""
