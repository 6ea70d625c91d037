"""The flags of Varuna's launcher, run_varuna, as a front end: `python -m varuna_core.launch`.

`cli.main` reads the command line, `translate.build_conf` makes a conf of it (pure), which is
submitted to the machines of the list and shown to its end as `vjob run` does it
(`shelf/run/follow.py`). So its runs are runs like all others. May import every room but the
commands.

envfile   layout <- translate <- runs <- cli
"""
