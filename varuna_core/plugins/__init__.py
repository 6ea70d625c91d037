"""Extension points at which other distributions add parts, found by name.

    seam.py       Seam: the built-in rows of one group, then its plug-ins; `load_plugin`
    installed.py  `list_installed`: the plug-ins that metadata names, read without importing them
    carried.py    those that a bundle carries to the nodes; filled in by `collect_for_nodes`

A plug-in is an entry point of one of GROUPS. It names an object with `API = 1`. Built-in parts are
rows of a static table and no entry points, since a vjob that runs from a checkout has no metadata.

Imports the records and the standard library, and runs on Python 3.8: the agent uses it too.
"""

from varuna_core.plugins.installed import GROUPS, Plugin, list_plugins
from varuna_core.plugins.seam import API, BuiltIn, Seam, load_plugin

__all__ = ["API", "GROUPS", "BuiltIn", "Plugin", "Seam", "list_plugins", "load_plugin"]
