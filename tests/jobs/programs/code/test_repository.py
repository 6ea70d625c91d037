from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.jobs.programs.code.repositories import commit, git, make_repository, write_files
from vjob.jobs.programs.code import repository as repositories
from vjob.jobs.programs.code.repository import (
    Changes,
    Git,
    GitError,
    find_repository,
    list_files,
    list_ignored,
    parse_listing,
    parse_status,
    read_changes,
    read_diff,
    render_diff,
)
from vjob.jobs.programs.code.state import find_excluded, read_state, render_state


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "tree", train_py="print(1)\n", lib__a_py="A = 1\n")


def asked() -> Git:
    return Git(os.environ)


def test_a_repository_has_its_root_commit_and_branch(tree: Path) -> None:
    found = find_repository(asked(), tree / "lib")
    assert found is not None
    assert (found.root, found.branch) == (tree.resolve(), "main")
    assert found.commit == git(tree, "rev-parse", "HEAD").strip()


def test_a_detached_head_has_no_branch(tree: Path) -> None:
    git(tree, "checkout", "-q", "--detach")
    found = find_repository(asked(), tree)
    assert found is not None and found.commit and found.branch == ""


def test_a_repository_before_its_first_commit_has_none(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    found = find_repository(asked(), tmp_path)
    assert found is not None and found.commit == "" == read_diff(asked(), found)


def test_outside_of_a_repository_there_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert find_repository(asked(), tmp_path) is None
    state = read_state(asked(), tmp_path, tmp_path / "log")
    assert state.build_record() is None and render_state(state, os.environ) == ""


def test_what_a_git_hook_left_in_the_environment_names_no_other_repository(
    tree: Path, tmp_path: Path
) -> None:
    other = make_repository(tmp_path / "other", x="")
    environ = {**os.environ, "GIT_DIR": str(other / ".git"), "GIT_WORK_TREE": str(other)}
    found = find_repository(Git(environ), tree)
    assert found is not None and found.root == tree.resolve()


def test_changed_files_and_new_ones_are_told_apart(tree: Path) -> None:
    assert read_changes(asked(), tree) == Changes()
    write_files(tree, train_py="print(2)\n", new_py="", more__x="", more__y="")
    found = read_changes(asked(), tree)
    assert found.tracked == ("train.py",)
    assert sorted(found.untracked) == ["more/", "new.py"]


def test_run_folders_in_the_tree_are_no_changes_and_no_files(tree: Path) -> None:
    write_files(tree, **{"my runs__conf-1__code__train_py": "", "new_py": ""})
    excluded = find_excluded(tree.resolve(), tree / "my runs")
    assert excluded == ("my runs",)
    assert read_changes(asked(), tree, excluded).untracked == ("new.py",)
    listed = list_files(asked(), tree, untracked=True, excluded=excluded)
    assert sorted(listed.files) == ["lib/a.py", "new.py", "train.py"]
    assert find_excluded(tree, tree.parent / "log") == ()


def test_a_status_may_hold_renames_and_odd_names() -> None:
    text = "R  new name.py\0old.py\0 M a\nb.py\0?? d/\0!! x\0"
    assert parse_status(text) == Changes(tracked=("new name.py", "a\nb.py"), untracked=("d/",))


def test_a_merge_has_a_file_once_and_a_submodule_is_no_file() -> None:
    text = "M 100644 aa 1\ta.py\0M 100644 bb 2\ta.py\0H 160000 cc 0\tsub\0? nested/\0? b.py\0"
    found = parse_listing(text)
    assert (found.files, found.inner) == (("a.py", "b.py"), ("sub", "nested"))


def test_ignored_folders_are_named_as_wholes(tree: Path) -> None:
    write_files(tree, DOTgitignore="data/\n*.pt\n", data__x="", data__y="", lib__w="")
    write_files(tree, **{"lib__ckpt.pt": ""})
    assert sorted(list_ignored(asked(), tree)) == ["data", "lib/ckpt.pt"]


def test_a_diff_hides_secrets_and_says_what_is_untracked(tree: Path) -> None:
    write_files(tree, train_py='os.environ["HF_TOKEN"] = "hf_verysecret"\nlr = 2\n', new_py="")
    state = read_state(asked(), tree, tree / "log")
    text = render_state(state, os.environ)
    assert "+lr = 2" in text and "-print(1)" in text
    assert "verysecret" not in text
    assert "# untracked: new.py" in text
    record = state.build_record()
    assert record is not None and record.dirty and record.untracked == 1


def test_a_long_diff_is_cut_at_a_line_and_says_so(tree: Path) -> None:
    write_files(tree, train_py="".join(f"line {n}\n" for n in range(9999)))
    found = find_repository(asked(), tree)
    assert found is not None
    text = read_diff(asked(), found, most=5000)
    *_, last, cut = text.splitlines()
    assert last.startswith("+line ") and cut == "# cut here: the diff is longer than 5,000 bytes"


def test_staged_changes_are_in_the_diff(tree: Path) -> None:
    write_files(tree, train_py="print(2)\n")
    git(tree, "add", "-A")
    found = find_repository(asked(), tree)
    assert found is not None and "+print(2)" in read_diff(asked(), found)
    changes = read_changes(asked(), tree)
    assert changes.tracked == ("train.py",)
    assert "against" in render_diff(found, changes, "")


def test_a_file_name_keeps_its_bytes(tree: Path) -> None:
    (tree / os.fsdecode(b"caf\xe9.py")).write_text("")
    found = read_changes(asked(), tree)
    assert [os.fsencode(name) for name in found.untracked] == [b"caf\xe9.py"]
    state = read_state(asked(), tree, tree / "log")
    assert "untracked: caf\ufffd.py" in render_state(state, os.environ)


def test_a_git_that_is_missing_or_hangs_is_a_reason_and_no_failure(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    state = read_state(asked(), tree, tree / "log")
    assert state.build_record() is None and "not on PATH" in state.problem
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    state = read_state(Git(os.environ, limit_s=0.2), tree, tree / "log")
    assert "did not answer" in state.problem


def test_a_status_that_is_too_slow_leaves_the_commit(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> Changes:
        raise GitError("git did not answer within 4 s")

    monkeypatch.setattr("vjob.jobs.programs.code.state.read_changes", fail)
    record = read_state(asked(), tree, tree / "log").build_record()
    assert record is not None and record.commit and record.note == "git did not answer within 4 s"


def test_a_submodule_of_another_commit_makes_the_tree_dirty(tree: Path, tmp_path: Path) -> None:
    inner = make_repository(tmp_path / "inner", lib_py="")
    git(tree, "submodule", "add", "-q", str(inner), "sub")
    commit(tree)
    assert list_files(asked(), tree, untracked=True).inner == ("sub",)
    write_files(tree / "sub", scratch="")
    assert read_changes(asked(), tree) == Changes()
    write_files(tree / "sub", lib_py="x = 1\n")
    assert read_changes(asked(), tree).tracked == ("sub",)


def test_a_repository_is_asked_without_taking_its_lock(tree: Path) -> None:
    (tree / ".git/index.lock").write_text("")
    assert read_changes(asked(), tree) == Changes()
    assert repositories.GIT_S < 10
