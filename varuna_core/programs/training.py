"""Train a built-in program on one rank, from its settings to the last step.

settings, place ─► source of batches ─► model on the meta device ─► Varuna ─► checkpoint, if any
each step: batch ─► step ─► optimizer ─► lines, evaluation, checkpoint

Clocks of ranks are compared before the first step and after the last one: the report assumes that
the offset changes linearly between the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from varuna_core.checkpoint.format.errors import NoCheckpoint
from varuna_core.programs.batches import (
    TRAIN,
    VALID,
    Batch,
    BatchSource,
    ReadAhead,
    open_source,
)
from varuna_core.programs.building import (
    LearningRate,
    build_model,
    choose_apex,
    choose_recompute,
    describe_model,
    make_optimizer,
    plan_layers,
)
from varuna_core.programs.context import Context, choose_context
from varuna_core.programs.float8 import FP8, choose_base_precision, use_float8
from varuna_core.programs.layers import compile_blocks
from varuna_core.programs.lines import RankLines
from varuna_core.programs.place import Place, ProgramError
from varuna_core.records.logs.trace import TraceWriter
from varuna_core.records.rank_map import parse_stage_map
from varuna_core.records.training import Training
from varuna_core.runtime.arguments import Options
from varuna_core.runtime.optim.optimizers import use_apex_norms
from varuna_core.runtime.step_trace import exchange_clocks, open_rank_trace
from varuna_core.schedule.registry import count_stages_per_rank, may_split_backward
from varuna_core.varuna import Varuna


def open_trace(training: Training, place: Place, path: Path) -> TraceWriter:
    stages = parse_stage_map(place.stage_map, place.world, place.tensor)
    partition = training.stage_layers
    return open_rank_trace(
        path,
        place.rank,
        stages,
        schedule=training.schedule,
        partition=partition,
        stages_per_rank=count_stages_per_rank(training.schedule, partition, stages.depth),
        device=place.device,
        log_every=training.log_every,
    )


def build_varuna(
    training: Training,
    place: Place,
    source: BatchSource,
    trace: TraceWriter | None,
    context: Context | None = None,
) -> Varuna:
    depth = parse_stage_map(place.stage_map, place.world, place.tensor).depth
    model, partition = build_model(training, context), training.stage_layers
    if training.precision == FP8:
        use_float8(model, place.device)
    sample = source.read(TRAIN, range(training.micro_batch_size))
    varuna = Varuna(
        model,
        place.stage_map,
        sample if context is None else cut_batch(sample, context),
        training.global_batch_size * training.context,
        training.micro_batch_size,
        local_rank=place.local_rank,
        device=place.device.type,
        precision=choose_base_precision(training.precision),
        options=Options(
            partition=partition,
            schedule=training.schedule,
            stages_per_rank=count_stages_per_rank(training.schedule, partition, depth),
            tensor=training.tensor,
            tensor_plan=plan_layers(model, training),
            recompute=choose_recompute(training, place.device)[0],
            trace=trace,
            seed=training.seed,
            zero=training.zero,
            offload="optimizer" if training.offload else None,
            compile=is_compiled_by_varuna(training),
            cuda_graphs=training.cuda_graphs,
            opportunistic=context is None,  # ranks that gather run the same actions in one order
        ),
    )
    if context is not None:
        context.join(varuna.links)
    return varuna


def cut_batch(batch: Batch, context: Context) -> Batch:
    """Return this rank's part of every sequence."""
    return {name: context.cut(rows) for name, rows in batch.items()}


def is_compiled_by_varuna(training: Training) -> bool:
    """Return True if Varuna itself compiles the blocks: `compile` is set, and the schedule may
    postpone weight gradients, so that Varuna must know which layers are compiled."""
    return training.compile and may_split_backward(training.schedule)


class Trainer:
    """Runs one rank of the training."""

    def __init__(self, training: Training, place: Place, trace: TraceWriter | None) -> None:
        self.training, self.place, self.trace = training, place, trace
        self.source = open_source(training)
        self.order = self.source.state()
        self.context = choose_context(training, place)
        self.model = build_varuna(training, place, self.source, trace, self.context)
        apex, said_of_apex = choose_apex(training, place.device)
        self.optimizer = make_optimizer(self.model, training, apex=apex)
        self.model.set_optimizer(self.optimizer, training.loss_scale)
        self.rate = LearningRate(
            kind=training.lr_schedule,
            lr=training.lr,
            min_lr=training.min_lr,
            warmup_steps=training.warmup_steps,
            decay_steps=training.decay_steps,
        )
        self.taken = 0
        """Steps taken, without those that an overflow skipped."""

        self.lines = RankLines(training, place, self.model)
        self.recompute, said = choose_recompute(training, place.device)
        for line in filter(None, (said, said_of_apex)):
            self.lines.tell_choice(line)

        self._resume()
        if apex:
            for stage in self.model.part.stages:
                use_apex_norms(stage.module)
        if training.compile and not is_compiled_by_varuna(training):
            for stage in self.model.part.stages:
                compile_blocks(stage.module)

    def _resume(self) -> None:
        folder = self.training.checkpoint_folder
        if folder is None:
            return
        try:
            self.model.load_checkpoint(folder)
            if self.model.data_position is None:
                self._begin_with_imported(folder)
                return
            self._expect_same_batch(self.model.data_position["consumed"])
            self.source.check_state(self.model.data_position["order"])
            self.taken = int(self.model.user_state["taken"])
            self.lines.tell_resumed(self.model.iteration, folder)
        except NoCheckpoint:
            if self.training.saved >= 0:
                raise ProgramError(
                    f"this run saved iteration {self.training.saved} in {folder}, but it is "
                    "missing now: is the disk mounted? To train from the beginning, submit again"
                ) from None
        self.model.save_on_signal(folder, keep=self.training.checkpoint_keep)

    def _begin_with_imported(self, folder: str) -> None:
        """Load initial weights that `varuna_core.checkpoint import` wrote at iteration 0."""
        if self.model.iteration:
            raise ProgramError(
                f"iteration {self.model.iteration} in {folder} does not say which samples it has "
                "seen: import weights with --iteration 0, for a training from its first sample"
            )
        self.lines.tell_choice(f"begins with the weights in {folder}")
        self.model.save_on_signal(folder, keep=self.training.checkpoint_keep)

    def _expect_same_batch(self, consumed: int) -> None:
        size, steps = self.training.global_batch_size, self.model.iteration
        if consumed != steps * size:
            raise ProgramError(
                f"the checkpoint has consumed {consumed} samples in {steps} steps, but "
                f"train.global_batch_size is {size}: continue with {consumed // steps}"
            )

    # The loop.

    def run(self) -> None:
        training, model = self.training, self.model
        self._synchronise_clocks()
        self.lines.begin(model.iteration)
        ahead = ReadAhead(self._read_step, training.steps)
        try:
            for step in range(model.iteration + 1, training.steps + 1):
                self._run_step(step, ahead)
            self._save_last()
        finally:
            ahead.close()
        self._synchronise_clocks()
        self.lines.end()

    def _run_step(self, step: int, ahead: ReadAhead) -> None:
        training, model = self.training, self.model
        if self.trace is not None:
            self.trace.begin_step(step)
        with self._span("data"):
            batch = ahead.take(step)
        rate = self.rate.at(self.taken)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, overflow = model.step(batch, training.clip_grad_norm)
        if self.recompute == "auto" and not model.plans.lacks_memory:
            self.lines.tell_recomputed()
            self.recompute = "none"  # told
        with self._span("optimizer"):
            self.optimizer.step()
            model.zero_grad()
        self.taken += not overflow
        self._note_position(step)
        self.lines.note(step, loss, overflow, rate)
        if step < training.steps and _divides(training.checkpoint_every, step):
            with self._span("checkpoint"), self.lines.apart():
                self._save()
        if self.trace is not None:
            self.trace.end_step()
        if _divides(training.evaluate_every, step):
            with self._span("evaluate"), self.lines.apart():
                self.lines.tell_evaluation(training.evaluate_steps * training.global_batch_size)
                self.lines.tell_validation(step, self._evaluate(step))

    def _note_position(self, step: int) -> None:
        """Set the position in the data that the next checkpoint stores."""
        consumed = step * self.training.global_batch_size
        self.model.data_position = {"consumed": consumed, "order": self.order}
        self.model.user_state = {"taken": self.taken, "model": describe_model(self.training)}

    def _save(self) -> None:
        training = self.training
        if training.checkpoint_folder is not None:
            self.model.checkpoint(
                training.checkpoint_folder,
                tempdir=training.checkpoint_local,
                shard=True,
                keep=training.checkpoint_keep,
            )

    def _save_last(self) -> None:
        folder = self.training.checkpoint_folder
        if folder is not None and self.lines.num_steps:
            with self._span("checkpoint"):
                self.model.checkpoint(
                    folder, shard=True, keep=self.training.checkpoint_keep, on_demand=True
                )

    def _evaluate(self, step: int) -> Tensor:
        """Return the mean loss of `evaluate.steps` batches, different ones each time."""
        number = step // self.training.evaluate_every - 1
        first = number * self.training.evaluate_steps
        self.model.eval()
        losses = [
            self.model.evaluate(self._read(VALID, first + k))
            for k in range(self.training.evaluate_steps)
        ]
        self.model.train()
        return torch.stack(losses).mean()

    # Batches.

    def _read_step(self, step: int) -> Batch:
        return self._read(TRAIN, step - 1)

    def _read(self, part: str, number: int) -> Batch:
        """Return this replica's samples of the batch `number`, counted from 0."""
        first = number * self.training.global_batch_size
        own, context = self.model.samples, self.context
        if context is None:
            return self.source.read(part, range(first + own.start, first + own.stop))
        own = context.share_samples(own)
        batch = self.source.read(part, range(first + own.start, first + own.stop))
        return cut_batch(batch, context)

    # The trace.

    @contextmanager
    def _span(self, kind: str) -> Iterator[None]:
        if self.trace is None:
            yield
            return
        with self.trace.span(kind):
            yield

    def _synchronise_clocks(self) -> None:
        if self.place.world > 1 and self.training.timeline:
            exchange_clocks(self.trace)

    def close(self) -> None:
        """Clean up after the last step, on every rank."""
        self.model.close()
        if self.trace is not None:
            self.trace.close()


def _divides(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
