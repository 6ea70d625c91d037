"""Messages that container runtimes end with, what they mean, and what to do. Data alone.

Taken from the projects' issues and from real runs (enroot 4.1.2, charliecloud 0.31, podman 4.3.1,
apptainer 1.4.5, squashfs-tools 4.5.1); tests/containers/test_catalogue.py holds the messages. A
pattern names the tool that speaks wherever a rank might say the same: a full disk under a
checkpoint is not a full container.scratch. Patterns run on a node's Python, from 3.8. Longer than a
module should be: it is one table.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

UNPRIVILEGED = ("enroot", "charliecloud", "podman", "apptainer", "pyxis")
"""Those that make user namespaces."""
UNPACKING = ("enroot", "charliecloud", "podman", "apptainer", "docker")
"""Those that may use the store of unpacked images in container.scratch."""
FETCHING = ("enroot", "pyxis", "podman", "docker", "apptainer")
"""Those that ask registries."""
ALL = (*UNPRIVILEGED, "docker")


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """One known message."""

    name: str
    runtimes: tuple[str, ...]
    pattern: str
    """Regular expression, searched for in the last lines of what was said."""
    cause: str
    remedy: str


def remedies_for(runtimes: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Pattern and remedy of every message that one of these runtimes may end with."""
    return tuple(
        (trouble.pattern, trouble.remedy)
        for trouble in CATALOGUE
        if not set(trouble.runtimes).isdisjoint(runtimes)
    )


def find_trouble(text: str, runtimes: Collection[str] = ALL) -> Trouble | None:
    """The first known message in the text."""
    for trouble in CATALOGUE:
        if not set(trouble.runtimes).isdisjoint(runtimes) and re.search(trouble.pattern, text):
            return trouble
    return None


CATALOGUE: tuple[Trouble, ...] = (
    Trouble(
        name="user namespaces",
        runtimes=UNPRIVILEGED,
        pattern=r"(?i)failed to create user namespace|can't init user\+mount namespaces"
        r"|cannot clone: |write failed /proc/self/[ug]id_map",
        cause="the node does not let its users make user namespaces",
        remedy="have an admin set user.max_user_namespaces=15000, unprivileged_userns_clone=1 or "
        "apparmor_restrict_unprivileged_userns=0 there: `vjob doctor` on the node says which",
    ),
    Trouble(
        name="small /run",
        runtimes=("pyxis",),
        pattern=r"(?s)/run/(pyxis|enroot).*No space left on device"
        r"|No space left on device.*/run/(pyxis|enroot)",
        cause="pyxis unpacks to /run, a small file system in memory",
        remedy="have an admin set pyxis' runtime_path= to a local disk, or set container.runtime: "
        "enroot, which unpacks to container.scratch",
    ),
    Trouble(
        name="no room",
        runtimes=UNPACKING,
        pattern=r"(Write (on output file )?failed because|(cp|tar|mkdir|mv|ln): .*:) No space left",
        cause="the disk of container.scratch is full",
        remedy="make room with `vjob container clean` there, or set container.scratch to a "
        "node-local folder with three times the image's size",
    ),
    Trouble(
        name="quota",
        runtimes=ALL,
        pattern=r"10-shadow\.sh exited with return code 4"
        r"|((cp|tar|mkdir|mv|sed|touch): .*|Write.* failed because )Disk quota exceeded",
        cause="a quota is used up, most often that of the home folder",
        remedy="make room there, and set container.scratch to a node-local folder without a quota",
    ),
    Trouble(
        name="no runtime folder",
        runtimes=("enroot", "pyxis"),
        pattern=r"couldn't mkdir /run/pyxis|cannot create directory .?/run/?(user|enroot|pyxis)?\b",
        cause="batch jobs have no login session, so nobody made the folder in /run",
        remedy="set ENROOT_RUNTIME_PATH=$TMPDIR/enroot-$UID, or have an admin make the folder in "
        "the prolog; container.runtime: enroot needs none",
    ),
    Trouble(
        name="shared runtime folder",
        runtimes=("pyxis",),
        pattern=r"Can't find a (valid )?SQUASHFS superblock",
        cause="the nodes share pyxis' runtime_path and overwrite each other's image",
        remedy="have an admin set runtime_path= to a folder that is each node's own, or set "
        "container.runtime: enroot",
    ),
    Trouble(
        name="no image",
        runtimes=UNPACKING,
        pattern=r"Can't find a (valid )?SQUASHFS superblock|Invalid image format: "
        r"|image format not recognized",
        cause="the file is not a squashfs image",
        remedy="see `unsquashfs -s FILE`; `vjob container import` and `build` make images",
    ),
    Trouble(
        name="torn image",
        runtimes=ALL,
        pattern=r"File system corruption detected|Read on filesystem failed because EOF"
        r"|trying to read the squashfs image|(zlib|gzip|zstd|lzo|xz|lz4) uncompress failed",
        cause="the image file is cut short or damaged",
        remedy="copy or import container.image again, and compare its size with the original's",
    ),
    Trouble(
        name="compression",
        runtimes=ALL,
        pattern=r"image uses \w+ compression, this version supports only"
        r"|uses \w+ compression, this is unsupported|Compressor \"\w+\" is not supported",
        cause="the tools there cannot read the compression of the image, such as enroot's lzo",
        remedy="make the image again with ENROOT_SQUASH_OPTIONS='-comp gzip -noD' in the "
        "environment of `vjob container import --again`",
    ),
    Trouble(
        name="import capabilities",
        runtimes=("enroot", "pyxis"),
        pattern=r"enroot-(aufs2ovlfs|mksquashovlfs): failed to"
        r"|(aufs2ovlfs|mksquashovlfs): command not found",
        cause="enroot's import may not make overlays: no +caps package, or its folder is on NFS",
        remedy="set ENROOT_TEMP_PATH to a local disk and have an admin install enroot+caps, or "
        "import on another machine and copy the file",
    ),
    Trouble(
        name="noexec",
        runtimes=UNPACKING,
        pattern=r"(enroot-switchroot: failed to execute|can't execve\(2\)): .*Permission denied"
        r"|start container process: exec .*permission denied",
        cause="the unpacked image lies on a file system that is mounted noexec",
        remedy="set container.scratch to a folder for which `findmnt -T FOLDER` shows no noexec",
    ),
    Trouble(
        name="no shell",
        runtimes=ALL,
        pattern=r"enroot-switchroot: failed to execute: .*No such file"
        r"|can't execve\(2\): .*No such file|exec:? \"?/bin/sh\"?:.*no such file",
        cause="the image has no /bin/sh",
        remedy="take an image with a shell and a python3 in it as container.image",
    ),
    Trouble(
        name="no python",
        runtimes=ALL,
        pattern=r"exec: \S*python[\d.]*: not found",
        cause="the image has no such interpreter on its PATH",
        remedy="set program.python to the path of an interpreter inside the image",
    ),
    Trouble(
        name="stale file handle",
        runtimes=ALL,
        pattern=r"(enroot|ch-run|pyxis|crun|runc|apptainer)\b.*Stale (NFS )?file handle",
        cause="the unpacked image lies on NFS and was replaced under a running container",
        remedy="set container.scratch to a local disk of the nodes",
    ),
    Trouble(
        name="foreign processor",
        runtimes=ALL,
        pattern=r"(?i)exec format error",
        cause="the image is for another kind of processor",
        remedy="import it for the nodes' own, as in `vjob container import --arch aarch64 REF`",
    ),
    Trouble(
        name="fuse",
        runtimes=("enroot", "charliecloud", "apptainer", "podman"),
        pattern=r"failed to open /dev/fuse|too many FUSE errors|fuse: device not found",
        cause="ordinary users may not open /dev/fuse, which mounting an image file needs",
        remedy="have an admin make /dev/fuse mode 0666, or set container.runtime to enroot or "
        "charliecloud, which unpack",
    ),
    Trouble(
        name="missing tool",
        runtimes=UNPACKING,
        pattern=r"Command not found: (?!nvidia)|(unsquashfs|mksquashfs): (command )?not found",
        cause="a program that the runtime needs is not installed there",
        remedy="have an admin install it on every node; unsquashfs is in squashfs-tools",
    ),
    Trouble(
        name="no nvidia-container-cli",
        runtimes=("enroot", "pyxis"),
        pattern=r"Command not found: nvidia-container-cli",
        cause="enroot's NVIDIA hook lacks its tool",
        remedy="have an admin install libnvidia-container-tools on the GPU nodes",
    ),
    Trouble(
        name="nvidia driver",
        runtimes=ALL,
        pattern=r"nvidia-container-cli: |Kernel module nvidia_uvm is not loaded",
        cause="the NVIDIA driver is not loaded, or is not of its libraries' version",
        remedy="look at `nvidia-smi` and `nvidia-container-cli info` on that node, and leave it "
        "out with cluster.exclude until it is fixed",
    ),
    Trouble(
        name="no compute libraries",
        runtimes=ALL,
        pattern=r"libcuda\.so\.1: cannot open shared object file",
        cause="the driver's compute libraries did not enter the container",
        remedy="set gpus in the node group, or env: {NVIDIA_VISIBLE_DEVICES: all, "
        "NVIDIA_DRIVER_CAPABILITIES: 'compute,utility'}",
    ),
    Trouble(
        name="no CDI",
        runtimes=("podman", "docker"),
        pattern=r"unresolvable CDI devices|stat nvidia\.com/gpu=",
        cause="no CDI file describes the GPUs of that node, or podman is older than 4.1",
        remedy="have an admin run `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` there",
    ),
    Trouble(
        name="docker without GPUs",
        runtimes=("docker",),
        pattern=r"could not select device driver .*capabilities: \[\[gpu\]\]",
        cause="docker has no NVIDIA container toolkit",
        remedy="have an admin install nvidia-container-toolkit and run "
        "`nvidia-ctk runtime configure --runtime=docker`",
    ),
    Trouble(
        name="docker daemon",
        runtimes=("docker",),
        pattern=r"connect to the [Dd]ocker (daemon|API)",
        cause="docker's daemon does not run there, or you are not in its group",
        remedy="have an admin start docker and add you to the group docker, or set "
        "container.runtime: podman, which needs no daemon",
    ),
    Trouble(
        name="rlimits",
        runtimes=("podman", "docker"),
        pattern=r"setrlimit .?RLIMIT_\w+.?: Operation not permitted|error setting rlimit",
        cause="podman asks for higher limits than you may set",
        remedy="lower default_ulimits in ~/.config/containers/containers.conf to `ulimit -Hn` and "
        "`ulimit -Hu`, or set container.runtime: enroot",
    ),
    Trouble(
        name="hybrid cgroups",
        runtimes=("podman",),
        pattern=r"cgroups in hybrid mode not supported",
        cause="crun does not work where versions 1 and 2 of cgroups are mixed",
        remedy='have runc installed, and set runtime = "runc" in containers.conf under [engine]',
    ),
    Trouble(
        name="no subuid",
        runtimes=("podman", "apptainer"),
        pattern=r"no sub[ug]id ranges found|insufficient [UG]IDs|newuidmap: .*not allowed"
        r"|newuidmap.* executable file not found",
        cause="you have no subordinate user ids on that node",
        remedy="have an admin run `usermod --add-subuids 100000-165535 --add-subgids 100000-165535 "
        "USER` there, then run `podman system migrate`",
    ),
    Trouble(
        name="capabilities of root",
        runtimes=("apptainer",),
        pattern=r"Requesting capability set \w+ while permitted capability set",
        cause="root lacks capabilities there: the node is itself a container",
        remedy="submit as an ordinary user, or set container.runtime: enroot",
    ),
    Trouble(
        name="no USER",
        runtimes=("charliecloud",),
        pattern=r"error: \$USER not set",
        cause="ch-run starts only where USER is set",
        remedy="export USER=$(id -un) before it",
    ),
    Trouble(
        name="device hook",
        runtimes=("enroot", "pyxis"),
        pattern=r"10-(devices|cgroups)\.sh exited with return code",
        cause="enroot's hook that shows the node's devices failed",
        remedy="see the line before it, and have an admin look at /dev and enroot's hooks.d there",
    ),
    Trouble(
        name="mount source",
        runtimes=ALL,
        pattern=r"can't bind: source not found|mount source \S+ doesn't exist"
        r"|enroot-mount: failed to mount: (?![\s\S]*10-devices).*No such file"
        r"|Error: statfs .*: no such file",
        cause="a source of container.mounts is missing on that node",
        remedy="make that path on every node, or take it out of container.mounts",
    ),
    Trouble(
        name="mount forbidden",
        runtimes=("enroot", "pyxis"),
        pattern=r"enroot-mount: failed to mount: .*Permission denied",
        cause="you may not enter a source of container.mounts there; root may not on most NFS",
        remedy="submit as the user who owns that path, or take it out of container.mounts",
    ),
    Trouble(
        name="mount point",
        runtimes=("charliecloud", "podman", "apptainer"),
        pattern=r"can't mkdir: .*(Read-only file system|Permission denied)"
        r"|destination \S+ doesn't exist in container",
        cause="the image has no folder to mount on, and none can be made in it",
        remedy="set container.writable: true, or make that folder in the image",
    ),
    Trouble(
        name="root in use",
        runtimes=("enroot", "pyxis"),
        pattern=r"Could not acquire rootfs lock",
        cause="other starts on the same unpacked image ran the site's hooks for over 30 s",
        remedy="have an admin look at what is slow in enroot's hooks.d on that node; with pyxis "
        "set container.reuse: auto, so that jobs share no container",
    ),
    Trouble(
        name="folder of another",
        runtimes=("enroot",),
        pattern=r"/\.lock: (Permission denied|Read-only file system)",
        cause="enroot writes into an image folder, and this one is not yours",
        remedy="set container.reuse: false, which copies the folder, or name a .sqsh file of it",
    ),
    Trouble(
        name="scratch",
        runtimes=UNPACKING,
        pattern=r"mkdir: cannot create directory .?/(?!run\b)\S*: "
        r"(No such|Permission|Read-only|Not a)",
        cause="container.scratch is no folder that you may write on that node",
        remedy="set container.scratch to a node-local folder of yours, such as /tmp",
    ),
    Trouble(
        name="no pyxis",
        runtimes=("pyxis",),
        pattern=r"(unrecognized|invalid|unknown) option.*--container-image"
        r"|slurmd has no pyxis on this node",
        cause="srun, or slurmd of one node, has no pyxis",
        remedy="have an admin install pyxis on every node, or set container.runtime: enroot",
    ),
    Trouble(
        name="pyxis path",
        runtimes=("pyxis",),
        pattern=r"pyxis: --container-mounts: source path does not exist"
        r"|pyxis: couldn't chdir to (?!.*Stale)",
        cause="a mount's source is missing on that node, or the working directory in the image",
        remedy="make container.mounts and container.workdir name folders that every node has",
    ),
    Trouble(
        name="pyxis container",
        runtimes=("pyxis",),
        pattern=r"File already exists: .*/pyxis_"
        r"|failed to execute: /bin/sh: Input/output error",
        cause="a named container was torn by a killed start, or two jobs made it at once",
        remedy="set container.reuse: auto, and `enroot remove` the pyxis_ container on that node",
    ),
    Trouble(
        name="registry",
        runtimes=FETCHING,
        pattern=r"(?s)Querying registry.*curl: \(\d+\)|pinging container registry|dial tcp: lookup",
        cause="the registry cannot be reached from there",
        remedy="run `vjob container import` on a host with a network, and name the file that it "
        "makes in container.image",
    ),
    Trouble(
        name="credentials",
        runtimes=FETCHING,
        pattern=r"returned error code: 40[13]|unauthorized: authentication required"
        r"|requested access to the resource is denied",
        cause="the registry does not know you, or REGISTRY/IMAGE was meant as REGISTRY#IMAGE",
        remedy="put `machine REGISTRY login USER password TOKEN` in ~/.config/enroot/.credentials "
        "(nvcr.io: one for authn.nvidia.com too); podman and docker have `login`",
    ),
    Trouble(
        name="no such tag",
        runtimes=FETCHING,
        pattern=r"returned error code: 404|manifest unknown",
        cause="the registry has no image of that name and tag",
        remedy="check container.image: REGISTRY#NAME:TAG, as in nvcr.io#nvidia/pytorch:25.01-py3",
    ),
    Trouble(
        name="short name",
        runtimes=("podman",),
        pattern=r"short-name \S+ did not resolve",
        cause="podman knows no registry for a bare name",
        remedy="name the registry in container.image, as in docker.io/library/debian:12",
    ),
    Trouble(
        name="locked memory",
        runtimes=ALL,
        pattern=r"ibv_\w+.*Cannot allocate memory",
        cause="locked memory is limited, often to 64K: a limit of slurmd, not of the container",
        remedy="have an admin set LimitMEMLOCK=infinity for slurmd and "
        "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf",
    ),
)
