"""One reader for lines about steps that were done, whichever trainer printed them.

Status, the autoscaler and the report read logs with it. Megatron's spelling is that of
`training_log`; beyond it a line counts if it names a step and something that only a step has:

    {'loss': 2.31, 'grad_norm': 1.2, 'epoch': 0.02}                Hugging Face; a bar has the step
     10%|#         | 10/100 [00:10<01:30,  1.00it/s]               tqdm; Lightning's with an epoch
    steps: 10 loss: 2.3400 iter time (s): 0.512 samples/sec: 31.2  DeepSpeed
    [Rank 0] step=10, skipped=0, lr=[0.0001], mom=[[0.9, 0.95]]    DeepSpeed
    [titan] ... step: 10  loss:  7.2  grad_norm:  1.2  memory: ... torchtitan
    iter 10: loss 3.2000, time 130.22ms, mfu 5.00%                 nanoGPT
    step 10/100 loss 2.3                                           your own

Pure, and no line makes it raise.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from datetime import datetime
from typing import Match, Optional, Pattern, Tuple

from varuna_core.records.logs.training_log import LABELS, UNITS_MS, Iteration, parse_iteration

MARKS = (b"iter", b"tep", b"Iter", b"it/s", b"s/it", b"loss", b"Loss")
"""One of these is in each line that `parse_progress` understands."""
NO_STEP = -1
"""The step of a line that names none, as Hugging Face's."""
LONGEST = 4000
"""Characters that are searched of a line in no known layout."""

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
_DICT = re.compile(r"\{.*'(?:train_)?loss': ")
_AFTER = re.compile(
    r"\b(?:eval|valid|validation|test)[_ ]?(?:loss|step)|'train_runtime'", re.IGNORECASE
)
"""Of an evaluation, or of all steps once the training is over."""

# How trainers spell what a step has.

_BETWEEN = r"['\"]?\s*[:=]?\s*\[*['\"]?"
_LOSS = re.compile(
    r"(?<![\w/])(?:train(?:ing)?[_/ ]|reduced_train_|lm[_ ]|avg_|global_avg_)?loss['\"]?"
    rf"(?: value)?\s*[:=]?\s*\[?['\"]?{_NUMBER}",
    re.IGNORECASE,
)
_NORM = re.compile(rf"(?:grad[_ ]?norm|global_norm|gnorm){_BETWEEN}{_NUMBER}", re.IGNORECASE)
_SCALE = re.compile(rf"loss[_ ]scale{_BETWEEN}{_NUMBER}", re.IGNORECASE)
_RATE_OF_LEARNING = re.compile(
    rf"(?<![\w/])(?:learning[_ ]rate|lr)['\"]?\s*[:=]\s*\[*['\"]?{_NUMBER}", re.IGNORECASE
)
_SAMPLES = re.compile(
    rf"samples(?:/s(?:ec)?|[_ ]per[_ ]sec(?:ond)?){_BETWEEN}{_NUMBER}", re.IGNORECASE
)
_TOKENS = re.compile(
    rf"(?:tokens(?:/s(?:ec)?|[_ ]per[_ ]sec(?:ond)?)|\btps){_BETWEEN}{_NUMBER}", re.IGNORECASE
)
_SKIPPED = re.compile(r"skipped(?: iterations)?['\"]?\s*[:=]\s*(\d{1,9})", re.IGNORECASE)
_TIME = re.compile(
    r"(?:elapsed[_ ]time[_ ]per[_ ]iter(?:ation)?|iter(?:ation)?[_ ]time|step[_ ]time|time/step|"
    r"time[_ ]per[_ ]step|train_step_timing|dt|(?<=, )time(?= \d))[_ ]?(?:in |\()?(ms|sec|s)?\)?"
    rf"\s*[:=]?\s*{_NUMBER} ?(ms|sec|s)?\b",
    re.IGNORECASE,
)
_RATE = re.compile(r"(\d+\.?\d*) ?(it/s|s/it|steps?/s|iters?/s)\b")
_HEAD = re.compile(r"\biteration +\d+/ *\d+ *\|")
_CLOSED = ("elapsed time per ", "lm loss", *LABELS)
"""Fields that Megatron ends with a bar: where none follows, the number may be cut."""


def split_tag(text: str) -> Tuple[Optional[int], str]:
    """The rank before a line of a merged log (`3: ` ours, `[rank3]:` torchrun's), and the line."""
    match = _TAG.match(text)
    if match is None:
        return None, text
    return int(match.group(1) or match.group(2)), text[match.end() :]


def parse_progress(text: str) -> Optional[Iteration]:
    """None where the line is not about steps that were done."""
    try:
        line = parse_iteration(text)
        return _parse_free(text[:LONGEST]) if line is None else _complete(line, text)
    except (ValueError, OverflowError):
        return None


def join_lines(first: Iteration, second: Iteration) -> Iteration:
    """Two lines about one step: the second wins where both tell a thing."""
    return replace(
        first,
        **{
            item.name: getattr(second, item.name)
            for item in fields(second)
            if getattr(second, item.name) not in (None, {})
        },
    )


def _complete(line: Iteration, text: str) -> Iteration:
    """Megatron's line with what only its kin says, such as NeMo's time of a step."""
    time_ms = line.time_ms
    if (
        time_ms is not None
        and 0 <= time_ms < math.inf
        and line.num_steps
        and line.learning_rate is not None
        and "samples per second" not in line.others
    ):
        return line  # nearly all lines: a copy takes a tenth of their time
    if time_ms is None:
        time_ms = _find_time_ms(_drop_torn(text[:LONGEST]))
    rate = line.learning_rate
    return replace(
        line,
        num_steps=line.num_steps or None,
        learning_rate=line.others.get("lr") if rate is None else rate,
        time_ms=_check_time(time_ms),
        samples_per_s=line.others.get("samples per second"),
    )


def _drop_torn(text: str) -> str:
    """Without the last field of a Megatron line that was cut within it."""
    if _HEAD.search(text):
        whole, bar, rest = text.rpartition("|")
        if rest.strip().startswith(_CLOSED):
            return whole + bar
    return text


def _parse_free(text: str) -> Optional[Iteration]:
    text = _drop_torn(split_tag(_COLOUR.sub("", text))[1])
    bar = _BAR.search(text)
    if bar is not None:
        return _parse_bar(bar)
    step, is_dict = _STEP.search(text), _DICT.search(text) is not None
    if (step is None and not is_dict) or _AFTER.search(text):
        return None
    values = _parse_values(text)
    if is_dict:
        return replace(values, step=int(step.group(1)) if step else NO_STEP)
    if step is None or (values.loss is None and values.time_ms is None and "skipped=" not in text):
        return None
    total = int(step.group(2)) if step.group(2) else None
    return replace(values, step=int(step.group(1)), num_steps=total or None)


def _parse_bar(match: Match[str]) -> Optional[Iteration]:
    name, _, done, total, speed, unit, more = match.groups()
    if name.strip() and not _BAR_OF_STEPS.search(name):
        return None  # of a download, of shards that are read, of a data set that is mapped
    num_done, num_steps = _parse_whole(done), _parse_whole(total)
    epoch = _EPOCH.search(name)
    if epoch is not None:
        num_done += int(epoch.group(1)) * num_steps
    return replace(
        _parse_values(more or ""),
        step=num_done,
        num_steps=None if epoch else num_steps,
        time_ms=_check_time(_parse_rate_ms(speed, unit) if unit else None),
        is_bar=True,
    )


def _parse_values(text: str) -> Iteration:
    """What a line says besides its step."""
    loss = _find(_LOSS, text)
    skipped = _SKIPPED.search(text)
    return Iteration(
        NO_STEP,
        time_ms=_check_time(_find_time_ms(text)),
        learning_rate=_find(_RATE_OF_LEARNING, text),
        losses={} if loss is None else {"loss": loss},
        loss_scale=_find(_SCALE, text),
        grad_norm=_find(_NORM, text),
        # DeepSpeed's `skipped=` counts from the run's beginning.
        skipped=int(skipped.group(1)) if skipped and "skipped=" not in skipped.group() else None,
        nan=1 if loss is not None and math.isnan(loss) else None,
        samples_per_s=_find(_SAMPLES, text),
        tokens_per_s=_find(_TOKENS, text),
    )


def _find_time_ms(text: str) -> Optional[float]:
    elapsed, rate = _TIME.search(text), _RATE.search(text)
    if elapsed is not None:
        unit = (elapsed.group(1) or elapsed.group(3) or "").lower()
        if unit:  # a bare number may be of either
            number = _parse_number(elapsed.group(2))
            return None if number is None else number * UNITS_MS[unit]
    return _parse_rate_ms(rate.group(1), rate.group(2)) if rate is not None else None


def _check_time(time_ms: Optional[float]) -> Optional[float]:
    return time_ms if time_ms is not None and 0 <= time_ms < math.inf else None


def _parse_rate_ms(speed: str, unit: str) -> Optional[float]:
    number = _parse_number(speed)
    if not number:
        return None
    return 1000 * number if unit == "s/it" else 1000 / number


def _find(pattern: Pattern[str], text: str) -> Optional[float]:
    match = pattern.search(text)
    return None if match is None else _parse_number(match.group(1))


def _parse_number(text: str) -> Optional[float]:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _parse_whole(text: str) -> int:
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


def parse_time(text: str, year: int) -> Optional[float]:
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
