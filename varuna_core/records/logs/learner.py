# ruff: noqa: B905 - Python 3.8 has no `strict`
"""Learn counters: numbers of lines that grow as steps do, for logs without known lines of steps.

A line is reduced to its shape, the text with its numbers masked; each number of a shape keeps how
it grew:

    [ep 0] it 79/80 | loss 2.31         shape `[ep #] it #/# | loss #`
    [ep 0] it 80/80 | loss 2.29         2nd number: grew by one, again and again: the counter
    [ep 1] it  1/80 | loss 2.33         3rd: stands still behind a slash: the total
                                        1st: grows by one where the counter falls: the epoch

The evidence is arithmetic; words (step, batch, loss; validation, download) add to or take from it.
Nothing is reported before three readings, or while another counter is about as likely: then `doubt`
has the reason. Pure, bounded in memory and in time per line.
"""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass, replace
from enum import Enum
from typing import Any, Dict, List, Mapping, Optional, Tuple

from varuna_core.records.logs.progress import names_loss, names_mean

LEAST_READINGS = 3
LEAST_WHOLE = 8
"""If a counter that never fell has this number of readings, one that restarts is ignored."""
MOST_SHAPES = 32
MOST_NUMBERS = 24
"""A line with more numbers is a table or a dump."""
MOST_LIMITS = 4
"""Most different numbers after one `/` that may be totals."""
MOST_RANKS = 4
"""Ranks whose lines are learned from: the first that print."""
MOST_KEPT = 6
"""First lines of a shape that are kept until it is known to count steps."""
LONGEST = 400
HINTS = (
    "iter", "Iter", "tep", "poch", "it/s", "s/it", "loss", "Loss", "rain", "atch", "pdate",
    "learn:", "STEP", "EPOCH", "LOSS", "pisode", "Cost",
)  # fmt: skip
"""Each line that is learned from contains one of these."""
HEAD, MOST_HEADS = 32, 256
"""Characters, without numbers, by which lines are grouped before they are parsed."""
MOST_VAIN, SELDOM = 64, 32
"""After this number of useless lines with one head, only one in SELDOM of them is read."""
ENOUGH, MARGIN = 3.0, 0.5
"""The score that a counter needs, and its least lead over any other counter."""
_LARGEST = 1e12


class Doubt(str, Enum):
    """Reasons why the current training step cannot be read from a log, although the log grows."""

    FEW = "too few lines so far to tell which number counts steps"
    RIVALS = "two numbers are about equally likely to count steps"
    LOST = "the number that counted steps has stopped growing"
    LENGTH = "steps are counted within each epoch, and the number of steps in an epoch is not known"
    UNNAMED = "an unnamed progress bar started over many times, and no line is about training"
    UNTRAINED = "a number grows as steps do, but no line is about training"
    ONLY_LOSSES = "only lines with a loss"
    FIRST_EPOCH = "steps are counted within each epoch, but the first epoch was not read"
    FAR = "the end of the log has no line about a step, and the part before it was not all searched"


@dataclass(frozen=True)
class Counted:
    """One log line in which the step counter was found, with the step and what else it shows."""

    text: str
    at: Optional[float]
    slack_s: float
    step: int
    """Step as printed in the line, which may be counted within an epoch."""
    num_steps: Optional[int]
    """Total number of steps, or that of an epoch if `epoch` is known."""
    epoch: Optional[int]
    """Number of earlier epochs, for a counter that restarts in each epoch."""
    num_epochs: Optional[int]
    unit: str
    """`step`, `sample`, or `epoch` for lines that count only epochs; empty for a number within an
    epoch that may count steps or samples."""
    loss: Optional[float]
    is_evaluation: bool
    """True if the line names the step at which something was evaluated."""
    is_from_zero: bool = False
    """True if the first epoch has the number 0."""
    is_least: bool = False
    """True if the number of the first epoch is not known: `epoch` is right if it is 1, and one too
    low if it is 0."""
    is_first: bool = False
    """True for the first reading of a counter that was just found."""


_Key = Tuple[Optional[int], str]
"""Key of a shape: the rank of its lines, and their text without the numbers."""
_Kept = Tuple[str, Optional[float], float]
"""A line, and when it was written."""
_STATE = (
    "said", "said_epochs", "is_cut", "is_doubled", "is_baseless", "is_lost", "_ranks", "_num_lines",
    "_num_vain", "_chosen", "_begin",
)  # fmt: skip
_N, _T, _B = "\x01", "\x02", "\x03"
"""A number, a time and a bar in a shape."""
_GLYPHS = "█▏▎▍▌▋▊▉━╸╺─#=>.·"
_TOKEN = re.compile(
    r"(?P<time>\d{4}[-/]\d\d[-/]\d\d[T ,]{1,2}\d\d:\d\d(?::\d\d)?(?:[.,]\d{1,9})?Z?"
    r"|\d\d/\d\d(?:/\d{2,4})? \d\d:\d\d:\d\d|[IWEF]\d{4,8} \d\d:\d\d:\d\d(?:\.\d{1,9})?"
    r"|(?<![\d.])(?:\d{1,4} days?, {0,2})?\d{1,3}:\d\d(?::\d\d)?(?:\.\d{1,6})?(?![\d.])|-:--:--)"
    rf"|(?P<bar>(?<=%)\|[^|]{{0,400}}\||[{_GLYPHS}]{{3,}}[{_GLYPHS} ]*)"
    r"|(?P<number>(?:(?<![\w.)\]])[-+])?(?:\d{1,3}(?:[,_']\d{3}){1,5}(?!\d|,\d)|\d{1,18})"
    r"(?:\.\d{1,18})?(?:[eE][-+]?\d{1,4}|[kKM](?=it\b|of\b|\W|$))?|(?<!\w)(?:nan|inf|NaN|n/a)(?!\w))"
)
_CONTROL = re.compile(r"[\x00-\x1f]")
_TO_BARE = b"0123456789 .,+-"

# Words near a number, and words anywhere in its line.

_STEP = re.compile(
    r"(?:global[_ ]?step|steps?|iter(?:ation)?s?|batch(?:es)?|updates?|\b(?:it|up)|train(?:ing)?"
    r"|\bepisodes?)\W{0,6}$",
    re.IGNORECASE,
)
_EPOCH = re.compile(
    r"\bep(?:och)?s?\b[^\w]{0,3}(?:\(train\)|trained|done|finished)?[^\w]{0,6}$", re.IGNORECASE
)
_MINOR = re.compile(
    r"(?:micro[_ -]?(?:step|batch)|batch[_ -]?size|bsz|instances|rank|worker|node|gpu|layers?|"
    r"\bn_updates)\W{0,6}$",
    re.IGNORECASE,
)
_OTHER = re.compile(
    r"(?:tokens?|samples?|examples|seen|consumed\w{0,16}|time\w{0,16}|elapsed|wall|mem(?:ory)?|seconds?|"
    r"skipped|port|pid|size|trial|fps|wps|tps|\w{0,8}flops|ms|lr|scale|timesteps)\W{0,6}$",
    re.IGNORECASE,
)
_UNIT = re.compile(
    r" ?(?:%|ms\b(?!/)|us\b|s\b(?!/)|sec|[KMGT]i?B|B\b|W\b|C\b|docs?|files?|tok|examples|bytes)",
    re.IGNORECASE,
)
_STEPS = re.compile(r" (?:iter(?:ation)?s?|steps?|updates?)(?=[,;.)|])", re.IGNORECASE)
"""Pattern of the text after a number that gives steps as its unit, as in `10 steps`."""
_SAMPLES = re.compile(rf"[{_N}?](?:img|image|sample)s?/s\b")
"""Pattern of the rate after a progress bar that counts samples."""
_DONE = re.compile(
    r"loss|nll|\bppl|cost\b|\bce\b|error|rmse|objective|reward|return|grad|\blr\b|learning|\bdt\b|"
    r"it/s|s/it|ms/step|step[_ ]?time|iter[_ ]?time|time/|\bkl\b|\bl[12]:",
    re.IGNORECASE,
)
_TRAIN = re.compile(r"train|learn:|step|iter|epoch|update|batch|fit\b", re.IGNORECASE)
_EVALUATES = re.compile(
    r"(?<![a-z])(?:eval|valid|val\b|test(?:ing)?\b|(?<!policy )inference|predict|sanity)",
    re.IGNORECASE,
)
_NOT = re.compile(
    r"download|upload|token(?:is|iz)(?:e|ed|ing)\b|\bloading|\bmap\b|\bfilter|\bshards?\b|\bwarm-?up\b|heartbeat|"
    r"waiting|preparing|building|compil|NCCL|(?<!-)-> |B/s\b|examples/s| HTTP/1|resum|generating|"
    r"extract|decod(?:e|ing)|process(?:ed|ing)|busbw|unpack|fetching|checkpoint|saved|saving",
    re.IGNORECASE,
)
_METRICS = re.compile(
    r"(?<![a-z])(?:val|valid|validation|eval|evaluation|test|dev)[_ /-]?\d?[_ /-]?(?:'s )?"
    r"(?:\w{1,20}_)?"
    r"(?:loss|acc\w{0,8}|ppl|perplexity|l[12]|r?mse|auc|error|\w{0,3}logloss|time|runtime)"
    r"|(?:loss|acc|ppl|error)_(?:val|valid|eval|test|dev)\b",
    re.IGNORECASE,
)
"""Pattern of metrics of an evaluation, which may be in one line with metrics of the training."""
_LOSS = re.compile(
    r"(?:((?<!log)loss)|nll|cost|\bce|objective|rmse|logloss|\bl[12])(?:_train)?['\"]?\W{0,6}$",
    re.I,
)
_UNIT_OF_LOSS = re.compile(r" {1,4}(?:[a-zA-Z]{1,20} ){0,2}loss, {0,4}", re.IGNORECASE)
"""Pattern of the text after a number that shows the number to be a loss, as in `5.96 avg loss,
0.001 rate`."""
_LOSS_AT = re.compile(
    r"(?:(loss)|nll|cost)(?: (?:at|after|of|for|in))?(?: (?:global )?(?:step|iter|iteration|update|"
    r"batch))?\W{0,6}$",
    re.IGNORECASE,
)
_BETWEEN = re.compile(r"[\])]? ?[:=]? ?")
"""Pattern of the text between the counter and a loss whose name is before the counter."""
_NOT_TRAINED = re.compile(r"val|eval|test|dev|best", re.IGNORECASE)
FILE = re.compile(
    rf"[\w/.+{_N}-]{{1,120}}\.(?:py|c|cc|cpp|cu|h|hpp|rs|go|js|o|so|a|txt|jsonl?|ya?ml|csv|tar|gz|zip|"
    rf"bin|ckpt|pth?|safetensors|npy|parquet|arrow)\b|\b\w{{1,30}}(?:\.\w{{1,30}}){{1,6}}:{_N}"
    r'|"[A-Z]{3,7} /[^"]{0,200}"'
)
"""Pattern of names of files, places in code and requests to a server, which do not show what a line
is about."""
_FROM_ZERO = re.compile(r"Epoch: {0,2}\[$")
"""torchvision and PyTorch's ImageNet example count their epochs from 0; one
that begins with epoch 1 does not."""
_LOSS_ROW = re.compile(
    r"\W{0,9}(?:[\w/.-]{1,40} ){0,2}(?:[\w.-]{1,20}/){0,3}\w{0,20}loss(?:/[\w/]{1,20})?\W{0,9}",
    re.I,
)
_JOINT = re.compile(r" ?(?:it|steps?)? ?(?:/|\bof\b) ?#?")
_SAID = re.compile(
    r"(?:total|max|num(?:ber of)?)[ _]{0,2}(?:train(?:ing|_)?|optimi[sz]ation|update)?[ _]{0,2}"
    r"(?:steps|iters|iterations|updates)['\"]?[ :=]{1,4}(\d{1,3}(?:,\d{3}){1,4}|\d{1,12})(?![\d.])"
    r"|\btrain(?:ing)? for (\d{1,3}(?:,\d{3}){1,4}|\d{1,12}) (?:steps|iters|iterations|updates)\b",
    re.IGNORECASE,
)
_SAID_EPOCHS = re.compile(
    r"(?:max|num(?:ber of)?)[ _]{0,2}epochs['\"]?[ :=]{1,4}(\d{1,6})(?![\d.])", re.IGNORECASE
)


def mask(text: str) -> Tuple[str, List[str]]:
    """Replace numbers, times and bars of a line by placeholders; return shape and numbers."""
    parts, numbers, at = [], [], 0
    text = text[:LONGEST]
    if not text.isprintable():
        text = _CONTROL.sub(" ", text)
    for match in _TOKEN.finditer(text):
        begin, end = match.span()
        parts.append(text[at:begin])
        kind = match.lastgroup
        if kind == "number":
            numbers.append(match.group())
        parts.append(_N if kind == "number" else _T if kind == "time" else _B)
        at = end
    parts.append(text[at:])
    shape = " ".join("".join(parts).split())
    return shape.replace(" " + _N, _N), numbers


@dataclass
class _Number:
    """A number at one position in the lines of a shape, and how it grew from line to line."""

    first: float
    last: float
    highest: float
    is_whole: bool
    count: int = 1
    ups: int = 0
    ones: int = 0
    """How often the number grew by exactly one."""
    falls: int = 0
    by: float = 0.0
    """The amount by which the number usually grows from one line to the next."""
    even: int = 0
    """Number of growths by about `by`."""

    def grow(self, value: float) -> float:
        self.count += 1
        change, self.last = value - self.last, value
        self.highest = max(self.highest, value)
        if change < 0:
            self.falls += 1
        elif change > 0:
            self.ups += 1
            self.ones += change == 1
            if not self.even or self.even * 2 < self.ups - 1:
                self.by, self.even = change, 0
            self.even += abs(change - self.by) <= max(1.0, 0.2 * self.by)
        return change


@dataclass(frozen=True)
class _Candidate:
    """A number of a shape that may count steps."""

    score: float
    at: int
    total: Optional[int]
    """The constant number after the candidate, joined to it by `/` or `of`."""
    outer: Optional[int]
    """Index of the number that counts epochs."""
    count: int
    """Number of lines in which the candidate was read."""


class _Shape:
    """The lines of one rank with the same shape, and the numbers in them."""

    def __init__(self, rank: Optional[int], text: str) -> None:
        self.rank, self.text = rank, text
        self.count = self.seen = 0
        """Number of lines of this shape so far, and the position of the last one among all lines of
        the log."""
        self.numbers: List[_Number] = []
        self.bounded: Dict[int, Dict[int, _Number]] = {}
        """Numbers before a `/`, keyed by place and by the number after it, since bars of an
        evaluation look like those of the training."""
        self.together: Dict[Tuple[int, int], int] = {}
        """Readings at which one number fell and another grew by one."""
        self.kept: List[_Kept] = []
        self.is_cut = False
        self.candidates: List[_Candidate] = []
        self._parts = text.split(_N)
        about = _weigh_line(text)
        self._weights = [about + _weigh_number(self._parts, at) for at in range(self._size)]
        self._joints = [_JOINT.fullmatch(part) is not None for part in self._parts]

    @property
    def _size(self) -> int:
        return len(self._parts) - 1

    @property
    def rarity(self) -> Tuple[int, int]:
        return min(self.count, LEAST_READINGS), self.seen

    def begin(self, at: int) -> str:
        """Return the text of the shape up to the number at index `at`."""
        return _N.join(self._parts[: at + 1]) + _N

    def is_epoch(self, at: int) -> bool:
        before = self._parts[at]
        return _EPOCH.search(before) is not None and not before.endswith(("/", "/ "))

    def get(self, candidate: _Candidate) -> _Number:
        bounded = self.bounded.get(candidate.at, {})
        return bounded.get(candidate.total or 0, self.numbers[candidate.at])

    def is_from_zero(self, at: int) -> bool:
        return _FROM_ZERO.search(self._parts[at]) is not None and not self._joints[at + 1]

    def find_unit(self, one: _Candidate, words: List[str]) -> str:
        """Return the unit of a number: `step`, `sample` or empty, as in `Counted`.

        `[640/60000 (1%)]` counts samples if it grows by 640, a multiple of a batch but not a round
        interval. With a round one, 1000 of 60000 may be samples or steps, and 50 of 331 are steps.
        Ranks that share an epoch reach only a part of its samples: then the printed share differs
        from the number's.
        """
        by, behind = self.get(one).by, self._parts[one.at + 2 : one.at + 4]
        is_named = _STEP.search(self._parts[one.at]) or _STEPS.match(self._parts[one.at + 1])
        is_share = len(behind) == 2 and behind[0].strip() == "(" and behind[1].startswith("%)")
        bar = self.text.find(_B)
        if bar >= 0 and _SAMPLES.search(self.text, bar):
            return "sample"
        if one.total is None or by <= 1 or is_named or not is_share:
            return "step"
        if float(f"{by:.0e}") == by:
            return "step" if one.total % by else ""
        share, value = (_parse(words[at]) or 0.0 for at in (one.at + 2, one.at))
        return "sample" if abs(share - 100 * value / one.total) <= 1 else ""

    def may_count(self, words: List[str]) -> bool:
        """Return False for a line that cannot be a counter's, however its numbers grow."""
        return any(
            _is_whole(word) and weight + 2.3 + 1.5 * self._joints[at + 1] >= ENOUGH
            for at, (word, weight) in enumerate(zip(words, self._weights))
        )

    def add(self, words: List[str], seen: int) -> bool:
        """Learn from the numbers of one more line of this shape; return True if a number fell."""
        self.count += 1
        self.seen = seen
        values = [_parse(word) for word in words]
        if self.count == 1:
            self.numbers = [
                _Number(value or 0.0, value or 0.0, value or 0.0, _is_whole(word))
                for value, word in zip(values, words)
            ]
            return False
        if self.is_cut:
            self.is_cut = False
            for number, value in zip(self.numbers, values):
                number.last = value or 0.0
                number.highest = max(number.highest, number.last)
            return False
        fell, grew = [], []
        for at, (word, value) in enumerate(zip(words, values)):
            found = self._find_number(at, word, value, values)
            if found is None or not found.is_whole:
                continue
            if value is None or not _is_whole(word):
                found.is_whole = False
                continue
            change = found.grow(value)
            if change < 0:
                fell.append(at)
            elif change == 1:
                grew.append(at)
        for low in fell:
            for high in grew:
                self.together[low, high] = self.together.get((low, high), 0) + 1
        return bool(fell)

    def _find_number(
        self, at: int, word: str, value: Optional[float], values: List[Optional[float]]
    ) -> Optional[_Number]:
        """Return the number of earlier lines with which the number at index `at` is compared; None
        if it is the first one before its limit (the number after it)."""
        limit = values[at + 1] if at + 1 < len(values) and self._joints[at + 1] else None
        if limit is None or value is None or not value <= limit < _LARGEST or limit % 1:
            return self.numbers[at]
        bounded = self.bounded.setdefault(at, {})
        if len(bounded) > MOST_LIMITS:
            return self.numbers[at]
        if not bounded and limit == self.numbers[at + 1].first:
            bounded[int(limit)] = self.numbers[at]
        if int(limit) in bounded:
            self.numbers[at] = bounded[int(limit)]
            return self.numbers[at]
        bounded[int(limit)] = self.numbers[at] = _Number(value, value, value, _is_whole(word))
        return None

    def judge(self) -> None:
        found = [
            self._judge(at, number, total)
            for at in range(self._size)
            for total, number in self._list_bounded(at)
        ]
        known = [one for one in found if one is not None]
        whole = {self.get(one).by for one in known if not self.get(one).falls}
        known = [one for one in known if not (self._falls(one) and self.get(one).by in whole)]
        self.candidates = sorted(
            known, key=lambda one: (self.is_epoch(one.at), -one.score, -one.count)
        )

    def _falls(self, candidate: _Candidate) -> bool:
        """Return True for a counter that restarts while no other number counts the restarts."""
        return candidate.outer is None and self.get(candidate).falls > 0

    def outlives(self, ours: _Candidate, shape: "_Shape", other: _Candidate) -> bool:
        """Return True if candidate `ours` never fell and `other` restarts repeatedly."""
        is_whole = not self.get(ours).falls and 2 * other.count <= ours.count
        return is_whole and ours.count >= LEAST_WHOLE and shape._falls(other)

    def counts_as(self, other: "_Shape") -> bool:
        """Return True if the other shape counts the same steps."""
        if other is self or not self.candidates or not other.candidates:
            return False
        return _are_same(self, self.candidates[0], other, other.candidates[0])

    def find_total(self, at: int) -> Optional[int]:
        """Return the number that `/` or `of` joins to the number at index `at`, if it is the same
        in all lines; else None."""
        totals = [total for total, _ in self._list_bounded(at)]
        return totals[0] if len(totals) == 1 else None

    def _list_bounded(self, at: int) -> List[Tuple[Optional[int], _Number]]:
        bounded = self.bounded.get(at)
        if not bounded or len(bounded) > MOST_LIMITS:
            return [(None, self.numbers[at])]
        return list(bounded.items())

    def find_epochs(self, but: int) -> Optional[int]:
        """Return the index of a number, except `but`, that is named as an epoch, or None."""
        places = (at for at in range(self._size) if at != but and self.numbers[at].is_whole)
        return next((at for at in places if self.is_epoch(at)), None)

    def save(self) -> Dict[str, Any]:
        return {
            "rank": self.rank,
            "text": self.text,
            "count": self.count,
            "seen": self.seen,
            "is_cut": self.is_cut,
            "numbers": [astuple(one) for one in self.numbers],
            "bounded": [
                [at, [[limit, astuple(one)] for limit, one in bounded.items()]]
                for at, bounded in self.bounded.items()
            ],
            "together": [[*pair, count] for pair, count in self.together.items()],
            "kept": self.kept,
            "candidates": [astuple(one) for one in self.candidates],
        }

    @classmethod
    def restore(cls, saved: Mapping[str, Any]) -> "_Shape":
        shape = cls(saved["rank"], saved["text"])
        shape.count, shape.seen, shape.is_cut = saved["count"], saved["seen"], saved["is_cut"]
        shape.numbers = [_Number(*one) for one in saved["numbers"]]
        shape.bounded = {
            at: {limit: _Number(*one) for limit, one in bounded} for at, bounded in saved["bounded"]
        }
        for at, bounded in shape.bounded.items():  # the last one is one of these
            limit = int(shape.numbers[at + 1].last)
            if limit in bounded and len(bounded) <= MOST_LIMITS:
                shape.numbers[at] = bounded[limit]
        shape.together = {(low, high): count for low, high, count in saved["together"]}
        shape.kept = [(text, at, slack_s) for text, at, slack_s in saved["kept"]]
        shape.candidates = [_Candidate(*one) for one in saved["candidates"]]
        return shape

    def _find_outer(self, at: int, falls: int) -> Optional[int]:
        """Return the index of the number that grows by one whenever the number at index `at` falls;
        None if there is none."""
        for other, number in enumerate(self.numbers):
            if other == at or not number.is_whole or number.falls:
                continue
            if number.ups == number.ones == falls == self.together.get((at, other), 0):
                return other
        return None

    def _judge(self, at: int, number: _Number, total: Optional[int]) -> Optional[_Candidate]:
        pairs = number.count - 1
        if not number.is_whole or number.ups < 2 or number.first < 0 or number.highest > _LARGEST:
            return None
        outer = None
        if number.falls:
            outer = self._find_outer(at, number.falls)
            if outer is None and total is None and number.falls * 8 > pairs:
                return None
        score = self._weights[at] + (2.0 if number.ups > 2 else 1.0) * number.even / number.ups
        score += 1.5 if total is not None else 0.0
        score += 0.3 if any(not one.is_whole for one in self.numbers) else 0.0
        score -= 1.0 if number.falls and outer is None else 0.0
        score -= (2.0 * (pairs - number.ups - number.falls) + 3.0 * number.falls) / pairs
        return _Candidate(score, at, total, outer, number.count) if score >= ENOUGH else None


def _weigh_number(parts: List[str], at: int) -> float:
    """Score the words next to a number in a log line. A positive score means that they suggest a
    step counter (`step 10`), a negative one that they suggest something else (`10 %`, `lr 10`)."""
    before, after = parts[at], parts[at + 1]
    weight = 0.3 if at == 0 else 0.0
    if _MINOR.search(before):
        weight -= 1.5
    elif _STEP.search(before):
        weight += 1.5
    elif _EPOCH.search(before):
        weight += 0.8
    if _OTHER.search(before):
        weight -= 2.0
    is_in_name = before.endswith("_") and (after[:1].isalpha() or after[:1] in " _.")
    if _STEPS.match(after):
        weight += 1.5
    if is_in_name or _UNIT.match(after):
        weight -= 2.0
    return weight - 2.0 if after.startswith("%") else weight


def _weigh_line(text: str) -> float:
    """Return a score for a line's words: above 0 for training, below 0 for anything else."""
    text = FILE.sub("", text)
    is_done, is_trained = _DONE.search(text) is not None, _TRAIN.search(text) is not None
    weight = 1.2 * is_done + 0.5 * is_trained
    others = _METRICS.sub("", text)
    is_named = re.search(r"\btrain|\blearn:", others, re.IGNORECASE) is not None
    is_other = "loss" not in others and _NOT.search(text) is not None
    if not is_named and (is_other or _EVALUATES.search(others)):
        weight -= 5.0
    if others != text:
        weight -= 0.8 if "loss" in others or is_named else 3.5
    return weight if is_done or is_trained else weight - 1.5


class Learner:
    """Finds the number that counts steps in one log, by reading its lines one after another."""

    def __init__(self, *, is_partial: bool = False) -> None:
        """With `is_partial` the first epoch may be missing, so steps are only compared with each
        other."""
        self.said: Optional[int] = None
        """Number of steps that an earlier line printed; 0 if lines printed different numbers."""
        self.said_epochs: Optional[int] = None
        self.is_doubled = self.is_baseless = self.is_lost = False
        """Three flags: another counter is about as likely; the first epoch was not read; the
        counter stopped."""
        self._is_partial = self.is_cut = is_partial
        """True if the log's first lines may not have been read."""
        self._shapes: Dict[_Key, _Shape] = {}
        self._ranks: List[Optional[int]] = []
        self._vain: Dict[bytes, int] = {}
        """Number of lines without a counter, by their first characters."""
        self._num_lines = self._num_vain = 0
        self._chosen: Optional[_Key] = None
        self._counted: Tuple[Optional[float], Optional[int]] = (None, None)
        """The step and the epoch that were read last."""
        self._is_open, self._had_loss = True, False
        """True if a row with a loss may follow, and if one did."""
        self._begin: Optional[str] = None
        """The text up to the number of the counter that was chosen last."""

    def read(
        self, rank: Optional[int], text: str, at: Optional[float], slack_s: float
    ) -> List[Counted]:
        """Add a line; return the step that the line shows, in a list. The line that proves a
        counter also returns the steps of the lines before it. The list is empty if no step is
        known."""
        self._num_lines += 1
        if not self._is_known(rank):
            return []
        head = text[:LONGEST].encode("utf-8", "replace").translate(None, _TO_BARE)[:HEAD]
        if head not in self._vain and len(self._vain) >= MOST_HEADS:
            head = b""
        vain = self._vain.setdefault(head, 0)
        if vain > (MOST_VAIN if self._num_vain < MOST_HEADS else 1) and self._num_lines % SELDOM:
            return []
        shape_text, words = mask(text)
        if not words or len(words) > MOST_NUMBERS:
            return []
        shape = self._find_shape(rank, shape_text, words)
        if shape is None or not shape.count or (shape.count > 99 and not shape.candidates):
            self._vain[head] = vain + 1
            self._num_vain += 1
        elif shape.candidates:
            self._vain[head] = 0
        if shape is None:
            return self._read_chosen(shape_text, words, (text, at, slack_s))
        is_bent = shape.add(words, self._num_lines)
        before, begin = self._chosen, self._begin
        if shape.count >= LEAST_READINGS and (is_bent or shape.count < 32 or not shape.count % 8):
            shape.judge()
            self._choose()
        is_same = self._chosen == before or (before is not None and self._begin == begin)
        if self._chosen is None or is_same:
            if self._chosen != (rank, shape_text) and len(shape.kept) < MOST_KEPT:
                shape.kept.append((text, at, slack_s))
            return self._read_chosen(shape_text, words, (text, at, slack_s))
        chosen = self._shapes[self._chosen]
        lines, chosen.kept = [*chosen.kept, (text, at, slack_s)], []
        found: List[Counted] = []
        for line in lines:
            found += self._read_chosen(*mask(line[0]), line)
        return [replace(one, is_first=at == 0) for at, one in enumerate(found)]

    def skip(self) -> None:
        """Note that lines of the log were skipped, to ignore the next growth of each number."""
        self.is_cut = self.is_cut or not self._num_lines
        for shape in self._shapes.values():
            shape.is_cut = True

    def read_loss(self, rank: Optional[int], text: str) -> Optional[float]:
        """Return the loss of a line that has only a loss, such as the row below a line with the
        step; None if other lines separate it from such a row, as it may be an evaluation's."""
        is_open, self._is_open = self._is_open, self._is_open and not self._had_loss
        if self._chosen is None or not is_open or not ("loss" in text or "Loss" in text):
            return None
        shape, words = mask(text)
        ours, other = self._shapes.get(self._chosen), self._shapes.get((rank, shape))
        if ours is not None and other is not None and ours.counts_as(other):
            at = other.candidates[0].at  # the same step in a line of its own
            return _find_loss(shape.split(_N), words, at)
        before = shape.partition(_N)[0]
        if len(words) != 1 or not _LOSS_ROW.fullmatch(before) or _NOT_TRAINED.search(before):
            return None
        if not names_loss(before):
            return None
        self._is_open = self._had_loss = True
        return _parse(words[0])

    def note_total(self, text: str) -> None:
        """Note the number of steps from a line such as `max steps: 60`."""
        if not ("ax" in text or "otal" in text or "um" in text or "for" in text):
            return
        said = _SAID.search(text)
        if said is not None:
            number = int(said.group(said.lastindex or 1).replace(",", ""))
            self.said = number if self.said in (None, number) else 0  # one that counts is no total
        epochs = _SAID_EPOCHS.search(text) if "poch" in text else None
        if epochs is not None:
            self.said_epochs = int(epochs.group(1)) or None

    @property
    def doubt(self) -> Optional[Doubt]:
        """Return the reason why there is no counter although some lines look like one."""
        if self.is_doubled:
            return Doubt.RIVALS
        if self.is_baseless:
            return Doubt.FIRST_EPOCH
        if self.is_lost:
            return Doubt.LOST
        if self._chosen is None and any(x.count < LEAST_READINGS for x in self._shapes.values()):
            return Doubt.FEW
        return None

    def save(self) -> Dict[str, Any]:
        """Return the state as JSON values, for `go_on`."""
        found = {name: getattr(self, name) for name in _STATE}
        vain = {head.decode("latin-1"): count for head, count in self._vain.items()}
        return {**found, "vain": vain, "shapes": [one.save() for one in self._shapes.values()]}

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        for name in _STATE:
            setattr(self, name, saved[name])
        self._chosen = None if saved["_chosen"] is None else tuple(saved["_chosen"])
        self._vain = {head.encode("latin-1"): count for head, count in saved["vain"].items()}
        shapes = [_Shape.restore(one) for one in saved["shapes"]]
        self._shapes = {(one.rank, one.text): one for one in shapes}

    def _is_known(self, rank: Optional[int]) -> bool:
        if rank in self._ranks:
            return True
        if len(self._ranks) >= MOST_RANKS:
            return self._chosen is not None
        self._ranks.append(rank)
        return True

    def _find_shape(self, rank: Optional[int], text: str, words: List[str]) -> Optional[_Shape]:
        """Find or create the shape of a line; None if the line cannot count steps."""
        key = rank, text
        shape = self._shapes.get(key)
        if shape is not None or rank not in self._ranks:
            return shape
        shape = _Shape(rank, text)
        if not shape.may_count(words):
            return None
        if len(self._shapes) >= MOST_SHAPES:
            others = [one for one in self._shapes.values() if (one.rank, one.text) != self._chosen]
            least = min(others, key=lambda one: one.rarity)
            del self._shapes[least.rank, least.text]
        self._shapes[key] = shape
        return shape

    def _choose(self) -> None:
        """Take the likeliest counter, unless another one is about as likely."""
        found = [
            (not shape.is_epoch(one.at), one.score, shape, one)
            for shape in self._shapes.values()
            for one in shape.candidates
        ]
        self.is_doubled, was_lost = False, self.is_lost
        self.is_lost = not found and (self.is_lost or self._chosen is not None)
        if not found:
            self._chosen = None
            return
        _, _, best, first = max(found, key=lambda one: (*one[:2], one[3].count))
        ours = self._shapes.get(self._chosen) if self._chosen is not None else None
        chosen = best
        for is_of_steps, score, shape, other in found:
            if is_of_steps == best.is_epoch(first.at):
                continue
            is_ours = shape is ours and other is shape.candidates[0]
            if score <= first.score - MARGIN and not (is_ours and other.count > first.count):
                continue
            if _are_same(best, first, shape, other):
                chosen = shape if is_ours else chosen  # as before, however much another has of it
            elif score > first.score - MARGIN and not best.outlives(first, shape, other):
                self.is_doubled = True
        one = chosen.candidates[0]
        begin, is_whole = chosen.begin(one.at), one.outer is not None and one.total is not None
        if was_lost and begin == self._begin and not is_whole:
            self.is_lost, self._chosen = True, None  # it may have restarted any number of times
            return
        self._chosen, self._begin = (chosen.rank, chosen.text), begin

    def _read_chosen(self, shape_text: str, words: List[str], line: _Kept) -> List[Counted]:
        """Return the step of a line whose text, up to the number, is that of the counter's lines,
        in a list; empty for any other line."""
        shape = self._shapes.get(self._chosen) if self._chosen is not None else None
        if shape is None or self.is_doubled:
            return []
        chosen = shape.candidates[0]
        if shape_text != shape.text and not shape_text.startswith(shape.begin(chosen.at)):
            return []
        value = _parse(words[chosen.at]) if chosen.at < len(words) else None
        if value is None or not 0 <= value <= _LARGEST or value != int(value):
            return []
        total, epoch, num_epochs = chosen.total, None, None
        is_from_zero = is_least = False
        if total is not None and (
            len(words) <= chosen.at + 1 or _parse(words[chosen.at + 1]) != total
        ):
            return []  # an evaluation whose lines look the same
        place = chosen.outer if chosen.outer is not None else shape.find_epochs(chosen.at)
        if place is not None and (place < chosen.at or shape_text == shape.text):
            number = shape.numbers[place]
            named = _parse(words[place])
            is_from_zero = number.first == 0 or (
                shape.is_from_zero(place) and (number.first != 1 or self.is_cut)
            )
            if not number.ups or chosen.outer is not None:
                is_least = number.first > 1 and not is_from_zero and not self._is_partial
                # All earlier epochs have too many steps for a count of all.
                count = shape.get(chosen)
                is_within = (number.first - 1) * (count.highest - count.first) > count.first
                if is_least and (total in (None, self.said) or not is_within):
                    self.is_baseless = True
                    return []
                is_within = is_least or chosen.outer is not None or shape.is_from_zero(place)
                epoch = None if named is None else int(named) - (not is_from_zero)
                if total is not None and total == self.said:
                    epoch = None  # the number of all, as a line before has said
                elif epoch is None or not is_within:
                    total = None  # maybe of an epoch
                else:
                    num_epochs = shape.find_total(place) or self.said_epochs
                    if is_from_zero and num_epochs and num_epochs % 5:
                        num_epochs = None  # 0/99 is of 100 epochs, or of 99
        elif total is None and self.said:
            self.said = self.said if value <= self.said else 0
            total = self.said or None
        self.is_baseless = False
        is_new, self._counted = self._counted != (value, epoch), (value, epoch)
        self._is_open, self._had_loss = is_new or not self._had_loss, self._had_loss and not is_new
        is_epoch = shape.is_epoch(chosen.at)
        if is_epoch and total == self.said:
            total = self.said_epochs
        is_other = shape_text != shape.text
        is_evaluation = is_other and _EVALUATES.search(shape_text) is not None
        loss = None
        if not is_evaluation:
            loss = _find_loss(shape_text.split(_N), words, chosen.at)
        unit = "step" if self._is_partial else shape.find_unit(chosen, words)
        counted = Counted(
            *line, int(value), total if unit else None, epoch, num_epochs,
            "epoch" if is_epoch else unit, loss, is_evaluation, is_from_zero, is_least,
        )  # fmt: skip
        return [counted]


def _find_loss(parts: List[str], words: List[str], counter: int) -> Optional[float]:
    """Return a loss of any name from a line whose numbers follow these parts. If the number after
    the name is the counter, as in `Train loss 12 2.31`, the next number is the loss."""
    mean = None
    for at, (part, word) in enumerate(zip(parts, words)):
        named = (_LOSS_AT if at == counter else _LOSS).search(part)
        if named is None or _NOT_TRAINED.search(part):
            continue
        if named.group(1) and not names_loss(part[: named.end(1)]):
            continue
        if at == counter:
            is_next = at + 1 < len(words) and _BETWEEN.fullmatch(parts[at + 1])
            return _parse(words[at + 1]) if is_next else None
        number = _parse(words[at - 1] if at and _UNIT_OF_LOSS.fullmatch(part) else word)
        if not names_mean(part):
            return number
        mean = number if mean is None else mean
    return mean


def _are_same(one: _Shape, first: _Candidate, two: _Shape, second: _Candidate) -> bool:
    """Return True if two numbers count the same thing: on different ranks, in lines of different
    words, or side by side in one line."""
    if one.begin(first.at) == two.begin(second.at):
        counts = sorted((first.count, second.count))
        return first.total == second.total or 2 * counts[0] <= counts[1]
    low, high = sorted((one.get(first), two.get(second)), key=lambda number: number.by)
    if not low.by:
        return False
    if one is two and low.by == high.by and bool(low.falls) != bool(high.falls):
        return True  # through all epochs, and in each
    apart = high.last - low.last
    is_even = not high.by % low.by and apart % low.by in (0, 1, low.by - 1)  # from 0 or from 1
    return is_even and abs(apart) <= high.by + (low.by > 1)


_ROUNDED = re.compile(r"\d(?:\.\d{1,6})?[eE]\+\d{1,3}|\d{1,4}(?:\.\d{1,3})?[kKM]")
"""Pattern of large whole numbers in the short form of tables and bars: 3.13e+03, 2.69k."""
_NO_MARKS = str.maketrans("", "", ",_'")
"""Translation table that removes the marks between thousands."""


def _is_whole(word: str) -> bool:
    if word.translate(_NO_MARKS).isdecimal():
        return True
    return _ROUNDED.fullmatch(word) is not None and (_parse(word) or 0.5) % 1 == 0


def _parse(word: str) -> Optional[float]:
    times = {"k": 1e3, "K": 1e3, "M": 1e6}.get(word[-1:], 1.0)
    try:
        return round(float(word.rstrip("kKM").translate(_NO_MARKS)) * times, 9)
    except ValueError:
        return None
