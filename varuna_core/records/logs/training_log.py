"""Write and parse the lines that a training prints, in the format of Megatron-LM.

 iteration       30/      50 | consumed samples:         1920 | ... | lm loss: 1.017721E+01 | ...
[Rank 24] (after 20 iterations) memory (MB) | allocated: 3035.1 | max allocated: 3869.2 | ...
 validation loss at iteration 1000 | lm loss value: 3.2E+00 | lm loss PPL: 2.5E+01 |
 validation-books loss at iteration 1000 on test set | lm loss value: 3.2E+00 | ...
[before the start of training step] datetime: 2023-06-14 16:08:12
NODE_RANK: 1                                        the block of settings before the first step
times across ranks (ms):                            timers: all ranks, minmax or max
  forward-compute:
     rank  0: 12.34
saving checkpoint at iteration      30 to ckpt
  successfully saved checkpoint from iteration      30 to ckpt
Evaluating on 640 samples                           ends with a validation line
first step of this start is done (31)               ours alone: a morph is over

Readers accept the formats of all versions: different labels, a date before the iteration, a rank's
tag before the line, sizes in other units. A label with the word loss is a loss.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Collection, Dict, Mapping, Optional, Sequence, Tuple

from varuna_core.records.files import as_whole

TAG = r"(?:\d{1,9}: |\[[^\]\n]{1,40}\]:[ ]?)?"
"""Prefix of a line of a merged log: `3: ` in ours and srun's, `[rank3]:` of torchrun."""
ITERATION_MARK = b"iteration "
MEMORY_MARK = b"memory (MB)"
TIMERS_MARK = b"across ranks (ms):"
JOB_INFO = (
    "NODE_RANK",
    "MASTER_ADDR",
    "NNODES",
    "WORLD_SIZE",
    "GLOBAL_BATCH_SIZE",
    "MICRO_BATCH_SIZE",
    "TENSOR_MP_SIZE",
    "DP_SIZE",
    "PIPELINE_MP_SIZE",
    "PARTITION",
    "MODEL",
    "HIDDEN_SIZE",
    "NUM_LAYERS",
    "PROFILE",
)
LABELS = {
    "consumed samples": "consumed_samples",
    "learning rate": "learning_rate",
    "global batch size": "global_batch_size",
    "loss scale": "loss_scale",
    "grad norm": "grad_norm",
    "number of skipped iterations": "skipped",
    "number of nan iterations": "nan",
}
"""Labels that have a field of their own, by label; losses and the elapsed time are found by words
in their labels."""
_INTEGERS = ("consumed_samples", "global_batch_size", "skipped", "nan")
UNITS_MS = {"ms": 1.0, "s": 1000.0, "sec": 1000.0, "secs": 1000.0, "seconds": 1000.0}
_HEAD = re.compile(r"\biteration +(\d{1,18})/ *(\d{1,18}) *\|(.*)", re.DOTALL)
_VALIDATION = re.compile(
    r"\bvalidation(-\S{1,80})? loss at iteration (\d{1,18})(?: on (validation|test) set)? *\|(.*)",
    re.DOTALL,
)
_AUXILIARY = re.compile(r"(?:load_balancing|\bz|indexer|\bmtp_\d{1,9})[_ ]loss")
"""Pattern of the losses of experts, of attention's indexer and of further tokens, which come first
in a line if a step was skipped."""
_DATE = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6})\] iteration ")
_ELAPSED = re.compile(r"elapsed time per (?:iteration|step) *(?:\((\w+)\))?")
_WHOLE_TIME = re.compile(r" *elapsed time per iteration \(ms\): +\d+\.\d\s*")
"""The elapsed time as Megatron prints it, with one decimal."""
_MEMORY = re.compile(r"\(after (\d{1,18}) iterations?\) memory \(MB\)([^\n]*)")
_MEMORY_RANK = re.compile(r"\[Rank (\d{1,9})\][^|\[]*\Z")
"""Pattern of the rank at the end of the text that precedes the memory."""
_MEMORY_FIELD = re.compile(r"(max )?(allocated|reserved): *([0-9.eE+-]+)")
_PHASE = re.compile(r"\[([^\]]{1,200})\] datetime: (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_JOB_INFO = re.compile(rf"{TAG}({'|'.join(JOB_INFO)}): ?(.*)")


@dataclass(frozen=True)
class Iteration:
    """Values of one iteration line; None for values that the line does not have."""

    step: int
    num_steps: Optional[int] = None
    consumed_samples: Optional[int] = None
    time_ms: Optional[float] = None
    """Mean time of a step since the previous line."""
    learning_rate: Optional[float] = None
    global_batch_size: Optional[int] = None
    losses: Mapping[str, float] = field(default_factory=dict)
    """Losses by label; empty if every step was skipped."""
    loss_scale: Optional[float] = None
    grad_norm: Optional[float] = None
    skipped: Optional[int] = None
    """Number of steps skipped since the previous line (because fp16 overflowed)."""
    nan: Optional[int] = None
    others: Mapping[str, float] = field(default_factory=dict)
    """Other numbers of the line, by label."""
    samples_per_s: Optional[float] = None
    tokens_per_s: Optional[float] = None
    """Tokens per second as printed: of one device for torchtitan, of all devices for others."""
    is_bar: bool = False
    """True if the line is a progress bar, which counts steps and measures them roughly."""
    is_named: bool = True
    """False for a bar that may count something other than steps."""
    epoch: Optional[int] = None
    """The epoch in the line; if there is one, `step` may be counted within each epoch."""
    num_epochs: Optional[int] = None
    is_from_zero: bool = False
    """True if the program is known to count its epochs from 0."""
    is_least: bool = False
    """True if the first epoch was not read: if its number is 0, one more epoch of steps was done
    than `step` says."""
    unit: str = "step"
    """The unit that the line counts: `step`, `epoch` or `sample`."""
    evaluations: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics that were not of training, by name: `{"val": {"loss": 4.29}}`."""

    @property
    def loss(self) -> Optional[float]:
        if "lm loss" in self.losses:
            return self.losses["lm loss"]
        own = (loss for label, loss in self.losses.items() if not _AUXILIARY.search(label))
        return next(own, None)

    @property
    def is_evaluation(self) -> bool:
        """True for a line of an evaluation: it names a step but has no values of that step."""
        return bool(self.evaluations) and not self.losses and self.time_ms is None


@dataclass(frozen=True)
class MemoryLine:
    """One memory line, in MB as torch counts them."""

    rank: Optional[int]
    step: int
    allocated: Optional[float]
    max_allocated: Optional[float]
    reserved: Optional[float]
    max_reserved: Optional[float]


def format_iteration(value: Iteration) -> str:
    """Return the line as Megatron-LM prints it, without a line end."""
    parts = [f" iteration {value.step:8d}/{value.num_steps or 0:8d}"]
    if value.consumed_samples is not None:
        parts.append(f"consumed samples: {value.consumed_samples:12d}")
    if value.time_ms is not None:
        parts.append(f"elapsed time per iteration (ms): {value.time_ms:.1f}")
    if value.learning_rate is not None:
        parts.append(f"learning rate: {value.learning_rate:.3E}")
    if value.global_batch_size is not None:
        parts.append(f"global batch size: {value.global_batch_size:5d}")
    parts += [f"{label}: {loss:.6E}" for label, loss in value.losses.items()]
    if value.loss_scale is not None:
        parts.append(f"loss scale: {value.loss_scale:.1f}")
    if value.grad_norm is not None:
        parts.append(f"grad norm: {value.grad_norm:.3f}")
    parts += [f"{label}: {number:.6g}" for label, number in value.others.items()]
    parts.append(f"number of skipped iterations: {value.skipped or 0:3d}")
    parts.append(f"number of nan iterations: {value.nan or 0:3d}")
    return " | ".join(parts) + " |"


def parse_iteration(line: str) -> Optional[Iteration]:
    """Parse an iteration line; return None for other lines, and for ones without any value."""
    head = _HEAD.search(line)
    if head is None:
        return None
    fields: Dict[str, float] = {}
    losses: Dict[str, float] = {}
    others: Dict[str, float] = {}
    *whole, last = head.group(3).split("|")
    if _WHOLE_TIME.fullmatch(last):  # of all that no bar closes only this shows that it is whole
        whole.append(last)
    for part in whole:
        label, colon, text = part.rpartition(":")
        label, number = label.strip(), _read_number(text)
        if not colon or number is None:
            continue
        elapsed = _ELAPSED.fullmatch(label)
        if elapsed is not None:
            fields["time_ms"] = number * UNITS_MS.get(elapsed.group(1) or "ms", 1.0)
        elif label in LABELS:
            fields[LABELS[label]] = number
        elif "loss" in label and "scale" not in label:
            losses[label] = number
        else:
            others[label] = number
    if not fields and not losses:
        return None
    for name in _INTEGERS:
        if name in fields:
            if not math.isfinite(fields[name]):
                del fields[name]
            else:
                fields[name] = int(fields[name])
    step, total = int(head.group(1)), int(head.group(2))
    return Iteration(step, total, losses=losses, others=others, **fields)  # type: ignore[arg-type]


def format_validation(step: int, losses: Mapping[str, float]) -> str:
    """Return Megatron's line of an evaluation, with the rules above and below it."""
    parts = [f" validation loss at iteration {step}"]
    for label, loss in losses.items():
        perplexity = math.exp(min(20.0, loss))  # Megatron's bound
        parts += [f"{label} value: {loss:.6E}", f"{label} PPL: {perplexity:.6E}"]
    line = " | ".join(parts) + " | "
    rule = "-" * len(line)
    return f"{rule}\n{line}\n{rule}"


def leave_out_first(first: str, line: str, found: Iteration) -> Iteration:
    """Return `found`, a start's second line, with the time of the steps since the first line.

    Core 0.16 and later print a line after the first step, and the time in the next line is the mean
    of all steps so far. The dates of the lines show it: the steps in between cannot have taken so
    long.
    """
    before, dates = parse_iteration(first), [_DATE.search(text) for text in (first, line)]
    if before is None or before.time_ms is None or found.time_ms is None:
        return found
    if dates[0] is None or dates[1] is None:
        return found
    begun, ended = (datetime.fromisoformat(date.group(1)) for date in dates if date is not None)
    num, most_ms = found.step - before.step, 1000 * (ended - begun).total_seconds() + 1
    since_ms = (num + 1) * found.time_ms - before.time_ms
    if num < 1 or num * found.time_ms <= most_ms or not 0 < since_ms <= most_ms:
        return found
    return replace(found, time_ms=since_ms / num)


def parse_validation(line: str) -> Optional[Tuple[int, str, Dict[str, float]]]:
    """Parse Megatron-LM's line of an evaluation: return the step, the name of the data set (such as
    `val`, `test`, or `val` with the number of one of several sets), and each loss by its label;
    None for any other line."""
    head = _VALIDATION.search(line)
    if head is None:
        return None
    losses = {}
    for part in head.group(4).split("|")[:-1]:  # what no bar closes may be torn
        label, _, text = part.rpartition(" value:")
        number = _read_number(text)
        if label and number is not None:
            losses[label.strip()] = number
    split = "test" if head.group(3) == "test" else "val"
    return int(head.group(2)), split + (head.group(1) or ""), losses


def format_memory(value: MemoryLine) -> str:
    words = [
        f"allocated: {value.allocated}",
        f"max allocated: {value.max_allocated}",
        f"reserved: {value.reserved}",
        f"max reserved: {value.max_reserved}",
    ]
    return f"[Rank {value.rank}] (after {value.step} iterations) memory (MB) | " + " | ".join(words)


def parse_memory(line: str) -> Optional[MemoryLine]:
    match = _MEMORY.search(line)
    if match is None:
        return None
    found = {
        (bool(most), name): _read_number(text)
        for most, name, text in _MEMORY_FIELD.findall(match.group(2))
    }
    if not found:
        return None
    rank = _MEMORY_RANK.search(line[: match.start()])
    return MemoryLine(
        rank=int(rank.group(1)) if rank else None,
        step=int(match.group(1)),
        allocated=found.get((False, "allocated")),
        max_allocated=found.get((True, "allocated")),
        reserved=found.get((False, "reserved")),
        max_reserved=found.get((True, "reserved")),
    )


def format_phase(name: str, datetime: str) -> str:
    """Return the line of a phase; `datetime` has the form `2023-06-14 16:08:12`."""
    return f"[{name}] datetime: {datetime} "


def parse_phase(line: str) -> Optional[Tuple[str, str]]:
    """Return the phase's name and its local time."""
    match = _PHASE.search(line)
    return None if match is None else (match.group(1), match.group(2))


def format_job_info(settings: Mapping[str, object]) -> str:
    """Return the block of settings, in the order of JOB_INFO; unknown settings are omitted."""
    return "".join(f"{key}: {settings[key]}\n" for key in JOB_INFO if key in settings)


def parse_job_info(line: str) -> Optional[Tuple[str, str]]:
    """Parse one line of the block of settings."""
    match = _JOB_INFO.fullmatch(line.strip())
    return None if match is None else (match.group(1), match.group(2).strip())


def list_missing_nodes(printed: Sequence[Collection[str]], num_nodes: int) -> Tuple[int, ...]:
    """Return the NODE_RANKs without a log; `printed` has those that each log names.

    The result is empty if a log names no node, or if there is only one log.
    """
    numbers = {as_whole(rank) for own in printed for rank in own}
    found = {number for number in numbers if number is not None}
    if len(printed) < 2 or not all(printed) or max(found, default=num_nodes) >= num_nodes:
        return ()
    return tuple(rank for rank in range(num_nodes) if rank not in found)


@dataclass(frozen=True)
class LogOwner:
    """Job and node of a log, from the settings that it prints."""

    master: str
    node_ranks: Collection[str]
    written_at: float


def find_other_jobs(owners: Mapping[str, LogOwner]) -> Dict[str, Tuple[str, ...]]:
    """Return the logs, by master, that do not belong to the job with the most logs (if several have
    as many, the newest). Jobs have different masters but nodes with the same NODE_RANKs."""
    jobs: Dict[str, Dict[str, LogOwner]] = {}
    for name, owner in owners.items():
        if owner.master and owner.node_ranks:
            jobs.setdefault(owner.master, {})[name] = owner
    ranks = [{rank for one in own.values() for rank in one.node_ranks} for own in jobs.values()]
    if len(jobs) < 2 or not set.intersection(*ranks):
        return {}
    chosen = max(
        jobs,
        key=lambda master: (len(jobs[master]), max(x.written_at for x in jobs[master].values())),
    )
    return {master: tuple(own) for master, own in jobs.items() if master != chosen}


# Timers. The seed's own log lists, after each rank, when each call began and ended (epoch seconds).

TIMERS_HEAD = re.compile(rb"(?:(\(min, max\) )?|(max )?)times? across ranks \(ms\):")
_NAME = rb"([\w-]{1,80})"
_NUMBER = rb"([-+.\deE]{1,40}|nan|inf)"
# Lines of a text that begins and ends with a line's end: a search for that is many times as fast as
# one for the place behind it, and most of what stands there are long lists.
TIMER_NUMBERS = re.compile(
    rb"\n%b(?:  %b:| {5}rank +(\d{1,9}): +?%b| {4}%b ?\.*: (?:\(%b, %b\)|%b)) *\r?(?=\n)"
    % (TAG.encode(), _NAME, _NUMBER, _NAME, _NUMBER, _NUMBER, _NUMBER)
)
"""Pattern of the numbers of timers. Its groups: a timer's name; a rank and its ms; a name with min
and max, or with max only."""
TIMER_CALLS = re.compile(
    rb"\n%b(?: {5}rank +(\d{1,9}): [^\n]*| %b (start|end) time lst:([^\n]*))(?=\n)"
    % (TAG.encode(), _NAME)
)
"""Pattern of the calls of timers. Its groups: a rank; or a timer's name, start or end, and the list
of times, for the rank before."""


def _read_number(text: str) -> Optional[float]:
    try:
        return float(text) if len(text) < 100 else None
    except ValueError:
        return None


# What a rank is at besides steps. Megatron's words, those of its forks, and DeepSpeed's.

CHECKPOINT, EVALUATION = "checkpoint", "evaluation"
PHASE_MARKS = (b"aving", b"aved", b"Evaluati", b" loss at ", b"'eval_")
"""Each line that `parse_mark` understands contains one of these."""
_MARKS = tuple(
    (name, begins, re.compile(pattern, re.IGNORECASE))
    for name, begins, pattern in (
        (CHECKPOINT, False, r"\b(?:successfully )?saved (?:the )?(?:model )?checkpoint\b"),
        (CHECKPOINT, False, r"\bfinished saving (?:the )?checkpoint\b|\bcheckpoint saved\b"),
        (CHECKPOINT, False, r"^\W*\[Torch\] Saved \S|\bmodel weights saved in\b"),
        (CHECKPOINT, True, r"\bsaving (?:the )?(?:full )?(?:model )?checkpoint\b"),
        (CHECKPOINT, True, r"\[Torch\] Saving \S"),
        (EVALUATION, False, r"\bvalidation(?:-\S{1,80})? loss at\b|'eval_(?:loss|runtime)'"),
        (EVALUATION, True, r"\bEvaluating (?:on \d+ samples|iter \d+)"),
        (EVALUATION, True, r"\*\*\* Running Evaluation \*\*\*"),
    )
)


def parse_mark(line: str) -> Optional[Tuple[str, bool]]:
    """Return CHECKPOINT or EVALUATION, and True if it begins with this line; None without one."""
    for name, begins, pattern in _MARKS:
        if pattern.search(line):
            return name, begins
    return None


BEGIN = "before the start of training step"
"""The phase that a rank prints once everything is loaded."""
FIRST_STEP = "first step of this start is done"


def format_first_step(step: int) -> str:
    return f"{FIRST_STEP} ({step})"


def format_saving(step: int, folder: str) -> str:
    """Return the line printed when a checkpoint begins; `folder` is that of all checkpoints."""
    return f"saving checkpoint at iteration {step:7d} to {folder}"


def format_saved(step: int, folder: str) -> str:
    """Return the line printed when a checkpoint is complete."""
    return f"  successfully saved checkpoint from iteration {step:7d} to {folder}"


def format_evaluation(num_samples: int) -> str:
    """Return the line printed when an evaluation begins."""
    return f"Evaluating on {num_samples} samples"


BAD_NORMS = 3
"""Least number of gradient norms in a row that are not finite and count as evidence."""
SCALE_STEPS = 20
"""Steps in a row that a search of the fp16 loss scale may skip, with such norms, in a run that is
well."""


def count_bad_norms(
    rows: Sequence[Tuple[int, Optional[float], Optional[float], bool]],
) -> int:
    """Return for how many of the last lines the gradient norm shows that weights are lost; 0 if it
    does not. Each row has step (less than 0 if it is not known), norm, loss, and whether its step
    was skipped.

    The norms must not be finite in several lines in a row that do not say that their step was
    skipped. Programs with fp16 skip steps without saying so: the lines must cover more steps than
    these skip, or show no loss and come after a finite norm, or show a loss of 0, which Hugging
    Face prints instead of NaN.
    """
    count, first = 0, 0
    losses = set()
    shown = [row for row in rows if row[1] is not None]
    for step, norm, loss, is_skipped in reversed(shown):
        if is_skipped or norm is None or math.isfinite(norm):
            break
        count, first = count + 1, step
        losses.add(loss)
    is_long = count >= SCALE_STEPS or (count > 0 and shown[-1][0] - first >= SCALE_STEPS - 1)
    was_well = count < len(shown) and losses == {None}
    return count if count >= BAD_NORMS and (is_long or was_well or losses == {0.0}) else 0
