"""The launch of a program: what `auto` becomes, and why; what the launches cannot do."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs.confs import make_plan
from varuna_core.agent.meeting.meeting import Master
from varuna_core.agent.setup.container import fill_in
from varuna_core.agent.setup.site import Site
from varuna_core.records.plan import Plan
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.loading.check import check_conf, suggest_program
from vjob.jobs.conf.loading.load import parse_conf_lines
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.errors import InputError
from vjob.jobs.programs.launchers import find_in_script, find_launcher
from vjob.jobs.programs.start import ProgramFiles, choose_launch, read_first_line

BASE = Path("/conf")
TWO = "cluster: {scheduler: slurm, nodes: [{group: a, count: 2, ranks: 4}]}\n"
ONE = "cluster: {scheduler: slurm, nodes: [{group: a}]}\n"


def read(program: str, rest: str = TWO) -> tuple[JobConf, dict[str, str]]:
    text = f"name: run\nprogram: {program}\n{rest}"
    conf, lines = parse_conf_lines(text, "c", BASE, environ={})
    return conf, dict(lines)


def make_site(plan: Plan, node: int) -> Site:
    run = RunFolder(Path("/log/run"))
    return Site(
        plan=plan,
        node=plan.node(node),
        run=run,
        attempt=run.attempt(0),
        master=Master(address="10.0.0.1", port=4242, host="a", opened=0),
        host="b",
        env={},
        stopping=lambda: False,
    )


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("torchrun --nnodes 2 train.py", "torchrun"),
        ("/opt/bin/torchrun train.py", "/opt/bin/torchrun".rpartition("/")[2]),
        ("accelerate launch train.py", "accelerate launch"),
        ("accelerate config", ""),
        ("deepspeed train.py", "deepspeed"),
        ("fabric run train.py", "fabric run"),
        ("mpirun -np 4 ./a", "mpirun"),
        ("python -m torch.distributed.run x.py", "python -m torch.distributed.run"),
        (
            "python3.12 -u -W ignore -m torch.distributed.launch x.py",
            "python -m torch.distributed.launch",
        ),
        ("python -um torch.distributed.run x.py", "python -m torch.distributed.run"),
        ("python -m pkg.train", ""),
        ("python train.py torchrun", ""),
        ("echo torchrun", ""),
        ("uv run torchrun x.py", "torchrun"),
        ("uv run --with torch --no-sync accelerate launch x.py", "accelerate launch"),
        ("uv run -m torch.distributed.run x.py", "python -m torch.distributed.run"),
        ("uv run train.py", ""),
        ("conda run -n env --no-capture-output torchrun x.py", "torchrun"),
        ("pixi run -e gpu -- torchrun x.py", "torchrun"),
        ("env -u A B=1 C=2 torchrun x.py", "torchrun"),
        ("A=1 torchrun x.py", "torchrun"),
        ("numactl --cpunodebind=0 -m 0 nice -n 5 torchrun x.py", "torchrun"),
        ("taskset -c 0-3 torchrun x.py", "torchrun"),
        ("taskset 0x3 torchrun x.py", "torchrun"),
        ("timeout -k 5 1h torchrun x.py", "torchrun"),
        ("bash -c 'source a && exec torchrun x.py'", "torchrun"),
        ('bash -lc "cd x; for i in 1; do accelerate launch y.py; done"', "accelerate launch"),
        ("bash x.sh", ""),
        ("env", ""),
        ("python -m", ""),
        ("timeout", ""),
        ("", ""),
    ],
)
def test_launchers_are_known_behind_what_stands_before_them(command: str, launcher: str) -> None:
    assert find_launcher(shlex.split(command)) == launcher


@given(
    st.lists(
        st.sampled_from(
            [
                "env",
                "-u",
                "uv",
                "run",
                "--",
                "python",
                "-m",
                "timeout",
                "A=1",
                "",
                "bash",
                "-c",
                "'",
            ]
        )
    )
)
def test_any_words_have_an_answer(words: list[str]) -> None:
    assert find_launcher(words) == ""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("#!/bin/bash\nset -e\n\nA=1 torchrun \\\n  train.py\n", ("torchrun", 4)),
        ("#!/bin/bash\n# torchrun x.py\npython x.py 'torchrun'\n", ("", 0)),
        ("if true; then accelerate launch x.py; fi\n", ("accelerate launch", 1)),
        ("echo \\\n a\necho 'it\nis' \nmpirun x\n", ("mpirun", 5)),
    ],
)
def test_a_launcher_in_a_shell_script_has_its_line(text: str, found: tuple[str, int]) -> None:
    assert find_in_script(text) == found


@pytest.mark.parametrize(
    ("program", "rest", "launch", "why"),
    [
        ("{script: t.py}", TWO, "torchrun", ""),
        ("{module: pkg.train}", TWO, "torchrun", ""),
        ("{command: python t.py}", TWO, "torchrun", "one process a rank"),
        ("{command: torchrun t.py}", TWO, "node", "torchrun starts the ranks of its node"),
        ("{command: [uv, run], args: torchrun t.py}", TWO, "node", "torchrun starts"),
        ("{module: torch.distributed.run, args: t.py}", TWO, "node", "python -m torch.dist"),
        ("{command: torchrun t.py, launch: torchrun}", TWO, "torchrun", ""),
        ("{script: t.py}", ONE, "python", "one rank"),
        ("{command: torchrun t.py}", ONE, "node", "torchrun starts"),
        ("{script: t.py}", ONE + "parallel: {pipeline: 1}\n", "torchrun", ""),
        ("{script: t.py}", ONE + "parallel: {profile: p.json}\n", "python", "one rank"),
        ("{script: t.py}", ONE + "morph: {enabled: true, mode: world}\n", "torchrun", ""),
        ("{script: t.py, launch: srun}", ONE, "srun", ""),
        ("{deepspeed: t.py}", ONE, "torchrun", ""),
    ],
)
def test_auto_becomes_what_the_program_needs(
    program: str, rest: str, launch: str, why: str
) -> None:
    conf, lines = read(program, rest)
    found = choose_launch(conf, ProgramFiles(), lines)
    assert found.name == launch
    assert found.why.startswith(why) and bool(found.why) == bool(why)
    assert make_plan(conf, written=lines).launch == launch


@pytest.mark.parametrize(
    ("program", "rest", "message"),
    [
        (
            "{script: t.py, launch: python}",
            TWO,
            "program.launch = python: runs one process, but clust",
        ),
        (
            "{script: t.py, launch: python}",
            ONE + "morph: {enabled: true, mode: world}\n",
            "program.launch = python: conflicts with morph.enabled",
        ),
        (
            "{command: torchrun t.py}",
            TWO + "parallel: {tensor: 2}\n",
            "parallel.tensor = 2: has no effect with program.launch: node: remove it, or pass",
        ),
        (
            "{command: torchrun t.py}",
            TWO + "morph: {enabled: true}\n",
            "morph.mode = pipeline: must be 'world' with program.launch: node",
        ),
        (
            "{command: torchrun t.py}",
            TWO + "profile: {nsys: true, ranks: [0]}\n",
            "profile.ranks = [0]: is for single ranks",
        ),
        ("{module: train.py}", TWO, "program.module = train.py: must be a module's name"),
        ("{module: pkg/train}", TWO, "program.module = pkg/train: must be a module's name"),
        ("{command: }", TWO, "must not be empty: it names the program to run"),
        ("{command: ['']}", TWO, "must not be empty: it names the program to run"),
        ("{script: t.py, args: ['${node.rank}']}", TWO, ""),
        ("{script: t.py}", TWO + "env: {A: '${node.rank}'}\n", ""),
        ("{command: 'torchrun --tp ${parallel.tensor}'}", TWO + "parallel: {tensor: 2}\n", ""),
    ],
)
def test_what_a_launch_cannot_do_is_refused(program: str, rest: str, message: str) -> None:
    conf, lines = read(program, rest)
    problems = [str(one) for one in check_conf(conf, lines, base=BASE, require_paths=False)]
    assert len(problems) == bool(message)
    assert all(message in problem for problem in problems)


def test_slurms_variables_alone_need_slurm() -> None:
    conf, _ = read("{script: t.py, launch: srun}")
    with pytest.raises(InputError, match="launch srun: this run does not go through Slurm"):
        make_plan(conf, scheduler="local")


def test_a_launcher_is_one_process_a_node_and_knows_the_ranks_of_its_node() -> None:
    words = "torchrun --nnodes ${node.count} --node_rank=${node.rank} --nproc ${node.ranks}"
    words += " --d ${master.address}:${master.port} %{rank} ${run.name}.pt"
    conf, lines = read(f"{{command: '{words}'}}")
    plan = make_plan(conf, written=lines)
    assert (plan.world, plan.num_nodes, plan.pipeline, plan.data) == (2, 2, 1, 2)
    assert [(group.ranks, group.inner_ranks) for group in plan.groups] == [(1, 4)]
    site = make_site(plan, 1)
    assert fill_in(plan.command, site, 1) == (
        *("torchrun", "--nnodes", "2", "--node_rank=1", "--nproc", "4"),
        *("--d", f"{site.master.address}:{site.master.port}", "%{rank}", f"{plan.run}.pt"),
    )


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1)
)
def test_any_words_reach_the_program_as_they_are(words: list[str]) -> None:
    conf, _ = read("{command: x}")
    escaped = tuple(word.replace("${", "$${") for word in words)
    program = replace(conf.program, command=("x", *escaped), args=escaped)
    plan = make_plan(replace(conf, program=program))
    assert fill_in(plan.command, make_site(plan, 0), 0) == ("x", *words, *words)


@pytest.mark.parametrize(
    ("text", "better"),
    [
        ("train.py", ""),
        ("my train.py'", ""),
        ("python train.py --lr 1", '{script: train.py, args: "--lr 1"}'),
        ("python -u -m pkg.train --lr x", '{module: pkg.train, args: "--lr x"}'),
        ("python -u", '{command: "python -u"}'),
        ("train.py --lr x", '{script: train.py, args: "--lr x"}'),
        ("accelerate launch train.py", '{command: "accelerate launch train.py"}'),
    ],
)
def test_a_command_where_a_script_should_be_is_answered_with_how_to_write_it(
    text: str, better: str
) -> None:
    assert suggest_program(text).removeprefix("; write program: ") == better


@pytest.mark.parametrize(
    ("first", "mode", "python", "found"),
    [
        ("#!/usr/bin/env python3", 0o755, None, ProgramFiles()),
        ("#!/usr/bin/python", 0o755, "/x/python", ProgramFiles()),
        ("import torch", 0o755, None, ProgramFiles()),
        ("#!/bin/bash", 0o755, None, ProgramFiles(interpreter="bash")),
        ("#!/usr/bin/env -S uv run --script", 0o755, None, ProgramFiles(interpreter="uv")),
        (
            "#!/bin/sh\ntorchrun t.py",
            0o755,
            None,
            ProgramFiles(interpreter="sh", launcher="torchrun in line 2 of x"),
        ),
        ("#!/bin/bash", 0o644, None, "is not executable: chmod"),
        ("#!/bin/bash", 0o755, "/x/python", ProgramFiles(interpreter="bash")),
    ],
)
def test_a_script_of_another_language_runs_by_its_first_line(
    first: str, mode: int, python: str | None, found: ProgramFiles | str, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    path.write_text(first + "\n")
    os.chmod(path, mode)
    conf, _ = read("{script: t.py}")
    conf = replace(conf, program=replace(conf.program, path=str(path), python=python))
    if isinstance(found, str):
        with pytest.raises(InputError, match=found):
            read_first_line(conf)
    else:
        assert read_first_line(conf) == found
        command = make_plan(conf, found=found).command
        assert (command[0] == str(path)) == bool(found.interpreter)
