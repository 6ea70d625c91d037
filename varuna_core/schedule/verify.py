"""Check a schedule before it runs: a valid schedule is complete, in order, and free of deadlocks.

1. every micro-batch goes once through every stage, on the stage's rank: `F`, or `f` and later `R`;
   then `B`, or `I` and later `W`; an offloaded graph (`O`) is loaded (`L`) before that;
2. a rank reads messages of another rank in the order in which they are sent, separately for
   activations and gradients (so the transport needs no tags);
3. no rank waits for ever; sends are asynchronous, with at most `capacity` unread per channel.

Every error names the rank, the action and the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from varuna_core.schedule.actions import BACKWARDS, FORWARDS, Action, Schedule, ScheduleError
from varuna_core.schedule.held import follow_held
from varuna_core.schedule.order import Channel, walk

# What a micro-batch has on a stage, and what each action makes of it.
_STEPS = {
    ("nothing", "F"): "a graph",
    ("nothing", "f"): "its inputs",
    ("its inputs", "R"): "a graph",
    ("a graph", "B"): "both gradients",
    ("a graph", "I"): "its input gradient",
    ("its input gradient", "W"): "both gradients",
    ("a graph", "O"): "an offloaded graph",
    ("an offloaded graph", "L"): "a loaded graph",
    ("a loaded graph", "B"): "both gradients",
    ("a loaded graph", "I"): "its input gradient",
}
_NEEDS = {
    "F": "nothing",
    "f": "nothing",
    "R": "its inputs",
    "B": "a graph",
    "I": "a graph",
    "W": "its input gradient",
    "O": "a graph",
    "L": "an offloaded graph",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakHeld:
    """Maximum numbers of graphs and inputs that each rank holds at once, in micro-batches."""

    graphs: tuple[int, ...]
    inputs: tuple[int, ...]
    offloaded: tuple[int, ...]
    """Maximum number of offloaded graphs."""

    def __str__(self) -> str:
        return "; ".join(
            f"rank {rank}: {graphs} graphs"
            + (f" and {inputs} inputs" if inputs else "")
            + (f", {offloaded} graphs elsewhere" if offloaded else "")
            for rank, (graphs, inputs, offloaded) in enumerate(
                zip(self.graphs, self.inputs, self.offloaded, strict=True)
            )
        )


def verify(schedule: Schedule, *, capacity: int | None = None) -> PeakHeld:
    """Check a schedule and return its peak numbers; raise ScheduleError if it cannot run."""
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.num_ranks:
            raise ScheduleError(f"stage {stage} is placed on rank {rank} of {schedule.num_ranks}")
    for rank, actions in enumerate(schedule.ranks):
        _check_microbatches(schedule, rank, actions)
    _check_channels(schedule)
    for _ in walk(schedule, capacity):
        pass
    most = [_count_held(actions) for actions in schedule.ranks]
    return PeakHeld(
        graphs=tuple(g for g, _, _ in most),
        inputs=tuple(i for _, i, _ in most),
        offloaded=tuple(o for _, _, o in most),
    )


def _check_microbatches(schedule: Schedule, rank: int, actions: tuple[Action, ...]) -> None:
    """Check that each micro-batch passes each of the rank's stages once, in order."""
    num_microbatches = schedule.num_microbatches
    stages = [stage for stage, owner in enumerate(schedule.placement) if owner == rank]
    states = {stage: ["nothing"] * num_microbatches for stage in stages}
    for index, action in enumerate(actions):
        if action.stage not in states:
            raise _error(rank, index, action, f"the rank holds only stages {stages}")
        if not 0 <= action.microbatch < num_microbatches:
            raise _error(rank, index, action, f"there are only {num_microbatches} micro-batches")
        state = states[action.stage][action.microbatch]
        after = _STEPS.get((state, action.kind))
        if after is None:
            reason = f"the action needs {_NEEDS[action.kind]}, but the micro-batch has {state}"
            raise _error(rank, index, action, f"{reason} there")
        states[action.stage][action.microbatch] = after
    for stage, stage_states in states.items():
        for microbatch, state in enumerate(stage_states):
            if state != "both gradients":
                lacking = [kind for have, kind in _STEPS if have == state and kind != "O"]
                raise ScheduleError(
                    f"rank {rank}: stage {stage} ends with {state} of micro-batch {microbatch}; "
                    f"{' or '.join(f'{stage}{kind}{microbatch}' for kind in lacking)} is missing"
                )


def _check_channels(schedule: Schedule) -> None:
    sends, reads = _list_messages(schedule)
    for channel in sends.keys() | reads.keys():
        forward, source, target = channel
        what = "activation" if forward else "gradient"
        for sent, read in zip_longest(sends.get(channel, ()), reads.get(channel, ())):
            # Complete schedules send as many as they read: neither is None.
            if sent[:2] != read[:2]:
                raise _error(
                    target,
                    read[2],
                    schedule.ranks[target][read[2]],
                    f"the next {what} that rank {source} sends is for micro-batch {sent[1]} of "
                    f"stage {sent[0]}: messages are read in the order of sending",
                )


Messages = dict[Channel, list[tuple[int, int, int]]]
"""For each channel, in order: receiving stage, micro-batch, and index of the action on its rank."""


def _list_messages(schedule: Schedule) -> tuple[Messages, Messages]:
    sends: Messages = {}
    reads: Messages = {}
    placement, last = schedule.placement, schedule.num_stages - 1
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            forward = action.kind in FORWARDS
            if not forward and action.kind not in BACKWARDS:
                continue
            stage, microbatch = action.stage, action.microbatch
            target = stage + 1 if forward else stage - 1
            source = stage - 1 if forward else stage + 1
            if 0 <= target <= last and placement[target] != rank:
                key = (forward, rank, placement[target])
                sends.setdefault(key, []).append((target, microbatch, index))
            if 0 <= source <= last and placement[source] != rank:
                key = (forward, placement[source], rank)
                reads.setdefault(key, []).append((stage, microbatch, index))
    return sends, reads


def _count_held(actions: tuple[Action, ...]) -> tuple[int, int, int]:
    most_graphs = most_inputs = most_offloaded = 0
    stages = {action.stage for action in actions}
    for _, held in follow_held(actions, sorted(stages)):
        graphs, inputs = sum(held.graphs.values()), sum(held.inputs.values())
        most_graphs, most_inputs = max(most_graphs, graphs), max(most_inputs, inputs)
        most_offloaded = max(most_offloaded, sum(held.offloaded.values()))
    return most_graphs, most_inputs, most_offloaded


def _error(rank: int, index: int, action: Action, reason: str) -> ScheduleError:
    return ScheduleError(f"rank {rank}, {action} (action {index}): {reason}")
