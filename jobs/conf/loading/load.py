"""conf.yaml to a JobConf: the one way in. Whoever gets a JobConf from here may trust it.

All problems come at once, each with its file and line; those of keys against each other once every
key can be read. Refused: anything that would have to be guessed, such as an unknown key, a key
given twice, or a number in quotes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vjob.jobs.conf.layout import close_layout, require_number
from vjob.jobs.conf.loading.check import check_conf, find_unset, locate
from vjob.jobs.conf.loading.overrides import apply_overrides
from vjob.jobs.conf.parse import Reader
from vjob.jobs.conf.paths import resolve_paths
from vjob.jobs.conf.schema import JobConf, NodeGroup
from vjob.jobs.conf.yaml_tree import parse_tree
from vjob.jobs.errors import ConfError, Problem

log = logging.getLogger(__name__)


def read_conf(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    require_paths: bool = True,
    require_env: bool = True,
) -> JobConf:
    """Read, parse and check a conf file; ConfError with every problem found.

    `require_env=False` only warns of variables that `pass_env` names and this shell lacks.
    """
    source = str(path)
    base = Path(os.path.abspath(path)).parent
    environ = os.environ if environ is None else environ
    conf, lines = parse_conf_lines(read_text(path, source), source, base, overrides, environ)
    problems = check_conf(
        conf,
        lines,
        base=base,
        require_paths=require_paths,
        environ=environ if require_env else None,
    )
    if problems:
        raise ConfError(sort_problems(problems))
    if not require_env:
        for problem in locate(find_unset(conf, environ), lines):
            log.warning("%s; a submit from this shell would be refused", problem)
    return conf


def parse_conf(
    text: str,
    source: str,
    base: Path,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
) -> JobConf:
    """Parse a conf's text, paths relative to `base`; keys are not checked against each other."""
    return parse_conf_lines(text, source, base, overrides, environ)[0]


def parse_conf_lines(
    text: str,
    source: str,
    base: Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> tuple[JobConf, dict[str, str]]:
    """The conf, and for each key that was written its place, as check_conf wants them."""
    tree, problems = parse_tree(text, source)
    tree, set_problems = apply_overrides(tree, overrides)
    reader = Reader()
    conf = reader.read(tree)
    problems = [*problems, *set_problems, *reader.problems]
    if problems:
        raise ConfError(sort_problems(problems), is_first_round=True)
    assert isinstance(conf, JobConf), "a conf that could not be read has problems"
    resolved = resolve_paths(conf, base, os.environ if environ is None else environ)
    return add_default_group(resolved), reader.lines


def add_default_group(conf: JobConf) -> JobConf:
    """Without groups: one node with as many ranks as the layout needs, to try things here."""
    if conf.cluster.nodes:
        return conf
    parallel = close_layout(conf).parallel
    data = 1 if parallel.data == "auto" else parallel.data
    ranks = require_number(parallel.pipeline) * data * parallel.tensor
    group = NodeGroup(group="master", ranks=max(1, ranks))
    return replace(conf, cluster=replace(conf.cluster, nodes=(group,)))


def sort_problems(problems: Sequence[Problem]) -> list[Problem]:
    """By line, overrides last, each problem once: an alias can bring the same one twice."""

    def get_line(problem: Problem) -> tuple[int, int]:
        line = problem.where.rpartition(":")[2]
        return (0, int(line)) if line.isdecimal() else (1, 0)

    return sorted(dict.fromkeys(problems), key=get_line)


def read_text(path: Path, source: str) -> str:
    """ConfError where it cannot be read."""
    try:
        content = path.read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        problem = Problem(
            where=source, key="", value="", message=f"cannot be read: {error.strerror}"
        )
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"is not UTF-8 text (byte {content[error.start]:#04x})"
        problem = Problem(where=f"{source}:{line}", key="", value="", message=message)
    raise ConfError([problem])
