"""Convert copies that a script makes inside its container into lines of `setup` and mounts.

vjob's setup lines run outside of the container, where its files are not accessible: the files are
copied to the node's scratch folder from the mounted folders, and mounted at the copy's target.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vjob.shelf.importers.bash.recording import Command, Recording


@dataclass(kw_only=True)
class Copies:
    """The setup lines and mounts that replace the copies."""

    setup: list[str] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)
    """Mounts as `source:target`."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Copies that cannot be converted, each with the reason."""


def build_copies(
    commands: Sequence[Sequence[str]], mounts: Sequence[str], scratch: str | None
) -> Copies:
    """Convert the copies among commands that run inside a container, in their order."""
    found = Copies()
    sources = {target: source for source, target in map(_split_mount, mounts)}
    made: dict[str, str] = {}
    for command in commands:
        words = _read_copy(command)
        if words is None:
            continue
        *given, target = words
        said = shlex.join(command)
        hosts = [_to_host(path, {**sources, **made}) for path in given]
        place = _to_host(target, made)
        if any(path is None for path in hosts):
            found.left_out.append((said, "the copied files are not in the mounts"))
        elif _to_host(target, sources) is not None:
            found.left_out.append((said, "the target is in a mounted folder"))
        elif scratch is None:
            found.left_out.append((said, "no script names a node's folder for the copy"))
        else:
            if place is None:
                place = made[target] = f"{scratch.rstrip('/')}/copies{target}"
                found.mounts.append(f"{place}:{target}")
                parent = _spell(posixpath.dirname(place))
                found.setup.append(f"rm -rf {_spell(place)} && mkdir -p {parent}")
            paths = " ".join(map(_spell, filter(None, hosts)))
            found.setup.append(f"cp -r {paths} {_spell(place)}")
    return found


def list_inside(recording: Recording) -> Iterator[Command]:
    """Yield preparing commands that run in a container started by this script, outermost first."""
    for launch in recording.launches:
        if launch.inner is not None and launch.is_contained:
            for inner in launch.inner.walk_recordings():
                yield from inner.setup


def _split_mount(mount: str) -> tuple[str, str]:
    source, _, rest = mount.partition(":")
    return source.rstrip("/"), rest.partition(":")[0].rstrip("/")


def _read_copy(command: Sequence[str]) -> list[str] | None:
    """Return the sources and the target of a recursive `cp`; None for any other command."""
    if not command or posixpath.basename(command[0]) != "cp":
        return None
    options = [word for word in command[1:] if word.startswith("-")]
    paths = [word for word in command[1:] if not word.startswith("-")]
    is_whole = any(
        word in ("--recursive", "--archive")
        or (word[1:].isalpha() and not {"r", "R", "a"}.isdisjoint(word))
        for word in options
    )
    is_plain = len(paths) > 1 and all(path.startswith("/") for path in paths)
    return [path.rstrip("/") for path in paths] if is_whole and is_plain else None


def _to_host(path: str, sources: Mapping[str, str]) -> str | None:
    """Return the path outside of the container, by the longest mount that contains the path."""
    for target in sorted(sources, key=len, reverse=True):
        if target and (path == target or path.startswith(f"{target}/")):
            return sources[target] + path.removeprefix(target)
    return None


def _spell(path: str) -> str:
    """Quote a path for the shell, except a leading `~` and a final `*`, which the shell expands."""
    return "/".join(_spell_parts(path.split("/")))


def _spell_parts(parts: Sequence[str]) -> Iterator[str]:
    for place, part in enumerate(parts):
        is_home = part == "~" and place == 0
        is_all = part in ("*", ".") and place == len(parts) - 1
        yield part if is_home or is_all or not part else shlex.quote(part)
