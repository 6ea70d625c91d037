"""The rows: what ended, on which kind of job, and what vjob is to say of it.

The expected facts were written before the code that makes them true, from what really happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.ends.errors import (
    ERRORS,
    PythonError,
    Wish,
    can_be_caught,
    render_catching,
    render_raising,
    run_program,
)
from benchmarks.ends.rows import HERE, STEPS, Job, Left, Place, Row, Said, Scene, Stop, Want
from benchmarks.ends.wrappers import list_wrapped
from varuna_core.facts.cause import Actor, EndCause
from varuna_core.facts.remedy import Action, Target

C = EndCause
RESUBMIT: Wish = (Action.RESUBMIT, None)
EXCLUDE: Wish = (Action.EXCLUDE, Target.NODE)
MORE_TIME: Wish = (Action.RAISE, Target.WALLTIME)
MORE_MEMORY: Wish = (Action.RAISE, Target.MEMORY)
SHOW_STACK: Wish = (Action.SET, Target.ENVIRONMENT)
LOG_FOLDER: Wish = (Action.INSPECT, Target.LOG_FOLDER)
WELL = (Left(0, 0), Left(1, 0))
TOLD = (Left(0, -15, stopped=True), Left(1, -15, stopped=True))
FROM_OUTSIDE = Stop("signal", 143, "SIGTERM from outside, seen first on n1", cause=C.STOPPED)
GLOO = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[127.0.0.1]:2950"
)
OOM_LINE = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been "
    "OOM Killed."
)
KERNEL = "Out of memory: Killed process 4711 (python) total-vm:9kB"
CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE")
NUMBERS = {
    "SIGHUP": 1, "SIGINT": 2, "SIGQUIT": 3, "SIGILL": 4, "SIGABRT": 6, "SIGBUS": 7, "SIGFPE": 8,
    "SIGKILL": 9, "SIGUSR1": 10, "SIGSEGV": 11, "SIGPIPE": 13, "SIGTERM": 15, "SIGXCPU": 24,
}  # fmt: skip


def list_rows(errors: Sequence[PythonError] = ERRORS) -> list[Row]:
    """All rows, in the order of the page; those of staged errors are of these."""
    groups = (states(), signals(), agents(), machines(), allocations(), containers(), witnesses())
    more = (raised(errors), caught(errors), run_here(), list_wrapped())
    return [row for group in (*groups, *more) for row in group]


# What the scheduler says.


def told(word: str, *, judged: bool = True, **job: Any) -> Scene:
    """Ranks that were told to end by the scheduler."""
    return Scene(Job(word, **job), TOLD, stop=FROM_OUTSIDE, status=143 if judged else None)


def states() -> Iterator[Row]:
    def row(name: str, scene: Scene, *want: object, **more: object) -> Row:
        return Row(name, Place.LAB, scene, Want(*want, **more))  # type: ignore[arg-type]

    none = Scene(Job("FAILED"), said=(), started=False)
    again = {"remedies": (RESUBMIT,), "never": (EXCLUDE,)}
    yield row(
        "COMPLETED", Scene(Job("COMPLETED"), WELL, status=0), C.COMPLETED, Actor.RANK, health="DONE"
    )
    yield row(
        "saved and left after vjob cancel",
        Scene(Job("FAILED", "143:0"), WELL, status=0, is_cancelled=True),
        C.CANCELLED, Actor.VJOB, health="CANCELLED", never=(RESUBMIT,),
    )  # fmt: skip
    cancelled = {"health": "CANCELLED"}
    yield row(
        "CANCELLED by a user", told("CANCELLED", by="1"), C.CANCELLED, Actor.USER, **cancelled
    )
    yield row("CANCELLED by root", told("CANCELLED", by="0"), C.CANCELLED, Actor.ADMIN, **cancelled)
    yield row(
        "CANCELLED by nobody known", told("CANCELLED"), C.CANCELLED, Actor.UNKNOWN, **cancelled
    )
    yield row(
        "CANCELLED with vjob cancel", replace(told("CANCELLED", by="1"), is_cancelled=True),
        C.CANCELLED, Actor.VJOB, **cancelled, never=(RESUBMIT,),
    )  # fmt: skip
    yield row(
        "CANCELLED as it waited", replace(none, job=Job("CANCELLED", by="1")),
        C.CANCELLED, Actor.USER, **cancelled,
    )  # fmt: skip
    yield row(
        "CANCELLED, a run before it failed", replace(none, job=Job("CANCELLED"), awaited="FAILED"),
        C.DEPENDENCY_FAILED, Actor.SCHEDULER, **cancelled,
    )  # fmt: skip
    yield row("TIMEOUT", told("TIMEOUT"), C.TIME_LIMIT, Actor.SCHEDULER, remedies=(MORE_TIME,))
    yield row(
        "TIMEOUT, all killed, nothing judged",
        Scene(Job("TIMEOUT", "0:15"), (Left(0, -9, -2.0), Left(1, -9, -2.0))),
        C.TIME_LIMIT, Actor.SCHEDULER, remedies=(MORE_TIME,), never=(EXCLUDE,),
    )  # fmt: skip
    yield row(
        "TIMEOUT, no exits at all", Scene(Job("TIMEOUT", "0:15")),
        C.TIME_LIMIT, Actor.SCHEDULER, remedies=(MORE_TIME,), never=(EXCLUDE,),
    )  # fmt: skip
    crash = run_program(render_raising(ERRORS[4])).err
    yield row(
        "TIMEOUT, a rank had failed before and hung as it ended",
        Scene(Job("TIMEOUT"), (Left(1, 1, -40.0), Left(0, -9, -1.0, stopped=True)),
              (*STEPS, Said(crash, 1, "err", -41.0)),
              Stop("rank", 1, "rank 1 on n2 exited 1", "n2", 1), 1),
        C.RANK_EXCEPTION, Actor.RANK, 1, "n2", never=(MORE_TIME,),
    )  # fmt: skip
    yield row(
        "DEADLINE", told("DEADLINE"), C.DEADLINE, Actor.SCHEDULER,
        remedies=((Action.CHANGE, Target.DEADLINE),), never=(EXCLUDE,),
    )  # fmt: skip
    killed = Stop("rank", 137, "rank 1 on n2 was ended by SIGKILL", "n2", 1)
    yield row(
        "OUT_OF_MEMORY, a rank was killed",
        Scene(Job("OUT_OF_MEMORY", "0:125"), (Left(1, -9), TOLD[0]), stop=killed, status=137),
        C.OOM_HOST, None, 1, "n2", remedies=(MORE_MEMORY,),
    )  # fmt: skip
    yield row(
        "OUT_OF_MEMORY, no exits", Scene(Job("OUT_OF_MEMORY", "0:125")),
        C.OOM_JOB, Actor.SCHEDULER, remedies=(MORE_MEMORY,), never=(EXCLUDE,),
    )  # fmt: skip
    yield row(
        "NODE_FAIL, one node left no exits", Scene(Job("NODE_FAIL"), (TOLD[0],), stop=FROM_OUTSIDE),
        C.NODE_FAIL, Actor.NODE, None, "n2", remedies=(EXCLUDE,),
    )  # fmt: skip
    yield row(
        "NODE_FAIL before it began", replace(none, job=Job("NODE_FAIL")), C.NODE_FAIL, Actor.NODE
    )
    yield row("BOOT_FAIL", replace(none, job=Job("BOOT_FAIL")), C.BOOT_FAIL, Actor.SCHEDULER)
    yield row("PREEMPTED", told("PREEMPTED"), C.PREEMPTED, Actor.SCHEDULER, **again)
    yield row(
        "PREEMPTED as it waited", replace(none, job=Job("PREEMPTED")), C.PREEMPTED, None, **again
    )
    yield row("REVOKED", replace(none, job=Job("REVOKED")), C.REVOKED, Actor.SCHEDULER, health="")
    yield row("REQUEUED", told("REQUEUED", judged=False, restarts=1), None, health="REQUEUED")
    yield row(
        "REQUEUE_HOLD", told("REQUEUE_HOLD", judged=False, restarts=1), None, health="REQUEUED"
    )
    yield row(
        "SPECIAL_EXIT", told("SPECIAL_EXIT", judged=False, restarts=1), None, health="REQUEUED"
    )
    yield row(
        "FAILED 0:53, no output file", replace(none, job=Job("FAILED", "0:53")),
        C.NO_OUTPUT, Actor.SCHEDULER, remedies=(LOG_FOLDER,),
    )  # fmt: skip
    yield row(
        "FAILED, JobLaunchFailure", replace(none, job=Job("FAILED", "1:0", "JobLaunchFailure")),
        C.LAUNCH_FAILED, Actor.SCHEDULER, remedies=(LOG_FOLDER,),
    )  # fmt: skip
    yield row(
        "FAILED 0:9 before it began", replace(none, job=Job("FAILED", "0:9")),
        C.BATCH_KILLED, Actor.UNKNOWN, never=(LOG_FOLDER, EXCLUDE),
    )  # fmt: skip
    yield row(
        "FAILED 0:9, the batch script was killed while the ranks ran", Scene(Job("FAILED", "0:9")),
        C.BATCH_KILLED, Actor.UNKNOWN, never=(EXCLUDE,),
    )  # fmt: skip
    setup = Said("/log/batch.sh: line 9: module: command not found", None)
    yield row(
        "FAILED 127:0, its setup failed", replace(none, job=Job("FAILED", "127:0"), said=(setup,)),
        C.START_FAILED, None, never=(EXCLUDE,),
    )  # fmt: skip
    yield row("forgotten", replace(none, forgotten=True), C.FORGOTTEN, Actor.UNKNOWN)
    yield row(
        "forgotten, with an outcome", Scene(Job(""), WELL, status=0, forgotten=True),
        C.COMPLETED, Actor.RANK, health="DONE",
    )  # fmt: skip
    yield row("a word of a later Slurm", replace(told("NEWSTATE"), status=None), None, health="")


# A signal.


def by_signal(number: int, *, node: str = "n2", **more: object) -> Scene:
    name = next(word for word, value in NUMBERS.items() if value == number)
    stop = Stop("rank", 128 + number, f"rank 1 on {node} was ended by {name}", node, 1)
    exits = (Left(1, -number), Left(0, -15, stopped=True))
    code = 128 + number
    scene = Scene(Job("FAILED", f"{code}:0"), exits, stop=stop, status=code)
    return replace(scene, **more)  # type: ignore[arg-type]


def signals() -> Iterator[Row]:
    for place, node in ((Place.LAB, "n2"), (Place.LOCAL, HERE)):
        for name, number in NUMBERS.items():
            shows = name in CRASHES
            yield Row(
                f"a rank got {name}",
                place,
                by_signal(number, node=node),
                Want(C.RANK_SIGNAL, Actor.UNKNOWN, 1, node,
                     remedies=(SHOW_STACK,) if shows else (),
                     never=(EXCLUDE,) if shows else (EXCLUDE, SHOW_STACK)),
            )  # fmt: skip
    killed = Want(C.RANK_SIGNAL, Actor.UNKNOWN, 1, "n2", never=(MORE_MEMORY,))
    memory = Want(C.OOM_HOST, None, 1, "n2", remedies=(MORE_MEMORY,))
    for name, said, want in (
        ("slurmstepd tells of the memory", Said(OOM_LINE, None), memory),
        ("the kernel's line on its node", Said(KERNEL, 1), memory),
        ("the kernel's line on another node", Said(KERNEL, 0), killed),
        ("the kernel's line an hour before", Said(KERNEL, 1, "err", -3600.0), killed),
        ("a caught MemoryError", Said("MemoryError", 1, "err", -15.0), killed),
        ("a caught MemoryError of another rank", Said("MemoryError", 0, "err", -1.0), killed),
    ):
        yield Row(f"SIGKILL, {name}", Place.LAB, by_signal(9, said=(*STEPS, said)), want)
    yield Row(
        "SIGKILL, memory of an earlier attempt", Place.LAB,
        by_signal(9, earlier=(Said(KERNEL, 1), *STEPS)), killed,
    )  # fmt: skip


# Agents and supervisors.


def agents() -> Iterator[Row]:
    lost = Stop("lost", 113, "n2 was lost: no sign of life for 60 s from n1, says n1", "n2")
    one_left = (Left(0, -15, stopped=True),)
    lab, here = Place.LAB, Place.LOCAL
    yield Row(
        "a node fell silent", lab, Scene(Job("FAILED", "113:0"), one_left, stop=lost, status=113),
        Want(C.NODE_SILENT, Actor.NODE, None, "n2", remedies=(EXCLUDE,)),
    )  # fmt: skip
    yield Row(
        "an agent left no exits", lab, Scene(Job("FAILED", "113:0"), one_left, status=143),
        Want(C.AGENT_DIED, Actor.NODE, 1, "n2", remedies=(EXCLUDE,)),
    )  # fmt: skip
    yield Row(
        "the agent was killed", here, Scene(Job("FAILED", "137:0"), status=137),
        Want(C.AGENT_DIED, None, 0, HERE, remedies=(RESUBMIT,), never=(EXCLUDE,),
             silent="was lost"),
    )  # fmt: skip
    yield Row(
        "the supervisor was killed", here, Scene(Job("RUNNING", has_supervisor=False)),
        Want(C.SUPERVISOR_DIED, Actor.UNKNOWN, remedies=(RESUBMIT,), never=(EXCLUDE,),
             silent="node"),
    )  # fmt: skip
    gone = Stop("signal", 143, "SIGTERM from outside, seen first on this machine", cause=C.STOPPED)
    yield Row(
        "the supervisor was killed, its ranks were told", here,
        Scene(Job("RUNNING", has_supervisor=False), TOLD, stop=gone, status=143),
        Want(C.SUPERVISOR_DIED, Actor.UNKNOWN, remedies=(RESUBMIT,), never=(EXCLUDE,),
             silent="node"),
    )  # fmt: skip
    yield Row(
        "the supervisor did not start", here,
        Scene(Job("PENDING", has_supervisor=False), said=(), started=False),
        Want(C.SUPERVISOR_NOT_STARTED, Actor.UNKNOWN, never=(EXCLUDE,)),
    )  # fmt: skip
    yield Row(
        "time limit", here, Scene(Job("TIMEOUT", "143:0"), TOLD, stop=gone, status=143),
        Want(C.TIME_LIMIT, Actor.SCHEDULER, remedies=(MORE_TIME,), never=(EXCLUDE,)),
    )  # fmt: skip
    yield Row(
        "vjob cancel", here,
        Scene(Job("CANCELLED", "143:0"), TOLD, stop=gone, status=143, is_cancelled=True),
        Want(C.CANCELLED, Actor.VJOB, health="CANCELLED", never=(RESUBMIT, EXCLUDE)),
    )  # fmt: skip
    yield Row(
        "the supervisor got SIGTERM", here,
        Scene(Job("CANCELLED", "143:0"), TOLD, stop=gone, status=143),
        Want(C.CANCELLED, Actor.UNKNOWN, health="CANCELLED", never=(EXCLUDE,)),
    )  # fmt: skip
    for place in (lab, here):
        node = HERE if place is here else "n2"
        yield Row(
            "all is well", place, Scene(Job("COMPLETED"), WELL, status=0),
            Want(C.COMPLETED, Actor.RANK, health="DONE"),
        )  # fmt: skip
        said = f"not ready: {node}: disk: 12 MB free in /tmp"
        yield Row(
            "preflight", place,
            Scene(Job("FAILED", "112:0"), said=(), went=False, status=1,
                  failed_check=("disk", "12 MB free in /tmp"),
                  stop=Stop("not-ready", 112, said, node, cause=C.PREFLIGHT)),
            Want(C.PREFLIGHT, Actor.AGENT, None, node),
        )  # fmt: skip
        yield Row(
            "srun failed although all ranks exited 0", place,
            Scene(Job("FAILED", "1:0"), WELL, status=1), Want(C.UNKNOWN, None),
        )  # fmt: skip
        yield Row(
            "the ranks could not be started", place,
            Scene(Job("FAILED", "1:0"), said=(), went=False, status=1),
            Want(C.START_FAILED, None, never=(EXCLUDE,)),
        )  # fmt: skip
    silent = "not ready: no report from node 1 (m): see the scheduler's log"
    yield Row(
        "a node did not report", lab,
        Scene(Job("FAILED", "112:0"), said=(), reports=(0,), went=False, status=1,
              stop=Stop("not-ready", 112, silent, cause=C.NOT_MET)),
        Want(C.NOT_MET, Actor.AGENT),
    )  # fmt: skip


# A list of machines, and runs inside a job.


def machines() -> Iterator[Row]:
    one_left = (Left(0, -15, stopped=True),)

    def row(name: str, scene: Scene, *want: object, **more: object) -> Row:
        return Row(name, Place.MACHINES, scene, Want(*want, **more))  # type: ignore[arg-type]

    def lost(reason: str, cause: EndCause) -> Scene:
        stop = Stop("lost", 113, f"n2 was lost: {reason}", "n2", cause=cause)
        return Scene(Job("FAILED", "113:0"), one_left, stop=stop, status=113)

    def refused(reason: str, cause: EndCause) -> Scene:
        stop = Stop("not-ready", 112, reason, cause=cause)
        return Scene(Job("FAILED", "112:0"), said=(), went=False, reports=(), stop=stop, status=112)

    cut = "it cannot be reached: is it up? (ssh: ssh: connect to host n2 port 22: No route to host)"
    yield row("ssh was cut", lost(cut, C.MACHINE_UNREACHABLE), C.MACHINE_UNREACHABLE, Actor.NODE,
              None, "n2", remedies=(EXCLUDE,))  # fmt: skip
    yield row("an agent was killed", lost("its agent was killed, or ssh ended without a word",
              C.AGENT_DIED), C.AGENT_DIED, Actor.NODE, None, "n2")  # fmt: skip
    yield row("a machine was restarted", lost("it was restarted", C.MACHINE_REBOOTED),
              C.MACHINE_REBOOTED, Actor.NODE, None, "n2")  # fmt: skip
    yield row("no login", refused("n2: Permission denied (publickey)", C.MACHINE_UNREACHABLE),
              C.MACHINE_UNREACHABLE, Actor.AGENT)  # fmt: skip
    yield row("the list is empty", refused("machines lists no machine", C.MACHINE_LIST_EMPTY),
              C.MACHINE_LIST_EMPTY, Actor.AGENT, never=(EXCLUDE,))  # fmt: skip
    told_here = Stop("cancel", 143, "SIGTERM to the job on this machine")
    yield row("vjob cancel", Scene(Job("CANCELLED", "143:0"), TOLD, stop=told_here, status=143,
              is_cancelled=True), C.CANCELLED, Actor.VJOB, health="CANCELLED")  # fmt: skip
    yield row("the supervisor got SIGTERM", Scene(Job("CANCELLED", "143:0"), TOLD, stop=told_here,
              status=143), C.CANCELLED, Actor.UNKNOWN, health="CANCELLED")  # fmt: skip
    yield row("the supervisor was killed", Scene(Job("RUNNING", has_supervisor=False)),
              C.SUPERVISOR_DIED, Actor.UNKNOWN, remedies=(RESUBMIT,), never=(EXCLUDE,))  # fmt: skip
    yield row("a rank got SIGKILL", by_signal(9), C.RANK_SIGNAL, Actor.UNKNOWN, 1, "n2",
              never=(MORE_MEMORY,))  # fmt: skip
    yield row("a rank got SIGSEGV", by_signal(11), C.RANK_SIGNAL, Actor.UNKNOWN, 1, "n2",
              remedies=(SHOW_STACK,))  # fmt: skip
    yield row("the kernel's line on its node", by_signal(9, said=(*STEPS, Said(KERNEL, 1))),
              C.OOM_HOST, None, 1, "n2")  # fmt: skip


def allocations() -> Iterator[Row]:
    def row(name: str, scene: Scene, *want: object, **more: object) -> Row:
        return Row(name, Place.ALLOCATION, scene, Want(*want, **more))  # type: ignore[arg-type]

    for word, cause, remedy in (
        ("TIMEOUT", C.TIME_LIMIT, MORE_TIME),
        ("COMPLETED", C.ALLOCATION_ENDED, RESUBMIT),
        ("FAILED", C.ALLOCATION_ENDED, RESUBMIT),
        ("PREEMPTED", C.PREEMPTED, RESUBMIT),
        ("DEADLINE", C.DEADLINE, RESUBMIT),
        ("NODE_FAIL", C.NODE_FAIL, RESUBMIT),
    ):
        yield row(f"the job around it ended as {word}",
                  told("CANCELLED", within=word), cause, remedies=(remedy,),
                  never=((Action.CHANGE, Target.DEADLINE),))  # fmt: skip
    yield row("the job around it was cancelled", told("CANCELLED", within="CANCELLED"),
              C.CANCELLED, health="CANCELLED")  # fmt: skip
    yield row("vjob cancel", replace(told("CANCELLED"), is_cancelled=True), C.CANCELLED, Actor.VJOB,
              health="CANCELLED")  # fmt: skip
    yield row("the supervisor was killed", Scene(Job("RUNNING", has_supervisor=False)),
              C.SUPERVISOR_DIED, Actor.UNKNOWN, remedies=(RESUBMIT,))  # fmt: skip
    yield row("a rank got SIGKILL", by_signal(9), C.RANK_SIGNAL, Actor.UNKNOWN, 1, "n2")
    yield row("slurmstepd tells of the memory", by_signal(9, said=(*STEPS, Said(OOM_LINE, None))),
              C.OOM_HOST, None, 1, "n2", remedies=(MORE_MEMORY,))  # fmt: skip


# Containers.


def containers() -> Iterator[Row]:
    cases = (
        ("podman, image not known", "podman",
         "podman exited 125: Error: x/y:1: image not known", ()),
        ("podman, image cannot be fetched", "podman",
         "podman exited 125: Error: initializing source docker://x/y:1: reading manifest 1 in "
         "docker.io/x/y: manifest unknown", ()),
        ("podman, mount source missing", "podman",
         "podman exited 125: Error: statfs /data/none: no such file or directory", ()),
        ("enroot, no image", "enroot",
         "enroot exited 1: [ERROR] No such file or directory: /images/pytorch.sqsh", ()),
        ("enroot, mount source missing", "enroot",
         "enroot exited 1: enroot-mount: failed to mount: /data/none at /data: No such file or "
         "directory", ()),
        ("apptainer, image missing", "apptainer",
         "apptainer exited 255: FATAL:   could not open image /images/x.sif: failed to retrieve "
         "path for /images/x.sif: lstat /images/x.sif: no such file or directory", ()),
    )  # fmt: skip
    for place in (Place.LAB, Place.LOCAL):
        node = "n2" if place is Place.LAB else HERE
        for name, runtime, text, wants in cases:
            said = f"not ready: {node}: container: {text}"
            yield Row(
                name, place,
                Scene(Job("FAILED", "112:0"), said=(), went=False, status=1, container=runtime,
                      failed_check=("container", text),
                      stop=Stop("not-ready", 112, said, node, cause=C.CONTAINER)),
                Want(C.CONTAINER, Actor.AGENT, None, node,
                     remedies=wants, never=(EXCLUDE,)),
            )  # fmt: skip
    for code, text in (
        (125, "Error: container_linux.go: starting container process caused: exec format error"),
        (126, "Error: crun: open executable: Permission denied: OCI permission denied"),
        (127, "Error: crun: executable file `train` not found in $PATH: No such file or directory: "
              "OCI runtime attempted to invoke a command that was not found"),
    ):  # fmt: skip
        stop = Stop("rank", code, f"rank 1 on n2 exited {code}: {text}", "n2", 1)
        yield Row(
            f"podman, a rank exited {code}", Place.LAB,
            Scene(Job("FAILED", f"{code}:0"), (Left(1, code), TOLD[0]), (Said(text, 1),), stop,
                  code, container="podman"),
            Want(C.RANK_EXIT, Actor.RANK, 1, "n2", never=(EXCLUDE,)),
        )  # fmt: skip


# Witnesses that are none, and some that are.


def fails(err: str, code: int = 1, *, other: str = "", at: float = -1.0, raised: str = "") -> Scene:
    """Rank 1 on n2 ends by itself with this on its stderr; rank 0 is ended by its agent."""
    said = [*STEPS, Said(err, 1, "err", at)] if err else [*STEPS]
    if other:
        said.append(Said(other, 0, "err", -0.2))
    how = f"exited {code}" if code > 0 else f"was ended by signal {-code}"
    number = code if code > 0 else 128 - code
    return Scene(
        Job("FAILED", f"{number}:0"),
        (Left(1, code, raised=raised), Left(0, -15, -0.1, stopped=True)),
        tuple(said),
        Stop("rank", number, f"rank 1 on n2 {how}", "n2", 1),
        number,
    )


TRACE = 'Traceback (most recent call last):\n  File "t.py", line 9, in <module>\n    main()\n'


def witnesses() -> Iterator[Row]:
    install: Wish = (Action.INSTALL, None)
    noise = f"{TRACE}ModuleNotFoundError: No module named 'deepspeed'"
    value = f"{TRACE}ValueError: the batch is empty"

    def row(name: str, scene: Scene, *want: object, **more: object) -> Row:
        return Row(name, Place.LAB, scene, Want(*want, **more))  # type: ignore[arg-type]

    mine = (C.RANK_EXCEPTION, Actor.RANK, 1, "n2")
    left = (C.RANK_EXIT, Actor.RANK, 1, "n2")
    yield row("an optional import was caught, another exception ended it",
              fails(f"{noise}\n{value}"), *mine, never=(install,), silent="deepspeed")  # fmt: skip
    chained = (
        f"{noise}\n\nDuring handling of the above exception, another exception occurred:\n\n"
        f"{TRACE}RuntimeError: no engine"
    )
    yield row("an exception raised from another", fails(chained), *mine, remedies=(install,))
    yield row("a caught exception, then sys.exit(3)", fails(noise, 3), *left, never=(install,))
    later = replace(
        fails("no data left, giving up", 1),
        said=(Said(noise, 1, "err", -21.0), *STEPS, Said("no data left, giving up", 1)),
    )
    yield row("a caught exception, steps, then exit 1 with a message", later, *left,
              never=(install,))  # fmt: skip
    quoted = 'config.py:3:     raise ModuleNotFoundError("No module named deepspeed")\nbad config'
    yield row("a source line was quoted", fails(quoted, 2), *left, never=(install,))
    logged = "could not import it: ModuleNotFoundError: No module named 'deepspeed'"
    yield row("a logged line quotes an exception, then sys.exit(4)", fails(logged, 4), *left,
              never=(install,))  # fmt: skip
    yield row("a logged line quotes an exception, another ended it", fails(f"{logged}\n{value}"),
              *mine, never=(install,), silent="deepspeed")  # fmt: skip
    thread = "Exception in thread Thread-1 (watch):\n" + noise + "\n" + value
    yield row("a thread's exception before it", fails(thread), *mine, never=(install,),
              silent="deepspeed")  # fmt: skip
    yield row("a thread's exception, then sys.exit(4)",
              fails("Exception in thread Thread-1 (watch):\n" + noise, 4), *left,
              never=(install,))  # fmt: skip
    ignored = f"{value}\nException ignored in: <function X.__del__ at 0x7f>\n{noise}"
    yield row("an exception in __del__ after it", fails(ignored), *mine, never=(install,),
              silent="deepspeed")  # fmt: skip
    yield row("the other rank tells of a closed connection",
              fails(value, other=f"{TRACE}{GLOO}"), *mine, silent="pair.cc")  # fmt: skip
    yield row("the other rank's own error after it",
              fails(value, other=noise), *mine, never=(install,), silent="deepspeed")  # fmt: skip
    yield row("exit 5 without a word, the other rank printed an error",
              fails("", 5, other=noise), *left, never=(install,), silent="deepspeed")  # fmt: skip
    old = replace(fails("", 5), said=(*STEPS, Said(noise, 1, "err", -3600.0)))
    yield row("exit 5, an error an hour before", old, *left, never=(install,), silent="deepspeed")
    earlier = replace(fails("", 5), earlier=(*STEPS, Said(noise, 1, "err")))
    yield row("exit 5, an error of the attempt before", earlier, *left, never=(install,),
              silent="deepspeed")  # fmt: skip
    out = replace(fails("", 5), said=(*STEPS, Said(noise, 1, "out")))
    yield row("exit 5, an error on standard output", out, *left, never=(install,),
              silent="deepspeed")  # fmt: skip
    stepped = replace(fails("", 1), said=(Said(noise, 1, "err", -21.0), *STEPS))
    yield row("exit 1, steps after the error", stepped, *left, never=(install,),
              silent="deepspeed")  # fmt: skip
    yield row("the exception is in the error file alone",
              fails("", 1, raised="ValueError: the batch is empty"), *mine)  # fmt: skip
    yield row("the error file outranks a printed one",
              fails(noise, 1, raised="ValueError: the batch is empty"), *mine, never=(install,),
              silent="deepspeed")  # fmt: skip
    prefixed = "\n".join(f"[rank1]: {line}" for line in value.splitlines())
    yield row("torch's prefix before each line", fails(prefixed), *mine, silent="rank1")
    torn = f"{value}\n[rank1]:[W1128 10:00:00.1 ProcessGroupGloo.cpp:1] destroy it first"
    yield row("a library's warning after the exception", fails(torn), *mine)
    syntax = '  File "t.py", line 3\n    x x\n      ^\nSyntaxError: invalid syntax'
    yield row("a syntax error", fails(syntax), *mine)
    own = f"{TRACE}NoMoreShards"
    yield row("an exception of an odd name", fails(f"{noise}\n{own}"), *mine, never=(install,),
              silent="deepspeed")  # fmt: skip
    nan = f"{TRACE}ValueError: loss is nan at step 3, giving up"
    yield row("a rank gave up as the loss was no number", fails(nan),
              C.NOT_A_NUMBER, Actor.RANK, 1, "n2",
              remedies=((Action.LOWER, Target.LEARNING_RATE),))  # fmt: skip
    yield row("both ranks raised, rank 1 first",
              replace(fails(value, other=value), exits=(Left(1, 1, -0.5), Left(0, 1, -0.1))),
              *mine)  # fmt: skip
    fallout = replace(
        fails(f"{TRACE}{GLOO}"),
        exits=(Left(1, 1, -1.0), Left(0, -9, -1.2)),
        stop=Stop("rank", 1, "rank 1 on n2 exited 1", "n2", 1),
    )
    yield row("a rank was killed, the other one's connection closed and was first to tell", fallout,
              C.RANK_SIGNAL, Actor.UNKNOWN, 0, "n1")  # fmt: skip


# Twenty Python errors.


def raised(errors: Sequence[PythonError]) -> Iterator[Row]:
    """Each error raised, on every kind of job that is staged."""
    for error in errors:
        told_by = run_program(render_raising(error))
        actor = Actor.UNKNOWN if error.signal else Actor.RANK
        wants = () if error.wants is None else (error.wants,)
        scene = fails(told_by.err, error.code, other=f"{TRACE}{GLOO}")
        for place in (Place.LAB, Place.MACHINES, Place.ALLOCATION):
            fitting = tuple(w for w in wants if fits(w, place))
            yield Row(
                f"{error.name} raised", place, scene,
                Want(error.cause, actor, 1, "n2", remedies=fitting, never=(EXCLUDE,)),
            )  # fmt: skip
        number = error.code if error.code > 0 else 128 - error.code
        sbatch = tuple(w for w in wants if fits(w, Place.FOREIGN))
        merged = {"slurm-77.out": told_by.out + told_by.err}
        yield Row(
            f"{error.name} raised", Place.FOREIGN,
            Scene(Job("FAILED", f"{number}:0", "NonZeroExitCode"), files=merged),
            Want(error.cause, None, None, health="DEAD", remedies=sbatch, never=(EXCLUDE,)),
        )  # fmt: skip
        if error.cause is C.RANK_EXIT:  # its logs have no word of it
            continue
        short = told_by.out.replace("/3 ", "/9 ")
        yield Row(
            f"{error.name} raised", Place.BARE,
            Scene(Job(""), files={"n1.out": short, "n1.err": told_by.err}, age_s=90000.0),
            Want(error.cause, None, None, "n1", remedies=sbatch, never=(EXCLUDE,)),
        )  # fmt: skip


def fits(wish: Wish, place: Place) -> bool:
    """True where that kind of job has such a thing."""
    lacks = {
        Place.MACHINES: (Target.MEMORY,),
        Place.FOREIGN: (Target.LAUNCH,),
    }
    return wish[1] not in lacks.get(place, ())


def caught(errors: Sequence[PythonError]) -> Iterator[Row]:
    """Each error caught and printed, while the job ends for another reason."""
    for error in filter(can_be_caught, errors):
        never = () if error.wants is None else (error.wants,)
        err = run_program(render_catching(error, "sys.exit(3)\n"))
        out = run_program(render_catching(error, "sys.exit(3)\n", "stdout"))
        steps_after = (Said(err.err, 1, "err", -21.0), *STEPS)
        yield Row(
            f"{error.name} caught, SIGKILL", Place.LAB, by_signal(9, said=steps_after),
            Want(C.RANK_SIGNAL, Actor.UNKNOWN, 1, "n2", never=never),
        )  # fmt: skip
        yield Row(
            f"{error.name} caught at the end, exit 3", Place.LAB, fails(err.err, 3),
            Want(C.RANK_EXIT, Actor.RANK, 1, "n2", never=never),
        )  # fmt: skip
        yield Row(
            f"{error.name} caught at the end, time limit", Place.LAB,
            replace(told("TIMEOUT"), said=(*STEPS, Said(err.err, 1))),
            Want(C.TIME_LIMIT, Actor.SCHEDULER, remedies=(MORE_TIME,), never=never),
        )  # fmt: skip
        yield Row(
            f"{error.name} caught by rank 0, rank 1 exits 3", Place.MACHINES,
            replace(fails("", 3), said=(*STEPS, Said(err.err, 0))),
            Want(C.RANK_EXIT, Actor.RANK, 1, "n2", never=never),
        )  # fmt: skip
        yield Row(
            f"{error.name} caught, the job ended well", Place.FOREIGN,
            Scene(Job("COMPLETED"), files={"slurm-77.out": out.out}),
            Want(C.COMPLETED, None, health="DONE", never=never),
        )  # fmt: skip
        yield Row(
            f"{error.name} caught, exit 3", Place.FOREIGN,
            Scene(Job("FAILED", "3:0", "NonZeroExitCode"), files={"slurm-77.out": out.out}),
            Want(C.RANK_EXIT, None, never=never),
        )  # fmt: skip
        yield Row(
            f"{error.name} caught, time limit", Place.FOREIGN,
            Scene(Job("TIMEOUT", "0:15", "TimeLimit"), files={"slurm-77.out": out.out}),
            Want(C.TIME_LIMIT, Actor.SCHEDULER, remedies=(MORE_TIME,), never=never),
        )  # fmt: skip
        yield Row(
            f"{error.name} caught, all steps done", Place.BARE,
            Scene(Job(""), files={"n1.out": err.out, "n1.err": err.err}, age_s=90000.0,
                  err_is_older=True),
            Want(None, health="DONE", never=never),
        )  # fmt: skip


def run_here() -> Iterator[Row]:
    """Each error in a program that is really run on this machine."""
    for error in ERRORS:
        wants = () if error.wants is None else (error.wants,)
        here = tuple(w for w in wants if w[1] is not Target.MEMORY)
        actor = Actor.UNKNOWN if error.signal else Actor.RANK
        yield Row(
            f"{error.name} raised", Place.LOCAL, None,
            Want(error.cause, actor, 0, HERE, remedies=here, never=(EXCLUDE,)),
            program=render_raising(error),
        )  # fmt: skip
        if not can_be_caught(error):
            continue
        for name, after, stream, want in (
            ("caught, ends well", "", "stderr", Want(C.COMPLETED, Actor.RANK, health="DONE")),
            ("caught on stdout, exit 3", "sys.exit(3)\n", "stdout",
             Want(C.RANK_EXIT, Actor.RANK, 0, HERE)),
            ("caught, another raised", "raise ValueError('the real one')\n", "stderr",
             Want(C.RANK_EXCEPTION, Actor.RANK, 0, HERE)),
            ("caught, sys.exit(1)", "sys.exit(1)\n", "stderr",
             Want(C.RANK_EXIT, Actor.RANK, 0, HERE)),
            ("caught, os._exit(5)", "import os; os._exit(5)\n", "stderr",
             Want(C.RANK_EXIT, Actor.RANK, 0, HERE)),
        ):  # fmt: skip
            yield Row(
                f"{error.name} {name}", Place.LOCAL, None, replace(want, never=here),
                program=render_catching(error, after, stream),
            )  # fmt: skip


__all__ = ["PythonError", "list_rows"]
