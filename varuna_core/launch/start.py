"""Start of a run: check arguments, make its folder, probe machines, play an attempt."""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from varuna_core.agent.bundle import write_bundle
from varuna_core.agent.closing import close_attempt
from varuna_core.agent.meeting.network import is_own_address
from varuna_core.agent.processes.signals import Signals
from varuna_core.launch.console import Console
from varuna_core.launch.envfile import parse_env_file
from varuna_core.launch.errors import InputError, LaunchError, NotReadyError
from varuna_core.launch.machines import Machine, name_machines, parse_machine_list
from varuna_core.launch.plan import (
    MachineLayout,
    RankProgram,
    build_plan,
    choose_shape,
    lay_out,
    name_run,
)
from varuna_core.launch.process import Child, local_environment, wait_all
from varuna_core.launch.session import LaunchedNode, Session
from varuna_core.launch.ssh import (
    PROBE_S,
    ProbeRequest,
    build_ssh_command,
    find_twins,
    read_probe,
    render_probe,
)
from varuna_core.launch.state import Launch, is_over, write_launch
from varuna_core.records.exits import read_outcome
from varuna_core.records.files import is_listed, read_json, write_atomic
from varuna_core.records.plan import read_plan, write_plan
from varuna_core.records.requests import write_stop
from varuna_core.records.runfolder import AttemptFolder, RunFolder, make_run_folder

KILL_MARGIN_S = 60.0
POLL_S = 0.2
PLANNER = (
    "--nstages and --chunk_size are both needed; with --profile, a file that "
    "varuna_core.Profiler or `vjob profile` wrote of the model, what is left out is planned"
)


KEEPS = (
    "a launched script keeps its machines to the end; what `vjob submit` runs may morph: "
    "cluster.machine_list in a conf"
)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The command line, checked as far as one word goes; saved in launch.json."""

    machine_list: str
    gpus_per_node: int
    nstages: int | None
    chunk_size: int | None
    batch_size: int | None
    manager_ip: str | None
    no_morphing: bool
    code_dir: str
    env_file: str | None
    python: str
    ssh_config: str | None
    cpu: bool
    command: list[str]
    """The training script and its arguments."""
    profile: str | None = None


def start_run(arguments: Arguments, folder: Path) -> int:
    """A new run in a folder of its own below `folder`; its exit code."""
    ready = _prepare(arguments)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        run = make_run_folder(folder / f"{name_run(ready.program.script)}-{stamp}")
    except OSError as error:
        raise LaunchError(f"{folder}: no run folder can be made: {error.strerror}") from None
    try:
        return _launch(run, 0, ready, arguments)
    finally:
        if not run.attempts():  # it never came to a start: nothing in there tells anything
            shutil.rmtree(run.path, ignore_errors=True)


def resume_run(run: RunFolder, launch: Launch, given: dict[str, Any]) -> int:
    """Another attempt of a run, with its old arguments below those that are given now."""
    try:
        arguments = Arguments(**{**launch.arguments, **given})
    except TypeError:
        raise InputError(f"{run.launch} is of another version; launch anew") from None
    if not is_over(run, launch):
        if launch.is_alive is not False:
            raise InputError(f"{run.path} still runs on {launch.host}, or may: --kill it first")
        kill_run(run, launch)
    number = max((attempt.number for attempt in run.attempts()), default=-1) + 1
    return _launch(run, number, _prepare(arguments), arguments)


def kill_run(run: RunFolder, launch: Launch) -> int:
    """End the last attempt on all its machines, from wherever the run folder is seen."""
    attempt, plan = run.attempt(launch.attempt), read_plan(run.plan)
    if is_over(run, launch):
        raise InputError(f"{run.path} is over already")
    if plan is None or not attempt.path.is_dir():
        raise InputError(f"{run.path} has not started any rank yet; try again in a moment")
    write_stop(attempt, "cancel", 143, f"--kill by {getpass.getuser()} on {platform.node()}")
    limit_s = plan.timing.grace_s + KILL_MARGIN_S
    print(f"launch: ending {run.path}, up to {limit_s:g} s", file=sys.stderr, flush=True)
    deadline = time.monotonic() + limit_s
    while read_outcome(attempt) is None:
        if time.monotonic() > deadline:
            raise LaunchError(f"{run.path} has not ended yet; its launcher is on {launch.host}")
        if launch.is_alive is False and not _is_any_at_work(attempt, plan.num_nodes):
            close_attempt(run, plan, attempt.number, None, 143)
        time.sleep(POLL_S)
    print(f"launch: {run.path} has ended", file=sys.stderr)
    return 0


def _is_any_at_work(attempt: AttemptFolder, num_nodes: int) -> bool:
    """True if an agent beat and has not said that it is done."""
    paths = [attempt.beat(index) for index in range(num_nodes)]
    beats = [read_json(path) for path in paths if is_listed(path)]
    return any(isinstance(beat, dict) and beat.get("state") != "done" for beat in beats)


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """Arguments that fit together."""

    machines: tuple[Machine, ...]
    layout: MachineLayout
    program: RankProgram
    planned: str
    """What was chosen for the user, if anything."""


def _prepare(arguments: Arguments) -> _Ready:
    """All that can be refused without a look at any machine."""
    if not arguments.command:
        raise InputError("which training script? It comes last, its own arguments after it")
    if arguments.batch_size is None:
        raise InputError("--batch_size is needed: the samples of a step, over all replicas")
    if arguments.manager_ip is not None and not is_own_address(arguments.manager_ip):
        raise InputError(f"--manager_ip {arguments.manager_ip} is no address of this machine")
    machines = parse_machine_list(_read(arguments.machine_list, "--machine_list"), "--machine_list")
    stages, chunk_size, planned = _choose(arguments, len(machines), arguments.batch_size)
    layout = lay_out(
        machines=len(machines),
        gpus_per_node=arguments.gpus_per_node,
        stages=stages,
        batch_size=arguments.batch_size,
        chunk_size=chunk_size,
    )
    env = {}
    if arguments.env_file is not None:
        name = os.path.basename(arguments.env_file)
        env = parse_env_file(_read(arguments.env_file, "--env_file"), name)
    script, *args = arguments.command
    if "\0" in "".join(arguments.command):
        raise InputError("an argument of the training script holds a NUL character")
    program = RankProgram(
        python=arguments.python,
        code_dir=arguments.code_dir,
        script=script,
        args=args,
        env=env,
        is_on_gpus=not arguments.cpu,
    )
    used = machines[: layout.machines]
    return _Ready(machines=used, layout=layout, program=program, planned=planned)


def _choose(arguments: Arguments, machines: int, batch_size: int) -> tuple[int, int, str]:
    """Stages, samples of a micro-batch, and how they were found."""
    stages, chunk_size = arguments.nstages, arguments.chunk_size
    if stages is not None and chunk_size is not None:
        return stages, chunk_size, ""
    if arguments.profile is None:
        raise InputError(PLANNER)
    if chunk_size is not None:
        raise InputError("--chunk_size is given and --nstages is not: give both, or leave both out")
    try:
        return choose_shape(
            arguments.profile,
            gpus=machines * arguments.gpus_per_node,
            gpus_per_node=arguments.gpus_per_node,
            batch_size=batch_size,
            stages=stages,
        )
    except ImportError as error:
        raise InputError(f"--profile: planning needs {error.name}, which is not here") from None


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{flag} {path}: this is not text in UTF-8") from None


def _launch(run: RunFolder, number: int, ready: _Ready, arguments: Arguments) -> int:
    """Play one attempt in the run folder."""
    signals, console = Signals(), Console()
    console.keep(run.scheduler_log())
    for line in [*filter(None, [ready.planned]), *ready.layout.describe()]:
        console.say(line)
    if not arguments.no_morphing:
        console.say(KEEPS)
    nodes = _make_nodes(ready, arguments)
    token = uuid.uuid4().hex
    asked = ProbeRequest(
        folder=run.path,
        token=token,
        python=ready.program.python,
        code_dir=ready.program.code_dir,
        script=ready.program.script,
        user=os.getuid(),
    )
    write_atomic(run.path / token, token)
    try:
        said = _probe(nodes, asked, signals)
    finally:
        for path in run.path.glob(f"{token}*"):
            path.unlink(missing_ok=True)
    if signals.ending is not None:
        console.say(f"{signals.ending}: nothing was started")
        return 128 + signal.Signals[signals.ending]
    nodes = [replace(node, python=found["agent"]) for node, found in zip(nodes, said, strict=True)]
    twins = find_twins([node.name for node in nodes], [found["machine"] for found in said])
    for first, second in twins:
        shared = "" if arguments.cpu else ": their ranks share its GPUs"
        console.say(f"warning: {first} and {second} are one machine{shared}")
    plan = build_plan(run.name, ready.layout, ready.program)
    write_plan(run.plan, plan)
    write_bundle(run.agent)
    write_launch(run, number, vars(arguments).copy())
    console.say(f"attempt {number} of {run.path}")
    is_one_machine = len(twins) == len(nodes) - 1
    session = Session(run, plan, run.attempt(number), nodes, signals, console)
    code = session.play(_find_address(nodes[0].machine, is_one_machine, arguments.manager_ip))
    if code != 0:
        console.say(f"all files: {run.path}")
    return code


def _make_nodes(ready: _Ready, arguments: Arguments) -> list[LaunchedNode]:
    names = name_machines(ready.machines, platform.node())
    return [
        LaunchedNode(
            index=index,
            machine=machine,
            name=names[index],
            python=arguments.python,
            ssh_config=arguments.ssh_config,
        )
        for index, machine in enumerate(ready.machines)
    ]


def _probe(
    nodes: Sequence[LaunchedNode], asked: ProbeRequest, signals: Signals
) -> list[dict[str, str]]:
    """Probe all machines; every problem of every machine at once, a line each."""
    children = []
    for node in nodes:
        script = render_probe(asked, f"{asked.token}.{node.index}")
        if node.machine.is_local:
            children.append(Child(["/bin/sh", "-s"], script, local_environment(os.environ)))
        else:
            children.append(Child(build_ssh_command(node.machine, node.ssh_config), script))
    wait_all(children, signals, PROBE_S)
    found, problems = [], []
    for node, child in zip(nodes, children, strict=True):
        said, problem = read_probe(asked, node.machine, child.code, child.out, child.err)
        if problem is not None:
            problems.append(f"{node.machine}: {problem}")
        found.append(said)
        child.close()
    if problems and signals.ending is None:
        raise NotReadyError("\n".join(problems))
    return found


def _find_address(first: Machine, is_one_machine: bool, manager_ip: str | None) -> str | None:
    """Address of rank 0; None leaves it to the agent there."""
    if is_one_machine:
        return "127.0.0.1"
    return manager_ip if first.is_local else first.host
