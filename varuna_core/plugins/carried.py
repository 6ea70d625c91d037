"""List this copy's carried plug-ins: None if installed, rows of `Plugin` in a bundle."""

from __future__ import annotations

from typing import Optional, Tuple

PLUGINS: Optional[Tuple[Tuple[str, str, str, str], ...]] = None
"""Plug-ins of a bundle. A node uses no others, whatever its own Python has installed."""
