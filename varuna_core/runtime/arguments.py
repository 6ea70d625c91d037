"""Varuna's options, and all its arguments once those that a script omits are filled in from the
conf of its run: `ConfArguments.resolve`.

vjob sets an environment variable for each key in the conf (records/training.py); a script started
without vjob has no such variables and gets Varuna's defaults. An explicit argument takes precedence
over the conf, with a warning if they differ, or an error if the two conflict. All ranks resolve the
same values, since they have the same variables and run the same script.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from varuna_core.facts.partition import Partition
from varuna_core.records.logs.trace import ActionTrace
from varuna_core.records.rank_map import StageMap, parse_stage_map
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import LAYOUT_VARIABLES, VARIABLES, write_partition
from varuna_core.runtime.comm.devices import may_share, take_device
from varuna_core.runtime.optim.precision import Precision, choose_precision
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.recompute import Recompute
from varuna_core.schedule.registry import AUTO, SCHEDULES, count_stages, count_stages_per_rank

log = logging.getLogger(__name__)

ALL_VARIABLES = {**LAYOUT_VARIABLES, **VARIABLES}


class _Omitted(Enum):
    """Sentinel type for an omitted argument, which users cannot pass by accident."""

    FROM_CONF = "from the conf"

    def __repr__(self) -> str:
        return self.name


FROM_CONF: Final = _Omitted.FROM_CONF
"""Default of arguments that the conf may set; if passed explicitly, it selects the conf's value."""
FromConf = Literal[_Omitted.FROM_CONF]
T = TypeVar("T")
Map = str | Sequence[Sequence[int]]
"""A stage map, as text or as lists of ranks."""
StrPath = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for layout, schedule and memory: `Varuna(..., options=Options(zero=1))`.

    FROM_CONF means the conf's value in a run of vjob, and the documented default elsewhere.
    """

    partition: str | Sequence[int] | Partition | FromConf | None = FROM_CONF
    """Number of segments in each stage. N CutPoints give N + 1 segments: the numbers sum to N + 1,
    or to N - 1 without the first and the last segment. With a cut before each of 4 layers, both
    `"2-3"` and `"1-2"` put the second cut between the stages. With several stages per rank,
    list all stages in pipeline order. Default: balanced by costs estimated in the dry run."""

    schedule: str | FromConf = FROM_CONF
    """`gpipe`, `1f1b`, `varuna`, `zero_bubble`, `interleaved`, `zbv`, or `auto`, the default: the
    fastest in simulation, updated with times measured in training (schedule_design.md)."""

    stages_per_rank: int | FromConf = FROM_CONF
    """Number of stages on each rank, for `interleaved` and `auto`; `zbv` has 2. Default: 1."""

    tensor: int | FromConf = FROM_CONF
    """Tensor-parallel degree (tensor_parallel.md): entry k of the stage map then stands for
    `tensor` ranks, from rank k x tensor on. Default: 1."""

    tensor_plan: Mapping[str, Any] | None = None
    """Modules to shard, and their styles. Default: the model's own `tensor_parallel_plan`."""

    recompute: Recompute | FromConf = FROM_CONF
    """Recompute mode of activations: `none` (the default), `full`, `auto`, `selective` or `offload`
    (activations.md)."""

    memory_limit: float | None = None
    """Bytes that a rank's micro-batches may hold at once, with `recompute="auto"`. Default: read
    from the GPU."""

    zero: int | FromConf = FROM_CONF
    """ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also weights, across replicas
    (zero.md). Default: 0, none."""

    offload: str | FromConf | None = FROM_CONF
    """`"optimizer"` keeps fp32 weights and optimizer state in host memory and steps there."""

    keep_fp32: Sequence[str] = ()
    """Names of inputs and of modules (`"blocks.*.norm"`) that stay in fp32 in half precision,
    including all submodules."""

    compile: bool | str = False
    """Apply torch.compile to the largest modules between two cuts; a string selects the
    backend."""

    cuda_graphs: bool = False
    """Record each stage's forwards and backwards as CUDA graphs."""

    seed: int | FromConf = FROM_CONF
    """Seed of dropout (derived from step, sample and segment, so equal in any layout) and of the
    weights of a model on the meta device. Default: 1234."""

    state_dict: Mapping[str, Tensor] | None = None
    """Initial weights: any mapping from names to tensors, or `open_weights("folder/")`."""

    hang_timeout_s: float | None = None
    """Seconds that a rank waits for another one in a step before the run fails. Default: no
    limit."""

    opportunistic: bool = True
    """Run forwards early while a gradient is late; False makes `varuna` follow its schedule
    strictly and `auto` keep its first schedule."""

    costs: Costs | FromConf | None = FROM_CONF
    """Profiled times of actions and messages, used to build schedules; equal on all ranks.
    Default: the times in the plan of the conf's partition, else estimates of the dry run."""

    trace: ActionTrace | FromConf | None = FROM_CONF
    """Function called after each action with `("0F3", begin, ready, end)` in seconds. Default: in
    a run of vjob, the trace that `vjob report` draws."""


DEPRECATED = dict.fromkeys((field.name for field in fields(Options)), "2026-11-28")
"""Keyword arguments that Varuna itself took until this date, and accepts for one year after it."""


def take_deprecated(options: Options, keywords: Mapping[str, Any]) -> Options:
    """Add options passed to Varuna itself, with one warning; raise an error for unknown ones."""
    for word in keywords:
        if word not in DEPRECATED:
            known = ", ".join(DEPRECATED)
            raise TypeError(
                f"Varuna() has no argument {word!r}: help(Varuna) lists its arguments, and "
                f"options=Options(...) takes {known}"
            )
    if keywords:
        shown = ", ".join(f"{word}=..." for word in keywords)
        since = max(DEPRECATED[word] for word in keywords)
        warnings.warn(
            f"Varuna({shown}) is deprecated since {since}: write options=Options({shown})",
            DeprecationWarning,
            stacklevel=3,
        )
    return replace(options, **keywords)


@dataclass(frozen=True, kw_only=True)
class VarunaSettings(Options):
    """All arguments of a training, validated, with values of the conf filled in."""

    stage_map: StageMap
    """The ranks of each place, in the first slice."""

    batch_size: int
    """Number of samples in a step, over all replicas."""

    chunk_size: int
    """Number of samples in a micro-batch."""

    device: torch.device
    may_share: bool
    """True if other ranks may use the same GPU."""

    precision: Precision
    shared_weights: Sequence[Sequence[str]] | None
    """Groups of names of one parameter, in addition to the model's own tied weights."""

    partition: Partition | None
    schedule: str
    stages_per_rank: int
    tensor: int
    recompute: Recompute
    costs: Costs | None
    zero: int
    offload: str | None
    seed: int
    trace: ActionTrace | None

    def __post_init__(self) -> None:
        check_memory_limit(self.recompute, self.memory_limit, self.device)
        if self.recompute == "selective" and self.compile:
            raise ValueError(
                "recompute='selective' does not see the operations of compiled modules: "
                "omit compile, or use 'full'"
            )


def refuse_unknown(
    schedule: str,
    recompute: str,
    batch_size: int,
    chunk_size: int,
) -> None:
    known = (AUTO, *SCHEDULES)
    if schedule not in known:
        raise ValueError(f"schedule {schedule!r}: there are {', '.join(known)}")
    if recompute not in get_args(Recompute):
        raise ValueError(f"recompute {recompute!r}: there are {', '.join(get_args(Recompute))}")
    if recompute == "offload" and schedule != AUTO and SCHEDULES[schedule].recomputes:
        raise ValueError(
            f"schedule {schedule!r} recomputes, so recompute='offload' is not supported: "
            "choose another schedule"
        )
    if batch_size < 1 or chunk_size < 1:
        raise ValueError(f"batch_size {batch_size} and chunk_size {chunk_size} must be 1 or more")


def check_memory_limit(recompute: str, memory_limit: float | None, device: torch.device) -> None:
    if memory_limit is not None and recompute != "auto":
        raise ValueError("memory_limit is only used with recompute='auto'")
    if memory_limit is None and recompute == "auto" and device.type != "cuda":
        raise ValueError(
            "recompute='auto' needs to know the memory of a GPU, and there is none: set "
            "memory_limit=, the bytes that a rank's micro-batches may hold at once"
        )


def why_no_auto(device: torch.device, zero: int) -> str:
    """Return why a conf's `recompute: auto` is unsupported here; empty if it is supported."""
    if device.type != "cuda":
        return "memory is only measured on a GPU"
    if zero == 3:
        return "with zero 3, weights and graphs cannot be measured separately"
    return ""


def refuse_zero(zero: int, offload: str | None, recompute: str, tensor: int) -> None:
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero {zero!r}: expected 0, 1, 2 or 3")
    if zero == 3 and recompute == "auto":
        raise ValueError(
            "recompute='auto' would count the weights that zero=3 gathers as activations: set "
            "'none' or 'full'"
        )
    if zero == 3 and recompute == "offload":
        raise ValueError(
            "recompute='offload' would treat the weights that zero=3 gathers as activations: set "
            "'none' or 'full'"
        )
    if zero == 3 and tensor > 1:
        raise ValueError("zero=3 does not support sharded layers: use 1 or 2 with tensor")
    if offload not in (None, "optimizer"):
        raise ValueError(f"offload {offload!r}: expected 'optimizer' or None")


class ConfArguments:
    """Values of the run's conf, which vjob passes to each rank in environment variables."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.environ = os.environ if environ is None else environ
        self._warned: set[str] = set()

    def read(self, key: str, parse: Callable[[str], T]) -> T | None:
        """Return the value of a conf key; None if the conf does not set it."""
        name = ALL_VARIABLES[key]
        text = self.environ.get(name)
        if not text:
            return None
        try:
            return parse(text)
        except ValueError as error:
            raise ValueError(
                f"{name}={text}, which vjob sets from {key} of the conf: {error}"
            ) from None

    def choose(
        self, argument: str, given: T | FromConf, key: str, parse: Callable[[str], T], default: T
    ) -> T:
        """Return the explicit argument, else the conf's value, else the default."""
        conf_value = self.read(key, parse)
        if given is FROM_CONF:
            return default if conf_value is None else conf_value
        if conf_value is not None and conf_value != given:
            self.warn(f"{argument}={given!r}", key)
        return given

    def record_partition(self, partition: Partition) -> None:
        """Record in the run's folder which partition Varuna chose, where it runs under vjob."""
        run, attempt = self.environ.get("VJOB_RUN"), self.environ.get("VJOB_ATTEMPT", "")
        if run and attempt.isdecimal():
            with contextlib.suppress(OSError):  # the folder is full, or not there
                write_partition(RunFolder(Path(run)).attempt(int(attempt)), partition)

    def require(self, argument: str, given: T | FromConf, key: str, parse: Callable[[str], T]) -> T:
        """Return the explicit argument or the conf's value; raise an error if neither is given."""
        found = self.choose(argument, given, key, parse, None)
        if found is None:
            raise TypeError(f"Varuna needs {argument}: pass it, or set {key} in the run's conf")
        return found

    def warn(self, said: str, key: str) -> None:
        """Log once, on the first rank, that an argument of the script overrides the conf."""
        if self.environ.get("RANK", "0") == "0" and said not in self._warned:
            self._warned.add(said)
            name = ALL_VARIABLES[key]
            log.warning("Varuna(%s) overrides %s: %s of the conf", said, key, self.environ[name])

    def resolve(
        self,
        options: Options,
        *,
        stage_to_rank_map: Map | FromConf,
        batch_size: int | FromConf,
        chunk_size: int | FromConf,
        fp16: bool | FromConf,
        precision: str | FromConf | None,
        local_rank: int,
        device: int | str | torch.device,
        shared_weights: Sequence[Sequence[str]] | None,
    ) -> VarunaSettings:
        """Return all arguments of Varuna, with the conf's in place of those that were omitted."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        layout, tensor_degree = self.choose_layout(stage_to_rank_map, options.tensor, world)
        stage_map = parse_stage_map(layout, world, tensor_degree)
        batch_size, chunk_size = self.choose_sizes(batch_size, chunk_size, stage_map)
        partition = self.choose_partition(options.partition)
        schedule = self.choose("schedule", options.schedule, "parallel.schedule", str, "auto")
        zero = self.choose("zero", options.zero, "parallel.zero", int, 0)
        offload = self.choose_offload(options.offload)
        is_device_shared = may_share(device)
        device = take_device(device, local_rank)
        recompute = self.choose_recompute(options.recompute, device, zero)
        refuse_unknown(schedule, recompute, batch_size, chunk_size)
        refuse_zero(zero, offload, recompute, tensor_degree)
        stages_per_rank = count_stages(
            schedule,
            self.count_stages(options.stages_per_rank, schedule, partition, stage_map.depth),
        )
        resolved = {
            "stage_map": stage_map,
            "batch_size": batch_size,
            "chunk_size": chunk_size,
            "precision": self.choose_precision(fp16, precision).keeping(options.keep_fp32),
            "schedule": schedule,
            "stages_per_rank": stages_per_rank,
            "device": device,
            "may_share": is_device_shared,
            "shared_weights": shared_weights,
            "partition": partition,
            "tensor": tensor_degree,
            "recompute": recompute,
            "costs": self.choose_costs(options.costs, partition, stage_map.depth * stages_per_rank),
            "zero": zero,
            "offload": offload,
            "seed": self.choose("seed", options.seed, "train.seed", int, 1234),
            "trace": None if options.trace is FROM_CONF else options.trace,
        }
        return VarunaSettings(**vars(options) | resolved)

    # The layout.

    def must_join(self, given: Map | FromConf) -> bool:
        """Return True if Varuna must create the process group for the conf's layout."""
        ranks = int(self.environ.get("WORLD_SIZE") or 1)
        has_layout = bool(self.environ.get(LAYOUT_VARIABLES["parallel.order"]))
        return given is FROM_CONF and has_layout and ranks > 1 and not dist.is_initialized()

    def choose_layout(
        self, given: Map | FromConf, tensor: int | FromConf, world: int
    ) -> tuple[Map, int]:
        """Return the stage map and the tensor-parallel degree (ranks that shard each layer)."""
        conf_value = self.environ.get(LAYOUT_VARIABLES["parallel.order"])
        told_tensor = self.read("parallel.tensor", int) or 1
        conf_world = int(self.environ.get("WORLD_SIZE") or world)
        if not conf_value:
            is_alone = conf_world == world == 1 and tensor in (FROM_CONF, 1)
            if given is FROM_CONF and is_alone:
                return "0;", 1  # the one that there is
            if given is FROM_CONF:
                raise TypeError(
                    "Varuna needs stage_to_rank_map: pass it, since only a run of vjob can take "
                    "it from its conf's layout (VJOB_STAGE_MAP)"
                )
            return given, 1 if tensor is FROM_CONF else tensor
        if given is FROM_CONF:
            if conf_world != world:
                raise ValueError(
                    f"the conf's layout {conf_value!r} has {conf_world} ranks, but "
                    f"torch.distributed has {world}: call torch.distributed.init_process_group "
                    "before Varuna"
                )
            if tensor not in (FROM_CONF, told_tensor):
                raise ValueError(self._contradict(f"tensor={tensor}", conf_value))
            return conf_value, told_tensor
        if conf_world != world:  # another process group than the run's
            return given, 1 if tensor is FROM_CONF else tensor
        return given, self._check_layout(given, tensor, conf_value, told_tensor, world)

    def _check_layout(
        self, given: Map, tensor: int | FromConf, conf_value: str, told_tensor: int, world: int
    ) -> int:
        """Return the tensor degree for a script's own map, which must agree with the conf's map."""
        asked = parse_stage_map(conf_value, world, told_tensor)
        # One stage and no sharing are what a conf has that says nothing of the layout.
        says_nothing = asked.depth == told_tensor == 1 and not self.is_cut
        if tensor is FROM_CONF:
            tensor = told_tensor
        if says_nothing:
            return tensor
        if tensor != told_tensor:
            raise ValueError(self._contradict(f"tensor={tensor}", conf_value))
        if parse_stage_map(given, world, tensor) != asked:
            raise ValueError(self._contradict(f"stage_to_rank_map={given!r}", conf_value))
        return tensor

    @property
    def is_cut(self) -> bool:
        """Return True if the conf sets the number of layers of each stage."""
        return self.read("parallel.partition", str) is not None

    def _contradict(self, said: str, conf_value: str) -> str:
        names = ("pipeline", "data", "tensor")
        keys = {name: self.environ.get(LAYOUT_VARIABLES[f"parallel.{name}"]) for name in names}
        shown = ", ".join(f"parallel.{name}: {value}" for name, value in keys.items() if value)
        return (
            f"Varuna({said}) contradicts the conf's layout {conf_value!r} ({shown}): omit the "
            "argument, or change these keys of the conf"
        )

    def choose_partition(
        self, given: str | Sequence[int] | Partition | FromConf | None
    ) -> Partition | None:
        """Return the layers of each stage; None if the runtime is to balance the stages."""
        conf_value = self.read("parallel.partition", Partition.parse)
        if given is FROM_CONF:
            return conf_value
        asked = None if given is None or given == "auto" else Partition.take(given)
        if conf_value is not None and asked != conf_value:
            self.warn(f"partition={given!r}", "parallel.partition")
        return asked

    def choose_costs(
        self, given: Costs | FromConf | None, partition: Partition | None, stages: int
    ) -> Costs | None:
        """Return the given costs, or the planner's if the partition in use comes from the conf."""
        if given is not FROM_CONF:
            return given
        text = self.environ.get("VJOB_COSTS")
        planned = self.read("parallel.partition", Partition.parse)
        if not text or planned is None or partition is None:
            return None
        costs = Costs(**{name: tuple(each) for name, each in json.loads(text).items()})
        is_in_use = partition == planned and costs.num_stages == stages
        return costs if is_in_use else None

    def count_stages(
        self,
        given: int | FromConf,
        schedule: str,
        partition: Partition | None,
        depth: int,
    ) -> int:
        """Return the number of stages on each rank, from the conf's schedule and partition."""
        if given is not FROM_CONF:
            return given
        is_told = self.read("parallel.schedule", str) == schedule
        return count_stages_per_rank(schedule, partition, depth) if is_told else 1

    # The rest.

    def choose_sizes(
        self, batch: int | FromConf, chunk: int | FromConf, stages: StageMap
    ) -> tuple[int, int]:
        """Return the samples of a step and of a micro-batch. Each may come from the script or the
        conf; together they must satisfy the divisibility rules of a conf."""
        keys = "train.global_batch_size", "train.micro_batch_size"
        whole = self.require("batch_size", batch, keys[0], int)
        part = self.require("chunk_size", chunk, keys[1], int)
        if (batch is FROM_CONF) != (chunk is FROM_CONF) and whole % (part * stages.num_replicas):
            said, key, conf_value = ("batch_size", keys[1], part)
            if batch is FROM_CONF:
                said, key, conf_value = ("chunk_size", keys[0], whole)
            raise ValueError(
                f"Varuna({said}={whole if said == 'batch_size' else part}) contradicts {key}: "
                f"{conf_value} in the conf: a batch of {whole} is not a multiple of "
                f"{stages.num_replicas} replicas x micro-batches of {part}"
            )
        return whole, part

    def choose_precision(
        self, fp16: bool | FromConf, precision: str | FromConf | None
    ) -> Precision:
        """Return the precision; an explicit `fp16=False` overrides the conf's."""
        conf_value = self.read("train.precision", str)
        if fp16 is FROM_CONF and precision in (FROM_CONF, None):
            return choose_precision(False, conf_value if precision is FROM_CONF else None)
        chosen = choose_precision(
            False if fp16 is FROM_CONF else fp16, None if precision is FROM_CONF else precision
        )
        if conf_value is not None and chosen.name != conf_value:
            said = f"fp16={fp16}" if precision is FROM_CONF else f"precision={precision!r}"
            self.warn(said, "train.precision")
        return chosen

    def choose_recompute(
        self, given: Recompute | FromConf, device: torch.device, zero: int
    ) -> Recompute:
        """Return the recompute mode; a conf's `auto` is `none` without a GPU or with ZeRO 3."""
        conf_value: Any = self.read("parallel.recompute", str)
        if given is FROM_CONF and conf_value == "auto" and (device.type != "cuda" or zero == 3):
            return "none"
        return self.choose("recompute", given, "parallel.recompute", as_is, "none")

    def choose_offload(self, given: str | FromConf | None) -> str | None:
        conf_value = self.read("train.optimizer.offload", int)
        if given is FROM_CONF:
            return "optimizer" if conf_value else None
        if conf_value is not None and bool(conf_value) != (given is not None):
            self.warn(f"offload={given!r}", "train.optimizer.offload")
        return given

    def choose_loss_scale(self, given: float | str | FromConf) -> float | str:
        def parse(text: str) -> float | str:
            return text if text == "dynamic" else float(text)

        scale: float | str = "dynamic"
        return self.choose("loss_scale", given, "train.loss_scale", parse, scale)

    # Checkpoints.

    def choose_folder(self, call: str, given: StrPath | FromConf) -> Path:
        """Return the checkpoint folder from argument or conf; raise an error if neither is set."""
        path = given if given is FROM_CONF else Path(given)
        conf_value = self.read("train.checkpoint.folder", Path)
        if path is FROM_CONF:
            if conf_value is None:
                raise TypeError(
                    f"{call} needs global_store: pass it, or set train.checkpoint.folder in the "
                    "run's conf"
                )
            return conf_value
        if conf_value is not None and conf_value != path:
            self.warn(f"{call}: {str(path)!r}", "train.checkpoint.folder")
        return path

    def choose_keep(self, given: int | FromConf | None) -> int | None:
        return given if given is not FROM_CONF else self.read("train.checkpoint.keep", int)

    def choose_tempdir(self, given: StrPath | FromConf | None) -> Path | None:
        if given is FROM_CONF:
            return self.read("train.checkpoint.local", Path)
        return None if given is None else Path(given)


def as_is(text: str) -> Any:
    """Return the text unchanged; used for arguments whose other types need no parsing."""
    return text
