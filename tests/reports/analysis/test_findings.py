"""Findings of odd runs, and what they are reckoned from."""

from __future__ import annotations

import ast
import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from tests.reports.traces import ORIGIN, write_simulated
from varuna_core.facts.hang import Hang, HangWitness
from varuna_core.facts.known import Value
from varuna_core.hang.signs import write_hang
from varuna_core.records.record import RunRecord, write_record
from varuna_core.records.runfolder import RunFolder
from varuna_core.schedule.costs import build_even_costs
from varuna_core.schedule.registry import build_schedule
from vjob.reports.analysis import findings
from vjob.reports.analysis.accounting import describe_class
from vjob.reports.analysis.headline import list_facts
from vjob.reports.analysis.measures import analyse
from vjob.reports.analysis.opening import write_opening
from vjob.reports.load.gpu_log import NodeFaults
from vjob.reports.load.tables import PlanFacts, RunState, choose_steps, load_job


def test_each_finding_has_a_rule_of_its_own() -> None:
    calls = [
        {word.arg: word.value for word in node.keywords}
        for node in ast.walk(ast.parse(Path(findings.__file__).read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding"
    ]
    names = [ast.literal_eval(call["rule"]) for call in calls]
    assert len(names) > 30 and len(names) == len(set(names))


def test_attempts_that_all_ended_as_they_began_are_no_error(tmp_path: Path) -> None:
    """Preempted at once, three times, without a word: no time but that in the queue."""
    (tmp_path / "plan.json").write_text(
        json.dumps({"groups": [{"name": "a", "count": 1, "ranks": 1}]})
    )
    events: list[dict[str, Any]] = [{"kind": "submitted", "time": 1000.0}]
    for attempt in range(3):
        at = 1000.0 + 50 * (attempt + 1)
        events += [{"kind": "requeued", "time": at - 10}] if attempt else []
        events += [{"kind": "started", "time": at, "attempt": attempt}]
        (tmp_path / f"attempt-{attempt}").mkdir()
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    job = load_job(tmp_path)
    analysis = analyse(job)
    assert analysis.accounting.seconds == {"queue": 150.0}
    assert not [one for one in findings.find_all(job, analysis) if one.cause]


def test_of_a_run_that_goes_on_all_nodes_count(tmp_path: Path) -> None:
    """Its log was that of one node, so that it was said to be on that one alone."""
    schedule = build_schedule("1f1b", 2, 4)
    write_simulated(tmp_path / "attempt-0", schedule, build_even_costs(2), hosts=("n0", "n1"))
    (tmp_path / "attempt-0/n1.out").write_text("step 10 loss 2.5\n")
    (tmp_path / "plan.json").write_text("{}")
    assert analyse(load_job(tmp_path)).headline.nodes == 2


READINGS = SimpleNamespace(first_at=0.0, last_at=1000.0)
KNOWN = SimpleNamespace(covers=True, attempts=[SimpleNamespace(label="0", readings=READINGS)])


def test_a_hot_gpu_is_not_priced_by_the_slow_ranks_of_other_nodes() -> None:
    samples = pd.DataFrame(
        [
            {"attempt": "0", "time": 1.0, "node": node, "gpu": "0", "throttle": word}
            for node, word in (("hot", "hw_thermal"), ("cool", ""))
        ]
    ).assign(temperature=60.0)
    job: Any = SimpleNamespace(
        gpus=samples,
        traces=SimpleNamespace(steps=pd.DataFrame(), is_log=False),
        plan=PlanFacts(scheduler="slurm"),
    )
    slow = SimpleNamespace(ratio=4.0, host="cool")
    analysis: Any = SimpleNamespace(
        stragglers=[slow], accounting=SimpleNamespace(stepping_s=1000.0), goodput=KNOWN
    )
    (found,) = findings._on_heat(job, analysis)
    assert "GPU 0 of hot ran" in found.sentence
    assert found.weight == pytest.approx(0.25)
    slow.host = "hot"
    (found,) = findings._on_heat(job, analysis)
    assert found.weight == pytest.approx(0.75)


def write_ended(folder: Path, verdict: str, message: str, *, ended_s: float = 0.0) -> None:
    """The record of a run that is over; its only attempt, where it ended so long after ORIGIN."""
    record = RunRecord(
        run=folder.name, name="x", state="ended", scheduler="local", layout="one", num_jobs=1,
        jobs=(), submitted=ORIGIN / 1e9 - 1, user="u", host="n0", conf="x.yaml", version="1",
        pid=1, pid_start=None, verdict=verdict, message=message,
    )  # fmt: skip
    write_record(RunFolder(folder), record)
    (folder / "plan.json").write_text("{}")
    begun = ORIGIN / 1e9
    events = [
        {"kind": "started", "time": begun, "attempt": 0},
        {"kind": "ended", "time": begun + ended_s, "attempt": 0, "code": 1, "reason": message},
    ]
    if ended_s:
        (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))


def find_sentences(folder: Path) -> list[str]:
    job = load_job(folder)
    return [found.sentence for found in findings.find_all(job, analyse(job))]


def test_how_a_run_ended_badly_comes_first_and_since_when_it_stood_still(tmp_path: Path) -> None:
    """A run that hung until its limit began with its goodput and its loss."""
    schedule = build_schedule("1f1b", 2, 4)
    write_simulated(tmp_path / "attempt-0", schedule, build_even_costs(2))
    (tmp_path / "attempt-0/n0.out").write_text("step 10 loss 2.5\n")
    write_ended(tmp_path, "TIMEOUT", "the time limit was reached", ended_s=600.0)
    first, second, *_ = find_sentences(tmp_path)
    assert first == (
        "The run ended as TIMEOUT: the time limit was reached; "
        f"see `vjob logs {tmp_path.name} --errors`."
    )
    assert second == "No step since 22:13 UTC, 10 min before the end."
    write_ended(tmp_path, "FAILED", "rank 1 exited 1: ValueError: no such word", ended_s=20.0)
    first, *others = find_sentences(tmp_path)
    assert "rank 1 exited 1: ValueError: no such word" in first
    assert not [text for text in others if text.startswith("No step since")]
    write_ended(tmp_path, "COMPLETED", "all 2 ranks exited 0", ended_s=600.0)
    assert not [
        text for text in find_sentences(tmp_path) if text.startswith(("The run e", "No st"))
    ]


def test_a_run_that_failed_before_its_ranks_began_says_so_first(tmp_path: Path) -> None:
    write_ended(tmp_path, "FAILED", "preflight: n0 has no git", ended_s=2.0)
    assert find_sentences(tmp_path)[0].startswith("The run ended as FAILED: preflight: n0 has no")


def test_a_run_with_nothing_to_do_says_so_first(tmp_path: Path) -> None:
    (tmp_path / "attempt-0").mkdir()
    line = "0: nothing to do: train.steps is 200, and all are done\n"
    (tmp_path / "attempt-0/n0.out").write_text(line)
    write_ended(tmp_path, "COMPLETED", "all 2 ranks exited 0")
    first, *_ = find_sentences(tmp_path)
    assert first == "The run had nothing to do: train.steps is 200, and all are done."


def test_time_after_the_last_step_of_a_cancelled_run_is_no_fault(tmp_path: Path) -> None:
    schedule = build_schedule("1f1b", 2, 4)
    write_simulated(tmp_path / "attempt-0", schedule, build_even_costs(2))
    write_ended(tmp_path, "CANCELLED", "cancelled with vjob cancel", ended_s=20.0)
    assert find_sentences(tmp_path)[0] == (
        "The run ended as CANCELLED: cancelled with vjob cancel."
    )
    accounting = analyse(load_job(tmp_path)).accounting
    assert accounting.seconds["lost"] > 30
    assert describe_class(accounting, "lost") == "work after the last step, cut off by the cancel"
    write_ended(tmp_path, "FAILED", "rank 1 exited 1", ended_s=20.0)
    assert "ranks that did not end well" in describe_class(
        analyse(load_job(tmp_path)).accounting, "lost"
    )


def test_a_hang_is_said_first_with_what_it_cost(tmp_path: Path) -> None:
    schedule = build_schedule("1f1b", 2, 4)
    write_simulated(tmp_path / "attempt-0", schedule, build_even_costs(2))
    write_ended(tmp_path, "FAILED", "rank 1 on n1 is stopped (SIGSTOP)", ended_s=20.0)
    before = analyse(load_job(tmp_path)).accounting
    ended = before.attempts[-1].ended
    hang = Hang(HangWitness.STOPPED, since=ended - 15, seen_at=ended - 5, rank=1, node="n1")
    (tmp_path / "attempt-0/state").mkdir(exist_ok=True)
    write_hang(RunFolder(tmp_path).attempt(0), hang)
    after = analyse(load_job(tmp_path)).accounting
    assert after.seconds["hung"] == pytest.approx(30)
    assert after.seconds["lost"] == pytest.approx(before.seconds["lost"] - 30)
    first = findings.find_all(load_job(tmp_path), analyse(load_job(tmp_path)))[0]
    assert (first.rule, first.lost_s) == ("hang", pytest.approx(30))
    assert "rank 1 on n1 is stopped (SIGSTOP)" in first.sentence and "hours" in first.cost
    headline = analyse(load_job(tmp_path)).headline
    assert [fact.name for fact in list_facts(headline)][:2] == ["state", "hung"]
    assert headline.hung == "rank 1 on n1 is stopped (SIGSTOP)"
    assert headline.hung_hours == pytest.approx(30 / 3600)
    now = dataclasses.replace(load_job(tmp_path), state=RunState("RUNNING"))
    late = dataclasses.replace(hang, since=ended + 5, seen_at=ended + 15)
    now = dataclasses.replace(now, hangs={"0": late})
    (said, *_) = findings.find_all(now, analyse(now))
    assert " UTC on: rank 1 on n1" in said.sentence and said.rule == "hang"
    recovered = dataclasses.replace(hang, until=ended - 1)
    now_well = dataclasses.replace(load_job(tmp_path), hangs={"0": recovered})
    (said_well, *_) = findings.find_all(now_well, analyse(now_well))
    assert "the steps continued by" in said_well.sentence and not said_well.key
    assert "; it hangs;" in write_opening(now, analyse(now), [said])
    maybe = dataclasses.replace(now, hangs={}, suspected={"0": late})
    (said, *_) = findings.find_all(maybe, analyse(maybe))
    assert "may hang, from about " in said.sentence and said.rule == "suspected hang"


def make_waiting(*hosts: str) -> tuple[Any, Any]:
    """A rank on each host; communication is 22 % of the steps and 15 % of the run."""
    ranks = [
        SimpleNamespace(host=host, has_header=True, replica=at) for at, host in enumerate(hosts)
    ]
    plan = SimpleNamespace(program="gpt", pipeline=2)
    job = SimpleNamespace(traces=SimpleNamespace(ranks=ranks), plan=plan, gpus=pd.DataFrame())
    accounting = SimpleNamespace(
        seconds={"communication": 22.0}, shares={"communication": 0.15}, stepping_s=100.0
    )
    return job, SimpleNamespace(accounting=accounting)


def test_waits_within_one_machine_are_no_networks() -> None:
    (found,) = findings._on_exposed(*make_waiting("n0", "n0"))
    assert found.sentence == (
        "Communication holds up the ranks for 22 % of the time of all steps, 15 % of the whole "
        "run: the ranks share one machine, so the network is not the cause."
    )
    assert "interface" not in found.key and "order" not in found.key
    (found,) = findings._on_exposed(*make_waiting("n0", "n1"))
    assert "the network sets the pace" in found.sentence
    assert found.key.startswith("cluster.nodes[].interface, more micro-batches")
    assert found.key.endswith(", or parallel.order")


def test_waits_on_busy_processors_are_not_advised_on() -> None:
    """A sum of 2 ms was held to take 54 where other jobs had the processors too."""
    job, analysis = make_waiting("n0", "n0")
    job.gpus = pd.DataFrame({"node": "n0", "gpu": "cpu", "cpu_percent": [100.0] * 3})
    analysis.headline = SimpleNamespace(has_gpus=False)
    (found,) = findings._on_exposed(job, analysis)
    assert "the processors of n0 were all busy" in found.sentence
    assert (found.key, found.cause, found.lost_s) == ("", "", 0.0)


def test_the_median_step_is_the_nearest_to_the_median_of_all() -> None:
    """Steps with details took longer than others, and the median of these was called the median."""
    took = {step: 24.0 for step in range(1, 12)} | {1: 50.0, 5: 33.0, 9: 26.0, 11: 32.0}
    index = pd.MultiIndex.from_tuples([("0", step) for step in took])
    detailed = [("0", step) for step in (1, 5, 9, 11)]
    chosen = choose_steps(detailed, pd.Series(list(took.values()), index=index))
    assert {name: step for name, (_, step) in chosen.items()} == {
        "first": 1, "median": 9, "slowest": 5, "last": 11,
    }  # fmt: skip


def make_swapping(swapped_mb: list[float], took_s: list[float]) -> tuple[Any, Any]:
    """A node with a sample and a step a second; nobody else to compare its ranks with."""
    samples = pd.DataFrame({"attempt": "0", "node": "n0", "gpu": "cpu", "swap_mb": swapped_mb})
    samples["time"] = [float(at) for at in range(len(swapped_mb))]
    times = pd.DataFrame({"attempt": "0", "took_s": took_s})
    times["begin_s"] = [float(at) for at in range(len(took_s))]
    traces = SimpleNamespace(steps=pd.DataFrame(), is_log=False, zero_ns=0)
    accounting = SimpleNamespace(stepping_s=1000.0)
    analysis = SimpleNamespace(stragglers=[], times=times, accounting=accounting, goodput=KNOWN)
    plan = PlanFacts(scheduler="slurm")
    return SimpleNamespace(gpus=samples, traces=traces, plan=plan), analysis


def test_swap_costs_what_steps_take_longer_from_then_on() -> None:
    swapped = [100.0] * 10 + [4196.0] * 10
    (found,) = findings._on_swap(*make_swapping(swapped, [1.0] * 10 + [2.0] * 10))
    assert found.sentence == (
        "n0 moved 4.0 GiB of memory to swap during the steps; steps took 2.00 times as long from "
        "then on."
    )
    assert found.lost_s == pytest.approx(510)
    assert "cluster.nodes[].memory_gb" in found.key
    (found,) = findings._on_swap(*make_swapping(swapped, [1.0] * 20))
    assert found.lost_s == 0, "it had no effect that can be seen"


def test_swap_that_was_there_before_is_no_finding() -> None:
    assert not list(findings._on_swap(*make_swapping([9000.0, 9000.0, 9400.0], [1.0] * 3)))


def make_limited(
    queued_s: float, limit_min: float, ran_s: float = 100.0, scheduler: str = "slurm"
) -> tuple[Any, Any]:
    """A run that ended well."""
    conf, plan = {"cluster": {"walltime_min": limit_min}}, PlanFacts(scheduler=scheduler)
    job = SimpleNamespace(conf=conf, record=None, plan=plan)
    attempt = SimpleNamespace(started=1000.0, ended=1000.0 + ran_s)
    accounting = SimpleNamespace(attempts=(attempt,))
    headline = SimpleNamespace(queued_s=Value(queued_s))
    return job, SimpleNamespace(accounting=accounting, headline=headline)


def test_a_long_limit_is_wrong_only_for_a_run_that_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "has_ended_well", lambda job: True)
    (found,) = findings._on_limit(*make_limited(600.0, 120))
    assert found.cause == "limit"
    assert "2 h, 72 times the 100 s of the run, which waited 10 min in" in found.sentence
    assert found.cost == "part of the 10 min in the queue"
    assert found.key == "cluster.walltime_min: 10"
    (found,) = findings._on_limit(*make_limited(2.0, 120))
    assert not found.cause
    assert not list(findings._on_limit(*make_limited(600.0, 59)))
    assert not list(findings._on_limit(*make_limited(600.0, 120, 0.0))), "only its end is known"
    for scheduler in ("local", "ssh"):
        assert not list(findings._on_limit(*make_limited(600.0, 120, 100.0, scheduler)))


def test_findings_of_a_local_run_name_no_key_of_a_queue() -> None:
    job, analysis = make_swapping([0.0, 900.0, 9000.0], [1.0] * 20)
    job.plan = PlanFacts(scheduler="local")
    (found,) = findings._on_swap(job, analysis)
    assert found.key == "fewer data workers"
    assert findings._spell_exclude(job, "box") == ""
    job.plan = PlanFacts(scheduler="ssh")
    assert findings._spell_exclude(job, "n1") == "leave n1 out of the list of machines"


@pytest.mark.parametrize(
    ("program", "key"), [("pretrain_gpt", "train.checkpoint.every"), ("script", "")]
)
def test_no_script_is_told_a_key_that_it_does_not_read(
    program: str, key: str, tmp_path: Path
) -> None:
    (tmp_path / "n060.out").write_text("step 1/9 loss 2.5\n")
    job = load_job(tmp_path)
    assert findings.name_saves_key(replace(job, plan=replace(job.plan, program=program))) == key


def test_gpus_that_were_not_read_are_told_once_and_last() -> None:
    """Each node had a finding of its own, above those on the run."""
    reason = "no device of nvidia, amd or intel is here"
    hardware = [NodeFaults("0", node, unread={reason: 5}) for node in ("a1", "a2")]
    (found,) = findings._on_hardware(SimpleNamespace(hardware=hardware), SimpleNamespace())
    assert found.sentence.startswith("The GPUs of a1, a2 were not read in 10 samples")
    assert found.weight == 0


@pytest.mark.parametrize(
    ("ranks", "busy", "is_found"), [(4, 99.0, True), (2, 99.0, False), (4, 50.0, False)]
)
def test_more_ranks_than_processors_are_named_before_what_they_cause(
    ranks: int, busy: float, is_found: bool
) -> None:
    """The first advice for four ranks on two processors was another schedule."""
    samples = pd.DataFrame({"node": "n0", "gpu": "cpu", "num_cpus": 2.0, "cpu_percent": [busy] * 3})
    exits = pd.DataFrame({"attempt": "0", "node": "n0", "rank": range(ranks)})
    analysis = SimpleNamespace(headline=SimpleNamespace(has_gpus=False))
    job = SimpleNamespace(gpus=samples, exits=exits)
    found = list(findings._on_processors(job, analysis))
    assert [one.weight for one in found] == [1.0] * is_found
    if is_found:
        assert found[0].sentence.startswith("n0 ran 4 ranks on 2 processors, which were 99 % busy")
