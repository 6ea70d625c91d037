"""Make the paths of a conf absolute, starting from its folder, also those in blends of data."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from vjob.jobs.conf.schema import FUNCTION, JobConf

_WEIGHT = re.compile(r"(?:^|\s)((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s+(?=\S)")
IMAGE_SUFFIXES = (".sqsh", ".sqfs", ".sif")


def resolve_path(text: str, base: Path, environ: Mapping[str, str]) -> str:
    """Return an absolute path with ~ expanded; `..` stays, since links may change its meaning."""
    if text == "~" or text.startswith("~/"):
        text = environ.get("HOME", os.path.expanduser("~")) + text[1:]
    elif text.startswith("~"):
        text = os.path.expanduser(text)
    return str(base / text)


def split_blend(text: str) -> list[tuple[str, str]]:
    """Split `0.7 data/a 0.3 data/b` into weights and prefixes; a text that begins without a weight
    is one prefix, spaces included, of weight 1."""
    head, *rest = _WEIGHT.split(text)
    if head.strip() or not rest:
        return [("1", text)]
    return [(weight, prefix.strip()) for weight, prefix in zip(rest[::2], rest[1::2], strict=True)]


def join_blend(blend: list[tuple[str, str]]) -> str:
    """Spell a blend as in a conf."""
    if len(blend) == 1:
        return blend[0][1]
    return " ".join(f"{weight} {prefix}" for weight, prefix in blend)


def is_image_path(image: str, runtime: str) -> bool:
    """Return True for a local file or folder, False for a registry reference."""
    if "://" in image:
        return False
    if image.startswith((".", "/", "~")) or image.endswith(IMAGE_SUFFIXES):
        return True
    # docker and podman users write ubuntu:24.04; pyxis and enroot users write nvcr.io#nvidia/x.
    return "#" not in image and runtime not in ("docker", "podman")


def resolve_paths(conf: JobConf, base: Path, environ: Mapping[str, str]) -> JobConf:
    """Return the conf with all local paths absolute."""

    def resolve(text: str | None) -> str | None:
        return resolve_path(text, base, environ) if text else text

    def resolve_store(uri: str) -> str:
        is_path = uri and ":" not in uri and uri != "databricks"
        return resolve_path(uri, base, environ) if is_path else uri

    def resolve_blend(text: str | None) -> str | None:
        if not text:
            return text
        return join_blend([(w, resolve_path(p, base, environ)) for w, p in split_blend(text)])

    def resolve_mount(mount: str) -> str:
        source, colon, target = mount.partition(":")
        return f"{resolve(source)}:{target}" if source and colon else mount

    program, data, container = conf.program, conf.data, conf.container
    python = program.python
    if python is not None and ("/" in python or os.path.isdir(base / python)):
        python = resolve(python)
        if python is not None and os.path.isdir(python):  # a virtual environment
            python = os.path.join(python, "bin", "python")
    path = program.path if program.kind == FUNCTION else resolve(program.path)
    image = container.image
    if image and is_image_path(image, container.runtime):
        image = resolve(image)
    checkpoint, cluster, mlflow = conf.train.checkpoint, conf.cluster, conf.track.mlflow
    return replace(
        conf,
        program=replace(program, path=path, config=resolve(program.config), python=python),
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
        track=replace(
            conf.track,
            openmetrics=resolve(conf.track.openmetrics),
            mlflow=mlflow and replace(mlflow, uri=resolve_store(mlflow.uri)),
        ),
        workdir=resolve(conf.workdir),
        log_folder=resolve_path(conf.log_folder, base, environ),
    )
