"""Resolve the image of a conf's container: a file of some kind, a folder, or a registry reference.

An imported reference stands for its file. Refused: a reference that was not imported, if the
runtime only starts files, and a squashfs file that is invalid or truncated.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from varuna_core.records.files import list_files, locate_cache, open_file
from vjob.containers.reference import BadReference, Reference, parse_reference
from vjob.containers.runtime import ImageKind
from vjob.jobs.conf.schema import Container
from vjob.jobs.errors import InputError
from vjob.jobs.images.runtimes import list_runtimes

log = logging.getLogger(__name__)
SUFFIXES = {
    ".sqsh": ImageKind.SQUASHFS,
    ".sqfs": ImageKind.SQUASHFS,
    ".squashfs": ImageKind.SQUASHFS,
    ".sif": ImageKind.SIF,
    ".tar": ImageKind.ARCHIVE,
    ".tar.gz": ImageKind.ARCHIVE,
    ".tgz": ImageKind.ARCHIVE,
    ".tar.xz": ImageKind.ARCHIVE,
    ".tar.zst": ImageKind.ARCHIVE,
}
_SUPERBLOCK = struct.Struct("<4sIIIIHHHHHHQQ")
"""Magic, inodes, time, block size, fragments, compressor, ... root inode, bytes used (4.0)."""
_MAGIC = b"hsqs"


def classify_image(image: str) -> ImageKind:
    """Return the kind of an image by its name and by the local file, which may be missing here."""
    if not image.startswith("/"):
        return ImageKind.REFERENCE
    for suffix, kind in SUFFIXES.items():
        if image.endswith(suffix):
            return kind
    return ImageKind.SQUASHFS if os.path.isfile(image) else ImageKind.FOLDER


def stamp_image(image: str) -> str:
    """Return a stamp that changes with the image file; empty if it is not here."""
    try:
        facts = os.stat(image)
    except OSError:
        return ""
    return f"{facts.st_size}-{facts.st_mtime_ns}"


def resolve_image(container: Container, environ: Mapping[str, str]) -> Container:
    """Return the container section with its image as nodes will see it."""
    image = container.image
    if image is None or container.runtime == "none":
        return container
    kind = classify_image(image)
    if kind is ImageKind.SQUASHFS:
        check_file(image)
    if kind is not ImageKind.REFERENCE:
        return container
    takers = [kind for kind in list_runtimes().values() if ImageKind.REFERENCE in kind.kinds]
    if container.runtime in [kind.name for kind in takers]:
        return container
    path = find_imported(image, environ)
    if path is not None:
        check_file(str(path))
        return replace(container, image=str(path))
    how = f"vjob container import {shlex.quote(image)}"
    automatic = [kind.name for kind in takers if kind.is_automatic]
    if container.runtime == "auto" and automatic:
        log.warning(
            "container.image %s is not imported: only nodes with %s can run it; for enroot and "
            "charliecloud run `%s` first",
            image,
            " or ".join(automatic),
            how,
        )
        return container
    what = "enroot" if container.runtime == "auto" else container.runtime
    raise InputError(
        f"container.image {image} is not imported, and {what} starts image files; fetch it once "
        f"with\n  {how}"
    )


def check_file(image: str) -> None:
    """Raise InputError for a local image file that is invalid or truncated."""
    if not os.path.isfile(image):
        return  # on the nodes alone: their preflight looks
    try:
        damage = explain_damage(Path(image))
    except OSError as error:
        damage = f"cannot be read: {error.strerror}"
    if damage:
        raise InputError(f"container.image {image} {damage}")


@dataclass(frozen=True, kw_only=True)
class Imported:
    """An image file in the cache."""

    name: str
    path: str
    bytes: int
    time: float


def find_imported(image: str, environ: Mapping[str, str]) -> Path | None:
    """Return the file that an import of this reference made; None if there is none."""
    path = locate_cache("images", environ) / read_reference(image).file_name
    return path if path.is_file() else None


def list_imported(cache: Path) -> list[Imported]:
    """Return every image file in the cache."""
    found = []
    for path in list_files(cache, "*.sqsh"):
        if path.name.startswith("."):
            continue
        with contextlib.suppress(OSError):  # removed meanwhile
            facts = path.stat()
            found.append(
                Imported(name=path.name, path=str(path), bytes=facts.st_size, time=facts.st_mtime)
            )
    return found


def read_reference(text: str) -> Reference:
    """Parse a registry reference; raise InputError if it is none."""
    try:
        return parse_reference(text)
    except BadReference as error:
        raise InputError(str(error)) from None


def read_full_size(path: Path) -> int | None:
    """Return the bytes that a squashfs file has at least once it is complete, as its superblock
    says, which mksquashfs writes last; None if it is no squashfs image, OSError if unreadable."""
    with open_file(path) as handle:
        data = handle.read(_SUPERBLOCK.size)
    fields = _SUPERBLOCK.unpack(data) if len(data) == _SUPERBLOCK.size else ()
    return fields[12] if fields and fields[0] == _MAGIC and fields[9] == 4 else None


def explain_damage(path: Path) -> str:
    """Describe the damage of an image file, as far as its first bytes tell; empty if none."""
    full_size, size = read_full_size(path), path.stat().st_size
    if full_size is None:
        return "is not a squashfs image"
    if size < full_size:
        return f"is cut short: it has {size} of {full_size} bytes; copy or make it again"
    return ""
