"""pyxis: srun itself starts the container, so the agent runs inside it and starts ranks directly.

Nothing is run on the node before that: pyxis unpacks, mounts and enters while srun starts the step.
So this adapter is srun's options and little else, and refuses what those cannot say.
Read in pyxis 0.24.0, and tried with it.
"""

from __future__ import annotations

from varuna_core.records.plan import ContainerPlan
from vjob.containers.enroot import GPU_VARIABLES
from vjob.containers.reference import BadReference, parse_reference
from vjob.containers.runtime import Argv, ImageKind, Mount, Request, Runtime, Unsuitable
from vjob.containers.store import Store

INSIDE = "/.vjob-inside"
"""A mount of ours. Where it is missing, Slurm has run the step on the bare node: a slurmd without
the plugin ignores its options."""

PASSED = ("VJOB_RUN", "VJOB_GROUP", "VJOB_ATTEMPT", "HOME", "USER", "LOGNAME")
"""What enters beside SLURM_*, which srun always passes; `pass_env` and `env` come by the plan."""

# Else enroot starts by a login shell, and an image's /etc/profile sets its PATH anew (4.1.2).
ENVIRONMENT = {"ENROOT_LOGIN_SHELL": "n"}

_UNSAID = {",": "separates mounts", ":": "separates source and target"}
# pyxis writes `echo "SOURCE TARGET"` into a script that enroot runs.
_UNSAID.update(dict.fromkeys('"$`', "is read by the shell that enroot runs"))


class Pyxis(Runtime):
    """`srun --container-image`; enroot underneath."""

    name = "pyxis"
    probe = ("sh", "-c", "srun --help | grep -q -e --container-image")
    kinds = frozenset({ImageKind.SQUASHFS, ImageKind.REFERENCE})
    is_automatic = False
    """What srun is told cannot wait until a node has been looked at."""

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
    """All that a site's settings could decide otherwise is said; the same words for each component
    of a het step, for pyxis refuses two images in one srun."""
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
    """An absolute path, or docker://REGISTRY#IMAGE:TAG; pyxis knows no podman://."""
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
    """SOURCE:TARGET:ro. Spaces are fine."""
    for path in (mount.source, mount.target):
        for sign, why in _UNSAID.items():
            if sign in path:
                raise Unsuitable(
                    f"pyxis cannot mount {path!r}: its {sign} {why}; rename it, mount a folder "
                    "above it, or use runtime: enroot"
                )
    return f"{mount.source}:{mount.target}" + (":ro" if mount.read_only else "")


def build_probe() -> Argv:
    """Run by the agent, which is inside already, or on a node without the plugin."""
    said = "Slurm started the agent outside of the container: slurmd has no pyxis on this node"
    return ("/bin/sh", "-c", f'[ -e {INSIDE} ] || {{ echo "{said}" >&2; exit 1; }}')


def _build_name(request: Request) -> Argv:
    """A container with a name stays on the node for later runs; else it is gone with the step.

    Only on demand: one whose unpacking was killed stays too, half of it, and is taken for whole;
    of two jobs that unpack it at once one fails. `no_exec`, for to attach to one that runs means
    its mounts instead of ours.
    """
    return (f"--container-name={Store(request).name}:no_exec",) if request.reuse is True else ()
