"""The plan: who runs what. Made by `jobs`, read by the node agent and the runtime.

Written as plan.json (0600: environment values may be secret). It holds groups, not nodes: a node
is an index into them, so that a plan for ten thousand nodes stays small.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from varuna_core.facts.not_covered import NotCovered, read_not_covered
from varuna_core.records.files import expect_types, is_closed, is_listed, read_json, write_json
from varuna_core.records.runfolder import RunFolder, shared_copy
from varuna_core.records.training import TrainingFacts, derive_facts, read_training

PLAN_FORMAT = 1


ENTER = "VJOB_ENTER"
"""The one variable that a container runtime passes in: the agent's code that sets all others."""
UNDER_SLURM = ("slurm", "allocation")
"""Schedulers whose agents a real srun starts; batch scripts of others call a stand-in of it."""


@dataclass(frozen=True)
class GroupPlan:
    """Nodes of one kind. The first group holds node 0, rank 0 and the master's address.

    A conf's NodeGroup says what a user asks for; here nothing is left open.
    """

    name: str
    count: int
    """Number of nodes."""
    queue: str | None
    """Slurm partition."""
    gpu_type: str | None
    gpus: int
    """GPUs asked for on each node; 0 where the nodes have none."""
    devices: tuple[int, ...] | None
    """GPU indices to use, where not simply the first ones."""
    cpus: int | None
    memory_gb: int | None
    """0 asks for all memory of the node, None for the cluster's default."""
    interface: str | None
    """Network interface; None is chosen on the node by the route to the master."""
    ranks: int
    """Ranks on each node."""
    env: dict[str, str]
    """Environment of this group's ranks, above the plan's own."""
    first_node: int
    first_rank: int
    inner_ranks: Optional[int] = None
    """Ranks that the one process of each node starts itself, with launch node."""


@dataclass(frozen=True)
class NodePlan:
    """One node: its place in the world."""

    index: int
    group: GroupPlan
    first_rank: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.group.ranks)


GPUS = "%{gpus}"
"""The word of a `ContainerPlan` in whose place the agent puts the options of `gpu_options`."""


@dataclass(frozen=True)
class ContainerPlan:
    """Commands to run ranks in a container, made by a `Runtime` of `containers`, run by the agent.

    The agent fills in `%{rank}`, `%{node}`, `%{attempt}`, `%{folder}` (the run's), `%{user}`
    (uid:gid), `%{holder}` (the pid of what `hold` started) and `%{num_gpu_options}` in words.
    """

    runtime: str
    image: str
    workdir: str
    """Working directory inside."""
    probe: tuple[str, ...]
    """A command that succeeds where the runtime works."""
    prepare: tuple[tuple[str, ...], ...]
    """Commands run in order, once a node, before the ranks start."""
    start: tuple[str, ...]
    """What stands before each rank's command; empty where the agent itself runs inside."""
    enter_as: str = ENTER
    """Name under which the runtime's process gets the variable that enters as VJOB_ENTER."""
    reads_image: bool = False
    """Whether the image's own variables lie in files of its root, for us to read."""
    wraps: bool = False
    """Whether the runtime's process stays in between, and the rank is another one."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment of the runtime itself (its folders), for every command here."""
    defaults: dict[str, str] = field(default_factory=dict)
    """Variables that enter unless the conf sets them."""
    lease: str | None = None
    """A file on which the agent holds a shared lock while ranks run."""
    clean: tuple[tuple[str, ...], ...] = ()
    """Commands run after the ranks ended, whatever became of them."""
    step: tuple[str, ...] = ()
    """Options of srun where that starts the container."""
    hold: tuple[str, ...] = ()
    """A command that starts the node's one container, which `start` enters; empty where each rank
    has its own."""
    gpu_options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Options for the GPUs of each vendor, by the name of its `Accelerator`."""
    hold_again: str = ""
    """Regular expression of what `hold` says where it is worth another try."""


@dataclass(frozen=True)
class Timing:
    """Deadlines, in seconds."""

    grace_s: float
    """Between TERM and KILL."""
    join_s: float
    """How long a node waits for the master's address and for the other nodes."""
    prepare_s: float
    """How long the container's prepare step may take."""
    beat_s: float
    """Between two signs of life of a node."""
    lost_s: float
    """Silence after which the other nodes of a split run take a node for lost."""
    sample_s: float
    """Between two GPU samples."""


@dataclass(frozen=True)
class MorphPlan:
    """Limits of a run that may morph."""

    min_nodes: int
    max_nodes: int
    requeue: bool
    """Whether the job comes back when it is preempted, out of time or short of nodes."""
    save_s: float
    """What ranks get to save in when they are called to."""
    joined: int = 0
    """Number of nodes at the end of `groups` that were asked for later (records/morphing.py)."""
    warm: bool = False
    """Whether ranks of the next attempt wait on each node while this one trains."""
    finish_s: float = 120.0
    """For the other nodes once the ranks of one have ended by themselves; 0 is no limit."""
    stop_s: float = 120.0
    """For ranks that were asked to end, beyond `grace_s`; then their node counts as lost."""
    return_s: float = 30.0
    """For a manager that was killed to come back, beyond `lost_s`; then nobody owns the run."""
    facts: Optional[TrainingFacts] = None
    """Of a script; a built-in program has training.json."""


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of a step; None, or empty, where that is not known."""

    step_s: Optional[float] = None
    band_s: Tuple[float, ...] = ()
    """Between these two times a step is in nine of ten cases."""
    stage_s: Tuple[float, ...] = ()
    """Work of each stage in a step."""
    bubble_share: Optional[float] = None
    memory_mb: Tuple[float, ...] = ()
    """The most that each stage holds."""
    gpu: Optional[str] = None
    """The kind of GPU that was planned for, where the conf names none."""
    costs: Optional[Dict[str, Tuple[float, ...]]] = None
    """Seconds of a micro-batch's actions, by the names of `schedule.costs.Costs`, one a stage."""
    not_covered: Tuple[NotCovered, ...] = ()
    """The parts of the plan that its profile does not cover."""

    def as_json(self) -> Dict[str, Any]:
        """Only what is known."""
        found = asdict(self)
        found["not_covered"] = tuple(one.as_json() for one in self.not_covered)
        return {name: value for name, value in found.items() if value is not None and value != ()}


@dataclass(frozen=True)
class TrackPlan:
    """Tools that show the run (agent/track); the settings of each, where it is asked for."""

    id: str
    """Of the run, the same in every attempt and in nobody else's run."""
    python: str
    """Interpreter of the ranks: it has the tools' packages."""
    config: Dict[str, Any]
    """The conf by its dotted keys, without secrets."""
    wandb: Optional[Dict[str, Any]] = None
    mlflow: Optional[Dict[str, Any]] = None
    tensorboard: bool = False
    openmetrics: Optional[str] = None
    """The file."""


@dataclass(frozen=True)
class Plan:
    """One run: its layout and all that a node needs to start its share of it."""

    run: str
    """Run id, also the name of the run folder."""
    name: str
    scheduler: str
    """slurm, local, or ssh: who starts the agents."""
    layout: str
    """single (one kind of node), hetjob, or split (a job for each group)."""
    morph: bool
    """Whether the run goes on with fewer or more nodes; a fixed run ends with its first loss."""
    groups: tuple[GroupPlan, ...]
    pipeline: int
    data: int
    tensor: int
    order: str
    """pipeline or data: whose neighbours have neighbouring ranks."""
    partition: str | None
    stage_map: str
    """Varuna's encoding, `0,3;1,4;2,5;`: a field a stage, its replicas in order."""
    command: tuple[str, ...]
    """What every rank runs, inside the container if there is one; `%{rank}`, `%{local_rank}`
    and others are filled in, and `escape_placeholders` makes a word that stays as it is."""
    python: str
    """Interpreter for the agent, if the node sees it; else any python3 from 3.8."""
    workdir: str
    env: dict[str, str]
    """Environment of every rank."""
    containers: tuple[ContainerPlan, ...]
    """A node runs its ranks in the first of these that works there; bare where there are none."""
    remedies: tuple[tuple[str, str], ...]
    """Pattern of a known message, and what to do about it: known_lines.json for an older vjob."""
    must_exist: tuple[str, ...]
    """Paths that preflight looks for on every node."""
    port: int | None
    """Master's port; None picks a free one outside the ephemeral range."""
    timing: Timing
    prefix: Tuple[str, ...] = ()
    """What stands before the command of some ranks, such as a profiler; filled in like it."""
    prefixed: Optional[Tuple[int, ...]] = None
    """Those ranks; None for all."""
    morphing: Optional[MorphPlan] = None
    """Where `morph` is true."""
    planned: Optional[str] = None
    """Where the layout is from, in a sentence."""
    queues: Optional[Dict[str, str]] = None
    """Why each group that left its queue to vjob got the one that it has."""
    prediction: Optional[Prediction] = None
    """Of the layout for all nodes."""
    layouts: Optional[Dict[str, Tuple[int, int, str]]] = None
    """Of a run that may morph: pipeline, data and partition that were planned at submit for other
    nodes than all, by `name_nodes`; replicas of a stage adjoin."""
    layout_steps: Optional[Dict[str, float]] = None
    """Seconds that a step was predicted to take on such nodes, and on all."""
    restarts: Optional[int] = None
    """How often a failed attempt is started anew in the same job: in all, and in a run that may
    morph in a row without a new checkpoint; None is the default of each."""
    restart_same: bool = False
    """Whether an error that came in the same step twice running is no reason to stop."""

    progress: Optional[str] = None
    """The user's own pattern of lines about steps (records/logs/progress.py)."""
    modules: Tuple[Tuple[str, str], ...] = ()
    """Modules that the ranks' Python must find, each with what to do where it does not."""
    machine_list: Optional[str] = None
    """Without a scheduler: the file that names the machines; watched where `morph` is true."""
    ssh_config: Optional[str] = None
    """For `ssh -F`."""
    address: Optional[str] = None
    """Of the first node, as the others reach it; None is found by its name and routes."""
    log_limit_mb: Optional[int] = None
    """Most that a node's .out and .err hold, half of it each; None for no limit."""
    program: Optional[str] = None
    """What ranks run: script, module, command, function, megatron, deepspeed, or a built-in program
    by its name."""
    launch: str = "torchrun"
    """torchrun, srun, python or node: what the processes are told (docs/starts.md)."""
    path: str = "%{path}"
    """PATH of a command; `%{path}` stands for the node's own."""
    track: Optional[TrackPlan] = None
    timeline: bool = False
    """Whether engines that are not ours are watched in the ranks' Python (trace/hook.py)."""
    hang_do: str = "auto"
    """The action of agents when the ranks hang: auto, restart, stop or report."""
    hang_after_s: Optional[float] = None
    """Seconds without a step from which on they do so where nothing but silence is seen; None is
    learned from the run."""
    count_steps: bool = False
    """True if optimizer steps are counted in the ranks' Python (trace/startup/counter.py)."""

    def read_path(self, env: Mapping[str, str]) -> str:
        """PATH of a process, from the node's environment."""
        return self.path.replace("%{path}", env.get("PATH", os.defpath))

    def command_of(self, rank: int) -> Tuple[str, ...]:
        """Command of this rank, its placeholders still to be filled in."""
        if self.prefixed is not None and rank not in self.prefixed:
            return self.command
        return (*self.prefix, *self.command)

    @property
    def world(self) -> int:
        return sum(group.count * group.ranks for group in self.groups)

    @property
    def num_nodes(self) -> int:
        return sum(group.count for group in self.groups)

    def group(self, name: str) -> GroupPlan:
        return next(group for group in self.groups if group.name == name)

    def node(self, index: int) -> NodePlan:
        """The node with this index; indices follow the groups in their order."""
        for group in self.groups:
            if group.first_node <= index < group.first_node + group.count:
                offset = index - group.first_node
                return NodePlan(index, group, group.first_rank + offset * group.ranks)
        raise IndexError(f"node {index} of a plan of {self.num_nodes}")

    def node_of_rank(self, rank: int) -> NodePlan:
        for group in self.groups:
            offset = rank - group.first_rank
            if 0 <= offset < group.count * group.ranks:
                return self.node(group.first_node + offset // group.ranks)
        raise IndexError(f"rank {rank} of a world of {self.world}")


def escape_placeholders(word: str) -> str:
    """A word of a command that reaches the rank as it is, whatever `%{name}` it holds."""
    return word.replace("%{", "%{percent}{")


LAYOUT_KEYS = ("parallel.pipeline", "parallel.data", "parallel.partition")
"""Keys of a conf whose values follow the nodes of a run that may morph."""
NODE_KEYS = ("node.rank", "node.count", "node.ranks", "master.address", "master.port")
"""References in a program's words and environment that each node fills in at its start."""
_MARK = re.compile("\0([a-z.]+)\0")


def mark_layout(key: str) -> str:
    """The mark of such a key in a word of the command or a variable, neither of which holds NUL."""
    return f"\0{key}\0"


def fill_node_keys(word: str) -> str:
    """A word with a placeholder in place of each mark of a key that a node fills in."""
    return re.sub(f"\0({'|'.join(map(re.escape, NODE_KEYS))})\0", r"%{\1}", word)


def compute_node_values(plan: Plan, node: NodePlan, address: str, port: int) -> Dict[str, str]:
    """The values of NODE_KEYS on this node."""
    return {
        "node.rank": str(node.index),
        "node.count": str(plan.num_nodes),
        "node.ranks": str(node.group.inner_ranks or node.group.ranks),
        "master.address": address,
        "master.port": str(port),
    }


def fill_marks(text: str, values: Mapping[str, str]) -> str:
    """The text with these values in place of their marks; other marks stay."""
    return _MARK.sub(lambda match: values.get(match[1], match[0]), text)


def fill_layout(plan: Plan) -> Plan:
    """The plan of an attempt with its layout in place of the marks."""
    values = {
        "parallel.pipeline": str(plan.pipeline),
        "parallel.data": str(plan.data),
        "parallel.partition": plan.partition or "auto",
    }

    def fill_env(env: Dict[str, str]) -> Dict[str, str]:
        return {name: fill_marks(text, values) for name, text in env.items()}

    return replace(
        plan,
        command=tuple(fill_marks(word, values) for word in plan.command),
        env=fill_env(plan.env),
        groups=tuple(replace(group, env=fill_env(group.env)) for group in plan.groups),
    )


def name_nodes(nodes: Sequence[GroupPlan]) -> str:
    """Kinds and ranks of these nodes, in order, as a layout sees them: `a100/4*3,v100/8*1`."""
    alike = [f"{node.gpu_type or ''}/{node.ranks}" for node in nodes]
    return ",".join(f"{name}*{len(list(same))}" for name, same in groupby(alike))


def write_plan(path: Path, plan: Plan) -> None:
    write_json(path, _to_plain(plan))


def render_plan(plan: Plan) -> str:
    """The text of plan.json, for `--dry-run`; marks of the layout as the conf has them."""
    text = json.dumps(_to_plain(plan), indent=1)
    return re.sub(r"\\u0000([a-z.]+)\\u0000", r"${\1}", text)


def _to_plain(plan: Plan) -> Dict[str, Any]:
    prediction = None if plan.prediction is None else plan.prediction.as_json()
    return dict(asdict(plan), prediction=prediction, format=PLAN_FORMAT)


def read_plan(path: Path) -> Plan | None:
    """The plan, or None where the file is missing, torn, or of another format.

    Of another user's run that is shared its copy without secrets.
    """
    value = read_json(path)
    if value is None and is_closed(path):
        value = read_json(shared_copy(path))
    if not isinstance(value, dict) or value.get("format") != PLAN_FORMAT:
        return None
    try:
        return parse_plan(value)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # written by another version: as good as missing


def read_attempt_plan(run: RunFolder, number: int) -> Plan | None:
    """The plan of one attempt: its own where the run may morph, else the run's.

    None where a run that may morph has yet to write it: its state tells of an attempt, and the
    attempt's folder is there, before its plan is.
    """
    attempt = run.attempt(number)
    if is_listed(attempt.plan):
        return read_plan(attempt.plan)
    plan = read_plan(run.plan)
    return None if plan is not None and plan.morph else plan


NOT_READ = ("traces",)
"""Keys of earlier plans that nothing reads any more."""


def parse_plan(value: dict[str, Any]) -> Plan:
    """A plan from the dict of its JSON."""
    rest = {key: item for key, item in value.items() if key not in ("format", *NOT_READ)}
    if rest.get("morphing"):
        rest["morphing"] = dict(rest["morphing"])
        for name in ("machine_list", "ssh_config"):  # they stood there once
            rest.setdefault(name, rest["morphing"].pop(name, None))
    made = Plan(
        **{
            **rest,
            "groups": tuple(parse_group(group) for group in rest["groups"]),
            "command": tuple(rest["command"]),
            "containers": tuple(_parse_container(item) for item in rest["containers"]),
            "remedies": tuple((pattern, remedy) for pattern, remedy in rest["remedies"]),
            "must_exist": tuple(rest["must_exist"]),
            "modules": tuple((name, remedy) for name, remedy in rest.get("modules", ())),
            "timing": expect_types(Timing(**rest["timing"])),
            "prefix": tuple(rest.get("prefix", ())),
            "morphing": _parse_morphing(rest["morphing"]) if rest.get("morphing") else None,
            "prefixed": None if rest.get("prefixed") is None else tuple(rest["prefixed"]),
            "prediction": parse_prediction(rest.get("prediction")),
            "track": expect_types(TrackPlan(**rest["track"])) if rest.get("track") else None,
        }
    )
    return expect_types(made)


def _parse_morphing(value: dict[str, Any]) -> MorphPlan:
    facts = value.get("facts")
    made = None if facts is None else expect_types(TrainingFacts(**facts))
    known = {key: item for key, item in value.items() if key != "memory"}  # of earlier plans
    return expect_types(MorphPlan(**{**known, "facts": made}))


def read_facts(run: RunFolder, plan: Plan) -> TrainingFacts:
    """The facts of a run that may morph; ValueError where it has none."""
    given = plan.morphing.facts if plan.morphing is not None else None
    return given or derive_facts(read_training(run.training))


def parse_prediction(value: Any) -> Prediction | None:
    """None where nothing is predicted; a part that makes no sense counts as missing."""
    if not isinstance(value, dict):
        return None
    gpu = value.get("gpu")
    found = Prediction(
        step_s=_parse_number(value.get("step_s")),
        band_s=_parse_numbers(value.get("band_s")),
        stage_s=_parse_numbers(value.get("stage_s")),
        bubble_share=_parse_number(value.get("bubble_share")),
        memory_mb=_parse_numbers(value.get("memory_mb")),
        gpu=gpu if isinstance(gpu, str) else None,
        costs=_parse_costs(value.get("costs")),
        not_covered=_parse_not_covered(value.get("not_covered")),
    )
    return None if found == Prediction() else found


def _parse_not_covered(value: Any) -> Tuple[NotCovered, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(one for one in map(read_not_covered, value) if one is not None)


def _parse_costs(value: Any) -> Dict[str, Tuple[float, ...]] | None:
    if not isinstance(value, dict):
        return None
    return {str(name): _parse_numbers(numbers) for name, numbers in value.items()} or None


def _parse_number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e15 else None


def _parse_numbers(value: Any) -> tuple[float, ...]:
    numbers = [_parse_number(item) for item in value] if isinstance(value, list) else [None]
    return () if None in numbers else tuple(number or 0.0 for number in numbers)


def parse_group(value: dict[str, Any]) -> GroupPlan:
    devices = value["devices"]
    made = GroupPlan(**{**value, "devices": None if devices is None else tuple(devices)})
    return expect_types(made)


def _parse_container(value: dict[str, Any]) -> ContainerPlan:
    commands = {key: tuple(tuple(argv) for argv in value[key]) for key in ("prepare", "clean")}
    words = {key: tuple(value.get(key, ())) for key in ("probe", "start", "step", "hold")}
    options = {name: tuple(found) for name, found in value.get("gpu_options", {}).items()}
    made = ContainerPlan(**{**value, **commands, **words, "gpu_options": options})
    return expect_types(made)
