"""Slurm's messages: lines in the logs of a job, refusals of sbatch, and reasons of pending jobs.

Up to version 22.05, and if EnforcePartLimits is off, sbatch accepts jobs that can never start.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from varuna_core.facts.catalogue.known_line import Fate, KnownLine, Proof, Scope, make_row
from varuna_core.facts.catalogue.remedies import (
    FEWER_WORKERS,
    MORE_MEMORY,
    SHARE_LOG_FOLDER,
    ask_admin,
    do,
    look_at,
)
from varuna_core.facts.cause import EndCause
from varuna_core.facts.cluster import Waiting
from varuna_core.facts.remedy import Action, Remedy, Target

cause = partial(make_row, Scope.SCHEDULER, Proof.CAUSE)
fallout = partial(make_row, Scope.SCHEDULER, Proof.FALLOUT)

LOG_LINES = (
    cause(
        "host out of memory",
        r"(?i)Detected [1-9]\d* oom[-_ ]?kill|Out of memory: Killed process|oom-kill:constraint"
        r"|Memory cgroup out of memory|oom_kill_process|invoked oom-killer"
        r"|cgroup out-of-memory handler|Exceeded (job|step) memory limit"
        r"|tasks? [\d,\[\]-]+: Out Of Memory|exceeded (virtual )?memory limit",
        "the memory of the node was used up",
        MORE_MEMORY,
        replace(FEWER_WORKERS, instead=True),
        fatal=True,
        cause=EndCause.OOM_HOST,
    ),
    cause(
        "time limit",
        r"DUE TO TIME LIMIT|\bthe time limit was reached\b",
        "",
        Remedy(Action.RAISE, Target.WALLTIME),
        Remedy(Action.RESUME, when="it writes checkpoints"),
        fatal=True,
        cause=EndCause.TIME_LIMIT,
    ),
    cause(
        "preempted",
        r"DUE TO PREEMPTION|\bjob \S+ (was )?preempted\b",
        "a job of higher priority took the nodes of this job",
        Remedy(Action.RESUME),
        fatal=True,
        cause=EndCause.PREEMPTED,
    ),
    cause(
        "node failure",
        r"srun: error: Node failure on"
        r"|error: Nodes? \S+ (are |is )?not responding|\bwas lost: no sign of life\b",
        "the node was lost",
        Remedy(Action.EXCLUDE, Target.NODE, "it"),
        Remedy(Action.RESUBMIT),
        Remedy(
            Action.SET,
            Target.MORPH,
            "true",
            "for a run that continues without the lost node",
            instead=True,
        ),
        fatal=True,
        cause=EndCause.NODE_FAIL,
    ),
    fallout(
        "ended after a node failure",
        r"DUE TO NODE FAIL|Job \S+ killed due to node failure",
        "a node of the job failed, which need not be the node that printed this line",
        Remedy(Action.RESUBMIT),
        fatal=True,
        cause=EndCause.NODE_FAIL,
    ),
    cause(
        "requeued",
        r"\*\*\* (JOB|STEP) .*\bDUE TO JOB REQUEUE",
        "the job was put back into the queue, by you, an admin or a preemption",
        fatal=True,
        cause=EndCause.REQUEUED,
    ),
    cause(
        "cancelled",
        r"\*\*\* JOB \S+ ON \S+ CANCELLED AT ",
        "somebody cancelled the job: you, with vjob cancel or scancel, or an admin",
        fatal=True,
        cause=EndCause.CANCELLED,
    ),
    cause(
        "launch failed",
        r"srun: error: (Task|Application) launch (.*)failed|slurmstepd: error: execve\(\)"
        r"|slurmstepd: error: couldn't chdir|Slurmd could not connect IO"
        r"|[Jj]ob credential (expired|revoked|replayed)"
        r"|srun: error: Unable to (create step|confirm allocation|allocate)"
        r"|Requested (node|partition) configuration (is )?not available|More processors requested",
        "the step could not start",
        Remedy(Action.INSPECT, Target.LOG_FOLDER, detail="on that node"),
        do("check that the job asks for what its nodes have"),
        do("check that the clock and the Slurm version of that node match the others"),
        fatal=True,
        cause=EndCause.LAUNCH_FAILED,
    ),
    fallout(
        "srun ends the step",
        r"\*\*\* STEP \S+ ON \S+ CANCELLED AT |srun: error: \S{1,80}: tasks? [\d,\[\]-]{1,200}: "
        r"(Terminated|Killed|Exited|Aborted|Force)|srun: (Terminating|Force Terminated|Job step "
        r"aborted|First task exited)|srun: launch/slurm: _step_signal: Terminating"
        r"|slurmstepd: error: .*(Broken pipe|Unable to send|task_exit)",
        "srun ended the other tasks: look at the first rank that failed",
    ),
)
"""Lines that Slurm and the kernel write into the logs of a job."""

FEWER_NODES = Remedy(Action.LOWER, Target.NODES)
LESS_TIME = Remedy(Action.LOWER, Target.WALLTIME)
OTHER_QUEUE = Remedy(Action.CHANGE, Target.QUEUE, instead=True)
OTHER_QOS = Remedy(Action.CHANGE, Target.QOS, instead=True)
RELEASE = Remedy(Action.RELEASE)
LIMITS = look_at("sacctmgr show qos", "and `sacctmgr show assoc user=$USER`")

refusal = partial(make_row, Scope.SUBMIT, Proof.CAUSE, cause=EndCause.REFUSED)

REFUSALS = (
    refusal(
        "queue",
        r"(?i)invalid partition",
        "the queue does not exist",
        Remedy(Action.SET, Target.QUEUE, "a queue that `sinfo -s` lists"),
    ),
    refusal(
        "account",
        r"(?i)invalid account",
        "",
        Remedy(Action.SET, Target.ACCOUNT, "an account shown by `sacctmgr show assoc user=$USER`"),
    ),
    refusal(
        "qos",
        r"(?i)invalid qos",
        "",
        Remedy(Action.SET, Target.QOS, "a QOS that your account has"),
    ),
    refusal(
        "gpus",
        r"(?i)invalid generic resource",
        "no node has these GPUs",
        Remedy(Action.SET, Target.GPUS, "what `sinfo -o '%P %G'` shows"),
    ),
    refusal(
        "node count",
        r"(?i)node count specification invalid",
        "the queue has fewer nodes",
        FEWER_NODES,
    ),
    refusal(
        "node configuration",
        r"(?i)requested node configuration is not available",
        "the queue has too few nodes with all that was requested (for --test-only drained and down "
        "nodes are missing too)",
        look_at("sinfo -o '%P %D %T %N %c %m %G'", "for nodes, states, CPUs, memory and GPUs"),
        FEWER_NODES,
        Remedy(Action.LOWER, Target.CPUS, instead=True),
        Remedy(Action.LOWER, Target.MEMORY, instead=True),
        Remedy(Action.CHANGE, Target.GPUS, instead=True),
    ),
    # Before the next: the words of any such limit end with "user's size and/or time limits".
    refusal(
        "number of jobs",
        r"(?i)submitjob",
        "too many of your jobs wait or run (MaxSubmitJobs)",
        LIMITS,
        do("submit fewer jobs, or submit them later"),
    ),
    refusal("longest time", r"(?i)maxwall", "", LESS_TIME, OTHER_QOS),
    refusal(
        "policy",
        r"(?i)violates accounting/qos policy",
        "a limit of your account or QOS",
        LIMITS,
    ),
    refusal("time limit", r"(?i)time limit", "", LESS_TIME, OTHER_QUEUE),
    refusal(
        "controller",
        r"(?i)unable to contact slurm controller",
        "the controller is down or SLURM_CONF points elsewhere",
        Remedy(Action.RUN, value="scontrol ping"),
    ),
    refusal(
        "dependency",
        r"(?i)dependency problem",
        "Slurm no longer knows a job that this one depends on",
        do("look at `vjob status` of the run that it depends on"),
        Remedy(Action.RESUBMIT),
    ),
    refusal(
        "no cluster",
        r"(?i)configuration source",
        "Slurm's commands are here, but no cluster is configured",
        do("submit where `sinfo` answers"),
        Remedy(Action.SET, Target.SCHEDULER, "local", "to run on this machine", instead=True),
    ),
)
"""Messages that sbatch prints when it rejects a job; they are searched for in all of its output."""


def _reason(
    fate: Fate,
    waits: Waiting | None,
    pattern: str,
    meaning: str,
    *remedies: Remedy,
    **more: Any,
) -> KnownLine:
    """Build the row of a reason for which a job is pending. The row's name is Slurm's first word
    for the reason unless `name` is given."""
    name = more.pop("name", "") or pattern.partition("|")[0].replace(".", " ")
    whole = rf"^(?:{pattern})(?![A-Za-z])"
    proof = Proof.CAUSE if fate is Fate.ENDED else Proof.WARNING
    more.update(fate=fate, waits=waits)
    return make_row(Scope.PENDING, proof, name, whole, meaning, *remedies, **more)


_passes = partial(_reason, Fate.PASSES)
_never = partial(_reason, Fate.NEVER)
_ended = partial(_reason, Fate.ENDED, None)
SINFO = look_at("sinfo -R", "to see why")

REASONS = (
    _never(
        Waiting.QUEUE_LIMIT,
        "PartitionConfig",
        "the job's queue has fewer nodes, or nodes with fewer CPUs, than the job asks for, or "
        "allows less time",
        look_at("sinfo -o '%P %D %c %l'", "for nodes, CPUs and the time limit"),
        FEWER_NODES,
        Remedy(Action.LOWER, Target.CPUS, instead=True),
        replace(LESS_TIME, instead=True),
        is_provisional=True,
    ),
    _never(
        Waiting.QUEUE_LIMIT,
        "PartitionNodeLimit",
        "the job's queue has, or allows, fewer nodes than the job asks for",
        FEWER_NODES,
    ),
    _never(
        Waiting.QUEUE_LIMIT,
        "PartitionTimeLimit",
        "the job's queue allows less time than the job asks for",
        LESS_TIME,
    ),
    _never(
        Waiting.CONSTRAINT,
        "BadConstraints",
        "no node has these features",
        Remedy(Action.CHANGE, Target.CONSTRAINT, "features that `sinfo -o %f` lists"),
    ),
    _never(
        Waiting.NOT_PERMITTED,
        "InvalidAccount|AccountNotAllowed|Job.s.account.not.permitted",
        "",
        Remedy(Action.SET, Target.ACCOUNT, "an account that the queue allows"),
    ),
    _never(
        Waiting.NOT_PERMITTED,
        "InvalidQOS|QOSNotAllowed|Job.s.QOS.not.permitted",
        "",
        Remedy(Action.SET, Target.QOS, "a QOS that the queue allows"),
    ),
    _never(
        Waiting.NOT_PERMITTED,
        r"[^\n]*\bnot.permitted.to.use.this.partition",
        "",
        replace(OTHER_QUEUE, instead=False),
        ask_admin("for access", instead=True),
        name="queue not permitted",
    ),
    _never(
        Waiting.DEPENDENCY,
        "DependencyNeverSatisfied",
        "a job that this job depends on failed",
        Remedy(Action.CANCEL),
        cause=EndCause.DEPENDENCY_FAILED,
    ),
    _never(
        Waiting.JOB_LIMIT,
        r"(Assoc|QOS)\w{0,40}Max\w{0,40}(PerJob|PerNode)\w*|QOSMin\w+|MaxMemPerLimit",
        "a limit for single jobs",
        LIMITS,
        name="limit per job",
    ),
    _never(
        Waiting.DEADLINE,
        "DeadLine",
        "the job cannot end before its deadline",
        Remedy(Action.CHANGE, Target.DEADLINE),
        cause=EndCause.DEADLINE,
    ),
    _never(
        Waiting.RESERVATION,
        "ReservationDeleted",
        "the job's reservation is gone",
        Remedy(Action.CHANGE, Target.RESERVATION),
    ),
    _never(
        Waiting.BURST_BUFFER,
        "BurstBufferOperation",
        "the job's burst buffer failed, and the job is held",
        ask_admin("to look at the burst buffer"),
    ),
    _never(Waiting.HELD_BY_USER, "JobHeldUser", "the job is held", RELEASE),
    _never(
        Waiting.HELD_AFTER_REQUEUE,
        "JobHoldMaxRequeue",
        "the job was requeued too often (max_batch_requeue), and is held",
        do("find out why it fails"),
        RELEASE,
    ),
    _never(
        Waiting.HELD_AFTER_REQUEUE,
        "launch.failed.requeued.held",
        "no node could start the job",
        SHARE_LOG_FOLDER,
        RELEASE,
        cause=EndCause.LAUNCH_FAILED,
    ),
    _never(Waiting.HELD_AFTER_REQUEUE, "job.requeued.in.held.state", "the job is held", RELEASE),
    _never(
        Waiting.HELD_BY_ADMIN,
        "JobHeldAdmin",
        "the job is held by an administrator",
        ask_admin("to release it"),
    ),
    _passes(Waiting.PRIORITY, "Priority", "jobs of higher priority come first"),
    _passes(Waiting.RESOURCES, "Resources", "no nodes are free for the job yet"),
    _passes(
        Waiting.RESOURCES, "Constraints", "no nodes that have what the job asks for are free yet"
    ),
    _passes(Waiting.DEPENDENCY, "Dependency", "the job waits for another job"),
    _passes(Waiting.BEGIN_TIME, "BeginTime", "the job waits for its begin time"),
    _passes(Waiting.RESERVATION, "Reservation", "the job waits for its reservation"),
    _passes(
        Waiting.MAINTENANCE,
        "ReqNodeNotAvail,.Reserved.for.maintenance",
        "nodes that the job needs are reserved for maintenance",
    ),
    _passes(
        Waiting.RESOURCES,
        "ReqNodeNotAvail,.May.be.reserved",
        "nodes that the job needs are kept for another job",
    ),
    _passes(
        Waiting.NODES_DOWN,
        "ReqNodeNotAvail",
        "nodes that the job needs are down, drained or in use",
        SINFO,
    ),
    _passes(
        Waiting.NODES_DOWN,
        "Nodes.required.for.job.are.DOWN",
        "nodes that the job needs are down or drained, or are kept for jobs of a queue of higher "
        "priority",
        SINFO,
    ),
    _passes(
        Waiting.QUEUE_CLOSED, "PartitionDown|PartitionInactive", "the job's queue is closed for now"
    ),
    _passes(Waiting.NODES_DOWN, "NodeDown", "a node that the job needs is down", SINFO),
    _passes(Waiting.LICENSES, "Licenses", "no licence is free"),
    _passes(
        Waiting.BUDGET,
        r"(Assoc|QOS)Grp\w*Minutes(Limit)?",
        "the budget of your account or QOS is used up, also by past jobs; this passes only if "
        "usage decays with time",
        ask_admin("for more"),
        name="budget",
    ),
    _passes(
        Waiting.LIMIT,
        r"(Assoc|QOS)\w*(Grp|Max)\w*|Max\w+PerAccount|QOSUsageThreshold|"
        r"(Association|QOS)(Job|Resource|Time)Limit|AccountingPolicy",
        "a limit of your account or QOS is used up by other jobs",
        name="limit of the account",
    ),
    _passes(
        Waiting.ARRAY_LIMIT,
        "JobArrayTaskLimit",
        "the job's sweep already has as many running jobs as are allowed",
    ),
    _passes(
        Waiting.BURST_BUFFER,
        "BurstBufferResources|BurstBufferStageIn",
        "the job's burst buffer is not ready yet",
    ),
    _passes(
        Waiting.SCHEDULER,
        "None|Cleaning|Prolog|FedJobLock|SchedDefer",
        "the scheduler has not considered the job yet, or has to clean up",
    ),
    _ended(
        "JobLaunchFailure|launch.failed",
        "the node could not start the batch script",
        SHARE_LOG_FOLDER,
        cause=EndCause.LAUNCH_FAILED,
    ),
    # How slurmd spells that it could not make the output file: its error 4021 & 127.
    _ended(
        r"RaisedSignal:53\b",
        "the output file of the batch script could not be created on its node",
        SHARE_LOG_FOLDER,
        cause=EndCause.NO_OUTPUT,
        name="no output",
    ),
    _ended("TimeLimit", "the job has already reached its time limit", cause=EndCause.TIME_LIMIT),
    _ended("OutOfMemory", "the job has already run out of memory", cause=EndCause.OOM_JOB),
    _ended(
        r"InactiveLimit|NonZeroExitCode|SystemFailure|RaisedSignal\S*",
        "the job has already ended this way",
    ),
)
"""All reasons in Slurm's job_reason_codes.html, and the sentences that slurmctld writes in place of
a code. The first row that matches counts."""
