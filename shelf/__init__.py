"""The packages above the core: commands, screens, pages and helpers around a run.

The core (`jobs`, `reports`, `varuna_core`, `containers`) never imports this package, which has
these parts:

    commands    the command line                  host       a command on a login node
    web         live pages in a browser           screen     the live screen of `vjob status`
    trial       `vjob try`: two steps on a node   watch      alerts and actions of `vjob watch`
    doctor      checks before a job               importers  shell scripts converted to conf.yaml
    run         a program without a conf          elastic    automatic growth of a run
    view        rows and columns of screen and web
    compare.py, share.py, prune.py                compare runs, share a run, delete old runs

This package may import everything else; only `vjob` imports it.
"""
