"""`python -m varuna_core.facts.catalogue.page`: docs/causes.md, written from the tables."""

from __future__ import annotations

import sys
from typing import List

from varuna_core.facts.catalogue.ends import list_remedies
from varuna_core.facts.cause import End, EndCause
from varuna_core.facts.remedy import Context, render_all
from varuna_core.facts.sentences import describe_end

HEAD = """\
# Causes of an end

`end` in `record.json`, and `end.json` beside the `outcome.json` of an attempt, name why it ended:
one of the words below, with who ended it, the exit code, the signal, the rank, the node and the
evidence. The sentence is what vjob says where nothing more is known; a rank's last line, a node's
name or the words of a check make it longer. The remedies are those of the cause itself, in the
words of each kind of job; what a line of a log advises comes before them.

`make docs` writes this page.

| cause | sentence | remedies |
|---|---|---|
"""
NAMES = {
    Context.CONF: "conf",
    Context.SBATCH: "sbatch",
    Context.ALLOCATION: "inside a job",
    Context.LOCAL: "local",
    Context.MACHINES: "machines",
    Context.PYTHON: "Python",
}


def render_page() -> str:
    """The whole page."""
    return HEAD + "".join(f"{_render_row(cause)}\n" for cause in EndCause)


def _render_row(cause: EndCause) -> str:
    end = End(cause)
    groups: List[str] = []
    texts = {context: render_all(list_remedies(end), context) for context in Context}
    for text in dict.fromkeys(filter(None, texts.values())):
        names = [NAMES[context] for context in Context if texts[context] == text]
        who = "" if len(names) == len(NAMES) else f"{', '.join(names)}: "
        groups.append(f"{who}{text}".replace("|", "\\\\|"))
    return f"| {cause.value} | {describe_end(end)} | {'<br>'.join(groups) or '-'} |"


if __name__ == "__main__":
    sys.stdout.write(render_page())
