"""Faults that drivers and the kernel report: what is read of their texts, and how they add up."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.agent.gpu.accelerator import GpuSample
from varuna_core.agent.gpu.amd import AmdAccelerator
from varuna_core.agent.gpu.faults import MOST, Faults
from varuna_core.agent.gpu.networks import Networks
from varuna_core.agent.gpu.nvidia import NvidiaAccelerator, parse_rows
from varuna_core.agent.gpu.nvidia_health import (
    GpuState,
    add_links,
    name_slices,
    parse_kernel_line,
    parse_xml,
    spell_address,
)
from varuna_core.agent.processes.kernel_log import KernelLog
from varuna_core.facts.hardware import Fault, dump_faults, is_grave, make_fault, parse_fault
from varuna_core.facts.known import NotKnown, Value
from varuna_core.facts.sentences import describe_fault

GPU = GpuSample(index=3, address="0000:5d:00.0")


@given(st.text(max_size=400))
def test_no_text_of_a_tool_or_the_kernel_raises(text: str) -> None:
    parse_xml(text)
    states = {"GPU-a": GpuState()}
    add_links(states, f"GPU 0: x (UUID: GPU-a)\n{text}", text)
    name_slices(states, f"GPU 0: x (UUID: GPU-a)\n{text}")
    parse_kernel_line(f"NVRM: Xid (PCI:{text}")
    AmdAccelerator().parse_kernel_line(f"amdgpu 0000:c1:00.0: {text}")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (r"NVRM: The NVIDIA GPU 0000:5d:00.0\x0a  NVRM: (PCI ID: 10de:26b5) installed in this "
         r"system has\x0a  NVRM: fallen off the bus and is not responding.", "gpu-lost"),
        ("NVRM: GPU 0000:5d:00.0: GPU has fallen off the bus.", "gpu-lost"),
        ("amdgpu 0000:5d:00.0: amdgpu: socket: 4, die: 0, 1 new uncorrectable hardware errors "
         "detected in umc block", "gpu-kernel"),
        ("amdgpu 0000:5d:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!",
         "gpu-kernel"),
        ("amdgpu 0000:5d:00.0: amdgpu: socket: 4, die: 0, 0 uncorrectable hardware errors detected "
         "in total in umc block", None),
    ],
)  # fmt: skip
def test_lines_of_drivers_in_the_forms_that_they_print(text: str, rule: str | None) -> None:
    found = parse_kernel_line(text) or AmdAccelerator().parse_kernel_line(text)
    assert (found and (found.rule, found.values["part"])) == (rule and (rule, "0000:5d:00.0"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
KEYS = ["rule", "part", "count", "code", "detail", "ranks", "ranks_sure", "since", "last", "text"]


@given(st.sampled_from(list(Fault)), st.dictionaries(st.sampled_from(KEYS[1:]), JSON))
def test_whatever_a_sample_has_is_a_fault_with_a_sentence_or_none(
    fault: Fault, values: dict[str, object]
) -> None:
    found = parse_fault({"rule": fault.value, "part": "1", "since": 1.0, "last": 2.0, **values})
    if found is not None:
        assert describe_fault(found, "n1") and isinstance(is_grave(found), bool)
        assert datetime.fromtimestamp(found.values["since"], timezone.utc)


@pytest.mark.parametrize("fault", Fault)
def test_a_fault_is_the_same_after_its_way_through_a_sample(fault: Fault) -> None:
    made = make_fault(fault, 3, count=2, code=79, detail="x", text="said", source="kernel log")
    (row,) = dump_faults([made])
    times = {"since": 1.0, "last": 2.0}
    read = parse_fault(json.loads(json.dumps({**row, **times})))
    assert read is not None and read.values == {**made.values, **times}
    assert (read.rule, read.evidence, read.remedies) == (made.rule, made.evidence, made.remedies)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00", "0000:3b:00.0"),
        ("0009:01:00.0", "0009:01:00.0"),
        ("3B", ""),
    ],
)
def test_an_address_has_one_spelling(text: str, address: str) -> None:
    assert spell_address(text) == address


def test_lines_of_the_kernel_add_up_and_those_of_before_do_not_count(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    line = "4,{},7,-;NVRM: Xid (PCI:0000:5d:00): {}, pid=1\n SUBSYSTEM=pci\n"
    log.write_text(line.format(1, 48))
    faults = Faults(KernelLog(log), Networks(tmp_path))
    accelerator = NvidiaAccelerator()
    assert faults.list_faults(accelerator, [GPU], 10.0) == []
    with log.open("a") as handle:
        handle.write(line.format(2, 63) + line.format(3, 63) + line.format(4, 31))
    found = faults.list_faults(accelerator, [GPU], 20.0)
    seen = {one.values["code"]: one.values for one in found}
    assert {code: (one["part"], one["count"]) for code, one in seen.items()} == {
        63: ("3", 2), 31: ("3", 1),
    }  # fmt: skip
    with log.open("a") as handle:
        handle.write(line.format(5, 63))
    last = {one.values["code"]: one.values for one in faults.list_faults(accelerator, [], 30.0)}
    assert (last[63]["since"], last[63]["last"], last[63]["count"]) == (20.0, 30.0, 3)
    assert (last[31]["since"], last[31]["last"]) == (20.0, 20.0)


def test_a_log_that_may_not_be_read_has_no_lines_and_a_reason(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / "none")
    assert log.read_records() == [] and log.problem.endswith("No such file or directory")


@given(st.lists(st.integers(0, 50) | st.none(), min_size=1, max_size=9))
def test_memory_errors_are_counted_from_the_first_sample_on(counts: list[int | None]) -> None:
    faults = Faults(KernelLog(Path("/nonexistent")), Networks(Path("/nonexistent")))
    known = [count for count in counts if count is not None]
    for at, count in enumerate(counts):
        sample = GpuSample(index=0, ecc_errors=count)
        found = faults.list_faults(None, [sample], 1.0 + at)
        grown = 0 if count is None else count - known[0]
        assert [one.values["count"] for one in found] == ([grown] if grown > 0 else [])


def test_a_driver_in_trouble_fills_no_sample(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.touch()
    faults = Faults(KernelLog(log), Networks(tmp_path))
    log.write_text(
        "".join(f"4,1,7,-;NVRM: Xid (PCI:0000:5d:00): {code}, x\n" for code in range(1, 200))
    )
    assert len(faults.list_faults(NvidiaAccelerator(), [GPU], 1.0)) == MOST


def test_a_tool_that_is_ended_before_it_prints_anything_has_lost_no_gpu() -> None:
    """At the end of a run beside a tool that hung, all its GPUs were called lost."""
    assert isinstance(parse_rows("", is_long=False, known=2), NotKnown)
    none_yet = parse_rows("", is_long=False)
    assert isinstance(none_yet, Value) and not none_yet.value
