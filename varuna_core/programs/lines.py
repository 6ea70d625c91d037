"""Print Megatron's log lines on the ranks that print them in Megatron.

the block of settings       the first rank of each node
iteration, validation       the last rank
memory                      the ranks of replica 0, once, after the first line
saving, saved, evaluating   rank 0
recompute auto, apex auto   rank 0
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varuna_core.programs.place import Place
from varuna_core.records.logs.training_log import (
    BEGIN,
    Iteration,
    MemoryLine,
    format_evaluation,
    format_first_step,
    format_iteration,
    format_job_info,
    format_memory,
    format_phase,
    format_saved,
    format_saving,
    format_validation,
)
from varuna_core.records.plan import read_attempt_plan
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import Training

if TYPE_CHECKING:
    from varuna_core.varuna import Varuna

LOSS = "lm loss"
MB = 1024 * 1024


class RankLines:
    """Prints the log lines of one rank, and collects the values of the steps between two lines."""

    def __init__(self, training: Training, place: Place, model: Varuna) -> None:
        self.training, self.place, self.model = training, place, model
        self.num_steps = 0
        """Number of steps since this start."""

        self._run = _find_run()
        self._since = time.perf_counter()
        self._begin_interval()
        self._has_told_memory = False
        if place.rank == 0:
            model.saving.news.subscribe(_tell_saving, _tell_saved)

    def _begin_interval(self) -> None:
        self._sum: Tensor | None = None
        self._count = self._skipped = 0
        self._paused = 0.0
        self._since = time.perf_counter()

    # What happens.

    def begin(self, iteration: int) -> None:
        if self.place.local_rank == 0:
            _say(format_job_info(self._list_settings()).rstrip("\n"))
        if self.place.rank == 0:
            _say(format_phase(BEGIN, _now()))
            if iteration >= self.training.steps:
                _say(f"nothing to do: train.steps is {self.training.steps}, and all are done")
        self._begin_interval()

    def tell_resumed(self, iteration: int, folder: str) -> None:
        if self.place.rank == 0:
            _say(f"resumed from iteration {iteration} in {folder}")

    def tell_choice(self, text: str) -> None:
        """Print the choice made for a key that is `auto`."""
        if self.place.rank == 0:
            _say(text)

    def tell_recomputed(self) -> None:
        """Print how many forwards `recompute: auto` recomputes, once graphs are measured."""
        samples, size = len(self.model.samples), self.training.micro_batch_size
        schedule = self.model.plans.find(-(-samples // size)).schedule
        kinds = [action.kind for actions in schedule.ranks for action in actions]
        again, kept = kinds.count("f"), kinds.count("F")
        self.tell_choice(
            f"recompute auto: {again} of {again + kept} forwards of a replica's step are "
            f"recomputed ({schedule.name}); the other graphs fit in memory"
        )

    def note(self, step: int, loss: Tensor, overflow: bool, rate: float) -> None:
        """Record one step; reads the device only if a line is due, and after the first step."""
        self.num_steps += 1
        if self.num_steps == 1 and self.place.is_last:
            loss.item()  # a device does it now or later: here it is done
            _say(format_first_step(step))
        self._count += 1
        if overflow:
            self._skipped += 1
        else:
            self._sum = loss.detach().clone() if self._sum is None else self._sum + loss
        if step % self.training.log_every == 0 or step == self.training.steps:
            self._tell(step, rate)
            self._begin_interval()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Exclude the time within the context from the step time that lines report."""
        begin = time.perf_counter()
        yield
        self._paused += time.perf_counter() - begin

    def tell_evaluation(self, num_samples: int) -> None:
        if self.place.rank == 0:
            _say(format_evaluation(num_samples))

    def tell_validation(self, step: int, loss: Tensor) -> None:
        if self.place.is_last:
            _say(format_validation(step, {LOSS: loss.item()}))

    def end(self) -> None:
        if self.place.rank == 0:
            _say(format_phase("after training is done", _now()))

    # The lines.

    def _tell(self, step: int, rate: float) -> None:
        taken = self._count - self._skipped
        mean = None if self._sum is None else self._sum.item() / taken
        elapsed = time.perf_counter() - self._since - self._paused
        norm, scale = self.model.last_grad_norm, self.model.updates.loss_scale
        line = Iteration(
            step=step,
            num_steps=self.training.steps,
            consumed_samples=step * self.training.global_batch_size,
            time_ms=elapsed * 1000 / self._count,
            learning_rate=rate,
            global_batch_size=self.training.global_batch_size,
            losses={} if mean is None else {LOSS: mean},
            loss_scale=1.0 if scale is None else float(scale.scale),
            grad_norm=None if norm is None else norm.item(),
            skipped=self._skipped,
            nan=int(mean is not None and mean != mean),
        )
        if self.place.is_last:
            _say(format_iteration(line))
        if not self._has_told_memory and self.model.replica == 0:
            _say(format_memory(measure_memory(self.place, step)))
        self._has_told_memory = True

    def _list_settings(self) -> dict[str, Any]:
        training, world = self.training, self.place.world
        stages = self.model.stage_map
        attempt = int(os.environ.get("VJOB_ATTEMPT", "0"))
        plan = None if self._run is None else read_attempt_plan(self._run, attempt)
        found: dict[str, Any] = {
            "NODE_RANK": os.environ.get("NODE_RANK", "0"),
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        }
        if plan is not None:
            found["NNODES"] = plan.num_nodes
        return {
            **found,
            "WORLD_SIZE": world,
            "GLOBAL_BATCH_SIZE": training.global_batch_size,
            "MICRO_BATCH_SIZE": training.micro_batch_size,
            "TENSOR_MP_SIZE": training.tensor,
            "DP_SIZE": stages.num_replicas,
            "PIPELINE_MP_SIZE": stages.depth,
            "PARTITION": spell_partition(self.model),
            "MODEL": training.model,
            "HIDDEN_SIZE": training.hidden,
            "NUM_LAYERS": training.layers,
            "PROFILE": int(training.timeline),
        }


def spell_partition(model: Varuna) -> str:
    """Return the blocks of each stage as spelled in a conf."""
    counts = [len(stage) for stage in model.split.stages]
    counts[0] -= 1
    counts[-1] -= 1
    return "-".join(map(str, counts))


def measure_memory(place: Place, step: int) -> MemoryLine:
    """Return a GPU's memory as torch counts it; without a GPU the process's, as reserved memory."""
    if place.device.type == "cuda":
        cuda, device = torch.cuda, place.device
        amounts = (
            cuda.memory_allocated(device), cuda.max_memory_allocated(device),
            cuda.memory_reserved(device), cuda.max_memory_reserved(device),
        )  # fmt: skip
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        now = pages * resource.getpagesize()
        most = max(now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        amounts = (now, most, now, most)
    return MemoryLine(place.rank, step, *(round(amount / MB, 1) for amount in amounts))


def _find_run() -> RunFolder | None:
    path = os.environ.get("VJOB_RUN")
    return RunFolder(Path(path)) if path else None


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _tell_saving(number: int, store: Path) -> None:
    _say(format_saving(number, str(store)))


def _tell_saved(number: int, store: Path) -> None:
    _say(format_saved(number, str(store)))


def _say(text: str) -> None:
    """Print a line in one write, so that lines of several ranks on one terminal do not mix."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
