"""Run ranks with podman: a container for each rank, of an unpacked tree or a stored image.

No rank is a child of the agent: podman is a client, and its conmon is the parent. For an ordinary
user, podman 4.3.1 passes SIGTERM on twice and SIGUSR1 not at all. Therefore `wraps` is set: the
agent finds the ranks by their environment and signals them itself.
"""

from __future__ import annotations

from dataclasses import replace

from varuna_core.records.plan import ENTER, GPUS, ContainerPlan
from vjob.containers.reference import BadReference, parse_reference
from vjob.containers.runtime import (
    AMD_DEVICES,
    INTEL_DEVICES,
    Argv,
    ImageKind,
    Mount,
    Request,
    Runtime,
    Unsuitable,
)
from vjob.containers.store import Store, read_shell

LABEL = "vjob=%{folder} %{node}"
"""Label of the containers of one run on one node."""

SHARED: Argv = (
    "--rm",
    f"--label={LABEL}",
    # Ranks meet over the node's network. A namespace of processes would make a rank process 1,
    # which no signal ends without a handler, and keep GPUs' peers from each other's memory.
    "--network=host",
    "--uts=host",
    "--pid=host",
    # The agent reads what ranks write; a second copy would fill the node's disk.
    "--log-driver=none",
    # Labels would need mounts to be relabelled, which are not ours; the filter of system calls
    # forbids to bind memory to NUMA nodes. Neither runtime gives a rank rights that you lack.
    "--security-opt=label=disable",
    "--security-opt=seccomp=unconfined",
    # All devices, /dev/shm at its full size, InfiniBand: as in the other runtimes.
    "--volume=/dev:/dev",
    "--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777",  # compilers of kernels load what they wrote
    "--workdir=/",
    "--stop-timeout=0",  # `rm --force` comes after our own grace
    f"--env={ENTER}",  # by name: the value is in the client's environment
)
"""Options that podman and docker share."""

GPU_OPTIONS: dict[str, Argv] = {
    "nvidia": ("--device=nvidia.com/gpu=all",),
    "amd": AMD_DEVICES,
    "intel": INTEL_DEVICES,
}

TRY: Argv = ("/bin/sh", "-c", ":")
"""Command run once after preparing, so that a node that cannot start containers fails early."""


class Podman(Runtime):
    name = "podman"
    probe = ("podman", "info")
    kinds = frozenset(
        {ImageKind.SQUASHFS, ImageKind.FOLDER, ImageKind.ARCHIVE, ImageKind.REFERENCE}
    )

    def plan(self, request: Request) -> ContainerPlan:
        is_stored = request.kind is ImageKind.REFERENCE
        plan = self._plan_stored(request) if is_stored else self._plan_tree(request)
        return replace(plan, gpu_options=GPU_OPTIONS if request.gpus else {})

    def _plan_tree(self, request: Request) -> ContainerPlan:
        """Plan for a tree of our store. podman's data about it is stored beside it: its usual place
        is the home folder, which nodes share but podman cannot."""
        store = Store(request)
        tool = (*_TOOL, f"--root={store.base}/podman", "--storage-driver=vfs")
        words = (*tool, "run", *build_options(request), "--rootfs")
        count = f"{len(words) - 1}+%{{num_gpu_options}}" if request.gpus else str(len(words))
        start = ("bash", "-c", _ENTER, "enter", store.root, count, *words)
        return ContainerPlan(
            runtime=self.name,
            image=request.image,
            workdir=request.workdir,
            probe=("sh", "-c", _PROBE, "probe", store.base, *tool, "info"),
            prepare=(store.build_prepare("unsquashfs"), build_end(tool), (*start, *TRY)),
            start=start,
            reads_image=True,
            wraps=True,
            lease=store.lease,
            clean=(build_end(tool), *store.build_clean()),
        )

    def _plan_stored(self, request: Request) -> ContainerPlan:
        """Plan for an image that is pulled, or already present in the site's store."""
        image = render_reference(request.image, self.name)
        pull = build_pull(_TOOL, ("image", "exists"), image, request)
        return plan_stored(self.name, _TOOL, build_options(request), image, pull, request)


_TOOL = (
    "podman",
    "--log-level=error",  # warnings would stand in every rank's output
    # Not systemd, which would move ranks out of the job's own cgroup and its limits.
    "--cgroup-manager=cgroupfs",
)

# runc wants a path without links in it; a scratch folder and an image folder may have some.
# enter ROOT N WORD1 .. WORDN COMMAND..., where N may be a sum.
_ENTER = 'root=$(cd -P "$1" && pwd -P) && exec "${@:3:$2}" "$root" "${@:3+$2}"'

_PROBE = (
    'command -v podman >/dev/null || { echo "not installed" >&2; exit 127; }; '
    'mkdir -p -m 700 "$1"; '
    '[ -O "$1" ] || { echo "$1 is not a folder of yours" >&2; exit 1; }; shift; exec "$@"'
)

_HOLDERS = {"dockerd": "docker", "podman": "podman"}
"""By scheme, the program whose store on this host holds the image."""


def plan_stored(
    runtime: str, tool: Argv, options: Argv, image: str, pull: Argv, request: Request
) -> ContainerPlan:
    """Return the commands for an image in the tool's own store."""
    start = (*tool, "run", *options, "--pull=never", "--entrypoint=", image)
    end = build_end(tool)
    return ContainerPlan(
        runtime=runtime,
        image=request.image,
        workdir=request.workdir,
        probe=(*tool, "info"),
        prepare=(pull, end, (*start, *TRY)),
        start=start,
        wraps=True,
        clean=(end,),
    )


def build_options(request: Request) -> Argv:
    options = [*SHARED, "--volume=/dev/shm:/dev/shm", "--http-proxy=false"]
    # Said, for an image may name a user of its own.
    if request.user_id == 0:
        options += ["--user=0:0", "--pids-limit=-1"]  # by default, and for root alone, 2048
    elif request.remap_root:
        options += ["--user=0:0", "--userns=host", "--group-add=keep-groups"]
    else:
        options += ["--user=%{user}", "--userns=keep-id", "--group-add=keep-groups"]
    if not request.writable:
        options += ["--read-only", "--read-only-tmpfs=false"]
    if request.gpus:
        options.append(GPUS)
    return (*options, *(f"--mount={render_mount(mount, 'ro')}" for mount in request.mounts))


def render_mount(mount: Mount, read_only: str, target: str = "target") -> str:
    """Return a mount as a CSV line, in which commas are quoted; --volume supports no colon."""
    fields = ["type=bind", f"source={mount.source}", f"{target}={mount.target}"]
    fields += [read_only] if mount.read_only else []
    return ",".join(_quote(field) for field in fields)


def render_reference(image: str, runtime: str) -> str:
    """Return the reference for podman or docker, with the registry that docker would use."""
    try:
        found = parse_reference(image)
    except BadReference as problem:
        raise Unsuitable(str(problem)) from problem
    if _HOLDERS.get(found.scheme, runtime) != runtime:
        raise Unsuitable(f"{runtime} cannot take {image}: write docker:// for a registry's image")
    registry = f"{found.registry}/" if found.registry else ""
    return f"{registry}{found.image}" + (f"@{found.digest}" if found.digest else f":{found.tag}")


def build_pull(tool: Argv, exists: Argv, image: str, request: Request) -> Argv:
    """Return a command that pulls a missing image or, with `reuse: false`, also a renewed one."""
    if request.reuse is False:
        return (*tool, "pull", "--quiet", image)
    return ("bash", "-c", read_shell("pull.sh"), "pull", image, *exists, "--", *tool)


def build_end(tool: Argv) -> Argv:
    """Return a command that ends what a killed client or agent left running."""
    return ("bash", "-c", read_shell("end.sh"), "end", LABEL, *tool)


def _quote(field: str) -> str:
    if '"' in field or "," in field:
        return '"' + field.replace('"', '""') + '"'
    return field
