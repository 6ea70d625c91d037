"""AMD's GPUs by trees as the amdgpu driver makes them, and Intel's by what xpu-smi prints.

The names of the files and the forms of their texts are the driver's; the numbers are ours.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.agent.gpu.accelerator import GpuSample, count_visible, find_lost
from varuna_core.agent.gpu.amd import (
    CLOSED,
    DRIVER,
    NODES,
    PROCESSES,
    AmdAccelerator,
    list_devices,
    parse_files,
    split_tail,
)
from varuna_core.agent.gpu.intel import IntelAccelerator, parse_devices, parse_metrics
from varuna_core.facts.known import Known, NotKnown, Value

MI300 = {"gfx_target_version": "90402", "simd_count": "1216", "domain": "0"}
GAUGES = {
    "gpu_busy_percent": "97",
    "mem_info_vram_total": str(192 * 2**30),
    "mem_info_vram_used": str(40 * 2**30),
    "product_name": "AMD Instinct MI300X OAM",
    "ras/umc_err_count": "ue: 0\nce: 3",
    "hwmon/hwmon5/temp2_label": "junction",
    "hwmon/hwmon5/temp2_input": "61000",
    "hwmon/hwmon5/temp3_label": "mem",
    "hwmon/hwmon5/temp3_input": "48000",
    "hwmon/hwmon5/power1_input": "512000000",
}


def get(known: Known[Any]) -> Any:
    assert isinstance(known, Value), known
    return known.value


class Tree:
    """A /sys with two processors and some GPUs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for node in (0, 1):
            self.put(f"{NODES}/{node}/gpu_id", "0")
            self.put(f"{NODES}/{node}/properties", "cpu_cores_count 96\nsimd_count 0")

    def put(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def add(self, number: int, bus: int, function: int = 0, **changes: str | None) -> None:
        """Add a GPU; a change of None leaves the file out."""
        words = {**MI300, "location_id": str(bus << 8 | function)}
        self.put(f"{NODES}/{number}/gpu_id", str(1000 + number))
        lines = "\n".join(f"{key} {value}" for key, value in words.items())
        self.put(f"{NODES}/{number}/properties", lines)
        self.put(f"{DRIVER}/0000:{bus:02x}:00.0/vendor", "0x1002")
        for path, text in {**GAUGES, **changes}.items():
            if text is not None:
                self.put(f"{DRIVER}/0000:{bus:02x}:00.0/{path}", text)

    def remove(self, bus: int) -> None:
        shutil.rmtree(self.root / f"{DRIVER}/0000:{bus:02x}:00.0")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def read(tree: Tree) -> Any:
    return get(AmdAccelerator(tree.root).sample())


def test_a_gpu_of_amd_is_read_from_its_driver(tree: Tree) -> None:
    tree.add(2, 0xC1)
    assert read(tree) == (
        GpuSample(
            index=0, name="AMD Instinct MI300X OAM", temperature=61.0, utilization=97,
            memory_used_mb=40 * 1024, memory_total_mb=192 * 1024, power_w=512.0, ecc_errors=0,
            uuid="1002", address="0000:c1:00.0",
        ),
    )  # fmt: skip


def test_gpus_are_numbered_as_rocm_numbers_them(tree: Tree) -> None:
    for number, bus in ((10, 0x05), (2, 0xC9), (3, 0x41)):
        tree.add(number, bus)
    assert [one.uuid for one in read(tree)] == ["1002", "1003", "1010"]
    assert get(AmdAccelerator(tree.root).count()) == 3


def test_what_the_driver_does_not_have_is_not_known_and_not_zero(tree: Tree) -> None:
    tree.add(2, 0xC1, **dict.fromkeys(GAUGES))
    (one,) = read(tree)
    assert one == GpuSample(index=0, name="AMD gfx942", uuid="1002", address="0000:c1:00.0")


def test_older_cards_have_an_edge_and_an_average(tree: Tree) -> None:
    older = {
        "hwmon/hwmon5/temp1_label": "edge",
        "hwmon/hwmon5/temp1_input": "44000",
        "hwmon/hwmon5/power1_average": "96000000",
        "hwmon/hwmon5/power1_input": None,
    }
    tree.add(2, 0xC1, **older)
    (one,) = read(tree)
    assert (one.temperature, one.power_w) == (44.0, 96.0)


def test_uncorrected_errors_are_counted_and_corrected_ones_are_not(tree: Tree) -> None:
    tree.add(2, 0xC1, **{"ras/umc_err_count": "ue: 2\nce: 70"})
    assert [one.ecc_errors for one in read(tree)] == [2]


def test_partitions_of_one_gpu_have_no_load_of_their_own_and_its_power_once(tree: Tree) -> None:
    for number in range(2, 10):
        tree.add(number, 0xC1, number - 2)
    found = read(tree)
    assert [one.power_w for one in found] == [512.0, *[None] * 7]
    assert {(one.utilization, one.memory_used_mb, one.temperature) for one in found} == {
        (None, None, 61.0)
    }


def test_a_gpu_that_left_the_bus_is_lost_and_the_others_stay(tree: Tree) -> None:
    for number, bus in ((2, 0x05), (3, 0x41), (4, 0x81)):
        tree.add(number, bus)
    accelerator = AmdAccelerator(tree.root)
    accelerator.sample()
    assert accelerator.health() == ()
    tree.remove(0x41)
    found = accelerator.sample()
    assert [one.uuid for one in get(found)] == ["1002", "1004"] and find_lost(found) == (1,)
    assert [one.values["part"] for one in accelerator.health()] == ["1"]


def test_the_gpus_of_other_jobs_are_none_of_ours(tree: Tree) -> None:
    tree.add(2, 0x05)
    tree.add(3, 0x41)
    texts = {f"{NODES}/2/gpu_id": CLOSED, f"{NODES}/2/properties": CLOSED}
    for path in sorted(tree.root.rglob("*")):
        if path.is_file():
            texts.setdefault(str(path.relative_to(tree.root)), path.read_text().strip())
    assert [(one.index, one.gpu_id) for one in list_devices(texts)] == [(0, "1003")]
    assert find_lost(parse_files(texts)) == ()


def test_a_node_without_the_compute_driver_has_none(tmp_path: Path) -> None:
    accelerator = AmdAccelerator(tmp_path)
    assert not accelerator.is_here() and isinstance(accelerator.sample(), NotKnown)
    assert not AmdAccelerator(Tree(tmp_path).root).is_here()


def test_processes_are_those_that_hold_memory(tree: Tree) -> None:
    tree.add(2, 0x05)
    tree.add(3, 0x41)
    for pid, gpu_id, held in ((71, 1002, 4096), (71, 1003, 0), (72, 1003, 1 << 34)):
        tree.put(f"{PROCESSES}/{pid}/vram_{gpu_id}", str(held))
    accelerator = AmdAccelerator(tree.root)
    accelerator.sample()
    assert get(accelerator.processes()) == {"1002": [71], "1003": [72]}


def test_the_command_for_jobs_without_an_agent_reads_the_same(tree: Tree) -> None:
    tree.add(2, 0x05)
    tree.add(3, 0x41, **{"ras/umc_err_count": "ue: 1\nce: 0"})
    command = AmdAccelerator.smi_command.replace("/sys", str(tree.root))
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    text = f"{done.stdout}{done.stderr}".replace(str(tree.root), "/sys")
    assert get(AmdAccelerator().parse_smi(text)) == read(tree)


def test_a_file_that_tail_cannot_read_is_closed() -> None:
    path = f"/sys/{NODES}/2/gpu_id"
    text = f"==> {path} <==\ntail: error reading '{path}': Operation not permitted\n"
    assert split_tail(text) == {f"{NODES}/2/gpu_id": CLOSED}


@given(st.text(max_size=300))
def test_no_text_of_the_driver_raises(text: str) -> None:
    parse_files(split_tail(text))
    parse_files({f"{NODES}/2/gpu_id": "7", f"{NODES}/2/properties": text})
    parse_metrics(text, parse_devices(text))


DEVICES = """\
Device ID,Device Name,Memory Physical Size
0,"Intel(R) Data Center GPU Max 1550","131072.00 MiB"
1,"Intel(R) Data Center GPU Max 1550","131072.00 MiB"
"""
METRICS = """\
Timestamp, DeviceId, GPU Utilization (%), GPU Power (W), GPU Core Temperature (Celsius Degree), \
GPU Memory Used (MiB), GPU Memory Errors Uncorrectable
06:14:46.000,    0, 88.20, 455.61, 51.00, 60211.00,    0
06:14:46.000,    1, N/A, 120.50, N/A, 20.00, N/A
"""


def test_gpus_of_intel_are_read_by_their_headings() -> None:
    first, second = get(parse_metrics(METRICS, parse_devices(DEVICES)))
    assert first == GpuSample(
        index=0, name="Intel(R) Data Center GPU Max 1550", temperature=51.0, utilization=88.2,
        memory_used_mb=60211.0, memory_total_mb=131072.0, power_w=455.61, ecc_errors=0, uuid="0",
    )  # fmt: skip
    assert (second.utilization, second.temperature, second.ecc_errors) == (None, None, None)


def test_a_gpu_of_intel_without_a_row_is_lost() -> None:
    one = "".join(METRICS.splitlines(keepends=True)[:2])
    assert find_lost(parse_metrics(one, parse_devices(DEVICES))) == (1,)


@pytest.mark.parametrize("text", ["", "Error: Level Zero Initialization Error\n", "Timestamp, D\n"])
def test_what_xpu_smi_could_not_read_is_not_known(text: str) -> None:
    found = parse_metrics(text, {})
    assert isinstance(found, NotKnown) and found.reason.startswith("xpu-smi: ")


def test_intels_tool_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "xpu-smi"
    (tmp_path / "devices").write_text(DEVICES)
    (tmp_path / "metrics").write_text(METRICS)
    tool.write_text(
        f'#!/bin/sh\n[ "$1" = dump ] && exec /bin/cat {tmp_path}/metrics\n'
        f"exec /bin/cat {tmp_path}/devices\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    accelerator = IntelAccelerator()
    assert accelerator.is_here() and get(accelerator.count()) == 2
    assert [one.memory_total_mb for one in get(accelerator.sample())] == [131072.0, 131072.0]
    assert get(count_visible(accelerator, {"ZE_AFFINITY_MASK": "0.0,0.1"})) == 2
    tool.write_text("#!/bin/sh\nexit 3\n")
    found = accelerator.sample()
    assert isinstance(found, NotKnown) and found.reason == "xpu-smi dump: no answer, exit code 3"


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_a_user_who_may_not_open_the_device_is_told_its_group() -> None:
    script = (
        "import grp, os, sys; from pathlib import Path\n"
        "from varuna_core.agent.gpu.amd import AmdAccelerator; os.setuid(12345)\n"
        "print(AmdAccelerator(Path(sys.argv[1]), Path(sys.argv[2])).count().reason)"
    )
    # Others may pass this folder, and not those that pytest makes.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        Tree(Path(folder, "sys")).add(2, 0x05)
        device = Path(folder, "kfd")
        device.touch(mode=0o600)
        words = [sys.executable, "-c", script, f"{folder}/sys", str(device)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"you may not open {device}: ask an admin to add you")
