"""`vjob container list`, `inspect` and `clean` on a store that prepare.sh itself has filled."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from tests.command import PROGRAMS, Vjob, read_out, wait_for
from tests.containers.request import make_request
from vjob.containers.runtime import ImageKind
from vjob.containers.store import Store
from vjob.jobs.conf.schema import Container
from vjob.jobs.images.store import find_mounts, measure, remove_tree
from vjob.shelf.commands.container import scratch_option

AGO_S = 7200.0


class Node:
    """One node's store, and the command that looks after it."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.folder = folder
        self.vjob = Vjob(folder, {"XDG_CACHE_HOME": str(folder / "cache")})
        self.image = folder / "an image.sqsh"
        shutil.copyfile(image, self.image)
        self.request = make_request(self.image, folder / "scratch")

    def prepare(self, age_s: float = AGO_S, **changes: Any) -> Path:
        """Unpack as a run would have some time ago; the tree."""
        store = Store(replace(self.request, **changes))
        subprocess.run(store.build_prepare("unsquashfs"), check=True, capture_output=True)
        then = time.time() - age_s
        os.utime(Path(store.roots) / f".{store.name}.lock", (then, then))
        return Path(store.root)

    def __call__(self, *words: str, code: int = 0) -> str:
        done = self.vjob("container", *words, "--scratch", self.request.scratch, code=code)
        return done.stdout + done.stderr

    def list(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self("list", "--json"))["unpacked"]
        return found


@pytest.fixture
def node(tmp_path: Path, image: Path) -> Node:
    return Node(tmp_path, image)


@contextmanager
def hold(path: Path, kind: int) -> Iterator[None]:
    """As an agent or a prepare.sh does."""
    with path.open("a") as handle:
        fcntl.flock(handle, kind)
        yield


def test_list_shows_name_size_image_age_and_state(node: Node) -> None:
    assert "nothing" in node("list")
    tree = node.prepare()
    said = node("list")
    assert f"{tree.name}  " in said and "2 h ago  idle   " in said and str(node.image) in said
    (row,) = node.list()
    assert row["bytes"] == measure(tree) > 10_000_000
    assert (row["image"], row["state"], row["is_stale"]) == (str(node.image), "idle", False)
    os.utime(node.image, (1, 1))
    assert node.list()[0]["is_stale"] and "has changed since" in node("list")


def test_clean_removes_by_name_by_image_by_age_and_all(node: Node) -> None:
    tree = node.prepare()
    assert f"removed {tree.name}" in node("clean", tree.name)
    node.prepare()
    assert f"removed {tree.name}" in node("clean", str(node.image))
    node.prepare()
    assert "removed" not in node("clean", "--older-than", "1")
    assert f"removed {tree.name}" in node("clean", "--older-than", "0.05")
    node.prepare(), node.prepare(reuse=True)
    assert node("clean", "--all").count("removed vjob-") == 2
    assert node.list() == []
    assert all(path.name.endswith(".lock") for path in tree.parent.iterdir())
    node.prepare()  # and all is as it was


def test_clean_says_the_node_and_a_dry_run_removes_nothing(node: Node) -> None:
    tree = node.prepare()
    host = os.uname().nodename
    assert f"{host}: would remove {tree.name}" in node("clean", "--all", "--dry-run")
    assert tree.exists()
    assert "say what to remove" in node("clean", code=2)
    assert "say what to remove" in node("clean", "--all", tree.name, code=2)
    assert f"which holds {tree.name}" in node("clean", "vjob-other", code=2)


def test_what_ranks_run_in_is_kept_and_said(node: Node) -> None:
    tree = node.prepare()
    with hold(tree.with_name(f".{tree.name}.use"), fcntl.LOCK_SH):
        assert node.list()[0]["state"] == "in use"
        assert f"kept {tree.name}" in node("clean", "--all", "--dry-run")
        assert "ranks run in the image" in node("clean", "--all")
        assert f"{tree.name} was kept" in node("clean", tree.name, code=1)
    assert (tree / "usr/bin/python3").exists()
    assert "removed" in node("clean", "--all")


def test_what_is_being_prepared_or_just_was_is_kept(node: Node) -> None:
    tree = node.prepare()
    with hold(tree.with_name(f".{tree.name}.lock"), fcntl.LOCK_EX):
        assert node.list()[0]["state"] == "being prepared"
        assert "being prepared" in node("clean", "--all")
    node.prepare(age_s=1)
    assert "its run may just be starting" in node("clean", "--all")
    assert tree.exists()


def test_half_a_tree_of_a_killed_unpacking_is_a_left_over(node: Node) -> None:
    tree = node.prepare()
    half = tree.with_name(f"{tree.name}.part.4711")
    (half / "usr").mkdir(parents=True)
    assert [row["state"] for row in node.list()] == ["idle", "left over"]
    node("clean", half.name, "--dry-run")
    with hold(tree.with_name(f".{tree.name}.lock"), fcntl.LOCK_EX):
        assert "kept" in node("clean", half.name, code=1)
    node.prepare(age_s=1)
    node("clean", "--all")
    assert not half.exists() and tree.exists()


def test_a_folder_used_in_place_is_only_unlinked(node: Node, tmp_path: Path, image: Path) -> None:
    root = image.parent / "root"
    link = node.prepare(image=str(root), kind=ImageKind.FOLDER)
    (row,) = node.list()
    assert (row["in_place"], row["image"]) == (True, str(root))
    node("clean", "--all")
    assert not link.is_symlink() and (root / "usr/bin/python3").exists()


def test_removing_follows_no_link_and_opens_what_is_shut(node: Node, tmp_path: Path) -> None:
    tree = node.prepare()
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    (tree / "link").symlink_to(victim)
    (tree / "shut/inner").mkdir(parents=True)
    (tree / "shut").chmod(0)
    node("clean", "--all")
    assert not tree.exists() and (victim / "precious").exists()
    (victim / "alias").symlink_to(victim / "precious")
    remove_tree(victim / "alias")
    assert (victim / "precious").exists()


def test_a_base_that_is_a_link_or_anothers_is_not_touched(node: Node, tmp_path: Path) -> None:
    base = Path(Store(node.request).base)
    base.parent.mkdir(parents=True)
    base.symlink_to(tmp_path / "elsewhere")
    assert "not a folder of yours" in node("clean", "--all", code=2)
    assert "not a folder of yours" in node("list", code=2)


def test_a_tree_with_something_mounted_in_it_is_kept(node: Node) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    tree = node.prepare()
    point = tree / "tmp"
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(point)], check=True)
    try:
        assert f"mounted inside the image: first run umount {point}" in node("clean", "--all")
    finally:
        subprocess.run(["umount", str(point)], check=True)
    assert (tree / "usr").exists()


def test_mount_points_are_found_as_proc_writes_them() -> None:
    text = (
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "23 22 0:5 / /a\\040b/root/data rw - tmpfs tmpfs rw\n"
        "24 22 0:5 / /a\\040b/rooted rw - tmpfs tmpfs rw\n"
    )
    assert find_mounts(Path("/a b/root"), text) == ["/a b/root/data"]


def test_old_files_of_killed_runs_go_with_all_the_rest(node: Node) -> None:
    node.prepare()
    conf = Path(Store(node.request).base) / "conf"
    (conf / "old").touch()
    os.utime(conf / "old", (1, 1))
    (conf / "new").touch()
    node("clean", "--all")
    assert [path.name for path in conf.iterdir()] == ["new"]


@pytest.mark.charliecloud
@pytest.mark.skipif(shutil.which("ch-run") is None, reason="charliecloud is not installed")
def test_a_real_run_keeps_its_tree_until_it_has_ended(node: Node) -> None:
    shutil.copyfile(PROGRAMS / "fail_as_told.py", node.folder / "fail_as_told.py")
    run = node.vjob.submit(
        "name: held\nprogram: {script: fail_as_told.py, args: ['-1', hang, catch]}\n"
        "cluster: {scheduler: local, grace_s: 2, nodes: [{group: m, count: 1, ranks: 1}]}\n"
        f"container: {{runtime: charliecloud, image: '{node.image}', "
        f"scratch: '{node.request.scratch}'}}\n"
    )
    wait_for(lambda: "ready" in read_out(run), 60, lambda: node.vjob.explain(run))
    (row,) = node.list()
    assert row["state"] == "in use"
    os.utime(Path(row["path"]).with_name(f".{row['name']}.lock"), (1, 1))
    assert "ranks run in the image" in node("clean", "--all")
    node.vjob("cancel", "last")
    assert "removed" in node("clean", "--all")


def test_help_says_how_to_reach_all_nodes(node: Node) -> None:
    for command in ("list", "clean"):
        assert (
            "srun -N4 --ntasks-per-node=1 vjob container"
            in node.vjob("container", command, "--help").stdout
        )


def test_imported_files_are_listed_beside(node: Node) -> None:
    cache = node.folder / "cache/vjob/images"
    cache.mkdir(parents=True)
    shutil.copyfile(node.image, cache / "docker.io+debian+12.sqsh")
    (cache / ".half.sqsh").touch()
    (row,) = json.loads(node("list", "--json"))["imported"]
    assert row["bytes"] == node.image.stat().st_size
    assert "docker.io+debian+12.sqsh" in node("list")


def test_the_commands_look_where_confs_put_their_images() -> None:
    command = scratch_option(click.Command("any"))
    assert [option.default for option in command.params] == [Container().scratch]
