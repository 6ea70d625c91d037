"""Parse references to images in registries, as people, enroot and file names spell them.

    [SCHEME://][USER@][REGISTRY#]IMAGE[:TAG][@DIGEST]     enroot, pyxis
    [REGISTRY/]IMAGE[:TAG][@DIGEST]                       docker, podman

SCHEME is docker (a registry), or dockerd or podman (built or pulled on this host). As with docker,
a first part with a dot or a port in it is a registry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SCHEMES = ("docker", "dockerd", "podman")
HUB = "docker.io"

_IMAGE = re.compile(r"[a-z0-9]+(?:(?:[._/]|__|-+)[a-z0-9]+)*")
_REGISTRY = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*(?::\d+)?")
_TAG = re.compile(r"\w[\w.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class BadReference(ValueError):
    """Raised for text that is no reference; says how one is written."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An image in a registry, or in this host's docker or podman."""

    scheme: str
    user: str
    """User for whom enroot looks up credentials; empty for none."""
    registry: str
    """The registry; empty for an image on this host."""
    image: str
    tag: str
    digest: str
    """The digest, which takes precedence over the tag; may be empty."""

    @property
    def enroot(self) -> str:
        """The reference as `enroot import` takes it."""
        user = f"{self.user}@" if self.user else ""
        registry = f"{self.registry}#" if self.registry not in ("", HUB) else ""
        # Of a digest enroot wants docker's way of writing, and a registry then by its slash.
        if self.digest:
            registry = registry.replace("#", "/")
            return f"{self.scheme}://{user}{registry}{self.image}@{self.digest}"
        return f"{self.scheme}://{user}{registry}{self.image}:{self.tag}"

    @property
    def file_name(self) -> str:
        """The name of the imported image file, unique for each reference."""
        place = self.registry.replace(":", "_") or self.scheme
        end = self.digest.replace(":", "-") or self.tag
        return "+".join([place, *self.image.split("/"), end]) + ".sqsh"


def parse_reference(text: str) -> Reference:
    """Parse a reference; raise BadReference if it is none."""
    match = re.fullmatch(r"(?:(\w+)://)?(.*)", text)
    assert match is not None
    scheme, rest = match[1] or "docker", match[2]
    if scheme not in SCHEMES:
        raise BadReference(f"{scheme}:// is not known; write docker://, dockerd:// or podman://")
    rest, _, digest = rest.partition("@sha256:")
    digest = f"sha256:{digest}" if digest else ""
    user, _, rest = rest.rpartition("@")
    registry, mark, rest = rest.rpartition("#")
    if not mark and scheme == "docker":
        first, slash, others = rest.partition("/")
        if slash and (re.search(r"[.:]", first) or first == "localhost"):
            registry, rest = first, others
        else:
            registry = HUB
    image, colon, tag = rest.partition(":")
    found = Reference(
        scheme=scheme,
        user=user,
        registry=registry,
        image=image.removeprefix("library/") if registry == HUB else image,
        tag=tag if colon else "latest",
        digest=digest,
    )
    _check(text, found)
    return found


def _check(text: str, found: Reference) -> None:
    is_good = (
        _IMAGE.fullmatch(found.image)
        and _TAG.fullmatch(found.tag)
        and (
            _REGISTRY.fullmatch(found.registry) or (not found.registry and found.scheme != "docker")
        )
        and (not found.digest or _DIGEST.fullmatch(found.digest))
    )
    if not is_good:
        raise BadReference(
            f"{text!r} is not an image's reference; one is written REGISTRY#IMAGE:TAG, as in "
            "nvcr.io#nvidia/pytorch:25.01-py3, or docker://debian:12"
        )
