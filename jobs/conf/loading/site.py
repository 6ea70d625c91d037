"""Read site files: defaults that an administrator, and then a user, set for every conf; and queues.

    /etc/vjob/site.yaml ─► ~/.config/vjob/site.yaml ─► conf.yaml ─► --set
     (VJOB_SITE=path)        (XDG_CONFIG_HOME)

Both are read only together with a conf; no other command depends on them. A default counts as if it
were written in the conf, but is dropped if it does not fit the conf.
"""

from __future__ import annotations

import fnmatch
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from vjob.jobs.conf.fates import (
    NEEDS,
    find_default,
    find_variable,
    goes_by_reference,
    list_leaves,
)
from vjob.jobs.conf.loading.check_bounds import check_numbers, check_section, locate, locate_line
from vjob.jobs.conf.loading.check_cluster import GPUS, check_cluster, check_groups
from vjob.jobs.conf.loading.choose_queue import list_gpus
from vjob.jobs.conf.loading.compose import ReadText, merge
from vjob.jobs.conf.parse import FAILED, ConfReader, suggest
from vjob.jobs.conf.redact import show
from vjob.jobs.conf.references import find_value, spell_value
from vjob.jobs.conf.schema import OWN_MODEL, JobConf, Queue, SiteFile, SiteSection
from vjob.jobs.conf.yaml_tree import Node, Scalar, Table, TableEntry, join_key, parse_tree
from vjob.jobs.errors import ConfError, InputError, KeyProblem, Problem

SITE = "/etc/vjob/site.yaml"
DEFAULTS = "defaults"
NOTHING = Table(entries={}, where="")
_SAMPLE = """\
name: site
program: {script: site.py}
container: {image: site.sqsh}
cluster: {nodes: [{group: site}]}
"""
"""A conf against which defaults are checked; most keys have an effect in it."""


@dataclass(frozen=True, kw_only=True)
class Lock:
    """A key whose value users may not change."""

    sentence: str
    """The administrator's explanation."""
    where: str


@dataclass(frozen=True, kw_only=True)
class Site:
    """The settings that apply on this machine and its cluster, merged from the site's file and the
    user's file."""

    files: Mapping[str, str] = field(default_factory=dict)
    """Source (site or user) of each file that was read, keyed by path."""
    cluster: str = ""
    message: str = ""
    defaults: Table = NOTHING
    fixed: Table = NOTHING
    """Defaults of the site's file alone; locked keys have their values from here."""
    locks: Mapping[str, Lock] = field(default_factory=dict)
    queues: Mapping[str, Queue] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    """Keys of defaults that do not fit the conf."""

    def find_origin(self, where: str) -> str:
        """Return `site` or `user` for a place in one of their files, else an empty text."""
        return self.files.get(where.rpartition(":")[0], "")

    def leave_out(self, *keys: str) -> Site:
        defaults = _drop(self.defaults, frozenset(keys), "")
        return replace(self, defaults=defaults, left_out=self.left_out.union(keys))


NO_SITE = Site()


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of a value that the conf does not write."""

    value: str
    source: str
    """Source of the value: site, user, chosen or default."""
    where: str = ""
    """File and line, or the reason for a choice."""


def list_files(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the site files that exist or that VJOB_SITE names, with their source."""
    found = {}
    named = environ.get("VJOB_SITE")
    if named or (named is None and os.path.exists(SITE)):
        found[named or SITE] = "site"
    home = environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(home):
        home = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    own = os.path.join(home, "vjob", "site.yaml")
    if os.path.exists(own):
        found.setdefault(own, "user")
    return found


def load_site(environ: Mapping[str, str], read_text: ReadText, host: str = "") -> Site:
    """Load this machine's files; raise ConfError with path and line of a problem."""
    site = Site()
    for path, source in list_files(environ).items():
        try:
            file = _parse_file(read_text(Path(path), path), path, source)
        except ConfError as error:
            raise ConfError(error.problems, what=path) from None
        name = _choose_cluster(file, environ, host or socket.gethostname())
        for part in (file.parts[""], *((file.parts[name],) if name else ())):
            site = _lay_over(site, part, source)
        site = replace(site, files={**site.files, path: source}, cluster=name or site.cluster)
    return site


@dataclass(frozen=True, kw_only=True)
class _Part:
    section: SiteSection
    defaults: Table
    locks: Mapping[str, Lock]


@dataclass(frozen=True, kw_only=True)
class _File:
    path: str
    parts: Mapping[str, _Part]
    """Parts of a file by cluster; an empty name stands for all clusters."""
    hosts: Mapping[str, tuple[str, ...]]


def _lay_over(site: Site, part: _Part, source: str) -> Site:
    defaults, fixed = merge(site.defaults, part.defaults), site.fixed
    if source == "site":
        fixed = merge(fixed, part.defaults)  # type: ignore[assignment]  # two mappings make one
    assert isinstance(defaults, Table) and isinstance(fixed, Table)
    return replace(
        site,
        message=part.section.message or site.message,
        defaults=defaults,
        fixed=fixed,
        locks={**site.locks, **part.locks},
        queues={**site.queues, **part.section.queues},
    )


def _choose_cluster(file: _File, environ: Mapping[str, str], host: str) -> str:
    named = environ.get("VJOB_CLUSTER", "")
    if named:
        if file.hosts and named not in file.hosts:
            known = ", ".join(file.hosts)
            raise InputError(f"VJOB_CLUSTER is {named}, and {file.path} has the clusters {known}")
        return named if named in file.hosts else ""
    for name, hosts in file.hosts.items():
        short = host.partition(".")[0]
        if any(fnmatch.fnmatchcase(found, one) for found in (host, short) for one in hosts):
            return name
    return ""


class _SiteReader(ConfReader):
    """Reader of a site's file, which has other keys than a conf."""

    def suggest_key(self, parent: str, name: str, node: Node, hints: Mapping[str, Any]) -> str:
        is_section = parent == "" or parent.startswith("clusters.")
        return suggest(name, [*([DEFAULTS] if is_section else []), *hints])


@lru_cache(maxsize=8)
def _parse_file(text: str, path: str, source: str) -> _File:
    """Parse and check a file, cached since each run of a sweep reads it."""
    tree, problems = parse_tree(text, path)
    tree = NOTHING if isinstance(tree, Scalar) and tree.is_null else tree
    if not isinstance(tree, Table):
        message = "a site file must be a mapping of keys"
        problem = Problem(where=f"{path}:1", key="", value="", message=message)
        raise ConfError([*problems, problem])
    bare, defaults = _take_defaults(tree, problems)
    reader = _SiteReader()
    file = reader.read_record(bare, SiteFile, "")
    problems += reader.problems
    for key, table in defaults.items():
        problems += _check_defaults(table, path, key)
    if file is FAILED or problems:
        raise ConfError(problems)
    parts = {}
    for name, section in {"": file, **file.clusters}.items():
        key = f"clusters.{name}" if name else ""
        locked = join_key(key, "locked")
        locks = {
            word: Lock(sentence=sentence, where=reader.lines[f"{locked}.{word}"])
            for word, sentence in section.locked.items()
        }
        own = defaults.get(join_key(key, DEFAULTS), NOTHING)
        parts[name] = _Part(section=section, defaults=own, locks=locks)
        problems += locate(_check_section(section, key, source), reader.lines)
    if problems:
        raise ConfError(problems)
    hosts = {name: cluster.hosts for name, cluster in file.clusters.items()}
    return _File(path=path, parts=parts, hosts=hosts)


def _take_defaults(tree: Table, problems: list[Problem]) -> tuple[Table, dict[str, Table]]:
    """Split the tree of a site file: return the tree without its `defaults` sections, and these
    sections by key."""
    found: dict[str, Table] = {}

    def take(table: Table, parent: str) -> Table:
        entries = dict(table.entries)
        entry = entries.pop(DEFAULTS, None)
        key = join_key(parent, DEFAULTS)
        if entry is not None and isinstance(entry.node, Table):
            found[key] = entry.node
        elif entry is not None:
            message = "must be a mapping, with the keys of a conf"
            problems.append(Problem(where=entry.where, key=key, value="", message=message))
        return Table(entries=entries, where=table.where)

    bare = take(tree, "")
    clusters = bare.entries.get("clusters")
    if clusters is None or not isinstance(clusters.node, Table):
        return bare, found
    entries = {
        name: replace(one, node=take(one.node, f"clusters.{name}"))
        if isinstance(one.node, Table)
        else one
        for name, one in clusters.node.entries.items()
    }
    node = Table(entries=entries, where=clusters.node.where)
    return replace(bare, entries={**bare.entries, "clusters": replace(clusters, node=node)}), found


def _check_defaults(table: Table, path: str, key: str) -> list[Problem]:
    """Return the problems of a file's defaults that do not depend on the conf."""
    reader = ConfReader()
    conf = reader.read(merge(parse_tree(_SAMPLE, "")[0], table))
    problems = reader.problems
    if conf is not FAILED and not problems:
        findings = [*check_numbers(conf), *check_groups(conf), *check_cluster(conf)]
        problems = locate(findings, reader.lines)
    return [
        replace(one, key=join_key(key, one.key))
        for one in problems
        if one.where.rpartition(":")[0] == path
    ]


def _check_section(section: SiteSection, key: str, source: str) -> Iterator[KeyProblem]:
    for word, sentence in section.locked.items():
        place = f"{join_key(key, 'locked')}.{word}"
        known = [one for one in list_leaves() if "[]" not in one]
        if source != "site":
            yield place, sentence, "only the site file can lock keys"
        elif word not in known and word.rpartition(".")[0] not in known:
            yield place, sentence, f"cannot be locked; {suggest(word, known, what='keys')}"
    for name, queue in section.queues.items():
        place = f"{join_key(key, 'queues')}.{name}"
        yield from check_section(queue, place)
        for gpus in list_gpus(queue):
            if not GPUS.fullmatch(gpus):
                yield f"{place}.gpus", gpus, "must be a type and a number such as a100:4"


def list_default_keys(table: Table, parent: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys set in a table of defaults, each with its place."""
    leaves = list_leaves()
    for name, entry in table.entries.items():
        key = join_key(parent, name)
        if isinstance(entry.node, Table) and key not in leaves:
            yield from list_default_keys(entry.node, key)
        else:
            yield key, entry.where


def leave_out_misfits(site: Site, problems: Iterable[Problem]) -> Site:
    """Return the site without the defaults that do not fit this conf, such as a container key if it
    has no container; the same object if all fit."""
    wrong = {one.key.partition("[")[0] for one in problems if site.find_origin(one.where)}
    keys = {key for key, _ in list_default_keys(site.defaults)}
    misfits = frozenset(key for key in keys if key in wrong or key.rpartition(".")[0] in wrong)
    if not misfits:
        return site
    return site.leave_out(*misfits)


def _drop(table: Table, keys: frozenset[str], parent: str) -> Table:
    entries = {}
    for name, entry in table.entries.items():
        key = join_key(parent, name)
        if key in keys:
            continue
        node = entry.node
        if isinstance(node, Table) and any(one.startswith(f"{key}.") for one in keys):
            node = _drop(node, keys, key)
        entries[name] = TableEntry(node=node, where=entry.where)
    return Table(entries=entries, where=table.where)


def build_locked(site: Site) -> Table:
    """Return the locked keys for which the site has a default, with the default."""
    keys = {key for key, _ in list_default_keys(site.fixed)}
    kept = {key for key in keys if key in site.locks} - site.left_out
    kept |= {key for key in keys if any(lock.startswith(f"{key}.") for lock in site.locks)}
    return _drop(site.fixed, frozenset(keys - kept), "")


def check_locks(
    site: Site, conf: JobConf, fixed: JobConf, lines: Mapping[str, str]
) -> list[Problem]:
    """Return a problem, in the site's words, for each locked key that differs from `fixed`."""
    problems = []
    for key, lock in site.locks.items():
        is_written = any(one == key or one.startswith(f"{key}.") for one in lines)
        if key in site.left_out or not is_written:
            continue
        value, wanted = _find(conf, key), _find(fixed, key)
        if not _has(site.fixed, key):
            wanted = find_default(key) if key in list_leaves() else None
        if value != wanted:
            shown = "no value" if wanted is None else show(key, spell_value(wanted))
            found = Problem(
                where=locate_line(lines, key),
                key=key,
                value=show(key, value),
                message=f"{lock.sentence} ({lock.where} locks it at {shown})",
            )
            problems.append(found)
    return problems


def _find(conf: JobConf, key: str) -> Any:
    try:
        return find_value(conf, key)
    except LookupError:
        return None


def _has(table: Node, key: str) -> bool:
    for name in key.split("."):
        entry = table.entries.get(name) if isinstance(table, Table) else None
        if entry is None:
            return False
        table = entry.node
    return True


def list_origins(
    conf: JobConf, lines: Mapping[str, str], site: Site, queues: Mapping[str, str]
) -> dict[str, Origin]:
    """Return the origin of each value that the conf does not write, by key.

    Defaults without a value, and those without a meaning for the conf's program, are left out.
    """
    found: dict[str, Origin] = {}
    for key in list_leaves():
        if key == "cluster.nodes" or "[]" in key:
            continue
        value = _find(conf, key)
        if isinstance(value, Mapping):
            for name, inner in value.items():
                one = join_key(key, name)
                _add_origin(found, one, inner, lines.get(one, ""), site)
        elif key in lines:
            _add_origin(found, key, value, lines[key], site)
        elif value not in (None, (), "") and _counts(conf, key, lines):
            found[key] = Origin(value=show(key, spell_value(value)), source="default")
    for index, group in enumerate(conf.cluster.nodes):
        if group.group in queues:
            key = f"cluster.nodes[{index}].queue"
            reason = queues[group.group]
            found[key] = Origin(value=str(group.queue), source="chosen", where=reason)
    return found


def _add_origin(found: dict[str, Origin], key: str, value: object, where: str, site: Site) -> None:
    source = site.find_origin(where)
    if source:
        found[key] = Origin(value=show(key, spell_value(value)), source=source, where=where)


def _counts(conf: JobConf, key: str, lines: Mapping[str, str]) -> bool:
    """Return True if a key of the site file affects this conf; False for a default that is never
    passed to its program."""
    kind = conf.program.kind
    is_unwritten = kind in OWN_MODEL and find_variable(key) is not None
    if key.startswith("program.") or is_unwritten or goes_by_reference(kind, key):
        return False
    switches = NEEDS.get(key, ())
    return not switches or any(switch in lines for switch in switches)
