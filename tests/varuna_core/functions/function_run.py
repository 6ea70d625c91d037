"""Functions as jobs, written as a submit from Python does."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import DelayedSubmission

from tests import ROOT
from tests.command import Vjob
from varuna_core.functions.facts import write_facts
from varuna_core.functions.pickles import write_pickle
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.planning.resolve_auto import resolve_conf
from vjob.jobs.submit import submit as submitting

CONF = f"""
name: fn
cluster:
  scheduler: local
  walltime_min: 2
  grace_s: 5
  requeue: true
  nodes: [{{group: m, count: 2, ranks: 2}}]
env: {{PYTHONPATH: {ROOT}}}
"""


class Functions:
    """Submits functions in a folder of their own."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.vjob = Vjob(folder, env)
        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        self.timeout_min, self.num_timeouts = 60, 3
        self.spoil: Callable[[RunFolder], object] = lambda run: None
        """Done to the run folder before the job is submitted."""
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))

    def submit(
        self, function: Callable[..., Any], *args: Any, conf: str = CONF, **options: Any
    ) -> RunFolder:
        name = getattr(function, "__name__", type(function).__name__)
        path = self.folder / "conf.yaml"
        path.write_text(conf)
        overrides = [f"program={{function: {name}}}"]
        overrides += [f"{key}={value}" for key, value in options.items()]
        delayed = DelayedSubmission(function, *args)
        delayed.set_timeout(self.timeout_min, self.num_timeouts)

        def fill(run: RunFolder) -> None:
            write_facts(run, name)
            write_pickle(run.submitted_pickle, delayed)
            self.spoil(run)

        return submitting.submit(resolve_conf(path, overrides), fill=fill)[0]

    def wait(self, run: RunFolder) -> dict[str, Any]:
        return self.vjob.wait_over(run)


def read_result(run: RunFolder, rank: int) -> tuple[str, Any]:
    """`success` or `error`, and the value or traceback."""
    kind, value = pickle.loads(run.result_pickle(rank).read_bytes())
    return kind, value
