"""enroot's commands, and a run through a recording stand-in where enroot is not installed.

The stand-in does what we rely on: `create` unpacks under a name, `start` passes nothing of the
environment but what `-e` names, and execs.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from containers.enroot import PREPARE_SCRIPT, Enroot, container_name
from containers.runtime import Request
from tests.command import PROGRAMS, Vjob, read_out

REQUEST = Request(
    image="/img/py torch.sqsh",
    mounts=("/data:/data", "/a b:/c"),
    workdir="/work dir",
    writable=True,
    reuse="auto",
    gpus=True,
    user_id=1000,
    scratch="/tmp",
    stamp="10-20",
)

STAND_IN = """\
#!/bin/bash
set -eu
echo "$*" >> "$ENROOT_DATA_PATH/../calls"
case $1 in
  version) echo 0.0 ;;
  create)
    [ ! -d "$ENROOT_DATA_PATH/$3" ]
    mkdir "$ENROOT_DATA_PATH/$3"
    cp "$4" "$ENROOT_DATA_PATH/$3/image" ;;
  start)
    shift
    keep=()
    while :; do
      case $1 in
        --rw) shift ;;
        -m) shift 2 ;;
        -e) keep+=("$2=${!2}"); shift 2 ;;
        *) break ;;
      esac
    done
    [ -d "$ENROOT_DATA_PATH/$1" ] || { echo "no container $1" >&2; exit 1; }
    shift
    exec env -i PATH="$PATH" "${keep[@]}" "$@" ;;
esac
"""


def test_commands_keep_values_off_the_command_line() -> None:
    commands = Enroot().plan(REQUEST)
    name = container_name(REQUEST)
    assert commands.before_env == (
        "enroot", "start", "--rw", "-m", "/data:/data", "-m", "/a b:/c",
    )  # fmt: skip
    assert commands.env_flag == ("-e", "{name}")
    assert commands.after_env[0] == name and commands.after_env[-1] == "/work dir"
    assert commands.prepare[0][3:] == ("prepare", "/img/py torch.sqsh", name, "yes")
    assert all(path.startswith("/tmp/vjob-enroot-1000/") for path in commands.env.values())


def test_a_renewed_image_gets_another_name() -> None:
    assert container_name(REQUEST) != container_name(replace(REQUEST, stamp="10-21"))


def test_reuse_false_unpacks_anew() -> None:
    assert Enroot().plan(replace(REQUEST, reuse=False)).prepare[0][-1] == "no"


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """Environment with the stand-in first on PATH, and enroot's folders in a place of the test."""
    folder = tmp_path / "tools"
    folder.mkdir()
    tool = folder / "enroot"
    tool.write_text(STAND_IN)
    tool.chmod(0o755)
    kinds = ("DATA", "RUNTIME", "TEMP", "CACHE")
    paths = {f"ENROOT_{kind}_PATH": str(tmp_path / "enroot" / kind.lower()) for kind in kinds}
    return {**os.environ, **paths, "PATH": f"{folder}:{os.environ['PATH']}"}


def prepare(tools: dict[str, str], image: Path, reuse: str = "yes") -> subprocess.Popen[bytes]:
    command = ["bash", "-c", PREPARE_SCRIPT, "prepare", str(image), "box", reuse]
    return subprocess.Popen(command, env=tools)


def count_creates(tmp_path: Path) -> int:
    return (tmp_path / "enroot" / "calls").read_text().count("create")


def test_many_prepares_at_once_unpack_once(tmp_path: Path, tools: dict[str, str]) -> None:
    image = tmp_path / "a.sqsh"
    image.write_text("1")
    children = [prepare(tools, image) for _ in range(8)]
    assert {child.wait(timeout=30) for child in children} == {0}
    assert count_creates(tmp_path) == 1
    assert [p.name for p in (tmp_path / "enroot/data").iterdir() if p.is_dir()] == ["box"]


def test_reuse_false_replaces_what_is_there(tmp_path: Path, tools: dict[str, str]) -> None:
    image = tmp_path / "a.sqsh"
    for text in ("1", "2"):
        image.write_text(text)
        assert prepare(tools, image, reuse="no").wait(timeout=30) == 0
    assert (tmp_path / "enroot/data/box/image").read_text() == "2"


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, tools: dict[str, str]) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "enroot").symlink_to(tmp_path / "elsewhere")
    assert prepare(tools, tmp_path / "a.sqsh").wait(timeout=30) == 3
    assert not list((tmp_path / "elsewhere").iterdir())


def test_what_a_killed_prepare_left_is_cleared(tmp_path: Path, tools: dict[str, str]) -> None:
    image = tmp_path / "a.sqsh"
    image.write_text("1")
    torn = tmp_path / "enroot/data/box.part.1"
    torn.mkdir(parents=True)
    assert prepare(tools, image).wait(timeout=30) == 0
    assert not torn.exists()


def test_a_failed_unpack_leaves_nothing_behind(tmp_path: Path, tools: dict[str, str]) -> None:
    assert prepare(tools, tmp_path / "missing.sqsh").wait(timeout=30) != 0
    assert not [p for p in (tmp_path / "enroot/data").iterdir() if p.is_dir()]


def test_a_run_in_a_container_gets_its_ranks_environment_and_nothing_else(
    tmp_path: Path, tools: dict[str, str]
) -> None:
    image = tmp_path / "a.sqsh"
    image.write_text("1")
    vjob = Vjob(tmp_path, tools)
    run = vjob.submit(
        f"""
name: boxed
program: {{script: {PROGRAMS}/who.py, args: ["a b", "$(id)"], python: python3}}
cluster: {{scheduler: local, nodes: [{{group: m, count: 2, ranks: 2}}]}}
container: {{runtime: enroot, image: {image}, scratch: {tmp_path}}}
env: {{NOTE: "it's", MY_TOKEN: s3cret}}
"""
    )
    record = vjob.wait_over(run)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    rows = [json.loads(line) for line in read_out(run).splitlines()]
    assert sorted(row["rank"] for row in rows) == [0, 1, 2, 3]
    assert all(row["args"] == ["a b", "$(id)"] and row["note"] == "it's" for row in rows)
    calls = (tmp_path / f"vjob-enroot-{os.getuid()}" / "calls").read_text()
    assert "s3cret" not in calls and "MY_TOKEN" in calls
