"""Check Slurm's own settings, for `vjob doctor` (`scontrol show config`) and each submit."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from varuna_core.records.plan import Plan
from vjob.jobs.conf.schema import Cluster
from vjob.jobs.errors import UncertainError
from vjob.jobs.schedulers import broker
from vjob.jobs.schedulers.diagnosis import Diagnosis, read_text

EXIT_S = 5
"""Seconds that agents need after the grace time to end remaining processes and record the exits."""


CONF = Path("/etc/slurm/slurm.conf")
CONFIG_S = 86400.0
"""Greatest age in seconds of an answer used by a submit: settings seldom change, and a query costs
two requests."""


def examine_slurm() -> list[Diagnosis]:
    facts = read_slurm_config(floor_s=0.0)
    if facts is None:
        return [
            Diagnosis(
                name="slurm controller",
                status="fail",
                text="scontrol show config does not answer",
                remedy="try `scontrol ping`; is SLURM_CONF right? or set cluster.scheduler: local",
            )
        ]
    judges: tuple[Callable[[dict[str, str]], Diagnosis], ...] = (
        judge_version,
        judge_accounting,
        judge_het_steps,
        judge_preemption,
        judge_requeue,
        judge_kill_wait,
    )
    return [judge(facts) for judge in judges]


def read_settings() -> dict[str, str]:
    """Return Slurm's settings for a submit: from slurm.conf, which costs no request, if the file is
    here and complete; else from the controller. Empty if neither is available."""
    found = parse_conf_file(os.environ.get("SLURM_CONF", ""))
    return (read_slurm_config(floor_s=CONFIG_S) or {}) if found is None else found


def parse_conf_file(name: str) -> dict[str, str] | None:
    """Parse a slurm.conf to settings, with the names that `scontrol show config` uses; None if the
    file is missing or incomplete, such as one that includes another file."""
    text = read_text(name or str(CONF))
    if (
        text is None
        or re.search(r"(?im)^\s*include\s", text)
        or not re.search(r"(?im)^\s*ClusterName\s*=", text)
    ):
        return None
    known = {name.lower(): name for name in ("KillWait", "SlurmctldParameters")}
    lines = text.replace("\\\n", " ").splitlines()
    pairs = (line.partition("#")[0].partition("=") for line in lines)
    settings = {known.get(key.strip().lower(), ""): value.strip() for key, _, value in pairs}
    return {"KillWait": "30", **{key: value for key, value in settings.items() if key}}


def read_slurm_config(*, floor_s: float) -> dict[str, str] | None:
    """Return `scontrol show config` by key, at most `floor_s` old; None if there is no answer."""
    with contextlib.suppress(UncertainError):
        return parse_config(broker.ask(("scontrol", "show", "config"), floor_s=floor_s).text)
    return None


def parse_config(text: str) -> dict[str, str]:
    """Parse the `Key = Value` lines of `scontrol show config`."""
    return {
        key.strip(): value.strip()
        for key, mark, value in (line.partition("=") for line in text.splitlines())
        if mark
    }


def judge_version(facts: dict[str, str]) -> Diagnosis:
    text = facts.get("SLURM_VERSION", "")
    match = re.match(r"(\d{1,9})\.(\d{1,9})", text)
    version = (int(match.group(1)), int(match.group(2))) if match else (0, 0)
    if version < (20, 11):
        return Diagnosis(
            name="slurm version",
            status="fail" if match else "warn",
            text=f"Slurm {text or 'of unknown version'}",
            remedy="vjob needs 20.11 or later",
        )
    return Diagnosis(name="slurm version", status="ok", text=f"Slurm {text}")


def judge_accounting(facts: dict[str, str]) -> Diagnosis:
    kind = facts.get("AccountingStorageType", "")
    if "slurmdbd" in kind:
        return Diagnosis(name="accounting", status="ok", text=kind)
    return Diagnosis(
        name="accounting",
        status="warn",
        text=f"{kind or 'none'}: Slurm forgets a job soon after its end "
        f"(MinJobAge {facts.get('MinJobAge', 'unknown')})",
        remedy="nothing to do: vjob keeps its own record of each run",
    )


def judge_het_steps(facts: dict[str, str]) -> Diagnosis:
    if "disable_hetjob_steps" in facts.get("SchedulerParameters", ""):
        return Diagnosis(
            name="het jobs",
            status="warn",
            text="SchedulerParameters has disable_hetjob_steps: no step spans several components",
            remedy="set cluster.hetero: split in confs with several node groups",
        )
    if "bf_hetjob_immediate" not in facts.get("SchedulerParameters", ""):
        return Diagnosis(
            name="het jobs",
            status="note",
            text="het jobs start only by backfill, without bf_hetjob_immediate: longer waits",
            remedy="an admin may add bf_hetjob_immediate to SchedulerParameters; or hetero: split",
        )
    text = "one srun step may span all components of a het job"
    return Diagnosis(name="het jobs", status="ok", text=text)


def judge_preemption(facts: dict[str, str]) -> Diagnosis:
    if facts.get("PreemptType", "preempt/none") == "preempt/none":
        return Diagnosis(name="preemption", status="ok", text="jobs are not preempted here")
    parameters = facts.get("PreemptParameters", "") + facts.get("SlurmctldParameters", "")
    if "send_user_signal" in parameters:
        return Diagnosis(
            name="preemption", status="ok", text="a job gets a signal before it is preempted"
        )
    return Diagnosis(
        name="preemption",
        status="warn",
        text="preempted jobs get only TERM, and the grace time of their queue",
        remedy="an admin may set PreemptParameters=send_user_signal (preempt_send_user_signal in "
        "SlurmctldParameters up to 22.05)",
    )


def judge_requeue(facts: dict[str, str]) -> Diagnosis:
    match = re.search(r"cred_expire=(\d{1,9})\b", facts.get("AuthInfo", ""))
    delay_s = int(match.group(1)) if match else 120
    text = f"a requeued job waits about {delay_s} s before it can start"
    if facts.get("JobRequeue", "1") == "0":
        text += "; JobRequeue=0, so only requeue: true in the conf asks for it"
    return Diagnosis(name="requeue", status="ok", text=text)


def judge_kill_wait(facts: dict[str, str], grace_s: float = Cluster().grace_s) -> Diagnosis:
    """Compare KillWait, after which Slurm kills a signalled job, with the conf's grace_s."""
    match = re.match(r"(\d{1,9})\b", facts.get("KillWait", ""))
    kill_wait_s = int(match.group(1)) if match else 30
    most_s = max(1, kill_wait_s - EXIT_S)
    if grace_s > most_s:
        return Diagnosis(
            name="kill wait",
            status="warn",
            text=f"Slurm kills {kill_wait_s} s after TERM (KillWait), but cluster.grace_s is "
            f"{grace_s:.0f}: the last output of the ranks and their exit codes would be "
            "lost",
            remedy=f"set cluster.grace_s: {most_s}{' or less' if most_s > 1 else ''}, "
            "or have KillWait raised",
        )
    text = f"KillWait is {kill_wait_s} s: cluster.grace_s up to {most_s} is kept"
    return Diagnosis(name="kill wait", status="ok", text=text)


def judge_het_morph(plan: Plan) -> str:
    """Return a warning if a run that may morph is a het job; else empty."""
    if not plan.morph or plan.layout != "hetjob":
        return ""
    return (
        "with cluster.hetero: hetjob the whole job ends with the first node that Slurm finds "
        "down, even with morph.enabled; with split or auto, the other groups continue"
    )


def judge_own_kill_wait(plan: Plan) -> str:
    """Return a warning if Slurm kills the job before the conf's grace_s is over; else empty."""
    facts = read_settings()
    if "KillWait" not in facts:
        return ""
    found = judge_kill_wait(facts, plan.timing.grace_s)
    return "" if found.status == "ok" else f"{found.text}; {found.remedy}"
