"""Run ranks with pyxis: srun itself starts the container, with the agent and its ranks inside.

Nothing runs on the node before that: pyxis unpacks, mounts and enters while srun starts the step.
So this adapter mostly builds srun's options, and refuses what these cannot express. Read in pyxis
0.24.0, and tried with it.
"""

from __future__ import annotations

from varuna_core.records.plan import ContainerPlan
from vjob.containers.enroot import GPU_VARIABLES
from vjob.containers.reference import BadReference, parse_reference
from vjob.containers.runtime import Argv, ImageKind, Mount, Request, Runtime, Unsuitable
from vjob.containers.store import Store

INSIDE = "/.vjob-inside"
"""Mount that shows that the step runs inside: a slurmd without the plugin ignores pyxis' options
and runs the step on the bare node."""

PASSED = ("VJOB_RUN", "VJOB_GROUP", "VJOB_ATTEMPT", "HOME", "USER", "LOGNAME")
"""Variables that enter besides SLURM_*, which srun passes; the plan has `pass_env` and `env`."""

# Else enroot starts by a login shell, and an image's /etc/profile sets its PATH anew (4.1.2).
ENVIRONMENT = {"ENROOT_LOGIN_SHELL": "n"}

_UNSAID = {",": "separates mounts", ":": "separates source and target"}
# pyxis writes `echo "SOURCE TARGET"` into a script that enroot runs.
_UNSAID.update(dict.fromkeys('"$`', "is read by the shell that enroot runs"))


class Pyxis(Runtime):
    """Runs `srun --container-image`, which uses enroot."""

    name = "pyxis"
    probe = ("sh", "-c", "srun --help | grep -q -e --container-image")
    kinds = frozenset({ImageKind.SQUASHFS, ImageKind.REFERENCE})
    is_automatic = False
    """srun's options cannot wait until a node has been examined."""

    def plan(self, request: Request) -> ContainerPlan:
        defaults = GPU_VARIABLES if request.gpus else {}
        return ContainerPlan(
            runtime=self.name,
            image=request.image,
            workdir=request.workdir,
            probe=build_probe(),
            prepare=(),
            start=(),
            env=ENVIRONMENT,
            defaults=defaults,
            step=(
                f"--export={','.join((*PASSED, *ENVIRONMENT, *defaults))}",
                *build_options(request),
            ),
        )


def build_options(request: Request) -> Argv:
    """Return options that leave nothing to a site's settings, equal for each component of a het
    step, since pyxis refuses two images in one srun."""
    mounts = (*request.mounts, Mount(source="/dev/null", target=INSIDE))
    root = "--container-remap-root" if request.remap_root else "--no-container-remap-root"
    return (
        f"--container-image={render_image(request)}",
        f"--container-mounts={','.join(map(render_mount, mounts))}",
        f"--container-workdir={request.workdir}",
        "--container-writable" if request.writable else "--container-readonly",
        root,
        "--no-container-mount-home",
        "--no-container-entrypoint",
        *_build_name(request),
    )


def render_image(request: Request) -> str:
    """Return an absolute path, or docker://REGISTRY#IMAGE:TAG; pyxis has no podman://."""
    if request.kind is not ImageKind.REFERENCE:
        return request.image
    try:
        reference = parse_reference(request.image)
    except BadReference as problem:
        raise Unsuitable(str(problem)) from problem
    if reference.scheme == "podman":
        raise Unsuitable(f"pyxis does not take {request.image}: import it into a .sqsh file")
    return reference.enroot


def render_mount(mount: Mount) -> str:
    """Return SOURCE:TARGET:ro; spaces are allowed."""
    for path in (mount.source, mount.target):
        for sign, why in _UNSAID.items():
            if sign in path:
                raise Unsuitable(
                    f"pyxis cannot mount {path!r}: its {sign} {why}; rename it, mount a folder "
                    "above it, or use runtime: enroot"
                )
    return f"{mount.source}:{mount.target}" + (":ro" if mount.read_only else "")


def build_probe() -> Argv:
    """Return a command for the agent that fails on a node without the plugin."""
    said = "Slurm started the agent outside of the container: slurmd has no pyxis on this node"
    return ("/bin/sh", "-c", f'[ -e {INSIDE} ] || {{ echo "{said}" >&2; exit 1; }}')


def _build_name(request: Request) -> Argv:
    """Return an option that names the container, which keeps it on the node for later runs.

    Only with `reuse: true`: a partly unpacked container stays as well and is taken for complete,
    and of two jobs that unpack at once one fails. `no_exec` prevents attaching to a running
    container, which would have its own mounts.
    """
    return (f"--container-name={Store(request).name}:no_exec",) if request.reuse is True else ()
