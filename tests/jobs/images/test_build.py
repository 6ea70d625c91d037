"""`vjob container build`: folders for real, debootstrap and Dockerfiles with stand-ins.

With the real debootstrap the cpu recipe takes a minute and a Debian mirror; what was seen of it
stands in docs/images.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.command import Vjob, wait_for
from tests.jobs.stub_programs import StubPrograms
from vjob.jobs.errors import InputError
from vjob.jobs.images.build import (
    build_debootstrap,
    collect_files,
    find_recipe,
    find_site,
    read_recipe,
    write_wheel,
)

SITE = "usr/lib/python3/dist-packages"


class Host:
    """Where somebody builds."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.folder, self.image, self.tree = folder, image, image.parent / "root"
        self.tools = StubPrograms(folder)
        self.vjob = Vjob(folder, {"PATH": self.tools.path})
        (folder / "work").mkdir()

    def __call__(self, *words: str, code: int = 0) -> str:
        done = self.vjob("container", "build", *words, "--scratch", "work", code=code)
        assert not list((self.folder / "work").iterdir()), "nothing is left of the work"
        return done.stdout + done.stderr

    def read(self, image: str, name: str) -> str:
        words = ["unsquashfs", "-cat", str(self.folder / image), name]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def names(self, image: str) -> set[str]:
        words = ["unsquashfs", "-l", str(self.folder / image)]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return {line.removeprefix("squashfs-root/") for line in text.splitlines()}


@pytest.fixture
def host(tmp_path: Path, image: Path) -> Host:
    return Host(tmp_path, image)


def test_a_folder_becomes_an_image_with_varuna_core_and_stays_as_it_is(host: Host) -> None:
    before = sorted(host.tree.rglob("*"))
    said = host("--from-folder", str(host.tree), "-o", "out/root.sqsh")
    assert f"{host.folder}/out/root.sqsh\n" in said and "MiB in" in said
    assert sorted(host.tree.rglob("*")) == before
    assert os.listdir(host.folder / "out") == ["root.sqsh"]
    names = host.names("out/root.sqsh")
    assert {f"{SITE}/{name}" for name in collect_files()} <= names
    assert not any("/jobs/" in name for name in names), "ranks need nothing else of ours"
    source = Path("varuna_core/__init__.py")
    assert host.read("out/root.sqsh", f"{SITE}/{source}") == source.read_text()


def test_the_python_inside_imports_it_without_the_rest(host: Host, tmp_path: Path) -> None:
    host("--from-folder", str(host.tree), "-o", "root.sqsh")
    tree = tmp_path / "unpacked"
    words = ["unsquashfs", "-no-progress", "-d", str(tree), str(tmp_path / "root.sqsh")]
    subprocess.run(words, check=True, capture_output=True)
    code = f"""
import sys
sys.path.insert(0, {str(tree / SITE)!r})
import varuna_core.agent.cli
print(varuna_core.agent.cli.__file__, "jobs" in sys.modules)
"""
    words = ["/usr/bin/python3", "-I", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tree / SITE / "varuna_core/agent/cli.py"), "False"]


def test_an_older_varuna_core_in_the_folder_is_replaced(host: Host, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in (f"{SITE}/varuna_core", f"{SITE}/varuna_core-0.0.1.dist-info", "bin", "dev"):
        (tree / name).mkdir(parents=True)
    (tree / f"{SITE}/varuna_core/old.py").touch()
    (tree / f"{SITE}/mine.py").write_text("mine")
    (tree / "usr/lib/python3.12").mkdir()
    (tree / "usr/lib/python3.12/site.py").write_text("# dist-packages")
    (tree / "usr/bin").mkdir()
    for name in ("usr/bin/python3.12", "bin/sh", "dev/thing", "dev/.hidden"):
        (tree / name).touch()
    host("--from-folder", str(tree), "-o", "x.sqsh")
    names = host.names("x.sqsh")
    assert f"{SITE}/varuna_core/old.py" not in names and f"{SITE}/mine.py" in names
    assert not any("0.0.1" in name for name in names)
    assert "dev" in names and not {"dev/thing", "dev/.hidden"} & names
    host("--from-folder", str(tree), "-o", "x.sqsh", "--again", "--without-packages")
    assert f"{SITE}/varuna_core/agent/cli.py" not in host.names("x.sqsh")


@pytest.mark.parametrize(
    ("python", "library", "site"),
    [
        ("usr/bin/python3.11", "usr/lib/python3.11", SITE),
        ("usr/bin/python3.9", "usr/lib/python3.9", "usr/lib/python3.9/site-packages"),
        (
            "usr/local/bin/python3.12",
            "usr/local/lib/python3.12",
            "usr/local/lib/python3.12/site-packages",
        ),
        (
            "opt/conda/bin/python3.10",
            "opt/conda/lib/python3.10",
            "opt/conda/lib/python3.10/site-packages",
        ),
    ],
)
def test_packages_go_where_the_images_python_looks(
    tmp_path: Path, python: str, library: str, site: str
) -> None:
    for path in (python, f"{library}/site.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    if site == SITE:
        (tmp_path / library / "site.py").write_text('"dist-packages"')
    assert find_site(tmp_path) == (site, python.rpartition("python")[2])


def test_what_cannot_be_built_is_refused_with_what_to_do(host: Host) -> None:
    (host.folder / "there.sqsh").touch()
    (host.folder / "empty").mkdir()
    for words, said in (
        (["-o", "x.sqsh"], "give either a RECIPE"),
        (["cpu", "--from-folder", "empty", "-o", "x.sqsh"], "give either a RECIPE"),
        (["tpu", "-o", "x.sqsh"], "there is no recipe tpu; there are cpu, gpu"),
        (["./none", "-o", "x.sqsh"], "is no file"),
        (["cpu", "-o", "x.tar"], "must end in .sqsh"),
        (["cpu", "-o", "there.sqsh"], "--again makes it again"),
        (["--from-folder", "empty", "-o", "x.sqsh"], "has no bin/sh"),
    ):
        assert said in host(*words, code=2)


def test_a_folder_that_cannot_be_worked_in_is_named(host: Host) -> None:
    words = ["--from-folder", str(host.tree), "-o", "x.sqsh", "--scratch", "/no/such"]
    done = host.vjob("container", "build", *words, code=1)
    assert "vjob: /no/such/vjob-build-" in done.stderr and "No such file" in done.stderr


def test_without_the_tools_it_says_which_package(host: Host) -> None:
    host.tools.add("env")
    host.vjob.env["PATH"] = str(host.tools.folder)
    if os.geteuid() != 0:
        assert "needs root" in host("cpu", "-o", "x.sqsh", code=2)
    assert "is not on PATH here" in host("gpu", "-o", "x.sqsh", code=2)


def test_debootstrap_needs_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vjob.jobs.images.build import Options, build_recipe

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match=r"sudo.*--from-folder DIR"):
        build_recipe("cpu", Options(output=tmp_path / "x.sqsh"), print)


def test_debootstraps_mounts_are_its_own() -> None:
    recipe = read_recipe(find_recipe("cpu"))
    words = build_debootstrap("trixie", recipe.packages, Path("/t"), "http://mirror/debian")
    assert words[:5] == ["unshare", "--mount", "--propagation", "private", "--"]
    assert words[5:7] == ["debootstrap", "--variant=minbase"]
    assert words[7].startswith("--include=python3,") and words[8:] == [
        "trixie",
        "/t",
        "http://mirror/debian",
    ]


def test_a_recipe_of_ones_own_is_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("suite: trixie\npackages: [python3, git]\n")
    recipe = read_recipe(find_recipe(str(path)))
    assert (recipe.suite, recipe.packages, recipe.pip) == ("trixie", ("python3", "git"), ())
    path.write_text("suite: trixie\npackage: [git]\n")
    with pytest.raises(InputError, match="unknown package; known are suite, packages, pip"):
        read_recipe(path)
    path.write_text("- nothing\n")
    with pytest.raises(InputError, match=r"is not a recipe like cpu\.yaml"):
        read_recipe(path)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="debootstrap needs root")


@needs_root
def test_the_recipe_goes_through_debootstrap_and_mksquashfs(host: Host) -> None:
    """A stand-in for debootstrap, which copies; all else is real."""
    body = f"""
import shutil
print("I: Retrieving Packages", flush=True)
shutil.copytree({str(host.tree)!r}, sys.argv[4], symlinks=True)
os.makedirs(sys.argv[4] + "/var/lib/apt/lists"); open(sys.argv[4] + "/var/lib/apt/lists/x", "w")
"""
    host.tools.add("debootstrap", body)
    said = host("cpu", "-o", "cpu.sqsh", "--debootstrap", "trixie")
    assert "I: Retrieving Packages" in said and "debootstrap trixie into" in said
    (call,) = host.tools.calls("debootstrap")
    assert call["argv"][3] == "trixie"
    names = host.names("cpu.sqsh")
    assert f"{SITE}/varuna_core/__init__.py" in names and "var/lib/apt/lists/x" not in names
    host.tools.add("debootstrap", 'sys.exit("E: No such script: /usr/share/debootstrap/scripts/x")')
    said = host("cpu", "-o", "cpu.sqsh", "--again", code=1)
    assert "debootstrap ended with 1: E: No such script" in said
    assert (host.folder / "cpu.sqsh").exists(), "the old one stays until the new one is whole"


@needs_root
def test_ctrl_c_ends_the_work_and_leaves_nothing(host: Host) -> None:
    host.tools.add("debootstrap", "import time\nos.makedirs(sys.argv[4])\ntime.sleep(60)")
    child = host.vjob.start("container", "build", "cpu", "-o", "x.sqsh", "--scratch", "work")
    wait_for(lambda: list((host.folder / "work").glob("*/root")), 20)
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130
    assert not list((host.folder / "work").iterdir())
    assert not (host.folder / "x.sqsh").exists()


def test_a_dockerfile_is_built_with_the_wheel_beside_it_and_imported(host: Host) -> None:
    look = "print('context', sorted(os.listdir(sys.argv[-1])))"
    host.tools.add("podman", look)
    copy = "import shutil\nshutil.copyfile({!r}, sys.argv[sys.argv.index('--output') + 1])"
    host.tools.add("enroot", copy.format(str(host.image)))
    said = host("gpu", "-o", "gpu.sqsh")
    assert "context ['Dockerfile', 'varuna_core-0.1.0-py3-none-any.whl']" in said
    (built,) = host.tools.calls("podman")
    assert built["argv"][1:4] == ["build", "--tag", "localhost/vjob-gpu:0.1.0"]
    (fetched,) = host.tools.calls("enroot")
    assert fetched["argv"][-1] == "podman://localhost/vjob-gpu:0.1.0"
    assert (host.folder / "gpu.sqsh").exists()


def test_a_build_without_a_network_says_so(host: Host) -> None:
    """What podman 4.3.1 said here."""
    host.tools.add("enroot")
    host.tools.add(
        "podman",
        'sys.exit("Error: creating build container: initializing source docker://nvcr.io/nvidia/'
        "pytorch:25.11-py3: pinging container registry nvcr.io: Get https://nvcr.io/v2/: dial tcp: "
        'lookup nvcr.io: no such host")',
    )
    said = host("gpu", "-o", "gpu.sqsh", code=1)
    assert "podman build ended with 1: Error: creating build container" in said
    assert "the registry cannot be reached" in said


def test_the_wheel_is_one_that_pip_takes(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    again = write_wheel(tmp_path).read_bytes()
    assert wheel.read_bytes() == again, "the same sources, the same bytes"
    target = tmp_path / "site"
    words = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    words += ["--disable-pip-version-check", "--target", str(target), str(wheel)]
    subprocess.run(words, check=True, capture_output=True)
    assert (target / "varuna_core/agent/cli.py").is_file()
    code = "import json, importlib.metadata as m; d = m.distribution('varuna-core'); "
    code += "print(json.dumps([d.version, d.requires]))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == ["0.1.0", None]
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
