"""Findings from recorded texts."""

from __future__ import annotations

import pytest

from varuna_core.agent.meeting import network
from vjob.jobs.schedulers.slurm.settings import (
    judge_accounting,
    judge_het_steps,
    judge_kill_wait,
    judge_preemption,
    judge_requeue,
    judge_version,
    parse_config,
)
from vjob.shelf.doctor import doctor

CONFIG_22_05 = """\
Configuration data as of 2026-01-02T03:04:05
AccountingStorageType   = accounting_storage/slurmdbd
AuthInfo                = cred_expire=5
JobRequeue              = 1
KillWait                = 30 sec
MinJobAge               = 300 sec
PreemptType             = preempt/partition_prio
SchedulerParameters     = sched_interval=1,bf_interval=1,bf_hetjob_immediate
SLURM_VERSION           = 22.05.8
SlurmctldParameters     = preempt_send_user_signal
"""


@pytest.fixture
def facts() -> dict[str, str]:
    return parse_config(CONFIG_22_05)


def test_a_well_kept_cluster_has_no_complaint(facts: dict[str, str]) -> None:
    judges = (
        judge_version,
        judge_accounting,
        judge_het_steps,
        judge_preemption,
        judge_requeue,
        judge_kill_wait,
    )
    assert {judge(facts).status for judge in judges} == {"ok"}


@pytest.mark.parametrize(
    ("judge", "change", "word"),
    [
        (judge_version, {"SLURM_VERSION": "19.05.2"}, "20.11"),
        (
            judge_accounting,
            {"AccountingStorageType": "accounting_storage/none"},
            "record",
        ),
        (judge_het_steps, {"SchedulerParameters": "disable_hetjob_steps"}, "split"),
        (judge_preemption, {"SlurmctldParameters": ""}, "send_user_signal"),
        (judge_kill_wait, {"KillWait": "5 sec"}, "grace_s"),
    ],
)
def test_each_trouble_comes_with_its_remedy(
    facts: dict[str, str], judge: object, change: dict[str, str], word: str
) -> None:
    finding = judge({**facts, **change})  # type: ignore[operator] # one of the judges above
    assert finding.status in ("warn", "fail")
    assert word in finding.remedy


@pytest.mark.parametrize(
    ("kill_wait", "grace_s", "status"),
    [("30 sec", 20, "ok"), ("30 sec", 25, "ok"), ("30 sec", 26, "warn"), ("600 sec", 500, "ok")],
)
def test_a_grace_that_slurm_cuts_short_is_told_with_what_fits(
    facts: dict[str, str], kill_wait: str, grace_s: int, status: str
) -> None:
    finding = judge_kill_wait({**facts, "KillWait": kill_wait}, grace_s)
    assert finding.status == status
    assert status == "ok" or "cluster.grace_s: 25 or less" in finding.remedy


def test_a_loopback_host_name_is_named_with_the_line_to_change() -> None:
    finding = doctor.judge_host_name("n1", "127.0.1.1")
    assert finding.status == "warn"
    assert "127.0.1.1 n1" in finding.remedy


def test_interfaces_are_found_without_the_ip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minimal root has none, and doctor said that it has no network."""
    monkeypatch.setenv("PATH", "/nonexistent")
    names = network.list_addresses()
    assert names["127.0.0.1"] == "lo"
    assert doctor.judge_interfaces({**names, "10.0.0.1": "eth9"}).status == "ok"
    assert doctor.judge_interfaces({"127.0.0.1": "lo"}).status == "warn"


def test_ports_above_the_ephemeral_range_are_ours() -> None:
    assert doctor.judge_ports("32768\t60999\n").status == "ok"
    assert doctor.judge_ports("1024\t65000\n").status == "warn"


@pytest.mark.parametrize(
    ("torch", "numpy", "has_gpus", "status", "says"),
    [
        ("2.13.0", "2.4.6", True, "ok", "torch 2.13.0, numpy 2.4.6"),
        ("2.13.0+cpu", "2.4.6", False, "ok", "torch 2.13.0+cpu"),
        ("2.13.0+cpu", "2.4.6", True, "warn", "a build for CPUs"),
        (None, None, False, "note", "no torch and no numpy under"),
        ("2.13.0", None, True, "note", "no numpy under"),
    ],
)
def test_what_training_needs_is_looked_for(
    torch: str | None, numpy: str | None, has_gpus: bool, status: str, says: str
) -> None:
    finding = doctor.judge_python(torch, numpy, has_gpus)
    assert finding.status == status and says in finding.text
    assert finding.remedy or status == "ok"


def test_it_runs_here() -> None:
    findings = doctor.examine()
    assert findings and doctor.render(findings)
