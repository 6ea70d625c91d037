"""Plug-ins in this copy of varuna_core: None in an installed one, rows of `Plugin` in a bundle."""

from __future__ import annotations

from typing import Optional, Tuple

PLUGINS: Optional[Tuple[Tuple[str, str, str, str], ...]] = None
"""A node has no other plug-ins, whatever its own Python has installed."""
