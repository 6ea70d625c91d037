"""Live pages in a browser, on this machine only: `serve.serve_status` serves them until Ctrl-C.

May import the readers, the screen's sources and jobs/reporting; only commands import it. Tabs poll
`state?since=N`, and fetch the parts whose hash changed.
"""
