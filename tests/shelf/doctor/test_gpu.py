"""`vjob doctor --gpu`: its words from recorded answers, a real run on processors, its refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import Vjob
from tests.jobs.confs import make_conf
from varuna_core.records.files import list_names
from vjob.jobs.conf.schema import JobConf
from vjob.shelf.doctor import gpu_check
from vjob.shelf.doctor.doctor import render
from vjob.shelf.doctor.gpu import judge_failed, judge_ranks

ANSWER: dict[str, Any] = {
    "torch": "2.13.0",
    "built for": "12.8",
    "driver": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\nGCC 13\n",
    "gpus": 2,
    "device": "NVIDIA A100-SXM4-40GB",
    "nccl": "2.27.5",
    "message s": 0.00031,
    "step": [5.545318, 1.20415],
    "step on cpu": [5.545317, 1.20414],
}
READING = {
    "name": "NVIDIA A100-SXM4-40GB",
    "temperature": 31.0,
    "memory_used_mb": 912.0,
    "memory_total_mb": 40960.0,
}
"""Written by hand in the form of a rank's line: none has been recorded on a GPU yet."""


def without(*names: str, **more: Any) -> dict[str, Any]:
    return {key: value for key, value in ANSWER.items() if key not in names} | more


def judge(*answers: dict[str, Any], readings: Any = (READING,)) -> dict[str, tuple[str, str]]:
    return {one.name: (one.status, one.text) for one in judge_ranks(answers, readings)}


def test_where_all_is_well_each_thing_has_its_line() -> None:
    assert render(judge_ranks([ANSWER, ANSWER], [READING])).splitlines() == [
        "ok    torch: torch 2.13.0 sees 2 GPU(s) of the node: NVIDIA A100-SXM4-40GB; "
        "driver 570.86.15",
        "ok    nccl: NCCL 2.27.5 loads and sums on each GPU",
        "ok    message: 1 MiB from rank to rank in 0.31 ms",
        "ok    training step: two stages: loss 5.545318, the plain model on the CPU 5.545317",
        "ok    readings: NVIDIA A100-SXM4-40GB 31 C, 912 of 40960 MB",
    ]


@pytest.mark.parametrize(
    ("answer", "name", "status", "says"),
    [
        ({**ANSWER, "gpus": 0}, "torch", "fail", "sees no GPU: built for CUDA 12.8; driver 570"),
        ({**ANSWER, "gpus": 0, "built for": None}, "torch", "fail", "a build without CUDA"),
        ({**ANSWER, "driver": ""}, "torch", "ok", "the driver's version is unknown"),
        (without("nccl", **{"nccl error": "RuntimeError: no NCCL"}), "nccl", "warn", "no NCCL"),
        (without("step", error="RankFailed: gone"), "training step", "fail", "rank 1: RankFailed"),
        (without("message s", error="OSError: x"), "message", "fail", "none arrived: rank 1: OSEr"),
        ({**ANSWER, "step": [5.56, 1.2]}, "training step", "fail", "loss 5.56 where the plain"),
        (
            {**ANSWER, "step": [5.545318, float("nan")]},
            "training step",
            "fail",
            "gradient norm nan",
        ),
    ],
)
def test_each_trouble_of_one_rank_is_named(
    answer: dict[str, Any], name: str, status: str, says: str
) -> None:
    ranks = (ANSWER, answer) if name != "torch" or status == "fail" else (answer, answer)
    found = judge(*ranks)
    assert found[name][0] == status and says in found[name][1]
    assert ("readings" in found) == bool(answer["gpus"])


def test_no_reading_is_a_warning() -> None:
    assert judge(ANSWER, ANSWER, readings=[])["readings"][0] == "warn"
    assert (
        judge(ANSWER, ANSWER, readings=[{**READING, "temperature": None}])["readings"][0] == "warn"
    )
    assert judge_failed("rank 0 exited 1\nmore").text.endswith("did not end: rank 0 exited 1")


def shape(conf: JobConf) -> dict[str, Any]:
    (group,) = gpu_check.build_conf(conf).cluster.nodes
    names = ("group", "count", "ranks", "gpus", "devices", "queue")
    return {name: getattr(group, name) for name in names}


def test_one_node_of_the_first_group_with_gpus_gets_two_ranks() -> None:
    text = (
        "name: x\nprogram: pretrain_gpt\nmodel: gpt2-small\ndata: {synthetic: true}\n"
        "cluster:\n  restarts: 3\n  nodes:\n  - {group: a, count: 2, ranks: 1}\n"
        "  - {group: b, count: 3, queue: q, gpus: 'a100:4', DEVICES}\nenv: {A: b}\n"
    )
    conf = make_conf(text.replace(", DEVICES", ""))
    expected = {"group": "b", "count": 1, "ranks": 2, "gpus": "a100:2", "queue": "q"}
    assert shape(conf) == {**expected, "devices": None}
    made = gpu_check.build_conf(conf)
    assert (made.model, made.data, made.cluster.restarts, made.env) == (
        None,
        None,
        None,
        {"A": "b"},
    )
    chosen = make_conf(text.replace("DEVICES", "devices: [1, 2, 3]"))
    assert shape(chosen) == {**expected, "gpus": "a100:4", "devices": (1, 2)}
    single = make_conf(text.replace("a100:4", "a100:1").replace(", DEVICES", ""))
    assert shape(single)["gpus"] == "a100:1", "two ranks share it, as the conf asks"


SMI = """#!/bin/sh
case "$1" in
-L) echo "GPU 0: stand-in (UUID: GPU-1)" ;;
--query-gpu*) echo "0, stand-in, 49, 99, 100, 22731, 15.61, GPU-1, 0, 0x0" ;;
esac
"""


def test_the_check_runs_as_a_job_and_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processors, with a stand-in for nvidia-smi: all but what CUDA itself does."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(SMI)
    (tools / "nvidia-smi").chmod(0o755)
    path = f"{tools}:{Vjob(tmp_path).env['PATH']}"
    for name, value in {"PATH": path, "XDG_STATE_HOME": str(tmp_path / "state")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_check, "PROGRAM", gpu_check.replace(gpu_check.PROGRAM, args=("cpu",)))
    conf = tmp_path / "conf.yaml"
    conf.write_text(
        "name: big\nprogram: pretrain_gpt\nmodel: gpt2-small\ndata: {synthetic: true}\n"
        "cluster: {scheduler: local, nodes: [{group: m, count: 1, gpus: 1}]}\n"
    )
    said: list[str] = []
    gathered: list[Any] = []
    real = gpu_check.judge_ranks

    def judge_as_on_a_gpu(answers: Any, readings: Any) -> Any:
        gathered.extend(answers)
        return real([{**one, "gpus": 1} for one in answers], readings)

    monkeypatch.setattr(gpu_check, "judge_ranks", judge_as_on_a_gpu)
    found = {one.name: one for one in gpu_check.check_gpus(conf, said.append)}
    assert [one["gpus"] for one in gathered] == [0, 0], gathered
    words = json.dumps([one.as_json() for one in found.values()])
    assert {name: one.status for name, one in found.items()} == dict.fromkeys(
        ("torch", "message", "training step", "readings"), "ok"
    ), words
    assert "stand-in 49 C, 100 of 22731 MB" in found["readings"].text
    assert "its folder is " in said[0] and any(
        "gpu-check" in name for name in list_names(tmp_path / "log")
    )


def test_without_a_gpu_it_says_so_and_runs_nothing(tmp_path: Path) -> None:
    vjob = Vjob(tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    said = vjob("doctor", "--gpu").stdout
    assert said.startswith("note  gpu: nothing was run: no GPU on this machine (CUDA_VISIBLE_DEV")
    vjob.write("", "x.py")
    conf = vjob.write(
        "name: x\nprogram: {script: x.py}\ncluster: {nodes: [{group: m, ranks: 1}]}\n"
    )
    said = vjob("doctor", "--gpu", conf).stdout
    assert "nothing was run: cluster.nodes of conf.yaml has no gpus" in said
    assert not (tmp_path / "log").exists()
    assert "a conf goes with --gpu" in vjob("doctor", conf, code=2).stderr
