"""Our side of the morph benchmark: runs of the local stand-in whose nodes are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.command import Vjob
from varuna_core.agent.meeting.link import call_hub
from varuna_core.agent.processes.proc import list_below, list_stats
from varuna_core.records.checkpoints import list_complete
from varuna_core.records.files import read_json
from varuna_core.records.logs.rank_output import list_outputs
from varuna_core.records.record import read_events
from varuna_core.records.runfolder import RunFolder

LOOK_S = 0.01
"""Between two looks for a line: what the figures are exact to."""
LIMIT_S = 180.0
STEP_MARK = " iteration "
_STEP_MS = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and how often it is saved."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocab: int
    save_every: int


TINY = Size(name="tiny", layers=4, hidden=64, heads=4, sequence=32, vocab=512, save_every=20)
LARGE = Size(
    name="99 M parameters", layers=12, hidden=768, heads=12, sequence=32, vocab=18000, save_every=4
)
BATCH = 12
"""Samples a step on all nodes together, whether three or four of them."""

_CONF = """\
name: {name}
program: pretrain_gpt
model: {{layers: {size.layers}, hidden: {size.hidden}, heads: {size.heads},
  sequence: {size.sequence}, vocab: {size.vocab}, dropout: 0.0}}
data: {{synthetic: true}}
train:
  steps: {steps}
  global_batch_size: {batch}
  log_every: 1
  evaluate: {{every: 0}}
  checkpoint: {{folder: {folder}, every: {size.save_every}, keep: 2}}
cluster:
  scheduler: local
  walltime_min: 30
  grace_s: 5
  join_s: 60
  nodes: [{{group: all, count: {nodes}, ranks: 1}}]
{morph}
env: {{OMP_NUM_THREADS: "1"}}
"""


def wait_until(is_so: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> float:
    """When it was first seen to be so."""
    deadline = time.time() + limit_s
    while not is_so():
        if time.time() > deadline:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(LOOK_S)
    return time.time()


class Ours:
    """One run."""

    def __init__(
        self,
        folder: Path,
        size: Size,
        nodes: int,
        *,
        morph: Mapping[str, Any] | None,
        steps: int = 1_000_000,
        name: str = "ours",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._vjob, self._folder = Vjob(folder), folder
        words = "" if morph is None else f"morph: {json.dumps({'enabled': True, **morph})}"
        text = _CONF.format(
            name=name, size=size, batch=BATCH, steps=steps, folder="ckpt", nodes=nodes, morph=words
        )
        self.begun = time.time()
        self.run = self._vjob.submit(text)

    def count_steps(self, attempt: int) -> int:
        outputs = list_outputs(self.run.attempt(attempt))
        texts = (path.read_text(errors="replace") for path in outputs)
        return sum(text.count(STEP_MARK) for text in texts)

    def measure_step_ms(self, window_s: float) -> float:
        """Measure a step's milliseconds, from the log lines of this window."""
        known = len(self._list_step_ms())
        time.sleep(window_s)
        found = self._list_step_ms()[known + 1 :]  # the first one began before
        return sum(found) / len(found)

    def _list_step_ms(self) -> list[float]:
        outputs = list_outputs(self.run.attempt(0))
        text = "".join(path.read_text(errors="replace") for path in outputs)
        return [float(number) for number in _STEP_MS.findall(text)]

    def wait_for_steps(self, attempt: int, count: int = 1) -> float:
        return wait_until(
            lambda: self.count_steps(attempt) >= count, f"{count} steps of attempt {attempt}"
        )

    def wait_for_standby(self, count: int) -> float:
        """Until so many ranks wait with everything imported: that thread has ended."""

        def do_wait() -> bool:
            waiting = [pid for pid in self.list_own() if "--standby" in read_words(pid)]
            ready = [pid for pid in waiting if read_status(pid, "Threads") == 1]
            return len(ready) == count and all(read_status(p, "VmRSS") > 100e3 for p in ready)

        return wait_until(do_wait, f"{count} ranks that wait")

    def measure_waiting_mb(self) -> float:
        """Memory of its own that a rank that waits takes, in MiB; 0 where none does."""
        waiting = [pid for pid in self.list_own() if "--standby" in read_words(pid)]
        sizes = [read_status(pid, "RssAnon") / 1024 for pid in waiting]
        return sum(sizes) / len(sizes) if sizes else 0.0

    def list_extra(self) -> list[int]:
        """Processes of the job that one that cannot morph lacks."""
        words = {pid: read_words(pid) for pid in self.list_own()}
        return [pid for pid, said in words.items() if "morph" in said or "--standby" in said]

    def wait_for_save(self, iteration: int) -> None:
        def is_saved() -> bool:
            complete = list_complete(self._folder / "ckpt")
            return bool(complete) and complete[-1].iteration >= iteration

        wait_until(is_saved, f"the checkpoint of iteration {iteration}")

    @property
    def saved(self) -> int:
        complete = list_complete(self._folder / "ckpt")
        return complete[-1].iteration if complete else -1

    def kill_node(self, seat: int) -> float:
        """Everything of one node at once, as a power cut would; when."""
        pid = int(read_json(self.run.morph.node(seat))["pid"])
        own = [pid, *list_below([pid], list_stats())]
        now = time.time()
        for number in own:
            os.kill(number, signal.SIGKILL)
        return now

    def leave(self, seat: int) -> float:
        """Ask as `agent.pyz morph leave` does."""
        now = time.time()
        self.run.morph.leave(seat).write_text(json.dumps({"node": seat}))
        call_hub(self.run.morph.link)
        return now

    def find_morph(self, attempt: int) -> Mapping[str, Any] | None:
        """The event of the morph that led to this attempt."""
        for event in read_events(self.run):
            if event["kind"] == "morph" and event["attempt"] == attempt:
                return event
        return None

    def wait_for_morph(self, attempt: int) -> Mapping[str, Any]:
        wait_until(lambda: self.find_morph(attempt), f"the event of attempt {attempt}")
        found = self.find_morph(attempt)
        assert found is not None
        return found

    def save_and_leave(self) -> None:
        """By hand: the ranks save, and the job ends."""
        self._vjob("cancel", str(self.run.path))
        self.wait_over()

    def wait_over(self) -> None:
        def is_over() -> bool:
            record = read_json(self.run.path / "local.json")
            return isinstance(record, dict) and record["state"] not in ("PENDING", "RUNNING")

        wait_until(is_over, "the end of the job")

    def end(self) -> None:
        self._vjob("cancel", str(self.run.path), "--now", code=None)
        self.wait_over()

    def list_own(self) -> list[int]:
        """Every process of the job."""
        top = int(read_json(self.run.path / "local.json")["pid"])
        return [top, *list_below([top], list_stats())]


def read_words(pid: int) -> list[str]:
    """The command line; nothing where the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def read_status(pid: int, name: str) -> float:
    """A number of /proc/PID/status, in its unit."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0.0)


def count_cpu_s(pids: list[int]) -> float:
    """Processor seconds of these processes so far."""
    ticks = 0
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def halted(pids: list[int]) -> Iterator[None]:
    """These processes stand still in the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def explain(run: RunFolder) -> str:
    """Read the scheduler's log, to explain a failure."""
    log = run.scheduler_log()
    return log.read_text(errors="replace") if log.exists() else ""
