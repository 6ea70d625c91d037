"""Scenes of hardware, from the tools' texts to what status and report say; and the cost of looking.

    python -m benchmarks.commands.gpu_scenes [--only TEXT] [--write]

Each scene is played by two agents with stand-ins for the tools and drivers (tests/hardware), as
root: trees are mounted over /sys, and a file over the kernel's log. While it runs `vjob status`
says what it sees, and after it `vjob report`. The cost is processor time of the sampler with faults
over that without, of eight GPUs in a tree of AMD's driver, eight ports and a memory controller.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import RESULTS
from tests.hardware.play import PARTS, judge, play
from tests.hardware.scenes import SCENES, Scene
from tests.hardware.stand_ins import make_amd, make_memory, make_ports, write_files
from varuna_core.agent.gpu.accelerator import CLOSE_LOOK
from varuna_core.agent.gpu.amd import AmdAccelerator
from varuna_core.agent.gpu.faults import Faults
from varuna_core.agent.gpu.networks import Networks
from varuna_core.agent.gpu.sampler import Sampler
from varuna_core.agent.processes.kernel_log import KernelLog
from varuna_core.facts.finding import Finding

RESULT = RESULTS / "gpu_scenes.md"
ROUNDS, SAMPLES = 9, 10 * CLOSE_LOOK


def play_scene(scene: Scene) -> dict[str, list[str]]:
    """What is wrong of a scene by part; a scene that cannot be played is wrong in all."""
    with tempfile.TemporaryDirectory() as name:
        try:
            return judge(scene, play(scene, Path(name)))
        except Exception as error:  # the other scenes are played all the same
            return {part: [f"not played: {error}"] for part in PARTS}


class NoFaults(Faults):
    """Looks for none."""

    def list_faults(self, *words: object) -> list[Finding]:
        return []


def measure_cost() -> tuple[list[float], float]:
    """Ratios of processor time, smallest first, and milliseconds of a sample without faults."""
    with tempfile.TemporaryDirectory() as name:
        node = Path(name)
        write_files(node, {**make_amd(8), **make_ports(8), **make_memory(), "kmsg": ""})

        def measure(make: Callable[[], Faults]) -> float:
            accelerator = AmdAccelerator(node / "sys")
            sampler = Sampler(node / "x.jsonl", 0, accelerator, None, set, dict, make())
            sampler.sample()
            start = time.process_time()
            for _ in range(SAMPLES):
                sampler.sample()
            return (time.process_time() - start) / SAMPLES

        def look() -> Faults:
            return Faults(KernelLog(node / "kmsg"), EverySixth(node / "sys"))

        pairs = [(measure(look), measure(NoFaults)) for _ in range(ROUNDS)]
    return sorted(a / b for a, b in pairs), 1000 * statistics.median(b for _, b in pairs)


class EverySixth(Networks):
    """Looks at one of CLOSE_LOOK samples, whenever they are."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, every_s=CLOSE_LOOK)
        self._count = 0.0

    def read(self, now: float) -> list[Finding]:
        self._count += 1
        return super().read(self._count)


def render_rows(name: str, tool: str, wrong: dict[str, list[str]]) -> list[str]:
    """The row of a scene, and a line for each part that is wrong."""
    words = ["wrong" if wrong[part] else "right" for part in ("status", "json", "report")]
    return [
        f"| {name} | {tool} | " + " | ".join(words) + " |",
        *(f"| | {part}: {'; '.join(said)} | | | |" for part, said in wrong.items() if said),
    ]


def read_rows(page: str) -> dict[str, list[str]]:
    """The rows of a page by scene."""
    found: dict[str, list[str]] = {}
    last = ""
    for line in page.splitlines():
        if line.startswith("| ") and not line.startswith("| scene |"):
            last = line.split(" | ")[0].removeprefix("| ") if not line.startswith("| | ") else last
            found.setdefault(last, []).append(line)
    return found


def render(rows: dict[str, list[str]], cost: tuple[list[float], float]) -> str:
    ratios, base_ms = cost
    num_right = sum("wrong" not in lines[0] for lines in rows.values())
    lines = [
        f"{num_right} of {len(rows)} scenes are right in all parts.",
        "",
        "| scene | tool | status | JSON | report |",
        "|---|---|---|---|---|",
        *(line for scene in SCENES for line in rows.get(scene.name, [])),
        "",
        "Right is: the health; the sentence with GPU or port, node and rank; no other remark; the "
        "faults with their values in JSON, n0 without any; the readings of the GPUs that can still "
        "be read; and the same faults in the report's JSON and text.",
        "",
        f"A sample with faults takes {statistics.median(ratios):.2f} times the processor time of "
        f"one without ({ratios[0]:.2f} to {ratios[-1]:.2f} in {ROUNDS} rounds of {SAMPLES} "
        f"samples; {base_ms:.2f} ms without). The time of nvidia-smi itself is not in it, which is "
        f"called three times more in {CLOSE_LOOK} samples: no driver is here.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Play the scenes, print the table, and with --write keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help="scenes whose name has this text; the others' rows are kept"
    )
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    kept = read_rows(RESULT.read_text()) if options.only and RESULT.exists() else {}
    names = {scene.name for scene in SCENES}
    rows = {name: lines for name, lines in kept.items() if name in names}
    for scene in SCENES:
        if options.only in scene.name:
            wrong = play_scene(scene)
            rows[scene.name] = render_rows(scene.name, scene.tool, wrong)
            bad = {part: said for part, said in wrong.items() if said}
            print(scene.name, bad or "right", file=sys.stderr, flush=True)
    text = render(rows, measure_cost())
    print(text)
    if options.write:
        head = "# Sick, odd and healthy hardware\n\n"
        made = "Made by `python -m benchmarks.commands.gpu_scenes --write`. "
        RESULT.write_text(f"{head}{made}{text}\n")


if __name__ == "__main__":
    main()
