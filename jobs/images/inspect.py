"""`vjob container inspect`: the contents of an unpacked image or an image file."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vjob.jobs import process
from vjob.jobs.conf.redact import REDACTED, is_secret
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.images.image import explain_damage, find_imported, list_imported, read_squashfs
from vjob.jobs.images.store import NodeStore, base_name, is_named, show_bytes

RELEASES = ("usr/lib/os-release", "etc/os-release")
ENVIRONMENT = "etc/environment"
PYTHONS = ("usr/bin", "usr/local/bin", "opt/conda/bin")

Read = Callable[[str], str]
"""The text of a file of the image; empty where there is none."""


def inspect(name: str, store: NodeStore, cache: Path) -> dict[str, Any]:
    """Facts of an unpacked image by its name or image, or of an image file by path or reference."""
    for root in store.find_roots():
        if is_named(root, name) and root.name == base_name(root.name) and not os.path.isfile(name):
            path = Path(root.path)
            return {"kind": "unpacked", **asdict(root), **_describe_tree(path)}
    file = _find_file(name, cache)
    if file is None:
        names = [root.name for root in store.find_roots()]
        names += [item.name for item in list_imported(cache)]
        raise InputError(
            f"{name} is no unpacked image of this node, no image file and not imported; there are "
            f"{', '.join(names) or 'none'}"
        )
    return {"kind": "image", "name": file.name, "path": str(file), **_describe_file(file)}


def _find_file(name: str, cache: Path) -> Path | None:
    for path in (Path(name), cache / name):
        if path.is_file():
            return path
    try:
        return find_imported(name, os.environ)
    except InputError:
        return None


def _describe_tree(root: Path) -> dict[str, Any]:
    def read(name: str) -> str:
        try:
            fd = os.open(root / name, os.O_RDONLY | os.O_NOFOLLOW)
            with open(fd, encoding="utf-8", errors="replace") as handle:
                return handle.read()
        except OSError:
            return ""

    pythons = []
    for folder in PYTHONS:
        place = root / folder
        if place.is_dir() and not place.is_symlink():
            pythons += [f"/{folder}/{name}" for name in os.listdir(place) if is_python(name)]
    return describe(read, sorted(pythons))


def _describe_file(path: Path) -> dict[str, Any]:
    facts = read_squashfs(path)
    found: dict[str, Any] = {"bytes": path.stat().st_size, "damage": explain_damage(path)}
    if facts is None or found["damage"]:
        return found

    def read(name: str) -> str:
        return _ask("unsquashfs", "-cat", str(path), name)

    patterns = [f"{folder}/python3*" for folder in PYTHONS]
    listed = _ask("unsquashfs", "-l", str(path), *patterns).splitlines()
    names = [line.removeprefix("squashfs-root") for line in listed]
    pythons = sorted(name for name in names if is_python(name.rpartition("/")[2]))
    found.update(compression=facts.compression, entries=facts.num_entries, made=facts.made)
    return {**found, **describe(read, pythons)}


def describe(read: Read, pythons: list[str]) -> dict[str, Any]:
    """System, interpreters, and the variables that the image sets."""
    releases = [match[1] for name in RELEASES if (match := _PRETTY.search(read(name)))]
    return {
        "system": releases[0] if releases else "",
        "pythons": pythons,
        "environment": parse_environment(read(ENVIRONMENT)),
    }


_PRETTY = re.compile(r'^PRETTY_NAME="?([^"\n]*)', re.MULTILINE)


def is_python(name: str) -> bool:
    return re.fullmatch(r"python3(\.\d+)?", name) is not None


def parse_environment(text: str) -> dict[str, str]:
    """`NAME=value` lines; what looks like a secret is hidden."""
    pairs = (line.partition("=") for line in text.splitlines() if re.match(r"[A-Za-z_]\w*=", line))
    return {
        name: REDACTED if is_secret(name) else value.strip().strip("\"'")
        for name, _, value in pairs
    }


def render(found: Mapping[str, Any]) -> str:
    """One line a fact."""
    lines = []
    for key, value in found.items():
        if key == "bytes":
            value = show_bytes(value)
        elif key in ("used", "made"):
            value = time.strftime("%Y-%m-%d %H:%M", time.localtime(value))
        elif key == "environment":
            lines += [
                f"{key if not i else '':<12} {n}={v}" for i, (n, v) in enumerate(value.items())
            ]
            continue
        elif isinstance(value, list):
            value = " ".join(value)
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        if value != "":
            lines.append(f"{key.replace('is_', '').replace('_', ' '):<12} {value}")
    return "\n".join(lines)


def _ask(*command: str) -> str:
    """Output of a command; empty where it failed or is not there."""
    try:
        result = process.run(command)
    except VjobError:
        return ""
    return result.out if result.code == 0 else ""
