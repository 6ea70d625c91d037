"""What a conf's `container.image` is: a file of some kind, a folder, or a reference.

A reference that was imported stands for its file. Refuses one that nobody imported where the
runtime starts files alone, and a file that is visibly no image.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from vjob.containers.registry import RUNTIMES
from vjob.containers.runtime import ImageKind
from vjob.jobs.conf.schema import Container
from vjob.jobs.errors import InputError

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


def classify_image(image: str) -> ImageKind:
    """By its name, and by what lies there: an image may be on the nodes alone."""
    if not image.startswith("/"):
        return ImageKind.REFERENCE
    for suffix, kind in SUFFIXES.items():
        if image.endswith(suffix):
            return kind
    return ImageKind.SQUASHFS if os.path.isfile(image) else ImageKind.FOLDER


def stamp_image(image: str) -> str:
    """Changes whenever the image file does."""
    try:
        facts = os.stat(image)
    except OSError:
        return ""
    return f"{facts.st_size}-{facts.st_mtime_ns}"


def resolve_image(container: Container, environ: Mapping[str, str]) -> Container:
    """The section with its image as the nodes will see it."""
    image = container.image
    if image is None or container.runtime == "none":
        return container
    kind = classify_image(image)
    if kind is ImageKind.SQUASHFS:
        check_file(image)
    if kind is not ImageKind.REFERENCE:
        return container
    takers = [kind for kind in RUNTIMES.values() if ImageKind.REFERENCE in kind.kinds]
    if container.runtime in [kind.name for kind in takers]:
        return container
    from vjob.jobs.images.fetch import find_imported

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
    """InputError where an image file here is none, or not all of one."""
    from vjob.jobs.images.squashfs import explain_damage

    if not os.path.isfile(image):
        return  # on the nodes alone: their preflight looks
    try:
        damage = explain_damage(Path(image))
    except OSError as error:
        damage = f"cannot be read: {error.strerror}"
    if damage:
        raise InputError(f"container.image {image} {damage}")
