"""The store of unpacked images: once a node, whole or not at all, with the real tools."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.containers.request import make_request
from vjob.containers.enroot import build_environment
from vjob.containers.runtime import ImageKind, Mount, Request
from vjob.containers.store import Store

TOOLS = [
    pytest.param(
        tool,
        marks=[
            *marks,
            pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed"),
        ],
    )
    for tool, marks in (("unsquashfs", []), ("enroot", [pytest.mark.enroot]))
]


class Node:
    """A node's disk, and what one request does on it."""

    def __init__(self, tool: str, request: Request) -> None:
        self.tool, self.request = tool, request

    def start(self, **changes: Any) -> subprocess.Popen[str]:
        request = replace(self.request, **changes)
        store = Store(request)
        return subprocess.Popen(
            store.build_prepare(self.tool),
            env={**os.environ, **build_environment(store)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def prepare(self, code: int = 0, **changes: Any) -> str:
        """What it said on stderr."""
        child = self.start(**changes)
        said = child.communicate(timeout=60)[1]
        assert child.returncode == code, said
        return said

    def root(self, **changes: Any) -> Path:
        return Path(Store(replace(self.request, **changes)).root)

    def trees(self) -> list[str]:
        folder = Path(Store(self.request).roots)
        return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.fixture
def node(tool: str, image: Path, scratch: Path) -> Node:
    request = make_request(
        image,
        scratch,
        mounts=(
            Mount(source="/usr", target="/new/place"),
            Mount(source="/etc/passwd", target="/f"),
        ),
    )
    return Node(tool, request)


with_tools = pytest.mark.parametrize("tool", TOOLS)


@with_tools
def test_many_at_once_make_one_whole_tree(node: Node) -> None:
    children = [node.start() for _ in range(6)]
    said = [child.communicate(timeout=60)[1] for child in children]
    assert {child.returncode for child in children} == {0}, said
    assert node.trees() == [node.root().name]
    assert (node.root() / "usr/bin/python3").exists()
    assert (node.root() / "new/place").is_dir() and (node.root() / "f").is_file(), "mount points"


def touch_image(node: Node) -> None:
    path = Path(node.request.image)
    later = path.stat().st_mtime + 10
    os.utime(path, (later, later))


@with_tools
def test_what_is_unpacked_is_used_again_and_a_renewed_image_is_not(node: Node) -> None:
    node.prepare()
    (node.root() / "etc/mark").touch()
    node.prepare()
    assert (node.root() / "etc/mark").exists()
    touch_image(node)  # the node sees another file than the submit host saw
    assert "older image" in node.prepare()
    assert not (node.root() / "etc/mark").exists()


@with_tools
def test_reuse_true_takes_an_older_one_and_false_unpacks_its_own(node: Node) -> None:
    node.prepare(reuse=True)
    (node.root(reuse=True) / "etc/mark").touch()
    touch_image(node)
    node.prepare(reuse=True, stamp="2")
    assert (node.root(reuse=True, stamp="2") / "etc/mark").exists()
    node.prepare(reuse=False)
    assert not (node.root(reuse=False) / "etc/mark").exists()
    assert len(node.trees()) == 2
    [clean] = Store(replace(node.request, reuse=False)).build_clean()
    subprocess.run(clean, check=True)
    assert len(node.trees()) == 1, "the shared one stays"


@with_tools
@pytest.mark.parametrize("loss", ["usr/bin", "etc/environment"])
def test_a_torn_tree_is_unpacked_anew(node: Node, loss: str) -> None:
    """Cleaners of old files tear trees in /tmp."""
    node.prepare()
    lost = node.root() / loss
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    assert "torn" in node.prepare()
    assert lost.exists()


@with_tools
def test_a_killed_unpack_leaves_nothing_that_starts(node: Node) -> None:
    child = node.start()
    roots = Path(Store(node.request).roots)
    deadline = time.monotonic() + 20
    while not list(roots.glob("*.part.*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    child.kill()
    child.communicate()
    assert not node.root().exists()
    node.prepare()
    assert node.trees() == [node.root().name]


@with_tools
def test_a_corrupt_image_is_said_and_leaves_nothing(node: Node, tmp_path: Path) -> None:
    torn = tmp_path / "torn.sqsh"
    torn.write_bytes(Path(node.request.image).read_bytes()[:2_000_000])
    said = node.prepare(code=3, image=str(torn))
    assert f"{torn} could not be unpacked" in said
    assert "FATAL" in said and "Parallel" not in said, "the line that tells why"
    assert node.trees() == []
    assert "is not on" in node.prepare(code=3, image="/no/such.sqsh")


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@with_tools
def test_a_full_disk_is_said_before_and_while_unpacking(node: Node, tiny: Path) -> None:
    said = node.prepare(code=3, scratch=str(tiny))
    assert "No space left" in said and "while" in said
    assert "warning" in said and "three times" in said, "it looked before"
    (tiny / "filler").write_bytes(b"x" * 12_000_000)
    assert "set container.scratch" in node.prepare(code=3, scratch=str(tiny))
    assert not list(tiny.glob("*/roots/vjob-*"))


@with_tools
def test_a_folder_of_somebody_else_is_not_used(node: Node, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    Path(Store(node.request).base).symlink_to(tmp_path / "elsewhere")
    assert "set container.scratch" in node.prepare(code=3)
    assert not list((tmp_path / "elsewhere").iterdir())


@with_tools
def test_an_archive_is_unpacked_and_a_link_in_an_image_leads_nowhere_else(
    node: Node, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "data").symlink_to(tmp_path / "victim")
    (tmp_path / "victim").mkdir()
    image = tmp_path / "a.tar.gz"
    subprocess.run(["tar", "-czf", image, "-C", tree, "."], check=True)
    mounts = (Mount(source="/usr", target="/data/new"),)
    changes = {"image": str(image), "kind": ImageKind.ARCHIVE, "mounts": mounts}
    node.prepare(**changes)
    assert (node.root(**changes) / "etc/hosts").exists()
    assert not list((tmp_path / "victim").iterdir())


@with_tools
def test_a_folder_that_is_no_root_is_refused_before_anything_is_written_to_it(
    node: Node, tmp_path: Path
) -> None:
    """enroot made dev, proc and etc/passwd in the user's own folder."""
    folder = tmp_path / "papers"
    folder.mkdir()
    changes = {"image": str(folder), "kind": ImageKind.FOLDER}
    said = node.prepare(code=3, **changes)
    assert f"{folder} is not the root folder of an image" in said
    assert not list(folder.iterdir())


@with_tools
def test_what_a_killed_agent_unpacked_for_its_run_alone_goes_with_a_later_prepare(
    node: Node,
) -> None:
    roots = Path(Store(node.request).roots)
    for run in ("dead", "lives", "young"):
        node.prepare(reuse=False, run=run)
        lease = Path(Store(replace(node.request, reuse=False, run=run)).lease)
        lease.touch()
    for lock in roots.glob(".vjob-*.lock"):
        if "young" not in lock.name:
            os.utime(lock, (time.time() - 7200, time.time() - 7200))
    with Path(Store(replace(node.request, reuse=False, run="lives")).lease).open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        node.prepare()
    kept = [name.split("-")[2] for name in node.trees() if name.count("-") > 1]
    assert sorted(kept) == ["lives", "young"]
    assert not list(roots.glob(".*dead*"))
    assert node.root().is_dir(), "the shared one stays"
