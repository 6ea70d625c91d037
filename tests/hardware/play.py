"""Plays a scene: two agents with stand-ins, `vjob status` while they run, `vjob report` after."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.command import Vjob
from tests.hardware.scenes import Scene
from tests.hardware.stand_ins import install, make_nvml, write_files
from tests.varuna_core.agent.local_run import TIMING, Stage, make_group, make_plan, wait_until
from varuna_core.records import record as records
from varuna_core.records.record import JobRecord, RunRecord, write_record

SQUEUE = """#!/bin/sh
echo "77|77|0|RUNNING|n0|None|0|2026-01-01T00:00:00|x||10:00|N/A|N/A|(null)|0|"
"""
RANK = """
echo $$ > {folder}/pid.$RANK
step=0
while [ ! -e {folder}/stop ]; do
  [ -e {folder}/still ] || {{ step=$((step+1)); echo "step $step/9000 loss 0.5"; }}
  sleep 0.1
done
"""
MOUNTS = 'cd {node}; mount --bind sys /sys; mount --bind kmsg /dev/kmsg; cd /; exec "$@"'
AFTER = 8
"""Samples after a change, by which a close look has seen it."""
PARTS = ("status", "json", "report")


@dataclass(frozen=True)
class Seen:
    """What was said of a scene."""

    status: str
    document: Mapping[str, Any]
    report: str
    findings: Sequence[Mapping[str, Any]]


class ScenePlay(Stage):
    """A run whose agents find the stand-ins of their node."""

    def __init__(self, folder: Path, scene: Scene) -> None:
        self.folder, self.scene = folder, scene
        group = make_group("a", 2, 2, gpus=scene.gpus)
        command = ("sh", "-c", RANK.format(folder=folder))
        timing = replace(TIMING, beat_s=0.5, sample_s=0.3, grace_s=2.0)
        super().__init__(
            folder / "scene-1", make_plan(group, command=command, scheduler="slurm", timing=timing)
        )
        for name, text in (("squeue", SQUEUE), ("sacct", ""), ("scontrol", ""), ("sinfo", "")):
            write_files(folder / "slurm", {name: text or "#!/bin/sh\n"})
            (folder / "slurm" / name).chmod(0o755)
        for index in range(2):
            node = folder / f"n{index}"
            install(node, {**scene.before, **scene.now} if index else make_nvml(scene.gpus))
            write_files(node, {"kmsg": ""})
            (node / "sys").mkdir(exist_ok=True)

    def start(self, index: int, attempt: int = 0, **env: str) -> subprocess.Popen[str]:
        node = self.folder / f"n{index}"
        more = {"PYTHONPATH": str(node / "py")} if (node / "py").exists() else {}
        path = f"{node / 'bin'}:{os.environ['PATH']}"
        return super().start(index, attempt, PATH=path, **more, **self.scene.env, **env)

    def _argv(self, command: str, attempt: int, words: Sequence[str]) -> list[str]:
        argv = super()._argv(command, attempt, words)
        if command != "node" or words[-1] == "0" or not self.scene.needs_root:
            return argv
        node = self.folder / f"n{words[-1]}"
        return ["unshare", "-m", "sh", "-ec", MOUNTS.format(node=node), "sh", *argv]

    def count_samples(self, node: str) -> int:
        return self.log(node, "gpu.jsonl").count('"num_cpus"')

    def play_until_seen(self) -> Seen:
        """Play the scene; returns what vjob said of it."""
        self.open()
        self.write_record(records.SUBMITTED)
        self.start_all()
        wait_until(lambda: all(self.count_samples(f"n{at}") > 1 for at in range(2)), "samples")
        wait_until(lambda: len([*self.folder.glob("pid.*")]) == 4, "ranks")
        if self.scene.stops:
            (self.folder / "still").touch()
        if self.scene.kernel:
            with (self.folder / "n1/kmsg").open("a") as log:
                for at, line in enumerate(self.scene.kernel):
                    log.write(f"4,{at},{int(time.monotonic() * 1e6)},-;{line}\n")
        write_files(self.folder / "n1", self.scene.after)
        hangs = "smi/hang" in self.scene.after  # then each sample takes as long as it may
        wanted = self.count_samples("n1") + (2 if hangs else AFTER)
        wait_until(lambda: self.count_samples("n1") >= wanted, "samples after the change")
        vjob = Vjob(self.folder, {"PATH": f"{self.folder / 'slurm'}:{os.environ['PATH']}"})
        where = str(self.run.path)
        document = read_json(vjob("status", where, "--json", code=None))
        status = vjob("status", where, code=None).stdout
        (self.folder / "stop").touch()
        self.wait()
        self.close(0)
        self.write_record(records.ENDED)
        findings = read_json(vjob("report", where, "--json", code=None))["findings"]
        report = vjob("report", where, "--text", code=None).stdout
        return Seen(status, document, report, findings)

    def write_record(self, state: str) -> None:
        write_record(
            self.run,
            RunRecord(
                run=self.run.name, name="scene", state=state, scheduler="slurm", layout="plain",
                num_jobs=1, jobs=(JobRecord(id="77", group=None),), submitted=time.time(), user="u",
                host="h", conf="c", version="0", pid=0, pid_start=None,
                verdict="COMPLETED" if state == records.ENDED else "",
            ),
        )  # fmt: skip


def read_json(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def play(scene: Scene, folder: Path) -> Seen:
    """Play a scene in a folder."""
    stage = ScenePlay(folder, scene)
    try:
        return stage.play_until_seen()
    finally:
        stage.end()


def judge(scene: Scene, seen: Seen) -> dict[str, list[str]]:
    """What is wrong in each part of what was said; nothing where all is right."""
    wrong: dict[str, list[str]] = {part: [] for part in PARTS}
    verdict, nodes = seen.document["verdict"], {x["name"]: x for x in seen.document["nodes"]}
    if verdict["health"] != scene.health:
        wrong["json"].append(f"health {verdict['health']}: {verdict['reason']}")
    if scene.verdict and not re.search(scene.verdict, verdict["reason"]):
        wrong["json"].append(f"verdict {verdict['reason']!r}")
    remarks = [one for one in verdict["remarks"] if not one.startswith("preflight of")]
    wrong["json"] += match(scene.remarks, remarks)
    shown = {gpu["index"]: gpu["memory_total_mb"] for gpu in nodes["n1"]["gpus"]}
    if shown != scene.shown:
        wrong["json"].append(f"shows {shown}")
    faults = [{"rule": one["rule"], **one["values"]} for one in nodes["n1"]["faults"]]
    wrong["json"] += compare(scene.faults, faults)
    if nodes["n0"]["faults"]:
        wrong["json"].append("n0 is blamed")
    head = seen.status.split("\n\n")[0]
    for pattern in (scene.verdict, *scene.remarks):
        if not re.search(pattern, " ".join(seen.status.split())):
            wrong["status"].append(f"no {pattern!r}")
    if scene.health not in head:
        wrong["status"].append(f"no {scene.health}")
    found = [one["values"] for one in seen.findings if one["rule"] == "hardware"]
    wrong["report"] += compare(
        [{"node": "n1", **one, "fault": one["rule"]} for one in scene.faults],
        [{**one, "rule": one["fault"]} for one in found],
    )
    text = " ".join(seen.report.split())
    sentences = [x for x in scene.remarks if not x.startswith("GPUs ")] if scene.faults else []
    for pattern in (*sentences, *scene.report):
        if not re.search(pattern, text):
            wrong["report"].append(f"no {pattern!r}")
    unread = [one for one in seen.findings if one["rule"] in ("GPUs not read", "throttle")]
    if len(unread) != len(scene.report):
        wrong["report"].append(f"{[one['sentence'] for one in unread]}")
    return wrong


def match(patterns: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Patterns that no text has, and texts that no pattern expects."""
    lacking = [f"no {one!r}" for one in patterns if not any(re.search(one, x) for x in texts)]
    return lacking + [
        f"false: {text}" for text in texts if not any(re.search(one, text) for one in patterns)
    ]


def compare(wanted: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Facts that are lacking, and facts that nobody expects."""

    def fits(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        return all(other.get(key) == value for key, value in one.items())

    return [
        *(f"lacks {dict(one)}" for one in wanted if not any(fits(one, other) for other in found)),
        *(f"false {dict(one)}" for one in found if not any(fits(other, one) for other in wanted)),
    ]
