"""`vjob doctor` on containers: what is installed, whether it starts, and which known obstacles
there are.

Judges are pure, as in doctor.py; what is corrected on one node must be on all, so it is meant to be
run on one of them: `srun vjob doctor`. A start is tried with a root folder made of this machine's
own directories, so that no image is needed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from varuna_core.agent.gpu.accelerator import choose_accelerator
from varuna_core.facts.catalogue.known_line import KnownLine, Scope
from varuna_core.facts.known import NotKnown
from varuna_core.facts.remedy import Context, render_all
from varuna_core.records.plan import ContainerPlan
from vjob.containers.registry import RUNTIMES
from vjob.containers.runtime import ImageKind, Mount, Request, Runtime
from vjob.jobs.conf.schema import Container
from vjob.jobs.images.store import remove_tree
from vjob.jobs.known_lines import load_catalogue
from vjob.jobs.schedulers.diagnosis import Diagnosis, ask, read_text, try_out

VERSIONS: Mapping[str, tuple[str, ...]] = {
    "enroot": ("enroot", "version"),
    "charliecloud": ("ch-run", "--version"),
    "apptainer": ("apptainer", "version"),
    "podman": ("podman", "--version"),
    "docker": ("docker", "--version"),
}
GIB = 1 << 30
LOW_SCRATCH = 30 * GIB
"""Least free bytes: an unpacked PyTorch image takes about 25 GB."""
LOW_RUN = 30 * GIB
HOOKS = ("/etc/enroot/hooks.d", "/usr/local/etc/enroot/hooks.d")
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
START_S = 60.0
FOLDERS = ("dev", "etc", "proc", "run", "sys", "tmp", "var")
OF_HOST = ("usr", "bin", "lib", "lib32", "lib64", "sbin")
"""Directories of the host that a test container needs to run this machine's programs; links on most
systems now."""


def examine_containers() -> list[Diagnosis]:
    """Examine all that concerns containers, without raising an exception."""
    scratch = Container().scratch
    found = [name for name, command in VERSIONS.items() if shutil.which(command[0])]
    diagnoses = [examine_runtime(name, scratch) for name in found]
    missing = [name for name in VERSIONS if name not in found]
    if missing:
        diagnoses.append(judge_missing(found, missing))
    help_text = ask("srun", "--help") if shutil.which("srun") else None
    if help_text is not None:
        diagnoses.append(judge_pyxis(help_text, _read_plugstack(), _find_mount("/run")))
    diagnoses.append(judge_scratch(scratch, *_find_mount(scratch)))
    diagnoses.append(judge_squashfs(shutil.which("unsquashfs"), shutil.which("mksquashfs")))
    vendor = choose_accelerator()
    if vendor.name == "nvidia":
        diagnoses += examine_gpus(found)
    elif isinstance(problem := vendor.count(), NotKnown) and vendor.is_here():
        diagnoses.append(Diagnosis(name="gpus", status="warn", text=problem.reason))
    return diagnoses


def examine_runtime(name: str, scratch: str) -> Diagnosis:
    """Check a container runtime's version, and try to start a container; for docker, which only
    starts images, check that its daemon answers."""
    env = {**os.environ, "USER": os.environ.get("USER") or str(os.getuid())}
    _, said = try_out(VERSIONS[name], env)
    kind = RUNTIMES.get(name)
    if name == "docker":
        code, problem = try_out(("docker", "info"))
        return judge_start(name, said, problem if code else "", does="answers")
    if kind is None or ImageKind.FOLDER not in kind.kinds:
        return judge_start(name, said, "", does="is installed")
    try:
        problem = try_start(kind, scratch)
    except OSError as error:
        problem = f"a test container could not be started in {scratch}: {error.strerror}"
    return judge_start(name, said, problem, does="starts a container")


def judge_start(name: str, version: str, problem: str, *, does: str) -> Diagnosis:
    """Judge a runtime by its version output, and by the error of a start."""
    match = re.search(r"(?<!\d)\d+(\.\d+)+\S*", version)
    what = f"{name} {match.group().rstrip(',')}" if match else name
    if not problem:
        return Diagnosis(name=name, status="ok", text=f"{what} {does}")
    row = load_catalogue().match(Scope.CONTAINER, problem, [name])
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    return Diagnosis(
        name=name,
        status="warn",
        text=f"{what} is installed but does not work: {' | '.join(lines[-2:])}",
        remedy=row.explain(Context.CONF)
        if row is not None
        else f"runs with container.runtime: {name} would fail like this; auto skips it",
    )


def _get_row(name: str) -> KnownLine:
    row = load_catalogue().find(Scope.CONTAINER, name)
    assert row is not None, name
    return row


def judge_missing(found: Collection[str], missing: Collection[str]) -> Diagnosis:
    text = f"not installed on this machine: {', '.join(missing)} (nodes may differ)"
    if found:
        return Diagnosis(name="runtimes", status="ok", text=text)
    remedy = "run `srun vjob doctor` to see a node, or run bare, without container.image"
    return Diagnosis(name="runtimes", status="note", text=text, remedy=remedy)


def judge_pyxis(help_text: str, plugstack: str, run: tuple[str, str, int]) -> Diagnosis:
    """Judge pyxis. `run` has the file system type, options and free bytes of /run, where pyxis
    unpacks images by default."""
    if "--container-image" not in help_text:
        return Diagnosis(name="pyxis", status="note", text="srun has no pyxis")
    match = re.search(r"runtime_path=(\S+)", plugstack)
    if match is None and run[0] == "tmpfs" and run[2] < LOW_RUN:
        row = _get_row("small /run")
        text = f"srun has pyxis; {row.meaning}: {run[2] / GIB:.1f} GiB are free there"
        remedy = render_all(row.remedies, Context.CONF)
        return Diagnosis(name="pyxis", status="warn", text=text, remedy=remedy)
    where = match[1] if match else "/run/pyxis"
    return Diagnosis(name="pyxis", status="ok", text=f"srun has pyxis, which unpacks in {where}")


def judge_scratch(path: str, kind: str, options: str, free: int) -> Diagnosis:
    """Judge the default folder of container.scratch, which must be local, allow programs to be
    executed, and have free space."""
    text = f"{path}, the default of container.scratch, is {kind or 'of unknown type'}"
    text += f" with {free / GIB:.0f} GiB free"
    advice = "set container.scratch in confs to a node-local folder"
    if "noexec" in options.split(","):
        problem, remedy = "mounted noexec: nothing in an image could run", f"{advice} without that"
    elif kind.startswith(("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse.")):
        problem, remedy = "not a disk of this machine", advice
    elif free < LOW_SCRATCH:
        where = "memory" if kind == "tmpfs" else "disk"
        problem = f"too little {where} for an unpacked PyTorch image, which takes 25 GB"
        remedy = f"{advice} with three times the image's size; `vjob container clean` makes room"
    else:
        return Diagnosis(name="scratch", status="ok", text=text)
    return Diagnosis(name="scratch", status="warn", text=f"{text}: {problem}", remedy=remedy)


def judge_squashfs(unpacker: str | None, packer: str | None) -> Diagnosis:
    if unpacker is None:
        return Diagnosis(
            name="squashfs",
            status="warn",
            text="unsquashfs is missing: enroot, charliecloud and podman cannot unpack .sqsh files",
            remedy="an admin installs squashfs-tools on every node",
        )
    text = "unsquashfs is there" + ("" if packer else "; mksquashfs is missing")
    return Diagnosis(name="squashfs", status="ok", text=text)


def examine_gpus(found: Collection[str]) -> list[Diagnosis]:
    """Examine how GPUs enter containers, on a machine with an NVIDIA driver."""
    has_hook = any(Path(folder, "98-nvidia.sh").exists() for folder in HOOKS)
    has_cdi = any(
        "nvidia" in path.name for folder in CDI_FOLDERS for path in Path(folder).glob("*")
    )
    tools = {
        name: shutil.which(name) is not None
        for name in ("nvidia-container-cli", "nvidia-container-runtime")
    }
    return judge_gpus(found, tools, has_hook=has_hook, has_cdi=has_cdi)


def judge_gpus(
    found: Collection[str], tools: Mapping[str, bool], *, has_hook: bool, has_cdi: bool
) -> list[Diagnosis]:
    """Judge for each runtime if GPUs can enter its containers."""
    cli = tools["nvidia-container-cli"]
    rows = {
        "enroot": (cli and has_hook, "nvidia-container-cli, or enroot's hook 98-nvidia.sh"),
        "charliecloud": (cli, "nvidia-container-cli, for ch-fromhost --nvidia"),
        "podman": (has_cdi, "a CDI file for NVIDIA in /etc/cdi or /var/run/cdi"),
        "docker": (tools["nvidia-container-runtime"], "nvidia-container-runtime"),
    }
    remedies = {
        "enroot": "no nvidia-container-cli",
        "charliecloud": "no nvidia-container-cli",
        "podman": "no CDI",
        "docker": "docker without GPUs",
    }
    return [
        Diagnosis(name=f"gpus in {name}", status="ok", text="the tool for GPUs is installed")
        if rows[name][0]
        else Diagnosis(
            name=f"gpus in {name}",
            status="warn",
            text=f"missing: {rows[name][1]}",
            remedy=render_all(_get_row(remedies[name]).remedies, Context.CONF),
        )
        for name in rows
        if name in found
    ]


def find_mount(path: str, mounts: str) -> tuple[str, str]:
    """Return type and options of the file system that holds a path, from /proc/self/mounts."""
    best = ("", "", "")
    for line in mounts.splitlines():
        point, kind, options = (*line.split(" "), "", "", "", "")[1:4]
        inside = point == "/" or path == point or path.startswith(f"{point}/")
        if inside and len(point) >= len(best[0]):
            best = (point, kind, options)
    return best[1], best[2]


def _find_mount(path: str) -> tuple[str, str, int]:
    """Return type, options and free bytes of the file system that holds a path."""
    real = os.path.realpath(path)
    try:
        facts = os.statvfs(real)
        free = facts.f_bavail * facts.f_frsize
    except OSError:
        free = 0
    return (*find_mount(real, read_text("/proc/self/mounts") or ""), free)


def _read_plugstack() -> str:
    """Return the SPANK settings of slurmd (plugstack.conf), as far as they are readable."""
    folder = Path(os.environ.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent
    paths = [folder / "plugstack.conf", *sorted(folder.glob("plugstack.conf.d/*.conf"))]
    return "\n".join(read_text(str(path)) or "" for path in paths)


def try_start(kind: type[Runtime], scratch: str) -> str:
    """Start a container by the commands that a plan has for a node; return the error, or ""."""
    with make_room(scratch) as folder:
        mounts = make_skeleton(folder / "root", Path("/"))
        commands = kind().plan(build_request(folder, mounts))
        env = build_environment(commands, os.environ)
        try:
            start = commands.hold or (*commands.start, "/bin/sh", "-c", ":")
            for words in (*commands.prepare, start):
                code, said = try_out(fill_in(words), env, START_S)
                if code != 0:
                    return said.strip() or f"{words[0]} ended with {code}"
        finally:
            for words in commands.clean:
                try_out(fill_in(words), env, START_S)
    return ""


@contextlib.contextmanager
def make_room(scratch: str) -> Iterator[Path]:
    """Make a temporary folder in scratch, like a run's store."""
    folder = Path(tempfile.mkdtemp(prefix="vjob-doctor-", dir=scratch))
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # podman's notes may belong to mapped users
            remove_tree(folder)


def make_skeleton(root: Path, host: Path) -> tuple[Mount, ...]:
    """Make the root folder of a test container: empty folders and files, and copies of this
    machine's symbolic links. Return the mounts of this machine's folders that complete it."""
    mounts = []
    for name in FOLDERS:
        (root / name).mkdir(parents=True)
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (root / "etc" / name).touch()
    for name in OF_HOST:
        path = host / name
        if path.is_symlink():
            (root / name).symlink_to(os.readlink(path))
        elif path.is_dir():
            (root / name).mkdir()
            mounts.append(Mount(source=str(path), target=f"/{name}", read_only=True))
    return tuple(mounts)


def build_request(folder: Path, mounts: tuple[Mount, ...]) -> Request:
    return Request(
        run="doctor",
        image=str(folder / "root"),
        kind=ImageKind.FOLDER,
        mounts=mounts,
        workdir="/",
        writable=False,
        remap_root=False,
        reuse="auto",
        gpus=False,
        user_id=os.getuid(),
        scratch=str(folder),
        stamp="",
    )


def build_environment(commands: ContainerPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the agent's environment, without Slurm's and Python's variables, meant for jobs."""
    base = {
        name: value
        for name, value in environ.items()
        if not name.startswith(("SLURM", "SBATCH", "PYTHON"))
    }
    base.setdefault("USER", str(os.getuid()))
    return {**base, **commands.env, commands.enter_as: ":"}


def fill_in(words: Sequence[str]) -> tuple[str, ...]:
    """Fill `%{node}` and other placeholders in words, as the agent does on a node."""
    return tuple(re.sub(r"%\{\w+\}", "doctor", word) for word in words)
