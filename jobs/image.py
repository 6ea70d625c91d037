"""What a conf's `container.image` is: a file of some kind, a folder, or a reference."""

from __future__ import annotations

import os

from containers.runtime import ImageKind

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
