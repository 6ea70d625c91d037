"""Makes the folder that an ended job leaves, by vjob's own writers, and the scheduler's answers.

Scene ─► plan, record, attempt (reports, exits, stop, logs with their times) ─► run folder
    └─► the words of squeue, scontrol and sacct, in the place of their processes
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from unittest import mock

from benchmarks.ends.rows import HERE, NODES, Left, Place, Row, Said, Scene
from tests.jobs.confs import make_conf, make_plan
from varuna_core.agent import closing
from varuna_core.agent.processes.last_words import LastWords
from varuna_core.facts.cause import EndCause
from varuna_core.records import record as records
from varuna_core.records.exits import BY_EXCEPTION, NodeExits, rank_exit, write_judgement
from varuna_core.records.files import write_json
from varuna_core.records.logs.times import format_mark
from varuna_core.records.machine import identify_machine, start_time
from varuna_core.records.nodes import FAIL, Check, NodeReport, write_report
from varuna_core.records.plan import Plan, write_plan
from varuna_core.records.record import JobRecord, RunRecord, append_event, write_record
from varuna_core.records.requests import write_stop
from varuna_core.records.runfolder import AttemptFolder, RunFolder
from vjob.containers.runtime import ImageKind
from vjob.jobs.schedulers import broker
from vjob.jobs.schedulers import run_index as index
from vjob.jobs.schedulers.broker import Answer
from vjob.jobs.schedulers.local.scheduler import state_file

SCHEDULERS = {
    Place.LOCAL: "local",
    Place.LAB: "slurm",
    Place.MACHINES: "ssh",
    Place.ALLOCATION: "allocation",
}
CLUSTERS = {
    Place.LOCAL: "{scheduler: local, nodes: {ranks: 2}}",
    Place.LAB: "{scheduler: slurm, walltime_min: 60, nodes: [{group: m, count: 2, queue: gpu1}]}",
    Place.MACHINES: "{machine_list: machines, nodes: [{group: m, count: 2}]}",
    Place.ALLOCATION: "{scheduler: slurm, nodes: [{group: m, count: 2}]}",
}
JOBS = {Place.LOCAL: "L7", Place.LAB: "77", Place.MACHINES: "L7", Place.ALLOCATION: "76.1"}
IMAGES = {
    "podman": "docker://debian:12",
    "enroot": "/images/pytorch.sqsh",
    "apptainer": "/images/x.sif",
}
OUTER = "76"
"""The job that a run of ALLOCATION is inside."""
FOREIGN = "77"
LINE = (
    "JobId=77 JobName=own UserId=ann({uid}) GroupId=g(0) JobState={word} Reason={reason} "
    "Restarts=0 ExitCode={code} TimeLimit=01:00:00 SubmitTime={begun} StartTime={begun} "
    "EndTime={ended} Partition=gpu2 NodeList=b1 NumNodes=1 TRES=cpu=1 Command=/x/job.sh "
    "WorkDir={folder} StdErr={folder}/{err} StdIn=/dev/null StdOut={folder}/slurm-77.out Power="
)


def stage(row: Row, folder: Path) -> str:
    """Make what the row's job left; returns the JOB to ask vjob about."""
    assert row.scene is not None
    if row.place in (Place.BARE, Place.FOREIGN):
        return _stage_files(row.place, row.scene, folder)
    return str(_stage_run(row.place, row.scene, folder).path)


def _stage_files(place: Place, scene: Scene, folder: Path) -> str:
    ended = time.time() - scene.age_s
    for name, text in scene.files.items():
        path = folder / name
        path.write_text(text)
        written = ended - 60 if scene.err_is_older and name.endswith(".err") else ended
        os.utime(path, (written, written))
    return str(folder) if place is Place.BARE else FOREIGN


def _stage_run(place: Place, scene: Scene, folder: Path) -> RunFolder:
    end = time.time() - scene.age_s
    run = RunFolder(folder / "log" / "staged-1")
    run.path.mkdir(parents=True)
    plan = build_plan(place, scene, run)
    write_plan(run.plan, plan)
    record = RunRecord(
        run=run.name, name="staged", state=records.SUBMITTED, scheduler=SCHEDULERS[place],
        layout=plan.layout, num_jobs=1, jobs=(JobRecord(id=JOBS[place], group=None),),
        submitted=end - (900 if scene.forgotten else 60), user="u", host="h", conf="c",
        version="0", pid=0, pid_start=None,
        after=(str(_stage_awaited(scene, folder)),) if scene.awaited else (),
    )  # fmt: skip
    write_record(run, record)
    index.add_run(run, "staged")
    index.add_job(run, JOBS[place])
    if scene.is_cancelled:
        append_event(run.vjob_events, records.CANCEL_ASKED, by="u")
    for said in scene.said:
        if said.rank is None:
            with run.scheduler_log().open("a") as log:
                log.write(f"{said.text.rstrip()}\n")
    number = 1 if scene.earlier else 0
    if scene.earlier:
        old = _open(run, 0, end - 40)
        _write_logs(old, place, scene.earlier, end - 40)
    if scene.started:
        _stage_attempt(run, number, place, scene, plan, end)
    if place is not Place.LAB and not scene.forgotten:
        write_json(state_file(run, None), build_state(place, scene, end))
    return run


def build_plan(place: Place, scene: Scene, run: RunFolder) -> Plan:
    """A plan of two ranks: on one node here, else on two."""
    box = ""
    if scene.container:
        box = f"container: {{runtime: {scene.container}, image: '{IMAGES[scene.container]}'}}\n"
    text = f"name: staged\nprogram: {{script: train.py}}\n{box}cluster: {CLUSTERS[place]}\n"
    kinds = {"apptainer": ImageKind.SIF, "enroot": ImageKind.SQUASHFS}
    kind = kinds.get(scene.container, ImageKind.REFERENCE)
    scheduler = SCHEDULERS[place]
    return make_plan(make_conf(text), run=run.name, scheduler=scheduler, image_kind=kind)


def _stage_awaited(scene: Scene, folder: Path) -> Path:
    """The folder of a run that is over."""
    run = RunFolder(folder / "log" / "before-1")
    run.path.mkdir()
    value = RunRecord(
        run=run.name, name="before", state=records.ENDED, scheduler="slurm", layout="plain",
        num_jobs=1, jobs=(JobRecord(id="70", group=None),), submitted=time.time() - 90, user="u",
        host="h", conf="c", version="0", pid=0, pid_start=None, verdict=scene.awaited,
    )  # fmt: skip
    write_record(run, value)
    return run.path


def name_nodes(place: Place) -> tuple[str, ...]:
    return (HERE,) if place is Place.LOCAL else NODES


def _open(run: RunFolder, number: int, at: float) -> AttemptFolder:
    attempt = run.attempt(number)
    attempt.make()
    write_json(attempt.master, {"time": at - 30, "attempt": number, "address": "127.0.0.1"})
    return attempt


def _stage_attempt(
    run: RunFolder, number: int, place: Place, scene: Scene, plan: Plan, end: float
) -> None:
    attempt, nodes = _open(run, number, end), name_nodes(place)
    opened = end - 30
    reports = [at for at in scene.reports if at < len(nodes)]
    for at in reports:
        bad = scene.failed_check if at == reports[-1] else None
        checks = () if bad is None else (Check(bad[0], FAIL, bad[1]),)
        write_report(
            attempt,
            NodeReport(
                index=at, host=nodes[at], group="m", address="127.0.0.1", interface="lo", gpus=0,
                clock_offset_s=0.0, opened=opened, ready=not checks, checks=checks, environment=(),
            ),
        )  # fmt: skip
        beat = {"index": at, "host": nodes[at], "time": end, "count": 9, "state": "running"}
        write_json(attempt.beat(at), beat)
    if scene.went:
        write_json(attempt.go, {"time": opened + 1, "opened": opened, "port": 1})
    _write_logs(attempt, place, scene.said, end)
    _write_exits(attempt, plan, nodes, scene, end)
    stop = scene.stop
    if stop is not None:
        write_stop(
            attempt, stop.kind, stop.code, stop.reason, node=stop.node, rank=stop.rank,
            cause=stop.cause,
        )  # fmt: skip
    if scene.status is not None:
        seen = closing.Scene(run, plan, attempt, scene.status)
        write_judgement(attempt, closing.judge(seen))


def _write_exits(
    attempt: AttemptFolder, plan: Plan, nodes: Sequence[str], scene: Scene, end: float
) -> None:
    for at, node in enumerate(nodes):
        mine = [left for left in scene.exits if plan.node_of_rank(left.rank).index == at]
        if not mine:
            continue
        exits = NodeExits(attempt, at, len(plan.node(at).ranks))
        for left in sorted(mine, key=lambda one: one.at):
            words = _hear(scene, left)
            printed = words.exception if left.code == BY_EXCEPTION else ""
            exits.write(
                rank_exit(
                    left.rank, node, left.code, stopped=left.stopped, started=end - 25,
                    ended=end + left.at, error=words.error, exception=left.raised or printed,
                )
            )  # fmt: skip


def _hear(scene: Scene, left: Left) -> LastWords:
    """The agent's ear for what a rank writes."""
    words = LastWords()
    for one in sorted(scene.said, key=lambda one: one.at):
        if one.at > left.at:
            break
        if one.rank == left.rank and one.stream == "out":
            words.note_out(one.at)
        elif one.rank == left.rank:
            words.note_err(one.text.encode().splitlines(), one.at)
    return words


def _write_logs(attempt: AttemptFolder, place: Place, said: Iterable[Said], end: float) -> None:
    """Logs with tags, and when their lines were written."""
    nodes = name_nodes(place)
    lines = [one for one in said if one.rank is not None]
    for at, node in enumerate(nodes):
        mine = [one for one in lines if len(nodes) == 1 or one.rank == at]
        sizes = {"out": 0, "err": 0}
        marks = b""
        for one in sorted(mine, key=lambda one: one.at):
            marks += format_mark(end + one.at, sizes["out"], sizes["err"])
            tagged = "".join(f"{one.rank}: {line}\n" for line in one.text.splitlines())
            with attempt.node_log(node, one.stream).open("a") as log:
                log.write(tagged)
            sizes[one.stream] += len(tagged.encode())
        attempt.node_log(node, "times").write_bytes(marks)
        for kind in sizes:
            path = attempt.node_log(node, kind)
            path.touch()
            os.utime(path, (end, end))


def build_state(place: Place, scene: Scene, end: float) -> dict[str, object]:
    """The state file of a supervisor of ours."""
    pid = os.getpid() if scene.job.has_supervisor else 2**22 - 1
    never = scene.job.word == "PENDING" and not scene.job.has_supervisor
    state: dict[str, object] = {
        "job": JOBS[place], "state": scene.job.word, "time": end - 60, "restarts": 0,
        "exit_code": scene.job.code, "reason": "" if scene.job.reason == "None" else
        scene.job.reason, "nodes": name_nodes(place)[0], "walltime_s": 3600.0,
    }  # fmt: skip
    if not never:
        mine = start_time(os.getpid())
        state |= {"pid": pid, "machine": identify_machine(), "pid_start": mine}
    if scene.job.within:
        state["within"] = scene.job.within
    return state


@contextlib.contextmanager
def answers_of_slurm(row: Row, folder: Path) -> Iterator[None]:
    """Slurm's commands answer for the row's job, and start nothing."""
    scene = row.scene
    assert scene is not None

    def ask(command: Sequence[str], **facts: float) -> Answer:
        text = ""
        if not scene.forgotten:
            text = answer(row.place, scene, command, folder)
        return Answer(text=text, asked=time.time())

    with (
        mock.patch.object(broker, "ask", ask),
        mock.patch.dict(os.environ, {"XDG_STATE_HOME": str(folder / "state")}),
    ):
        yield


def answer(place: Place, scene: Scene, command: Sequence[str], folder: Path) -> str:
    """Return the text that Slurm 22.05 prints for the fields that a command asks for."""
    job, tool = scene.job, Path(command[0]).name
    ended, begun = (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - age_s))
        for age_s in (scene.age_s, scene.age_s + 60)
    )
    is_outer = place is Place.ALLOCATION
    word = (job.within or "RUNNING") if is_outer else job.word
    facts = {
        "JobID": OUTER if is_outer else "77", "State": word, "JobState": word,
        "NodeList": "n[1-2]", "Reason": job.reason, "ExitCode": job.code, "Start": begun,
        "StartTime": begun, "End": ended, "EndTime": ended, "TimeLimit": "01:00:00",
        "Timelimit": "01:00:00", "RunTime": "00:01:00", "Restarts": str(job.restarts),
        "RestartCnt": str(job.restarts), "TimeLeft": "30:00", "HetJobID": "N/A",
        "HetJobOffset": "N/A", "Comment": "(null)" if is_outer else "vjob:staged-1",
    }  # fmt: skip
    facts |= {"JobArrayID": facts["JobID"], "JobId": facts["JobID"]}
    if place is Place.FOREIGN and tool == "scontrol":
        err = "slurm-77.err" if "slurm-77.err" in scene.files else "slurm-77.out"
        return LINE.format(
            uid=os.geteuid(), begun=begun, ended=ended, folder=folder, err=err,
            word=job.word, reason=job.reason, code=job.code,
        )  # fmt: skip
    if place is Place.FOREIGN or (is_outer and tool != "squeue"):
        return ""
    if tool == "scontrol" and "job" in command:
        return " ".join(f"{key}={value.replace(' ', '_')}" for key, value in facts.items()) + "\n"
    if tool == "sacct":
        names = command[command.index("-o") + 1].split(",")
        facts["State"] = f"CANCELLED by {job.by}" if job.by else job.word
        return "|".join(facts.get(name, "") for name in names) + "\n"
    if tool == "squeue" and "-O" in command:
        names = [name.partition(":")[0] for name in command[command.index("-O") + 1].split(",")]
        return "".join(f"{facts.get(name, 'N/A')}|" for name in names) + "\n"
    return ""


__all__ = ["EndCause", "answers_of_slurm", "stage"]
