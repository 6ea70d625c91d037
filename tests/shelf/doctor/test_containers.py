"""Findings on containers from recorded texts; real starts where runtimes are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vjob.containers.registry import RUNTIMES
from vjob.shelf.doctor import containers as doctor
from vjob.shelf.doctor.containers import make_skeleton, try_start

GIB = 1 << 30
MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
tmpfs /run tmpfs rw,nosuid,nodev,noexec,size=3276800k 0 0
tmpfs /tmp tmpfs rw,nosuid,nodev,noexec 0 0
files:/home /home nfs4 rw,vers=4.2 0 0
/dev/nvme0n1 /tmp/big xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/tmpfile", "ext4"),
        ("/tmp", "tmpfs"),
        ("/tmp/big/x", "xfs"),
        ("/home/u", "nfs4"),
    ],
)
def test_the_mount_of_a_path_is_the_nearest_above_it(path: str, kind: str) -> None:
    assert doctor.find_mount(path, MOUNTS)[0] == kind


@pytest.mark.parametrize(
    ("kind", "options", "free", "word"),
    [
        ("xfs", "rw,relatime", 900 * GIB, None),
        ("tmpfs", "rw,nosuid,noexec", 900 * GIB, "noexec"),
        ("nfs4", "rw", 900 * GIB, "not a disk of this machine"),
        ("tmpfs", "rw", 8 * GIB, "little memory"),
        ("ext4", "rw", 8 * GIB, "little disk"),
    ],
)
def test_scratch_must_be_local_executable_and_large(
    kind: str, options: str, free: int, word: str | None
) -> None:
    finding = doctor.judge_scratch("/tmp", kind, options, free)
    assert finding.status == ("ok" if word is None else "warn")
    assert word is None or (word in finding.text and "container.scratch" in finding.remedy)


def test_pyxis_on_a_small_run_is_told_where_to_unpack() -> None:
    helped, small = "  --container-image=PATH", ("tmpfs", "rw", 3 * GIB)
    assert doctor.judge_pyxis("", "", small).text == "srun has no pyxis"
    finding = doctor.judge_pyxis(helped, "required /usr/lib/slurm/spank_pyxis.so", small)
    assert finding.status == "warn" and "runtime_path=" in finding.remedy
    plugstack = "required /usr/lib/slurm/spank_pyxis.so runtime_path=/var/pyxis"
    finding = doctor.judge_pyxis(helped, plugstack, small)
    assert finding.status == "ok" and "/var/pyxis" in finding.text
    assert doctor.judge_pyxis(helped, "", ("tmpfs", "rw", 90 * GIB)).status == "ok"


def test_what_a_start_said_gets_its_remedy() -> None:
    finding = doctor.judge_start("enroot", "4.1.2\n", "", does="starts a container")
    assert (finding.status, finding.text) == ("ok", "enroot 4.1.2 starts a container")
    said = "crun: cgroups in hybrid mode not supported"
    finding = doctor.judge_start("podman", "podman version 4.3.1\n", said, does="starts")
    assert finding.status == "warn" and "runc" in finding.remedy and said in finding.text
    finding = doctor.judge_start("podman", "podman version 4.3.1\n", "odd", does="starts")
    assert "podman 4.3.1 is installed but does not work: odd" in finding.text
    assert "auto skips it" in finding.remedy


def test_docker_is_asked_for_its_daemon() -> None:
    finding = doctor.judge_start(
        "docker",
        "Docker version 28.2.2, build e6534b4\n",
        "Cannot connect to the Docker daemon at unix:///var/run/docker.sock.",
        does="answers",
    )
    assert (
        finding.text.startswith("docker 28.2.2 is installed") and "start docker" in finding.remedy
    )


def test_squashfs_tools() -> None:
    assert doctor.judge_squashfs("/usr/bin/unsquashfs", None).status == "ok"
    assert "squashfs-tools" in doctor.judge_squashfs(None, None).remedy


def test_gpus_need_something_to_bring_them_in() -> None:
    none = {"nvidia-container-cli": False, "nvidia-container-runtime": False}
    found = ["enroot", "podman", "apptainer"]
    findings = doctor.judge_gpus(found, none, has_hook=True, has_cdi=False)
    assert [(item.name, item.status) for item in findings] == [
        ("gpus in enroot", "warn"),
        ("gpus in podman", "warn"),
    ]
    assert "libnvidia-container-tools" in findings[0].remedy
    assert "nvidia-ctk cdi generate" in findings[1].remedy
    tools = dict.fromkeys(none, True)
    findings = doctor.judge_gpus(found, tools, has_hook=True, has_cdi=True)
    assert {item.status for item in findings} == {"ok"}


def test_a_machine_without_any_runtime_is_told_what_to_do() -> None:
    finding = doctor.judge_missing([], ["enroot", "docker"])
    assert finding.status == "note" and "srun vjob doctor" in finding.remedy
    assert doctor.judge_missing(["enroot"], ["docker"]).status == "ok"


def test_the_skeleton_has_the_links_of_the_machine(tmp_path: Path) -> None:
    host = tmp_path / "host"
    (host / "usr").mkdir(parents=True)
    (host / "sbin").mkdir()
    (host / "lib").symlink_to("usr/lib")
    mounts = make_skeleton(tmp_path / "root", host)
    assert [(mount.source, mount.target, mount.read_only) for mount in mounts] == [
        (str(host / "usr"), "/usr", True),
        (str(host / "sbin"), "/sbin", True),
    ]
    assert os.readlink(tmp_path / "root/lib") == "usr/lib"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                getattr(pytest.mark, name),
                pytest.mark.skipif(shutil.which(program) is None, reason=f"needs {name}"),
            ],
        )
        for name, program in (("charliecloud", "ch-run"), ("enroot", "enroot"))
    ],
)
def test_a_runtime_is_really_started_without_an_image(name: str, tmp_path: Path) -> None:
    assert try_start(RUNTIMES[name], str(tmp_path)) == ""
    assert not list(tmp_path.iterdir()), "nothing is left"


@pytest.mark.charliecloud
@pytest.mark.skipif(shutil.which("ch-run") is None, reason="needs charliecloud")
def test_a_runtime_that_may_not_start_says_why(tmp_path: Path) -> None:
    """In a user namespace that grants no more of them, as on a node whose sysctl is 0."""
    code = (
        "from vjob.containers.registry import RUNTIMES\n"
        "from vjob.shelf.doctor.containers import try_start\n"
        f"print(try_start(RUNTIMES['charliecloud'], {str(tmp_path)!r}))"
    )
    shell = 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"'
    words = ["unshare", "--user", "--map-root-user", "sh", "-c", shell, "sh"]
    done = subprocess.run(
        [*words, sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"user namespaces cannot be limited here: {done.stderr[-200:]}")
    finding = doctor.judge_start("charliecloud", "0.31", done.stdout, does="starts")
    assert "max_user_namespaces" in finding.remedy, done.stdout
