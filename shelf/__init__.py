"""The rooms above the core: commands, screens, pages and helpers around a run.

The core (`jobs`, `reports`, `varuna_core`, `containers`) never imports it. Each part is one room:

    commands    the words of the command line     host       a command on a login node
    web         live pages in a browser           screen     the live screen of `vjob status`
    trial       two steps on one node first       watch      alerts and actions of `vjob watch`
    doctor      what would get in the way         importers  others' shell scripts as conf.yaml
    run         a program without a conf          elastic    what grows a run by itself
    view        rows and columns of screen and web
    compare.py, share.py, prune.py                two runs side by side, for a colleague, deleted

May import everything else; nothing but `vjob` imports it.
"""
