"""Known messages find their row and no other; the remedy reaches the preflight table."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.varuna_core.agent.local_run import Stage, make_container, make_plan, shell
from varuna_core.agent.setup.known_lines import write_known_lines
from varuna_core.facts.catalogue.containers import ALL
from varuna_core.facts.catalogue.containers import ROWS as CONTAINER_ROWS
from varuna_core.facts.catalogue.known_line import Scope
from varuna_core.facts.catalogue.tables import BUILT_IN
from varuna_core.facts.remedy import Context, render_all
from vjob.containers.registry import RUNTIMES
from vjob.jobs.submit.build_plan import list_known_lines

MESSAGES = (
    # Recorded on Debian 12 with the versions that the catalogue names.
    ("user namespaces", "enroot-nsenter: failed to create user namespace: Operation not permitted"),
    ("user namespaces", "enroot-nsenter: failed to create user namespace: No space left on device"),
    (
        "user namespaces",
        "ch-run[1667]: error: can't init user+mount namespaces: No space left on device "
        "(ch_core.c:436 28)",
    ),
    (
        "user namespaces",
        "INFO   :   apptainer-suid, or compile with ./mconfig --with-suid\n"
        "ERROR  : Failed to create user namespace: maximum number of user namespaces exceeded, "
        "check /proc/sys/user/max_user_namespaces",
    ),
    ("user namespaces", "ERROR  : Failed to create user namespace: Permission denied"),
    (
        "no room",
        "Write on output file failed because No space left on device | FATAL ERROR: writer: failed "
        "to write file /tmp/vjob-0/roots/vjob-1.part.9/etc/adduser.conf",
    ),
    ("no room", "cp: error writing '/tmp/a/b': No space left on device"),
    (
        "no runtime folder",
        "mkdir: cannot create directory \u2018/run/user/1001\u2019: Permission denied",
    ),
    (
        "no image",
        "FATAL ERROR: Can't find a valid SQUASHFS superblock on /tmp/no.sqsh",
    ),
    ("no image", "[ERROR] Invalid image format: /tmp/no.sqsh"),
    (
        "no image",
        "FATAL:   While checking container encryption: could not open image /tmp/no.sqsh: image "
        "format not recognized",
    ),
    (
        "torn image",
        "Read on filesystem failed because EOF | read_id_table: failed to read id index table | "
        "FATAL ERROR: File system corruption detected",
    ),
    (
        "torn image",
        "image driver squashfuse_ll instance exited with error: squashfuse_ll exited: Something "
        "went wrong trying to read the squashfs image.",
    ),
    ("noexec", "enroot-switchroot: failed to execute: /bin/sh: Permission denied"),
    ("noexec", "ch-run[1979]: error: can't execve(2): true: Permission denied (ch_core.c:410 13)"),
    (
        "noexec",
        "Error: runc: runc create failed: unable to start container process: exec /usr/bin/true: "
        "permission denied: OCI permission denied",
    ),
    ("no shell", "error: can't execve(2): /bin/sh: No such file or directory (ch_core.c:410 2)"),
    ("no python", "vjob: 1: exec: python3: not found"),
    ("no python", "vjob: line 1: exec: /opt/python3.12: not found"),
    (
        "fuse",
        "[WARN] fuse: failed to open /dev/fuse: Permission denied\n"
        "[ERROR] Failed to mount: /tmp/rt/img.sqsh",
    ),
    ("fuse", "ch-run[9]: error: too many FUSE errors; giving up (ch_fuse.c:252)"),
    ("missing tool", "[ERROR] Command not found: unsquashfs"),
    ("missing tool", "prepare: line 57: unsquashfs: command not found"),
    (
        "no nvidia-container-cli",
        "[ERROR] Command not found: nvidia-container-cli, see "
        "https://github.com/NVIDIA/libnvidia-container\n"
        "[ERROR] /usr/local/etc/enroot/hooks.d/98-nvidia.sh exited with return code 1",
    ),
    ("no CDI", "Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=all"),
    (
        "docker daemon",
        "docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker "
        "daemon running?",
    ),
    (
        "rlimits",
        "Error: crun: setrlimit `RLIMIT_NOFILE`: Operation not permitted: OCI permission denied",
    ),
    (
        "hybrid cgroups",
        "Error: OCI runtime error: crun: cgroups in hybrid mode not supported, drop all "
        "controllers from cgroupv2",
    ),
    (
        "capabilities of root",
        "ERROR  : Requesting capability set 0x000001ffffffffff while permitted capability set is "
        "0x000001fffeffffff",
    ),
    ("no USER", "ch-run[20068]: error: $USER not set (ch-run.c:122)"),
    ("mount source", "ch-run[20070]: error: can't bind: source not found: /x (ch_core.c:104)"),
    ("mount source", "enroot-mount: failed to mount: /x at /r/data: No such file or directory"),
    ("mount source", "Error: statfs /x: no such file or directory"),
    (
        "mount source",
        "FATAL:   container creation failed: mount hook function failure: mount /x->/data error: "
        "while mounting /x: mount source /x doesn't exist",
    ),
    (
        "mount point",
        "error: can't mkdir: /tmp/rt/rootfs/data: Read-only file system (ch_misc.c:409 30)",
    ),
    (
        "device hook",
        "enroot-mount: failed to mount: /tmp/x at /img/root/dev/shm: No such file or directory\n"
        "[ERROR] /etc/enroot/hooks.d/10-devices.sh exited with return code 1",
    ),
    ("root in use", "[ERROR] Could not acquire rootfs lock"),
    (
        "folder of another",
        "/usr/local/lib/enroot/runtime.sh: line 271: /img/root/.lock: Permission denied",
    ),
    (
        "registry",
        "[INFO] Querying registry for permission grant\n"
        "curl: (6) Could not resolve host: registry-1.docker.io",
    ),
    (
        "registry",
        "Error: initializing source docker://nvcr.io/nvidia/pytorch:25.01-py3: pinging container "
        'registry nvcr.io: Get "https://nvcr.io/v2/": dial tcp: lookup nvcr.io: no such host',
    ),
    (
        "short name",
        'Error: short-name "pytorch" did not resolve to an alias and no unqualified-search '
        'registries are defined in "/etc/containers/registries.conf"',
    ),
    # From the projects' issues.
    (
        "small /run",  # pyxis 41 and 53
        "slurmstepd: error: pyxis:     Write failed because No space left on device\n"
        "slurmstepd: error: pyxis:     FATAL ERROR:Failed to write to output filesystem\n"
        "slurmstepd: error: pyxis:     Creating 4.0 filesystem on /run/pyxis/1000/7.0.squashfs",
    ),
    (
        "quota",  # enroot 39
        "sed: couldn't close stdout: No space left on device\n"
        "[ERROR] /etc/enroot/hooks.d/10-shadow.sh exited with return code 4",
    ),
    ("quota", "mkdir: cannot create directory '/home/u/.local': Disk quota exceeded"),
    (
        "no runtime folder",  # pyxis 4
        "error: pyxis: couldn't mkdir /run/pyxis/100005: No such file or directory",
    ),
    (
        "no runtime folder",  # pyxis 12
        "slurmstepd: error: pyxis:     mkdir: cannot create directory '/run/enroot': "
        "Permission denied",
    ),
    (
        "shared runtime folder",  # awsome-distributed-training 20
        "slurmstepd: error: pyxis:     FATAL ERROR: Can't find a SQUASHFS superblock on "
        "/fsx/enroot/1000/7.0.squashfs",
    ),
    (
        "compression",  # enroot 6
        "[WARN] Squashfs image uses lzo compression, this version supports only xz, zlib, lz4, "
        "zstd.\n[ERROR] Failed to mount: /tmp/tmp.qdpNZdmXxx/ubuntu.sqsh",
    ),
    ("compression", 'enroot-mksquashovlfs: Compressor "lzo" is not supported!'),  # enroot 276
    (
        "import capabilities",  # enroot 69, 141
        "enroot-aufs2ovlfs: failed to create ovlfs whiteout: /var/tmp/x: Operation not permitted",
    ),
    (
        "import capabilities",
        "enroot-aufs2ovlfs: failed to set capabilities: Operation not permitted",
    ),
    (
        "stale file handle",  # pyxis 18
        "slurmstepd: error: pyxis: couldn't chdir to container cwd: Stale file handle",
    ),
    ("foreign processor", "/bin/sh: 1: python3: Exec format error"),
    (
        "nvidia driver",  # enroot 105
        "[WARN] Kernel module nvidia_uvm is not loaded. Make sure the NVIDIA device driver is "
        "installed and loaded\n"
        "nvidia-container-cli: initialization error: driver error: failed to process request\n"
        "[ERROR] /usr/local/etc/enroot/hooks.d/98-nvidia.sh exited with return code 1",
    ),
    (
        "no compute libraries",
        "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory",
    ),
    ("no CDI", "Error: stat nvidia.com/gpu=0: no such file or directory"),
    (
        "docker without GPUs",  # nvidia-docker 1034
        'docker: Error response from daemon: could not select device driver "" with capabilities: '
        "[[gpu]].",
    ),
    (
        "no subuid",
        'cannot find UID/GID for user u: no subuid ranges found for user "u" in /etc/subuid - '
        "check rootless mode in man pages.",
    ),
    (
        "mount forbidden",  # enroot 140
        "slurmstepd: error: pyxis:     enroot-mount: failed to mount: /home/w/coco2017 at "
        "/tmp/enroot-data/user-0/pyxis_d/data: Permission denied",
    ),
    ("no pyxis", "srun: unrecognized option '--container-image=/img/a.sqsh'"),
    (
        "no pyxis",
        "Slurm started the agent outside of the container: slurmd has no pyxis on this node",
    ),
    ("scratch", "enroot: mkdir: cannot create directory '/proc/x': No such file or directory"),
    ("pyxis path", "pyxis: --container-mounts: source path does not exist: /data"),
    ("pyxis path", "slurmstepd: error: pyxis: couldn't chdir to /nope: No such file or directory"),
    ("pyxis container", "[ERROR] File already exists: /tmp/data/pyxis_vjob-0123456789ab"),
    ("pyxis container", "enroot-switchroot: failed to execute: /bin/sh: Input/output error"),
    (
        "credentials",  # enroot 161
        "[ERROR] URL https://nvcr.io/proxy_auth returned error code: 401 Unauthorized",
    ),
    (
        "no such tag",  # enroot 70
        "[ERROR] URL https://master:5000/v2/library/busybox/manifests/latest returned error code: "
        "404 Not Found",
    ),
    (
        "locked memory",  # pyxis 126, nccl-tests 206
        "misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate "
        "memory",
    ),
)
ROWS = {row.name: row for row in CONTAINER_ROWS}


@pytest.mark.parametrize(("name", "message"), MESSAGES)
def test_a_message_finds_its_row_and_no_other(name: str, message: str) -> None:
    row = ROWS[name]
    found = [
        other.name
        for other in BUILT_IN.rows(Scope.CONTAINER, row.only)
        if re.search(other.pattern, message)
    ]
    assert found == [name]
    assert BUILT_IN.match(Scope.CONTAINER, message, row.only) == row


def test_every_row_has_a_recorded_message_and_one_short_sentence_of_each() -> None:
    assert {name for name, _ in MESSAGES} == set(ROWS)
    for row in CONTAINER_ROWS:
        assert set(row.only) <= {*RUNTIMES, "pyxis", "podman", "docker", "apptainer"}, row.name
        assert row.meaning and len(row.meaning) < 100, row.name
        assert len(render_all(row.remedies, Context.CONF)) < 240, row.name


@pytest.mark.parametrize(
    "said",
    [
        "OSError: [Errno 28] No space left on device: '/shared/checkpoint-100.pt'",
        "OSError: [Errno 122] Disk quota exceeded: '/home/u/out'",
        "OSError: [Errno 116] Stale file handle: '/shared/data.bin'",
        "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://hub/x",
        "RuntimeError: CUDA error: out of memory",
        "PermissionError: [Errno 13] Permission denied: '/data/x'",
    ],
)
def test_what_a_rank_says_of_its_own_disks_is_not_taken_for_the_containers(said: str) -> None:
    assert BUILT_IN.match(Scope.CONTAINER, f"rank 3 on n1 exited 1: {said}", ALL) is None


def test_a_node_gets_the_rows_of_the_runtimes_that_may_run() -> None:
    enroot = BUILT_IN.rows(Scope.CONTAINER, ["enroot"])
    both = BUILT_IN.rows(Scope.CONTAINER, ["enroot", "docker"])
    assert set(enroot) < set(both)
    assert not any("Docker" in row.pattern for row in enroot)
    container = replace(make_container(), runtime="enroot")
    assert list_known_lines("python3", [container])[1:] == enroot
    assert [row.name for row in list_known_lines("python3", [])] == ["missing module"]


MakeStage = Callable[..., Stage]


def test_a_failing_prepare_shows_the_remedy_in_the_preflight_table(make_stage: MakeStage) -> None:
    said = "echo 'Read on filesystem failed because EOF' >&2; exit 1"
    stage = make_stage(make_plan(containers=(replace(make_container(), prepare=(shell(said),)),)))
    write_known_lines(stage.run, BUILT_IN.rows(Scope.CONTAINER, ["enroot"]))
    codes, outcome = stage.play()
    assert set(codes) == {112}
    remedy = render_all(ROWS["torn image"].remedies, Context.LOCAL)
    assert f" -> {remedy}" in stage.attempt.preflight.read_text()
    assert f" -> {remedy}" in outcome.reason


def test_a_runtime_that_cannot_start_shows_the_remedy(make_stage: MakeStage) -> None:
    said = "echo 'Cannot connect to the Docker daemon at unix:///x' >&2; exit 1"
    container = make_container(probe=shell(said))
    stage = make_stage(make_plan(containers=(container,)))
    write_known_lines(stage.run, BUILT_IN.rows(Scope.CONTAINER, ["docker"]))
    stage.play()
    remedy = render_all(ROWS["docker daemon"].remedies, Context.LOCAL)
    assert remedy in stage.attempt.preflight.read_text()
