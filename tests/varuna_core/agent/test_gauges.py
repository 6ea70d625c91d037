"""Samples: nvidia-smi's answer, and lines as gpustat printed them (seed 004)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.documents import find_blocks
from tests.toys import build_environment, install_toy
from varuna_core.agent.gpu import nvidia
from varuna_core.agent.gpu.accelerator import (
    GROUP,
    GpuSample,
    NoAccelerator,
    choose_accelerator,
    find_lost,
)
from varuna_core.agent.gpu.gauges import Cpu, read_memory_mb
from varuna_core.agent.gpu.nvidia import (
    THROTTLES,
    NvidiaAccelerator,
    parse_processes,
    parse_rows,
    spell_throttle,
)
from varuna_core.facts.hardware import Fault
from varuna_core.facts.known import Known, NotKnown, Value
from varuna_core.records.logs.gpu_text import format_line, render_sample

SMI = """\
0, NVIDIA A10, 49, 0, 0, 22731, 15.61
1, NVIDIA A10, 50, [N/A], 1024, 22731, [Not Supported]
"""


def read(text: str, *, is_long: bool = False) -> Sequence[GpuSample]:
    return get(parse_rows(text, is_long=is_long))


def get(known: Known[Any]) -> Any:
    assert isinstance(known, Value), known
    return known.value


def test_nvidia_smi_is_read_with_what_it_does_not_know() -> None:
    first, second = read(SMI)
    assert first.as_json(None) == {
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
    assert (second.utilization, second.power_w) == (None, None)
    assert parse_rows("No devices were found\n", is_long=False).reason.endswith("were found")


LONG = """\
0, NVIDIA H100 80GB HBM3, 49, 0, 0, 81559, 15.61, GPU-a, 0, 0x0000000000000004
1, NVIDIA H100 80GB HBM3, 50, [N/A], 1024, 81559, [Not Supported], GPU-b, [N/A], [N/A]
2, NVIDIA H100 80GB HBM3, 51, 1, 2, 81559, 3, GPU-c, 12, 0x0000000000001001
"""


def test_the_longer_answer_has_processes_errors_and_reasons() -> None:
    processes = parse_processes("GPU-a, 10\nGPU-c, 11\nGPU-a, 12\nGPU-c, [N/A]\n\n")
    assert processes == {"GPU-a": [10, 12], "GPU-c": [11]}
    found = read(LONG, is_long=True)
    assert [gpu.uuid for gpu in found] == ["GPU-a", "GPU-b", "GPU-c"]
    assert [gpu.ecc_errors for gpu in found] == [0, None, 12]
    assert [gpu.throttle for gpu in found] == ["sw_power_cap", "", "0x1000"]


@given(st.sets(st.sampled_from(sorted(THROTTLES))), st.booleans())
def test_each_bit_has_its_word(bits: set[int], idle: bool) -> None:
    words = spell_throttle(sum(bits) + idle)
    assert sorted(words.split(", ") if words else []) == sorted(THROTTLES[bit] for bit in bits)


@given(st.text(max_size=300))
def test_no_answer_of_nvidia_smi_raises(text: str) -> None:
    parse_rows(text, is_long=False)
    parse_rows(LONG + text, is_long=True)
    parse_processes(text)


@pytest.mark.parametrize(
    ("unknown", "expected"),
    [("nothing", (7, "hw_thermal")), ("event", (7, "hw_thermal")), ("uuid", (None, ""))],
)
def test_an_older_nvidia_smi_is_asked_for_less(
    unknown: str,
    expected: tuple[int | None, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = install(
        tmp_path,
        monkeypatch,
        f"""echo "$1" >> {tmp_path}/asked
case "$1" in
*compute-apps*) echo "GPU-a, 5";;
*{unknown}*) echo 'Field "{unknown}" is not a valid field to query.'; exit 2;;
*uuid*) echo "0, A, 1, 2, 3, 4, 5, GPU-a, 7, 0x40";;
*) echo "0, A, 1, 2, 3, 4, 5";;
esac
""",
    )
    for _ in range(2):
        [gpu] = get(script.sample())
        assert (gpu.ecc_errors, gpu.throttle) == expected
        held = script.processes()
        assert held.value == {"GPU-a": [5]} if expected[0] else isinstance(held, NotKnown)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len([line for line in asked if unknown in line]) <= 2, "not asked again and again"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> NvidiaAccelerator:
    """A stand-in for nvidia-smi on PATH, and no pynvml."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return NvidiaAccelerator()


H100 = "{}, NVIDIA H100 80GB HBM3, 55, 98, 70000, 81559, 650.1, GPU-{}, 0, 0x0"
GONE = (
    "Unable to determine the device handle for GPU{}: 0000:3B:00.0: GPU is lost.  Reboot the "
    "system to recover this GPU"
)


@pytest.mark.parametrize("gone", [2, 7])
def test_a_gpu_that_fell_off_the_bus_takes_no_other_with_it(
    gone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-smi exits with 15 and prints the rows of the survivors."""
    rows = [H100.format(index, index) for index in range(8) if index != gone]
    lines = "\n".join([*rows, GONE.format(gone)])
    body = f'case "$1" in *compute-apps*) exit 15;; esac; cat <<E\n{lines}\nE\nexit 15'
    accelerator = install(tmp_path, monkeypatch, body)
    found = accelerator.sample()
    assert [gpu.index for gpu in get(found)] == [x for x in range(8) if x != gone]
    (evidence,) = found.evidence
    assert (evidence.seen, evidence.expected) == (7, 8)
    (finding,) = accelerator.health()
    assert finding.rule == Fault.LOST.value and finding.values == {"part": str(gone)}
    assert "GPU is lost" in finding.evidence[0].text
    assert isinstance(accelerator.processes(), NotKnown)


def test_a_gpu_that_is_gone_without_a_word_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"cat {tmp_path}/rows"
    accelerator = install(tmp_path, monkeypatch, body)
    for number in (4, 3):
        rows = [H100.format(index, index) for index in range(number)]
        (tmp_path / "rows").write_text("\n".join(rows))
        found = accelerator.sample()
    assert find_lost(found) == (3,)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
            "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch",
        ),
        ("exec sleep 60", "nvidia-smi: no answer in 0 s"),
        ("exit 3", "nvidia-smi: no answer, exit code 3"),
        ("echo No devices were found; exit 6", "nvidia-smi: No devices were found"),
    ],
)
def test_a_driver_that_fails_makes_readings_not_known(
    body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "SAMPLE_S", 0.4)
    found = install(tmp_path, monkeypatch, body).sample()
    assert isinstance(found, NotKnown) and found.reason == reason


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # A card that is cut in slices (MIG), and one with the processor's memory.
        ("0, A100, 33, [N/A], 14000, 40960, 120.0, GPU-0, 0, 0x0", (33, None, 14000, 40960)),
        ("0, GB10, 45, 90, [N/A], [N/A], [N/A], GPU-0, [N/A], [Not Supported]",
         (45, 90, None, None)),
        ("0, A10, 45, [Insufficient Permissions], 1, 2, [Unknown Error], GPU-0, [N/A], 0x0",
         (45, None, 1, 2)),
        ("0, RTX A6000, 48GB, 45, 90, 100, 49140, 10, GPU-0, 0, 0x0", (45, 90, 100, 49140)),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_read_is_not_known_and_not_zero(
    row: str, expected: tuple[float | None, ...]
) -> None:
    (gpu,) = read(row, is_long=True)
    found = (gpu.temperature, gpu.utilization, gpu.memory_used_mb, gpu.memory_total_mb)
    assert found == expected


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
    accelerator = NvidiaAccelerator()
    found = accelerator.sample()
    held = get(accelerator.processes())
    assert found.evidence[0].source == "pynvml"
    assert [one.as_json(held[one.uuid]) for one in get(found)] == [
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


@pytest.mark.parametrize(
    ("broken", "seen", "missing"),
    [
        ({}, 4, ()),
        ({"nvmlDeviceGetHandleByIndex": "GPU is lost"}, 3, (2,)),
        ({"nvmlDeviceGetTemperature": "GPU is lost"}, 3, (2,)),
        ({"nvmlDeviceGetMemoryInfo": "Not Supported"}, 4, ()),
    ],
)
def test_one_device_that_pynvml_loses_leaves_the_others_their_readings(
    broken: dict[str, str], seen: int, missing: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_nvml(nvmlDeviceGetCount=lambda: 4)

    def fail_at_2(name: str, said: str) -> Any:
        def ask(device: int, *words: object) -> Any:
            if device == 2:
                raise NvmlError(said)
            return getattr(plain, name)(device, *words)

        return ask

    changes = {name: fail_at_2(name, said) for name, said in broken.items()}
    monkeypatch.setitem(sys.modules, "pynvml", make_nvml(nvmlDeviceGetCount=lambda: 4, **changes))
    accelerator = NvidiaAccelerator()
    found = accelerator.sample()
    assert len(get(found)) == seen and find_lost(found) == missing
    assert [one.values["part"] for one in accelerator.health()] == [str(one) for one in missing]
    if "nvmlDeviceGetMemoryInfo" in broken:
        assert get(found)[2].memory_used_mb is None


TOY = next(text for page, text in find_blocks("python") if "class ToyAccelerator" in text)
ASK = """
from varuna_core.agent.gpu.accelerator import choose_accelerator, list_variables
one = choose_accelerator()
print(one.name, one.visible_variable, one.count().value, len(one.sample().value))
print(*list_variables())
"""


@pytest.mark.parametrize("carried", [False, True])
def test_another_vendor_is_a_class_in_a_distribution_and_goes_to_the_nodes_with_the_agent(
    carried: bool, tmp_path: Path
) -> None:
    toys = install_toy(tmp_path / "toys", GROUP, "toy = toy_gpus:ToyAccelerator", TOY)
    env = build_environment(tmp_path, toys)
    if carried:
        code = "import sys; from pathlib import Path; from varuna_core.agent import bundle; "
        code += f"bundle.write_bundle(Path(sys.argv[1]), plugins={{{GROUP!r}: ['toy']}})"
        subprocess.run([sys.executable, "-c", code, tmp_path / "agent.pyz"], env=env, check=True)
        env = {**env, "PYTHONPATH": str(tmp_path / "agent.pyz")}
    env["PATH"] = str(tmp_path)  # without nvidia-smi
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "toy TOY_VISIBLE_DEVICES 2 2",
        "CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK TOY_VISIBLE_DEVICES",
    ]


def test_a_node_without_accelerators_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NvidiaAccelerator, "is_here", lambda self: False)
    accelerator = choose_accelerator()
    assert isinstance(accelerator, NoAccelerator) and get(accelerator.count()) == 0
    found = accelerator.sample()
    assert isinstance(found, NotKnown)
    assert found.reason == "this node has no device of nvidia, amd or intel"


def test_lines_are_gpustats() -> None:
    first, second = (one.as_json(None) for one in read(SMI))
    assert format_line(first) == "[0] NVIDIA A10       | 49'C,   0 % |     0 / 22731 MB |\n"
    assert format_line(second) == "[1] NVIDIA A10       | 50'C,   - % |  1024 / 22731 MB |\n"


def test_without_gpus_the_line_is_the_processors() -> None:
    sample = {"gpus": [], "cpu_percent": 12.0, "memory_used_mb": 3021, "memory_total_mb": 48000}
    line = render_sample({**sample, "num_cpus": 16})
    assert line == "[cpu] 16 processors    |  12 % |  3021 / 48000 MB |\n"


def test_this_machine_has_memory_and_processors() -> None:
    used, total = read_memory_mb()
    assert 0 < used < total
    cpu = Cpu()
    assert cpu.count >= 1 and cpu.read_percent() is None
