"""Jobs that are compared: one step of the same model by our engine, torch's or DeepSpeed's.

All run in the same processes, one after another in each round. A step is forward and backward of
the batch, gradients left in `.grad`; nothing updates weights. Of ours the engine's part is told
apart: the whole `Varuna.step` also splits the batch, makes the gradient norm, and lets all ranks
agree on loss and norm, which the others' steps do not.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from varuna_core import Options, Varuna
from varuna_core.schedule.costs import Costs

Stamp = tuple[float, float]
Traced = tuple[str, float, float, float]


@dataclass(frozen=True, kw_only=True)
class Ours:
    """One of our schedules, and where its stages lie."""

    schedule: str
    stages_per_rank: int = 1
    v_shaped: bool = False
    recompute: str = "none"
    rare: bool = False
    """Left out where steps are long: no bound is on it there."""

    @property
    def name(self) -> str:
        recomputes = ", recompute" if self.recompute == "full" else ""
        return f"ours {self.schedule}{recomputes}"

    def map_stages(self, num_ranks: int) -> list[int]:
        """The rank of each stage."""
        rounds = range(self.stages_per_rank)
        back = [self.v_shaped and number % 2 == 1 for number in rounds]
        each = range(num_ranks)
        return [rank for turned in back for rank in (reversed(each) if turned else each)]


OURS = (
    Ours(schedule="gpipe", rare=True),
    Ours(schedule="1f1b"),
    Ours(schedule="zero_bubble"),
    Ours(schedule="varuna", rare=True),
    Ours(schedule="interleaved", stages_per_rank=2),
    Ours(schedule="zbv", stages_per_rank=2, v_shaped=True),
)
TORCHS = {  # stages a rank
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


@dataclass(kw_only=True)
class Job:
    """One way to make the step, on this rank."""

    name: str
    run: Callable[[], Any]
    parameters: list[nn.Parameter]
    stamps: list[Stamp] = field(default_factory=list)
    """When each step began and ended, of those kept."""
    cpu: list[float] = field(default_factory=list)
    """Processor seconds that each step took, all threads."""
    engine: list[Stamp] = field(default_factory=list)
    """The same of the engine alone, for ours."""
    engine_cpu: list[float] = field(default_factory=list)
    traces: list[list[Traced]] = field(default_factory=list)
    placement: list[int] = field(default_factory=list)
    """The rank of each stage, for ours."""
    square_norm: Callable[[], float] | None = None
    """Where the gradients are gone after the step."""
    varuna: Any = None
    on_action: Callable[[], None] | None = None
    """Called after each of our actions."""

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def time_step(self) -> None:
        self.traces.append([])
        cpu, begin = time.process_time(), time.perf_counter()
        self.run()
        self.stamps.append((begin, time.perf_counter()))
        self.cpu.append(time.process_time() - cpu)

    def trace(self, *event: Any) -> None:
        if self.traces:
            self.traces[-1].append(event)
        if self.on_action is not None:
            self.on_action()

    def close(self) -> None:
        if self.varuna is not None:
            self.varuna.close()

    def forget(self) -> None:
        """Drop what warming up left."""
        for kept in (self.stamps, self.cpu, self.engine, self.engine_cpu, self.traces):
            kept.clear()

    def sum_squares(self) -> float:
        """Sum the squares of this rank's gradients of the last step."""
        if self.square_norm is not None:
            return self.square_norm()
        grads = [p.grad.double() for p in self.parameters if p.grad is not None]
        return float(sum(grad.square().sum().item() for grad in grads))


def unique(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return list({id(p): p for module in modules for p in module.parameters()}.values())


def build_ours(
    ours: Ours,
    model: nn.Module,
    batch: dict[str, Any],
    chunk_size: int,
    num_ranks: int,
    partition: str | None,
    costs: Costs | None = None,
    opportunistic: bool = True,
) -> Job:
    """`Varuna` as a user has it; the model is copied."""
    job = Job(name=ours.name, run=lambda: None, parameters=[])
    size = len(next(iter(batch.values())))
    dummies = {name: value[:chunk_size] for name, value in batch.items()}
    job.placement = ours.map_stages(num_ranks)
    varuna = Varuna(
        copy.deepcopy(model),
        [[rank] for rank in range(num_ranks)],
        dummies,
        size,
        chunk_size,
        device="cpu",
        options=Options(
            partition=partition,
            schedule=ours.schedule,
            stages_per_rank=ours.stages_per_rank,
            recompute=ours.recompute,  # type: ignore[arg-type]
            trace=job.trace,
            costs=costs,
            opportunistic=opportunistic,
        ),
    )
    job.parameters = list(varuna.parameters())
    run_engine = varuna.engine.run

    def time_engine(*args: Any, **kwargs: Any) -> Any:
        cpu, begin = time.process_time(), time.perf_counter()
        result = run_engine(*args, **kwargs)
        job.engine.append((begin, time.perf_counter()))
        job.engine_cpu.append(time.process_time() - cpu)
        return result

    varuna.engine.run = time_engine
    job.run = lambda: varuna.step(batch)
    job.varuna = varuna
    return job


def build_torchs(
    schedule: str,
    stages: Sequence[nn.Module],
    first_inputs: Sequence[Tensor],
    target: Tensor,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    num_microbatches: int,
    rank: int,
    num_ranks: int,
) -> Job:
    """`schedule.step` of torch.distributed.pipelining; `stages` are all stages of the model."""
    rounds = len(stages) // num_ranks
    placing = Ours(schedule=schedule, stages_per_rank=rounds, v_shaped=schedule in V_SHAPED)
    placement = placing.map_stages(num_ranks)
    held = [index for index, owner in enumerate(placement) if owner == rank]
    device = torch.device("cpu")
    mine = [PipelineStage(stages[i], i, len(stages), device) for i in held]
    kind = get_schedule_class(schedule)
    several = issubclass(kind, PipelineScheduleMulti)
    engine = kind(mine if several else mine[0], num_microbatches, loss_fn=loss_fn)
    arguments = first_inputs if 0 in held else ()
    losses: list[Tensor] = []
    last = {"target": target, "losses": losses} if len(stages) - 1 in held else {}

    def run() -> None:
        losses.clear()
        engine.step(*arguments, return_outputs=False, **last)

    return Job(name=f"torch {schedule}", run=run, parameters=unique(stages[i] for i in held))


class _NoStep(torch.optim.Optimizer):
    """DeepSpeed's step ends with the optimizer's: this one only looks at the first gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.squares = -1.0

    def step(self, closure: Any = None) -> None:
        if self.squares < 0:
            held = [p.grad for group in self.param_groups for p in group["params"]]
            self.squares = sum(g.double().square().sum().item() for g in held if g is not None)


def find_deepspeed() -> str | None:
    """Why it cannot be measured, if it cannot."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed (pip install deepspeed, beside this torch)"
    return None


def build_deepspeed(
    layers: Sequence[nn.Module],
    batch: dict[str, Tensor],
    chunk_size: int,
    num_ranks: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> Job:
    """`train_batch` of its pipeline engine: its 1F1B, and its mean loss on all ranks.

    ValueError where it does not start: it compiles code of its own on first use.
    """
    try:
        return _build_deepspeed(layers, batch, chunk_size, num_ranks, loss_fn)
    except Exception as error:
        raise ValueError(f"DeepSpeed does not start: {type(error).__name__}: {error}") from error


def _build_deepspeed(
    layers: Sequence[nn.Module],
    batch: dict[str, Tensor],
    chunk_size: int,
    num_ranks: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> Job:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    module = PipelineModule(
        layers=list(layers), num_stages=num_ranks, loss_fn=loss_fn, partition_method="uniform"
    )
    optimizer = _NoStep(module.parameters())
    chunks = list(
        zip(batch["ids"].split(chunk_size), batch["labels"].split(chunk_size), strict=True)
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": chunk_size,
            "gradient_accumulation_steps": len(chunks),
            "steps_per_print": 10**9,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
        },
    )
    micro_batches = itertools.cycle(chunks)
    return Job(
        name="DeepSpeed 1F1B",
        run=lambda: engine.train_batch(micro_batches),
        parameters=list(module.parameters()),
        square_norm=lambda: optimizer.squares,
    )
