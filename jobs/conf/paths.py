"""The paths of a conf: made absolute against its folder, and looked for where they must exist."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from vjob.jobs.conf.megatron_checkout import SCRIPTS
from vjob.jobs.conf.schema import Container, JobConf

_WEIGHT = re.compile(r"(?:^|\s)((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s+(?=\S)")
IMAGE_SUFFIXES = (".sqsh", ".sqfs", ".sif")
Finding = tuple[str, object, str]
"""Key, value, what is wrong with it."""


def resolve_path(text: str, base: Path, environ: Mapping[str, str]) -> str:
    """Absolute, with ~ expanded; `..` stays, since what it means depends on symbolic links."""
    if text == "~" or text.startswith("~/"):
        text = environ.get("HOME", os.path.expanduser("~")) + text[1:]
    elif text.startswith("~"):
        text = os.path.expanduser(text)
    return str(base / text)


def split_blend(text: str) -> list[tuple[str, str]]:
    """`0.7 data/a 0.3 data/b` as weights and prefixes; what begins with no weight is one prefix,
    spaces and all, of weight 1."""
    head, *rest = _WEIGHT.split(text)
    if head.strip() or not rest:
        return [("1", text)]
    return [(weight, prefix.strip()) for weight, prefix in zip(rest[::2], rest[1::2], strict=True)]


def join_blend(blend: list[tuple[str, str]]) -> str:
    """As it is written in a conf."""
    if len(blend) == 1:
        return blend[0][1]
    return " ".join(f"{weight} {prefix}" for weight, prefix in blend)


def is_image_path(image: str, runtime: str) -> bool:
    """Whether an image is a file or folder here, not a reference to a registry."""
    if "://" in image:
        return False
    if image.startswith((".", "/", "~")) or image.endswith(IMAGE_SUFFIXES):
        return True
    # docker and podman users write ubuntu:24.04; pyxis and enroot users write nvcr.io#nvidia/x.
    return "#" not in image and runtime not in ("docker", "podman")


def resolve_paths(conf: JobConf, base: Path, environ: Mapping[str, str]) -> JobConf:
    """The conf with every path on this side absolute."""

    def resolve(text: str | None) -> str | None:
        return resolve_path(text, base, environ) if text else text

    def resolve_blend(text: str | None) -> str | None:
        if not text:
            return text
        return join_blend([(w, resolve_path(p, base, environ)) for w, p in split_blend(text)])

    def resolve_mount(mount: str) -> str:
        source, colon, target = mount.partition(":")
        return f"{resolve(source)}:{target}" if source and colon else mount

    program, data, container = conf.program, conf.data, conf.container
    python = program.python
    if python is not None and "/" in python:
        python = resolve(python)
    image = container.image
    if image and is_image_path(image, container.runtime):
        image = resolve(image)
    checkpoint, cluster = conf.train.checkpoint, conf.cluster
    return replace(
        conf,
        program=replace(
            program, path=resolve(program.path), config=resolve(program.config), python=python
        ),
        data=data and replace(data, prefix=resolve_blend(data.prefix), vocab=resolve(data.vocab)),
        train=replace(
            conf.train, checkpoint=replace(checkpoint, folder=resolve(checkpoint.folder))
        ),
        parallel=replace(conf.parallel, profile=resolve(conf.parallel.profile)),
        container=replace(
            container, image=image, mounts=tuple(map(resolve_mount, container.mounts))
        ),
        cluster=replace(
            cluster,
            machine_list=resolve(cluster.machine_list),
            ssh_config=resolve(cluster.ssh_config),
        ),
        workdir=resolve(conf.workdir),
        log_folder=resolve_path(conf.log_folder, base, environ),
    )


def find_missing_paths(conf: JobConf, base: Path | None) -> Iterator[Finding]:
    """Files that the job would miss, without those that may lie in the image or on the nodes."""
    program = conf.program
    if program.path is not None and not _may_be_elsewhere(program.path, conf.container, base):
        key = f"program.{program.kind}"
        if program.kind == "megatron":
            is_script = program.path.endswith(".py")
            if not (os.path.isfile if is_script else os.path.isdir)(program.path):
                message = "is not there; it is the Megatron-LM checkout, or a script in it"
                yield key, program.path, _explain(message, program.path)
            elif not is_script and not any(Path(program.path, name).is_file() for name in SCRIPTS):
                message = f"has no {SCRIPTS[0]}; name a Megatron-LM checkout, or the script in it"
                yield key, program.path, message
        elif not Path(program.path).is_file():
            yield key, program.path, _explain("is not a file", program.path)
    config = program.config
    if (
        config is not None
        and not Path(config).is_file()
        and not _may_be_elsewhere(config, conf.container, base)
    ):
        yield "program.config", config, _explain("is not a file", config)
    yield from _find_missing_data(conf, base)
    image = conf.container.image
    if image and image.startswith("/") and not os.path.exists(image):
        message = "not found; an image of a registry is written docker://name:tag"
        yield "container.image", image, _explain(message, image)
    for index, mount in enumerate(conf.container.mounts):
        source = mount.partition(":")[0]
        # Elsewhere it may be a disk of the nodes; their preflight looks for it.
        if base is not None and _is_under(source, base) and not os.path.exists(source):
            yield f"container.mounts[{index}]", mount, _explain(f"{source} not found", source)


def _find_missing_data(conf: JobConf, base: Path | None) -> Iterator[Finding]:
    data = conf.data
    if data is None or data.synthetic:
        return
    for _, prefix in split_blend(data.prefix) if data.prefix else []:
        missing = [end for end in (".bin", ".idx") if not os.path.isfile(prefix + end)]
        if missing and not _may_be_elsewhere(prefix, conf.container, base):
            message = f"{' and '.join(prefix + end for end in missing)} not found"
            if prefix.endswith((".bin", ".idx")):
                message = "is written without .bin or .idx"
            yield "data.prefix", prefix, _explain(message, prefix)
    vocab = data.vocab
    if vocab and not Path(vocab).is_file() and not _may_be_elsewhere(vocab, conf.container, base):
        yield "data.vocab", vocab, _explain("is not a file", vocab)


def _explain(message: str, path: str = "") -> str:
    return message + ("; variables are not expanded in paths" if "$" in path else "")


def _is_under(path: str, base: Path) -> bool:
    return Path(path).is_relative_to(base)


def _may_be_elsewhere(path: str, container: Container, base: Path | None) -> bool:
    """With an image, a path outside the conf's folder may be one inside the image."""
    return container.image is not None and (base is None or not _is_under(path, base))
