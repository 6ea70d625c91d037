"""Run ranks with enroot, without pyxis: unpack and start once on a node, `enroot exec` for each
rank.

Starts are serialized: each holds the root's lock while the site's hooks run, and one that waits 30
s for it fails. Entering an existing container runs no hook and does not wait. enroot execs, so the
rank keeps the pid that the agent knows, and signals and exit codes pass.
"""

from __future__ import annotations

import re

from varuna_core.records.plan import ENTER, ContainerPlan
from vjob.containers.runtime import STAY, Argv, ImageKind, Request, Runtime, Unsuitable
from vjob.containers.store import Store

# rc replaces the image's entrypoint, which may be anything; without one, a program whose name has a
# space would be run by `sh -c` (enroot 4.1.2).
RC = 'exec "$@"'

GPU_VARIABLES = {
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
}
"""Variables for enroot's NVIDIA hook; images not made for it name only the capability `utility`."""

LOCKED = "Could not acquire rootfs lock"
"""enroot's message if starts of other jobs hold the lock of the same root (4.1.2)."""


class Enroot(Runtime):
    """Runs `enroot create` and `enroot start` once on a node, `enroot exec` for each rank."""

    name = "enroot"
    probe = ("enroot", "version")
    kinds = frozenset({ImageKind.SQUASHFS, ImageKind.FOLDER, ImageKind.ARCHIVE})

    def plan(self, request: Request) -> ContainerPlan:
        if re.search(r"\s", request.scratch):
            raise Unsuitable(f"enroot bears no spaces in container.scratch {request.scratch!r}")
        store = Store(request)
        defaults = GPU_VARIABLES if request.gpus else {}
        hold = ["enroot", "start", "--conf", store.conf]
        hold += ["--rw"] if request.writable else []
        hold += ["--root"] if request.remap_root else []
        for name in defaults:
            hold += ["--env", name]
        return ContainerPlan(
            runtime=self.name,
            image=request.image,
            workdir=request.workdir,
            probe=self.probe,
            prepare=(store.build_prepare("enroot"), build_write(store, render_conf(request))),
            start=("enroot", "exec", "--env", ENTER, "%{holder}"),
            hold=(*hold, store.name, *STAY),
            hold_again=LOCKED,
            env=build_environment(store),
            defaults=defaults,
            lease=store.lease,
            clean=(*store.build_clean(), ("rm", "-f", store.conf)),
        )


def render_conf(request: Request) -> str:
    """Render the file for `enroot start --conf`, since `-m` supports no spaces or colons."""
    lines = []
    for mount in request.mounts:
        options = "x-create=auto,rbind" + (",ro" if mount.read_only else "")
        lines.append(f"{_escape(mount.source)} {_escape(mount.target)} none {options}")
    text = "\n".join(lines)
    return (
        f"# Run {request.run}, written by vjob for `enroot start --conf`.\n"
        f"mounts() {{\n  cat <<'VJOB_MOUNTS'\n{text}\nVJOB_MOUNTS\n}}\n"
        f"rc() {{\n{RC}\n}}\n"
    )


def build_write(store: Store, text: str) -> Argv:
    """Return a command that writes the generated file, whole or not at all."""
    script = 'printf %s "$2" >"$1.part.$$" && mv "$1.part.$$" "$1"'
    return ("bash", "-c", script, "write", store.conf, text)


OF_SITE = (
    "ENROOT_ROOTFS_WRITABLE",
    "ENROOT_REMAP_ROOT",
    "ENROOT_MOUNT_HOME",
    # Ranks have the node's processes, network and shared memory, as with every runtime. A process 1
    # would get no SIGUSR1 without a handler, and one behind it another pid than the agent knows.
    "ENROOT_UNSHARE_PID",
    "ENROOT_UNSHARE_NET",
    "ENROOT_UNSHARE_IPC",
    "ENROOT_UNSHARE_UTS",
    # A login shell would lose PATH, and change the umask (enroot 4.1.2).
    "ENROOT_LOGIN_SHELL",
)
"""Settings of a site's enroot.conf that the conf, or every runtime's plan, overrides."""


def build_environment(store: Store) -> dict[str, str]:
    """Return enroot's folders, not shared between nodes or users, and turn site settings off."""
    return {
        "ENROOT_DATA_PATH": store.roots,
        "ENROOT_RUNTIME_PATH": f"{store.base}/runtime",
        "ENROOT_TEMP_PATH": f"{store.base}/temp",
        "ENROOT_CACHE_PATH": f"{store.base}/cache",
        **dict.fromkeys(OF_SITE, "n"),
    }


def _escape(path: str) -> str:
    """Escape a path as in fstab."""
    return "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in path)
