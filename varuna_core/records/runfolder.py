"""Paths of every file of a run. The only place that spells these names.

<log_folder>/<run>/
  conf.yaml resolved.yaml plan.json record.json      asked, resolved, planned, submitted
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
  morph/ epochs/<n>.claim.json                       a manager has the run: the last one counts
                <n>.manager.json  <n>.orders.json    its state; what it tells the nodes
                <n>.turn-<k>.json <n>.given-back.json   its nodes miss it for good
         obeyed/<seat>-<key>.jsonl                   orders that an agent obeyed, in order
         nodes/<seat>.json  leave/<seat>.json        an agent's sign of life; who is to leave
         joins/<number>.json  <number>.job.json      nodes that were asked for later; their job
         link.json                                   where the manager listens; a secret
  report.html                                        the last `vjob report`
  trackers.json                                      settings of plug-ins of `track`
  tensorboard/  track/<tool>.json  track/wandb/      of `track`: event files, how far each tool is,
                                                     what W&B keeps here
  attempt-0/                                         one start of the ranks
    state/ master.json  go.json                      address; all nodes are ready
           stop.json  outcome.json  end.json         who said stop; how it ended, and as a fact
           signal.json  next.json                    a signal for every rank; of a split run,
                                                     the attempt that follows this one
           skipped.json                              saves that found no room
           link.json                                 where the agents' hub listens; a secret
    plan.json  training.json  owner.json             of a run that may morph: this attempt's own,
                                                     and whose manager made it
    preflight.txt                                    the table of all nodes
    <node>.out .err .times .gpu.jsonl                ranks merged and tagged; when; samples
    nodes/<index>.json   beat/<index>.json           preflight of a node; its sign of life
    exit/node-<index>.json   trace/node-<index>.jsonl     its ranks' ends; what they did when
    ranks/  ranks/<rank>.error.json                  what profilers write of a rank; its exception,
                                                     where torch's `record` decorator saw it
            ranks/<rank>.ended                       the exception that ended it (exits.py)
            ranks/<rank>.steps                       its optimizer steps (logs/step_counts.py)
    track.log                                        what the tools of `track` print
    earlier-0/                                       what an older try of this attempt left

Other users see nothing of it. `vjob share` opens to a group what `may_share` names, and writes
plan.shared.json and the like: copies, without what is secret, of files that stay closed.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from varuna_core.records.files import (
    PRIVATE_FOLDER,
    as_whole,
    is_foreign_link,
    list_files,
    list_names,
)

OPENED = "ranks meet at"
"""Text that scheduler.out has when an attempt begins: a requeued job appends to the same file."""


# Patterns, not compiled: few processes need them.
_ATTEMPT = r"attempt-\d+(?:/earlier-\d+)?"
_SHARED = (
    r"(?:conf|resolved)\.yaml|(?:record|training|code|plan\.shared|local|local\.[\w-]+)\.json"
    r"|code\.diff|packages\.txt|report\.html|events[\w.-]*\.jsonl|scheduler[\w.-]*\.out"
    r"|morph/(?:manager|epochs/\d+\.(?:claim|manager)|(?:nodes|leave|joins)/\d+(?:\.job)?)\.json"
    rf"|{_ATTEMPT}/(?:preflight\.txt|(?:training|plan\.shared)\.json"
    r"|[\w.-]+\.(?:out|err|times|gpu|gpu\.jsonl)|ranks/\d+\.(?:out|err|error\.json|steps)"
    r"|trace/(?:node-)?\d+\.jsonl"
    r"|(?:nodes|beat|exit|hang)/(?:node-|evidence-)?\d+\.json"
    r"|state/(?:outcome|end|hang|hanging|cut|stop|signal|next|skipped|partition|\w+\.shared)\.json)"
)
_SHARED_FOLDER = (
    r"morph(?:/(?:epochs|nodes|leave|joins))?"
    rf"|{_ATTEMPT}(?:/(?:state|nodes|beat|ranks|exit|trace|hang))?"
)
_COPIED = rf"(?:{_ATTEMPT}/)?plan\.json|{_ATTEMPT}/state/(?:master|go)\.json"


def may_share(name: str) -> bool:
    """Return True for a file that other users may see unless it has a secret; `name` is its path in
    the run folder. Unknown files may contain anything, so they stay private."""
    return re.fullmatch(_SHARED, name) is not None


def may_share_folder(name: str) -> bool:
    return re.fullmatch(_SHARED_FOLDER, name) is not None


def is_shared_as_copy(name: str) -> bool:
    """Return True for a file with secrets that readers need: a redacted copy is shared instead."""
    return re.fullmatch(_COPIED, name) is not None


def shared_copy(path: Path) -> Path:
    """Return the path of the shared copy of a file: plan.shared.json for plan.json."""
    return path.with_name(f"{path.stem}.shared.json")


MOST_NODES = 10_000
"""Maximum number of nodes of an attempt whose logs are read, unless its plan has more."""


class AttemptFolder:
    """The files of one start of the ranks.

    The files that every node polls are in `state`, a small folder: if a thousand nodes listed a
    folder with the logs of a thousand nodes, the load could bring down the file server.
    """

    FOLDERS = ("state", "nodes", "beat", "ranks", "exit", "trace")

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number

    def make(self) -> None:
        """Create the folder and its subfolders; another node may already have created them."""
        self.path.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        for name in self.FOLDERS:
            (self.path / name).mkdir(mode=PRIVATE_FOLDER, exist_ok=True)

    def set_aside(self) -> None:
        """Move the files of an older try of this attempt into `earlier-<n>`.

        Its state is moved first: an agent that polls in between finds no master and keeps waiting.
        """
        held = list_names(self.path)
        names = [name for name in held if not name.startswith("earlier-")]
        aside = self.path / f"earlier-{len(held) - len(names)}"
        aside.mkdir(mode=PRIVATE_FOLDER)
        for name in sorted(names, key=lambda name: name != "state"):
            os.rename(self.path / name, aside / name)
        self.make()

    @property
    def plan(self) -> Path:
        """File of the attempt's own plan, which exists only in a run that may morph; otherwise the
        run's plan applies."""
        return self.path / "plan.json"

    @property
    def training(self) -> Path:
        return self.path / "training.json"

    @property
    def owner(self) -> Path:
        """File with the session of the manager that made this attempt, in a run that may morph."""
        return self.path / "owner.json"

    @property
    def master(self) -> Path:
        return self.path / "state" / "master.json"

    @property
    def go(self) -> Path:
        return self.path / "state" / "go.json"

    @property
    def partition(self) -> Path:
        """File with the partition that Varuna chose for a script's model, written by rank 0."""
        return self.path / "state" / "partition.json"

    @property
    def preflight(self) -> Path:
        return self.path / "preflight.txt"

    @property
    def track_log(self) -> Path:
        return self.path / "track.log"

    @property
    def stop(self) -> Path:
        return self.path / "state" / "stop.json"

    @property
    def signal(self) -> Path:
        return self.path / "state" / "signal.json"

    @property
    def next(self) -> Path:
        """File that names the next attempt of a split run; written before the outcome."""
        return self.path / "state" / "next.json"

    @property
    def outcome(self) -> Path:
        return self.path / "state" / "outcome.json"

    @property
    def end(self) -> Path:
        """File with the `End` from which `outcome` is rendered; written before `outcome`."""
        return self.path / "state" / "end.json"

    @property
    def hang(self) -> Path:
        """File with the hang that the agents found (varuna_core/hang)."""
        return self.path / "state" / "hang.json"

    @property
    def hanging(self) -> Path:
        """File with the suspected hang; it exists only while the agents suspect one."""
        return self.path / "state" / "hanging.json"

    @property
    def cut(self) -> Path:
        """File with the nodes whose connection to the first node or to the manager is broken."""
        return self.path / "state" / "cut.json"

    def hang_signs(self, index: int) -> Path:
        """File with the state of a node's ranks while they hang."""
        return self.path / "hang" / f"{index}.json"

    def hang_evidence(self, index: int) -> Path:
        """File on processes, sockets, GPUs and the kernel's log of a node whose ranks hang."""
        return self.path / "hang" / f"evidence-{index}.json"

    def where(self, rank: int) -> Path:
        """File in which a thread of a rank reports its stacks and collectives to the agent."""
        return self.path / "ranks" / f"{rank}.where.json"

    def ask(self, rank: int) -> Path:
        """FIFO through which the agent requests the stacks of a rank."""
        return self.path / "ranks" / f"{rank}.ask"

    @property
    def skipped(self) -> Path:
        """File with the saves that the checkpoint folder could not store."""
        return self.path / "state" / "skipped.json"

    @property
    def link(self) -> Path:
        """File with the address of the agents' hub while it listens (agent/meeting/link.py)."""
        return self.path / "state" / "link.json"

    def node_log(self, node: str, kind: str) -> Path:
        """Return a node's log of `kind` out, err, times or gpu.jsonl (gpu in older run folders)."""
        return self.path / f"{node}.{kind}"

    def node_report(self, index: int) -> Path:
        return self.path / "nodes" / f"{index}.json"

    def beat(self, index: int) -> Path:
        return self.path / "beat" / f"{index}.json"

    def error_file(self, rank: int) -> Path:
        """File in which torch's `record` decorator writes the exception that ended a rank."""
        return self.path / "ranks" / f"{rank}.error.json"

    def ended(self, rank: int) -> Path:
        """File in which a rank's Python recorded the exception that ended it."""
        return self.path / "ranks" / f"{rank}.ended"

    def steps(self, rank: int) -> Path:
        """File with the optimizer steps that a rank's Python has counted."""
        return self.path / "ranks" / f"{rank}.steps"

    def list_steps(self) -> dict[int, Path]:
        """Return the existing files of counted steps by rank."""
        folder = self.path / "ranks"
        names = [name for name in list_names(folder) if re.fullmatch(r"\d+\.steps", name)]
        return {int(name[:-6]): folder / name for name in sorted(names)}

    def rank_log(self, rank: int, kind: str) -> Path:
        """Return a rank's log of `kind` out or err, which only older run folders have."""
        return self.path / "ranks" / f"{rank}.{kind}"

    def exit(self, rank: int) -> Path:
        """Exit file of one rank, in run folders of older versions."""
        return self.path / "exit" / f"{rank}.json"

    def node_exits(self, index: int) -> Path:
        """File with the exits of those ranks of a node that have ended."""
        return self.path / "exit" / f"node-{index}.json"

    def exits_reserve(self, index: int) -> Path:
        """Path of a file of blanks that reserves disk space for the exits of the node's ranks, in
        case the disk is full when they end."""
        return self.path / "exit" / f".node-{index}.reserve"

    def trace(self, rank: int) -> Path:
        """File with the trace of one rank, in older run folders and from ranks with an older
        varuna_core."""
        return self.path / "trace" / f"{rank}.jsonl"

    def node_trace(self, index: int) -> Path:
        """File with the trace of all ranks of a node; each batch of lines names its rank."""
        return self.path / "trace" / f"node-{index}.jsonl"

    def list_traces(self) -> list[Path]:
        """List all existing traces, both of nodes and of ranks."""
        folder = self.path / "trace"
        names = [name for name in list_names(folder) if re.fullmatch(r"(node-)?\d+\.jsonl", name)]
        return [folder / name for name in sorted(names)]


class MorphFolder:
    """Files that the manager and the nodes of a run that may morph exchange."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        parts = (self.epochs, self.nodes, self.obeyed, self.leave(0).parent, self.joins)
        for folder in (self.path, *parts):
            folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)

    @property
    def epochs(self) -> Path:
        """Folder of the managers' files (claims, states) of all epochs. They lie in one folder,
        since a listing of that folder makes an NFS client see new files of other nodes."""
        return self.path / "epochs"

    def claim(self, epoch: int) -> Path:
        """File of the claim of an epoch; created only once and never changed."""
        return self.epochs / f"{epoch}.claim.json"

    def manager(self, epoch: int) -> Path:
        return self.epochs / f"{epoch}.manager.json"

    def orders(self, epoch: int) -> Path:
        return self.epochs / f"{epoch}.orders.json"

    def turn(self, epoch: int, number: int) -> Path:
        """File of the node whose turn it is to give back a job without a manager; created once."""
        return self.epochs / f"{epoch}.turn-{number}.json"

    def given_back(self, epoch: int) -> Path:
        """File that says that the scheduler has heard a node's request to give back the job."""
        return self.epochs / f"{epoch}.given-back.json"

    @property
    def unclaimed(self) -> Path:
        """File with the manager's state in runs of older versions, which had no epochs."""
        return self.path / "manager.json"

    @property
    def lock(self) -> Path:
        """Lock that the manager holds while it runs."""
        return self.path / "manager.lock"

    @property
    def shrink_lock(self) -> Path:
        """Lock held while nodes are asked to leave, so that requests count each other's nodes."""
        return self.path / "shrink.lock"

    @property
    def tend_lock(self) -> Path:
        """Lock that `vjob tend` holds while it runs."""
        return self.path / "tend.lock"

    @property
    def link(self) -> Path:
        """File with the address of the manager (agent/meeting/link.py)."""
        return self.path / "link.json"

    @property
    def nodes(self) -> Path:
        return self.path / "nodes"

    @property
    def obeyed(self) -> Path:
        return self.path / "obeyed"

    def history(self, seat: int, key: str) -> Path:
        """File of the orders that an agent has carried out; `key` identifies the agent."""
        return self.obeyed / f"{seat}-{key[:8]}.jsonl"

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
    def known_lines(self) -> Path:
        """File with the rows of the catalogue of known lines that the nodes need."""
        return self.path / "known_lines.json"

    @property
    def master_pid(self) -> Path:
        """File with the id of the process that users may signal, in a run on a list of machines."""
        return self.path / "master.pid"

    @property
    def hang_guard(self) -> Path:
        """File in which `vjob guard` says if agents may act on hangs."""
        return self.path / "hang-guard.json"

    @property
    def machines(self) -> Path:
        """File with the machines that got an agent, as spelled in the list, by the node's name."""
        return self.path / "machines.json"

    @property
    def training(self) -> Path:
        return self.path / "training.json"

    @property
    def program(self) -> Path:
        """The built-in programs in one file, which any python3 with torch can run."""
        return self.path / "program.pyz"

    @property
    def function(self) -> Path:
        """Program that runs a pickled function on a rank; one file, for a python3 with submitit."""
        return self.path / "function.pyz"

    @property
    def submitted_pickle(self) -> Path:
        """The pickled function and its arguments; after a checkpoint, with its new state."""
        return self.path / "function" / "submitted.pkl"

    @property
    def function_facts(self) -> Path:
        return self.path / "function" / "facts.json"

    def result_pickle(self, rank: int) -> Path:
        return self.path / "function" / f"{rank}.result.pkl"

    @property
    def code(self) -> Path:
        """The copy of the user's code that the ranks run, if the run has one."""
        return self.path / "code"

    @property
    def code_files(self) -> Path:
        """File that lists the copy of the user's code, without files that ranks add there."""
        return self.path / "code.json"

    @property
    def code_diff(self) -> Path:
        """File with the differences between the user's code and its commit."""
        return self.path / "code.diff"

    @property
    def packages(self) -> Path:
        """File that lists the packages of the ranks' interpreter when the run was submitted."""
        return self.path / "packages.txt"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def trackers(self) -> Path:
        """File with the settings of the plug-ins of `track`."""
        return self.path / "trackers.json"

    @property
    def track(self) -> Path:
        """Folder with the state of the trackers: how far each has read, and W&B's own files."""
        return self.path / "track"

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
        """File of the events that `vjob` writes, on another host than the batch script."""
        return self.path / "events-vjob.jsonl"

    @property
    def morph_events(self) -> Path:
        """File of the events that the manager writes; agents write to the other files of events."""
        return self.path / "events-morph.jsonl"

    @property
    def morph(self) -> MorphFolder:
        return MorphFolder(self.path / "morph")

    def all_events(self) -> list[Path]:
        return list_files(self.path, "events*.jsonl")

    def batch_logs(self) -> list[Path]:
        """The logs of the batch scripts, which srun and slurmstepd write to as well."""
        return list_files(self.path, "scheduler*.out")

    def local_states(self) -> list[Path]:
        """The files of the states of jobs on this machine."""
        return list_files(self.path, "local*.json")

    def attempt(self, number: int) -> AttemptFolder:
        return AttemptFolder(self.path / f"attempt-{number}", number)

    def attempts(self) -> list[AttemptFolder]:
        """List the attempts that were started, oldest first."""
        numbers = ((path, as_whole(path.name[8:])) for path in list_files(self.path, "attempt-*"))
        found = [
            AttemptFolder(path, number)
            for path, number in numbers
            if number is not None and not is_foreign_link(path)
        ]
        return sorted(found, key=lambda attempt: attempt.number)


def make_run_folder(path: Path) -> RunFolder:
    """Create a folder for this run only: a second run in the same second gets the suffix -1, -2,
    ..."""
    path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    for number in range(1000):
        own = path if number == 0 else path.with_name(f"{path.name}-{number}")
        try:
            own.mkdir(mode=PRIVATE_FOLDER)
        except FileExistsError:
            continue
        return RunFolder(own)
    raise FileExistsError(errno.EEXIST, "1000 runs were made in this second", str(path.parent))
