"""Parse lines about completed steps, from any trainer.

Status, the restart budget and the report read logs with it, through `steps.StepReader`. Megatron's
spelling is in `training_log`; any other line counts if it names a step and something that only a
step has:

    {'loss': 2.31, 'grad_norm': 1.2, 'epoch': 0.02}                Hugging Face; a bar has the step
     10%|#         | 10/100 [00:10<01:30,  1.00it/s]               tqdm; Lightning's with an epoch
     6/24 ━━━━━━━━ 0s 10ms/step - loss: 1.5788                     Keras
    steps: 10 loss: 2.3400 iter time (s): 0.512 samples/sec: 31.2  DeepSpeed
    [Rank 0] step=10, skipped=0, lr=[0.0001], mom=[[0.9, 0.95]]    DeepSpeed
    [titan] ... step: 10  loss:  7.2  grad_norm:  1.2  memory: ... torchtitan
    iter 10: loss 3.2000, time 130.22ms, mfu 5.00%                 nanoGPT
    Epoch 1 | iter 12 step 3 | loss train: 3.123, val: n/a | ...   litgpt
    {"step": 10, "loss": 2.3, "step_time_s": 0.5}                  JSON lines
    step 10/100 loss 2.3                                           your own

Lines that mention a step that was not done are refused: evaluations, warm-up, checkpoints that are
loaded or called the best, bars of other things than steps. No line makes the parser raise.
"""

from __future__ import annotations

import functools
import math
import os
import re
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Dict, Mapping, Match, Optional, Pattern, Sequence, Tuple

from varuna_core.facts.catalogue import patterns
from varuna_core.records.files import parse_json
from varuna_core.records.logs.training_log import (
    LABELS,
    UNITS_MS,
    Iteration,
    parse_iteration,
    parse_validation,
)

MARKS = (
    b"iter", b"tep", b"Iter", b"it/s", b"s/it", b"loss", b"Loss", b"poch", b"rain", b"atch",
    b"pdate", b"learn:", b"STEP", b"EPOCH", b"LOSS", b"pisode", b"Cost",
)  # fmt: skip
"""Each line that `parse_progress` understands contains one of these."""
NO_STEP = -1
"""The step of a line that names no step, as Hugging Face's."""
LONGEST = 4000
"""Number of characters that are searched in a line of unknown layout."""
SHORTER = 400
"""Number of characters of a line that patterns with polynomial time are matched with."""

_COLOUR = re.compile(r"(?:\x1b|\\x1b)\[[0-9;]*m|[\x08\x0c]+|(?:\\x08)+")
_NESTED = re.compile(r"(?:\x1b|\\x1b)\[A")
"""Pattern of the text that follows a bar of tqdm below another bar, such as an evaluation's."""
_TAG = re.compile(r"(?:(\d{1,7}): |\[(?:default|rank)(\d{1,7})\]:? ?|\[(\d{1,7})\]: ?)")
_WORD = r"[-+]?(?:nan|inf(?:inity)?)(?![a-zA-Z])"
_SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_NUMBER = (
    r"([-+]?(?:\d[\d,]{0,30}(?:\.\d{0,30})?|\.\d+)"
    rf"(?:[eE][-+]?\d+|(?-i:[{''.join(_SCALES)}])(?!\w))?|{_WORD})"
)
"""Pattern of a number, also as logs shorten it for people: 11.5K."""
_FRACTION = rf"([-+]?(?:\d*\.\d+(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+)|{_WORD})"
_COUNT = r"(\d{1,3}(?:[,_']\d{3}){1,5}|\d{1,4}(?:\.\d{1,3})?[kKM]|\d{1,15})"
_STEP = re.compile(
    r"(?<![\w/.-])(?:global[_ ]?step|train(?:ing)?[_ ]step|steps?|iteration|iter|batch)['\"]?"
    rf" ?[:=#]? *\[?{_COUNT}(?: ?(?:/|of) ?{_COUNT})?(?![\w.]*[\w]|[,']\d{{3}}(?!\d))",
    re.IGNORECASE,
)
_PAIR = re.compile(r"(?<![\d/.])\d{1,9}/\d{1,9}(?![\d/.])")
_OPTIMIZER_STEP = re.compile(r" step (\d{1,15}) \|")
"""Pattern of the step in lines of litgpt, which name the pass over a micro-batch before the
step."""
_NOT_DONE = re.compile(
    r"(?<![\w./-])(?:resum(?:e|ed|es|ing)|restor(?:e|ed|ing)|(?:re)?load(?:ed|ing)?|checkpoint|"
    r"best|warm(?:ing)?[ _-]?up|evaluat(?:e|ed|ing|ion)|validat(?:e|ed|ing|ion)|sanity|"
    r"calibrat(?:ing|ion)|autotun(?:e|ing)|"
    r"benchmark(?:ing)?|infer(?:ence|ring)|predict(?:ing|ion)?|generat(?:ed|ing|ion)|"
    r"early[ _-]stop(?:ped|ping)?|since|until|from|before|after|every|next|sav(?:e|ed|ing))"
    r"(?![\w./])|"
    r"(?<![\w./-])(?:(?:eval|valid|val)[\] _:-]*|"
    r"(?:test|dev|micro|sub|inner|dummy|episode)[ _-]*)$",
    re.IGNORECASE,
)
"""Pattern of words before a step that the line mentions but that was not done."""
_BAR = re.compile(
    r"^(.{0,80}?)[ :]*(\d{1,3})%\|[^|]{0,400}\| *(\d[\d,]{0,14})/(\d[\d,]{0,14}) "
    r"\[[\d:]+<[^,\]]{1,20}(?:, *(\d{1,30}(?:\.\d{0,30})?|\?) ?([^\s,\]]{1,20}))?([^\]]*)"
)
_UNITS = re.compile(r"it/s|s/it|(?:steps?|iters?|batch(?:es)?|ba)/s|s/(?:step|iter|batch)")
_BAR_OF_STEPS = re.compile(
    r"(?<![a-z])(?:train(?:ing)?|fit(?:ting)?|epoch|steps?|iter(?:ation)?s?)(?![a-z])",
    re.IGNORECASE,
)
_BAR_OF_OTHERS = re.compile(
    r"(?<![a-z])(?:eval|valid|sanity|test|predict|infer|generat|load|read|writ|sav|fetch|"
    r"download|upload|token|map|filter|sampl|split|shard|prepar|preprocess|cach|index|pack|shuffl|warm|"
    r"calibrat|compil|convert|extract|encod|build|collect)|epochs?\W*$|data|examples|files",
    re.IGNORECASE,
)
_VALUES = re.compile(r"(?:[a-zA-Z][\w .-]{0,20}[:=] {0,9}[-+.\deE]{1,12}%?[;,| ]*){2,12}")
"""Pattern of values in the place of a bar's name, as GANs print them: `d: 1.2; g: 0.9`."""
_ASSIGNED = re.compile("[:=]")
_KERAS = re.compile(
    r"^\W{0,4}(\d{1,9})/(\d{1,9}) (?:[━─=>.\[\] ]{3,80} ?(?:- )?(?:ETA: )?|- )[\d:]{1,9}s?(?= )(.*)"
)
_PER_STEP = re.compile(r"(\d{1,30}(?:\.\d{0,30})?)(us|ms|s)/step")
_RICH = re.compile(
    r"^\W{0,4}Epoch (\d{1,6})/(\d{1,6}) {1,8}[━╺╸ ]{1,200} "
    r"(\d{1,9})/(\d{1,9}) .{0,40}? (\d{1,30}(?:\.\d{0,30})?)(it/s)(.*)"
)
_EPOCH = re.compile(
    r"\bepochs?['\"]?[ :=#]*\[?(\d{1,6})(?: ?(?:/|of) ?(\d{1,6}))?(?![\d.%])", re.IGNORECASE
)
_EPOCH_LAST = re.compile(r"(?<![\d./])(\d{1,6})(?:/(\d{1,6})) ?epochs?\b")
_DICT = re.compile(r"\{[^{]*'(?:train_)?loss': ")
_SHARE = re.compile(r"'epoch': '?(\d{1,6}(?:\.\d{1,18})?)(?![\d.eE])")
"""Pattern of the number of epochs that Hugging Face prints as done, most often with a fraction."""
_AFTER = re.compile(
    r"\b(?:eval|valid|validation|validate|test)[_ ]?(?:loss|step)|'train_runtime'", re.IGNORECASE
)
"""Pattern of words in lines of an evaluation, or of all steps once the training is over."""
_BEST = r"(?:(?<!new )best|lowest|highest|(?<!\d )(?:min|max)(?:imum)?)"
"""Words before a metric that repeats an earlier one. A new best is the last evaluation's; a test
of the best model is an evaluation of its own."""
_EVALUATED = re.compile(
    rf"(?:(?<![a-z])(?P<best>{_BEST}"
    r"(?:[ _-](?!(?:model|checkpoint|weights)\W{1,3}test)[a-z]{1,12}){0,3}"
    r"(?:(?<=epoch)[ :=]{1,3}\d{1,9},?)?[ _/:(-]{1,3})|\b)"
    r"(?P<split>train(?:ing)?|eval|valid|vali|val|validation|test|dev)(?:_\d)?(?:'s)?[_ /-]?"
    r"(?!_?best)(?P<name>(?:\w{1,20}[_-])?(?:(?:log)?loss|ppl|perplexity|acc(?:uracy)?|error|time))"
    r"['\"]?(?:(?: (?:at|for|after) (?:global )?(?:step|epoch|iteration))?"
    r" {1,9}\d{1,15}(?=: {1,9}[-+.\d]))?"
    rf"\s{{0,9}}[:=]?\s{{0,9}}['\"]?(?:tensor\()?(?P<word>{_NUMBER})",
    re.IGNORECASE,
)
"""Pattern of a metric in a line of an evaluation, after the name of a part of the data; `train`
counts only beside another part. A step may be between the metric's name and a colon."""
_REVERSED = re.compile(
    r"(?:(?P<best>best )|\b)(?P<name>loss|acc|ppl|error)_(?P<split>train|eval|valid|val|test|dev)"
    rf"['\"]?\s{{0,9}}[:=]?\s{{0,9}}(?P<word>{_NUMBER})",
    re.IGNORECASE,
)
_HEADED = re.compile(
    r"(?<![a-z/_.])(dev|test|eval|valid|val|validation)(?:uation|ate)?(?![a-z_/.-])", re.IGNORECASE
)
_PART = re.compile(
    r"train|best|lowest|batch|(?<![\d/.])[\d.]{1,9}(?:it)?/\d{1,9}(?![\d/.])", re.IGNORECASE
)
"""Pattern of words and counts that show that the loss in a line is not only that of the whole
evaluation."""
_SPLITS = {"training": "train", "vali": "val", "valid": "val", "validation": "val"}

# How trainers spell what a step has.

_BETWEEN = r"['\"]?\s{0,9}[:=]?\s{0,9}\[*['\"]?"
_LOSS = re.compile(
    r"(?<![\w/])(?:train(?:ing)?[_/ ]|reduced_train_|lm[_ ]|avg_|global_avg_|total_)?loss['\"]?"
    rf"(?: train| value)?(?:\s*[:=]\s*\[?['\"]?{_NUMBER}|\s+\[?{_FRACTION})",
    re.IGNORECASE,
)
_WHOLE = {
    "all", "and", "at", "average", "avg", "batch", "ce", "cost", "cur", "current", "done",
    "epoch", "final", "global", "has", "i", "iter", "iteration", "last", "lm", "mean", "mini",
    "minibatch", "nll", "objective", "overall", "reduced", "running", "smooth", "smoothed",
    "step", "sum", "the", "total", "train", "training", "update", "with",
}  # fmt: skip
"""Words before `loss` that do not make it a part of a loss, as in `value loss` of PPO."""
_NAME_OF_LOSS = re.compile(
    rf"(?:(?<![a-z])((?:{_BEST}[_ .-])?[a-z]{{1,30}})[_ .-])?(?<![a-z])(?:train)?loss"
    r"((?:/[a-z]{1,20}){0,3})['\"]?\W{0,9}\Z",
    re.IGNORECASE,
)
_MEAN = re.compile(
    r"(?<![a-z])(?:avg|average|mean|running|smooth(?:ed)?)[_ .-]loss['\"]?\W{0,9}\Z", re.IGNORECASE
)
MOST_NAME = 80
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
_TIME = re.compile(  # a bare time in seconds may be that since the start
    r"(?:elapsed[_ ]time[_ ]per[_ ]iter(?:ation)?|iter(?:ation)?[_ ]time|step[_ ]time|time/step|"
    r"time[_ ]per[_ ]step|train_step_timing|dt|(?<=, )time(?= [\d.]{1,30} ?ms))"
    r"[_ ]?(?:in |\()?(ms|sec|s)?\)?"
    rf"\s{{0,9}}[:=]?\s{{0,9}}{_NUMBER} ?(ms|sec|s)?\b(?![.,:]?\d)",
    re.IGNORECASE,
)
_RATE = re.compile(r"(\d{1,30}(?:\.\d{0,30})?) ?(it/s|s/it|steps?/s|iters?/s)\b")
_HEAD = re.compile(r"\biteration +\d+/ *\d+ *\|")
_CLOSED = ("elapsed time per ", "lm loss", *LABELS)
"""Pattern of fields that Megatron ends with a bar: without the bar, the number may be truncated."""


def split_tag(text: str) -> Tuple[Optional[int], str]:
    """Split a merged log's line into rank (`3: ` ours, `[rank3]:` torchrun's) and line."""
    match = _TAG.match(text)
    if match is None:
        return None, text
    return int(match.group(match.lastindex or 0)), text[match.end() :]


def clean(text: str) -> str:
    """Return the text without colours and characters that move a terminal's cursor."""
    return text if text.isprintable() and "\\x" not in text else _COLOUR.sub("", text)


def is_nested(text: str) -> bool:
    """Return True for a progress bar that is drawn below another one."""
    return "[A" in text and _NESTED.search(text) is not None


class PatternError(ValueError):
    """A pattern of progress lines that cannot be used; the message says why."""


GROUPS = {
    "step": "the completed step (required)",
    "total": "total number of steps",
    "epoch": "epoch, if steps are counted within each epoch",
    "loss": "loss",
    "seconds": "seconds that the step took",
    "ms": "milliseconds that the step took",
    "per_second": "steps a second",
    "grad_norm": "norm of the gradients",
    "lr": "learning rate",
    "samples_per_s": "samples a second",
    "tokens_per_s": "tokens a second",
}
"""Named groups of a user's own pattern, and what each is."""


def compile_pattern(text: str) -> Pattern[str]:
    """Compile a user's pattern of progress lines; raise PatternError if it cannot be used."""
    if len(text) > LONGEST:
        raise PatternError(f"{text[:20]!r}... has {len(text):,} characters, longer than any line")
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"{text!r} is not a regular expression: {error}") from None
    try:
        _choose_cut(text)
    except patterns.PatternError as error:
        raise PatternError(f"{text!r} may take extremely long on some line: {error}") from None
    unknown = [name for name in pattern.groupindex if name not in GROUPS]
    if unknown:
        raise PatternError(f"has an unknown group {unknown[0]!r}; groups: {', '.join(GROUPS)}")
    if "step" not in pattern.groupindex:
        raise PatternError("needs a group named step, such as (?P<step>\\d+)")
    return pattern


def read_pattern(text: Any, folder: Optional[Path] = None) -> Optional[Pattern[str]]:
    """Return the pattern of a plan; None if it has none, or if this version would refuse it.

    Also return None if `folder` belongs to another user, whose pattern and lines may be made to
    take very long together; known formats are read without it.
    """
    try:
        if not isinstance(text, str) or (
            folder is not None and os.lstat(folder).st_uid != os.geteuid()
        ):
            return None
        return compile_pattern(text)
    except (PatternError, OSError):
        return None


@functools.lru_cache(maxsize=64)
def _choose_cut(text: str) -> int:
    """Return the number of characters of a line to match with a user's pattern: fewer if several of
    its repeats may end anywhere, so that even the worst line takes at most seconds."""
    return LONGEST if patterns.count_steps(text) <= patterns.MOST_STEPS else SHORTER


def parse_own(pattern: Pattern[str], text: str) -> Optional[Iteration]:
    """Parse a line with the user's pattern; return None if it does not match or gives no step."""
    match = pattern.search(split_tag(clean(text[:LONGEST]))[1][: _choose_cut(pattern.pattern)])
    if match is None:
        return None
    found = {
        name: number
        for name, word in match.groupdict().items()
        if word is not None
        for number in [_parse_number(word.strip())]
        if number is not None
    }
    step = found.get("step")
    if step is None or not 0 <= step < 1e15:
        return None
    time_ms = _choose_time_ms(found.get("seconds"), found.get("ms"), found.get("per_second"))
    loss = found.get("loss")
    return Iteration(
        int(step),
        num_steps=_check_total(found.get("total")),
        time_ms=_check_time(time_ms),
        learning_rate=found.get("lr"),
        losses={} if loss is None else {"loss": loss},
        grad_norm=found.get("grad_norm"),
        nan=1 if loss is not None and math.isnan(loss) else None,
        samples_per_s=found.get("samples_per_s"),
        tokens_per_s=found.get("tokens_per_s"),
        epoch=_check_total(found.get("epoch")),
    )


def parse_progress(text: str) -> Optional[Iteration]:
    """Parse a line of any trainer as if it were the first; None if it has no completed step."""
    found = parse_line(text)
    if found is None or found.is_evaluation:
        return None
    if not found.is_bar or found.epoch is None or not found.num_steps:
        return found
    step = found.step + found.epoch * found.num_steps
    return replace(found, step=step, num_steps=None)


def parse_line(text: str) -> Optional[Iteration]:
    """Parse a line as `parse_progress` does, but keep the printed step and number of steps, which
    may be those of an epoch. Lines of an evaluation that name a step are also returned."""
    try:
        validation = parse_validation(text) if " loss at " in text else None
        if validation is not None:
            return Iteration(validation[0], evaluations={validation[1]: validation[2]})
        line = parse_iteration(text)
        return _parse_free(text[:LONGEST]) if line is None else _complete(line, text)
    except (ValueError, OverflowError, RecursionError):
        return None


def parse_epoch(text: str) -> Optional[Tuple[int, Optional[int]]]:
    """Return the epoch and the number of epochs of a line such as `Epoch 2/3`."""
    match = _EPOCH.search(text[:LONGEST]) or _EPOCH_LAST.search(text[:LONGEST])
    if match is None:
        return None
    return int(match.group(1)), int(match.group(2)) if match.group(2) else None


def join_lines(first: Iteration, second: Iteration) -> Iteration:
    """Merge two lines about one step; the second one's values take precedence."""
    return replace(
        first,
        **{
            item.name: getattr(second, item.name)
            for item in fields(second)
            if getattr(second, item.name) not in (None, {})
        },
    )


def _complete(line: Iteration, text: str) -> Iteration:
    """Add values that only relatives of Megatron print, such as NeMo's time of a step."""
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
        whole = _drop_torn(text[:LONGEST])
        time_ms = _find_time_ms(whole, whole.lower())
    rate = line.learning_rate
    return replace(
        line,
        num_steps=line.num_steps or None,
        learning_rate=line.others.get("lr") if rate is None else rate,
        time_ms=_check_time(time_ms),
        samples_per_s=line.others.get("samples per second"),
    )


def _drop_torn(text: str) -> str:
    """Drop the last field of a Megatron line that was truncated within that field."""
    if _HEAD.search(text):
        whole, bar, rest = text.rpartition("|")
        if rest.strip().startswith(_CLOSED):
            return whole + bar
    return text


def _parse_free(text: str) -> Optional[Iteration]:
    is_below = is_nested(text)
    text = _drop_torn(split_tag(clean(text))[1])
    if "%|" in text:
        bar = _BAR.search(text)
        if bar is not None:
            return _parse_bar(bar, is_below)
    value = _read_object(text) if "{" in text else None
    if value is not None:
        if _find_key(value, _KEYS["step"]) is None:
            value = {**_read_step(text[: text.index("{")]), **value}
        return _parse_object(value)
    if "it/s" in text or "s/it" in text or "step" in text or " - " in text or "poch" in text:
        other = _parse_other_bar(text)
        if other is not None:
            return other
    step, is_dict = _STEP.search(text), "{" in text and _DICT.search(text) is not None
    if step is not None and not step.group(1)[-1].isdecimal() and _PAIR.search(text):
        return None  # thousands of steps beside an exact count
    if (step is None and not is_dict) or _AFTER.search(text):
        return _parse_evaluation(text, step)
    if is_dict:
        share = _SHARE.search(text) if step is None else None
        others = {} if share is None else {"epoch": float(share.group(1))}
        return parse_values(text, others=others, **(_name_step(step) if step else {}))
    if step is None or (step.start() and _NOT_DONE.search(text, 0, step.start())):
        return _parse_evaluation(text, None)
    facts = _name_step(step)
    inner = _OPTIMIZER_STEP.search(text, step.end()) if "| iter " in text else None
    if inner is not None:  # the time is that of a micro-batch
        facts = {"step": int(inner.group(1)), "time_ms": None}
    epoch = _EPOCH.search(text) if "poch" in text else None
    if epoch is not None:
        facts["epoch"] = int(epoch.group(1))
        facts["num_epochs"] = int(epoch.group(2)) if epoch.group(2) else None
    found = parse_values(text, **facts)
    if found.evaluations and (found.loss is None or _is_estimated(text, found)):
        return _parse_evaluation(text, step)
    if found.loss is None and found.time_ms is None and "skipped=" not in text:
        return None
    return found


def _is_estimated(text: str, found: Iteration) -> bool:
    """Return True if the loss of training was estimated in an evaluation, not in a step."""
    values = (found.time_ms, found.learning_rate, found.grad_norm, found.tokens_per_s)
    beside = _find_evaluations(text)[0].get("train", {}).get("loss")
    return beside == found.loss and all(value is None for value in values)


def _parse_evaluation(text: str, step: Optional[Match[str]]) -> Optional[Iteration]:
    """Return the metrics of an evaluation, including estimates for training; None without any."""
    found, text = _find_evaluations(text)
    headed = None if found or _PART.search(text) else _HEADED.search(text)
    loss = None if headed is None else _find_loss(text[headed.end() :])
    if headed is not None and loss is not None:
        split = headed.group(1).lower()
        found = {_SPLITS.get(split, split): {"loss": loss}}
    if not found.keys() - {"train"}:
        return None
    return Iteration(_parse_whole(step.group(1)) if step else NO_STEP, evaluations=found)


def _find_evaluations(text: str) -> Tuple[Dict[str, Dict[str, float]], str]:
    """Return metrics by part of the data, training last, and the line without the other parts."""
    found: Dict[str, Dict[str, float]] = {}
    low = text.lower()  # a word is found much faster than a pattern that is not there
    if "val" in low or "test" in low or "dev" in low:
        for pattern in (_EVALUATED, _REVERSED):
            text = pattern.sub(functools.partial(_take_out, found), text)
        if "train" in found:
            found["train"] = found.pop("train")
    return found, text


def _take_out(found: Dict[str, Dict[str, float]], match: Match[str]) -> str:
    """Add a metric to `found`, unless it repeats an earlier one; return its replacement text."""
    number, split = _parse_number(match["word"]), match["split"].lower()
    split = _SPLITS.get(split, split)
    if number is not None and match["best"] is None:
        found.setdefault(split, {})[match["name"].lower()] = number
    return match.group() if split == "train" else ""


def _name_step(match: Match[str]) -> Dict[str, Any]:
    total = _parse_whole(match.group(2) or "0")
    return {"step": _parse_whole(match.group(1)), "num_steps": total or None}


def _parse_bar(match: Match[str], is_below: bool) -> Optional[Iteration]:
    name, _, done, total, speed, unit, more = match.groups()
    if unit and not _UNITS.fullmatch(unit):
        return None
    time_ms = _parse_rate_ms(speed, unit) if speed and unit else None
    return _make_bar(name, _parse_whole(done), _parse_whole(total), time_ms, more, is_below)


def find_bar_total(text: str) -> Optional[int]:
    """Return the number after `/` in any bar of tqdm; None for another line."""
    bar = _BAR.search(split_tag(clean(text[:LONGEST]))[1]) if "%|" in text else None
    return None if bar is None else _parse_whole(bar.group(4))


def _make_bar(
    name: str, done: int, total: int, time_ms: Optional[float], more: str, is_below: bool
) -> Optional[Iteration]:
    """Return the values of a progress bar; None for downloads, read shards and mapped data sets."""
    name = name.strip()
    if name and not _BAR_OF_STEPS.search(name) and _VALUES.fullmatch(name):
        name, more = "", f"{name} {more}"
    if not name and _BAR_OF_OTHERS.search(more) and not _ASSIGNED.search(more):
        return None
    if name and (not _BAR_OF_STEPS.search(name) or _BAR_OF_OTHERS.search(name)):
        return None
    values = parse_values(f"{name} {more}")
    if not name and is_below and values.loss is None:
        return None
    epoch = _EPOCH.search(name) if name else None
    return replace(
        values,
        step=done,
        num_steps=total or None,
        epoch=int(epoch.group(1)) if epoch else None,
        num_epochs=int(epoch.group(2)) if epoch and epoch.group(2) else None,
        is_from_zero="v_num" in more,  # Lightning's
        time_ms=_check_time(time_ms),
        is_bar=True,
        is_named=bool(name) or values.loss is not None,
    )


def _parse_other_bar(text: str) -> Optional[Iteration]:
    """Parse a progress bar of Keras or rich."""
    match = _RICH.search(text)
    if match is not None:
        epoch, epochs, done, total, speed, unit, more = match.groups()
        time_ms = _parse_rate_ms(speed, unit)
        found = _make_bar(f"Epoch {epoch}", int(done), int(total), time_ms, more, False)
        return (
            None if found is None else replace(found, num_epochs=int(epochs) + 1, is_from_zero=True)
        )
    match = _KERAS.search(text)
    if match is None:
        return None
    done, total, more = match.groups()
    took, values = _PER_STEP.search(more), parse_values(more)
    if took is None and values.loss is None:
        return None
    units = {"us": 0.001, "ms": 1.0, "s": 1000.0}
    return replace(
        values,
        step=int(done),
        num_steps=int(total) or None,
        time_ms=_check_time(float(took.group(1)) * units[took.group(2)] if took else None),
        is_bar=True,
        is_named=values.loss is not None,
    )


# A line of JSON: keys as loggers name them, the first that is there.

_KEYS: Dict[str, Sequence[str]] = {
    "step": ("step", "global_step", "iteration", "iter", "train/step", "train/global_step",
             "num_updates", "update", "training_step", "train_step", "_step", "batch"),
    "total": ("total_steps", "max_steps", "num_steps", "total", "train_iters", "max_iters"),
    "loss": ("loss", "train_loss", "train/loss", "lm_loss", "lm loss", "training_loss",
             "loss/train", "avg_loss"),
    "s": ("step_time_s", "step_time", "iter_time", "iteration_time", "time_per_step", "step_s",
          "dt", "train/step_time"),
    "ms": ("step_time_ms", "iter_time_ms", "elapsed_time_per_iteration_ms", "step_ms", "dt_ms",
           "time_ms"),
    "per_second": ("steps_per_second", "it/s", "steps_per_sec", "iterations_per_second"),
    "lr": ("lr", "learning_rate", "train/lr", "train/learning_rate"),
    "norm": ("grad_norm", "gnorm", "train/grad_norm", "grad-norm"),
    "tokens": ("tokens_per_s", "tokens_per_sec", "tokens_per_second", "tok/s", "tps"),
    "samples": ("samples_per_s", "samples_per_sec", "samples_per_second"),
    "epoch": ("epoch", "train/epoch"),
}  # fmt: skip
_OF_EVALUATIONS = ("eval", "val", "valid", "validation", "test")
_OF_EVALUATION = re.compile(r"(eval|val|valid|validation|test|dev)[_/ ]((?!best).+)", re.IGNORECASE)


def _read_object(text: str) -> Optional[Dict[str, Any]]:
    """Return the JSON object with which a line ends."""
    body = text[text.index("{") :].strip()
    if not body.endswith("}") or '"' not in body:
        return None
    value = parse_json(body)
    return value if isinstance(value, dict) else None


def _read_step(text: str) -> Dict[str, int]:
    """Return the step and the total before an object: `step 7/90 {"loss": 2.5}`."""
    step = _STEP.search(text)
    if step is None or _AFTER.search(text) or _NOT_A_STEP.search(text) or _NOT_DONE.search(text):
        return {}
    found = {"step": _parse_whole(step.group(1))}
    if step.group(2):
        found["total"] = _parse_whole(step.group(2))
    epoch = _EPOCH.search(text) if "poch" in text else None
    if epoch is not None:
        found["epoch"] = int(epoch.group(1))
    return found


def _parse_object(value: Dict[str, Any]) -> Optional[Iteration]:
    """Parse a line's JSON object; return None if it has no step."""
    nested = [item for item in value.values() if isinstance(item, dict)]
    if nested and not any(name in value for name in _KEYS["loss"]):
        value = {**value, **nested[0]}  # {"step": 3, "metrics": {"loss": 2.0}}
    found = {key: _find_key(value, names) for key, names in _KEYS.items()}
    step, loss = found["step"], found["loss"]
    time_ms = _choose_time_ms(found["s"], found["ms"], found["per_second"])
    if step is None or not 0 <= step < 1e15:
        return None
    evaluations = _read_evaluations(value)
    if loss is None and any(str(key).lower().startswith(_OF_EVALUATIONS) for key in value):
        return Iteration(int(step), evaluations=evaluations) if evaluations else None
    if loss is None and time_ms is None:
        return None
    words = [value.get(key) for key in ("split", "phase", "mode", "event", "type", "msg", "stage")]
    if any(isinstance(word, str) and _NOT_A_STEP.search(word) for word in words):
        return None
    total, epoch = found["total"], found["epoch"]
    return Iteration(
        int(step),
        num_steps=_check_total(total),
        time_ms=_check_time(time_ms),
        learning_rate=found["lr"],
        losses={} if loss is None else {"loss": loss},
        grad_norm=found["norm"],
        nan=1 if loss is not None and math.isnan(loss) else None,
        samples_per_s=found["samples"],
        tokens_per_s=found["tokens"],
        epoch=int(epoch) if epoch is not None and epoch == epoch // 1 else None,
        evaluations=evaluations,
    )


def _read_evaluations(value: Mapping[str, Any]) -> Dict[str, Dict[str, float]]:
    found: Dict[str, Dict[str, float]] = {}
    for key, item in value.items():
        named = _OF_EVALUATION.fullmatch(str(key)[:80])
        if named and isinstance(item, (int, float)) and not isinstance(item, bool):
            split = named.group(1).lower()
            found.setdefault(_SPLITS.get(split, split), {})[named.group(2).lower()] = float(item)
    return found


_NOT_A_STEP = re.compile(r"eval|val|test|warm|resum|load|best|sav|checkpoint|infer", re.IGNORECASE)


def _find_key(value: Dict[str, Any], names: Sequence[str]) -> Optional[float]:
    for name in names:
        item = value.get(name)
        if isinstance(item, str):
            item = _parse_number(item)
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            return float(item)
    return None


def _check_total(number: Optional[float]) -> Optional[int]:
    return int(number) if number is not None and 0 < number < 1e15 else None


def parse_values(text: str, **facts: Any) -> Iteration:
    """Parse the values of a line besides its step; `facts` are fields that are already known."""
    evaluations, text = _find_evaluations(text)
    evaluations.pop("train", None)
    low = text.lower()
    loss = _find_loss(text) if "loss" in low else None
    skipped = _SKIPPED.search(text) if "skipped" in low else None
    is_rate = "tokens" in low or "tps" in low
    known: Dict[str, Any] = {
        "step": NO_STEP,
        "time_ms": _check_time(_find_time_ms(text, low)),
        "learning_rate": _find(_RATE_OF_LEARNING, text) if "lr" in low or "rate" in low else None,
        "losses": {} if loss is None else {"loss": loss},
        "loss_scale": _find(_SCALE, text) if "scale" in low else None,
        "grad_norm": _find(_NORM, text) if "norm" in low else None,
        # DeepSpeed's `skipped=` counts from the run's beginning.
        "skipped": int(skipped.group(1)) if skipped and "skipped=" not in skipped.group() else None,
        "nan": 1 if loss is not None and math.isnan(loss) else None,
        "samples_per_s": _find(_SAMPLES, text) if "samples" in low else None,
        "tokens_per_s": _find(_TOKENS, text) if is_rate else None,
    }
    if evaluations:
        known["evaluations"] = evaluations
    known.update(facts)
    return Iteration(**known)


def names_loss(before: str) -> bool:
    """Return True if the text up to a number names the whole loss of a training."""
    named = _NAME_OF_LOSS.search(before[-MOST_NAME:])
    if named is None:
        return False
    words = [named.group(1) or "", *named.group(2).split("/")]
    return all(word.lower() in _WHOLE for word in words if word)


def names_mean(before: str) -> bool:
    """Return True if the text up to a number names a mean over several steps."""
    return _MEAN.search(before[-MOST_NAME:]) is not None


def _find_loss(text: str) -> Optional[float]:
    """Return the loss of a step; a mean over several steps only if the line has no other loss."""
    mean = None
    for match in _LOSS.finditer(text):
        before = text[: match.start()] + match.group().partition("oss")[0] + "oss"
        if names_loss(before):
            number = _parse_number(match.group(match.lastindex or 0))
            if not names_mean(before):
                return number
            mean = number if mean is None else mean
    return mean


def _find_time_ms(text: str, low: str) -> Optional[float]:
    has_word = "time" in low or "timing" in low or "dt" in low
    elapsed = _TIME.search(text) if has_word else None
    rate = _RATE.search(text) if "/s" in low or "s/it" in low else None
    if elapsed is not None:
        unit = (elapsed.group(1) or elapsed.group(3) or "").lower()
        if unit:  # a bare number may be of either
            number = _parse_number(elapsed.group(2))
            return None if number is None else number * UNITS_MS[unit]
    return _parse_rate_ms(rate.group(1), rate.group(2)) if rate is not None else None


def _choose_time_ms(
    seconds: Optional[float], ms: Optional[float], per_second: Optional[float]
) -> Optional[float]:
    """Return the time of a step from the first of these values that is known."""
    if seconds is not None:
        return seconds * 1000
    if ms is not None:
        return ms
    return 1000 / per_second if per_second else None


def _check_time(time_ms: Optional[float]) -> Optional[float]:
    return time_ms if time_ms is not None and 0 <= time_ms < math.inf else None


def _parse_rate_ms(speed: str, unit: str) -> Optional[float]:
    number = _parse_number(speed)
    if not number:
        return None
    return 1000 * number if unit.startswith("s/") else 1000 / number


def _find(pattern: Pattern[str], text: str) -> Optional[float]:
    match = pattern.search(text)
    return None if match is None else _parse_number(match.group(match.lastindex or 0))


def _parse_number(text: str) -> Optional[float]:
    scale = _SCALES.get(text[-1:])
    try:
        number = float((text if scale is None else text[:-1]).replace(",", ""))
    except ValueError:
        return None
    return number if scale is None else number * scale


def _parse_whole(text: str) -> int:
    times = {"k": 10**3, "K": 10**3, "M": 10**6}.get(text[-1:], 1)
    number = text.rstrip("kKM").replace(",", "").replace("'", "")
    return int(number) if times == 1 else round(float(number) * times)


# The time at which a line says that it was written.

_TIMES = (
    (
        re.compile(
            r"\[?(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,]\d{1,6})?(Z|\+00:?00)?"
        ),
        (1, 2, 3, 4, 5, 6),
    ),
    (re.compile(r"\[?(\d\d)/(\d\d)/(\d{4}) (\d\d):(\d\d):(\d\d)"), (3, 1, 2, 4, 5, 6)),
    # glog: without a year.
    (re.compile(r"\[?[EIWF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)"), (0, 1, 2, 3, 4, 5)),
)


def parse_time(text: str, year: int) -> Optional[float]:
    """Return the time with which a line begins, in this machine's zone if it names no zone."""
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
