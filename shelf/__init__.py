"""The rooms above the core: commands, screens, pages and helpers around a run.

The core (`jobs`, `reports`, `varuna_core`, `containers`) never imports it. Each part is one room:

    commands    the words of the command line     launcher   Varuna's flags, as a conf
    host        a command on a login node         screen     the live screen of `vjob status`
    web         live pages in a browser           watch      alerts and actions of `vjob watch`
    trial       two steps on one node first       importers  others' shell scripts as conf.yaml
    doctor      what would get in the way         elastic    what grows a run by itself
    run         a program without a conf          view       rows and columns of screen and web
    compare.py, share.py, prune.py                two runs side by side, for a colleague, deleted

May import everything else; nothing but `vjob` imports it.
"""
