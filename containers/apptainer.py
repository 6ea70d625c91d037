"""Run ranks with apptainer: `apptainer exec` of an unpacked tree, or of a .sif file.

apptainer stays as the rank's parent in the same process group, and passes signals on, so a signal
to the group would reach a rank twice. Therefore `wraps` is set: the agent signals the ranks' own
processes.
"""

from __future__ import annotations

from dataclasses import replace

from varuna_core.records.plan import ENTER, GPUS, ContainerPlan
from vjob.containers.podman import TRY, render_mount
from vjob.containers.reference import BadReference, parse_reference
from vjob.containers.runtime import Argv, ImageKind, Mount, Request, Runtime, Unsuitable
from vjob.containers.store import Store

GPU_OPTIONS: dict[str, Argv] = {"nvidia": ("--nv",), "amd": ("--rocm",)}
LIBRARIES = "/.singularity.d/libs"
"""The driver's libraries, with `--nv` or `--rocm`; the agent's setup/container.py has programs look
there."""


class Apptainer(Runtime):
    """Unpacks once on a node, and runs `apptainer exec` for each rank."""

    name = "apptainer"
    probe = ("apptainer", "version")
    kinds = frozenset(ImageKind)

    def plan(self, request: Request) -> ContainerPlan:
        options = ("apptainer", "--silent", "exec", *build_options(request))
        if request.kind is ImageKind.SIF:
            return ContainerPlan(
                runtime=self.name,
                image=request.image,
                workdir=request.workdir,
                probe=self.probe,
                prepare=((*options, request.image, *TRY),),
                start=(*options, request.image),
                enter_as=f"APPTAINERENV_{ENTER}",
                wraps=True,
                gpu_options=GPU_OPTIONS if request.gpus else {},
            )
        is_stored = request.kind is ImageKind.REFERENCE
        source = replace(request, image=render_source(request.image)) if is_stored else request
        store = Store(source)
        # With --writable it makes no mount points, and leaves those libraries out with a warning.
        libraries = (Mount(source="/", target=LIBRARIES),) if request.gpus else ()
        prepare = store.build_prepare("apptainer" if is_stored else "unsquashfs", *libraries)
        start = (*options, store.root)
        return ContainerPlan(
            runtime=self.name,
            image=request.image,
            workdir=request.workdir,
            probe=self.probe,
            prepare=(prepare, (*start, *TRY)),
            start=start,
            enter_as=f"APPTAINERENV_{ENTER}",
            reads_image=not is_stored,  # its own trees have scripts for that, which it runs
            wraps=True,
            gpu_options=GPU_OPTIONS if request.gpus else {},
            env={
                "APPTAINER_CACHEDIR": f"{store.base}/cache",
                "APPTAINER_TMPDIR": f"{store.base}/temp",
            },
            lease=store.lease,
            clean=store.build_clean(),
        )


def build_options(request: Request) -> Argv:
    """Return options of `apptainer exec`; it shares the node's /tmp, /dev, network and
    processes."""
    options = [
        "--cleanenv",
        "--no-eval",  # else a shell evaluates the value that enters
        "--no-mount=home,cwd",
        "--pwd=/",
    ]
    if request.user_id == 0:
        # Root's default is to keep every capability, and to fail where one is missing, as in a
        # node that is a container itself. User 0 without any needs none and is enough for a rank;
        # --userns would do too, but many nodes forbid it, and then a setuid apptainer is all.
        options.append("--no-privs")
    elif request.remap_root:
        options.append("--fakeroot")
    if request.writable:
        # A .sif file cannot be written: what ranks write there is gone with them.
        options.append("--writable-tmpfs" if request.kind is ImageKind.SIF else "--writable")
    if request.gpus:
        options.append(GPUS)
    mounts = (render_mount(mount, "ro", "destination") for mount in request.mounts)
    return (*options, *(f"--mount={mount}" for mount in mounts))


def render_source(image: str) -> str:
    """Return a reference as `apptainer build` takes it."""
    try:
        found = parse_reference(image)
    except BadReference as problem:
        raise Unsuitable(str(problem)) from problem
    if found.scheme == "podman":
        raise Unsuitable(f"apptainer cannot take {image}: it does not ask podman")
    place = f"{found.registry}/" if found.registry else ""
    scheme = "docker-daemon:" if found.scheme == "dockerd" else "docker://"
    return f"{scheme}{place}{found.image}" + (
        f"@{found.digest}" if found.digest else f":{found.tag}"
    )
