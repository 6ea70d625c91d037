"""Read conf.yaml, with `--set` overrides, into a checked JobConf; no other code makes one.

All problems are reported at once, each with its file and line; problems between keys are found once
every key can be read. Refused: whatever would have to be guessed, such as an unknown key, a key
given twice, or a number in quotes. An override replaces its key in the tree before that is read, so
its value passes the same checks.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from varuna_core.plugins.installed import warn_once
from varuna_core.records.files import as_whole, list_files
from vjob.jobs.conf.loading.check import check_conf, find_missing_paths, find_unset
from vjob.jobs.conf.loading.check_bounds import locate
from vjob.jobs.conf.loading.compose import (
    INCLUDE,
    fill_tree,
    include_files,
    merge,
    refuse_include,
)
from vjob.jobs.conf.loading.site import (
    NO_SITE,
    NOTHING,
    Site,
    build_locked,
    check_locks,
    leave_out_misfits,
    load_site,
)
from vjob.jobs.conf.parse import ConfReader
from vjob.jobs.conf.paths import resolve_paths
from vjob.jobs.conf.redact import show
from vjob.jobs.conf.schema import JobConf, NodeGroup
from vjob.jobs.conf.world_size import close_layout, require_number
from vjob.jobs.conf.yaml_tree import (
    MAX_DEPTH,
    Items,
    Node,
    Scalar,
    Table,
    TableEntry,
    join_key,
    parse_tree,
)
from vjob.jobs.errors import ConfError, KeyProblem, Problem

WHERE = "--set"
RENAMED: Mapping[tuple[str, str], str] = {("morph", "layout"): "mode"}
"""Old names of keys, by section, which are read until 1.0 and in confs of old runs."""
_STEP = re.compile(r"[^.\[\]\s=]+|\[[0-9]{1,6}\]")
_KEY = re.compile(r"[^.\[\]\s=]+(\[[0-9]{1,6}\]|\.[^.\[\]\s=]+)*")
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReadConf:
    """A conf file after reading; its keys are not yet checked against each other."""

    path: Path
    """Path as given by the user."""
    text: str
    conf: JobConf
    """The conf, including overrides."""
    lines: Mapping[str, str]
    """The place of each written key."""
    site: Site = NO_SITE
    """Site files whose defaults are in the conf."""
    refused: tuple[Problem, ...] = ()
    """Problems of keys that differ from what the site locked."""

    @property
    def base(self) -> Path:
        """The folder that relative paths start from."""
        return Path(os.path.abspath(self.path)).parent

    def change(self, conf: JobConf, keys: Sequence[str]) -> ReadConf:
        """Return a copy with `conf`, whose keys `keys` were changed after the file was read."""
        own = {
            key: place
            for key, place in self.lines.items()
            if not key.startswith(tuple(f"{changed}{end}" for changed in keys for end in ".["))
        }
        return replace(self, conf=conf, lines={**own, **dict.fromkeys(keys, WHERE)})


def read_conf(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    require_paths: bool = True,
    require_env: bool = True,
) -> JobConf:
    """Read, parse and check a conf file; raise ConfError with every problem found."""
    read = load_conf(path, overrides, environ)
    require_valid(read, environ=environ, require_paths=require_paths, require_env=require_env)
    return read.conf


def load_conf(
    path: Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    text: str | None = None,
) -> ReadConf:
    """Read and parse a conf file; raise ConfError if a key cannot be read.

    With `text` no file is read: the path only names the conf in messages, and its folder is the
    base of relative paths.
    """
    environ = os.environ if environ is None else environ
    is_file = text is None
    text = read_text(path, str(path)) if text is None else text
    base = Path(os.path.abspath(path)).parent
    site = load_site(environ, read_text)

    def parse(over: Table = NOTHING) -> tuple[JobConf, dict[str, str]]:
        return parse_conf_lines(
            text, str(path), base, overrides, environ,
            is_file=is_file, under=site.defaults, over=over,
        )  # fmt: skip

    conf, lines = parse()
    while site.defaults.entries:
        problems = check_conf(conf, lines, require_paths=False)
        fitting = leave_out_misfits(site, problems)
        if fitting is site:
            break
        site = fitting
        conf, lines = parse()
    refused: tuple[Problem, ...] = ()
    if site.locks:
        refused = tuple(check_locks(site, conf, parse(build_locked(site))[0], lines))
    return ReadConf(path=path, text=text, conf=conf, lines=lines, site=site, refused=refused)


def require_valid(
    read: ReadConf,
    *,
    environ: Mapping[str, str] | None = None,
    require_paths: bool = True,
    require_env: bool = True,
) -> None:
    """Check keys against each other; raise ConfError with every problem found.

    A dry run uses `require_env=False`, which only warns of variables in `pass_env` that this shell
    lacks, and of missing files outside the conf's folder: they may exist only on the cluster.
    """
    environ = os.environ if environ is None else environ
    problems = [*read.refused]
    problems += check_conf(
        read.conf,
        read.lines,
        base=read.base,
        require_paths=require_paths and require_env,
        environ=environ if require_env else None,
    )
    far: list[KeyProblem] = []
    if require_paths and not require_env:
        missing = list(find_missing_paths(read.conf, read.base))
        far = [problem for problem in missing if is_far(problem, read.base)]
        problems += locate([problem for problem in missing if problem not in far], read.lines)
    if problems:
        raise ConfError(sort_problems(problems))
    if not require_env:
        for problem in locate(find_unset(read.conf, environ), read.lines):
            log.warning("%s; a submit from this shell would be refused", problem)
        for problem in locate(far, read.lines):
            log.warning("%s; a submit from this machine would be refused", problem)


def is_far(problem: KeyProblem, base: Path) -> bool:
    """Return True for a missing file outside the conf's folder, except one that a dry run reads."""
    key, value, _ = problem
    return key != "program.config" and not Path(str(value)).is_relative_to(base)


def parse_conf(
    text: str,
    source: str,
    base: Path,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
) -> JobConf:
    """Parse a conf's text, with paths relative to `base`, without checks between keys."""
    return parse_conf_lines(text, source, base, overrides, environ)[0]


def parse_conf_lines(
    text: str,
    source: str,
    base: Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    is_file: bool = False,
    under: Table = NOTHING,
    over: Table = NOTHING,
) -> tuple[JobConf, dict[str, str]]:
    """Return the conf and, for check_conf, the place of each written key.

    With `is_file`, other files may be included; the conf of a run includes none. Values in `under`
    fill keys that the conf lacks, and values in `over` override all others.
    """
    environ = os.environ if environ is None else environ
    tree, problems = build_tree(
        text, source, base, overrides, environ, is_file=is_file, under=under, over=over
    )
    reader = ConfReader()
    conf = reader.read(tree)
    refused = {problem.key for problem in problems if "${" in problem.value}
    problems += [one for one in reader.problems if one.key not in refused]
    if problems:
        raise ConfError(sort_problems(problems), is_first_round=True)
    assert isinstance(conf, JobConf), "without problems, the reader returns a conf"
    return complete_groups(resolve_paths(conf, base, environ)), reader.lines


def build_tree(
    text: str,
    source: str,
    base: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    *,
    is_file: bool,
    under: Table = NOTHING,
    over: Table = NOTHING,
) -> tuple[Node, list[Problem]]:
    """Return a conf's tree with includes merged, overrides applied and references filled."""
    tree, problems = parse_tree(text, source)
    if is_file:
        tree, more = include_files(tree, source, base, read_text, environ)
    else:
        tree, more = refuse_include(tree)
    problems += more
    if under.entries and isinstance(tree, Table):
        tree = merge(under, tree)
    tree, more = apply_overrides(tree, overrides)
    problems += more
    tree = rename_keys(tree, is_told=is_file)
    tree, more = fill_tree(merge(tree, over) if over.entries else tree)
    return tree, [*problems, *more]


def rename_keys(tree: Node, *, is_told: bool) -> Node:
    """Return the tree with keys of `RENAMED` renamed; with `is_told`, log a warning for each of
    them."""
    for (section, old), new in RENAMED.items():
        entry = tree.entries.get(section) if isinstance(tree, Table) else None
        if entry is None or not isinstance(entry.node, Table) or old not in entry.node.entries:
            continue
        assert isinstance(tree, Table)
        if is_told:
            place = entry.node.entries[old].where
            warn_once(f"{place}: {section}.{old} was renamed: write {section}.{new}")
        keys = {new if name == old else name: one for name, one in entry.node.entries.items()}
        inside = replace(entry, node=Table(entries=keys, where=entry.node.where))
        tree = Table(entries={**tree.entries, section: inside}, where=tree.where)
    return tree


def complete_groups(conf: JobConf) -> JobConf:
    """Name the groups without a name; without groups, add a node with the layout's ranks."""
    groups = conf.cluster.nodes
    if not groups:
        parallel = close_layout(conf).parallel
        data = 1 if parallel.data == "auto" else parallel.data
        ranks = require_number(parallel.pipeline) * data * parallel.tensor
        groups = (NodeGroup(ranks=max(1, ranks)),)
    named = tuple(
        group if group.group else replace(group, group=f"group{index}" if index else "master")
        for index, group in enumerate(groups)
    )
    return replace(conf, cluster=replace(conf.cluster, nodes=named))


def sort_problems(problems: Sequence[Problem]) -> list[Problem]:
    """Sort problems by file and line, overrides last, and drop duplicates (from aliases)."""

    def get_line(problem: Problem) -> tuple[int, str, int]:
        name, _, line = problem.where.rpartition(":")
        return (0, name, as_whole(line) or 0) if line.isdecimal() else (1, "", 0)

    return sorted(dict.fromkeys(problems), key=get_line)


def read_text(path: Path, source: str) -> str:
    """Read the text of a conf file; raise ConfError if that is not possible."""
    try:
        if path.suffix in SCRIPTS:
            raise _UnusableError(SCRIPTS[path.suffix].format(path.name))
        if path.is_dir():
            raise _UnusableError(_explain_folder(path))
        content = _read_file(path)
        return content.decode("utf-8-sig")
    except _UnusableError as error:
        problem = Problem(where=source, key="", value="", message=str(error))
    except OSError as error:
        problem = Problem(
            where=source, key="", value="", message=f"cannot be read: {error.strerror}"
        )
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"is not UTF-8 text (byte {content[error.start]:#04x})"
        problem = Problem(where=f"{source}:{line}", key="", value="", message=message)
    raise ConfError([problem])


class _UnusableError(Exception):
    """Raised for an override that cannot be applied, or a file that cannot be a conf."""


SCRIPTS = {
    ".py": "is a script, not a conf: `vjob run {0}` runs it; add `--print-conf` to get a conf",
    ".sh": "is a shell script, not a conf: `vjob run {0}` runs it on this machine, "
    "`vjob init --from {0} > conf.yaml` translates it",
}
MOST_BYTES = 8 << 20
"""Size limit of a conf in bytes; a larger file is probably something else."""


def _explain_folder(path: Path) -> str:
    found = [one for one in list_files(path) if one.suffix in (".yaml", ".yml")]
    such = f", such as {found[0]}" if found else ""
    return f"is a folder, not a conf: name a file in it{such}"


def _read_file(path: Path) -> bytes:
    """Read a regular file, or a pipe that has a writer; raise _UnusableError for anything else, and
    for more than MOST_BYTES."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb", buffering=0) as handle:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise _UnusableError("is a device, not a file")
        os.set_blocking(fd, stat.S_ISFIFO(mode))  # /proc/kmsg is a regular file that never ends
        content = b""
        while more := handle.read(1 << 20):
            content += more
            if len(content) > MOST_BYTES:
                raise _UnusableError(f"is larger than {MOST_BYTES >> 20} MB, not a conf")
        if not content and stat.S_ISFIFO(mode):
            raise _UnusableError("is a pipe that nobody writes to")
    return content


def apply_overrides(tree: Node, overrides: Sequence[str]) -> tuple[Node, list[Problem]]:
    """Return the tree with the overrides applied; the last of two for one key wins."""
    problems: list[Problem] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not _KEY.fullmatch(key):
            message = "write --set key=value, such as --set train.steps=100"
            problems.append(Problem(where=WHERE, key=show("", override), value="", message=message))
            continue
        try:
            value, noted = parse_tree(text, WHERE)
            problems.extend(noted)
            steps = _STEP.findall(key)
            if steps[0] == INCLUDE:
                raise _UnusableError("is read from the conf file only; set the included keys")
            if len(steps) > MAX_DEPTH:
                raise _UnusableError(f"nested more than {MAX_DEPTH} levels deep")
            tree = _replace(tree, steps, value, "")
        except ConfError as error:
            message = error.problems[-1].message
            problems.append(Problem(where=WHERE, key=key, value=show(key, text), message=message))
        except _UnusableError as error:
            shown = show(key, value)
            problems.append(Problem(where=WHERE, key=key, value=shown, message=str(error)))
    return tree, problems


def _replace(node: Node, steps: Sequence[str], value: Node, path: str) -> Node:
    """Return a copy of the node with a new value at a path; aliases may share nodes."""
    if not steps:
        return value
    step, rest = steps[0], steps[1:]
    if step.startswith("["):
        return _replace_item(node, int(step[1:-1]), rest, value, path)
    if isinstance(node, Scalar) and node.is_null:
        node = Table(entries={}, where=WHERE)
    if not isinstance(node, Table):
        kind = "a list; give an index" if isinstance(node, Items) else f'"{show(path, node)}"'
        raise _UnusableError(f"{path or 'the conf'} is {kind}, so it has no key {step}")
    old = node.entries.get(step)
    inside: Node = old.node if old is not None else Table(entries={}, where=WHERE)
    if old is None and rest and rest[0].startswith("["):
        inside = Items(items=(), where=WHERE)
    new = _replace(inside, rest, value, join_key(path, step))
    where = old.where if old is not None and rest else WHERE
    entry = TableEntry(node=new, where=where)
    return Table(entries={**node.entries, step: entry}, where=node.where)


def _replace_item(node: Node, index: int, rest: Sequence[str], value: Node, path: str) -> Node:
    if not isinstance(node, Items):
        raise _UnusableError(f"{path or 'the conf'} is not a list")
    if not node.items and index == 0 and rest:  # a conf may leave its groups out
        node = Items(items=(Table(entries={}, where=WHERE),), where=WHERE)
    if index >= len(node.items):
        count = len(node.items)
        raise _UnusableError(f"{path} has {count} entries, counted from 0")
    items = list(node.items)
    items[index] = _replace(items[index], rest, value, f"{path}[{index}]")
    return Items(items=tuple(items), where=node.where)
