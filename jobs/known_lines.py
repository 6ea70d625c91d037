"""The catalogue of known lines with the rows of plug-ins: `load_catalogue`.

A plug-in of the group `vjob.known_lines` names an object with `API = 1` and `ROWS`, a sequence of
`KnownLine`. Its rows follow the built-in rows of the same scope that explain something, unless a
row names the one that it precedes.
"""

from __future__ import annotations

from functools import lru_cache

from varuna_core.facts.catalogue.tables import BUILT_IN, Catalogue
from varuna_core.plugins import list_plugins, load_plugin
from varuna_core.plugins.installed import warn_once

GROUP = "vjob.known_lines"


@lru_cache(maxsize=1)
def load_catalogue() -> Catalogue:
    """Return the catalogue of known log lines: the built-in rows and those of plug-ins. Warn once
    about a plug-in whose rows cannot be used."""
    catalogue = BUILT_IN
    for name in list_plugins(GROUP):
        plugin = load_plugin(GROUP, name)
        if plugin is None:
            continue
        try:
            catalogue = catalogue.add(plugin.ROWS)
        except (TypeError, ValueError, AttributeError) as error:
            warn_once(f"plug-in {name} of {GROUP} is ignored: {error}")
    return catalogue
