"""Sentences for verdicts: one for each rule, detail and remark. Pure.

`put_into_words` is the last step of `judge`. Nothing is decided here, and no code parses these
sentences. A name in `SENTENCES` is a `Finding.rule`; its function gets the values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from varuna_core.facts.finding import Finding
from varuna_core.facts.hang import Hang, HangAction, parse_hang
from varuna_core.facts.known import NotKnown, Value
from varuna_core.facts.remedy import COMMANDS, SPELLINGS, Action, Context, Remedy, render_all
from varuna_core.facts.sentences import describe_fault, describe_hang, name_rank
from varuna_core.records.files import format_free
from varuna_core.records.formatting import format_duration, format_pace
from vjob.jobs.monitor.model.snapshot import Verdict, name_step
from vjob.jobs.monitor.rules.base import format_names, join

CANCELS: Mapping[Context, str] = {Context.SBATCH: "scancel JOB", Context.PYTHON: "job.cancel()"}
"""The command that ends a job, if it is not `vjob cancel JOB`."""


def put_into_words(verdict: Verdict) -> Verdict:
    """Return the verdict with its sentences, worded for the job's context."""
    context, job = verdict.context, verdict.job
    remarks = (
        join([render_sentence(one), render_advice(one, context, job)], "; ")
        for one in verdict.others
    )
    return replace(
        verdict,
        reason=render_sentence(verdict.main),
        advice=render_advice(verdict.main, context, job),
        facts=tuple(map(render_sentence, verdict.details)),
        remarks=tuple(dict.fromkeys(remarks)),
    )


def render_sentence(finding: Finding) -> str:
    """Render a finding as one sentence without a full stop."""
    known = {
        key: value.value if isinstance(value, Value) else value
        for key, value in finding.values.items()
    }
    said = SENTENCES[finding.rule](known)
    blind = known.get("gpus_not_read")
    return f"{said}; the state of the GPUs of {format_names(blind)} is not known" if blind else said


def render_advice(finding: Finding, context: Context, job: str) -> str:
    """Render a finding's advice: the meaning of its line, remedies, and commands that show more."""
    parts = []
    meaning = str(finding.values.get("meaning", ""))
    for stands_alone, remedies in groupby(finding.remedies, is_command):
        if stands_alone:
            parts += [meaning, *(_spell(one, context, job) for one in remedies)]
        else:
            parts.append(join([meaning, render_all(remedies, context, job)], ": "))
        meaning = ""
    asked = _time(finding.values, "answer_age_s", " (the scheduler was asked {} ago)")
    return join([*parts, meaning], "; ") + asked


def is_command(remedy: Remedy) -> bool:
    """Return True for a remedy that is shown as a bare command, ready to be copied."""
    is_bare = not (remedy.detail or remedy.when or remedy.value)
    if remedy.action is Action.CANCEL:
        return is_bare
    return is_bare and remedy.action is Action.INSPECT and remedy.target in COMMANDS


def _spell(remedy: Remedy, context: Context, job: str) -> str:
    if remedy.target is None:
        words = CANCELS.get(context, "vjob cancel JOB")
    else:
        words = SPELLINGS[remedy.target].get(context, "").strip("`")
    return words.replace("JOB", job)


Values = Mapping[str, Any]


def _is_known(value: Any) -> bool:
    return value is not None and not isinstance(value, NotKnown)


def _step(values: Values) -> str:
    if not _is_known(values["step"]):
        return "no step"
    total = values["num_steps"] if _is_known(values["num_steps"]) else None
    names = ("is_counted", "is_least", "unit")
    return name_step(values["step"], total, **{k: values[k] for k in names if k in values})


def _time(values: Values, key: str, text: str) -> str:
    """Format a text with a duration for `{}`; return an empty text if the duration is not known."""
    known = _is_known(values.get(key))
    return text.format(format_duration(values[key])) if known else ""


def _line(values: Values) -> str:
    """Render a line and its rank: `rank 3 on n061: RuntimeError: x (2 times in all)`."""
    who = name_rank(values["rank"], values["node"])
    return join([who, values["text"] + _many(values)], ": ")


def _many(values: Values) -> str:
    return f" ({values['num_same']} times in all)" if values["num_same"] > 1 else ""


def _plural(count: int, one: str, many: str) -> str:
    return one if count == 1 else many


def _ranks(values: Values) -> str:
    ranks, nodes = values["ranks"], values["nodes"]
    if len(ranks) == 1:
        return name_rank(ranks[0], nodes[0] if nodes else "")
    where = f" on {format_names(nodes)}" if nodes else ""
    return f"ranks {format_names(map(str, ranks))}{where}"


def _say_of_ranks(predicate: str) -> Callable[[Values], str]:
    def say(values: Values) -> str:
        verb = _plural(len(values["ranks"]), "is", "are")
        return f"{_ranks(values)} {verb} {predicate}"

    return say


def _suspect(values: Values, before: str) -> str:
    found = values.get("suspect")
    return f"{before}{render_sentence(found)}" if isinstance(found, Finding) else ""


# A job that waits.


def _refused(values: Values) -> str:
    said = values["said"] if _is_known(values["said"]) else "the scheduler refused it"
    return f"the run was not submitted: {said}"


def _submitting(values: Values) -> str:
    if values["is_cut_off"]:
        return f"the submit began {format_duration(values['age_s'])} ago and left no job"
    if values["state"] == "intent":
        return "the run is being submitted"
    return "the run was submitted just now"


def _never_starts(values: Values) -> str:
    return join(
        [f"job {values['job']} will not start: {values['reason']}", values["meaning_of_reason"]],
        "; ",
    )


def _requeued(values: Values) -> str:
    state = values["state"]
    if state == "starts":
        return "the scheduler restarted the job; the next attempt is about to begin"
    if state == "restarts":
        number = f"{values['number']} of {values['most']}"
        return f"the run restarts in a moment (restart {number}), after: {values['after']}"
    if state == "saved":
        return str(values["said"])
    why = f", after: {values['after']}" if _is_known(values["after"]) else ""
    times = _plural(values["times"], "once", f"{values['times']} times")
    last = {"preempted": ": preempted by another job", "node-fail": ": a node failed"}
    how = last.get(values["cause"], "") if _is_known(values["cause"]) else ""
    waits = f"the job waits to restart, requeued {times}{how}{why}"
    return f"{waits}; {_wait(values)}{_start(values)}"


def _pending(values: Values) -> str:
    group = f" (group {values['group']})" if values["group"] else ""
    count = values["num_waiting"]
    jobs = _plural(count, "another job of the run waits", f"{count} other jobs of the run wait")
    beside = f"; {jobs} for it" if count else ""
    return f"job {values['job']}{group} is pending: {_wait(values)}{_start(values)}{beside}"


def _wait(values: Values) -> str:
    reason = values["reason"]
    if not _is_known(reason):
        return "the scheduler gives no reason"
    if values["after_well"] or values["after_any"]:
        return (
            f"{reason}: the job waits for {format_chain(values['after_well'], values['after_any'])}"
        )
    if values["dependency"]:
        return f"{reason}: the job waits for {values['dependency']}"
    return join([reason, values["meaning_of_reason"]], ": ")


def _start(values: Values) -> str:
    return f", expected to start {values['start']}" if _is_known(values["start"]) else ""


def format_chain(after: Sequence[str], after_any: Sequence[str]) -> str:
    """Format the runs that must be over first: `a to end well, and for b to end`."""
    parts = [f"{format_names(after)} to end well"] if after else []
    parts += [f"{format_names(after_any)} to end"] if after_any else []
    return ", and for ".join(parts)


def _no_room(values: Values) -> str:
    return join([f"waiting for room in {values['folder']}", values["room"]], ": ")


# A job that is over.


def _done(values: Values) -> str:
    after = f" after {_step(values)}" if "step" in values else ""
    ended = "the job ended" if values.get("is_doubted") else "the job ended well"
    return join([f"{ended}{after}", values["how"] if _is_known(values["how"]) else ""], ": ")


def _abandoned(values: Values) -> str:
    silence = format_duration(values["silence_s"])
    stopped = f"no sign of life for {silence}; the run stopped at {_step(values)}"
    if not values["is_end_known"]:
        return f"{stopped}; how the run ended is not known"
    return f"{_line(values['line'])}; {stopped}" if "line" in values else stopped


# A job that cannot go on.


def _exit(values: Values) -> str:
    """Render a rank's exit: `rank 3 on n061 exited 1: ValueError: x`."""
    return f"{name_rank(values['rank'], values['node'])} {values['how']}"


def _asked_to_end(values: Values) -> str:
    said = values["said"] if _is_known(values["said"]) else "the run was asked to stop"
    return f"the attempt is being ended: {said}"


def _wrong_setting(values: Values) -> str:
    more = f" (and {format_names(values['more'])})" if values["more"] else ""
    return (
        f"{values['name']} is {values['said']} in the run, but {values['wanted']} in the conf{more}"
    )


def _saves_skipped(values: Values) -> str:
    done, then = "skipped", "; training continues"
    if values["waits"]:
        many, done, then = "a save", "waits", ", and the training waits for the save"
    elif values["count"] == 1:
        many = "the last save was"
    else:
        many = f"the last {values['count']} saves were"
    why = "no room" if values["no_room"] else "the disk or the file server failed"
    free = values["free_bytes"]
    room = f" ({format_free(free)} free)" if _is_known(free) else ""
    kept = values["kept_step"]
    last = f"; the last complete checkpoint is from step {kept}" if _is_known(kept) else ""
    age = format_duration(values["age_s"])
    return f"{many} {done}, for {age}: {why} in {values['folder']}{room}{then}{last}"


def _disk_full(values: Values) -> str:
    left = f"{values['free_bytes'] / 1e6:.0f} MB"
    if _is_known(values["free_inodes"]):
        left += f" and {values['free_inodes']} inodes"
    return f"the disk of {values['what']} has {left} left ({values['path']})"


def _gpu_lost(values: Values) -> str:
    gpus = values["gpus"]
    which = _plural(len(gpus), f"GPU {gpus[0]}", f"GPUs {', '.join(map(str, gpus))}")
    whose = ""
    if values["ranks"]:
        doubt = "" if values["ranks_sure"] else ", if ranks take GPUs in order"
        named = ", ".join(map(str, values["ranks"]))
        whose = f" ({_plural(len(values['ranks']), 'rank', 'ranks')} {named}{doubt})"
    others = values["num_more_nodes"]
    more = f", and of {others} other {_plural(others, 'node', 'nodes')}" if others else ""
    verb = _plural(len(gpus), "is", "are")
    them = _plural(len(gpus), "it", "them")
    return (
        f"{which} of {values['node']}{whose} {verb} lost{more}: the driver cannot reach {them}, "
        f"and reads {values['num_read']} of {values['num_gpus']}"
    )


def _hardware(values: Values) -> str:
    more = values["num_more"]
    return describe_fault(values["fault"], values["node"]) + (
        f", and {more} more {_plural(more, 'fault', 'faults')} of hardware" if more else ""
    )


def _error_line(values: Values) -> str:
    who = name_rank(values["rank"], values["node"])
    said = f"{who} said" if who else "a log says"
    silence = format_duration(values["silence_s"])
    what = f"and no line followed for {silence}"
    if values["since"] == "step":
        what = f"and no step was done for {silence}"
    return f"{said}: {values['text']}{_many(values)}, {what}"


def _no_gpu_process(values: Values) -> str:
    age = format_duration(values["age_s"])
    return f"none of the {values['num_gpus']} GPUs has a process, {age} after the ranks started"


def _bad_norms(values: Values) -> str:
    loss = values["loss"]
    beside = f"their last loss is {loss:g}" if _is_known(loss) else "they show no loss"
    count = values["num_lines"]
    what = f"the gradient norm is {values['norm']} in the last {count} lines that show it"
    if _is_known(values["step"]):
        what += f", from step {values['first_step']} to {values['step']}"
    return f"{what}; {beside}"


def _not_a_number(values: Values) -> str:
    if "norm" in values:
        return _bad_norms(values)
    loss, count = values["loss"], values["num_nan"]
    steps = _plural(count, "step", "steps")
    what = f"the loss is {loss}" if _is_known(loss) else f"{count} {steps} with NaN"
    if not _is_known(values["step"]):
        return what
    return f"{what} at step {values['step']}, first printed at step {values['first_step']}"


def _loss_scale(values: Values) -> str:
    count, scale = values["num_skipped"], values["scale"]
    steps = _plural(count, "the last step was", f"all of the last {count} steps were")
    tail = f", the loss scale is {scale:g}" if _is_known(scale) else ""
    return f"{steps} skipped for overflow{tail}"


def _gradients_explode(values: Values) -> str:
    return (
        f"the gradient norm is {values['norm']:.3g}, usually {values['usual_norm']:.3g}, and the "
        f"loss rose to {values['loss']:.4g}"
    )


# A job that does not go on.


def _lost_node(values: Values) -> str:
    quiet = _time(values, "silence_s", ", no sign of life for {}")
    return f"node {values['node']} was lost: the scheduler calls the node {values['word']}{quiet}"


def _ranks_stand(values: Values) -> str:
    silence, limit = format_duration(values["silence_s"]), format_duration(values["limit_s"])
    stand = _plural(len(values["ranks"]), "has", "have")
    return (
        f"{_ranks(values)} {stand} been at step {values['step']} for {silence} (limit {limit}) "
        f"while others continue, at step {values['others_step']}"
    )


def _hangs(values: Values) -> str:
    hang = parse_hang(values["hang"])
    said = "" if hang is None else describe_hang(hang)
    silence = format_duration(values["silence_s"])
    done = "" if hang is None else _tell_action(hang, hang.since + values["silence_s"])
    return f"{said}; no step for {silence}{_cost(values)}; {done}"


def _cost(values: Values) -> str:
    hours = values["rank_hours"]
    return f", {hours:.2g} rank-hours" if hours >= 0.1 else ""


def _tell_action(hang: Hang, now: float) -> str:
    """Describe what the agents will do about a hang, and how soon if no rank prints anything."""
    at = hang.seen_at if hang.acts_at is None else hang.acts_at
    when = f"within {format_duration(at - now)}" if at > now + 1 else "now"
    if hang.action is HangAction.REPORT:
        word = f"the hang is certain {when} if no step comes; " if at > now + 1 else ""
        return f"{word}vjob itself does nothing about the hang; on_hang or vjob guard changes that"
    return {
        HangAction.RESTART: f"its ranks are ended and restarted {when}",
        HangAction.REQUEUE: f"the job goes back into the queue {when}",
        HangAction.STOP: f"the run is ended {when}",
    }[hang.action]


def _held_up(values: Values) -> str:
    silence, limit = format_duration(values["silence_s"]), format_duration(values["limit_s"])
    who = _suspect(values, "")
    return f"{who}; no step for {silence} (limit {limit}), after {_step(values)}"


def _in_phase(values: Values) -> str:
    since = _time(values, "age_s", " for {}")
    phase = f"in {_article(values['phase'])}{since}"
    if values["is_late"]:
        limit = format_duration(values["limit_s"])
        return f"{phase}, the limit is {limit}{_suspect(values, '; ')}"
    return f"{phase}, after {_step(values)}; {_longest(values)}"


def _longest(values: Values) -> str:
    return _time(values, "longest_s", "the longest such phase took {}") or "the first such phase"


def _article(name: str) -> str:
    return f"an {name}" if name[:1] in "aeiou" else f"a {name}"


def _stalled(values: Values) -> str:
    silence, limit = format_duration(values["silence_s"]), format_duration(values["limit_s"])
    return f"no step for {silence} after {_step(values)} (limit {limit}){_suspect(values, ': ')}"


def _starting(values: Values) -> str:
    state, since = values["state"], _time(values, "age_s", " for {}")
    if state == "configuring":
        return "the scheduler is preparing the job's nodes"
    if state == "late warm-up":
        quiet = _time(values, "quiet_s", ", the logs are quiet {}")
        return f"running{since}; no step seen{quiet}{_suspect(values, ': ')}"
    what = f"{_start_phase(values)}{since}"
    if values.get("is_late"):
        limit = format_duration(values["limit_s"])
        return f"{what}, the limit is {limit}{_suspect(values, ': ')}"
    return what


def _running(values: Values) -> str:
    steps: NotKnown = values["steps"]
    quiet = _time(values, "quiet_s", "; the last output is {} old")
    return f"running{_time(values, 'age_s', ' for {}')}; steps not known: {steps.reason}{quiet}"


def _start_phase(values: Values) -> str:
    state = values["state"]
    if state == "container":
        nodes = values["nodes"]
        verb = _plural(len(nodes), "is", "are")
        return f"{format_names(nodes)} {verb} preparing the container"
    if state == "rendezvous" and values.get("waits_for_step"):
        return "srun waits until another step of the job leaves it room on the nodes"
    if state == "rendezvous":
        missing, total = values["missing"], values["num_nodes"]
        verb = _plural(missing, "has", "have")
        return f"{missing} of {total} nodes {verb} not reported" if missing else "the nodes connect"
    return "the program is importing modules and connecting"


def _gpus_spin(values: Values) -> str:
    watts = f", {values['watts_each']:.0f} W each" if _is_known(values["watts_each"]) else ""
    return (
        f"all {values['num_gpus']} GPUs are at 100 %{watts} and no step ends: they spin in a "
        "collective"
    )


def _gpus_idle(values: Values) -> str:
    return (
        f"all {values['num_gpus']} GPUs are idle: the ranks wait on the host, for data or for a "
        "rank that crashed"
    )


def _all_silent(values: Values) -> str:
    silence = format_duration(values["silence_s"])
    return (
        f"no node gave a sign of life for {silence}: the file server may hang, or the job is gone"
    )


def _silent_node(values: Values) -> str:
    silence = format_duration(values["silence_s"])
    return f"no sign of life from {format_names(values['nodes'])} for {silence}"


def _idle_node(values: Values) -> str:
    nodes, busy = values["nodes"], values["num_busy"]
    others = _plural(busy, "of one other node", f"of {busy} other nodes")
    return f"the GPUs of {format_names(nodes)} are idle while those {others} are at 100 %"


def _idle_gpu(values: Values) -> str:
    return (
        f"GPU {values['gpu']} of {values['node']} is idle while {values['num_busy']} others are at "
        "100 %"
    )


def _odd_rank(values: Values) -> str:
    what, others = ("computes", "wait") if values["computes"] else ("does nothing", "are busy")
    who = name_rank(values["rank"], values["node"])
    return f"{who} {what} while all {values['num_others']} others {others}"


def _behind(values: Values) -> str:
    return (
        f"{_ranks(values)} reached step {values['step']}, the others step {values['others_step']}"
    )


# A job that goes on.


def _straggler(values: Values) -> str:
    more_ranks, stages = values["more_ranks"], values["stages"]
    more = f"; so do ranks {format_names(map(str, more_ranks))}" if more_ranks else ""
    held = " and ".join(map(str, stages))
    stage = f" of {_plural(len(stages), 'stage', 'stages')} {held}" if stages else ""
    own = format_pace(values["work_s"]) if _is_known(values["work_s"]) else "longer"
    return (
        f"{name_rank(values['rank'], values['node'])} works {own} per step, its peers{stage} "
        f"{format_pace(values['peers_work_s'])} (score {values['score']:.2f}){more}"
    )


def _throttled(values: Values) -> str:
    return (
        f"the clock of GPU {values['gpu']} of {values['node']} is held down "
        f"({values['throttle']}) and steps take {format_pace(values['step_s'])}, "
        f"{format_pace(values['before_s'])} before"
    )


def _slower(values: Values) -> str:
    now, before = values["step_s"], values["before_s"]
    took = f"{format_pace(now)} now and took {format_pace(before)} before"
    return f"a step takes {took} ({now / before:.1f} times); its steps may have more work to do"


def _healthy(values: Values) -> str:
    unit = values.get("unit", "step")
    a_unit = f"a{'n' * (unit == 'epoch')} {unit}"
    pace = f", {format_pace(values['step_s'])} {a_unit}" if _is_known(values["step_s"]) else ""
    tail = _time(values, "left_s", ", {} left")
    if _is_known(values.get("limit_left_s")):
        needed, left = format_duration(values["left_s"]), _until(values["limit_left_s"])
        will_not = "be requeued before its end" if values["comes_back"] else "not finish"
        tail = f"; the job will {will_not}: it needs {needed}, and its time limit ends it {left}"
        tail += _checkpoint(values)
    if "suspect" in values:
        return f"the run may hang: {_suspect(values, '')}, after {_step(values)}"
    if values["is_early"]:
        limit = format_duration(values["limit_s"])
        tail = f"; too early to judge by so few steps; the job is STALLED after {limit} without one"
    if values["is_older"]:
        tail = "; its log goes on without a later step" if not values["is_early"] else tail
        return f"{_step(values)} more than {format_duration(values['age_s'])} ago{pace}{tail}"
    return f"{_step(values)} {format_duration(values['age_s'])} ago{pace}{tail}"


def _ending(values: Values) -> str:
    count = values.get("num_exited")
    if count is None:
        return f"the scheduler is cleaning up after the job, at {_step(values)}"
    who = _plural(count, "the one rank", f"all {count} ranks")
    return f"{who} exited 0; the batch script still runs"


def _unknown(values: Values) -> str:
    words = values["words"]
    why = f"the scheduler calls the job {format_names(words)}" if words else "no scheduler knows it"
    if values["no_answer"]:
        why = f"{values['scheduler'] or 'the scheduler'} does not answer"
    step = f"{_step(values)} is known" if _is_known(values["step"]) else ""
    ended = f"its last attempt ended: {values['ended']}" if "ended" in values else ""
    return join([f"its state is not known: {why}", step, ended], "; ")


# Remarks.


def _scheduler_silent(values: Values) -> str:
    age = _time(values, "age_s", ": its last answer is {} old")
    return f"the scheduler does not answer ({values['problem']}){age}"


def _unreadable(values: Values) -> str:
    more = f" and {values['num_more']} more" if values["num_more"] else ""
    return f"cannot read {values['name']} ({values['why']}){more}"


def _error_that_passed(values: Values) -> str:
    who = name_rank(values["rank"], values["node"])
    said = join([who, values["text"]], " ")
    return f"an error was printed, but the training continued: {said}"


def _warning(values: Values) -> str:
    who = name_rank(values["rank"], values["node"])
    many = f" ({values['num_same']} times)" if values["num_same"] > 1 else ""
    return f"{who}: {values['text']}{many}"


def _node_not_well(values: Values) -> str:
    """Render a node's state: `the scheduler drains node b3: ECC GPU2 (root, 3 min ago)`."""
    known = [values["by"], _time(values, "age_s", "{} ago")]
    who = ", ".join(filter(None, known))
    why = f": {values['reason']}" if values["reason"] else ""
    what = "has maintenance on" if values["condition"] == "maintenance" else "drains"
    said = f"the scheduler {what} node {values['node']}{why}" + (f" ({who})" if who else "")
    return f"{said}; this job continues, but its next start will be on other nodes"


def _preempted(values: Values) -> str:
    left = _time(values, "left_s", ", and ends this job in {}")
    taken = "the scheduler has been taking the job's nodes for another job"
    return f"since {values['since']} {taken}{left}"


def _time_limit_near(values: Values) -> str:
    is_enough = _is_known(values["needed_s"]) and values["needed_s"] <= values["left_s"]
    joint = "and" if is_enough else "but"
    needed = _time(values, "needed_s", f", {joint} at its pace the job needs {{}} more")
    again = ", and then the job is requeued" * values["comes_back"]
    ends = f"the time limit ends the job {_until(values['left_s'])}{again}"
    return f"{ends}{needed}{_checkpoint(values)}"


def _early_signal_unheard(values: Values) -> str:
    early, names = format_duration(values["warn_s"]), format_names(values["nodes"])
    if not values["is_live"]:
        return f"ranks on {names} were not asked to save: they had no handler for SIGUSR1"
    return (
        f"ranks on {names} have no handler for SIGUSR1, so they will not be asked to save "
        f"{early} before the time limit"
    )


def _until(seconds: float) -> str:
    return f"in {format_duration(seconds)}" if seconds > 0 else "at any moment"


def _checkpoint(values: Values) -> str:
    saved = values["checkpoint_step"]
    return f"; its last checkpoint is from step {saved}" if _is_known(saved) else ""


def _gpus_not_read(values: Values) -> str:
    why: NotKnown = values["gpus"]
    return f"GPUs not read: {format_names(values['nodes'])}: {why.reason}"


def _gpu_trouble(values: Values) -> str:
    limit = values["limit"]
    what = {
        "ecc": "uncorrected ECC errors",
        "hot": f"{limit or 0:.0f} degrees or more",
        "full": f"more than {limit or 0:.0%} of the memory used",
        "foreign": "processes that do not belong to the job",
        "held down": f"held down ({values['why']})",
    }[values["trouble"]]
    return f"GPUs with {what}: {format_names(values['gpus'])}"


def _files_in_the_copy(values: Values) -> str:
    count, names = values["num_files"], values["names"]
    files = "file is" if count == 1 else "files are"
    such = "" if count == 1 else "such as "
    return (
        f"{count} new {files} in this run's copy of the code, where the next run does not see "
        f"them: {such}{values['folder']}/{names[0]}"
    )


def _disk_nearly_full(values: Values) -> str:
    free, total = values["free_bytes"] / 1e9, values["total_bytes"] / 1e9
    return (
        f"the disk of {values['what']} has {free:.1f} GB left of {total:.0f} GB ({values['path']})"
    )


def _inodes(values: Values) -> str:
    left = f"{values['free_inodes']} of {values['total_inodes']} inodes left"
    return f"the disk of {values['what']} has {left} ({values['path']})"


def _jobs_over(values: Values) -> str:
    said = format_names(f"{job} ({word})" for job, word in values["jobs"].items())
    return f"jobs of the run that are over: {said}"


def _damaged(values: Values) -> str:
    more = f", and {values['num_more']} more" if values["num_more"] else ""
    return (
        f"the checkpoint of step {values['step']} is damaged and was set aside "
        f"({values['reason']}){more}: {values['path']}"
    )


# Details.


def _last_checkpoint(values: Values) -> str:
    tail = (
        ", from which the run continues when it is submitted again" if values.get("goes_on") else ""
    )
    return f"the last checkpoint is of step {values['step']}{tail}"


def _no_checkpoint(values: Values) -> str:
    folders = values["folders"]
    if "line" in values:
        line = values["line"]
        who = name_rank(line["rank"], line["node"])
        return f"{who} printed: {line['text']}; vjob did not check that this save can be loaded"
    if not folders:
        return "vjob does not know whether the program saved anything"
    return f"it is not known whether {format_names(folders)} has a checkpoint of the program itself"


def _hung(values: Values) -> str:
    hang = parse_hang(values["hang"])
    said = "" if hang is None else describe_hang(hang)
    since = "" if hang is None else time.strftime("%H:%M:%S", time.localtime(hang.since))
    lost = f"{format_duration(values['silence_s'])}{_cost(values)}"
    how = "the run hung" if values["is_sure"] else "the run may have hung"
    return f"{how} from {since} to its end ({lost}): {said}; see attempt-{values['attempt']}/hang"


def _by_phase(values: Values) -> str:
    return f"nodes: {', '.join(f'{count} {phase}' for phase, count in values.items())}"


SENTENCES: Mapping[str, Callable[[Values], str]] = {
    "refused": _refused,
    "submitting": _submitting,
    "no room": _no_room,
    "morphing": lambda v: (
        f"the run changes from {v['change']} and then resumes its last checkpoint"
    ),
    "done": _done,
    "dead": lambda v: str(v["reason"]),
    "never starts": _never_starts,
    "requeued": _requeued,
    "pending": _pending,
    "suspended": lambda v: f"job {v['job']} is suspended by the scheduler or an admin",
    "abandoned": _abandoned,
    "lost node": _lost_node,
    "rank failed": lambda v: f"{_exit(v)}; the other ranks are being ended",
    "asked to end": _asked_to_end,
    "ending": _ending,
    "wrong setting": _wrong_setting,
    "not a number": _not_a_number,
    "loss scale": _loss_scale,
    "gradients explode": _gradients_explode,
    "hangs": _hangs,
    "held up": _held_up,
    "stands": _ranks_stand,
    "saves skipped": _saves_skipped,
    "disk full": _disk_full,
    "gpu lost": _gpu_lost,
    "sick hardware": lambda v: f"{_hardware(v)}, and no step was done since",
    "hardware": _hardware,
    "error line": _error_line,
    "in phase": _in_phase,
    "stalled": _stalled,
    "no gpu process": _no_gpu_process,
    "starting": _starting,
    "running": _running,
    "straggler": _straggler,
    "throttled": _throttled,
    "slower": _slower,
    "healthy": _healthy,
    "unknown": _unknown,
    # Who holds up the others.
    "gpus spin": _gpus_spin,
    "gpus idle": _gpus_idle,
    "stopped ranks": _say_of_ranks("stopped (SIGSTOP, or a debugger)"),
    "dead ranks": _say_of_ranks("dead, but not reaped by their parent process"),
    "ranks in the kernel": _say_of_ranks(
        "stuck in the kernel (state D: a disk, a dead mount, a driver)"
    ),
    "node called down": lambda v: f"the scheduler calls {v['node']} {v['word']}",
    "all nodes silent": _all_silent,
    "silent node": _silent_node,
    "idle node": _idle_node,
    "idle gpu": _idle_gpu,
    "odd rank": _odd_rank,
    "ranks behind": _behind,
    # Remarks.
    "scheduler silent": _scheduler_silent,
    "unreadable files": _unreadable,
    "error that passed": _error_that_passed,
    "warning": _warning,
    "time limit near": _time_limit_near,
    "early signal unheard": _early_signal_unheard,
    "being preempted": _preempted,
    "node not well": _node_not_well,
    "gpus not read": _gpus_not_read,
    "gpu trouble": _gpu_trouble,
    "memory full": lambda v: f"memory is nearly used up on {format_names(v['nodes'])}",
    "disk nearly full": _disk_nearly_full,
    "inodes nearly used up": _inodes,
    "clock here": lambda v: (
        f"the clock here and the file server's differ by {format_duration(v['skew_s'])}"
    ),
    "clocks of nodes": lambda v: (
        f"clocks of {format_names(v['nodes'])} are off by up to {format_duration(v['most_s'])}"
    ),
    "silent nodes": lambda v: (
        f"no sign of life from {format_names(v['nodes'])} for up to "
        f"{format_duration(v['silence_s'])}"
    ),
    "nodes that left nothing": lambda v: f"{v['missing']} of {v['num_nodes']} nodes left nothing",
    "nodes without a log": lambda v: (
        f"{len(v['node_ranks'])} of {v['num_nodes']} nodes left no log here: NODE_RANK "
        f"{format_names(list(map(str, v['node_ranks'])))}"
    ),
    "several jobs": lambda v: (
        f"logs of another job are here too and are ignored: {format_names(v['nodes'])}, with "
        f"the master {v['master']}"
    ),
    "preflight": lambda v: f"preflight of {format_names(v['nodes'])}: {v['said']}",
    "jobs that are over": _jobs_over,
    "node left out": lambda v: str(v["said"]),
    "damaged checkpoint": _damaged,
    "files in the copy": _files_in_the_copy,
    # Details.
    "submitted": lambda v: f"submitted {format_duration(v['age_s'])} ago",
    "last loss is not a number": lambda v: (
        f"the loss is not a number in the last line that shows a loss, of step {v['step']}"
        if v["step"] >= 0
        else "the loss is not a number in the last line that shows a loss"
    ),
    "last norms are not numbers": _bad_norms,
    "stopped early": lambda v: "the run stopped before its last step",
    "logs lack lines": lambda v: (
        f"{v['num_bytes']:,} bytes of the logs could not be written, so later steps are not known"
    ),
    "checkpoint": _last_checkpoint,
    "no checkpoint": _no_checkpoint,
    "hung": _hung,
    "said": lambda v: str(v["text"]),
    "source": lambda v: f"according to {v['source']}",
    "last life": lambda v: (
        f"the last sign of life of any node is {format_duration(v['age_s'])} old"
    ),
    "longest phase": _longest,
    "nodes by phase": _by_phase,
    "step": _step,
    "hot gpus": lambda v: (
        f"{v['num_gpus']} {_plural(v['num_gpus'], 'GPU', 'GPUs')} of {format_names(v['nodes'])}"
    ),
    "temperature": lambda v: f"{v['node']}: {v['degrees']:.0f} degrees",
    "throttle": lambda v: f"{v['node']}: {format_names(v['reasons'])}",
}
"""Functions that render the sentence of a finding, keyed by the finding's rule."""
