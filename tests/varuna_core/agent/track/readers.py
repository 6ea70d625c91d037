"""What the tools themselves read of what was tracked."""

from __future__ import annotations

import importlib
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

MLFLOW = Path(sys.prefix) / "track"
"""Where MLflow is (Makefile); not among the venv's own packages."""
BLOCK = 32 * 1024
WANDB_HEAD = 7


def read_records(path: Path) -> Iterator[bytes]:
    """Records of W&B's file: LevelDB's log format behind a header."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, parts = WANDB_HEAD, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            return
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield parts
            parts = b""


def read_wandb(folder: Path) -> tuple[set[str], list[dict[str, Any]], dict[str, Any]]:
    """Ids of the runs in all offline folders, their rows in order, and the config."""
    from wandb.proto.wandb_internal_pb2 import Record

    ids: set[str] = set()
    rows: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in read_records(path):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                config |= {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
            if record.HasField("history"):
                rows.append(
                    {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in record.history.item
                    }
                )
    return ids, rows, config


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of each scalar, by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {
        tag: [(event.step, round(event.value, 4)) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def read_mlflow(uri: str, experiment: str) -> list[dict[str, Any]]:
    """Each run of an experiment: params, tags, status, and its metrics as step and value."""
    client = importlib.import_module("mlflow.tracking").MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    runs = []
    for run in client.search_runs([found.experiment_id]):
        metrics = {
            name: [
                (one.step, round(one.value, 4))
                for one in client.get_metric_history(run.info.run_id, name)
            ]
            for name in run.data.metrics
        }
        runs.append(
            {
                "status": run.info.status,
                "params": run.data.params,
                "tags": run.data.tags,
                "metrics": metrics,
            }
        )
    return runs


def read_prometheus(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by name and labels, as both of Prometheus' parsers read them."""
    both = []
    for parse in (text_string_to_metric_families, openmetrics.text_string_to_metric_families):
        values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in parse(text):
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                assert labels not in values.setdefault(sample.name, {}), "each series once"
                values[sample.name][labels] = sample.value
        both.append(values)
    assert repr(both[0]) == repr(both[1])
    return both[0]
