"""The report outside a page: `text.render_text`, `tables.write_csv`, `perfetto.write_perfetto`.

Imports `analysis`, `load` and `page.sections`.
"""
