"""The verdict as a whole: rules in order, remarks, doubt."""

from __future__ import annotations

import re
from dataclasses import replace

from tests import ROOT
from tests.jobs.monitor.builders import (
    change_gpus,
    change_node,
    healthy,
    name_rule,
    with_state,
)
from vjob.jobs.monitor.model.snapshot import EXIT_CODES, Health
from vjob.jobs.monitor.rules.judge import RULES, judge


def test_a_job_that_does_its_steps_is_healthy() -> None:
    verdict = judge(healthy())
    assert verdict.health is Health.HEALTHY
    assert "step 200 of 5000" in verdict.reason
    assert verdict.exit_code == 0
    assert verdict.remarks == ()


def test_every_rule_says_its_own_name() -> None:
    names = [name_rule(rule) for rule in RULES]
    assert len(set(names)) == len(names)


def test_every_rule_has_its_heading_in_the_docs_in_order() -> None:
    part, _, rules = (ROOT / "docs/verdicts.md").read_text().partition("\n## Rules\n")
    assert re.findall(r"^### (.+)$", rules, re.MULTILINE) == [name_rule(rule) for rule in RULES]
    for health in Health:
        assert f"| {health.value} |" in part
    for health, code in EXIT_CODES.items():
        assert re.search(rf"\| {health.value} \|.*\| {code} \|", part)


def test_a_scheduler_that_does_not_answer_is_a_remark() -> None:
    scheduler = replace(healthy().scheduler, problem="squeue: timed out", age_s=95.0)
    verdict = judge(healthy(scheduler=scheduler))
    assert verdict.health is Health.HEALTHY
    assert any("95 s old" in remark for remark in verdict.remarks)


def test_the_words_of_a_scheduler_that_does_not_answer_are_in_no_reason() -> None:
    """A table had squeue's four lines for each run; a warning above it has them once."""
    scheduler = replace(healthy().scheduler, jobs=(), problem="squeue: a\nb\nc\nd")
    snapshot = healthy(scheduler=scheduler, progress=None, ranks=(), nodes=(), attempt=None)
    verdict = judge(snapshot)
    assert verdict.reason.endswith("slurm does not answer") and "squeue" not in verdict.reason
    assert any("squeue" in remark for remark in verdict.remarks)


def test_clocks_gpus_and_nodes_have_remarks() -> None:
    snapshot = change_gpus(healthy(clock_skew_s=40.0), "n001", ecc_errors=2, num_foreign=1)
    remarks = " / ".join(judge(change_node(snapshot, "n003", clock_offset_s=-30.0)).remarks)
    for word in ("ECC", "n001:0", "not belong to the job", "40 s", "n003"):
        assert word in remarks


def test_a_state_that_nobody_knows_is_unknown() -> None:
    snapshot = healthy(progress=None, ranks=(), nodes=(), attempt=None)
    verdict = judge(with_state(snapshot, "UNKNOWN"))
    assert (verdict.health, verdict.exit_code) == (Health.UNKNOWN, 11)
