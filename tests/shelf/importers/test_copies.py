"""Copies inside a container become setup lines and a mount that have the same files there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from vjob.shelf.importers.copies import build_copies

MOUNTS = ["~/a/checkout:/root/checkout", "~/a/gpt:/root/maps:ro", "~/a/log2:/root/log2"]


def test_a_checkout_and_index_maps_are_copied_on_the_node_and_mounted() -> None:
    commands = [
        ["rm", "-rf", "/root/work"],
        ["cp", "-r", "/root/checkout", "/root/work"],
        ["cp", "-r", "/root/maps/*", "/root/work"],
    ]
    found = build_copies(commands, MOUNTS, "/scratch/me")
    assert found.mounts == ["/scratch/me/copies/root/work:/root/work"]
    assert found.setup == [
        "rm -rf /scratch/me/copies/root/work && mkdir -p /scratch/me/copies/root",
        "cp -r ~/a/checkout /scratch/me/copies/root/work",
        "cp -r ~/a/gpt/* /scratch/me/copies/root/work",
    ]
    assert found.left_out == []


def test_the_setup_lines_make_the_files_of_the_copy(tmp_path: Path) -> None:
    for name in ("check out/train.py", "maps/x_shuffle_idx.npy"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    mounts = [f"{tmp_path}/check out:/c", f"{tmp_path}/maps:/m"]
    commands = [["cp", "-a", "/c", "/w"], ["cp", "-r", "/m/*", "/w/"]]
    found = build_copies(commands, mounts, f"{tmp_path}/scratch")
    for _ in range(2):  # a second run of the node begins anew
        subprocess.run(["bash", "-ec", "\n".join(found.setup)], check=True)
        there = sorted(path.name for path in (tmp_path / "scratch/copies/w").iterdir())
        assert there == ["train.py", "x_shuffle_idx.npy"]


@pytest.mark.parametrize(
    ("command", "scratch", "reason"),
    [
        ("cp -r /elsewhere /root/work", "/s", "the copied files are not in the mounts"),
        ("cp -r /root/checkout /root/log2/now", "/s", "the target is in a mounted folder"),
        ("cp -r /root/checkout /root/work", None, "no script names a node's folder for the copy"),
    ],
)
def test_a_copy_that_cannot_be_made_is_told(command: str, scratch: str | None, reason: str) -> None:
    found = build_copies([command.split()], MOUNTS, scratch)
    assert (found.setup, found.mounts, found.left_out) == ([], [], [(command, reason)])


@pytest.mark.parametrize(
    "command", ["cp a b", "cp -r a b", "cp /root/checkout/x /y", "mv /a /b", ""]
)
def test_other_commands_are_no_copies_of_folders(command: str) -> None:
    found = build_copies([command.split()], MOUNTS, "/s")
    assert (found.setup, found.mounts, found.left_out) == ([], [], [])
