from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.jobs.programs.code.repositories import commit, git, make_repository, write_files
from vjob.jobs.errors import VjobError
from vjob.jobs.programs.code import tree as trees
from vjob.jobs.programs.code.repository import Git
from vjob.jobs.programs.code.tree import Limits, Tree, copy_tree, list_tree, place_link

WIDE = Limits(num_files=1000, size_mb=10)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_repository(
        tmp_path / "tree", DOTgitignore="data/\n*.pt\n", train_py="1\n", lib__a_py="A = 1\n"
    )


def listed(root: Path, *excluded: str, untracked: bool = True, limits: Limits = WIDE) -> Tree:
    return list_tree(Git(os.environ), root, excluded, limits, untracked=untracked)


def copied(tree: Tree, target: Path) -> dict[str, str]:
    """Names and texts of the copy; of links where they lead."""
    copy_tree(tree, target, tree.root, "train.py")
    return {
        str(path.relative_to(target)): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in target.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_a_copy_has_what_git_does_not_ignore_and_links_to_the_rest(
    root: Path, tmp_path: Path
) -> None:
    write_files(root, new_py="new\n", data__big="x", **{"lib__ckpt.pt": ""})
    found = copied(listed(root), tmp_path / "code")
    assert found == {
        ".gitignore": "data/\n*.pt\n",
        "train.py": "1\n",
        "lib/a.py": "A = 1\n",
        "new.py": "new\n",
        "data": str(root / "data"),
        "lib/ckpt.pt": str(root / "lib/ckpt.pt"),
    }


def test_a_copy_of_the_commit_lacks_what_is_untracked(root: Path) -> None:
    write_files(root, new_py="")
    assert "new.py" not in listed(root, untracked=False).files


def test_submodules_and_clones_inside_are_copied_with_their_files(
    root: Path, tmp_path: Path
) -> None:
    deep = make_repository(tmp_path / "deep", x_py="X\n")
    inner = make_repository(tmp_path / "inner", lib_py="L\n", DOTgitignore="out\n")
    git(inner, "submodule", "add", "-q", str(deep), "deep")
    commit(inner)
    git(root, "submodule", "add", "-q", str(inner), "sub")
    git(root, "submodule", "update", "-q", "--init", "--recursive")
    commit(root)
    git(root, "clone", "-q", str(deep), "nested")
    write_files(root, sub__out="")
    write_files(root, sub__new_py="N\n")
    found = copied(listed(root), tmp_path / "code")
    assert found["sub/lib.py"] == "L\n" and found["sub/new.py"] == "N\n"
    assert found["sub/deep/x.py"] == found["nested/x.py"] == "X\n"
    assert found["sub/out"] == str(root / "sub/out")


def test_a_submodule_that_is_not_checked_out_is_left_out(root: Path, tmp_path: Path) -> None:
    inner = make_repository(tmp_path / "inner", lib_py="L\n")
    git(root, "submodule", "add", "-q", str(inner), "sub")
    commit(root)
    git(root, "submodule", "deinit", "-q", "--all")
    assert not [name for name in listed(root).files if name.startswith("sub/")]


def test_modes_times_and_links_stay(root: Path, tmp_path: Path) -> None:
    (root / "train.py").chmod(0o755)
    os.utime(root / "train.py", (1e9, 1e9))
    (root / "lib/link.py").symlink_to("a.py")
    (root / "away").symlink_to("../elsewhere")
    (root / "abs").symlink_to(root / "lib")
    found = copied(listed(root), tmp_path / "code")
    status = os.stat(tmp_path / "code/train.py")
    assert (stat.S_IMODE(status.st_mode), status.st_mtime) == (0o755, 1e9)
    assert found["lib/link.py"] == "a.py" and found["abs"] == "lib"
    assert found["away"] == str(tmp_path / "elsewhere")
    assert stat.S_IMODE(os.stat(tmp_path / "code/lib").st_mode) == 0o700


@pytest.mark.parametrize(
    ("text", "name", "placed"),
    [
        ("a.py", "lib/b", "a.py"),
        ("../a", "lib/b", "../a"),
        ("../../a", "lib/b", "/seen/../a"),
        ("/data", "b", "/data"),
        ("/r/lib", "x/y/z", "../../lib"),
        ("/r", "x", "."),
    ],
)
def test_a_link_leads_where_it_led(text: str, name: str, placed: str) -> None:
    placed = os.path.normpath(placed)
    assert place_link(text, name, Path("/r"), Path("/seen")) == placed


def test_too_many_files_are_refused_with_the_largest_folders(root: Path) -> None:
    for number in range(30):
        write_files(root, **{f"many__{number % 3}__f{number}": ""})
    tree = listed(root, limits=Limits(num_files=20, size_mb=1))
    assert "has 33 files, but at most 20 files and 1 MB are copied" in tree.excess
    assert "most of it is in many 30 files" in tree.excess


def test_a_tree_of_fifty_thousand_files_is_named_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"shards/{number}" for number in range(50_000)]
    limits = Limits(num_files=20_000, size_mb=500)
    assert "50,000 files" in trees.measure_tree(tmp_path, names, (), limits).excess
    monkeypatch.setattr(os, "walk", lambda root: [(str(tmp_path), [], names)] * 99)
    walked = list_tree(None, tmp_path, (), limits)
    assert "most of it is in shards" in walked.excess and len(walked.files) < 300_000


def test_too_many_bytes_are_refused_with_the_largest_folders(root: Path) -> None:
    (root / "blob").write_bytes(b"")
    os.truncate(root / "blob", 25_000_000)
    tree = listed(root)
    assert "has 25 MB" in tree.excess and "most of it is in blob 25 MB" in tree.excess


def test_run_folders_are_no_code(root: Path) -> None:
    write_files(root, log__r__code__train_py="")
    write_files(root, **{"other__r__agent.pyz": "", "other__r__record.json": "", "other__x": ""})
    files = listed(root, "log").files
    assert "other/x" in files
    assert not [name for name in files if name.startswith(("log/", "other/r/"))]


def test_without_git_the_folder_is_copied(tmp_path: Path) -> None:
    write_files(tmp_path / "t", train_py="1\n", a__b_py="", log__x="")
    (tmp_path / "t/a/__pycache__").mkdir()
    (tmp_path / "t/a/__pycache__/x").write_text("")
    (tmp_path / "t/a/up").symlink_to("..")
    tree = list_tree(None, tmp_path / "t", ["log"], WIDE)
    assert sorted(tree.files) == ["a/b.py", "a/up", "train.py"]


def test_a_file_that_vanishes_while_it_is_copied_was_deleted(root: Path, tmp_path: Path) -> None:
    tree = listed(root)
    (root / "lib/a.py").unlink()
    assert copy_tree(tree, tmp_path / "code", root, "train.py") == [".gitignore", "train.py"]
    (root / "train.py").unlink()
    with pytest.raises(VjobError, match=r"train\.py vanished while it was copied"):
        copy_tree(tree, tmp_path / "again", root, "train.py")


def test_a_deleted_file_that_git_still_knows_is_none(root: Path) -> None:
    (root / "lib/a.py").unlink()
    assert "lib/a.py" not in listed(root).files


def test_a_file_that_cannot_be_read_is_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = listed(root)

    def refuse(path: Path, *given: object) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(VjobError, match="cannot be copied: Permission denied; nothing was subm"):
        copy_tree(tree, tmp_path / "code", root, "train.py")


def test_a_socket_or_pipe_in_the_tree_is_no_code(tmp_path: Path) -> None:
    write_files(tmp_path / "t", train_py="")
    os.mkfifo(tmp_path / "t/pipe")
    assert list_tree(None, tmp_path / "t", (), WIDE).files == ("train.py",)
