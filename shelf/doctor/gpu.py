"""`vjob doctor --gpu`: a verdict on what two ranks on GPUs report. Pure.

What they do is `varuna_core/programs/gpu_check.py`; `shelf/doctor/gpu_check.py` submits them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from varuna_core.agent.gpu.names import NVIDIA_SMI
from vjob.jobs.schedulers.diagnosis import Diagnosis

CLOSE = 1e-3
"""A loss in fp32 on a GPU and on a CPU, as a part of it; and the norm of the gradients."""
CUDA_REMEDY = "install torch for CUDA under the ranks' Python, or set container.image"


def judge_absent(why: str) -> Diagnosis:
    return Diagnosis(
        name="gpu",
        status="note",
        text=f"nothing was run: {why}",
        remedy="give a conf whose cluster.nodes has gpus: vjob doctor --gpu conf.yaml",
    )


def judge_failed(error: str) -> Diagnosis:
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return Diagnosis(
        name="gpu",
        status="fail",
        text=f"the check did not end: {lines[0] if lines else 'without a word'}",
        remedy="`vjob logs last --errors` shows where; ranks need torch and varuna_core in their "
        "Python",
    )


def judge_ranks(
    answers: Sequence[Mapping[str, Any]], readings: Sequence[Mapping[str, Any]]
) -> list[Diagnosis]:
    """From each rank's answer and the last readings of the node's GPUs."""
    return list(_judge(answers, readings))


def _judge(
    answers: Sequence[Mapping[str, Any]], readings: Sequence[Mapping[str, Any]]
) -> Iterator[Diagnosis]:
    first = answers[0]
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)*\b", first["driver"])
    driver = f"driver {found[0]}" if found else "the driver's version is unknown"
    blind = next((one for one in answers if not one["gpus"]), None)
    if blind is not None:
        built = blind["built for"]
        why = f"built for CUDA {built}; {driver}" if built else "a build without CUDA"
        remedy = f"compare `{NVIDIA_SMI}` there with the CUDA of torch" if built else CUDA_REMEDY
        text = f"torch {blind['torch']} sees no GPU: {why}"
        yield Diagnosis(name="torch", status="fail", text=text, remedy=remedy)
        return
    devices = ", ".join(dict.fromkeys(str(one.get("device", "cpu")) for one in answers))
    text = f"torch {first['torch']} sees {first['gpus']} GPU(s) of the node: {devices}; {driver}"
    yield Diagnosis(name="torch", status="ok", text=text)
    yield from _judge_nccl(answers)
    errors = [f"rank {rank}: {one['error']}" for rank, one in enumerate(answers) if "error" in one]
    yield _judge_message(answers, errors)
    yield _judge_step(answers, errors)
    yield _judge_readings(readings)


def _judge_nccl(answers: Sequence[Mapping[str, Any]]) -> Iterator[Diagnosis]:
    errors = [one["nccl error"] for one in answers if "nccl error" in one]
    if errors:
        remedy = "set env NCCL_DEBUG=INFO and run it again; ranks that share a GPU do without NCCL"
        yield Diagnosis(name="nccl", status="warn", text=f"fails: {errors[0]}", remedy=remedy)
    elif all("nccl" in one for one in answers):
        text = f"NCCL {answers[0]['nccl']} loads and sums on each GPU"
        yield Diagnosis(name="nccl", status="ok", text=text)


def _judge_message(answers: Sequence[Mapping[str, Any]], errors: Sequence[str]) -> Diagnosis:
    if all("message s" in one for one in answers):
        text = f"1 MiB from rank to rank in {answers[0]['message s'] * 1e3:.2f} ms"
        return Diagnosis(name="message", status="ok", text=text)
    why = errors[0] if errors else "not tried"
    return Diagnosis(name="message", status="fail", text=f"none arrived: {why}")


def _judge_step(answers: Sequence[Mapping[str, Any]], errors: Sequence[str]) -> Diagnosis:
    if not all("step" in one for one in answers):
        why = errors[0] if errors else "not tried"
        return Diagnosis(name="training step", status="fail", text=f"not done: {why}")
    for one in answers:
        for what, ours, plain in zip(
            ("loss", "gradient norm"), one["step"], one["step on cpu"], strict=True
        ):
            if not abs(ours - plain) <= CLOSE * abs(plain):  # NaN is not close either
                return Diagnosis(
                    name="training step",
                    status="fail",
                    text=f"{what} {ours:.6g} where the plain model on the CPU has {plain:.6g}",
                    remedy="run it on another node: if that agrees, leave this one out",
                )
    loss, plain = answers[0]["step"][0], answers[0]["step on cpu"][0]
    text = f"two stages: loss {loss:.6f}, the plain model on the CPU {plain:.6f}"
    return Diagnosis(name="training step", status="ok", text=text)


def _judge_readings(readings: Sequence[Mapping[str, Any]]) -> Diagnosis:
    shown = [
        f"{gpu['name']} {gpu['temperature']:.0f} C, {gpu['memory_used_mb']:.0f} of "
        f"{gpu['memory_total_mb']:.0f} MB"
        for gpu in readings
        if gpu["temperature"] is not None and gpu["memory_total_mb"]
    ]
    if shown:
        return Diagnosis(name="readings", status="ok", text="; ".join(shown))
    return Diagnosis(
        name="readings",
        status="warn",
        text="the node's agent could read no GPU",
        remedy=f"install nvidia-ml-py for vjob's Python, or put {NVIDIA_SMI} on the PATH of nodes",
    )
