"""The rooms above the core: commands, screens, pages and helpers around a run.

The core (`jobs`, `reports`, `varuna_core`, `containers`) never imports this package. Each part is
one room:

    commands    the words of the command line     host       a command on a login node
    web         live pages in a browser           screen     the live screen of `vjob status`
    trial       two steps on one node first       watch      alerts and actions of `vjob watch`
    doctor      what would keep a job from running importers  shell scripts converted to conf.yaml
    run         a program without a conf          elastic    automatic growth of a run
    view        rows and columns of screen and web
    compare.py, share.py, prune.py                compare runs, share a run, delete old runs

This package may import everything else; only `vjob` imports it.
"""
