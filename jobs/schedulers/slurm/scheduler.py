"""Slurm as the scheduler. Jobs are submitted with sbatch and looked up with squeue, then scontrol,
then sacct, since not every cluster has accounting.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from varuna_core.facts.catalogue.known_line import Scope
from varuna_core.facts.cause import EndCause
from varuna_core.facts.cluster import NodeState
from varuna_core.facts.known import Known, NotKnown, Value
from varuna_core.records.machine import KEPT, clean_environment
from varuna_core.records.plan import Plan
from varuna_core.records.runfolder import RunFolder
from vjob.jobs import process
from vjob.jobs.conf.schema import NodeGroup, Queue
from vjob.jobs.errors import RefusedError, UncertainError, VjobError
from vjob.jobs.known_lines import load_catalogue
from vjob.jobs.schedulers import broker
from vjob.jobs.schedulers.base import (
    FLOOR_S,
    NO_CHANGES,
    SELDOM_S,
    Capabilities,
    Scheduler,
    ScriptRequest,
    Submission,
)
from vjob.jobs.schedulers.diagnosis import Diagnosis
from vjob.jobs.schedulers.foreign_job import ForeignJob
from vjob.jobs.schedulers.job import (
    OVER,
    IdleNode,
    JobState,
    SchedulerJob,
    StartEstimate,
)
from vjob.jobs.schedulers.slurm import commands as slurm
from vjob.jobs.schedulers.slurm.commands import AWAY, COMMENT_PREFIX
from vjob.jobs.schedulers.slurm.foreign_job import ask_slurm_job
from vjob.jobs.schedulers.slurm.header import render_header
from vjob.jobs.schedulers.slurm.nodes import (
    build_show_node_command,
    build_sinfo_idle_command,
    build_sinfo_nodes_command,
    build_sinfo_queues_command,
    parse_idle_nodes,
    parse_node_states,
    parse_queues,
    parse_sinfo_nodes,
    parse_starting_nodes,
)

LONG_FLOOR_S, MANY_JOBS = 30.0, 1000
"""Least seconds between two queries for a user who has more than MANY_JOBS jobs. Jobs of other
users are not counted, since their number would cost another query."""
JUST_S = 5.0
"""Seconds after a change within which a query about only that job is the cheapest."""
FULL_S = 300.0
"""Greatest age in seconds of an answer with all fields that a cheaper query, of only the states,
may confirm."""


SETTLED = OVER - {JobState.PREEMPTED, JobState.NODE_FAIL, JobState.BOOT_FAIL}
"""Final states after which Slurm never restarts a job by itself."""


class SlurmScheduler(Scheduler):
    """Scheduler of a Slurm cluster."""

    name = "slurm"
    title = "Slurm"
    can = Capabilities(
        arrays=True,
        het=True,
        test_only=True,
        starts_steps=True,
        requeues=True,
        has_queue=True,
    )

    def find_obstacle(self) -> str:
        if shutil.which("sbatch") is not None:
            return ""
        return "sbatch is not on PATH; log in to a cluster node, or use scheduler: local"

    def render_header(self, asked: ScriptRequest) -> list[list[str]]:
        return render_header(asked)

    def make_command(self, submission: Submission) -> list[str]:
        """Return sbatch in the environment of a fresh login, terminated after `SUBMIT_S`."""
        script = submission.script
        sbatch = slurm.build_sbatch_command(
            str(script),
            str(script.parent),
            after=submission.after,
            expedite=submission.limits.may_requeue and _can_expedite(),
        )
        # Ctrl-C goes to the whole foreground group: sbatch must not die of it once its job is made.
        return ["timeout", f"{SUBMIT_S:g}", *process.build_clean_command(sbatch, KEPT)]

    def parse_job_id(self, text: str) -> str:
        return slurm.parse_sbatch_output(text)

    def explain_failure(self, code: int, text: str) -> VjobError:
        if code == TIMED_OUT:
            return explain_failure(f"timed out after {SUBMIT_S:g} s")
        return explain_failure(text)

    def test(self, run: RunFolder, group: str | None, text: str) -> StartEstimate:
        """Return Slurm's estimate of when and where the job would start (`sbatch --test-only`)."""
        with tempfile.TemporaryDirectory(prefix="vjob-") as folder:
            script = Path(folder) / run.batch_script(group).name
            script.write_text(text, encoding="utf-8")
            command = slurm.build_sbatch_command(str(script), folder, test_only=True)
            result = process.run(command, env=clean_environment(os.environ))
        said = (result.err + result.out).strip()
        if result.code != 0 and is_uncertain(said):
            raise UncertainError(f"sbatch --test-only had no answer: {said[-300:]}")
        if result.code != 0:
            raise refuse(said)
        return slurm.parse_estimate(said)

    def poll(
        self,
        jobs: Sequence[str],
        *,
        user: int | None = None,
        floor_s: float = FLOOR_S,
        after: Mapping[str, float] = NO_CHANGES,
    ) -> dict[str, list[SchedulerJob]]:
        """Poll with one squeue for all jobs of the user, whose answer all of his commands share
        (broker.py).

        If one job has changed since the last answer, according to its files, only this job is
        queried, by scontrol. For jobs that squeue lacks, scontrol is asked for the first, and sacct
        once for the others.
        """
        found: dict[str, list[SchedulerJob]] = {job: [] for job in jobs}
        try:
            self._ask_controller(found, user, floor_s, after)
        except UncertainError as error:
            raise UncertainError(str(error), _ask_settled(found)) from None
        forgotten = [job for job in found if not found[job]]
        if forgotten:
            # sacct lags: it said PENDING of jobs that ran (22.05). It is asked for the dead alone.
            with contextlib.suppress(UncertainError):
                _fill(found, [info for info in _ask_accounting(forgotten) if info.state in OVER])
        # squeue lists components in no order of ours.
        return {job: sorted(infos, key=lambda info: info.component) for job, infos in found.items()}

    def _ask_controller(
        self,
        found: dict[str, list[SchedulerJob]],
        user: int | None,
        floor_s: float,
        after: Mapping[str, float],
    ) -> None:
        """Fill in the jobs that squeue or scontrol knows."""
        if not found:
            return
        queue = slurm.build_squeue_command(os.getuid() if user is None else user)
        late = _find_late(queue, floor_s, {job: after.get(job, 0.0) for job in found})
        if len(late) == 1:
            try:
                _fill(found, _ask_job(late[0], floor_s, after.get(late[0], 0.0)))
            except UncertainError as error:
                if AWAY in str(error).lower():  # seconds were spent on that
                    raise
        if not all(found.values()):
            since = max((after.get(job, 0.0) for job in late if not found[job]), default=0.0)
            _fill(found, _ask_queue(queue, floor_s, since, tuple(found)))
        missing = [job for job in found if not found[job]]
        if missing:
            _fill(found, _ask_job(missing[0], SELDOM_S, after.get(missing[0], 0.0)))
        if len(missing) > 1 and found[missing[0]]:  # then it is new, and others may be
            _fill(found, _ask_queue(queue, floor_s, time.time(), tuple(found)))

    def ask_earlier(self, job: str) -> dict[str, tuple[EndCause, ...]]:
        """Return the ends of earlier starts from accounting; empty if it does not answer."""
        return slurm.parse_earlier(_ask(slurm.build_earlier_command(job)))

    def ask_node_states(
        self, nodes: Sequence[str], *, floor_s: float = SELDOM_S
    ) -> list[NodeState]:
        """Return the states of nodes that are not well; empty if the controller does not answer."""
        return parse_node_states(_ask(build_show_node_command(nodes), floor_s)) if nodes else []

    def find_idle(self, queues: Sequence[str | None]) -> list[IdleNode]:
        return parse_idle_nodes(_ask(build_sinfo_idle_command(queues)))

    def ask_time_left(self, job: str) -> Known[float]:
        infos = self.poll([job], floor_s=SELDOM_S)[job]
        now = time.time()
        left = [_shift(info.left, now - (info.asked or now)) for info in infos]
        known = [one for one in left if isinstance(one, Value)]
        if known:
            return min(known, key=lambda one: one.value)
        return left[0] if left else NotKnown(f"Slurm does not show job {job}")

    def cancel(self, job: str) -> None:
        _tell(slurm.build_scancel_command(job))

    def spell_cancel(self, jobs: Sequence[str]) -> str:
        return f"scancel {' '.join(jobs)}"

    def requeue(self, job: str) -> None:
        """Requeue the job, which Slurm allows only with the conf's `cluster.requeue: true`."""
        try:
            _tell(slurm.build_requeue_command(job))
        except VjobError as error:
            why = f"job {job} was not requeued (cluster.requeue: true allows it): {error}"
            raise VjobError(why) from None

    def build_beside(
        self,
        job: str,
        parts: Sequence[tuple[int | None, int]],
        group: str,
        command: Sequence[str],
        names: Sequence[str] = (),
    ) -> list[str]:
        return slurm.build_beside_command(job, parts, group, command, names)

    def explain_step(self, text: str) -> str:
        """Explain srun's `Expired or invalid job` while the controller does not answer."""
        if AWAY not in text.lower():
            return ""
        return "Slurm's controller does not answer: try again once it does"

    def build_shell(
        self, job: SchedulerJob, host: str, group: str, command: Sequence[str], *, tty: bool
    ) -> list[str]:
        return slurm.build_shell_command(job, host, group, command, tty=tty)

    def ask_foreign_job(self, word: str) -> ForeignJob | None:
        return ask_slurm_job(word)

    def find_run_id(self, comment: str) -> str:
        prefix, _, run = comment.partition(COMMENT_PREFIX)
        return "" if prefix else run

    def list_warnings(self, plan: Plan) -> list[str]:
        from vjob.jobs.schedulers.slurm.settings import judge_het_morph, judge_own_kill_wait

        return [text for text in (judge_het_morph(plan), judge_own_kill_wait(plan)) if text]

    def list_start_checks_s(self, num_jobs: int) -> Sequence[float]:
        """Return the pauses before polls of new jobs. Slurm gives a reason only after it has
        considered a job: a single job, which costs one request, is polled twice; several jobs once,
        a little later."""
        return (0.0, 2.7) if num_jobs == 1 else (0.3,)

    def examine(self) -> list[Diagnosis]:
        from vjob.jobs.schedulers.slurm.settings import examine_slurm

        return examine_slurm()

    def list_queues(self) -> list[str]:
        """Return the names of Slurm partitions; empty if sinfo does not answer."""
        text = _ask(build_sinfo_nodes_command())
        return sorted({line.split("|")[1].strip(" *") for line in text.splitlines() if "|" in line})

    def describe_queues(self) -> list[tuple[str, Queue]]:
        return parse_queues(_ask(build_sinfo_queues_command()))

    def list_nodes(self, queue: str | None = None) -> list[NodeGroup]:
        command = build_sinfo_nodes_command(queue)
        return parse_sinfo_nodes(broker.ask(command, floor_s=SELDOM_S).text)

    def suggest_nodes(self) -> tuple[list[NodeGroup], str]:
        if shutil.which("sinfo") is None:
            return [], ""
        groups = parse_starting_nodes(_ask(build_sinfo_nodes_command()))
        note = "sinfo did not answer, so this runs on this machine. On Slurm remove\n"
        note += "`scheduler` and add queue: NAME and gpus: KIND:COUNT"
        return groups, "" if groups else note

    def ask_canceller(self, job: str) -> str:
        """Return the user who cancelled a job, by accounting, which may lag behind."""
        command = slurm.build_sacct_command([job])
        try:
            answer = broker.ask(command, floor_s=SELDOM_S, after=time.time() - JUST_S)
        except UncertainError:
            return ""
        number = slurm.parse_canceller(answer.text)
        return "" if number is None else name_user(number)

    def find_orphans(self, after: float = 0.0) -> dict[str, list[SchedulerJob]]:
        found: dict[str, list[SchedulerJob]] = {}
        queue = slurm.build_squeue_command(os.getuid())
        for info in _ask_queue(queue, FLOOR_S, after):
            if info.comment.startswith(COMMENT_PREFIX):
                found.setdefault(info.comment[len(COMMENT_PREFIX) :], []).append(info)
        return found


def name_user(number: int) -> str:
    """Return the name of the user with this id; the id itself if there is none."""
    try:
        return pwd.getpwuid(number).pw_name
    except (KeyError, OverflowError):
        return str(number)


def _can_expedite() -> bool:
    from vjob.jobs.schedulers.slurm.settings import read_settings

    facts = read_settings()
    if "SLURM_VERSION" not in facts and slurm.EXPEDITES in facts.get("SlurmctldParameters", ""):
        facts["SLURM_VERSION"] = _ask(["sbatch", "--version"])  # of this machine: asks nobody
    return slurm.can_expedite(facts)


SUBMIT_S = 600.0
"""Seconds after which sbatch is terminated: a loaded controller may take minutes to answer."""
TIMED_OUT = 124
"""Exit code of `timeout` if it terminated the command."""

UNCERTAIN = ("timed out", "zero bytes were transmitted", "unexpected message")
"""Messages of sbatch after which the job may exist, since only the controller's answer was lost."""


def is_uncertain(text: str) -> bool:
    """Return True for a message of sbatch after which the job may or may not exist."""
    return any(words in text.lower() for words in UNCERTAIN)


def explain_failure(text: str) -> VjobError:
    """Return the error for the output of a failed sbatch."""
    if is_uncertain(text):
        return UncertainError(
            f"sbatch had no answer, and the job may exist all the same: {text.strip()[-300:]}\n"
            "  `vjob list` adopts it if so, and calls the run refused if not"
        )
    return refuse(text)


def refuse(text: str) -> RefusedError:
    """Return the error for sbatch's output when it refused a job."""
    told = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in told if "error" in line.lower() or "sbatch" in line] or told
    return RefusedError("sbatch refused the job", lines, load_catalogue().match(Scope.SUBMIT, text))


def _find_late(queue: Sequence[str], floor_s: float, after: Mapping[str, float]) -> list[str]:
    """Return the jobs for which the cached answer about the whole queue is too old, and which are
    to be queried alone.

    A query about a single job is also the cheapest just after a submit or a cancel, and for a
    caller that polls only one job and seldom.
    """
    known, now = broker.peek(queue) or broker.Answer(), time.time()
    late = [job for job, since in after.items() if known.known < since <= now]
    if known.asked and broker.is_fresh(known, floor_s):
        return late
    if len(after) > 1:
        return []
    (job, since), *_ = after.items()
    alone = broker.peek(slurm.build_show_job_command(job)) or broker.Answer()
    is_known = bool(alone.text) and alone.known >= since and broker.is_fresh(alone, floor_s)
    return [job] if is_known or floor_s >= SELDOM_S or now - since < JUST_S else []


def _ask_job(job: str, floor_s: float, after: float) -> list[SchedulerJob]:
    """Return the components of one job from scontrol; empty if it does not know the job."""
    answer = broker.ask(slurm.build_show_job_command(job), floor_s=floor_s, after=after)
    return _date(_parse_once(slurm.parse_show_job_output, answer.text), answer)


def _ask_accounting(jobs: Sequence[str]) -> list[SchedulerJob]:
    answer = broker.ask(slurm.build_sacct_command(jobs), floor_s=SELDOM_S)
    return list(_parse_once(slurm.parse_sacct_output, answer.text))


def _ask_settled(found: Mapping[str, list[SchedulerJob]]) -> dict[str, list[SchedulerJob]]:
    """Return jobs that are over for good according to accounting, while the controller does not
    answer.

    A job that was preempted or lost a node may restart, which only the controller knows.
    """
    known: dict[str, list[SchedulerJob]] = {job: [] for job in found}
    with contextlib.suppress(UncertainError):
        if known:
            _fill(known, _ask_accounting(list(known)))
    return {
        job: infos
        for job, infos in known.items()
        if infos and all(info.state in SETTLED for info in infos)
    }


def _ask_queue(
    queue: Sequence[str], floor_s: float, after: float, jobs: tuple[str, ...] | None = None
) -> list[SchedulerJob]:
    """Return all jobs of a user from squeue, or only `jobs`."""
    known = broker.peek(queue)
    if known is not None and known.text.count("\n") > MANY_JOBS:
        floor_s = max(floor_s, LONG_FLOOR_S)
    if known is not None and after <= known.known and not broker.is_fresh(known, floor_s):
        _confirm(queue, known)
    answer = broker.ask(queue, floor_s=floor_s, after=after)
    return _date(_parse_once(slurm.parse_squeue_output, answer.text, jobs), answer)


@functools.lru_cache(maxsize=4)
def _parse_once(
    parse: Callable[..., list[SchedulerJob]], text: str, *jobs: tuple[str, ...] | None
) -> tuple[SchedulerJob, ...]:
    """Parse an answer once, however many polls read it."""
    return tuple(parse(text, *jobs))


def _confirm(queue: Sequence[str], known: broker.Answer) -> None:
    """Confirm the cached answer by a cheaper query of only the states, if squeue supports it
    (24.05) and all live jobs are running; any change leaves the answer unconfirmed."""
    age_s = time.time() - known.asked
    if not 0 <= age_s < FULL_S:
        return
    words = slurm.parse_queue_states(known.text)
    live = {job: word for job, word in words.items() if slurm.parse_state(word) not in OVER}
    if {slurm.parse_state(word) for word in live.values()} != {JobState.RUNNING}:
        return
    with contextlib.suppress(UncertainError):
        version = broker.ask(["squeue", "--version"], floor_s=broker.KEPT_S)
        if not slurm.has_only_state(version.text):
            return
        jobs = list(dict.fromkeys(job.partition("+")[0] for job in live))
        answer = broker.ask(slurm.build_states_command(jobs), floor_s=JUST_S)
        if slurm.parse_states(answer.text) == live:
            broker.confirm(queue, answer.known)


def _date(infos: Sequence[SchedulerJob], answer: broker.Answer) -> list[SchedulerJob]:
    """Set the time as of which the states of the jobs are true, and adjust their time left."""
    since_s = answer.known - answer.asked
    return [
        replace(
            info,
            asked=answer.known,
            left=_shift(info.left, since_s),
        )
        for info in infos
    ]


def _shift(left: Known[float], since_s: float) -> Known[float]:
    """Return the time that is left after `since_s` more seconds."""
    if isinstance(left, NotKnown):
        return left
    return replace(left, value=max(0.0, left.value - since_s))


def _ask(command: Sequence[str], floor_s: float = SELDOM_S) -> str:
    """Return the output of a seldom used tool; empty if the tool is missing or fails."""
    try:
        return broker.ask(command, floor_s=floor_s).text
    except UncertainError:
        return ""


def _tell(command: Sequence[str]) -> None:
    result = process.run(command, env=process.tool_environment(os.environ))
    if result.code != 0:
        raise VjobError(f"{' '.join(command)}: {(result.err or result.out).strip()}")


def _fill(found: dict[str, list[SchedulerJob]], infos: Sequence[SchedulerJob]) -> None:
    """Add the jobs for which `found` has no entries yet."""
    empty = {job for job in found if not found[job]}
    for info in infos:
        if info.leader in empty:
            found[info.leader].append(info)
