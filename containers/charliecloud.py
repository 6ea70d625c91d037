"""Run ranks with charliecloud: `ch-run` on an unpacked folder.

ch-run execs, so the rank keeps the pid that the agent knows, and signals and exit codes pass. A
.sqsh file is unpacked and not mounted: with a mount, ch-run stays as the parent, and SIGUSR1 kills
it (0.31).
"""

from __future__ import annotations

from varuna_core.records.plan import ENTER, ContainerPlan
from vjob.containers.runtime import ImageKind, Mount, Request, Runtime, Unsuitable
from vjob.containers.store import Store


class Charliecloud(Runtime):
    """Unpacks once on a node, and runs `ch-run` for each rank."""

    name = "charliecloud"
    probe = ("ch-run", "--version")
    kinds = frozenset({ImageKind.SQUASHFS, ImageKind.FOLDER, ImageKind.ARCHIVE})

    def plan(self, request: Request) -> ContainerPlan:
        store = Store(request)
        start = ["ch-run", f"--unset-env=!({ENTER})", "--private-tmp"]
        if request.writable:
            start.append("--write")
        if request.remap_root:
            start += ["--uid=0", "--gid=0"]
        for mount in request.mounts:
            start += ["--bind", render_bind(mount)]
        prepare = [store.build_prepare("unsquashfs")]
        if request.gpus:  # it has no flag for them: NVIDIA's libraries go into the copy
            script = 'command -v nvidia-smi >/dev/null || exit 0; exec ch-fromhost --nvidia "$1"'
            prepare.append(("sh", "-c", script, "gpus", store.root))
        return ContainerPlan(
            runtime=self.name,
            image=request.image,
            workdir=request.workdir,
            probe=self.probe,
            prepare=tuple(prepare),
            start=(*start, store.root, "--"),
            reads_image=True,
            lease=store.lease,
            clean=store.build_clean(),
        )


def render_bind(mount: Mount) -> str:
    """Return SOURCE:TARGET; there are no read-only binds, and a colon cannot be escaped (0.31)."""
    for path in (mount.source, mount.target):
        if ":" in path:
            raise Unsuitable(
                f"charliecloud cannot mount {path!r}: a colon separates source and target; rename "
                "it, mount a folder above it, or use container.runtime: enroot"
            )
    return f"{mount.source}:{mount.target}"
