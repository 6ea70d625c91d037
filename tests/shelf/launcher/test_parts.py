"""The pure parts of the launcher's front end: layouts, environment files, the conf of its flags."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_core.records.plan import Plan
from varuna_core.records.rank_map import parse_stage_map
from vjob.jobs.api.confs import ConfText, resolve
from vjob.jobs.conf.write import dump_yaml
from vjob.jobs.errors import InputError
from vjob.jobs.submit.submit import prepare
from vjob.shelf.launcher.envfile import parse_env_file
from vjob.shelf.launcher.layout import PlannedShape, lay_out
from vjob.shelf.launcher.runs import find_launched
from vjob.shelf.launcher.translate import (
    Arguments,
    Inputs,
    build_conf,
    name_run,
    read_inputs,
)

WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 12), st.integers(1, 5))
def test_every_rank_has_a_place_and_a_pipeline_lies_together(
    machines: int, gpus: int, stages: int, share: int
) -> None:
    replicas = machines * gpus // stages
    if replicas == 0:
        with pytest.raises(InputError, match="needs a GPU a stage"):
            lay_out(
                machines=machines, gpus_per_node=gpus, stages=stages, batch_size=8, chunk_size=1
            )
        return
    layout = lay_out(
        machines=machines,
        gpus_per_node=gpus,
        stages=stages,
        batch_size=share * replicas,
        chunk_size=1,
    )
    assert layout.share == share
    assert 0 <= layout.idle_gpus < stages
    assert layout.world + layout.idle_gpus == machines * gpus
    assert sum(count * ranks for count, ranks in layout.nodes) == layout.world
    assert sum(count for count, _ in layout.nodes) == layout.machines
    assert layout.machines + layout.idle_machines == machines


def test_the_stage_map_and_the_idle_are_varunas() -> None:
    layout = lay_out(machines=2, gpus_per_node=4, stages=3, batch_size=8, chunk_size=2)
    assert layout.nodes == ((1, 4), (1, 2))
    assert layout.describe() == [
        "3 stages x 2 replicas on 2 machines; a step is 4 samples a replica in micro-batches of 2",
        "2 GPUs idle: too few for one more replica of 3 stages",
    ]
    layout = lay_out(machines=3, gpus_per_node=2, stages=4, batch_size=1, chunk_size=1)
    assert "2 GPUs idle, 1 machine of them whole" in layout.describe()[1]


def test_a_batch_that_cannot_be_dealt_out_is_refused_with_its_neighbours() -> None:
    with pytest.raises(InputError, match="take 6 or 12"):
        lay_out(machines=3, gpus_per_node=2, stages=2, batch_size=10, chunk_size=2)
    with pytest.raises(InputError, match="take 6, or"):
        lay_out(machines=3, gpus_per_node=2, stages=2, batch_size=2, chunk_size=2)
    with pytest.raises(InputError, match="--chunk_size 0"):
        lay_out(machines=3, gpus_per_node=2, stages=2, batch_size=6, chunk_size=0)


@given(st.dictionaries(NAMES.filter(lambda name: name != "export"), WORDS), st.booleans())
def test_an_environment_file_gives_back_what_a_shell_would(
    env: dict[str, str], is_exported: bool
) -> None:
    start = "export " if is_exported else ""
    lines = [f"{start}{name}={shlex.quote(value)} # it's" for name, value in env.items()]
    assert parse_env_file("", "e") == {}
    assert parse_env_file("# don't\n\n" + "\n".join(lines), "e") == env


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("ab =:#'\"\\\n\t$~`;&(*"), max_size=12))
def test_what_is_taken_is_what_a_real_shell_takes(tail: str) -> None:
    text = f"A={tail}\nB=1 C=2 # x\n"
    try:
        found = parse_env_file(text, "e")
    except InputError:
        return  # a command of the shell, or an open quote
    shell = ["env", "-i", "/bin/bash", "-c", 'set -a; eval "$1" || exit 9; printenv -0', "-", text]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = dict(item.split("=", 1) for item in done.stdout.split("\0") if item)
    assert found == {name: said[name] for name in found}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=1\nB=hush hush2", "e:2: want NAME=VALUE after B; quote"),
        ("A=1\n\nB='hush\n", "e:3: a quote is opened"),
        ("PATH=/hush:$PATH", "e:1: PATH: a shell would act on the $"),
        ('P="hush`id`"', "e:1: P: a shell would act on the `"),
        ("P=~/hush", "e:1: P: a shell would act on the ~"),
        ("P=http://hush?a&b", "e:1: P: a shell would act on the &"),
        ("1=hush", "e:1: want NAME=VALUE"),
        ("A=hush\0", "e:1: A holds a NUL"),
    ],
)
def test_a_bad_line_is_named_and_its_value_never_shown(text: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_env_file(text, "e")
    assert str(raised.value).startswith(message) and "hush" not in str(raised.value)


def test_a_dollar_that_belongs_to_the_value_is_kept() -> None:
    assert parse_env_file("A='$x'\nB=a\\$b\nC=5$", "e") == {"A": "$x", "B": "a$b", "C": "5$"}


def test_a_folder_without_a_record_keeps_no_other_run_from_being_found(tmp_path: Path) -> None:
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "launch.json").write_text("{}")
    with pytest.raises(InputError, match="no run of the launcher is in"):
        find_launched(tmp_path, None, live=False)


def make(folder: Path, *command: str, **changes: Any) -> Arguments:
    given: dict[str, Any] = {
        "machine_list": str(folder / "machines"),
        "gpus_per_node": 4,
        "nstages": 3,
        "chunk_size": 2,
        "batch_size": 8,
        "manager_ip": None,
        "no_morphing": True,
        "code_dir": str(folder),
        "env_file": None,
        "python": "/usr/bin/python3",
        "ssh_config": None,
        "cpu": False,
        "command": list(command),
    }
    return Arguments(**{**given, **changes})


def plan_launch(arguments: Arguments, machines: int = 2) -> Plan:
    """The plan of a submit of these flags."""
    folder = Path(arguments.code_dir)
    (folder / "machines").write_text("".join(f"m{number}\n" for number in range(machines)))
    (folder / arguments.command[0]).write_text("")
    conf = build_conf(arguments, read_inputs(arguments), str(folder / "log"))
    resolved = resolve(ConfText(path=Path("flags"), text=dump_yaml(conf)))
    return prepare(resolved, for_preview=True).plan


def test_a_launch_is_a_run_of_one_replica_after_the_other(tmp_path: Path) -> None:
    plan = plan_launch(make(tmp_path, "a b.py", "--lr", "1"))
    assert [(g.count, g.ranks, g.gpus, g.first_node, g.first_rank) for g in plan.groups] == [
        (1, 4, 4, 0, 0),
        (1, 2, 2, 1, 4),
    ]
    places = parse_stage_map(plan.stage_map, plan.world)
    assert [places.find(rank) for rank in range(6)] == [(r % 3, r // 3) for r in range(6)]
    assert plan.scheduler == "ssh" and not plan.morph and plan.name == "a-b"
    assert plan.env["VJOB_GLOBAL_BATCH_SIZE"] == "8"
    own = ("--rank=%{rank}", "--local_rank=%{local_rank}", "--stage_to_rank_map=%{stage_map}")
    own += ("--chunk_size=2", "--batch-size=%{batch_share}")
    assert plan.command[:2] == ("/usr/bin/python3", "-u") and plan.command[3:] == (
        *own,
        "--lr",
        "1",
    )


def test_a_script_may_get_its_own_arguments_alone(tmp_path: Path) -> None:
    plan = plan_launch(make(tmp_path, "a.py", "--lr", "1", no_arguments=True))
    assert plan.command[3:] == ("--lr", "1")


def test_without_no_morphing_the_list_is_watched(tmp_path: Path) -> None:
    plan = plan_launch(
        make(tmp_path, "a.py", no_morphing=False, nstages=2, batch_size=12), machines=3
    )
    assert plan.morph and plan.morphing is not None and plan.morphing.max_nodes == 12
    assert plan.groups[0].count == 3 and plan.num_nodes == 12


def test_a_partition_and_an_address_reach_the_plan(tmp_path: Path) -> None:
    arguments = make(tmp_path, "a.py", nstages=2, cpu=True, manager_ip="127.0.0.1")
    shape = PlannedShape(2, 2, "5-7", "planned")
    layout = lay_out(machines=2, gpus_per_node=4, stages=2, batch_size=8, chunk_size=2)
    inputs = Inputs(machines=2, env={}, shape=shape, layout=layout)
    (tmp_path / "a.py").touch()
    conf = build_conf(arguments, inputs, str(tmp_path / "log"))
    plan = prepare(
        resolve(ConfText(path=Path("flags"), text=dump_yaml(conf))), for_preview=True
    ).plan
    assert plan.partition == "5-7" and plan.address == "127.0.0.1"
    assert plan.groups[0].gpus == 0 and plan.groups[0].ranks == 4


@settings(max_examples=30, deadline=None)
@given(st.lists(WORDS, max_size=3), st.dictionaries(NAMES, WORDS, max_size=2))
def test_no_word_of_the_user_is_filled_in(
    tmp_path_factory: pytest.TempPathFactory, args: list[str], env: dict[str, str]
) -> None:
    folder = tmp_path_factory.mktemp("words")
    env = {f"A{name}": value for name, value in env.items()}
    (folder / "env").write_text("".join(f"{k}={shlex.quote(v)}\n" for k, v in env.items()))
    plan = plan_launch(make(folder, "a.py", "${train.steps}", *args, env_file=str(folder / "env")))
    words = [word.replace("%{percent}", "%") for word in plan.command[8:]]
    assert words == ["${train.steps}", *args]
    assert {name: plan.env[name] for name in env} == env


def test_visible_gpus_of_the_environment_file_are_devices(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("CUDA_VISIBLE_DEVICES=4,5\nA=1\n")
    arguments = make(tmp_path, "a.py", gpus_per_node=2, nstages=2, env_file=str(tmp_path / "env"))
    plan = plan_launch(arguments)
    assert (plan.groups[0].devices, plan.groups[0].gpus) == ((4, 5), 6)
    (tmp_path / "env").write_text("CUDA_VISIBLE_DEVICES=4\n")
    with pytest.raises(InputError, match="names 1 GPUs, and --gpus_per_node is 2"):
        plan_launch(arguments)


@pytest.mark.parametrize(
    ("script", "name"),
    [("a/b c.py", "b-c"), ("last.py", "run-last"), ("7.py", "run-7"), ("_.py", "run")],
)
def test_a_run_is_named_after_its_script(script: str, name: str) -> None:
    assert name_run(script) == name
