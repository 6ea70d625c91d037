"""Make a report's content available outside its page: `tables.load_job` for Python,
`figures.losses` for notebooks.

`formats` lists the forms of `--export`. `tables.write_csv` and `perfetto.write_perfetto` write
files, and `text.render_text` renders for a terminal. Imports `analysis`, `load` and `page`.
"""
