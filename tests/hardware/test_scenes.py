"""Each scene from the tools' texts through the sampler and its file to the verdict; some of them
with agents, commands and all. `python -m benchmarks.commands.gpu_scenes` plays all of them so."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hardware.play import compare, judge, match, play
from tests.hardware.scenes import SCENES, Scene
from tests.hardware.stand_ins import install, write_files
from tests.jobs.monitor.builders import change_node, healthy
from varuna_core.agent.gpu.accelerator import CLOSE_LOOK, Accelerator
from varuna_core.agent.gpu.amd import AmdAccelerator
from varuna_core.agent.gpu.faults import Faults
from varuna_core.agent.gpu.intel import IntelAccelerator
from varuna_core.agent.gpu.networks import Networks
from varuna_core.agent.gpu.nvidia import NvidiaAccelerator
from varuna_core.agent.gpu.sampler import Sampler
from varuna_core.agent.processes.kernel_log import KernelLog
from varuna_core.agent.setup.ranks import split_devices
from vjob.jobs.monitor.model.snapshot import Snapshot
from vjob.jobs.monitor.readers.gpu_logs import GpuSamples
from vjob.jobs.monitor.rules.judge import judge as judge_run

PIDS = {2: 222222, 3: 333333}
"""Of the ranks on n1."""
QUICK = [scene for scene in SCENES if "smi/hang" not in scene.after]
NAMES = {scene.name: scene for scene in SCENES}
WHOLE = ("lost: nothing is printed of the others", "Xid 79, and no step since",
         "MIG: ours are two of seven")  # fmt: skip


@dataclass(frozen=True)
class Node:
    """A node of stand-ins that this process samples."""

    folder: Path
    scene: Scene
    sampler: Sampler
    samples: GpuSamples

    def change(self) -> None:
        lines = "".join(f"4,{at},7,-;{text}\n" for at, text in enumerate(self.scene.kernel))
        with (self.folder / "kmsg").open("a") as log:
            log.write(lines)
        write_files(self.folder, self.scene.after)

    def look(self, count: int) -> Snapshot:
        """The snapshot of a healthy run with this node in it, after so many more samples."""
        for _ in range(count):
            self.sampler.sample()
        self.samples.poll()
        return change_node(
            healthy(), "n001", gpus=self.samples.list_gpus(set()), faults=self.samples.faults,
            gpus_lost=self.samples.lost, gpus_not_known=self.samples.not_known,
        )  # fmt: skip


def make_node(scene: Scene, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = folder / "n1"
    install(node, {**scene.before, **scene.now})
    write_files(node, {"kmsg": ""})
    for rank, pid in PIDS.items():
        (folder / f"pid.{rank}").write_text(f"{pid}\n")
    monkeypatch.setenv("PATH", f"{node / 'bin'}:{os.environ['PATH']}")
    accelerator: Accelerator = NvidiaAccelerator()
    if (node / "sys/class/kfd").exists():
        accelerator = AmdAccelerator(node / "sys")
    if (node / "xpu").exists():
        accelerator = IntelAccelerator()
    binding = None
    if (file := node / "py/pynvml.py").exists():
        spec = importlib.util.spec_from_file_location("pynvml", file)
        assert spec is not None and spec.loader is not None
        binding = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(binding)
    monkeypatch.setitem(sys.modules, "pynvml", binding)
    path = folder / "n1.gpu.jsonl"
    faults = Faults(KernelLog(node / "kmsg"), Networks(node / "sys", every_s=0))
    visible = split_devices(scene.env.get("CUDA_VISIBLE_DEVICES", "")) or None
    sampler = Sampler(path, 0, accelerator, visible, lambda: set(PIDS.values()), PIDS.copy, faults)
    return Node(node, scene, sampler, GpuSamples(path))


@pytest.mark.parametrize("scene", QUICK, ids=lambda scene: scene.name)
def test_a_scene(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make_node(scene, tmp_path, monkeypatch)
    node.look(1)
    node.change()
    snapshot = node.look(CLOSE_LOOK + 1)
    verdict = judge_run(snapshot)
    assert scene.stops or verdict.health.value == scene.health, verdict.reason
    texts = [text.replace("n001", "n1") for text in verdict.remarks]
    assert not match(scene.remarks, texts)
    assert not match([scene.verdict] * bool(scene.verdict), [verdict.reason.replace("n001", "n1")]
                     if scene.verdict else [])  # fmt: skip
    (own,) = (one for one in snapshot.nodes if one.name == "n001")
    found = [{"rule": one.rule, **one.values} for one in own.faults]
    assert not compare(scene.faults, found)
    assert {gpu.index: gpu.memory_total_mb for gpu in own.gpus} == scene.shown


@pytest.mark.parametrize("name", WHOLE)
def test_a_scene_with_agents_and_commands(name: str, tmp_path: Path) -> None:
    scene = NAMES[name]
    if scene.needs_root and os.getuid() != 0:
        pytest.skip("only root mounts a file over the kernel's log")
    wrong = judge(scene, play(scene, tmp_path))
    assert not any(wrong.values()), wrong


def test_there_are_many_scenes() -> None:
    assert len(NAMES) == len(SCENES) >= 25
