"""The checks of a node, and the table of all."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.varuna_core.agent.local_run import make_group, make_plan
from varuna_core.agent.checks import gpus
from varuna_core.agent.checks import host as checks_host
from varuna_core.agent.checks import host as checks_network
from varuna_core.agent.checks.gpus import check_gpus
from varuna_core.agent.checks.preflight import CHECKS, run_checks
from varuna_core.agent.gpu import nvidia
from varuna_core.agent.gpu.accelerator import choose_accelerator, count_visible
from varuna_core.agent.meeting.meeting import (
    compute_pause_s,
    explain_not_ready,
    render_table,
)
from varuna_core.agent.meeting.network import Route
from varuna_core.agent.processes.process import CommandResult
from varuna_core.agent.setup.ranks import map_devices
from varuna_core.agent.setup.site import CheckResult, Master, Site
from varuna_core.facts.known import NotKnown, Value
from varuna_core.records.nodes import Check, NodeReport
from varuna_core.records.plan import Plan, Prediction
from varuna_core.records.runfolder import RunFolder


def make_site(folder: Path, plan: Plan, index: int = 0, **env: str) -> Site:
    run = RunFolder(folder)
    attempt = run.attempt(0)
    attempt.make()
    master = Master("127.0.0.1", 61000, "n0", 1.0)
    return Site(
        plan=plan,
        node=plan.node(index),
        run=run,
        attempt=attempt,
        master=master,
        host=f"n{index}",
        env={"PATH": "/usr/bin:/bin", **env},
        stopping=lambda: False,
    )


def make_report(index: int, *checks: Check, **changes: Any) -> NodeReport:
    report = NodeReport(
        index=index,
        host=f"n{index}",
        group="a",
        address="10.0.0.1",
        interface="eth0",
        gpus=4,
        clock_offset_s=0.0,
        opened=1.0,
        ready=True,
        checks=checks,
        environment=(),
    )
    return replace(report, **changes)


def test_a_sound_node_passes_every_check(tmp_path: Path) -> None:
    checks = run_checks(make_site(tmp_path, make_plan()), CHECKS, 20)
    assert [check for check in checks if check.status == "fail"] == []
    assert {"paths", "program", "disk", "clock", "limits", "interface", "master"} <= {
        check.name for check in checks
    }


def test_a_check_that_hangs_or_breaks_does_not_hold_up_the_others(tmp_path: Path) -> None:
    def hang(site: Site) -> list[CheckResult]:
        time.sleep(5)
        return []

    def crash(site: Site) -> list[CheckResult]:
        raise KeyError("x")

    site = make_site(tmp_path, make_plan())
    begun = time.monotonic()
    found = run_checks(site, (("hung", hang), ("broken", crash)), 0.2)
    assert time.monotonic() - begun < 2
    assert [(check.name, check.status) for check in found] == [("hung", "fail"), ("broken", "warn")]
    assert "no answer within 0.2 s" in found[0].text


@pytest.mark.parametrize(
    ("visible", "devices", "status", "words"),
    [
        ("0,1,2,3", None, "ok", "4 seen"),
        ("0,1", None, "fail", "2 seen"),
        ("", None, "fail", "0 seen"),
        ("4,5,6,7", (2, 3), "ok", "4 seen"),
        ("4,5", (2, 3), "fail", "the plan lists device 2, but only 2 exist"),
    ],
)
def test_gpus_are_counted_against_the_plan(
    tmp_path: Path, visible: str, devices: tuple[int, ...] | None, status: str, words: str
) -> None:
    plan = make_plan(make_group("a", 1, 4, gpus=4, devices=devices))
    (found,) = check_gpus(make_site(tmp_path, plan, CUDA_VISIBLE_DEVICES=visible))
    assert found.status == status and words in found.text


def test_devices_are_counted_where_the_conf_names_no_gpus(tmp_path: Path) -> None:
    group = replace(make_group("a", 1, 3), devices=(0, 1, 2))
    site = make_site(tmp_path, make_plan(group), CUDA_VISIBLE_DEVICES="0,1")
    (found,) = check_gpus(site)
    assert found.status == "fail" and "the plan lists device 2, but only 2 exist" in found.text


@pytest.mark.parametrize(
    ("planned", "model", "same"),
    [
        ("A10", "NVIDIA A10", True),
        ("A10", "NVIDIA A100-SXM4-40GB", False),
        ("A100-40", "NVIDIA A100-SXM4-40GB", True),
        ("A100-40", "NVIDIA A100 80GB PCIe", False),
        ("V100-32", "Tesla V100-DGXS", True),
        ("RTX3090", "NVIDIA GeForce RTX 3090", True),
        ("NVIDIA Odd 7", "NVIDIA Odd 7", True),
        ("NVIDIA Odd 7", "NVIDIA Odd 8", True),
    ],
)
def test_a_planned_kind_is_found_in_the_drivers_name(planned: str, model: str, same: bool) -> None:
    assert gpus.is_called(planned, model) == same


def test_another_gpu_than_was_planned_for_is_told(tmp_path: Path) -> None:
    for number, model in enumerate(("NVIDIA A10", "NVIDIA A100-PCIE-40GB")):
        folder = tmp_path / "driver" / str(number)
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   7\n")
    models = nvidia.read_models(tmp_path / "driver")
    assert models == ["NVIDIA A10", "NVIDIA A100-PCIE-40GB"]
    assert nvidia.read_models(tmp_path / "none") == []
    plan = make_plan(prediction=Prediction(step_s=1.0, gpu="A10"))
    (found,) = gpus.check_kind(plan, models)
    assert found.status == "warn" and found.text.startswith("NVIDIA A100-PCIE-40GB, but the layout")
    assert not gpus.check_kind(plan, models[:1])
    assert not gpus.check_kind(make_plan(prediction=None), models)


def test_a_driver_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = CommandResult(9, "", "NVIDIA-SMI has failed because it could not communicate\n")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(nvidia, "run", lambda argv, timeout_s: answer)
    counted = count_visible(choose_accelerator(), {})
    assert isinstance(counted, NotKnown)
    assert counted.reason == f"nvidia-smi -L failed: {answer.err.strip()}"
    listed = "GPU 0: NVIDIA A10 (UUID: GPU-1)\nGPU 1: NVIDIA A10 (UUID: GPU-2)\n"
    monkeypatch.setattr(nvidia, "run", lambda argv, timeout_s: CommandResult(0, listed, ""))
    counted = count_visible(choose_accelerator(), {})
    assert isinstance(counted, Value) and counted.value == 2
    assert counted.evidence[0].source == "nvidia-smi -L"


@pytest.mark.parametrize(
    ("visible", "mapped"),
    [(None, "2,3"), ("4,5,6,7", "6,7"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-c,GPU-d")],
)
def test_devices_of_the_plan_count_the_visible_ones(visible: str | None, mapped: str) -> None:
    assert map_devices(make_group("a", 1, 2, devices=(2, 3)), visible) == mapped


def test_a_clock_that_is_off_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now - 60)
    site = make_site(tmp_path, make_plan())
    (found,) = checks_host.check_clock(site)
    assert found.status == "warn" and "+60" in found.text
    assert site.facts.clock_offset_s == pytest.approx(60, abs=5)


def test_rank_0_elsewhere_than_the_batch_script_is_refused(tmp_path: Path) -> None:
    """In a het step the node list is sorted and ranks are not; see docs/spine.md."""
    site = make_site(tmp_path, make_plan())
    elsewhere = replace(site, master=Master("198.51.100.7", 61000, "b1", 1.0))
    (found,) = checks_network.check_master(elsewhere)
    assert found.status == "fail"
    assert "published by b1, but rank 0 runs on n0" in found.text


def test_an_interface_that_the_node_lacks_is_refused(tmp_path: Path) -> None:
    plan = make_plan(make_group("a", 1, 1, interface="ib9"))
    (found,) = checks_network.check_interface(make_site(tmp_path, plan))
    assert found.status == "fail" and "the plan names ib9" in found.text


def test_a_name_on_loopback_is_a_warning_with_the_line_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_network, "resolve", lambda name: ["127.0.1.1"])
    monkeypatch.setattr(checks_network, "find_route", lambda address: Route("eth0", "10.77.0.2"))
    monkeypatch.setattr("os.uname", lambda: type("Uname", (), {"nodename": "n61"}))
    plan = make_plan(make_group("a", 2, 1), scheduler="slurm")
    (found,) = checks_network.check_name(make_site(tmp_path, plan, 1))
    assert found == ("warn", found.text) and "the line '10.77.0.2 n61'" in found.text


def test_the_table_is_aligned_and_tells_what_is_wrong() -> None:
    plan = make_plan(make_group("a", 3, 1))
    bad = make_report(1, Check("paths", "fail", "/data: No such file or directory"), host="n061x")
    slow = make_report(0, Check("clock", "warn", "+7.0 s"), Check("gpus", "ok", "4 seen"))
    assert render_table(plan, 2, {0: slow, 1: bad}) == (
        "preflight of attempt 2: 3 nodes: 1 warn, 1 FAIL, 1 missing\n"
        "node  host   group  address   interface  gpus  state\n"
        "0     n0     a      10.0.0.1  eth0       4     warn\n"
        "      warn clock: +7.0 s\n"
        "1     n061x  a      10.0.0.1  eth0       4     FAIL\n"
        "      fail paths: /data: No such file or directory\n"
        "2     -      a      -         -          -     missing\n"
        "      no report: the agent did not start, or ended early; see the scheduler's log\n"
    )


def test_a_long_table_shows_only_what_matters() -> None:
    plan = make_plan(make_group("a", 40, 1))
    reports = {index: make_report(index) for index in range(40)}
    assert render_table(plan, 0, reports) == "preflight of attempt 0: 40 nodes: 40 ok\n"
    reports[7] = make_report(7, Check("disk", "fail", "full"))
    assert len(render_table(plan, 0, reports).splitlines()) == 4


def test_the_reason_names_nodes_that_refused_and_nodes_that_said_nothing() -> None:
    plan = make_plan(make_group("a", 4, 1))
    assert explain_not_ready(plan, {index: make_report(index) for index in range(4)}) is None
    bad = make_report(1, Check("disk", "fail", "full"))
    text = explain_not_ready(plan, {0: make_report(0), 1: bad, 2: make_report(2, ready=False)})
    assert text is not None
    assert "n1: disk: full" in text and "no report from node 3 (a)" in text


def test_nodes_that_wait_for_each_other_leave_the_file_server_to_others() -> None:
    assert [compute_pause_s(count, 0.0) for count in (1, 400)] == [0.2, 0.2]
    assert all(count / compute_pause_s(count, 0.0) <= 2000 for count in (1, 400, 2000, 10_000))
    assert (compute_pause_s(8, 60.0), compute_pause_s(100_000, 60.0)) == (1.0, 5.0)
