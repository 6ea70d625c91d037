"""Samples: nvidia-smi's answer, and lines as gpustat printed them (seed 004)."""

from varuna_core.agent.gauges import Cpu, parse_smi, read_memory_mb
from varuna_core.agent.sampler import render_line, render_sample

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
    }
    assert (second["utilization"], second["power_w"]) == (None, None)
    assert parse_smi("No devices were found\n") == []


def test_lines_are_gpustats() -> None:
    first, second = parse_smi(SMI)
    assert render_line(first) == "[0] NVIDIA A10       | 49'C,   0 % |     0 / 22731 MB |\n"
    assert render_line(second) == "[1] NVIDIA A10       | 50'C,  ?? % |  1024 / 22731 MB |\n"


def test_without_gpus_the_line_is_the_processors() -> None:
    sample = {"gpus": [], "cpu_percent": 12.0, "memory_used_mb": 3021, "memory_total_mb": 48000}
    line = render_sample(sample, 16)
    assert line == "[cpu] 16 processors    | ??'C,  12 % |  3021 / 48000 MB |\n"


def test_this_machine_has_memory_and_processors() -> None:
    used, total = read_memory_mb()
    assert 0 < used < total
    cpu = Cpu()
    assert cpu.count >= 1 and cpu.read_percent() is None
