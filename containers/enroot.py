"""Bare enroot, no pyxis: unpack once a node under a lock, then start each rank in it.

Refuses to share data paths between users: everything lies in a 0700 folder on node-local disk.
"""

from __future__ import annotations

import hashlib

from containers.runtime import Argv, Commands, Request, Runtime

# $1 image, $2 container name, $3 reuse. Created under a temporary name and renamed when whole:
# parallel `enroot create` of one name leaves a half-made tree (seen with enroot 4.1.2).
PREPARE_SCRIPT = """\
set -euo pipefail
image=$1 name=$2 reuse=$3
command -v enroot >/dev/null || { echo "enroot is not installed on $(hostname)" >&2; exit 3; }
base=$(dirname "$ENROOT_DATA_PATH")
mkdir -m 700 "$base" 2>/dev/null || true
if [ ! -O "$base" ] || [ -L "$base" ]; then
  echo "$base is not a folder of $(id -un): somebody else made it; set container.scratch" >&2
  exit 3
fi
chmod 700 "$base"
mkdir -p "$ENROOT_DATA_PATH" "$ENROOT_RUNTIME_PATH" "$ENROOT_TEMP_PATH" "$ENROOT_CACHE_PATH"
exec 9>"$ENROOT_DATA_PATH/.$name.lock"
flock 9
if [ -d "$ENROOT_DATA_PATH/$name" ] && [ "$reuse" != no ]; then exit 0; fi
rm -rf "${ENROOT_DATA_PATH:?}/$name".part.* # of a prepare that was killed
part=$name.part.$$
trap 'rm -rf "${ENROOT_DATA_PATH:?}/$part"' EXIT
enroot create -n "$part" "$image"
rm -rf "${ENROOT_DATA_PATH:?}/$name"
mv "$ENROOT_DATA_PATH/$part" "$ENROOT_DATA_PATH/$name"
"""


class Enroot(Runtime):
    """`enroot create` once a node, `enroot start` for each rank."""

    name = "enroot"
    probe: Argv = ("enroot", "version")

    def plan(self, request: Request) -> Commands:
        """enroot execs: the container's process keeps the pid, so signals and exit codes pass."""
        name = container_name(request)
        reuse = "no" if request.reuse is False else "yes"
        start = ["enroot", "start", *(["--rw"] if request.writable else [])]
        for mount in request.mounts:
            start += ["-m", mount]
        return Commands(
            runtime=self.name,
            image=request.image,
            prepare=(("bash", "-c", PREPARE_SCRIPT, "prepare", request.image, name, reuse),),
            before_env=tuple(start),
            env_flag=("-e", "{name}"),
            after_env=(name, *_enter(request.workdir)),
            env=_paths(request),
        )


def container_name(request: Request) -> str:
    """Keyed by the image's path, size and time, so that a renewed image is unpacked anew."""
    digest = hashlib.sha256(f"{request.image}\0{request.stamp}".encode()).hexdigest()
    return f"vjob-{digest[:12]}"


def _enter(workdir: str) -> Argv:
    # enroot has no --workdir; sh execs, so that no shell stands between agent and rank.
    return ("sh", "-c", 'cd "$1" && shift && exec "$@"', "enter", workdir)


def _paths(request: Request) -> dict[str, str]:
    # Not /run (tmpfs, absent in batch jobs) and not the home folder (quota, shared file system).
    base = f"{request.scratch}/vjob-enroot-{request.user_id}"
    kinds = ("DATA", "RUNTIME", "TEMP", "CACHE")
    return {f"ENROOT_{kind}_PATH": f"{base}/{kind.lower()}" for kind in kinds}
