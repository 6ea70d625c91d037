"""Paths of every file of a run. The only place that spells these names.

<log_folder>/<run>/
  conf.yaml resolved.yaml plan.json record.json      asked, resolved, planned, submitted
  launch.json                                        flags of the launcher, where that was it
  master.pid  machines.json                          of a run on a list of machines
  training.json  program.pyz                         of a built-in program: what it trains, itself
  function.pyz                                       of a function: what calls it on each rank
  function/ submitted.pkl  facts.json                the function with its state; who pickled it
            <rank>.result.pkl                        what it returned or raised
  batch.sh | batch.<group>.sh   node.sh   agent.pyz  what the scheduler runs
  events.jsonl  events.<group>.jsonl                 one writer a file: the batch scripts' hosts
  events-vjob.jsonl                                  and `vjob` itself
  scheduler.out  scheduler.<group>.out               what the batch script itself printed
  events-morph.jsonl                                 and the manager of a run that may morph
  morph/ manager.json  orders.json                   its state; what it tells the nodes
         nodes/<seat>.json  leave/<seat>.json        an agent's sign of life; who is to leave
         joins/<number>.json  <number>.job.json      nodes that were asked for later; their job
  report.html                                        the last `vjob report`
  attempt-0/                                         one start of the ranks
    state/ master.json  go.json                      address; all nodes are ready
           stop.json  outcome.json                   who said stop; how it ended
           signal.json  next.json                    a signal for every rank; of a split run,
                                                     the attempt that follows this one
    plan.json  training.json                         of a run that may morph: this attempt's own
    preflight.txt                                    the table of all nodes
    <node>.out .err .gpu .gpu.jsonl .times           ranks merged and tagged; samples; when
    nodes/<index>.json   beat/<index>.json           preflight of a node; its sign of life
    ranks/<rank>.out .err   exit/<rank>.json   trace/<rank>.jsonl
    earlier-0/                                       what an older try of this attempt left
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from varuna_core.records.files import PRIVATE_FOLDER

OPENED = "ranks meet at"
"""What scheduler.out says as an attempt begins: a requeued job goes on in the same file."""


class AttemptFolder:
    """The files of one start of the ranks.

    What every node polls lies in `state`, a small folder: listing one with the logs of a thousand
    nodes in it, from a thousand nodes, would be the load that the file server falls over.
    """

    FOLDERS = ("state", "nodes", "beat", "ranks", "exit", "trace")

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number

    def make(self) -> None:
        """Create the folder and its parts; fine if another node was first."""
        self.path.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        for name in self.FOLDERS:
            (self.path / name).mkdir(mode=PRIVATE_FOLDER, exist_ok=True)

    def set_aside(self) -> None:
        """Move what an older try of this attempt left behind into `earlier-<n>`.

        Its state goes first: an agent that looks in between finds no master, and waits on.
        """
        names = [name for name in os.listdir(self.path) if not name.startswith("earlier-")]
        aside = self.path / f"earlier-{len(os.listdir(self.path)) - len(names)}"
        aside.mkdir(mode=PRIVATE_FOLDER)
        for name in sorted(names, key=lambda name: name != "state"):
            os.rename(self.path / name, aside / name)
        self.make()

    @property
    def plan(self) -> Path:
        """The attempt's own plan in a run that may morph; else the run's plan counts."""
        return self.path / "plan.json"

    @property
    def training(self) -> Path:
        return self.path / "training.json"

    @property
    def master(self) -> Path:
        return self.path / "state" / "master.json"

    @property
    def go(self) -> Path:
        return self.path / "state" / "go.json"

    @property
    def preflight(self) -> Path:
        return self.path / "preflight.txt"

    @property
    def stop(self) -> Path:
        return self.path / "state" / "stop.json"

    @property
    def signal(self) -> Path:
        return self.path / "state" / "signal.json"

    @property
    def next(self) -> Path:
        """Written before the outcome, where a split run goes on with another attempt."""
        return self.path / "state" / "next.json"

    @property
    def outcome(self) -> Path:
        return self.path / "state" / "outcome.json"

    def node_log(self, node: str, kind: str) -> Path:
        """`kind` is out, err, gpu, gpu.jsonl or times."""
        return self.path / f"{node}.{kind}"

    def node_report(self, index: int) -> Path:
        return self.path / "nodes" / f"{index}.json"

    def beat(self, index: int) -> Path:
        return self.path / "beat" / f"{index}.json"

    def rank_log(self, rank: int, kind: str) -> Path:
        """`kind` is out or err."""
        return self.path / "ranks" / f"{rank}.{kind}"

    def exit(self, rank: int) -> Path:
        return self.path / "exit" / f"{rank}.json"

    def exit_reserve(self, rank: int) -> Path:
        """Blanks kept for the exit file of a rank that ends on a full disk."""
        return self.path / "exit" / f".{rank}.reserve"

    def trace(self, rank: int) -> Path:
        return self.path / "trace" / f"{rank}.jsonl"


class MorphFolder:
    """Files between the manager and the nodes of a run that may morph."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        for folder in (self.path, self.nodes, self.leave(0).parent, self.joins):
            folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)

    @property
    def manager(self) -> Path:
        return self.path / "manager.json"

    @property
    def lock(self) -> Path:
        """Held by the manager as long as it runs."""
        return self.path / "manager.lock"

    @property
    def shrink_lock(self) -> Path:
        """Held while nodes are asked to leave, so that two who ask count each other's."""
        return self.path / "shrink.lock"

    @property
    def tend_lock(self) -> Path:
        """Held by `vjob tend` as long as it runs."""
        return self.path / "tend.lock"

    @property
    def orders(self) -> Path:
        return self.path / "orders.json"

    @property
    def nodes(self) -> Path:
        return self.path / "nodes"

    def node(self, seat: int) -> Path:
        return self.nodes / f"{seat}.json"

    def leave(self, seat: int) -> Path:
        return self.path / "leave" / f"{seat}.json"

    @property
    def joins(self) -> Path:
        return self.path / "joins"

    def join(self, number: int) -> Path:
        return self.joins / f"{number}.json"

    def join_job(self, number: int) -> Path:
        return self.joins / f"{number}.job.json"


class RunFolder:
    """The files of a run. `group` is None except for the jobs of a split run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def conf(self) -> Path:
        return self.path / "conf.yaml"

    @property
    def resolved(self) -> Path:
        return self.path / "resolved.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def record(self) -> Path:
        return self.path / "record.json"

    @property
    def launch(self) -> Path:
        """The launcher's arguments, where it submitted the run."""
        return self.path / "launch.json"

    @property
    def master_pid(self) -> Path:
        """Process to send signals to by hand, in a run on a list of machines."""
        return self.path / "master.pid"

    @property
    def machines(self) -> Path:
        """Machines that got an agent, as the list spells them, by the node's name."""
        return self.path / "machines.json"

    @property
    def training(self) -> Path:
        return self.path / "training.json"

    @property
    def program(self) -> Path:
        """The built-in programs, in one file that any python3 with torch runs."""
        return self.path / "program.pyz"

    @property
    def function(self) -> Path:
        """What runs a pickled function on a rank, in one file for any python3 with submitit."""
        return self.path / "function.pyz"

    @property
    def submitted_pickle(self) -> Path:
        """The function and its arguments; after a checkpoint, with its new state."""
        return self.path / "function" / "submitted.pkl"

    @property
    def function_facts(self) -> Path:
        return self.path / "function" / "facts.json"

    def result_pickle(self, rank: int) -> Path:
        return self.path / "function" / f"{rank}.result.pkl"

    @property
    def code(self) -> Path:
        """The copy of the user's code that the ranks run, where the run has one."""
        return self.path / "code"

    @property
    def code_files(self) -> Path:
        """The names of its files: what ranks write into it besides is none of them."""
        return self.path / "code.json"

    @property
    def code_diff(self) -> Path:
        """How the user's code differed from its commit."""
        return self.path / "code.diff"

    @property
    def packages(self) -> Path:
        """What was installed for the ranks' interpreter at submit."""
        return self.path / "packages.txt"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def node_script(self) -> Path:
        return self.path / "node.sh"

    @property
    def agent(self) -> Path:
        return self.path / "agent.pyz"

    def batch_script(self, group: str | None = None) -> Path:
        return self.path / (f"batch.{group}.sh" if group else "batch.sh")

    def scheduler_log(self, group: str | None = None) -> Path:
        return self.path / (f"scheduler.{group}.out" if group else "scheduler.out")

    def events(self, group: str | None = None) -> Path:
        return self.path / (f"events.{group}.jsonl" if group else "events.jsonl")

    @property
    def vjob_events(self) -> Path:
        """Events that `vjob` writes, on another host than the batch script."""
        return self.path / "events-vjob.jsonl"

    @property
    def morph_events(self) -> Path:
        """Events that the manager writes; agents write to the others."""
        return self.path / "events-morph.jsonl"

    @property
    def morph(self) -> MorphFolder:
        return MorphFolder(self.path / "morph")

    def all_events(self) -> list[Path]:
        return sorted(self.path.glob("events*.jsonl"))

    def attempt(self, number: int) -> AttemptFolder:
        return AttemptFolder(self.path / f"attempt-{number}", number)

    def attempts(self) -> list[AttemptFolder]:
        """The attempts that were started, oldest first."""
        found = []
        try:
            children = list(self.path.iterdir())
        except OSError:
            return []
        for child in children:
            match = re.fullmatch(r"attempt-(\d+)", child.name)
            if match:
                found.append(AttemptFolder(child, int(match.group(1))))
        return sorted(found, key=lambda attempt: attempt.number)


def make_run_folder(path: Path) -> RunFolder:
    """A folder that is ours alone: a second run of the same second gets -1, -2, ..."""
    path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    for number in range(1000):
        own = path if number == 0 else path.with_name(f"{path.name}-{number}")
        try:
            own.mkdir(mode=PRIVATE_FOLDER)
        except FileExistsError:
            continue
        return RunFolder(own)
    raise FileExistsError(errno.EEXIST, "a thousand runs of this second are here", str(path.parent))
