"""`vjob container import`, with a stand-in for enroot and, where they are, the real ones."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.command import Vjob, wait_for
from tests.jobs.stub_programs import StubPrograms

REF = "nvcr.io#nvidia/pytorch:25.11-py3"
NAME = "nvcr.io+nvidia+pytorch+25.11-py3.sqsh"
COPY = """
import shutil
shutil.copyfile({image!r}, sys.argv[sys.argv.index("--output") + 1])
"""
# What enroot 4.1.2 said here, where no registry can be reached.
NO_NETWORK = """
print("[INFO] Querying registry for permission grant", file=sys.stderr)
print("curl: (6) Could not resolve host: nvcr.io", file=sys.stderr)
sys.exit(6)
"""


class Host:
    """Where somebody imports."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.folder, self.image = folder, image
        self.tools = StubPrograms(folder)
        self.cache = folder / "cache/vjob/images"
        self.copies = COPY.format(image=str(image))
        env = {"XDG_CACHE_HOME": str(folder / "cache"), "PATH": self.tools.path}
        self.vjob = Vjob(folder, env)

    def __call__(self, *words: str, code: int = 0) -> str:
        done = self.vjob("container", "import", *words, code=code)
        return done.stdout + done.stderr

    def left(self) -> list[str]:
        return sorted(path.name for path in self.cache.iterdir()) if self.cache.exists() else []


@pytest.fixture
def host(tmp_path: Path, image: Path) -> Host:
    return Host(tmp_path, image)


def test_a_reference_is_fetched_once_and_lands_whole(host: Host) -> None:
    host.tools.add("enroot", host.copies + 'print("[INFO] Creating squashfs filesystem...")')
    said = host(REF)
    assert f"{host.cache / NAME}\n" in said and "Creating squashfs" in said, "its progress shows"
    assert host.left() == [NAME]
    (call,) = host.tools.calls("enroot")
    assert call["argv"][1] == "import" and call["argv"][-1] == f"docker://{REF}"
    assert not call["tty"], "it cannot ask for a password"
    assert os.path.basename(os.path.dirname(str(call["env"]["ENROOT_RUNTIME_PATH"]))).startswith(
        "vjob-import-"
    )
    assert "--again" in host(f"docker://{REF}") and len(host.tools.calls("enroot")) == 1
    host(REF, "--again", "--arch", "aarch64")
    assert host.tools.calls("enroot")[1]["argv"][2:4] == ["--arch", "aarch64"]


def test_a_file_or_a_cache_of_ones_own(host: Host) -> None:
    host.tools.add("enroot", host.copies)
    said = host("docker://debian:12", "--output", "images/debian.sqsh")
    path = host.folder / "images/debian.sqsh"
    assert path.is_file() and f"image: '{path}'" in said
    host("debian:12", "--cache", "shared")
    assert (host.folder / "shared/docker.io+debian+12.sqsh").is_file()
    assert not host.cache.exists()


def test_a_failure_is_quoted_with_its_remedy_and_leaves_nothing(host: Host) -> None:
    host.tools.add("enroot", NO_NETWORK)
    said = host(REF, code=1)
    assert f"docker://{REF} ended with 6: curl: (6) Could not resolve host: nvcr.io" in said
    assert "the registry cannot be reached from that host" in said
    assert host.left() == []


def test_half_an_image_does_not_land(host: Host) -> None:
    half = "\nwith open(sys.argv[-2], 'r+b') as f: f.truncate(100_000)\n"
    host.tools.add("enroot", host.copies + half)
    assert f"the file made for {host.cache / NAME} is cut short" in host(REF, code=1)
    host.tools.add("enroot", "")
    assert "cannot be read" in host(REF, code=1)
    assert host.left() == []


def test_who_comes_second_waits_for_the_first(host: Host) -> None:
    gate = host.folder / "gate"
    slow = f"import time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.05)\n"
    host.tools.add("enroot", slow + host.copies)
    first = host.vjob.start("container", "import", REF)
    wait_for(lambda: host.tools.calls("enroot"), 20)
    second = subprocess.Popen(
        [*first.args, "--again"],  # type: ignore[misc] # the list that Vjob.start gave
        cwd=host.folder,
        env=host.vjob.env,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert second.stderr is not None
    assert "waiting for it" in second.stderr.readline()
    gate.touch()
    assert first.wait(30) == 0
    assert "another import has just made" in second.communicate(timeout=30)[1]
    assert second.returncode == 0 and len(host.tools.calls("enroot")) == 1
    assert host.left() == [NAME]


def test_ctrl_c_ends_it_and_leaves_nothing(host: Host) -> None:
    trap = f"""
import signal, time
def leave(number, frame):
    time.sleep(0.3)
    open({str(host.folder / "cleaned")!r}, "w").close()
    sys.exit(1)
signal.signal(signal.SIGTERM, leave)
open(sys.argv[-2], "w").close()
time.sleep(60)
"""
    host.tools.add("enroot", trap)
    child = host.vjob.start("container", "import", REF)
    wait_for(lambda: any(name.endswith(".part") for name in host.left()), 20)
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130
    assert host.left() == []
    assert (host.folder / "cleaned").exists(), "enroot had the time to clean up after itself"


def test_what_a_killed_import_left_goes_with_the_next(host: Host) -> None:
    host.tools.add("enroot", host.copies)
    host.cache.mkdir(parents=True)
    (host.cache / f".{NAME}.4711.part").touch()
    host(REF)
    assert host.left() == [NAME]


def test_without_enroot_it_says_where_to_import(host: Host) -> None:
    env = {"PATH": str(host.tools.folder)}
    host.vjob.env.update(env)
    said = host(REF, code=2)
    assert f"srun -N1 vjob container import '{REF}'" in said


def test_what_is_no_reference_is_refused(host: Host) -> None:
    assert "is not an image's reference" in host("Not A Reference", code=2)
    assert "http:// is not known" in host("http://x/y", code=2)


CONF = """
name: x
program: {{script: a.py}}
cluster: {{scheduler: local}}
container: {{runtime: {runtime}, image: "{image}"}}
"""


def dry_run(host: Host, runtime: str, image: str = REF, code: int = 0) -> str:
    (host.folder / "a.py").touch()
    conf = host.vjob.write(CONF.format(runtime=runtime, image=image))
    done = host.vjob("submit", conf, "--dry-run", code=code)
    return done.stdout + done.stderr


@pytest.mark.parametrize("runtime", ["enroot", "charliecloud"])
def test_a_submit_takes_the_imported_file_or_says_what_to_type(host: Host, runtime: str) -> None:
    host.tools.add("enroot", host.copies)
    said = dry_run(host, runtime, code=2)
    (line,) = [line for line in said.splitlines() if "vjob container import" in line]
    assert line.strip() == f"vjob container import '{REF}'"
    host(REF)
    said = dry_run(host, runtime)
    assert f'"image": "{host.cache / NAME}"' in said
    assert f'"{host.cache / NAME}"' in said[said.index('"must_exist"') :], "preflight looks for it"


def test_auto_leaves_out_what_needs_an_import_and_says_so(host: Host) -> None:
    said = dry_run(host, "auto")
    assert f"vjob container import '{REF}'" in said and "not imported" in said
    assert '"runtime": "podman"' in said and '"runtime": "enroot"' not in said
    host.tools.add("enroot", host.copies)
    host(REF)
    said = dry_run(host, "auto")
    assert '"runtime": "podman"' in said and '"runtime": "enroot"' in said
    assert "not imported" not in said


def test_an_image_that_is_visibly_none_is_refused_at_submit(host: Host) -> None:
    torn = host.folder / "torn.sqsh"
    torn.write_bytes(host.image.read_bytes()[:100_000])
    assert "is cut short: it has 100000 of" in dry_run(host, "auto", str(torn), code=2)
    torn.write_text("<html>not found</html>")
    assert "is not a squashfs image" in dry_run(host, "enroot", str(torn), code=2)


@pytest.mark.enroot
@pytest.mark.podman
@pytest.mark.skipif(
    not (shutil.which("enroot") and shutil.which("podman")), reason="needs enroot and podman"
)
def test_what_podman_has_is_imported_for_real(host: Host, image: Path) -> None:
    """enroot 4.1.2 ends with 1 here by itself: it removes podman's container with docker."""
    storage = host.folder / "storage.conf"
    storage.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{host.folder}/graph"\n'
        f'runroot = "{host.folder}/run"\n'
    )
    host.vjob.env["CONTAINERS_STORAGE_CONF"] = str(storage)
    host.vjob.env["PATH"] = os.environ["PATH"]
    tree = host.folder / "root.tar"
    # enroot leaves mount points of mode 000 in a folder that it starts in place.
    words = ["tar", "--ignore-failed-read", "-C", str(image.parent / "root"), "-cf", str(tree), "."]
    subprocess.run(words, check=True)
    env = host.vjob.env
    words = ["podman", "import", "--change", "CMD=/bin/sh", str(tree), "localhost/dough:1"]
    made = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if made.returncode != 0 and os.geteuid() != 0:
        pytest.skip("podman makes no image as this user, who has no further user ids")
    assert made.returncode == 0, made.stderr
    said = host("podman://localhost/dough:1")
    assert "podman+localhost+dough+1.sqsh" in said
    listed = subprocess.run(
        ["podman", "ps", "-aq"], env=env, capture_output=True, text=True, check=True
    )
    assert listed.stdout == "", "its container is gone too"
    assert "podman+localhost+dough+1.sqsh" in host.vjob("container", "list").stdout


@pytest.mark.enroot
@pytest.mark.skipif(shutil.which("enroot") is None, reason="enroot is not installed")
def test_the_real_enroot_says_why_it_cannot(host: Host) -> None:
    host.vjob.env["PATH"] = os.environ["PATH"]
    said = host("127.0.0.1:9#no/such:1", code=1)
    assert "enroot import docker://127.0.0.1:9#no/such:1 ended with" in said
    assert "the registry cannot be reached" in said
    assert host.left() == []
