"""The last messages that container runtimes print when they fail, with their meanings and remedies.

Taken from the projects' issues and from real runs (enroot 4.1.2, charliecloud 0.31, podman 4.3.1,
apptainer 1.4.5, squashfs-tools 4.5.1); tests/varuna_core/facts/catalogue/test_containers.py holds
the messages. If a rank may print the same text, the pattern includes the tool's name: a full disk
under a checkpoint is not a full scratch folder. The file has one table, however long.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Tuple

from varuna_core.facts.catalogue.known_line import KnownLine, Proof, Scope, make_row
from varuna_core.facts.catalogue.remedies import (
    ask_admin,
    do,
    look_at,
    set_env,
)
from varuna_core.facts.cause import EndCause
from varuna_core.facts.remedy import Action, Remedy, Target

UNPRIVILEGED = ("enroot", "charliecloud", "podman", "apptainer", "pyxis")
"""Runtimes that create user namespaces."""
UNPACKING = ("enroot", "charliecloud", "podman", "apptainer", "docker")
"""Runtimes that may store unpacked images in the scratch folder."""
FETCHING = ("enroot", "pyxis", "podman", "docker", "apptainer")
"""Runtimes that contact image registries."""
ALL = (*UNPRIVILEGED, "docker")


def container(
    name: str, runtimes: Tuple[str, ...], pattern: str, meaning: str, *remedies: Remedy
) -> KnownLine:
    """Build the row of a message that a container runtime prints when it fails."""
    return make_row(
        Scope.CONTAINER,
        Proof.CAUSE,
        name,
        pattern,
        meaning,
        *remedies,
        only=runtimes,
        cause=EndCause.CONTAINER,
        fatal=True,
    )


ROWS = (
    container(
        "user namespaces",
        UNPRIVILEGED,
        r"(?i)failed to create user namespace|can't init user\+mount namespaces"
        r"|cannot clone: |write failed /proc/self/[ug]id_map",
        "the node does not allow its users to create user namespaces",
        ask_admin(
            "to set user.max_user_namespaces=15000, unprivileged_userns_clone=1 or "
            "apparmor_restrict_unprivileged_userns=0 on that host"
        ),
        Remedy(Action.RUN, Target.DOCTOR, detail="on the node to see which setting is missing"),
    ),
    container(
        "small /run",
        ("pyxis",),
        r"(?s)/run/(pyxis|enroot).*No space left on device"
        r"|No space left on device.*/run/(pyxis|enroot)",
        "pyxis unpacks to /run, a small file system in memory",
        ask_admin("to set pyxis' runtime_path= to a local disk"),
        Remedy(Action.SET, Target.RUNTIME, "enroot", ", which unpacks elsewhere", instead=True),
    ),
    container(
        "no room",
        UNPACKING,
        r"(Write (on output file )?failed because|(cp|tar|mkdir|mv|ln): .*:) No space left",
        "the disk of the unpacked images is full",
        Remedy(Action.RUN, value="vjob container clean", detail="there"),
        Remedy(
            Action.SET,
            Target.SCRATCH,
            "a node-local folder",
            "with room for three times the size of the image",
            instead=True,
        ),
    ),
    container(
        "quota",
        ALL,
        r"10-shadow\.sh exited with return code 4"
        r"|((cp|tar|mkdir|mv|sed|touch): .*|Write.* failed because )Disk quota exceeded",
        "a quota is used up, most often that of the home folder",
        do("make room there"),
        Remedy(Action.SET, Target.SCRATCH, "a node-local folder", "without a quota"),
    ),
    container(
        "no runtime folder",
        ("enroot", "pyxis"),
        r"couldn't mkdir /run/pyxis|cannot create directory .?/run/?(user|enroot|pyxis)?\b",
        "batch jobs have no login session, so nobody made the folder in /run",
        set_env("ENROOT_RUNTIME_PATH=$TMPDIR/enroot-$UID"),
        replace(ask_admin("to make the folder in the prolog"), instead=True),
        Remedy(Action.SET, Target.RUNTIME, "enroot", ", which needs none", instead=True),
    ),
    container(
        "shared runtime folder",
        ("pyxis",),
        r"Can't find a (valid )?SQUASHFS superblock",
        "the nodes share pyxis' runtime_path and overwrite each other's image",
        ask_admin("to set runtime_path= to a folder local to each node"),
        Remedy(Action.SET, Target.RUNTIME, "enroot", instead=True),
    ),
    container(
        "no image",
        UNPACKING,
        r"Can't find a (valid )?SQUASHFS superblock|Invalid image format: "
        r"|image format not recognized",
        "the file is not a squashfs image",
        look_at("unsquashfs -s FILE"),
        do("create the image with `vjob container import` or mksquashfs"),
    ),
    container(
        "torn image",
        ALL,
        r"File system corruption detected|Read on filesystem failed because EOF"
        r"|trying to read the squashfs image|(zlib|gzip|zstd|lzo|xz|lz4) uncompress failed",
        "the image file is cut short or damaged",
        do("copy or import the image again, and compare its size with the original"),
    ),
    container(
        "compression",
        ALL,
        r"image uses \w+ compression, this version supports only"
        r"|uses \w+ compression, this is unsupported|Compressor \"\w+\" is not supported",
        "the node's tools cannot read the compression of the image, such as enroot's lzo",
        do(
            "import the image again with `vjob container import --again`, and "
            "ENROOT_SQUASH_OPTIONS='-comp gzip -noD' in its environment"
        ),
    ),
    container(
        "import capabilities",
        ("enroot", "pyxis"),
        r"enroot-(aufs2ovlfs|mksquashovlfs): failed to"
        r"|(aufs2ovlfs|mksquashovlfs): command not found",
        "enroot cannot create overlays to import (no +caps package, or its folder is on NFS)",
        do("set ENROOT_TEMP_PATH to a local disk"),
        ask_admin("to install enroot+caps"),
        do("import on another machine and copy the file", instead=True),
    ),
    container(
        "noexec",
        UNPACKING,
        r"(enroot-switchroot: failed to execute|can't execve\(2\)): .*Permission denied"
        r"|start container process: exec .*permission denied",
        "the unpacked image lies on a file system that is mounted noexec",
        Remedy(
            Action.SET, Target.SCRATCH, "a folder", "for which `findmnt -T FOLDER` shows no noexec"
        ),
    ),
    container(
        "no shell",
        ALL,
        r"enroot-switchroot: failed to execute: .*No such file"
        r"|can't execve\(2\): .*No such file|exec:? \"?/bin/sh\"?:.*no such file",
        "the image has no /bin/sh",
        Remedy(Action.CHANGE, Target.IMAGE, "an image with a shell and a python3"),
    ),
    container(
        "no python",
        ALL,
        r"exec: \S{0,200}python[\d.]{0,10}: not found",
        "the image has no such interpreter on its PATH",
        Remedy(Action.SET, Target.PYTHON, "the path of an interpreter inside the image"),
    ),
    container(
        "stale file handle",
        ALL,
        r"(enroot|ch-run|pyxis|crun|runc|apptainer)\b.*Stale (NFS )?file handle",
        "the unpacked image lies on NFS and was replaced under a running container",
        Remedy(Action.SET, Target.SCRATCH, "a local disk of the nodes"),
    ),
    container(
        "foreign processor",
        ALL,
        r"(?i)exec format error",
        "the image is for another kind of processor",
        do(
            "import the image for the nodes' processor, as in `vjob container import --arch "
            "aarch64 REF`"
        ),
    ),
    container(
        "fuse",
        ("enroot", "charliecloud", "apptainer", "podman"),
        r"failed to open /dev/fuse|too many FUSE errors|fuse: device not found",
        "ordinary users may not open /dev/fuse, which mounting an image file needs",
        ask_admin("to make /dev/fuse mode 0666"),
        Remedy(
            Action.SET, Target.RUNTIME, "enroot or charliecloud", ", which unpack", instead=True
        ),
    ),
    container(
        "missing tool",
        UNPACKING,
        r"Command not found: (?!nvidia)|(unsquashfs|mksquashfs): (command )?not found",
        "a program that the runtime needs is not installed on the node",
        ask_admin("to install it on every node; unsquashfs is in squashfs-tools"),
    ),
    container(
        "no nvidia-container-cli",
        ("enroot", "pyxis"),
        r"Command not found: nvidia-container-cli",
        "enroot's NVIDIA hook does not find its tool, nvidia-container-cli",
        ask_admin("to install libnvidia-container-tools on the GPU nodes"),
    ),
    container(
        "nvidia driver",
        ALL,
        r"nvidia-container-cli: |Kernel module nvidia_uvm is not loaded",
        "the NVIDIA driver is not loaded, or its libraries have another version",
        look_at("nvidia-smi", "and `nvidia-container-cli info` on that node"),
        Remedy(Action.EXCLUDE, Target.NODE, "it", "until it is fixed"),
    ),
    container(
        "no compute libraries",
        ALL,
        r"libcuda\.so\.1: cannot open shared object file",
        "the driver's compute libraries are missing in the container",
        Remedy(Action.SET, Target.GPUS),
        set_env(
            "NVIDIA_VISIBLE_DEVICES=all",
            "and NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            instead=True,
        ),
    ),
    container(
        "no CDI",
        ("podman", "docker"),
        r"unresolvable CDI devices|stat nvidia\.com/gpu=",
        "no CDI file describes the GPUs of that node, or podman is older than 4.1",
        ask_admin("to run `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` on that host"),
    ),
    container(
        "docker without GPUs",
        ("docker",),
        r"could not select device driver .*capabilities: \[\[gpu\]\]",
        "docker has no NVIDIA container toolkit",
        ask_admin(
            "to install nvidia-container-toolkit and run `nvidia-ctk runtime configure "
            "--runtime=docker`"
        ),
    ),
    container(
        "docker daemon",
        ("docker",),
        r"connect to the [Dd]ocker (daemon|API)",
        "docker's daemon is not running on the node, or you are not in its group",
        ask_admin("to start docker and add you to the group docker"),
        Remedy(Action.SET, Target.RUNTIME, "podman", ", which needs no daemon", instead=True),
    ),
    container(
        "rlimits",
        ("podman", "docker"),
        r"setrlimit .?RLIMIT_\w+.?: Operation not permitted|error setting rlimit",
        "podman asks for higher limits than you may set",
        do(
            "lower default_ulimits in ~/.config/containers/containers.conf to `ulimit -Hn` and "
            "`ulimit -Hu`"
        ),
        Remedy(Action.SET, Target.RUNTIME, "enroot", instead=True),
    ),
    container(
        "hybrid cgroups",
        ("podman",),
        r"cgroups in hybrid mode not supported",
        "crun does not work where versions 1 and 2 of cgroups are mixed",
        ask_admin("to install runc"),
        do('set runtime = "runc" in containers.conf under [engine]'),
    ),
    container(
        "no subuid",
        ("podman", "apptainer"),
        r"no sub[ug]id ranges found|insufficient [UG]IDs|newuidmap: .*not allowed"
        r"|newuidmap.* executable file not found",
        "you have no subordinate user ids on that node",
        ask_admin(
            "to run `usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER` on it"
        ),
        Remedy(Action.RUN, value="podman system migrate", detail="afterwards"),
    ),
    container(
        "capabilities of root",
        ("apptainer",),
        r"Requesting capability set \w+ while permitted capability set",
        "root lacks capabilities on the node, which is itself a container",
        do("submit as an ordinary user"),
        Remedy(Action.SET, Target.RUNTIME, "enroot", instead=True),
    ),
    container(
        "no USER",
        ("charliecloud",),
        r"error: \$USER not set",
        "ch-run starts only if USER is set",
        do("put `export USER=$(id -un)` before ch-run"),
    ),
    container(
        "device hook",
        ("enroot", "pyxis"),
        r"10-(devices|cgroups)\.sh exited with return code",
        "enroot's hook that shows the node's devices failed",
        do("look at the previous line"),
        ask_admin("to look at /dev and enroot's hooks.d on that host"),
    ),
    container(
        "mount source",
        ALL,
        r"can't bind: source not found|mount source \S+ doesn't exist"
        r"|enroot-mount: failed to mount: (?![\s\S]*10-devices).*No such file"
        r"|Error: statfs .*: no such file",
        "the source of a mount is missing on that node",
        do("make that path on every node"),
        Remedy(Action.REMOVE, Target.MOUNTS, instead=True),
    ),
    container(
        "mount forbidden",
        ("enroot", "pyxis"),
        r"enroot-mount: failed to mount: .*Permission denied",
        "you have no permission to enter the source of a mount; nor has root on most NFS",
        do("submit as the user who owns that path"),
        Remedy(Action.REMOVE, Target.MOUNTS, instead=True),
    ),
    container(
        "mount point",
        ("charliecloud", "podman", "apptainer"),
        r"can't mkdir: .*(Read-only file system|Permission denied)"
        r"|destination \S+ doesn't exist in container",
        "the image has no folder to mount on, and none can be made in it",
        Remedy(Action.SET, Target.WRITABLE, "true"),
        do("make that folder in the image", instead=True),
    ),
    container(
        "root in use",
        ("enroot", "pyxis"),
        r"Could not acquire rootfs lock",
        "other starts on the same unpacked image ran the site's hooks for over 30 s",
        ask_admin("to look at what is slow in enroot's hooks.d on that node"),
        Remedy(
            Action.SET,
            Target.REUSE,
            "auto",
            ", so that jobs do not share a container",
            when="the runtime is pyxis",
        ),
    ),
    container(
        "folder of another",
        ("enroot",),
        r"/\.lock: (Permission denied|Read-only file system)",
        "enroot writes into an image folder, but this one is not yours",
        Remedy(Action.SET, Target.REUSE, "false", ", which copies the folder"),
        do("name a .sqsh file of the image", instead=True),
    ),
    container(
        "scratch",
        UNPACKING,
        r"mkdir: cannot create directory .?/(?!run\b)\S*: "
        r"(No such|Permission|Read-only|Not a)",
        "the folder of unpacked images is missing on that node, or you may not write there",
        Remedy(Action.SET, Target.SCRATCH, "a folder of yours on a local disk", ", such as /tmp"),
    ),
    container(
        "no pyxis",
        ("pyxis",),
        r"(unrecognized|invalid|unknown) option.*--container-image"
        r"|slurmd has no pyxis on this node",
        "srun, or slurmd on one of the nodes, lacks the pyxis plug-in",
        ask_admin("to install pyxis on every node"),
        Remedy(Action.SET, Target.RUNTIME, "enroot", instead=True),
    ),
    container(
        "pyxis path",
        ("pyxis",),
        r"pyxis: --container-mounts: source path does not exist"
        r"|pyxis: couldn't chdir to (?!.*Stale)",
        "a mount's source is missing on that node, or the working directory in the image",
        Remedy(Action.INSPECT, Target.MOUNTS),
        Remedy(Action.INSPECT, Target.CONTAINER_WORKDIR, detail=", which every node must have"),
    ),
    container(
        "pyxis container",
        ("pyxis",),
        r"File already exists: .*/pyxis_"
        r"|failed to execute: /bin/sh: Input/output error",
        "a killed start left a named container incomplete, or two jobs made it at once",
        Remedy(Action.SET, Target.REUSE, "auto"),
        do("remove the pyxis_ container on that node with `enroot remove`"),
    ),
    container(
        "registry",
        FETCHING,
        r"(?s)Querying registry.*curl: \(\d|pinging container registry|dial tcp: lookup",
        "the registry cannot be reached from that host",
        Remedy(Action.RUN, value="vjob container import", detail="on a host with network access"),
        Remedy(Action.SET, Target.IMAGE, "the image file that the import creates"),
    ),
    container(
        "credentials",
        FETCHING,
        r"returned error code: 40[13]|unauthorized: authentication required"
        r"|requested access to the resource is denied",
        "the registry needs a login, or REGISTRY/IMAGE was written for REGISTRY#IMAGE",
        do(
            "put `machine REGISTRY login USER password TOKEN` in ~/.config/enroot/.credentials "
            "(nvcr.io needs one for authn.nvidia.com too); podman and docker have `login`"
        ),
    ),
    container(
        "no such tag",
        FETCHING,
        r"returned error code: 404|manifest unknown",
        "the registry has no image of that name and tag",
        Remedy(
            Action.INSPECT,
            Target.IMAGE,
            detail=", which reads REGISTRY#NAME:TAG, as in nvcr.io#nvidia/pytorch:25.01-py3",
        ),
    ),
    container(
        "short name",
        ("podman",),
        r"short-name \S+ did not resolve",
        "podman has no default registry for an image name without a registry",
        Remedy(
            Action.CHANGE,
            Target.IMAGE,
            "a name with a registry",
            ", as in docker.io/library/debian:12",
        ),
    ),
    container(
        "locked memory",
        ALL,
        r"ibv_\w{1,40}.{0,200}Cannot allocate memory",
        "locked memory is limited, often to 64K; it is a limit of slurmd, not of the container",
        ask_admin(
            "to set LimitMEMLOCK=infinity for slurmd and PropagateResourceLimitsExcept=MEMLOCK "
            "in slurm.conf"
        ),
    ),
)
