"""Copies that a script makes inside its container before it starts, as lines of `setup` and mounts.

A container's own files are gone to vjob, whose setup lines run outside: the copy is made in the
node's scratch folder, from where the mounts have the files, and mounted in the copy's place.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vjob.shelf.importers.bash.recording import Command, Recording

ENTERED = ("enroot", "docker", "nvidia-docker", "podman", "apptainer", "singularity")


@dataclass(kw_only=True)
class Copies:
    """The setup lines and mounts that take the place of the copies."""

    setup: list[str] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)
    """`source:target`."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Copies that are not made, each with the reason."""


def build_copies(
    commands: Sequence[Sequence[str]], mounts: Sequence[str], scratch: str | None
) -> Copies:
    """The copies among commands that run inside, in their order."""
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
            found.left_out.append((said, "the mounts do not have what it copies"))
        elif _to_host(target, sources) is not None:
            found.left_out.append((said, "it would write to a folder that is mounted"))
        elif scratch is None:
            found.left_out.append((said, "no script names a folder of the node for it"))
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
    """Commands that prepare, inside a container that this script starts; the outer ones first."""
    for launch in recording.launches:
        before = launch.texts[: len(launch.words) - len(launch.program)]
        is_entered = any(
            posixpath.basename(word) in ENTERED or word.startswith("--container-image")
            for word in before
        )
        if launch.inner is not None and is_entered:
            for inner in launch.inner.walk_recordings():
                yield from inner.setup


def _split_mount(mount: str) -> tuple[str, str]:
    source, _, rest = mount.partition(":")
    return source.rstrip("/"), rest.partition(":")[0].rstrip("/")


def _read_copy(command: Sequence[str]) -> list[str] | None:
    """The sources and the target of a `cp` of folders; None for any other command."""
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
    """The path outside; by the longest mount that it is below."""
    for target in sorted(sources, key=len, reverse=True):
        if target and (path == target or path.startswith(f"{target}/")):
            return sources[target] + path.removeprefix(target)
    return None


def _spell(path: str) -> str:
    """A path in a line of a shell, where `~` and a last `*` are the shell's."""
    return "/".join(_spell_parts(path.split("/")))


def _spell_parts(parts: Sequence[str]) -> Iterator[str]:
    for place, part in enumerate(parts):
        is_home = part == "~" and place == 0
        is_all = part in ("*", ".") and place == len(parts) - 1
        yield part if is_home or is_all or not part else shlex.quote(part)
