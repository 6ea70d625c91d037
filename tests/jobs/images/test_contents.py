"""Files of an image, read in a folder and in a squashfs file; links never lead out of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.images.trees import make_conda, make_debian, make_nvidia, make_tree, squash
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.images.contents import Contents, FolderContents, SquashfsContents, parse_listing
from vjob.jobs.images.inspect import describe
from vjob.jobs.images.software import find_program, find_software, has_module, parse_version

needs_squashfs = pytest.mark.skipif(
    shutil.which("mksquashfs") is None, reason="needs mksquashfs: apt-get install squashfs-tools"
)


def open_squashed(root: Path) -> Contents:
    return SquashfsContents(squash(root))


both = pytest.mark.parametrize(
    "open_tree",
    [FolderContents, pytest.param(open_squashed, marks=needs_squashfs)],
    ids=["folder", "squashfs"],
)
Open = Callable[[Path], Contents]


@both
def test_links_are_followed_as_if_the_image_were_the_root(tmp_path: Path, open_tree: Open) -> None:
    """A link to /etc/passwd is that of the image; none that leads out reads a file of ours."""
    (tmp_path / "secret").write_text("of this machine")
    files = {"etc/passwd": "of the image", "data/deep/a b [1].txt": "here", "etc/full": "x\n" * 9}
    links = {
        "absolute": "/etc/passwd",
        "up": "../../../../../../etc/passwd",
        "out": str(tmp_path / "secret"),
        "beside": "../secret",
        "data/deep/folder": "../../etc",
        "round": "round",
        "dots": "data/deep/../../etc/./passwd",
    }
    contents = open_tree(make_tree(tmp_path / "root", files, links))
    for name in ("absolute", "/up", "data/deep/folder/passwd", "dots", "../../etc/passwd"):
        assert contents.read(name) == "of the image", name
    for name in ("out", "beside", "round", "etc/passwd/x", "nothing", "etc", "", "/secret"):
        assert contents.read(name) == "", name
    assert contents.read("data/deep/a b [1].txt") == "here"
    assert contents.resolve("/data/deep/folder/passwd") == "etc/passwd"
    assert contents.find("*/deep/a*") == ["/data/deep/a b [1].txt"]
    assert contents.list_names("data/deep/folder") == ["full", "passwd"]
    assert contents.list_names("etc/passwd") == contents.list_names("none") == []


def test_a_root_that_is_a_link_and_files_that_are_none(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", {"a/big": "x" * (3 << 20)})
    os.mkfifo(tree / "pipe")
    (tmp_path / "link").symlink_to("tree")
    contents = FolderContents(tmp_path / "link")
    assert contents.read("pipe") == "", "no wait for who writes"
    assert len(contents.read("a/big")) == 1 << 20


def test_a_listing_of_unsquashfs_is_read() -> None:
    """Of squashfs-tools 4.5.1; owners and devices differ in width."""
    lines = [
        "drwxr-xr-x root/root                42 2026-11-25 22:33 squashfs-root",
        "drwxrwsr-x nobody/nogroup          120 2026-11-25 22:33 squashfs-root/a",
        "-rwsr-xr-t root/root           1234567 2026-11-25 22:33 squashfs-root/a/x -> y",
        "lrwxrwxrwx root/root                 6 2026-11-25 22:33 squashfs-root/l -> ../a/x y",
        "crw-rw-rw- root/root             1,  3 2026-11-25 22:33 squashfs-root/null",
        "Parallel unsquashfs: Using 2 processors",
    ]
    assert parse_listing(lines) == {
        "": {"a": None, "l": "../a/x y", "null": None},
        "a": {"x -> y": None},
    }


def test_what_unsquashfs_cannot_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.sqsh").write_text("none")
    if shutil.which("unsquashfs"):
        with pytest.raises(VjobError, match=r"cannot list .*a\.sqsh: "):
            SquashfsContents(tmp_path / "a.sqsh")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"not on PATH.* squashfs-tools; or unpack"):
        SquashfsContents(tmp_path / "a.sqsh")


@both
def test_nvidias_image_of_april_2023(tmp_path: Path, open_tree: Open) -> None:
    contents = open_tree(make_nvidia(tmp_path / "root"))
    facts = describe(contents)
    assert facts["system"] == "Ubuntu 20.04.6 LTS"
    assert facts["pythons"] == ["/usr/bin/python3", "/usr/bin/python3.8"]
    found = find_software(contents, facts["environment"])
    assert (found.python, found.python_version) == ("/usr/bin/python3", "3.8")
    assert (found.torch, found.torch_cuda) == ("2.1.0a0+fe05266", "12.1")
    assert (found.cuda, found.cuda_compat, found.nccl) == ("12.1.0", "530.30.02", "2.17.1")
    wanted = {"apex": "0.1", "transformer-engine": "0.7.0", "numpy": "1.22.2", "six": "1.14.0"}
    assert wanted.items() <= found.packages.items()
    assert has_module(contents, found, "amp_C") and has_module(contents, found, "apex")
    assert not has_module(contents, found, "amp")
    assert find_program(contents, facts["environment"], "nsys") == "/usr/local/cuda/bin/nsys"


@both
def test_an_image_of_conda(tmp_path: Path, open_tree: Open) -> None:
    contents = open_tree(make_conda(tmp_path / "root"))
    found = find_software(contents, describe(contents)["environment"])
    assert (found.python, found.python_version) == ("/opt/conda/bin/python3", "3.11")
    assert (found.torch, found.torch_cuda, found.cuda, found.nccl) == ("2.9.1", "12.8", "", "")
    assert found.packages["deepspeed"] == "0.18.2"


@pytest.mark.parametrize("with_system", [False, True])
@both
def test_debian_with_a_venv(tmp_path: Path, open_tree: Open, with_system: bool) -> None:
    contents = open_tree(make_debian(tmp_path / "root", with_system=with_system))
    environment = describe(contents)["environment"]
    found = find_software(contents, environment)
    assert (found.python, found.python_version) == ("/opt/venv/bin/python3", "3.11")
    assert (found.torch, found.torch_cuda, found.nccl) == ("2.13.0+cpu", "", "2.27.5")
    assert found.packages["megatron-core"] == "0.14.0"
    assert ("wandb" in found.packages) == with_system
    bare = find_software(contents, environment, "/usr/bin/python3")
    assert (bare.torch, bare.packages) == ("", {"wandb": "0.19.1"})


def test_an_interpreter_without_its_version_in_its_name(tmp_path: Path) -> None:
    files = {"usr/local/bin/python3": "", "usr/local/lib/python3.12/site-packages/x.py": ""}
    contents = FolderContents(make_tree(tmp_path, files))
    found = find_software(contents, {"PYTHONPATH": "/srv"})
    assert (found.python_version, has_module(contents, found, "x")) == ("3.12", True)
    assert found.sites == ("/srv", "/usr/local/lib/python3.12/site-packages")
    make_tree(tmp_path, {"usr/local/lib/python3.13/": ""})
    assert find_software(FolderContents(tmp_path), {}).python_version == "", "either of two"


def test_versions_are_compared_by_their_numbers() -> None:
    assert parse_version("2.1.0a0+fe05266") == (2, 1, 0) < parse_version("2.10") < (2, 11)
    assert parse_version("") == parse_version("unknown") == ()
