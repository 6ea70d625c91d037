"""Read the steps of a log from its lines and the times at which they were written.

`progress` parses one line; this module derives what depends on earlier lines: which rank is
followed, which counts continue in the next epoch or begin again, and how long a step took if no
line says so.

    0: step 10 loss 2.31    written at 100.0     step 10
    1: step 10 loss 2.31               100.1     another rank: not followed
    0: step 20 loss 2.20               104.0     step 20, 0.4 s a step
    0: validation loss at ...                    a pause, which counts to no step
    0: step 30 loss 2.10               120.0     step 30
    0: step 11 loss 2.29               200.0     another start

Lines of known formats take precedence over bars, bars over learned counters (learner.py), and these
over bars without a name.
"""

from __future__ import annotations

import re
import statistics
from collections import deque
from dataclasses import astuple, dataclass, replace
from typing import Any, Deque, Dict, Iterable, List, Mapping, Optional, Pattern, Sequence, Tuple

from varuna_core.records.logs.learner import (
    FILE,
    HINTS,
    LEAST_READINGS,
    LONGEST,
    Counted,
    Doubt,
    Learner,
)
from varuna_core.records.logs.progress import (
    NO_STEP,
    clean,
    find_bar_total,
    is_nested,
    parse_epoch,
    parse_line,
    parse_own,
    parse_values,
    split_tag,
)
from varuna_core.records.logs.step_counts import SLOW
from varuna_core.records.logs.tables import Tables
from varuna_core.records.logs.times import MARK_S
from varuna_core.records.logs.training_log import Iteration, leave_out_first

EPOCHS, UNNAMED, LEARNED, BAR, LINE = range(5)
"""Reliability of a source of steps, from the least to the most reliable."""
LEAST_S = 0.05
"""Least time between two lines whose times of writing are known well."""
SPAN_SLACKS = 8
"""A span is long enough to be timed if it exceeds the error of its ends times this."""
TURNS = 3
"""Another rank is followed after this number of its steps, without one of the present rank, that
are beyond the last step of the present rank."""
LEAST_PAIRS = 2
"""After this number of lines in which M of `N/M` grew and N did not, M is not a total."""
ROUND = 99
"""The most steps of an epoch that a share with two digits can tell apart."""
MOST_ASIDE = 2
"""Times that a shorter loop runs after a whole one before it is taken for the training."""
NEAR = 2
"""Steps by which a bar and a line beside it may differ, as bars are drawn less often."""
MOST_RANKS = 256
RECENT = 9


@dataclass(frozen=True)
class StepReading:
    """The step that one line shows, with the facts that follow from earlier lines."""

    line: Iteration
    """The line with its step and number of steps counted through all epochs; NO_STEP if it has only
    a loss. Its time is the line's own, else derived from the times of writing."""
    at: Optional[float]
    is_anew: bool
    """True if earlier steps do not count: the ranks restarted from an older step, or this line is
    more reliable."""
    num_timed: Optional[int]
    """Number of steps whose mean the time is, if it comes from the times of writing."""
    strength: int
    """Reliability of the source of the reading, one of EPOCHS to LINE."""
    earlier: Tuple["StepReading", ...] = ()
    """Earlier lines of a counter that this line proves."""


@dataclass
class _RankPlace:
    """Progress of one rank, as its lines show it."""

    epoch: int
    step: int
    num_falls: int = 0
    """Number of times that the steps fell back, as in a new epoch or after a restart."""
    num_turns: int = 0
    """Number of lines ahead of the followed rank, since the latter's last line."""

    @property
    def order(self) -> Tuple[int, int, int]:
        return self.num_falls, self.epoch, self.step


_TRAINING = re.compile(
    r"(?<![a-z])(?:pre-?)?train(?:ing|er)?(?![a-z])(?! (?:data|set|split|samples)\b)|epoch"
    r"|(?<![a-z])(?:log)?loss(?!less)|_loss"
    r"|reward|_rew_|episod|(?<![a-z])lr(?![a-z])|gradients?\b|\bgrad[_ -]?norm|gnorm|optimizer|rmse"
    r"|nll|\bppl|\bcosts?\b|perplexity|learning[_ -]?rate|learn:|\b(?:ce|l1|l2)\b",
    re.IGNORECASE,
)
"""Words about training. Without them, a number that only grows may be progress of anything: of a
simulation, of requests, of a solver."""
_OF_OTHERS = re.compile(r"[^\d%]{0,80}[a-zA-Z]{3}[^\d%]{0,80}\d{1,3}%\|")
"""A bar whose name has only words, which tell what it counts; with numbers, these may be losses."""
_STATE = (
    "strength", "num_steps", "_last", "_rank", "_raw", "_base", "_epoch", "_num_epochs",
    "_is_new_epoch", "_anchor", "_has_losses", "_is_untrained", "_is_lost", "_by", "_spent_ms",
    "trains", "unit", "_first_epoch", "_is_cut", "_num_pairs", "_aside", "_is_through", "_heading",
    "_is_least",
)  # fmt: skip


def find_total(step: int, others: Iterable[StepReader]) -> Optional[int]:
    """Return the number of all steps from other logs than the one that is at `step`: from a log at
    the same step or, without one, from a line that announces the number."""
    others = list(others)
    same = {
        one.num_steps
        for one in others
        if one.last is not None and abs(one.last - step) <= NEAR and one.num_steps
    }
    found = same or {one.said[0] for one in others if one.said[0]}
    return found.pop() if len(found) == 1 and step <= max(found) else None


def count_epochs(
    done: Sequence[float], readers: Iterable[StepReader]
) -> Tuple[Sequence[int], Optional[int], str]:
    """Return steps, their total and unit from completed epochs, which Hugging Face prints as
    fractions with two digits: if several steps fit a fraction, only the epoch is known."""
    said = [one.said for one in readers]
    totals, epochs = {one[0] for one in said if one[0]}, {one[1] for one in said if one[1]}
    if len(totals) == len(epochs) == 1:
        total, num_epochs = totals.pop(), epochs.pop()
        if total is not None and num_epochs and total <= ROUND * num_epochs:
            return [round(one * total / num_epochs) for one in done], total, "step"
        return [int(one) for one in done], num_epochs, "epoch"
    return [int(one) for one in done], epochs.pop() if len(epochs) == 1 else None, "epoch"


class StepReader:
    """Reader of the steps of one log."""

    def __init__(self, pattern: Optional[Pattern[str]] = None, *, is_partial: bool = False) -> None:
        """`pattern` is the user's own regular expression; if it is given, only lines that match it
        count. `is_partial`: steps are only compared with each other, so the first epoch may be
        missing."""
        self.strength = -1
        self.num_steps: Optional[int] = None
        self._last: Optional[int] = None
        self._pattern = pattern
        self._rank: Optional[int] = None
        self._places: Dict[Optional[int], _RankPlace] = {}
        self._raw: Optional[Tuple[int, Optional[int]]] = None
        """The last step, and the number of steps, as printed in the line."""
        self._base = 0
        self._epoch: Optional[int] = None
        self._num_epochs: Optional[int] = None
        self._is_new_epoch = False
        self._anchor: Optional[Tuple[int, float, float]] = None
        """Step, time of writing and error of that time for the line at which the present
        measurement of step times began."""
        self._recent: Deque[float] = deque(maxlen=RECENT)
        self.evaluated: Optional[Iteration] = None
        """Metrics of an evaluation in the last line that was read; NO_STEP if it names no step."""
        self._has_losses = False
        self.unit = "step"
        """What the steps count: `step`, or `epoch` if only epochs are known."""
        self._is_untrained = False
        """True if a counter was found before any line about training."""
        self.trains = False
        """True once a line contained a word that trainings print."""
        self._is_partial, self._is_lost = is_partial, False
        self._opening: Optional[str] = None
        """The first line about a step after a start, kept until the second one is read."""
        self._by = 0
        """Difference of the last two steps."""
        self._first_epoch: Optional[int] = None
        """Number of the first epoch, 0 or 1, of bars that name theirs."""
        self._is_cut = is_partial
        """True if the lines before the first progress bar may not have been read."""
        self._num_pairs = 0
        """Number of lines with an epoch and a step that look like a step and the number of
        steps."""
        self._spent_ms = 0.0
        """The longest time that a bar without a name has taken, in milliseconds."""
        self._aside: Optional[Tuple[int, int, int]] = None
        """Step and number of steps of a shorter loop, and how often it began."""
        self._is_through = False
        """True if steps continued into the next epoch, so their total is that of all epochs."""
        self._heading: Optional[int] = None
        """Epoch in the last line that named an epoch without a step."""
        self._is_least = False
        """True if the user's own lines began with a later epoch; those before are counted from
        1."""
        self._waiting: List[Tuple[Iteration, Optional[int], Optional[float], float]] = []
        """First lines that the user's own pattern matches, kept while they name a later epoch than
        the first and are too few to judge."""
        self._learner = Learner(is_partial=is_partial)
        self._tables = Tables()

    @property
    def doubt(self) -> Optional[Doubt]:
        """Reason why the steps are not known although the log has lines that may be about steps;
        None if they are known or there is no such line."""
        if self._is_lost and self._last is None:
            return Doubt.LENGTH
        if self._is_unnamed:
            return Doubt.UNNAMED
        if self._pattern is not None or self.strength in (UNNAMED, BAR, LINE):
            return None
        if self._learner.doubt is not None:
            return self._learner.doubt
        if self._is_untrained:
            return Doubt.UNTRAINED
        return Doubt.ONLY_LOSSES if self._has_losses and self.last is None else None

    @property
    def _is_unnamed(self) -> bool:
        """True if the only steps known are those of bars without a name that are repeated, such as
        bars for generated images."""
        return self.strength == UNNAMED and self._base > 0 and not self.trains

    @property
    def last(self) -> Optional[int]:
        """The last step; None if it is not known."""
        is_learned = self.strength in (EPOCHS, LEARNED)
        is_doubtful = self._is_unnamed or (is_learned and self._learner.doubt is not None)
        return None if is_doubtful else self._last

    @property
    def has_table(self) -> bool:
        """True if the last lines are a table, whose header named its columns."""
        return bool(self._tables.names)

    @property
    def said(self) -> Tuple[Optional[int], Optional[int]]:
        """Numbers of steps and epochs of the training, as announced by lines without a step."""
        return self._learner.said or None, self._learner.said_epochs

    @property
    def place(self) -> Optional[Tuple[int, int]]:
        """The last step's epoch and its number in that epoch, which are known even if an attempt
        begins within an epoch; without a named epoch, 0 and the count of all steps."""
        if self.last is None or self._raw is None:
            return None
        return (0, self.last) if self._epoch is None else (self._epoch, self._raw[0])

    def read(
        self, text: str, at: Optional[float] = None, slack_s: float = MARK_S
    ) -> Optional[StepReading]:
        """Read a line; return its step, or None if it has no step or no new one.

        `at` is the time at which it was written, known to within `slack_s`.
        """
        own, rank, self.evaluated = self._pattern, split_tag(text)[0], None
        if own is not None:
            found = parse_own(own, text)
            return None if found is None else self._take_own(found, rank, at, slack_s)
        if not self.trains and _TRAINING.search(text) is not None:
            self.trains = _TRAINING.search(FILE.sub("", text[:LONGEST])) is not None
            self._is_untrained = self._is_untrained and not self.trains
        found = parse_line(text)
        self.evaluated = found if found is not None and found.evaluations else None
        is_unnamed = found is None and self.strength == UNNAMED and self._raw is not None
        if is_unnamed and self._raw is not None and find_bar_total(text) == self._raw[1]:
            self._restart()  # the same bar, which says now that it is of something else
            self.strength, self._last, self.num_steps = -1, None, None
        if found is None or found.is_evaluation:
            if found is None or not self._is_reached(found):
                return self._learn(text, at, slack_s)
            reading = self._take(found, LINE, rank, at, slack_s)
            self.pause()
            return reading
        if found.step == NO_STEP:
            self._has_losses = True
            return StepReading(found, at, False, None, LINE)
        strength = LINE if not found.is_bar else BAR if found.is_named else UNNAMED
        if strength == LINE:
            found = self._split_pair(found, rank)
            if self.strength < LINE or (self._last is not None and found.step < self._last):
                self._opening = text
            elif self._opening is not None:
                found, self._opening = leave_out_first(self._opening, text, found), None
        return self._take(found, strength, rank, at, slack_s)

    def _take_own(
        self, found: Iteration, rank: Optional[int], at: Optional[float], slack_s: float
    ) -> Optional[StepReading]:
        """Take a line that the user's own pattern matches.

        The first lines of a run that resumes in a later epoch are kept until there are enough of
        them: one line alone does not show whether steps are counted within each epoch.
        """
        self._waiting.append((found, rank, at, slack_s))
        waiting = self._waiting
        first, epoch = waiting[0][0], waiting[0][0].epoch or 0
        if self.strength < 0 and epoch > 1 and first.num_steps and not self._is_partial:
            last = [line for line, of, _, _ in waiting if of == waiting[0][1]][-1]
            is_one = (last.epoch, last.num_steps) == (epoch, first.num_steps)
            is_few = sum(of == waiting[0][1] for _, of, _, _ in waiting) < LEAST_READINGS
            if is_one and last.step >= first.step and is_few and len(waiting) < MOST_RANKS:
                return None
            # A count of all steps would have at least as many in each earlier epoch as in this one.
            self._is_least = is_one and (epoch - 1) * (last.step - first.step) > first.step
        self._waiting = []
        taken = [self._take(line, LINE, of, at, slack_s) for line, of, at, slack_s in waiting]
        readings = [reading for reading in taken if reading is not None]
        return replace(readings[-1], earlier=tuple(readings[:-1])) if readings else None

    def _split_pair(self, found: Iteration, rank: Optional[int]) -> Iteration:
        """Read `Batch 2/1200` as epoch 2 and step 1200 if the second number grows."""
        if found.num_steps is None or found.epoch is not None:
            return found
        if self._num_pairs < LEAST_PAIRS and self._raw is not None and rank == self._rank:
            step, total = self._raw
            if step == found.step and total is not None and total != found.num_steps:
                self._num_pairs += 1 if total < found.num_steps else -self._num_pairs
                if self._num_pairs == LEAST_PAIRS:
                    self._restart()
                    self._last = self.num_steps = None
        if self._num_pairs < LEAST_PAIRS:
            return found
        return replace(found, step=found.num_steps, num_steps=None, epoch=found.step)

    def _is_reached(self, found: Iteration) -> bool:
        """Return True for an evaluation at a reached step, perhaps the step's only line."""
        self.pause()
        is_ahead = self._last is not None and found.step >= self._last
        return self.strength == LINE and is_ahead and "train" in found.evaluations

    def skip(self) -> None:
        """Note that lines of the log were skipped."""
        self._learner.skip()
        self._is_cut = self._is_cut or self._last is None
        self.pause()

    def _learn(self, text: str, at: Optional[float], slack_s: float) -> Optional[StepReading]:
        """Look for a step in a table row or with the learner (learner.py); None without one."""
        is_hinted = any(word in text for word in HINTS)
        if not is_hinted and not self._tables.names:
            return None
        readings: Sequence[Counted] = ()
        rank, plain = split_tag(clean(text))
        if "%|" in plain and _TRAINING.search(plain) is None and _OF_OTHERS.match(plain):
            return None
        row = self._tables.name_row(plain)
        if row is None and (not is_hinted or self._tables.read_header(plain)):
            return None
        if row is not None:
            plain, named = row, parse_line(row)
            self.evaluated = named if named is not None and named.evaluations else None
        self._learner.note_total(plain)
        if self.strength < BAR and not is_nested(text):
            readings = self._learner.read(rank, plain, at, slack_s)
        loss = None if readings else self._learner.read_loss(rank, plain)
        if loss is not None:
            return StepReading(
                Iteration(NO_STEP, losses={"loss": loss}), at, False, None, self.strength
            )
        if readings and not self.trains:
            self._is_untrained = True
            return None
        if not readings:
            if "poch" in text:
                self._note_epoch(text, rank)
            return None
        taken = [self._take_learned(one, rank) for one in readings]
        found = [reading for reading in taken if reading is not None]
        return replace(found[-1], earlier=tuple(found[:-1])) if found else None

    def _take_learned(self, one: Counted, rank: Optional[int]) -> Optional[StepReading]:
        strength = EPOCHS if one.unit == "epoch" else LEARNED
        found = parse_values(
            one.text, step=one.step, num_steps=one.num_steps, epoch=one.epoch,
            num_epochs=one.num_epochs, unit=one.unit, is_from_zero=one.is_from_zero,
            is_least=one.is_least,
        )  # fmt: skip
        if one.is_evaluation:
            found = replace(found, losses={}, time_ms=None)
        elif found.loss is None and one.loss is not None:
            found = replace(found, losses={"loss": one.loss})
        if one.epoch is not None and one.is_first:  # not that of a line above
            self._epoch = self._num_epochs = None
        is_other = one.is_first and strength == self.strength
        if is_other:
            self._restart()
            self._last = self.num_steps = None
        reading = self._take(found, strength, rank, one.at, one.slack_s)
        return replace(reading, is_anew=True) if reading is not None and is_other else reading

    def _take(
        self,
        found: Iteration,
        strength: int,
        rank: Optional[int],
        at: Optional[float],
        slack_s: float,
    ) -> Optional[StepReading]:
        if strength < self.strength:
            return None
        is_surer = strength > self.strength >= 0
        if strength > self.strength:
            self._restart()
            self.strength, self._rank, self.num_steps, self._last = strength, rank, None, None
            self._places = {rank: _RankPlace(found.epoch or 0, found.step)}
        elif not self._is_followed(rank, found):
            return None
        if self._is_lost and self._is_of_epoch(found) and found.num_steps:
            self._restart()  # the number of steps of an epoch is known by now
            is_surer = True
        reading = self._place(found, at, slack_s)
        self._is_lost = self._is_lost or not found.unit
        if self._is_lost:
            return self._tell_epoch(found, at)
        return replace(reading, is_anew=True) if reading is not None and is_surer else reading

    def save(self) -> Dict[str, Any]:
        """Return the state as JSON values, for `go_on`."""
        found = {name: getattr(self, name) for name in _STATE}
        places = [[rank, *astuple(place)] for rank, place in self._places.items()]
        return {
            **found, "_places": places, "_recent": list(self._recent),
            "learner": self._learner.save(), "columns": self._tables.names,
        }  # fmt: skip

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """Continue reading where the reader with this saved state stopped."""
        for name in _STATE:
            value = saved[name]
            setattr(self, name, tuple(value) if isinstance(value, list) else value)
        self._places = {rank: _RankPlace(*place) for rank, *place in saved["_places"]}
        self._recent = deque(saved["_recent"], maxlen=RECENT)
        self._learner.go_on(saved["learner"])
        self._tables.names = list(saved["columns"])

    def pause(self) -> None:
        """Note a checkpoint or an evaluation: the time to the next line is not a step's."""
        self._anchor = None

    def is_slow(self, reading: StepReading) -> bool:
        """Return True if a derived time of a step is so long that it may contain a pause."""
        if reading.num_timed is None or reading.line.time_ms is None or not self._recent:
            return False
        return reading.line.time_ms > SLOW * statistics.median(self._recent)

    def _tell_epoch(self, found: Iteration, at: Optional[float]) -> Optional[StepReading]:
        """Return the epoch as a step of unit `epoch`: the number of steps in an epoch is not
        known. The last epoch has no total, since it is not known to be over."""
        is_first, total = self.unit == "step", found.num_epochs
        is_named = found.epoch is not None or self.strength != LINE
        epoch = found.epoch if is_named else self._heading
        self.num_steps = total if total and epoch is not None and epoch + 1 < total else None
        if epoch is not None and self.strength == LEARNED and not found.is_from_zero:
            epoch += 1
        self._last = epoch
        if epoch is None:
            return None
        self.unit = "epoch"
        line = replace(found, step=epoch, num_steps=self.num_steps, time_ms=None, unit="epoch")
        return StepReading(line, at, is_first, None, EPOCHS)

    def _is_followed(self, rank: Optional[int], found: Iteration) -> bool:
        """Return True for a line of the followed rank, or of a rank that is ahead of it. Ranks
        often print the same steps one after the other, as each writes its buffered lines at its
        end; such lines are neither another epoch nor another start."""
        epoch, step = found.epoch or 0, found.step
        place = self._places.get(rank)
        if place is None:
            place = _RankPlace(epoch, step)
            if len(self._places) < MOST_RANKS:
                self._places[rank] = place
        place.num_falls += (epoch, step) < (place.epoch, place.step)
        place.epoch, place.step = epoch, step
        if rank == self._rank:
            for other in self._places.values():
                other.num_turns = 0
            return True
        ours = self._places.get(self._rank)
        is_beyond = ours is None or place.order > ours.order
        if ours is not None and (epoch, step) == (ours.epoch, ours.step) and not is_beyond:
            return True  # another rank tells more of the same step
        place.num_turns += is_beyond
        if place.num_turns < TURNS:
            return False
        self._rank, place.num_turns = rank, 0
        return True

    def _note_epoch(self, text: str, rank: Optional[int]) -> None:
        """Note `Epoch 2/3` above a bar, or `Epoch 2` among lines of known formats: if the
        step number drops after it, steps are counted within each epoch."""
        if self.strength >= 0 and rank != self._rank:
            return
        found = parse_epoch(text)
        if found is not None:
            is_later = self._heading is None or found[0] > self._heading
            self._is_new_epoch = self._is_new_epoch or (self.strength == LINE and is_later)
            self._heading = found[0]
        if found is None or found[1] is None or not 0 <= found[0] <= found[1]:
            return
        if found[0] == 0 or (self._epoch is not None and self._num_epochs is None):
            found = found[0], None  # there may be one more than is said
        self._is_new_epoch = self._epoch is not None and found[0] > self._epoch
        if self._epoch is not None and found[0] < self._epoch:  # another training
            self._restart()
        self._epoch, self._num_epochs = found

    def _restart(self) -> None:
        self._raw, self._base, self._anchor = None, 0, None
        self._is_lost, self.unit, self._by, self._spent_ms = False, "step", 0, 0.0
        self._aside, self._is_through = None, False
        self._recent.clear()

    def _place(
        self, found: Iteration, at: Optional[float], slack_s: float
    ) -> Optional[StepReading]:
        if found.is_bar and found.step == 0:  # nothing is done: a bar that stands, or will
            return None
        if (found.is_bar and self._is_small_bar(found)) or self._is_evaluation(found):
            return None
        is_anew = self._count_epochs(found)
        step = self._base + found.step
        is_anew = is_anew or (self._last is not None and step < self._last)
        if is_anew:
            self._anchor = None
            self._recent.clear()
        if self._raw is not None and found.step > self._raw[0]:
            self._by = found.step - self._raw[0]
        self._raw = found.step, found.num_steps
        self._last = step
        self.num_steps = self._find_total(found) or self.num_steps
        if self._base and not found.num_epochs and self._num_epochs is None:
            self.num_steps = None  # nobody says how many epochs there are
        if self.num_steps is not None and step > self.num_steps:
            self.num_steps = None  # it was not the number of all
        line = replace(found, is_least=True) if self._is_least else found
        if step != found.step or self.num_steps != found.num_steps:
            line = replace(line, step=step, num_steps=self.num_steps)
        time_ms, num_timed = self._measure(line, at, slack_s)
        if num_timed is not None:
            line = replace(line, time_ms=time_ms)
        return StepReading(line, at, is_anew, num_timed, self.strength)

    def _is_small_bar(self, found: Iteration) -> bool:
        """Return True for a bar that is not the training's: it runs while the training's stands
        still or before the next epoch; of unnamed bars, the longest one is the training's."""
        spent_ms = found.step * (found.time_ms or 0.0)
        if self._raw is None or not self._raw[1] or not found.num_steps:
            is_small = False
        elif found.num_steps < self._raw[1] and self._raw[0] < self._raw[1]:
            is_small = True
        else:
            is_other = self.strength == UNNAMED and found.num_steps != self._raw[1]
            is_small = is_other and spent_ms <= self._spent_ms
        if not is_small:
            self._spent_ms = max(self._spent_ms, spent_ms)
        return is_small

    def _is_evaluation(self, found: Iteration) -> bool:
        """Return True for a shorter loop that begins when another is over and has nothing that only
        a training has: Keras and Paddle print steps of evaluations like those of the training."""
        last, total = self._raw or (0, None)
        if not total or not found.num_steps or found.num_steps >= total:
            self._aside = None
            return False
        values = (found.learning_rate, found.grad_norm, found.loss_scale, found.tokens_per_s)
        is_named = self._is_new_epoch or (found.epoch is not None and found.epoch != self._epoch)
        is_over = last + (0 if found.is_bar else self._by) >= total
        if not is_over or is_named or any(value is not None for value in values):
            return False
        step, num_steps, begun = self._aside or (0, 0, 0)
        if found.num_steps != num_steps:
            step, begun = found.step + 1, 0
        self._aside = found.step, found.num_steps, begun + (found.step < step)
        return self._aside[2] <= MOST_ASIDE

    def _count_epochs(self, found: Iteration) -> bool:
        """Update the count of steps before this epoch; return True if the steps begin anew."""
        epoch = found.epoch if found.epoch is not None else self._epoch
        before, self._epoch = self._epoch, epoch
        is_later = self._is_new_epoch or (
            epoch is not None and before is not None and epoch > before
        )
        self._is_new_epoch = False
        if self._is_of_epoch(found) and found.epoch is not None and found.num_steps:
            base = (found.epoch - self._infer_first(found)) * found.num_steps
            is_anew = self._raw is not None and base < self._base
            self._base = base
            return is_anew
        begun = (epoch - 1) * found.num_steps if self._is_least and epoch and found.num_steps else 0
        if self._raw is None and begun:
            self._base = begun
            return False
        if self._raw is None:
            if self._is_of_epoch(found) and self._num_epochs and epoch and found.num_steps:
                self._base = (epoch - 1) * found.num_steps
            return False
        last, total = self._raw
        if found.is_bar and self._base and total != found.num_steps:  # another loop
            self._base = 0
            return True
        if found.step > last or (found.step == last and not is_later):
            self._is_through = self._is_through or is_later
            return False
        is_over = total and last + (0 if found.is_bar else self._by) >= total
        if is_over and found.step > max(1, self._by) and last < (total or 0):
            is_over = False  # it does not begin from the beginning
        if is_later or (is_over and total == found.num_steps):
            num = epoch - before if epoch is not None and before is not None else 1
            self._base += self._infer_length(found.step, last, total) * max(1, num)
            return False
        if self.strength == LEARNED and not self._is_partial:
            self._is_lost = True  # another start, or another epoch
            return False
        self._base = begun
        return True

    def _infer_first(self, found: Iteration) -> int:
        """Return the number of the first epoch. Lightning counts from 0; `Epoch 1/10` counts from
        1, and so does a log whose first bar is of epoch 1."""
        if not found.is_bar or found.is_from_zero or found.epoch == 0:
            self._first_epoch = 0
        elif self._first_epoch is None:
            is_first = found.epoch == 1 and not self._is_cut
            self._first_epoch = int(is_first or found.num_epochs is not None)
        return self._first_epoch

    def _infer_length(self, step: int, last: int, total: Optional[int]) -> int:
        """Return the number of steps of the ended epoch, whose last step may be unprinted."""
        if total is not None or self._is_partial:
            return total or last
        if self._by == 1 and step <= 1:
            return last + 1 - step
        self._is_lost = True
        return last

    def _find_total(self, found: Iteration) -> Optional[int]:
        if not found.num_steps:
            return None
        num_epochs = found.num_epochs or self._num_epochs
        if self.strength == LINE and self._epoch is not None and (num_epochs or 0) > 1:
            return self._find_total_of(found.step, found.num_steps, self._epoch, num_epochs or 1)
        is_of_epoch = self._is_of_epoch(found) or (self.strength == LEARNED and self._base > 0)
        if is_of_epoch and num_epochs:
            return found.num_steps * num_epochs
        if is_of_epoch and (found.epoch is not None or self._base > 0):
            return None
        if self.strength == LEARNED and self._epoch is not None:
            return None  # maybe that of an epoch
        return self._base + found.num_steps

    def _find_total_of(
        self, step: int, num_steps: int, epoch: int, num_epochs: int
    ) -> Optional[int]:
        """Return the total for `epoch: 1/300, iter: 10/1849`: 1849 is an epoch's if steps begin
        anew in each epoch or are ahead of the epochs; None if unknown."""
        if self._base or step * num_epochs > (epoch + 1) * num_steps:
            return num_steps * num_epochs
        return num_steps if self._is_through else None

    def _is_of_epoch(self, found: Iteration) -> bool:
        """Return True if `num_steps` is the number of steps of an epoch, if an epoch is named."""
        return found.is_bar or (self.strength == LEARNED and found.epoch is not None)

    def _measure(
        self, line: Iteration, at: Optional[float], slack_s: float
    ) -> Tuple[Optional[float], Optional[int]]:
        """Return the milliseconds per step since the line at which the present measurement began,
        and the number of these steps."""
        if line.time_ms is not None and not line.is_bar:
            return line.time_ms, None
        if at is None:
            return line.time_ms, None
        anchor = self._anchor
        if anchor is None or line.step < anchor[0] or at < anchor[1]:
            self._anchor = line.step, at, slack_s
            return line.time_ms, None
        num_steps, span_s = line.step - anchor[0], at - anchor[1]
        least_s = max(LEAST_S, SPAN_SLACKS * max(slack_s, anchor[2]))
        if not num_steps or span_s < least_s:
            return line.time_ms, None
        self._anchor = line.step, at, slack_s
        time_ms = 1000 * span_s / num_steps
        self._recent.append(time_ms)
        return time_ms, num_steps
