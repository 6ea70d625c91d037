"""Hide secrets in a conf's own text, so that its copy in the run folder can be shown around."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from jobs.conf import REDACTED, is_secret


def redact_text(text: str) -> str:
    """The same text, comments and all, with each secret scalar replaced."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    spans = sorted(set(_find_secrets(root, secret=False, seen=set())), reverse=True)
    for start, end in spans:
        text = text[:start] + f'"{REDACTED}"' + text[end:]
    return text


def _find_secrets(
    node: yaml.Node | None, *, secret: bool, seen: set[tuple[int, bool]]
) -> Iterator[tuple[int, int]]:
    """Spans of scalars below a secret key. Aliases may make the graph a ring."""
    if node is None or (id(node), secret) in seen:
        return
    seen.add((id(node), secret))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            hidden = secret or (isinstance(key, yaml.ScalarNode) and is_secret(key.value))
            yield from _find_secrets(value, secret=hidden, seen=seen)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _find_secrets(item, secret=secret, seen=seen)
    elif secret and node.start_mark is not None and node.end_mark is not None:
        yield node.start_mark.index, node.end_mark.index
