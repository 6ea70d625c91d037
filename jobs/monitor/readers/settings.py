"""Compare the settings that conf and plan request with those that the run prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varuna_core.facts.partition import Partition
from varuna_core.records.files import read_json, read_text
from varuna_core.records.plan import Plan
from varuna_core.records.record import read_record
from varuna_core.records.runfolder import AttemptFolder, RunFolder
from vjob.jobs.monitor.model.snapshot import Echo
from vjob.jobs.monitor.readers.node_files import NodeFiles
from vjob.jobs.runs.resolved import MOST_BYTES, parse_resolved


@dataclass(frozen=True, kw_only=True)
class AskedSettings:
    """Settings according to conf and plan, fixed for an attempt."""

    wanted: Mapping[str, str]
    """Requested values, keyed by the name under which a run prints the setting."""
    num_steps: int | None = None
    checkpoints: Path | None = None
    walltime_s: float | None = None


def read_asked(
    run: RunFolder, plan: Plan | None, attempt: AttemptFolder | None = None
) -> AskedSettings:
    """Read the requested settings from the files that the submit wrote, or that the manager wrote
    for an attempt of a run that morphs."""
    own = read_json(attempt.training) if attempt is not None else None
    training = own if isinstance(own, dict) else read_json(run.training)
    training = training if isinstance(training, dict) else {}
    folder, steps = training.get("checkpoint_folder"), training.get("steps")
    if not training:  # a script's conf has no steps but those that it refers to
        said = _read_conf(run)
        folder, steps = _find_dict(said, "checkpoint").get("folder"), said.get("steps")
    return AskedSettings(
        wanted=_list_wanted(plan, training),
        num_steps=steps if isinstance(steps, int) else None,
        checkpoints=Path(folder) if isinstance(folder, str) and folder else None,
        walltime_s=_read_walltime(run, plan),
    )


def _list_wanted(plan: Plan | None, training: Mapping[str, Any]) -> dict[str, str]:
    wanted: dict[str, Any] = {}
    if plan is not None:
        wanted |= {"WORLD_SIZE": plan.world, "NNODES": plan.num_nodes}
        # One stage and no sharing are defaults: a program of the user's may well choose its own.
        if training or plan.pipeline * plan.tensor > 1 or plan.partition:
            wanted |= {"PIPELINE_MP_SIZE": plan.pipeline, "DP_SIZE": plan.data}
            wanted |= {"TENSOR_MP_SIZE": plan.tensor, "PARTITION": plan.partition}
    names = {
        "GLOBAL_BATCH_SIZE": "global_batch_size",
        "MICRO_BATCH_SIZE": "micro_batch_size",
        "MODEL": "model",
        "HIDDEN_SIZE": "hidden",
        "NUM_LAYERS": "layers",
        "PARTITION": "partition",
    }
    wanted |= {name: training[key] for name, key in names.items() if training.get(key) is not None}
    if isinstance(wanted.get("PARTITION"), str):
        layers = training.get("layers")
        partition = Partition.find(wanted["PARTITION"])
        if partition is not None:
            wanted["PARTITION"] = partition.blocks(layers if isinstance(layers, int) else None)
    return {name: str(value) for name, value in wanted.items() if value is not None}


def compare(nodes: Iterable[NodeFiles], wanted: Mapping[str, str]) -> tuple[Echo, ...]:
    """Return the settings that the nodes' logs print, with the requested values: each distinct
    value of a setting once, but only the first value of NODE_RANK, which differs on each node."""
    echoes: dict[tuple[str, str], Echo] = {}
    for files in nodes:
        log = files.logs.get("out")
        for name, line in log.info.items() if log is not None else ():
            said = line.text.partition(":")[2].strip()
            key = name, "" if name == "NODE_RANK" else said
            echoes.setdefault(key, Echo(name=name, said=said, wanted=wanted.get(name), line=line))
    return tuple(echoes.values())


def take_first(echoes: Iterable[Echo]) -> dict[str, str]:
    """Return settings as printed, in their order; if nodes differ, those of the first."""
    info: dict[str, str] = {}
    for echo in echoes:
        info.setdefault(echo.name, echo.said)
    return info


def _read_conf(run: RunFolder) -> Mapping[str, Any]:
    """Return the section `train` of the resolved conf."""
    return _find_dict(_load(run, "checkpoint", "steps"), "train")


def _load(run: RunFolder, *words: str) -> Any:
    """Return the resolved conf; None if it cannot be read or contains none of these words."""
    try:
        text = read_text(run.resolved, "replace", MOST_BYTES)
    except OSError:
        return None
    if words and not any(word in text for word in words):
        return None
    return parse_resolved(text)


def _find_dict(value: Any, key: str) -> Mapping[str, Any]:
    """Return the section of this name; empty if it is missing or not a mapping."""
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _read_walltime(run: RunFolder, plan: Plan | None) -> float | None:
    """Return the requested time limit in seconds, from the record, or from the conf for an older
    record without it."""
    record = read_record(run)
    if record is not None and record.limits is not None:
        return record.limits.walltime_s
    if plan is not None and plan.machine_list is not None:
        return None
    asked = _find_dict(_load(run, "walltime_min"), "cluster").get("walltime_min")
    return 60.0 * asked if isinstance(asked, (int, float)) else None
