"""charliecloud: `ch-run` on an unpacked folder.

It execs: the rank keeps the pid that the agent knows, so signals and exit codes pass. A .sqsh file
is unpacked and not mounted: mounted, ch-run stays as its parent and a SIGUSR1 kills that (0.31).
"""

from __future__ import annotations

from varuna_core.records.plan import ENTER, ContainerPlan
from vjob.containers.runtime import ImageKind, Mount, Request, Runtime, Unsuitable
from vjob.containers.store import Store


class Charliecloud(Runtime):
    """Unpack once a node, `ch-run` for each rank."""

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
    """SOURCE:TARGET. It knows no read-only ones, and no way to write a colon (0.31)."""
    for path in (mount.source, mount.target):
        if ":" in path:
            raise Unsuitable(
                f"charliecloud cannot mount {path!r}: a colon separates source and target; rename "
                "it, mount a folder above it, or use container.runtime: enroot"
            )
    return f"{mount.source}:{mount.target}"
