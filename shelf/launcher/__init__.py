"""The flags of Varuna's launcher, run_varuna, as a front end: `python -m varuna_core.launch`.

`cli.main` reads the command line, `translate.build_conf` makes a conf of it (pure), which is
submitted as `vjob submit` does it, to the machines of the list; `follow.follow_run` shows the run
to its end. So its runs are runs like all others. May import every room but the commands.

envfile   layout <- translate   follow <- runs <- cli
"""
