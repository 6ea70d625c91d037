"""The plan: which node runs what. `jobs` makes it; the node agent and the runtime read it.

It is written as plan.json (mode 0600, because environment values may be secret). It stores groups,
not nodes: a node is an index into the groups, so a plan for ten thousand nodes stays small.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from varuna_core.facts.not_covered import Lack, NotCovered, read_not_covered
from varuna_core.records.files import expect_types, is_closed, is_listed, read_json, write_json
from varuna_core.records.rank_map import locate_ranks
from varuna_core.records.runfolder import RunFolder, shared_copy
from varuna_core.records.training import VARIABLES, TrainingFacts, derive_facts, read_training

PLAN_FORMAT = 1


ENTER = "VJOB_ENTER"
"""The only variable that is passed into a container; its value is the agent's code that sets all
others."""
UNDER_SLURM = ("slurm", "allocation")
"""Schedulers whose agents are started by srun; batch scripts of the others call a stand-in for
srun."""


@dataclass(frozen=True)
class GroupPlan:
    """A group of nodes of one kind. The first group has node 0, rank 0 and the master's address.

    A conf's NodeGroup is what a user asks for; in a GroupPlan all values are resolved.
    """

    name: str
    count: int
    """Number of nodes."""
    queue: str | None
    """Slurm partition."""
    gpu_type: str | None
    gpus: int
    """GPUs requested on each node; 0 if the nodes have none."""
    devices: tuple[int, ...] | None
    """Indices of the GPUs to use, if they are not the first ones."""
    cpus: int | None
    memory_gb: int | None
    """Memory to request: 0 for all memory of the node, None for the cluster's default."""
    interface: str | None
    """Network interface; None to choose it on the node by the route to the master."""
    ranks: int
    """Ranks on each node."""
    env: dict[str, str]
    """Environment of this group's ranks; it overrides the plan's own."""
    first_node: int
    first_rank: int
    inner_ranks: Optional[int] = None
    """Number of ranks that the single process of each node starts itself, if `launch` is node."""


@dataclass(frozen=True)
class NodePlan:
    """One node and its position in the world."""

    index: int
    group: GroupPlan
    first_rank: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.group.ranks)


GPUS = "%{gpus}"
"""Placeholder in a `ContainerPlan` that the agent replaces with the options of `gpu_options`."""


@dataclass(frozen=True)
class ContainerPlan:
    """Commands that run ranks in a container. A `Runtime` of `containers` makes them; the agent
    runs them.

    The agent fills in `%{rank}`, `%{node}`, `%{attempt}`, `%{folder}` (the run's), `%{user}`
    (uid:gid), `%{holder}` (the pid of what `hold` started) and `%{num_gpu_options}` in words.
    """

    runtime: str
    image: str
    workdir: str
    """Working directory inside the container."""
    probe: tuple[str, ...]
    """A command that succeeds if the runtime works."""
    prepare: tuple[tuple[str, ...], ...]
    """Commands that run in order, once for each node, before the ranks start."""
    start: tuple[str, ...]
    """Prefix of each rank's command; empty if the agent itself runs inside the container."""
    enter_as: str = ENTER
    """Name of the variable in the runtime's process that enters the container as VJOB_ENTER."""
    reads_image: bool = False
    """True if the image's own variables are in files of its root that vjob has to read."""
    wraps: bool = False
    """True if the runtime's process stays alive and the rank is another process."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment of the runtime itself (its folders), for every command of this plan."""
    defaults: dict[str, str] = field(default_factory=dict)
    """Variables that are passed in unless the conf sets them."""
    lease: str | None = None
    """A file on which the agent holds a shared lock while ranks run."""
    clean: tuple[tuple[str, ...], ...] = ()
    """Commands that run after the ranks have ended, however they ended."""
    step: tuple[str, ...] = ()
    """Options of srun if srun starts the container."""
    hold: tuple[str, ...] = ()
    """A command that starts a single container for the node, which `start` enters; empty if each
    rank has its own container."""
    gpu_options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Options for the GPUs of each vendor, by the name of its `Accelerator`."""
    hold_again: str = ""
    """Regular expression for output of `hold` after which it is worth retrying."""


@dataclass(frozen=True)
class Timing:
    """Deadlines, in seconds."""

    grace_s: float
    """Seconds between TERM and KILL."""
    join_s: float
    """Maximum time for which a node waits for the master's address and for the other nodes."""
    prepare_s: float
    """Maximum time of the container's prepare step."""
    beat_s: float
    """Seconds between two heartbeats of a node."""
    lost_s: float
    """Silence after which the other nodes of a split run consider a node lost."""
    sample_s: float
    """Seconds between two GPU samples."""


@dataclass(frozen=True)
class MorphPlan:
    """Limits of a run that may change its layout (morph)."""

    min_nodes: int
    max_nodes: int
    requeue: bool
    """True if the job is requeued when it is preempted, out of time or short of nodes."""
    save_s: float
    """Time that ranks have to save a checkpoint when they are asked to."""
    joined: int = 0
    """Number of nodes at the end of `groups` that were requested later (records/morphing.py)."""
    warm: bool = False
    """True if ranks of the next attempt wait on each node while this attempt trains."""
    finish_s: float = 120.0
    """Time for the other nodes to end once the ranks of one node have ended by themselves; 0 for no
    limit."""
    stop_s: float = 120.0
    """Time, beyond `grace_s`, for ranks that were asked to end; after it their node counts as
    lost."""
    return_s: float = 30.0
    """Time, beyond `lost_s`, for a killed manager to come back; after it nobody owns the run."""
    facts: Optional[TrainingFacts] = None
    """Facts about a script's training; a built-in program has training.json."""


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of a step; None, or empty, where that is not known."""

    step_s: Optional[float] = None
    band_s: Tuple[float, ...] = ()
    """Bounds between which a step takes in nine of ten cases."""
    stage_s: Tuple[float, ...] = ()
    """Work of each stage in a step."""
    bubble_share: Optional[float] = None
    memory_mb: Tuple[float, ...] = ()
    """The highest memory use of each stage."""
    gpu: Optional[str] = None
    """The kind of GPU that was planned for, if the conf names none."""
    costs: Optional[Dict[str, Tuple[float, ...]]] = None
    """Seconds of the actions of a micro-batch, one value for each stage, by the names of
    `schedule.costs.Costs`."""
    not_covered: Tuple[NotCovered, ...] = ()
    """The parts of the plan that its profile does not cover."""

    def covers(self, num_stages: int) -> bool:
        """Return True if the work of this many stages was predicted by a measured profile."""
        is_estimate = any(one.lack is Lack.ESTIMATE for one in self.not_covered)
        return len(self.stage_s) == num_stages and not is_estimate

    def as_json(self) -> Dict[str, Any]:
        """Return the prediction for plan.json, without values that are not known."""
        found = asdict(self)
        found["not_covered"] = tuple(one.as_json() for one in self.not_covered)
        return {name: value for name, value in found.items() if value is not None and value != ()}


@dataclass(frozen=True)
class TrackPlan:
    """Experiment trackers (agent/track): the settings of each that was requested."""

    id: str
    """Id of the run, the same in every attempt and unique among all runs."""
    python: str
    """Interpreter of the ranks, in which the trackers' packages are installed."""
    config: Dict[str, Any]
    """The conf by its dotted keys, without secrets."""
    wandb: Optional[Dict[str, Any]] = None
    mlflow: Optional[Dict[str, Any]] = None
    tensorboard: bool = False
    openmetrics: Optional[str] = None
    """Path of the OpenMetrics file."""


@dataclass(frozen=True)
class Plan:
    """One run: its layout and all that a node needs to start its part."""

    run: str
    """Run id, which is also the name of the run folder."""
    name: str
    scheduler: str
    """The scheduler that starts the agents, such as slurm, local or ssh."""
    layout: str
    """single (one kind of node), hetjob, or split (a job for each group)."""
    morph: bool
    """True if the run continues with fewer or more nodes; otherwise it ends with the first lost
    node."""
    groups: tuple[GroupPlan, ...]
    pipeline: int
    data: int
    tensor: int
    order: str
    """Order of ranks: with `pipeline` the ranks of a replica are adjacent, with `data` those of a
    stage."""
    partition: str | None
    """Layers of each stage, from conf or planner; None if the runtime balances the stages."""
    stage_map: str
    """Stage map in Varuna's encoding, `0,3;1,4;2,5;`: a field for each stage with its replicas in
    order."""
    command: tuple[str, ...]
    """Command of every rank, which runs inside the container if there is one. `%{rank}`,
    `%{local_rank}` and others are replaced; `escape_placeholders` protects a word that must stay
    unchanged."""
    python: str
    """Interpreter of the agent, if it exists on the node; otherwise any python3 from 3.8."""
    workdir: str
    env: dict[str, str]
    """Environment of every rank."""
    containers: tuple[ContainerPlan, ...]
    """Containers in order of preference: a node uses the first that works there; without any, ranks
    run without a container."""
    must_exist: tuple[str, ...]
    """Paths that preflight checks on every node."""
    port: int | None
    """Master's port; None picks a free one outside the ephemeral range."""
    timing: Timing
    prefix: Tuple[str, ...] = ()
    """Words before the command of some ranks, such as a profiler; placeholders in them are
    replaced, too."""
    prefixed: Optional[Tuple[int, ...]] = None
    """The ranks that get `prefix`; None for all."""
    morphing: Optional[MorphPlan] = None
    """Limits of the morphs; set if `morph` is true."""
    planned: Optional[str] = None
    """A sentence that says how the layout was chosen."""
    queues: Optional[Dict[str, str]] = None
    """Why each group that left the choice of its queue to vjob got its queue."""
    prediction: Optional[Prediction] = None
    """Prediction for the layout of all nodes."""
    layouts: Optional[Dict[str, Tuple[int, int, str]]] = None
    """For a run that may morph: pipeline, data and partition that were planned at submit for
    subsets of the nodes, keyed by `name_nodes`; replicas of a stage are adjacent."""
    layout_steps: Optional[Dict[str, float]] = None
    """Predicted seconds of a step for each of these subsets, and for all nodes."""
    restarts: Optional[int] = None
    """Limit on restarts of failed attempts in the same job: the total or, for a run that may morph,
    the number in a row without a new checkpoint; None for the default of each."""
    restart_same: bool = False
    """True if a restart is allowed even after the same error in the same step twice in a row."""

    progress: Optional[str] = None
    """The user's own pattern of lines about steps (records/logs/progress.py)."""
    modules: Tuple[Tuple[str, str], ...] = ()
    """Modules that the ranks' Python must find, each with the remedy if it does not."""
    machine_list: Optional[str] = None
    """Without a scheduler: the file that lists the machines; it is watched for changes if `morph`
    is true."""
    ssh_config: Optional[str] = None
    """Configuration file for `ssh -F`."""
    address: Optional[str] = None
    """Address of the first node as the others reach it; None to find it by its name and routes."""
    log_limit_mb: Optional[int] = None
    """Size limit of a node's .out and .err, half of it for each; None for no limit."""
    program: Optional[str] = None
    """The program of the ranks: script, module, command, function, megatron, deepspeed, or the name
    of a built-in program."""
    launch: str = "torchrun"
    """Launcher whose variables and arguments the processes get: torchrun, srun, python or node
    (docs/starts.md)."""
    path: str = "%{path}"
    """PATH of a command; `%{path}` stands for the node's own."""
    track: Optional[TrackPlan] = None
    timeline: bool = False
    """True if foreign engines are traced in the ranks' Python (trace/hook.py)."""
    hang_do: str = "auto"
    """The action of agents when the ranks hang: auto, restart, stop or report."""
    hang_after_s: Optional[float] = None
    """Seconds without a step after which agents act on a hang that only shows as silence; None to
    learn the time from the run."""
    count_steps: bool = False
    """True if optimizer steps are counted in the ranks' Python (trace/startup/counter.py)."""

    def read_path(self, env: Mapping[str, str]) -> str:
        """Return the PATH of a process, given the node's environment."""
        return self.path.replace("%{path}", env.get("PATH", os.defpath))

    def command_of(self, rank: int) -> Tuple[str, ...]:
        """Return the command of a rank, before its placeholders are replaced."""
        if self.prefixed is not None and rank not in self.prefixed:
            return self.command
        return (*self.prefix, *self.command)

    def place_variables(self, rank: int) -> Dict[str, str]:
        """Return the variables that tell a rank the layout and its place in it."""
        found = {
            "VJOB_STAGE_MAP": self.stage_map,
            "VJOB_PIPELINE": str(self.pipeline),
            "VJOB_DATA": str(self.data),
            "VJOB_TENSOR": str(self.tensor),
        }
        if self.partition is not None:
            found["VJOB_PARTITION"] = self.partition
            if self.prediction is not None and self.prediction.costs is not None:
                found["VJOB_COSTS"] = json.dumps(self.prediction.costs, separators=(",", ":"))
        place = locate_ranks(self.stage_map, self.tensor).get(rank)
        if place is not None:
            # The schedule is the program's: of several stages this names the first.
            found["VJOB_STAGE"], found["VJOB_REPLICA"] = str(place.place), str(place.replica)
            found["VJOB_TENSOR_RANK"] = str(rank % self.tensor)
        return found

    @property
    def world(self) -> int:
        return sum(group.count * group.ranks for group in self.groups)

    @property
    def num_nodes(self) -> int:
        return sum(group.count for group in self.groups)

    def group(self, name: str) -> GroupPlan:
        return next(group for group in self.groups if group.name == name)

    def node(self, index: int) -> NodePlan:
        """Return the node with this index; indices follow the order of the groups."""
        for group in self.groups:
            if group.first_node <= index < group.first_node + group.count:
                offset = index - group.first_node
                return NodePlan(index, group, group.first_rank + offset * group.ranks)
        raise IndexError(f"there is no node {index} in a plan of {self.num_nodes} nodes")

    def node_of_rank(self, rank: int) -> NodePlan:
        for group in self.groups:
            offset = rank - group.first_rank
            if 0 <= offset < group.count * group.ranks:
                return self.node(group.first_node + offset // group.ranks)
        raise IndexError(f"there is no rank {rank} in a world of {self.world} ranks")


def escape_placeholders(word: str) -> str:
    """Escape a word so that it reaches the rank unchanged, even if it contains `%{name}`."""
    return word.replace("%{", "%{percent}{")


LAYOUT_KEYS = ("parallel.pipeline", "parallel.data", "parallel.partition")
"""Keys of a conf whose values depend on the current nodes of a run that may morph."""
NODE_KEYS = (
    *("node.rank", "node.count", "node.ranks", "master.address", "master.port"),
    "run.name",
)
"""References in a program's words and environment that each node resolves at its start."""
_MARK = re.compile("\0([a-z.]+)\0")


def mark_layout(key: str) -> str:
    """Return the mark that stands for a key in a word of the command or a variable; neither may
    contain NUL."""
    return f"\0{key}\0"


def fill_node_keys(word: str) -> str:
    """Replace each mark of a key that a node resolves with a placeholder."""
    return re.sub(f"\0({'|'.join(map(re.escape, NODE_KEYS))})\0", r"%{\1}", word)


def compute_node_values(plan: Plan, node: NodePlan, address: str, port: int) -> Dict[str, str]:
    """Return the values of NODE_KEYS on this node."""
    return {
        "node.rank": str(node.index),
        "node.count": str(plan.num_nodes),
        "node.ranks": str(node.group.inner_ranks or node.group.ranks),
        "master.address": address,
        "master.port": str(port),
        "run.name": plan.run,
    }


def fill_marks(text: str, values: Mapping[str, str]) -> str:
    """Replace the marks of these keys with their values; other marks stay."""
    return _MARK.sub(lambda match: values.get(match[1], match[0]), text)


def fill_layout(plan: Plan) -> Plan:
    """Return the plan of an attempt with its layout in place of the marks."""
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
    """Return the kinds and ranks of these nodes in order, as a layout depends on them:
    `a100/4*3,v100/8*1`."""
    alike = [f"{node.gpu_type or ''}/{node.ranks}" for node in nodes]
    return ",".join(f"{name}*{len(list(same))}" for name, same in groupby(alike))


def write_plan(path: Path, plan: Plan) -> None:
    write_json(path, _to_plain(plan))


def render_plan(plan: Plan) -> str:
    """Render the text of plan.json for `--dry-run`, with layout marks spelled as in the conf."""
    text = json.dumps(_to_plain(plan), indent=1)
    return re.sub(r"\\u0000([a-z.]+)\\u0000", r"${\1}", text)


def _to_plain(plan: Plan) -> Dict[str, Any]:
    prediction = None if plan.prediction is None else plan.prediction.as_json()
    return dict(asdict(plan), prediction=prediction, format=PLAN_FORMAT)


def read_plan(path: Path) -> Plan | None:
    """Read a plan; None if the file is missing, torn, or of another format.

    For a shared run of another user, read the copy without secrets.
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


def find_store(run: RunFolder, plan: Plan) -> Path | None:
    """Return the checkpoint folder of the built-in program, or that of the script's variable."""
    folder: str | None = plan.env.get(VARIABLES["train.checkpoint.folder"])
    with contextlib.suppress(ValueError):
        folder = read_training(run.training).checkpoint_folder
    return None if not folder else run.path / folder


def read_attempt_plan(run: RunFolder, number: int) -> Plan | None:
    """Read the plan of one attempt: its own if the run may morph, or else the run's.

    Return None if a run that may morph has not written the plan yet: the run's state names the
    attempt, and the attempt's folder exists, before the plan does.
    """
    attempt = run.attempt(number)
    if is_listed(attempt.plan):
        return read_plan(attempt.plan)
    plan = read_plan(run.plan)
    return None if plan is not None and plan.morph else plan


NOT_READ = ("traces", "remedies")
"""Keys of earlier plans that are no longer read."""


def parse_plan(value: dict[str, Any]) -> Plan:
    """Parse a plan from its JSON."""
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
    """Return the facts about the training of a run that may morph, from its plan or else from
    training.json; raise ValueError if neither has them."""
    given = plan.morphing.facts if plan.morphing is not None else None
    return given or derive_facts(read_training(run.training))


def parse_prediction(value: Any) -> Prediction | None:
    """Parse a prediction; None if there is none. Invalid parts count as missing."""
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
