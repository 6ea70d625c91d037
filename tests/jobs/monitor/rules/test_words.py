"""The words of verdicts: one sentence for each finding, and remedies that the job's user has."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace

import pytest

from tests import ROOT
from tests.jobs.monitor.builders import (
    change_gpus,
    change_node,
    healthy,
    make_outcome,
    make_points,
    make_progress,
    name_rule,
    with_points,
    with_state,
)
from varuna_core.facts.known import NotKnown, Value
from varuna_core.facts.remedy import Context
from vjob.jobs.monitor.model.snapshot import Health, Snapshot
from vjob.jobs.monitor.model.text import render_json
from vjob.jobs.monitor.rules.judge import RULES, judge
from vjob.jobs.monitor.rules.words import SENTENCES

CONF_KEY = re.compile(
    r"\b(train|cluster|morph|parallel|container|program|model)\.[a-z_]+|\blog_folder\b|node group"
)


def test_every_finding_of_a_rule_has_its_sentence() -> None:
    """And no sentence is left of a finding that nobody makes."""
    made = {name_rule(rule) for rule in RULES}
    makers = {"Finding", "_suspect_ranks", "_of_line"}
    for path in (ROOT / "jobs/monitor/rules").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in makers:
                made |= {x.value for x in call.args if isinstance(x, ast.Constant)}
    assert made == set(SENTENCES)


def end_of(word: str, **facts: object) -> Snapshot:
    outcome = make_outcome(143, "SIGTERM from the scheduler")
    return with_state(healthy(outcome=outcome, **facts), word)


PLAIN = {
    "time limit": end_of("TIMEOUT"),
    "lost node": end_of("NODE_FAIL"),
    "memory": end_of("OUT_OF_MEMORY"),
    "cancelled": end_of("CANCELLED"),
    "never starts": with_state(healthy(attempt=None), "PENDING", reason="PartitionTimeLimit"),
    "held": with_state(healthy(attempt=None), "PENDING", reason="JobHeldUser"),
    "fewer nodes": with_state(healthy(attempt=None), "PENDING", reason="PartitionNodeLimit"),
    "NaN": with_points(healthy(), make_points([0.3] * 20, loss=float("nan"))),
    "lost gpu": change_node(healthy(), "n001", gpus_lost=(2,)),
    "hot gpu": change_gpus(
        with_points(healthy(), make_points([0.3] * 60 + [0.9] * 80)), "n001", throttle="hw_thermal"
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_job_without_a_conf_hears_of_no_conf_key(name: str) -> None:
    plain = judge(replace(PLAIN[name], record_state=""))
    ours = judge(PLAIN[name])
    assert (plain.context, ours.context) == (Context.SBATCH, Context.CONF)
    said = " / ".join((plain.reason, plain.advice, *plain.facts, *plain.remarks))
    assert not CONF_KEY.search(said)
    assert "vjob report" not in said and "vjob cancel" not in said


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("time limit", "raise cluster.walltime_min, or submit again", "raise --time"),
        ("memory", "raise memory_gb of the node group", "raise --mem"),
        ("lost gpu", "leave n001 out with cluster.exclude", "leave n001 out with --exclude"),
        (
            "never starts",
            "vjob cancel 4711; lower cluster.walltime_min",
            "scancel 4711; lower --time",
        ),
    ],
)
def test_a_remedy_has_the_words_of_the_job(name: str, ours: str, theirs: str) -> None:
    assert judge(PLAIN[name]).advice.startswith(ours)
    assert judge(replace(PLAIN[name], record_state="")).advice.startswith(theirs)


def test_what_is_not_known_has_its_reason() -> None:
    values = judge(healthy()).main.values
    assert isinstance(values["step_s"], Value) and values["step_s"].evidence[0].seen > 0
    endless = judge(healthy(progress=make_progress(make_points([0.3] * 9), num_steps=0))).main
    assert isinstance(endless.values["num_steps"], NotKnown)
    assert isinstance(endless.values["left_s"], NotKnown)
    blind = judge(change_node(healthy(), "n001", gpus_not_known="nvidia-smi: no answer"))
    assert blind.health is Health.RUNNING
    assert blind.reason.endswith("; the state of the GPUs of n001 is not known")
    assert blind.main.values["gpus_not_read"] == ["n001"]
    assert blind.remarks == ("GPUs not read: n001: nvidia-smi: no answer",)
    on_processors = change_node(healthy(num_gpus=0), "n001", gpus_not_known="no answer")
    assert judge(on_processors).health is Health.HEALTHY
    (found,) = blind.others
    unread = found.values["gpus"]
    assert isinstance(unread, NotKnown) and (unread.evidence[0].seen or 0) == 3


@pytest.mark.parametrize(
    ("left_s", "words"),
    [
        (300.0, "the job will not finish: it needs 112 min, and its time limit ends it in 5 min"),
        (900.0, "the job will not finish: it needs 112 min, and its time limit ends it in 15 min"),
        (
            0.0,
            "the job will not finish: it needs 112 min, and its time limit ends it at any moment",
        ),
        (1e6, None),
        (None, None),
    ],
)
def test_a_time_limit_that_is_near_is_named(left_s: float | None, words: str | None) -> None:
    """A run of hours said HEALTHY minutes before Slurm ended it."""
    snapshot = with_state(healthy(), "RUNNING", left_s=left_s)
    verdict = judge(snapshot)
    said = [one for one in (verdict.reason, *verdict.remarks) if "time limit" in one]
    assert judge(snapshot).health is Health.HEALTHY
    assert [words in one for one in said if words] == ([True] if words else [])
    assert bool(said) is bool(words)


def test_the_document_has_findings_with_their_remedies() -> None:
    held = PLAIN["held"]
    document = json.loads(render_json(held, judge(held)))["verdict"]
    (main, *details) = document["findings"]
    assert (main["part"], main["rule"], main["cause"]) == ("main", "never starts", None)
    assert main["values"]["reason"] == "JobHeldUser"
    assert [(x["action"], x["text"]) for x in main["remedies"]] == [
        ("release", "release it with `scontrol release 4711`")
    ]
    assert {one["part"] for one in details} == {"detail"}
    blind = change_node(healthy(), "n001", gpus_not_known="no answer")
    findings = json.loads(render_json(blind, judge(blind)))["verdict"]["findings"]
    assert findings[0]["values"]["step_s"]["value"] > 0
    assert findings[-1]["values"]["gpus"]["not_known"] == "no answer"


def test_a_time_limit_that_leaves_room_is_no_remark() -> None:
    short = with_points(healthy(), make_points([0.3] * 9), num_steps=20)
    verdict = judge(with_state(short, "RUNNING", left_s=600.0))
    assert not [one for one in (verdict.reason, *verdict.remarks) if "time limit" in one]
