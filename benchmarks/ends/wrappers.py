"""Ends that a program between vjob and the training passes on, or that are told without an end.

A shell, make, torchrun, MPI or srun stands between: its exit code is that of another process, and
its own lines follow those of the training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from benchmarks.ends.errors import Wish
from benchmarks.ends.rows import HERE, STEPS, Job, Left, Place, Row, Said, Scene, Stop, Want
from varuna_core.facts.cause import Actor, EndCause
from varuna_core.facts.remedy import Action, Target

C = EndCause
EXCLUDE: Wish = (Action.EXCLUDE, Target.NODE)
MORE_MEMORY: Wish = (Action.RAISE, Target.MEMORY)
INSTALL: Wish = (Action.INSTALL, None)
TRACE = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    main()\n'
VALUE = f"{TRACE}ValueError: the batch is empty"
IMPORT = f"{TRACE}ModuleNotFoundError: No module named 'deepspeed'"
KILLED = "run.sh: line 3:  4711 Killed                  python main.py"
OOM_KILL = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been "
    "OOM Killed."
)
RULE = "------------------------------------------------------------"
CHILD_FAILED = f"""\
E1128 10:00:00.000000 4711 torch/distributed/elastic/multiprocessing/api.py:869] failed \
(exitcode: 1) local_rank: 1 (pid: 4713) of binary: /usr/bin/python3
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
{RULE}
Failures:
[1]:
  time      : 2026-11-28_10:00:01
  rank      : 3 (local_rank: 3)
  exitcode  : 1 (pid: 4715)
{RULE}
Root Cause (first observed failure):
[0]:
  time      : 2026-11-28_10:00:00
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 4713)
============================================================"""


class End(NamedTuple):
    """The lines of one rank, its exit code, and what is to be said of both."""

    name: str
    text: str
    code: int
    cause: EndCause = C.RANK_EXIT
    never: tuple[Wish, ...] = ()


EXITS = (
    End("a shell passes SIGKILL on, without a word", "", 137, never=(MORE_MEMORY,)),
    End("a shell tells that its child was killed", KILLED, 137, never=(MORE_MEMORY,)),
    End("a shell passes SIGSEGV on", "run.sh: line 3:  4711 Segmentation fault      (core dumped) "
        "python main.py", 139, never=(MORE_MEMORY,)),
    End("a shell passes SIGSEGV on, without a word", "", 139),
    End("a shell passes SIGABRT on", "terminate called after throwing an instance of "
        "'std::runtime_error'\n  what():  bad shape\nrun.sh: line 3:  4711 Aborted             "
        "    (core dumped) python main.py", 134, never=(MORE_MEMORY,)),
    End("a shell passes SIGTERM on", "Terminated", 143, never=(MORE_MEMORY,)),
    End("a shell passes SIGINT on", f"{TRACE}KeyboardInterrupt", 130),
    End("set -e ends a shell after an exception", f"+ python main.py\n{VALUE}", 1,
        C.RANK_EXCEPTION),
    End("a trap of a shell tells of an exception",
        f"{VALUE}\nERROR: run.sh failed at line 12 (exit 1)", 1, C.RANK_EXCEPTION),
    End("make tells of an exception", f"{VALUE}\nmake: *** [Makefile:3: train] Error 1", 2),
    End("torchrun's own exception after two of its ranks'",
        "\n".join(f"[rank1]: {line}" for line in IMPORT.splitlines()) + "\n"
        + "\n".join(f"[rank3]: {line}" for line in VALUE.splitlines()) + f"\n{CHILD_FAILED}", 1,
        C.RANK_EXCEPTION),
    End("torchrun's own exception alone", CHILD_FAILED, 1, C.RANK_EXCEPTION, (INSTALL,)),
    End("sys.exit with a text", "no shard of the data fits", 1),
    End("MPI_Abort of MPICH", "Abort(13) on node 1 (rank 1 in comm 0): application called "
        "MPI_Abort(MPI_COMM_WORLD, 13) - process 1", 13),
    End("MPI_Abort of Open MPI", "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n"
        "with errorcode 7.\n\nNOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.",
        7),
    End("a core was dumped", "Fatal Python error: Aborted\n\nCurrent thread 0x7f (most recent call "
        'first):\n  File "train.py", line 9 in main', -6, C.RANK_SIGNAL),
    End("exit 255 of a remote shell", "Connection to n7 closed by remote host.", 255),
    End("exit 126, no permission", "bash: ./train: Permission denied", 126),
    End("exit 127, no such command", "run.sh: line 2: pyhton: command not found", 127),
)  # fmt: skip


RELAYED = (130, 134, 137, 139, 143)
"""Of a batch script these are signals: bash says them so. A rank may be any program."""


def list_wrapped() -> Iterator[Row]:
    yield from staged()
    yield from well()
    yield from of_srun()
    yield from really_run()


def fail(text: str, code: int) -> Scene:
    """Rank 1 on n2 ends with these lines, and its agent ends rank 0."""
    number = code if code > 0 else 128 - code
    return Scene(
        Job("FAILED", f"{number}:0"),
        (Left(1, code), Left(0, -15, -0.1, stopped=True)),
        (*STEPS, Said(text, 1, "err", -1.0)) if text else STEPS,
        Stop("rank", number, f"rank 1 on n2 exited {code}", "n2", 1),
        number,
    )


def staged() -> Iterator[Row]:
    for end in EXITS:
        actor = Actor.UNKNOWN if end.cause is C.RANK_SIGNAL else Actor.RANK
        never = (*end.never, EXCLUDE)
        for place in (Place.LAB, Place.MACHINES):
            want = Want(end.cause, actor, 1, "n2", never=never)
            yield Row(end.name, place, fail(end.text, end.code), want)
        if end.code > 0:
            job = Job("FAILED", f"{end.code}:0", "NonZeroExitCode")
            files = {"slurm-77.out": f"step 3/9 loss 1.00\n{end.text}\n"}
            cause = C.RANK_SIGNAL if end.code in RELAYED else end.cause
            cause = C.RANK_EXIT if end.text == CHILD_FAILED else cause
            rank = 1 if "[rank1]" in end.text else None
            want = Want(cause, None, rank, never=never)
            yield Row(end.name, Place.FOREIGN, Scene(job, files=files), want)
    yield Row(
        "the memory of the job's cgroup ran out, a shell passes it on", Place.LAB,
        replace(fail(KILLED, 137), said=(*STEPS, Said(KILLED, 1), Said(OOM_KILL, None))),
        Want(C.OOM_HOST, None, 1, "n2", remedies=(MORE_MEMORY,)),
    )  # fmt: skip


def well() -> Iterator[Row]:
    """Exceptions that were printed by programs that then ended well."""
    for name, text in (
        ("an exception was printed, then exit 0", VALUE),
        ("a thread's exception, then exit 0", f"Exception in thread Thread-1 (watch):\n{VALUE}"),
        ("torchrun's exception was printed, then exit 0", CHILD_FAILED),
    ):
        said = (*STEPS, Said(text, 1, "err", -1.0))
        yield Row(
            name, Place.LAB, Scene(Job("COMPLETED"), (Left(0, 0), Left(1, 0)), said, status=0),
            Want(C.COMPLETED, Actor.RANK, health="DONE", never=(INSTALL,)),
        )  # fmt: skip
        yield Row(
            name, Place.FOREIGN, Scene(Job("COMPLETED"), files={"slurm-77.out": f"{text}\n"}),
            Want(C.COMPLETED, None, health="DONE", never=(INSTALL,)),
        )  # fmt: skip


def of_srun() -> Iterator[Row]:
    """Lines of srun itself in the log of a job that vjob did not submit."""
    step = "step 3/9 loss 1.00\n"
    aborted = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
    daemon = "slurmstepd: error: *** {} 77{} ON b1 CANCELLED AT 2026-11-28T10:00:00{} ***\n"
    for name, text, job, cause, wants in (
        ("srun tells of an exit code", "srun: error: b1: task 1: Exited with exit code 5\n",
         Job("FAILED", "5:0", "NonZeroExitCode"), C.RANK_EXIT, ()),
        ("srun tells that a task was killed", f"srun: error: b1: task 1: Killed\n{aborted}",
         Job("FAILED", "137:0", "NonZeroExitCode"), C.RANK_SIGNAL, ()),
        ("srun tells of no memory", f"srun: error: b1: task 1: Out Of Memory\n{aborted}",
         Job("OUT_OF_MEMORY", "0:125", "OutOfMemory"), C.OOM_JOB, (MORE_MEMORY,)),
        ("srun tells of an exception's exit code",
         f"{VALUE}\nsrun: error: b1: task 1: Exited with exit code 1\n",
         Job("FAILED", "1:0", "NonZeroExitCode"), C.RANK_EXCEPTION, ()),
        ("slurmstepd tells of the time limit",
         aborted + daemon.format("STEP", ".0", " DUE TO TIME LIMIT"),
         Job("TIMEOUT", "0:15", "TimeLimit"), C.TIME_LIMIT, ()),
        ("slurmstepd tells of a cancel", aborted + daemon.format("JOB", "", ""),
         Job("CANCELLED", "0:15"), C.CANCELLED, ()),
    ):  # fmt: skip
        health = "CANCELLED" if cause is C.CANCELLED else "DEAD"
        yield Row(
            name, Place.FOREIGN, Scene(job, files={"slurm-77.out": step + text}),
            Want(cause, None, health=health, remedies=wants, never=(INSTALL, EXCLUDE)),
        )  # fmt: skip


RAISES = 'python3 -c "raise ValueError(1)"'
KILLS = 'python3 -c "import os; os.kill(os.getpid(), {})"'


def shell(text: str) -> str:
    """A program that becomes a shell."""
    return f"import os\nos.execvp('bash', ['bash', '-c', {text!r}])\n"


def really_run() -> Iterator[Row]:
    """Shells and Python programs on this machine."""
    left = Want(C.RANK_EXIT, Actor.RANK, 0, HERE, never=(MORE_MEMORY, EXCLUDE))
    raised = Want(C.RANK_EXCEPTION, Actor.RANK, 0, HERE)
    signal = Want(C.RANK_SIGNAL, Actor.UNKNOWN, 0, HERE, never=(EXCLUDE,))
    done = Want(C.COMPLETED, Actor.RANK, health="DONE")
    for name, program, want in (
        ("set -e after an exception", shell(f"set -e; {RAISES}; echo never"), raised),
        ("a shell goes on after an exception", shell(f"{RAISES}; echo done"), done),
        ("a shell exits 3 after an exception", shell(f"{RAISES}; exit 3"), left),
        ("set -e after kill -9", shell(f"set -e; {KILLS.format(9)}; echo never"), left),
        ("set -e after a crash", shell(f"set -e; {KILLS.format(11)}; echo never"), left),
        ("set -e after SIGTERM", shell(f"set -e; {KILLS.format(15)}; echo never"), left),
        ("set -e after SIGABRT", shell(f"set -e; {KILLS.format(6)}; echo never"), left),
        ("a shell kills itself", shell("kill -9 $$"), signal),
        ("pipefail behind tee", shell(f"set -o pipefail; {RAISES} 2>&1 | tee /dev/null"), left),
        ("no pipefail behind tee", shell(f"{RAISES} 2>&1 | tee /dev/null"), done),
        ("sys.exit with a text", "import sys\nsys.exit('no shard of the data fits')\n", left),
        ("sys.exit with a text in a handler",
         "import sys\ntry:\n    {}['x']\nexcept KeyError:\n    sys.exit('bad key')\n", left),
        ("sys.exit(True)", "import sys\nsys.exit(True)\n", left),
        ("sys.exit(None)", "import sys\nsys.exit(None)\n", done),
        ("an exception in atexit", "import atexit\natexit.register(lambda: 1 / 0)\n", done),
        ("an exception in a thread", "import threading\n"
         "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()\n", done),
        ("os.abort", "import os\nos.abort()\n", signal),
        ("a child of multiprocessing raised, the parent exits 4",
         "import multiprocessing, sys\ndef f(): raise ValueError(1)\n"
         "if __name__ == '__main__':\n    p = multiprocessing.Process(target=f)\n"
         "    p.start(); p.join(); sys.exit(4)\n", left),
    ):  # fmt: skip
        yield Row(name, Place.LOCAL, None, want, program=program)
