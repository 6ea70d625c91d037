"""The tools that a run can be tracked in; each class sends points to one tool.

wandb and mlflow are imported in `open`, in the tool's own thread. Every error is raised: the thread
(`tracker`) reports it once and tries again.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, cast

from varuna_core.agent.track.openmetrics import Gauge, build_gauge, write_gauges
from varuna_core.agent.track.points import EVENTS, Point
from varuna_core.agent.track.tensorboard import EventFile, render_scalars, render_text
from varuna_core.plugins import load_plugin
from varuna_core.records.files import read_json
from varuna_core.records.plan import Plan, TrackPlan
from varuna_core.records.record import format_commit, read_record
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.secrets import REDACTED, is_value_secret, withhold

INIT_S = 20
"""Seconds for W&B's server to answer, after which W&B continues offline."""
MOST_METRICS, MOST_PARAMS, PARAM_CHARS = 1000, 100, 500
"""Limits of one request to MLflow's server: metrics, parameters, and characters of a parameter."""


@dataclass(frozen=True)
class Tracked:
    """The run that is tracked."""

    run: RunFolder
    plan: Plan
    track: TrackPlan
    attempt: int
    own: Dict[str, Any]
    """Data that the tool stored in earlier attempts, and stores for later ones."""
    say: Callable[[str], None]
    settings: Dict[str, Any] = field(default_factory=dict)
    """Settings from the conf's `track.plugins`, for a tool of a plug-in."""

    def list_config(self) -> Dict[str, Any]:
        """List the run's settings as tools show them."""
        plan, record = self.plan, read_record(self.run)
        found = {
            **self.track.config,
            "vjob_run": plan.run,
            "vjob_folder": str(self.run.path),
            "vjob_nodes": plan.num_nodes,
            "vjob_ranks": plan.world,
            "vjob_pipeline": plan.pipeline,
            "vjob_data": plan.data,
            "vjob_tensor": plan.tensor,
        }
        if record is not None and record.code is not None and record.code.commit:
            found["vjob_commit"] = record.code.commit
            found["vjob_code"] = format_commit(record.code)
        return found


class Tool:
    """Interface of one tracking tool, such as W&B."""

    name = ""
    is_gauge = False
    """True if only the newest values matter to the tool, so that points of earlier attempts are not
    sent."""

    def __init__(self, tracked: Tracked) -> None:
        self.tracked = tracked

    def open(self) -> None:
        """Find the run in the tool, or create it."""

    def put(self, points: Sequence[Point]) -> None:
        """Send points that the tool has not received yet."""
        raise NotImplementedError

    def close(self, *, is_well: bool) -> None:
        """Close the run at the end of an attempt; `is_well` is true if no rank failed."""


class Wandb(Tool):
    """A run of W&B, the same in all attempts.

    W&B counts rows itself; a training step may be there twice, and is a column: `step`.
    """

    name = "wandb"

    def open(self) -> None:
        wandb = importlib.import_module("wandb")
        settings, folder = self.tracked.track.wandb or {}, self.tracked.run.track
        folder.mkdir(mode=0o700, exist_ok=True)
        mode = "offline" if settings.get("mode") == "offline" else "online"
        try:
            self._run = self._init(wandb, settings, folder, mode)
        except Exception as error:
            if mode == "offline":
                raise
            self.tracked.say(
                f"wandb: {shorten(error)}; tracking continues offline: wandb sync "
                f"{folder}/wandb/offline-run-*"
            )
            wandb.teardown()  # its process still holds the id
            self._run = self._init(wandb, settings, folder, "offline")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._row = max(int(self.tracked.own.get("row", 0)), int(self._run.step or 0))

    def _init(self, wandb: Any, settings: Mapping[str, Any], folder: Path, mode: str) -> Any:
        track, known = self.tracked.track, wandb.Settings.model_fields
        wanted = {
            "silent": True,
            "console": "off",
            "x_disable_stats": True,  # the samples that we have already
            "disable_git": True,
            "save_code": False,
            "init_timeout": INIT_S,
            "login_timeout": INIT_S,
        }
        quiet = {name: value for name, value in wanted.items() if name in known}
        return wandb.init(
            project=settings["project"],
            entity=settings.get("entity"),
            group=settings.get("group"),
            tags=settings.get("tags"),
            name=self.tracked.plan.run,
            id=track.id,
            resume="allow",
            dir=str(folder),
            mode=mode,
            config=self.tracked.list_config(),
            settings=wandb.Settings(**quiet),
        )

    def put(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({"step": point.step, **point.values}, step=self._row)
            self._row += 1
            if point.stream == EVENTS:
                self._run.summary["last_event"] = point.text
        self.tracked.own["row"] = self._row

    def close(self, *, is_well: bool) -> None:
        self._run.finish(exit_code=0 if is_well else 1)
        importlib.import_module("wandb").teardown()  # its own process ends with it


class Mlflow(Tool):
    """A run of MLflow, found again by its tag."""

    name = "mlflow"
    _TAG = "vjob_id"

    def open(self) -> None:
        for name, value in (
            ("MLFLOW_ALLOW_FILE_STORE", "true"),
            ("MLFLOW_DISABLE_TELEMETRY", "true"),
            ("MLFLOW_HTTP_REQUEST_TIMEOUT", "20"),
            ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1"),  # the tracker tries again itself
        ):
            os.environ.setdefault(name, value)
        tracking = importlib.import_module("mlflow.tracking")
        self._entities = importlib.import_module("mlflow.entities")
        settings = self.tracked.track.mlflow or {}
        self._client = tracking.MlflowClient(settings["uri"])
        experiment = self._name_experiment(settings["experiment"])
        self._id = self.tracked.own.get("run_id") or self._find_run(experiment)
        if self._id is None:
            self._id = self._make_run(experiment)
        else:
            self._client.update_run(self._id, status="RUNNING")
        self.tracked.own["run_id"] = self._id
        self._log_params()

    def _name_experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:  # another run made it just now
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _find_run(self, experiment: str) -> Optional[str]:
        asked = f"tags.`{self._TAG}` = '{self.tracked.track.id}'"
        found = self._client.search_runs([experiment], filter_string=asked, max_results=1)
        return found[0].info.run_id if found else None

    def _make_run(self, experiment: str) -> str:
        config = self.tracked.list_config()
        tags = {self._TAG: self.tracked.track.id, "mlflow.source.name": str(config["vjob_folder"])}
        if "vjob_commit" in config:
            tags["mlflow.source.git.commit"] = config["vjob_commit"]
        made = self._client.create_run(experiment, tags=tags, run_name=self.tracked.plan.run)
        return str(made.info.run_id)

    def _log_params(self) -> None:
        """Log parameters that the run lacks: MLflow refuses other values, as after a morph."""
        known = self._client.get_run(self._id).data.params
        params = [
            self._entities.Param(name, str(value)[:PARAM_CHARS])
            for key, value in self.tracked.list_config().items()
            for name in [clean_name(key)]
            if name not in known
        ]
        for at in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[at : at + MOST_PARAMS])

    def put(self, points: Sequence[Point]) -> None:
        metrics = [
            self._entities.Metric(clean_name(name), value, int(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for at in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[at : at + MOST_METRICS])
        texts = [point.text for point in points if point.text]
        if texts:
            self._client.set_tag(self._id, "vjob_last_event", texts[-1][:PARAM_CHARS])

    def close(self, *, is_well: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_well else "FAILED")


def clean_name(name: str) -> str:
    """Return the name in a form that MLflow accepts: `cluster.nodes.0.count`."""
    return re.sub(r"[^\w/. -]", "_", name.replace("[", ".").replace("]", ""))[:250]


class Tensorboard(Tool):
    """TensorBoard event files in the run folder, one for each attempt."""

    name = "tensorboard"

    def open(self) -> None:
        now = time.time()
        # TensorBoard reads them in the order of their names; two attempts may share a second.
        writer = f"{os.uname().nodename}.{os.getpid()}.{self.tracked.attempt}"
        name = f"events.out.tfevents.{int(now):010d}.{writer}.vjob"
        self._file = EventFile(self.tracked.run.tensorboard / name, now)
        if not self.tracked.own:
            settings = "".join(
                f"    {name}: {value}\n" for name, value in self.tracked.list_config().items()
            )
            self._file.write([render_text(now, 0, "conf", settings)])
        self.tracked.own["attempt"] = self.tracked.attempt

    def put(self, points: Sequence[Point]) -> None:
        events: List[bytes] = []
        for point in points:
            events.append(render_scalars(point.time, point.step, point.values))
            if point.text:
                events.append(render_text(point.time, point.step, "events", point.text))
        self._file.write(events)

    def close(self, *, is_well: bool) -> None:
        self._file.close()


class Openmetrics(Tool):
    """A metrics file for node exporter's textfile collector."""

    name = "openmetrics"
    is_gauge = True

    def open(self) -> None:
        self._path = Path(self.tracked.track.openmetrics or "")
        self._labels = {"run": self.tracked.plan.run}
        self._gauges: Dict[str, Gauge] = {}
        commit = self.tracked.list_config().get("vjob_commit", "")
        self._info = (("name", self.tracked.plan.name), ("commit", str(commit)))
        self._write(is_up=True)

    def put(self, points: Sequence[Point]) -> None:
        for point in points:
            values = dict(point.values)
            if point.is_by_step:
                values["step"] = max(float(point.step), 0.0)
            for name, value in values.items():
                self._gauges[name] = build_gauge(name, value, self._labels)
        self._write(is_up=True)

    def close(self, *, is_well: bool) -> None:
        self._write(is_up=False)

    def _write(self, *, is_up: bool) -> None:
        labels = tuple(self._labels.items())
        write_gauges(
            self._path,
            [
                Gauge("vjob_run_info", 1.0, (*labels, *self._info)),
                Gauge("vjob_run_up", float(is_up), labels),
                Gauge("vjob_attempt", float(self.tracked.attempt), labels),
                Gauge("vjob_updated_timestamp_seconds", round(time.time(), 3), labels),
                *self._gauges.values(),
            ],
        )


TOOLS = {tool.name: tool for tool in (Wandb, Mlflow, Tensorboard, Openmetrics)}


GROUP = "vjob.trackers"


def list_tools(track: TrackPlan, run: RunFolder) -> List[str]:
    """List the names of the tools that the run asks for, those of plug-ins last."""
    return [*(name for name in TOOLS if getattr(track, name)), *read_settings(run)]


def read_settings(run: RunFolder) -> Dict[str, Any]:
    """Read the conf's `track.plugins`: the settings of each plug-in by its name."""
    found = read_json(run.trackers)
    return found if isinstance(found, dict) else {}


def choose_tool(name: str) -> Callable[[Tracked], Tool]:
    """Return the class of a tool; raise ImportError if its plug-in was ignored."""
    found = TOOLS.get(name) or load_plugin(GROUP, name)
    if found is None:
        raise ImportError(f"the tracker's plug-in ({GROUP}) was ignored, see above")
    return cast(Callable[[Tracked], Tool], found)


def shorten(error: BaseException, environ: Optional[Mapping[str, str]] = None) -> str:
    """Return the first line of an error, without secrets."""
    text = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    for name, value in (os.environ if environ is None else environ).items():
        if is_value_secret(name, value):
            text = text.replace(value, REDACTED)
    text = withhold(text)
    with contextlib.suppress(ValueError):
        text = text[: text.index(" See https://")]
    return text[:300]
