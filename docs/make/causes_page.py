"""Writes docs/causes.md from the tables of causes, witnesses and remedies."""

from __future__ import annotations

import sys
from pathlib import Path

from varuna_core.facts.catalogue.ends import list_remedies
from varuna_core.facts.cause import End, EndCause
from varuna_core.facts.deciding import Witness
from varuna_core.facts.remedy import Context, render_all
from varuna_core.facts.sentences import describe_end

HEAD = """\
# Causes of an end

`end` in `record.json`, and `end.json` beside the `outcome.json` of an attempt, name why it ended by
one of the words below, with who ended it, the exit code, the signal, the rank, the node and the
evidence. The sentence is for an end of which nothing more is known. The remedies are those of the
cause itself, in the words of each kind of job, after what a line of a log advises.

`make docs` writes this page; `python -m benchmarks.ends` compares it with staged ends.

## Witnesses
A witness is a source of evidence: the first one in this order that has some decides the cause. Its
evidence must be about the job, node or rank that ended, and from that time: an exception that a
program caught and printed does not count, nor the line of a rank that did not fail first, a line of
source, or one of an earlier attempt.

| | witness | where |
|---|---|---|
{witnesses}
The kernel's line about the memory of its node explains a SIGKILL. An exception ended its rank if it
is in the rank's error file, or if the rank exited 1 and its Python noted at its end that nobody had
caught it ([the hook](steps.md#where-steps-come-from)). Where no hook ran, or the program left by
`os._exit`, it is likely, and its evidence says `inferred`: the last traceback of the main thread on
standard error, with no output on standard output more than 5 seconds after it.

## Causes
| cause | sentence | remedies |
|---|---|---|
"""
WITNESSES = {
    Witness.OUTSIDE: "the scheduler, vjob or a user, who ended the job, or the job as a whole "
    "(memory, output file, batch script) | no rank and no node had failed by itself before",
    Witness.RANK: "the exit file of the rank that failed first, with its signal, exception or exit "
    "code | a rank that only reports a lost peer is taken to have failed after that peer",
    Witness.NODE: "a node or its agent | the scheduler reports it as down, others missed it, or "
    "its ranks left no exits",
    Witness.JOB: "the scheduler's last word | no rank and no node knows more",
    Witness.LINE: "a line of a log | no rank left an exit file, as in a mere folder of logs",
    Witness.SCRIPT: "the batch script's last line | no rank was started",
    Witness.RECORD: "the exit code | otherwise the cause is not known",
}
NAMES = {
    Context.CONF: "conf",
    Context.SBATCH: "sbatch",
    Context.ALLOCATION: "inside a job",
    Context.LOCAL: "local",
    Context.MACHINES: "machines",
    Context.PYTHON: "Python",
}


def render_page() -> str:
    rows = "".join(f"| {witness.value} | {WITNESSES[witness]} |\n" for witness in Witness)
    return HEAD.replace("{witnesses}", rows) + "".join(
        f"{_render_row(cause)}\n" for cause in EndCause
    )


def _render_row(cause: EndCause) -> str:
    end = End(cause)
    groups: list[str] = []
    texts = {context: render_all(list_remedies(end), context) for context in Context}
    for text in dict.fromkeys(filter(None, texts.values())):
        names = [NAMES[context] for context in Context if texts[context] == text]
        who = "" if len(names) == len(NAMES) else f"{', '.join(names)}: "
        groups.append(f"{who}{text}".replace("|", "\\|"))
    return f"| {cause.value} | {describe_end(end)} | {'<br>'.join(groups) or '-'} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render_page())
