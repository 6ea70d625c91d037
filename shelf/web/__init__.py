"""Live pages in a browser, on this machine alone: `serve.serve_status` serves them until Ctrl-C.

May import the readers, the screen's sources and jobs/reporting; imported by commands alone.
Tabs poll `state?since=N`, and fetch the parts whose hash changed.
"""
