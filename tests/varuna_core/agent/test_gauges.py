"""Samples: nvidia-smi's answer, and lines as gpustat printed them (seed 004)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.agent.gpu.gauges import (
    THROTTLES,
    Cpu,
    Smi,
    open_gpus,
    parse_smi,
    parse_smi_processes,
    read_memory_mb,
    spell_throttle,
)
from varuna_core.records.logs.gpu_text import format_line, render_sample

SMI = """\
0, NVIDIA A10, 49, 0, 0, 22731, 15.61
1, NVIDIA A10, 50, [N/A], 1024, 22731, [Not Supported]
"""


def test_nvidia_smi_is_read_with_what_it_does_not_know() -> None:
    first, second = parse_smi(SMI)
    assert first == {
        "index": 0,
        "name": "NVIDIA A10",
        "temperature": 49.0,
        "utilization": 0.0,
        "memory_used_mb": 0.0,
        "memory_total_mb": 22731.0,
        "power_w": 15.61,
        "processes": None,
        "ecc_errors": None,
        "throttle": "",
    }
    assert (second["utilization"], second["power_w"]) == (None, None)
    assert parse_smi("No devices were found\n") == []


LONG = """\
0, NVIDIA H100 80GB HBM3, 49, 0, 0, 81559, 15.61, GPU-a, 0, 0x0000000000000004
1, NVIDIA H100 80GB HBM3, 50, [N/A], 1024, 81559, [Not Supported], GPU-b, [N/A], [N/A]
2, NVIDIA H100 80GB HBM3, 51, 1, 2, 81559, 3, GPU-c, 12, 0x0000000000001001
"""


def test_the_longer_answer_has_processes_errors_and_reasons() -> None:
    processes = parse_smi_processes("GPU-a, 10\nGPU-c, 11\nGPU-a, 12\nGPU-c, [N/A]\n\n")
    found = parse_smi(LONG, processes)
    assert [gpu["processes"] for gpu in found] == [[10, 12], [], [11]]
    assert [gpu["ecc_errors"] for gpu in found] == [0, None, 12]
    assert [gpu["throttle"] for gpu in found] == ["sw_power_cap", "", "0x1000"]


@given(st.sets(st.sampled_from(sorted(THROTTLES))), st.booleans())
def test_each_bit_has_its_word(bits: set[int], idle: bool) -> None:
    words = spell_throttle(sum(bits) + idle)
    assert sorted(words.split(", ") if words else []) == sorted(THROTTLES[bit] for bit in bits)


@given(st.text(max_size=300))
def test_no_answer_of_nvidia_smi_raises(text: str) -> None:
    parse_smi(text, {})
    parse_smi(LONG + text)
    parse_smi_processes(text)


@pytest.mark.parametrize(
    ("unknown", "expected"),
    [("nothing", (7, "hw_thermal")), ("event", (7, "hw_thermal")), ("uuid", (None, ""))],
)
def test_an_older_nvidia_smi_is_asked_for_less(
    unknown: str, expected: tuple[int | None, str], tmp_path: Path
) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(
        f"""#!/bin/sh
echo "$1" >> {tmp_path}/asked
case "$1" in
*compute-apps*) echo "GPU-a, 5";;
*{unknown}*) echo 'Field "{unknown}" is not a valid field to query.'; exit 2;;
*uuid*) echo "0, A, 1, 2, 3, 4, 5, GPU-a, 7, 0x40";;
*) echo "0, A, 1, 2, 3, 4, 5";;
esac
"""
    )
    script.chmod(0o755)
    smi = Smi(str(script))
    for _ in range(2):
        [gpu] = smi.read()
        assert (gpu["ecc_errors"], gpu["throttle"]) == expected
        assert gpu["processes"] == ([5] if expected[0] else None)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len([line for line in asked if unknown in line]) <= 2, "not asked again and again"


def test_a_driver_that_fails_is_no_older_version(tmp_path: Path) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver mismatch'; exit 18\n")
    script.chmod(0o755)
    with pytest.raises(OSError, match="Driver mismatch"):
        Smi(str(script)).read()


class NvmlError(Exception):
    """As pynvml's."""


def make_nvml(**changes: Any) -> SimpleNamespace:
    """A binding as nvidia-ml-py 11 was: no word of event reasons yet."""

    def refuse(*words: object) -> None:
        raise NvmlError("Not Supported")

    return SimpleNamespace(
        **{
            "NVMLError": NvmlError,
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda device: b"NVIDIA A10",
            "nvmlDeviceGetMemoryInfo": lambda device: SimpleNamespace(used=2**21, total=2**30),
            "nvmlDeviceGetTemperature": lambda device, sensor: 40,
            "nvmlDeviceGetUtilizationRates": refuse,
            "nvmlDeviceGetPowerUsage": lambda device: 15610,
            "nvmlDeviceGetComputeRunningProcesses": lambda device: [SimpleNamespace(pid=4)],
            "nvmlDeviceGetTotalEccErrors": lambda device, kind, counter: 10 * kind + counter,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda device: 0x21,
            **changes,
        }
    )


@pytest.mark.parametrize("has_events", [True, False])
def test_pynvml_tells_the_same(has_events: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"nvmlDeviceGetCurrentClocksEventReasons": lambda device: 0x80} if has_events else {}
    monkeypatch.setitem(sys.modules, "pynvml", make_nvml(**more))
    read, how = open_gpus()
    assert read is not None and how == "pynvml"
    assert read() == [
        {
            "index": 0,
            "name": "NVIDIA A10",
            "temperature": 40,
            "utilization": None,
            "memory_used_mb": 2,
            "memory_total_mb": 1024,
            "power_w": 15.61,
            "processes": [4],
            "ecc_errors": 10,
            "throttle": "hw_power_brake" if has_events else "sw_thermal",
        }
    ]


def test_lines_are_gpustats() -> None:
    first, second = parse_smi(SMI)
    assert format_line(first) == "[0] NVIDIA A10       | 49'C,   0 % |     0 / 22731 MB |\n"
    assert format_line(second) == "[1] NVIDIA A10       | 50'C,  ?? % |  1024 / 22731 MB |\n"


def test_without_gpus_the_line_is_the_processors() -> None:
    sample = {"gpus": [], "cpu_percent": 12.0, "memory_used_mb": 3021, "memory_total_mb": 48000}
    line = render_sample({**sample, "num_cpus": 16})
    assert line == "[cpu] 16 processors    | ??'C,  12 % |  3021 / 48000 MB |\n"


def test_this_machine_has_memory_and_processors() -> None:
    used, total = read_memory_mb()
    assert 0 < used < total
    cpu = Cpu()
    assert cpu.count >= 1 and cpu.read_percent() is None
