"""conf.yaml as types: the only file that a user edits.

A key is one field: its type with the bounds of a number, its default, and the doc line below. The
checks of numbers, `docs/conf.md` and the conf that `vjob init` writes are made from these.
`conf.loading` reads and checks a conf; code that gets a JobConf from there may trust it. Relative
paths of the file start at its folder and are absolute here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from varuna_core.facts.partition import Partition
from varuna_core.records.training import Llama as LlamaParts
from vjob.jobs.conf.quantities import GIB, MIB, MINUTES, SECONDS

FUNCTION: Literal["function"] = "function"
"""A pickled function from the Python interface; users' confs cannot name it."""
ProgramKind = Literal[
    "pretrain_gpt",
    "pretrain_bert",
    "script",
    "module",
    "command",
    "megatron",
    "deepspeed",
    "function",
]
BUILT_IN = ("pretrain_gpt", "pretrain_bert")
OWN = ("script", "module", "command")
"""The user's own programs, which are launched as `program.launch` says."""
OWN_MODEL = (*OWN, FUNCTION)
"""Programs whose model vjob does not know."""
Auto = Literal["auto"]
_RELATIONS: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {
    ">=": ("at least", operator.ge),
    ">": ("more than", operator.gt),
    "<=": ("at most", operator.le),
    "<": ("less than", operator.lt),
}


@dataclass(frozen=True)
class Bound:
    """A limit of a number, in the annotation of its key: `Annotated[int, Bound("<=", 9)]`."""

    relation: Literal[">=", ">", "<=", "<"]
    limit: float

    def allows(self, value: float) -> bool:
        return _RELATIONS[self.relation][1](value, self.limit)

    def spell(self) -> str:
        return (
            f"{self.limit:,}" if isinstance(self.limit, int) else f"{self.limit:g}".replace("+", "")
        )

    def __str__(self) -> str:
        return f"{_RELATIONS[self.relation][0]} {self.spell().replace(',', '')}"


@dataclass(frozen=True)
class PluginOf:
    """The name of an installed plug-in, in the annotation of a key beside the built-in names."""

    group: str
    """The group of entry points."""


PositiveInt = Annotated[int, Bound(">=", 1), Bound("<=", 10**12)]
SampleCount = Annotated[int, Bound(">=", 1), Bound("<=", 10**7)]
LayerCount = Annotated[int, Bound(">=", 1), Bound("<=", 10_000)]
Width = Annotated[int, Bound(">=", 1), Bound("<=", 10**9)]
RankCount = Annotated[int, Bound(">=", 1), Bound("<=", 4096)]
"""Bound of the ranks of one node: no machine has as many processors."""
NodeCount = Annotated[int, Bound(">=", 1), Bound("<=", 100_000)]
WalltimeMin = Annotated[int, Bound(">=", 1), Bound("<=", 5_256_000), MINUTES]
"""Ten years, well below what the numbers of a scheduler hold."""
Degree = Annotated[int, Bound(">=", 1), Bound("<=", 200_000)]
NonNegativeInt = Annotated[int, Bound(">=", 0), Bound("<=", 10**12)]
PositiveFloat = Annotated[float, Bound(">", 0), Bound("<=", 1e15)]
NonNegativeFloat = Annotated[float, Bound(">=", 0), Bound("<=", 1e15)]
Share = Annotated[float, Bound(">=", 0), Bound("<", 1)]
MOST_GB = Bound("<=", 1_000_000)
YEAR = Bound("<=", 31_536_000)
Seconds = Annotated[int, Bound(">=", 1), YEAR, SECONDS]
SecondsOrZero = Annotated[int, Bound(">=", 0), YEAR, SECONDS]


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program of every rank: a built-in name, or {script: ..}, {module: ..}, {command: ..},
    {megatron: ..}, {deepspeed: ..}."""

    kind: ProgramKind
    """pretrain_gpt, pretrain_bert, or the key that names the program: script, module, command,
    megatron, deepspeed; function in the resolved conf of a run that Python submitted."""
    path: str | None = None
    """The training script, or the Megatron-LM checkout or a script in it (relative to the conf's
    folder)."""
    module: str | None = None
    """A module that runs as with `python -m`, such as pkg.train."""
    command: tuple[str, ...] = ()
    """Words of a command, which runs as it is; a text is split as a shell would."""
    launch: Literal["auto", "torchrun", "srun", "python", "node"] = "auto"
    """Which processes are started, and with which variables (docs/starts.md). torchrun: one a rank,
    with torchrun's variables; srun: one a rank, with only Slurm's; python: a single one, with
    neither; node: one a node, which starts the node's ranks itself; auto: node for a command that
    begins with a known launcher, python for one rank without a layout, else torchrun."""
    args: tuple[str, ...] = ()
    """Arguments of the program. `${key}` is replaced by that key's value; all else is passed on
    unchanged."""
    arguments: Literal["none", "varuna"] = "none"
    """Arguments that a script gets before args. varuna: those of Varuna's launcher, --rank,
    --local_rank, --stage_to_rank_map, --chunk_size (train.micro_batch_size) and --batch-size (a
    replica's share of train.global_batch_size)."""
    config: str | None = None
    """DeepSpeed's own JSON configuration, completed by the conf; values in the file take
    precedence."""
    python: str | None = None
    """Interpreter of the ranks, or the folder of a virtual environment; default: `python3` in a
    container, else the one that runs vjob. If set, its folder comes first on the PATH of a command,
    and of a script that another program runs."""
    snapshot: Literal["auto", "copy", "git", "none"] = "auto"
    """The code that ranks run. copy: the files as they are at the submit, copied into the run
    folder, where ranks run; git: the same, but only if all changes are committed; none: the files
    as they are when ranks start; auto: for a program in a small git repository a copy, run in the
    user's own folder."""


@dataclass(frozen=True, kw_only=True)
class Llama:
    """A GPT as Llama and Qwen are: rotary positions, RMS norms, SwiGLU, no biases."""

    inner: Width
    """Width of the gated MLP."""
    kv_heads: Width | None = None
    """Heads of keys and values; default: as many as heads."""
    head_size: Width | None = None
    """Width of a head, even; default: hidden / heads."""
    tied: bool = False
    """The head shares the embedding's weight."""
    qkv_bias: bool = False
    """Queries, keys and values have biases (Qwen 2)."""
    qk_norm: bool = False
    """Queries and keys have norms (Qwen 3)."""
    norm_eps: PositiveFloat = 1e-5
    """Small number that the norms add before they divide."""
    rope_base: PositiveFloat = 10000.0
    """Base of the rotary positions."""
    rope_scaling: tuple[float, float, float, float] | None = None
    """Scaling of the rotary positions as in Llama 3.1: factor, low and high frequency factor, and
    the sequence length before it."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of a built-in model; a name such as gpt2-xl stands for one of these.

    In a script's conf, a reference to one of these keys refers to all.
    """

    layers: LayerCount
    """Number of transformer blocks."""
    hidden: Width
    """Width of the model."""
    heads: Width
    """Attention heads; divides hidden."""
    sequence: Width = 1024
    """Tokens in a sample."""
    vocab: Width = 50257
    """Size of the vocabulary."""
    dropout: Share = 0.1
    """Dropout probability, 0 to 1."""
    llama: Llama | None = None
    """Parts of Llama and Qwen in place of GPT-2's."""

    def build_llama(self) -> LlamaParts | None:
        """Build the parts of a Llama with every default filled in; None for other models."""
        if self.llama is None:
            return None
        own = asdict(self.llama)
        own["kv_heads"] = own["kv_heads"] or self.heads
        own["head_size"] = own["head_size"] or self.hidden // self.heads
        return LlamaParts(**own)


def _build_llama(
    layers: int, hidden: int, heads: int, sequence: int, vocab: int, **parts: Any
) -> Model:
    return Model(
        layers=layers,
        hidden=hidden,
        heads=heads,
        sequence=sequence,
        vocab=vocab,
        dropout=0.0,
        llama=Llama(**parts),
    )


_LLAMA_3: Mapping[str, Any] = {"kv_heads": 8, "rope_base": 500000.0}
_QWEN: Mapping[str, Any] = {"norm_eps": 1e-6, "rope_base": 1000000.0}
_QWEN_2: Mapping[str, Any] = {**_QWEN, "qkv_bias": True}
_QWEN_3: Mapping[str, Any] = {**_QWEN, "qk_norm": True, "kv_heads": 8, "head_size": 128}
_ROPE_31, _ROPE_32 = (8.0, 1.0, 4.0, 8192.0), (32.0, 1.0, 4.0, 8192.0)

MODELS: Mapping[str, Model] = {
    "gpt2-small": Model(layers=12, hidden=768, heads=12),
    "gpt2-medium": Model(layers=24, hidden=1024, heads=16),
    "gpt2-xl": Model(layers=48, hidden=1600, heads=25),
    "gpt2-2.5b": Model(layers=54, hidden=1920, heads=20),
    "gpt2-8.3b": Model(layers=72, hidden=3072, heads=32),
    "bert-large": Model(layers=24, hidden=1024, heads=16, sequence=512, vocab=30522),
    "llama-2-7b": _build_llama(32, 4096, 32, 4096, 32000, inner=11008),
    "llama-3-8b": _build_llama(32, 4096, 32, 8192, 128256, inner=14336, **_LLAMA_3),
    "llama-3.1-8b": _build_llama(
        32, 4096, 32, 8192, 128256, inner=14336, rope_scaling=_ROPE_31, **_LLAMA_3
    ),
    "llama-3.1-70b": _build_llama(
        80, 8192, 64, 8192, 128256, inner=28672, rope_scaling=_ROPE_31, **_LLAMA_3
    ),
    "llama-3.2-1b": _build_llama(
        16, 2048, 32, 8192, 128256, inner=8192, tied=True, rope_scaling=_ROPE_32, **_LLAMA_3
    ),
    "llama-3.2-3b": _build_llama(
        28, 3072, 24, 8192, 128256, inner=8192, tied=True, rope_scaling=_ROPE_32, **_LLAMA_3
    ),
    "qwen2.5-0.5b": _build_llama(
        24, 896, 14, 4096, 151936, inner=4864, kv_heads=2, tied=True, **_QWEN_2
    ),
    "qwen2.5-1.5b": _build_llama(
        28, 1536, 12, 4096, 151936, inner=8960, kv_heads=2, tied=True, **_QWEN_2
    ),
    "qwen2.5-7b": _build_llama(28, 3584, 28, 4096, 152064, inner=18944, kv_heads=4, **_QWEN_2),
    "qwen3-0.6b": _build_llama(28, 1024, 16, 4096, 151936, inner=3072, tied=True, **_QWEN_3),
    "qwen3-1.7b": _build_llama(28, 2048, 16, 4096, 151936, inner=6144, tied=True, **_QWEN_3),
    "qwen3-8b": _build_llama(36, 4096, 32, 4096, 151936, inner=12288, **_QWEN_3),
}


@dataclass(frozen=True, kw_only=True)
class Data:
    """The training data of a built-in program."""

    prefix: str | None = None
    """Megatron .bin/.idx pair without its suffix (relative to the conf's folder), or for a GPT a
    blend of several, weights and prefixes in turn: `0.7 data/a 0.3 data/b`."""
    split: str = "969,30,1"
    """Shares of train, validation and test."""
    vocab: str | None = None
    """The vocab.txt that a BERT's data were prepared with."""
    synthetic: bool = False
    """Random tokens instead of a data set."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer."""

    name: Literal["adamw", "lamb", "sgd"] = "adamw"
    """Kind of optimizer."""
    lr: NonNegativeFloat = 1.5e-4
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of the groups that have one."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Adam's two averages; the first is the momentum of sgd."""
    fused: bool = True
    """Use torch's fused kernels."""
    apex: bool | Auto = False
    """Use NVIDIA's apex: true refuses nodes that lack it, auto takes torch's kernels there."""
    offload: bool = False
    """Keep the optimizer's state and the fp32 weights in host memory, and update them there; not
    with apex."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning-rate schedule."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    decay_steps: PositiveInt | None = None
    """Step at which the decay ends; default: train.steps."""


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluation during training."""

    every: NonNegativeInt = 1000
    """Steps between evaluations; 0 for none."""
    steps: PositiveInt = 10
    """Batches in an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The folder of checkpoints, and how often to save."""

    folder: str | None = None
    """Folder on the shared file system (relative to the conf's folder; `${...}` is its absolute
    path); none saves nothing."""
    every: NonNegativeInt = 500
    """Steps between checkpoints; 0 for only on demand and at the end."""
    keep: PositiveInt = 3
    """Complete checkpoints to keep."""
    local: str | None = None
    """Node-local folder to write to first."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """The training itself, in full for the built-in programs."""

    steps: PositiveInt = 50
    """Optimizer steps."""
    global_batch_size: SampleCount | None = None
    """Samples in a step over all replicas; default: micro_batch_size x data x pipeline."""
    micro_batch_size: SampleCount | Auto = 1
    """Samples in a micro-batch; auto lets the planner choose."""
    precision: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """Arithmetic of forward and backward; fp8 is bf16 with linear layers in float8, by torchao."""
    loss_scale: PositiveFloat | Literal["dynamic"] = "dynamic"
    """Loss scale of fp16."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """The optimizer."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning-rate schedule."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; null clips nothing."""
    seed: NonNegativeInt = 1234
    """Seed of every random stream."""
    log_every: PositiveInt = 10
    """Steps between log lines and detailed trace events."""
    evaluate: Evaluate = field(default_factory=Evaluate)
    """Evaluation."""
    compile: bool = False
    """Compile each block with torch.compile; with schedules zero_bubble, zbv and auto only blocks
    without dropout."""
    cuda_graphs: bool = False
    """Record a stage's forward and backward as CUDA graphs, one launch each; needs dropout 0."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """Checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the model and the batch are laid over the ranks: pipeline x data x tensor = world."""

    pipeline: Degree | Auto = 1
    """Pipeline stages; auto lets the planner choose, and with it the replicas, the order of the
    nodes, and how many of them are asked for."""
    data: Degree | Auto = "auto"
    """Replicas; auto takes what the world leaves."""
    tensor: Degree = 1
    """Ranks that share each layer; all in one node."""
    sequence_parallel: bool = False
    """With tensor, also share each sequence in the parts between sharded layers: less memory."""
    context: Degree = 1
    """Replicas that share each sample, each with a part of its sequence, for sequences whose
    activations are too large for one rank."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO over the replicas: 1 shares out optimizer state and fp32 weights, 2 the gradients of
    micro-batches too, 3 all weights."""
    recompute: Literal["none", "full", "auto", "selective", "offload"] = "auto"
    """Recompute activations in the backward. auto: as planned with a profile, else what does not
    fit in a GPU's memory, measured in the first step of each start (none on CPU and with zero 3);
    selective: all but the results of matrix products; offload: copy them to host memory instead,
    and back."""
    order: Literal["pipeline", "data", "auto"] = "auto"
    """Ranks that share a node: the stages of a replica (pipeline), or the replicas of a stage
    (data)."""
    partition: Auto | Partition = "auto"
    """Layers per stage, `0-11-8-8-8-8-5-0`, with or without embedding and head: of 6 layers 2-4 or
    3-5; auto: by `profile` if `vjob profile` left one, else balanced at the start by counted
    work."""
    schedule: Literal["gpipe", "1f1b", "varuna", "zero_bubble", "interleaved", "zbv", "auto"] = (
        "auto"
    )
    """Order of forwards and backwards in a step."""
    profile: str | None = None
    """File that `vjob profile` writes and planning reads; default:
    `profiles/<model>.profile.json` next to the conf."""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one kind."""

    group: str = ""
    """Name of the group; letters, digits, - and _. Default: master for the first group, then
    group1, group2."""
    count: NodeCount = 1
    """Number of nodes."""
    queue: str | None = None
    """Slurm partition; auto chooses one (docs/site.md); default: the cluster's own."""
    gpus: str | int | None = None
    """GPUs of a node: `a100:4` (type and count), 4, or none."""
    cpus: RankCount | None = None
    """CPUs asked for on each node; default: what Slurm gives a job that asks for none."""
    memory_gb: Annotated[int, Bound(">=", 0), MOST_GB, GIB] | None = None
    """Memory asked for on each node; 0 for all of it."""
    interface: str = "auto"
    """Network interface; auto follows the route to the master."""
    ranks: RankCount | None = None
    """Processes on each node; default: one a GPU, or one."""
    devices: tuple[int, ...] | None = None
    """GPU indices to use, such as [4, 5]."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of this group's ranks."""
    sbatch: Mapping[str, Any] = field(default_factory=dict)
    """More sbatch options for this group, such as {constraint: ib}."""

    @property
    def gpu_type(self) -> str | None:
        return self.gpus.rpartition(":")[0] or None if isinstance(self.gpus, str) else None

    @property
    def num_gpus(self) -> int:
        if self.gpus is None:
            return 0
        return int(self.gpus.rpartition(":")[2]) if isinstance(self.gpus, str) else self.gpus

    @property
    def num_ranks(self) -> int:
        if self.ranks is not None:
            return self.ranks
        if self.devices is not None:
            return len(self.devices)
        return self.num_gpus or 1


def spell_gpus(kind: str | None, count: int) -> str | int | None:
    """Return GPUs of a node as `cluster.nodes` has them: `a100:4`, 4 of no named type, or None."""
    return f"{kind}:{count}" if kind and count else count or None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines that the job runs on."""

    scheduler: (
        Literal["auto", "slurm", "allocation", "local", "machines"]
        | Annotated[str, PluginOf("vjob.schedulers")]
    ) = "auto"
    """auto: machines where there is a machine_list; allocation inside a job of Slurm, as a step of
    it (docs/allocation.md); slurm where sbatch is on PATH and the conf asks for nodes or names
    something of Slurm's; else local."""
    machine_list: str | None = None
    """File of machines that ssh reaches, a host a line: the first of them are the nodes. With
    `morph` the file is watched: a host that is added joins, one that is removed leaves."""
    ssh_config: str | None = None
    """File for `ssh -F` to the machines; default: ssh's own."""
    hetero: Literal["auto", "hetjob", "split"] = "auto"
    """Several groups as one het job, or as jobs that find each other; auto: a het job, and split
    for a run that may morph, for Slurm ends a whole het job with one of its nodes."""
    walltime_min: WalltimeMin | None = None
    """Time limit; default: an hour where jobs wait in a queue, none on this machine. On a list of
    machines there is none."""
    account: str | None = None
    """Slurm account."""
    qos: str | None = None
    """Slurm quality of service."""
    exclude: tuple[str, ...] = ()
    """Nodes to avoid."""
    requeue: bool = False
    """Let Slurm start the job again after a node failure or a preemption, and with `morph` before
    its time limit."""
    restarts: NonNegativeInt | None = None
    """How often a failed attempt is restarted in the same job, on the same nodes, as with
    torchrun's --max-restarts; default: never. With `morph` it counts failures in a row without
    progress (a new checkpoint, or steps of a script with its own); default: 2."""
    restart_same: bool = False
    """Restart also after an error that came twice in a row in the same step."""
    address: str | None = None
    """Address of the first node as the others reach it; default: by its name and routes."""
    port: int | Auto = "auto"
    """Master's port; auto picks a free one outside the ephemeral range."""
    grace_s: Seconds = 20
    """Time between TERM and KILL for the ranks; at most Slurm's KillWait, 5 s of which agents need
    to record the exits (`vjob doctor`)."""
    join_s: Seconds = 600
    """How long nodes wait for each other at the start."""
    prepare_s: Seconds = 1800
    """How long a node may take to prepare its container."""
    finish_s: SecondsOrZero = 600
    """How long after the first node's end the last one may end; 0 is no limit."""
    signal_before_end_s: SecondsOrZero = 0
    """Ranks with a handler for SIGUSR1 get it this long before the time limit; 0 sends none."""
    lost_s: Annotated[int, Bound(">=", 15), YEAR, SECONDS] = 90
    """Silence after which a node counts as lost, in a split or morphing run and on a list of
    machines."""
    sample_s: Seconds = 10
    """Seconds between GPU samples."""
    log_limit_mb: Annotated[NonNegativeInt, MIB] = 1024
    """Most that a node's .out and .err hold in an attempt, half of it each: their beginnings and
    their newest lines; a line says how much is left out between. 0 is no limit."""
    sbatch: Mapping[str, Any] = field(default_factory=dict)
    """More sbatch options, such as {reservation: week7, hold: true}."""
    nodes: tuple[NodeGroup, ...] = ()
    """Groups of nodes; the first one holds rank 0 and the master's address. A number is a group of
    so many nodes; default: one node with the ranks of the layout."""


@dataclass(frozen=True, kw_only=True)
class Container:
    """The container that ranks run in; without an image they run bare."""

    runtime: (
        Literal["auto", "none", "enroot", "pyxis", "apptainer", "podman", "docker", "charliecloud"]
        | Annotated[str, PluginOf("vjob.container_runtimes")]
    ) = "auto"
    """Container runtime; auto takes what is installed. One that is not in this version of vjob is
    refused."""
    image: str | None = None
    """Image file (relative to the conf's folder) or reference."""
    mounts: tuple[str, ...] = ()
    """`source:target` or `source:target:ro`; sources must exist on every node."""
    workdir: str | None = None
    """Working directory inside; default: that of the run."""
    reuse: bool | Auto = "auto"
    """Reuse an unpacked image; the old RELOAD_CONTAINER=true is reuse: false."""
    writable: bool = True
    """Whether the root file system can be written."""
    remap_root: bool = False
    """Show the ranks as root inside; they stay you outside."""
    scratch: str = "/tmp"
    """Node-local folder for unpacked images, with room for three times the image."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measurements while training: docs/external.md."""

    timeline: bool = True
    """Write the trace that `vjob report` draws; for Megatron-LM, its timers. If the conf itself
    says true, other engines are traced too, in the ranks' Python: docs/external.md."""
    count_steps: bool = True
    """Count the optimizer steps of programs that are not built in, by torch's own hooks:
    docs/steps.md."""
    nsys: bool = False
    """Run ranks under Nsight Systems; `nsys` must be on their PATH."""
    ncu: bool = False
    """Run ranks under Nsight Compute; `ncu` must be on their PATH."""
    ranks: Literal["all"] | tuple[int, ...] = "all"
    """Ranks to profile."""
    options: tuple[str, ...] = ()
    """More options of nsys or ncu."""


@dataclass(frozen=True, kw_only=True)
class Morph:
    """Changes of the number of nodes while a built-in program or a script runs."""

    enabled: bool = False
    """Continue without a lost node, from the newest checkpoint."""
    mode: Literal["pipeline", "world"] = "pipeline"
    """What changes with the nodes. pipeline: depth, replicas and partition; world: only the number
    of ranks, for scripts that need no more (DDP, FSDP)."""
    min_nodes: NodeCount | None = None
    """Fewest nodes: with fewer, the run waits `cluster.join_s`, then ends or is requeued
    (`cluster.requeue`). A job of one group may also start with as few, if its queue has no more."""
    max_nodes: NodeCount | None = None
    """Most nodes, also for `vjob grow`; default: the nodes of `cluster.nodes`."""
    warm: bool = True
    """While ranks train, keep an idle process with torch imported on each node, from which the next
    ranks are forked, so that a morph is short; it takes memory."""
    grow: Literal["none", "auto"] = "none"
    """auto looks for idle nodes in the queues of `cluster.nodes` and lets them join, up to
    max_nodes, where the steps that they save are worth the pause."""
    leave_slow: bool = False
    """Go on without a node that is over 15 % slower than its peers, where that is worth the
    pause."""
    look_s: Seconds = 60
    """Seconds between two checks for `grow` and `leave_slow`."""
    stop_s: Annotated[int, Bound(">=", 5), Bound("<=", 86400), SECONDS] = 120
    """How long ranks that were asked to end may take beyond `cluster.grace_s`; then their node
    counts as lost."""
    return_s: Annotated[int, Bound(">=", 5), Bound("<=", 86400), SECONDS] = 30
    """How long nodes wait for a manager that was killed to come back, beyond `cluster.lost_s`; then
    they give the job back to Slurm."""
    manager_failures: Annotated[int, Bound(">=", 1), Bound("<=", 1000)] = 10
    """How often in a row the manager may fail within a minute of its start before the job ends."""


@dataclass(frozen=True, kw_only=True)
class OnHang:
    """The action of the nodes when the ranks stop making steps: docs/logs.md#a-hang."""

    do: Literal["auto", "restart", "requeue", "stop", "report"] = "auto"
    """restart: end the ranks and start them again, in a run that morphs without a node that is at
    fault; requeue: give the job back to Slurm, which needs `cluster.requeue`; stop: end the run;
    report: only say so, and end the run where the ranks are asked to save (near the time limit:
    `cluster.signal_before_end_s`); auto: restart where `morph` or `cluster.restarts` starts again
    after a failure, else report."""
    after: Annotated[int, Bound(">=", 90), YEAR, SECONDS] | None = None
    """How long ranks may do nothing at all before the action, if nothing shows which rank is at
    fault; default: 105 s, or twice the longest time between two steps. The action comes sooner if a
    rank is stopped or dead, or waits in another collective than the others."""


@dataclass(frozen=True, kw_only=True)
class Notify:
    """Whom `vjob watch` notifies when the job is in trouble, well again, or over."""

    mail: str | None = None
    """Mail address; goes through `sendmail` of the machine that watches."""
    webhook: str | None = None
    """URL that gets a JSON body, its `text` as chat services want it."""
    command: str | None = None
    """Shell command that gets the JSON on its standard input."""


@dataclass(frozen=True, kw_only=True)
class Wandb:
    """A run of Weights & Biases; the ranks' Python needs wandb."""

    project: str
    """Project of the run."""
    entity: str | None = None
    """User or team; default: that of the login."""
    mode: Literal["online", "offline"] = "online"
    """offline writes into the run folder what `wandb sync` sends later."""
    group: str | None = None
    """Group of runs."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""


@dataclass(frozen=True, kw_only=True)
class Mlflow:
    """A run of MLflow; the ranks' Python needs mlflow or mlflow-skinny."""

    experiment: str
    """Experiment of the run."""
    uri: str
    """Tracking server, `sqlite:////shared/mlflow.db`, or a folder (relative to the conf's folder)
    that the first node sees."""


@dataclass(frozen=True, kw_only=True)
class Track:
    """Tools in which the run is shown, for any program, without a change of it: docs/track.md.
    Passwords and keys of servers are not set here (docs/track.md, Secrets)."""

    wandb: Wandb | None = None
    """Weights & Biases."""
    mlflow: Mlflow | None = None
    """MLflow."""
    tensorboard: bool = False
    """Write TensorBoard's event files into the folder tensorboard of the run folder."""
    openmetrics: str | None = None
    """File for the textfile collector of the first node's node exporter (relative to the conf's
    folder)."""
    plugins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Trackers of plug-ins by name, each with its settings: docs/plugins.md."""


@dataclass(frozen=True, kw_only=True)
class JobConf:
    """A whole conf."""

    name: str
    """Name of the run: letters, digits, `-`, `_` and `.`; starts with a letter or digit."""
    program: Program
    """What every rank runs."""
    model: Model | None = None
    """Shape of a built-in model, by name or by numbers."""
    data: Data | None = None
    """The training data."""
    train: Train = field(default_factory=Train)
    """The training itself."""
    parallel: Parallel = field(default_factory=Parallel)
    """The layout."""
    cluster: Cluster = field(default_factory=Cluster)
    """The machines and the scheduler that the run uses."""
    container: Container = field(default_factory=Container)
    """The container that ranks run in."""
    workdir: str | None = None
    """Working directory of the ranks; default: the conf's folder."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of every rank."""
    pass_env: tuple[str, ...] = ()
    """Names of variables that pass from the submitting shell; nothing else does. A submit where one
    of them is not set is refused; a dry run warns."""
    setup: tuple[str, ...] = ()
    """Shell lines run on each node first, such as `module load cuda`."""
    progress: str | None = None
    """Regular expression of lines that report a finished step, for a program whose own lines vjob
    does not know (docs/steps.md): named groups `step`, and `total`, `loss`, `seconds` and others.
    Then no other line counts."""
    profile: Profile = field(default_factory=Profile)
    """What is measured while training."""
    morph: Morph = field(default_factory=Morph)
    """Whether a built-in program or a script may go on with fewer or more nodes."""
    on_hang: OnHang = field(default_factory=OnHang)
    """The limits and the action for ranks that make no steps any more."""
    prices: Mapping[str, NonNegativeFloat] = field(default_factory=dict)
    """Price of a node-hour by GPU type, for `vjob plan`."""
    notify: Notify = field(default_factory=Notify)
    """Whom `vjob watch` notifies when the job is in trouble, well again, or over."""
    track: Track = field(default_factory=Track)
    """Tools in which the run is shown: W&B, MLflow, TensorBoard, Prometheus."""
    log_folder: str = "log"
    """Folder in which run folders are made (relative to the conf's folder), on the shared file
    system."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """A queue of a site: what its nodes have, and what a job may ask for."""

    gpus: str | int | tuple[str, ...] | None = None
    """GPUs of a node: `a100:4`, or a list where its nodes differ; none without it."""
    cpus: RankCount | None = None
    """CPUs of a node."""
    memory_gb: Annotated[int, Bound(">=", 1), MOST_GB, GIB] | None = None
    """Memory of a node."""
    nodes: PositiveInt | None = None
    """The most nodes of a job."""
    walltime_min: WalltimeMin | None = None
    """The longest time limit of a job."""


@dataclass(frozen=True, kw_only=True)
class SiteSection:
    """Values of a site for all its clusters, or for one. `defaults`, a conf, stands beside
    these."""

    message: str | None = None
    """Shown at each submit on a terminal."""
    locked: Mapping[str, str] = field(default_factory=dict)
    """Keys whose value in `defaults`, or else own default, users may not change, each with the
    message for those who do; in a site's file alone."""
    queues: Mapping[str, Queue] = field(default_factory=dict)
    """Queues in the order in which `queue: auto` tries them."""


@dataclass(frozen=True, kw_only=True)
class SiteCluster(SiteSection):
    """One of several clusters."""

    hosts: tuple[str, ...] = ()
    """Host names that belong to the cluster, long or short, such as `alpha-login*`; or VJOB_CLUSTER
    names the cluster."""


@dataclass(frozen=True, kw_only=True)
class SiteFile(SiteSection):
    """A whole site.yaml."""

    clusters: Mapping[str, SiteCluster] = field(default_factory=dict)
    """Values of single clusters by name, which override those for all clusters."""
