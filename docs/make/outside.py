"""A hook of mkdocs: what pages link to outside docs/ becomes part of the site.

The same links must work where the plain files are read, so they stay as they are there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
_LINK = re.compile(r"\]\(\.\./((?:benchmarks/results/|CHANGELOG|CONTRIBUTING)[^)#]*)")


def on_files(files: Files, config: Any) -> Files:
    """Adds each linked file under the path that it has from the root, and the search's script."""
    found: set[str] = set()
    for page in list(files.documentation_pages()):
        found |= set(_LINK.findall(page.content_string))
    for name in sorted(found):
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    script = Path(__file__).with_name("iframe-worker.js")
    files.append(File.generated(config, script.name, content=script.read_text()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links of pages that lie in docs/ itself."""
    return _LINK.sub(r"](\1", markdown)
