"""Bare enroot, no pyxis: unpack once a node, `enroot start` for each rank.

It execs through: the rank keeps the pid that the agent knows, so signals and exit codes pass.
"""

from __future__ import annotations

from vjob.containers.runtime import ENTER, Argv, Commands, ImageKind, Request, Runtime
from vjob.containers.store import Store

# rc replaces the image's entrypoint, which may be anything; without one, a program whose name has a
# space would be run by `sh -c` (enroot 4.1.2).
RC = 'exec "$@"'

GPU_VARIABLES = {
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
}
"""Its NVIDIA hook acts on these; images not made for it name no capability but `utility`."""


class Enroot(Runtime):
    """`enroot create` once a node, `enroot start` for each rank."""

    name = "enroot"
    probe = ("enroot", "version")
    kinds = frozenset({ImageKind.SQUASHFS, ImageKind.FOLDER, ImageKind.ARCHIVE})

    def plan(self, request: Request) -> Commands:
        store = Store(request)
        defaults = GPU_VARIABLES if request.gpus else {}
        start = ["enroot", "start", "--conf", store.conf]
        start += ["--rw"] if request.writable else []
        start += ["--root"] if request.remap_root else []
        for name in (ENTER, *defaults):
            start += ["--env", name]
        return Commands(
            runtime=self.name,
            image=request.image,
            workdir=request.workdir,
            probe=self.probe,
            prepare=(store.build_prepare("enroot"), build_write(store, render_conf(request))),
            start=(*start, store.name),
            env=build_paths(store),
            defaults=defaults,
            lease=store.lease,
            clean=(*store.build_clean(), ("rm", "-f", store.conf)),
        )


def render_conf(request: Request) -> str:
    """The file that `enroot start --conf` sources: `-m` knows no spaces and no colons."""
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
    """A command that writes the generated file, whole or not at all."""
    script = 'printf %s "$2" >"$1.part.$$" && mv "$1.part.$$" "$1"'
    return ("bash", "-c", script, "write", store.conf, text)


def build_paths(store: Store) -> dict[str, str]:
    """enroot's folders, none of them shared between nodes or users."""
    return {
        "ENROOT_DATA_PATH": store.roots,
        "ENROOT_RUNTIME_PATH": f"{store.base}/runtime",
        "ENROOT_TEMP_PATH": f"{store.base}/temp",
        "ENROOT_CACHE_PATH": f"{store.base}/cache",
        # A login shell would lose PATH, and change the umask (enroot 4.1.2).
        "ENROOT_LOGIN_SHELL": "n",
        "ENROOT_MOUNT_HOME": "n",
    }


def _escape(path: str) -> str:
    """A path as fstab writes it."""
    return "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in path)
