"""What a line of a log says. Pure, and no line makes it raise.

Megatron's spelling is the contract of `records.logs.training_log`. Beyond it the lines of
other trainers are understood as far as they say a step and something that only a step has:

    {'loss': 2.31, 'grad_norm': 1.2, 'epoch': 0.02}                Hugging Face; a bar has the step
     10%|#         | 10/100 [00:10<01:30,  1.00it/s]               tqdm; Lightning's with an epoch
    steps: 10 loss: 2.3400 iter time (s): 0.512 samples/sec: 31.2  DeepSpeed
    [Rank 0] step=10, skipped=0, lr=[0.0001], mom=[[0.9, 0.95]]    DeepSpeed
    [titan] ... step: 10  loss:  7.2  grad_norm:  1.2  memory: ... torchtitan
    step 10/100 loss 2.3                                           your own
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from datetime import datetime

from varuna_core.records.logs.training_log import parse_iteration
from vjob.jobs.monitor.model.snapshot import Point

MARKS = (b"iter", b"tep", b"Iter", b"it/s", b"s/it", b"loss", b"Loss")
"""One of these is in each line that `parse_progress` understands."""
PHASE_MARKS = (b"aving", b"aved", b"Evaluati", b"alidation loss", b"'eval_")
"""One of these is in each line that `parse_mark` of the contract understands."""

_LONGEST = 4000
_COLOUR = re.compile(r"(?:\x1b|\\x1b)\[[0-9;]*m")
_TAG = re.compile(r"(?:(\d{1,7}): |\[(?:default)?(?:rank)?(\d{1,7})\]:? ?)")
_NUMBER = r"([-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)(?![a-zA-Z]))"
_STEP = re.compile(
    r"(?<![\w/.])(?:global[_ ]?step|train(?:ing)?[_ ]step|steps?|iteration|iter|batch)['\"]?"
    r" ?[:=#]? *\[?(\d{1,15})(?: ?(?:/|of) ?(\d{1,15}))?(?![\w.]*[\w])",
    re.IGNORECASE,
)
_BAR = re.compile(
    r"^(.{0,80}?)[ :]*(\d{1,3})%\|[^|]{0,400}\| *(\d[\d,]{0,14})/(\d[\d,]{0,14}) "
    r"\[[\d:]+<[^,\]]{1,20}(?:, *(\d+\.?\d*|\?) ?(it/s|s/it|steps?/s|batch/s|ba/s))?([^\]]*)"
)
_BAR_OF_STEPS = re.compile(r"(?:train|fit|epoch|step|iter)", re.IGNORECASE)
_EPOCH = re.compile(r"epoch[ :=]*\[?(\d{1,6})", re.IGNORECASE)
_LOSS = re.compile(
    r"(?<![\w/])(?:train(?:ing)?[_/ ]|reduced_train_|lm[_ ]|avg_|global_avg_)?loss['\"]?"
    rf"(?: value)?\s*[:=]?\s*\[?['\"]?{_NUMBER}",
    re.IGNORECASE,
)
_NORM = re.compile(rf"(?:grad[_ ]?norm|global_norm|gnorm)['\"]?\s*[:=]?\s*['\"]?{_NUMBER}", re.I)
_SCALE = re.compile(rf"loss[_ ]scale['\"]?\s*[:=]?\s*['\"]?{_NUMBER}", re.IGNORECASE)
_SKIPPED = re.compile(r"skipped(?: iterations)?['\"]?\s*[:=]\s*(\d{1,9})", re.IGNORECASE)
_TIME = re.compile(
    r"(?:elapsed[_ ]time[_ ]per[_ ]iter(?:ation)?|iter(?:ation)?[_ ]time|step[_ ]time|time/step|"
    rf"time[_ ]per[_ ]step|train_step_timing|dt)[_ ]?(?:in |\()?(ms|sec|s)?\)?\s*[:=]?\s*{_NUMBER}"
    r" ?(ms|sec|s)?\b",
    re.IGNORECASE,
)
_RATE = re.compile(r"(\d+\.?\d*) ?(it/s|s/it|steps?/s|iters?/s)\b")
_DICT = re.compile(r"\{.*'(?:train_)?loss': ")
_AFTER = re.compile(r"\b(?:eval|valid|validation|test)[_ ]?(?:loss|step)", re.IGNORECASE)


@dataclass(frozen=True)
class Told:
    """What a line tells of the training's progress."""

    point: Point
    """Its step is -1 where the line tells none, as in Hugging Face's."""
    num_steps: int | None = None
    is_bar: bool = False


def split_tag(text: str) -> tuple[int | None, str]:
    """The rank before a line of a merged log (`3: ` ours, `[rank3]:` torchrun's), and the line."""
    match = _TAG.match(text)
    if match is None:
        return None, text
    return int(match.group(1) or match.group(2)), text[match.end() :]


def parse_progress(text: str) -> Told | None:
    """None where the line is not about steps that were done."""
    try:
        return _parse_progress(text[:_LONGEST])
    except (ValueError, OverflowError):
        return None


def _parse_progress(text: str) -> Told | None:
    line = parse_iteration(text)
    if line is not None:
        point = Point(
            step=line.step,
            step_s=_read_values(text).step_s if line.time_ms is None else line.time_ms / 1000,
            loss=line.loss,
            grad_norm=line.grad_norm,
            loss_scale=line.loss_scale,
            skipped=line.skipped or 0,
            nan=line.nan or 0,
        )
        return Told(point, line.num_steps or None)
    text = _COLOUR.sub("", text)
    text = split_tag(text)[1]
    bar = _BAR.search(text)
    if bar is not None:
        return _read_bar(bar)
    if _AFTER.search(text):
        return None
    values = _read_values(text)
    if _DICT.search(text):
        step = _STEP.search(text)
        return Told(replace(values, step=int(step.group(1)) if step else -1))
    step = _STEP.search(text)
    if step is None or (values.loss is None and values.step_s is None and "skipped=" not in text):
        return None
    total = int(step.group(2)) if step.group(2) else None
    return Told(replace(values, step=int(step.group(1))), total or None)


def _read_bar(match: re.Match[str]) -> Told | None:
    name, _, done, total, speed, unit, more = match.groups()
    if name.strip() and not _BAR_OF_STEPS.search(name):
        return None  # of a download, of shards that are read, of a data set that is mapped
    num_done, num_steps = _whole(done), _whole(total)
    epoch = _EPOCH.search(name)
    if epoch is not None:
        num_done += int(epoch.group(1)) * num_steps
    values = _read_values(more or "")
    step_s = _read_rate(speed, unit) if unit else None
    return Told(
        replace(values, step=num_done, step_s=step_s), None if epoch else num_steps, is_bar=True
    )


def _read_values(text: str) -> Point:
    """What a line says besides its step."""
    elapsed, rate = _TIME.search(text), _RATE.search(text)
    step_s = None
    if elapsed is not None and (unit := (elapsed.group(1) or elapsed.group(3) or "").lower()):
        number = _read(elapsed.group(2))
        step_s = None if number is None else number / (1000 if unit == "ms" else 1)
    elif rate is not None:
        step_s = _read_rate(*rate.groups())
    loss = _find(_LOSS, text)
    skipped = _SKIPPED.search(text)
    return Point(
        step=-1,
        step_s=step_s if step_s is None or 0 <= step_s < math.inf else None,
        loss=loss,
        grad_norm=_find(_NORM, text),
        loss_scale=_find(_SCALE, text),
        skipped=int(skipped.group(1)) if skipped and "skipped=" not in skipped.group() else 0,
        nan=int(loss is not None and math.isnan(loss)),
    )


def _read_rate(speed: str, unit: str) -> float | None:
    number = _read(speed)
    if not number:
        return None
    return number if unit == "s/it" else 1 / number


def _find(pattern: re.Pattern[str], text: str) -> float | None:
    match = pattern.search(text)
    return None if match is None else _read(match.group(1))


def _read(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


# The time at which a line says that it was written.

_TIMES = (
    (
        re.compile(
            r"\[?(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,]\d{1,6})?(Z|\+00:?00)?"
        ),
        (1, 2, 3, 4, 5, 6),
    ),
    (re.compile(r"\[?(\d\d)/(\d\d)/(\d{4}) (\d\d):(\d\d):(\d\d)"), (3, 1, 2, 4, 5, 6)),
    # glog: the year is not told.
    (re.compile(r"\[?[EIWF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)"), (0, 1, 2, 3, 4, 5)),
)


def parse_time(text: str, year: int) -> float | None:
    """Of a line that begins with a time, in this machine's zone where it names none."""
    tag = _TAG.match(text)
    begin = tag.end() if tag else 0
    for pattern, order in _TIMES:
        match = pattern.match(text, begin)
        if match is None:
            continue
        numbers = [int(match.group(at)) if at else year for at in order]
        try:
            found = datetime(*numbers)  # type: ignore[arg-type]
            if pattern.groups == 7 and match.group(7):
                return (found - datetime(1970, 1, 1)).total_seconds()
            return found.timestamp()
        except (ValueError, OverflowError, OSError):
            return None
    return None
