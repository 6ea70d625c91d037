"""Run ranks with docker: a container for each rank, of an image in the daemon's store.

This is for workstations and clouds whose admins trust users with a daemon that runs as root. Ranks
have the user's main group, but not the supplementary ones.
"""

from __future__ import annotations

from dataclasses import replace

from varuna_core.records.plan import GPUS, ContainerPlan
from vjob.containers.podman import SHARED, build_pull, plan_stored, render_mount, render_reference
from vjob.containers.runtime import (
    AMD_DEVICES,
    INTEL_DEVICES,
    Argv,
    ImageKind,
    Request,
    Runtime,
    Unsuitable,
)

_TOOL = ("docker", "--log-level=error")
GPU_OPTIONS: dict[str, Argv] = {
    "nvidia": ("--gpus=all",),
    "amd": AMD_DEVICES,
    "intel": INTEL_DEVICES,
}


class Docker(Runtime):
    name = "docker"
    probe = ("docker", "info")
    kinds = frozenset({ImageKind.REFERENCE})
    is_automatic = False
    """The daemon is the parent of its containers, so a scheduler's limits and accounting miss them;
    `auto` never chooses docker."""

    def plan(self, request: Request) -> ContainerPlan:
        image = render_reference(request.image, self.name)
        pull = build_pull(_TOOL, ("image", "inspect", "--format="), image, request)
        options = build_options(request)
        plan = plan_stored(self.name, _TOOL, options, image, pull, request)
        return replace(plan, gpu_options=GPU_OPTIONS if request.gpus else {})


def build_options(request: Request) -> Argv:
    if request.remap_root and request.user_id != 0:
        raise Unsuitable(
            "docker cannot show you as root and leave you who you are outside: what ranks write "
            "would be root's; use container.runtime: podman, or remap_root: false"
        )
    options = [
        *SHARED,
        "--ipc=host",
        "--device-cgroup-rule=c *:* rwm",  # what file modes allow, as everywhere else
        "--ulimit=memlock=-1",  # the daemon's own is too small for InfiniBand
        "--user=%{user}",
    ]
    if not request.writable:
        options.append("--read-only")
    if request.gpus:
        options.append(GPUS)
    return (*options, *(f"--mount={render_mount(mount, 'readonly')}" for mount in request.mounts))
