"""Functions that tests of the Python API submit; pickled by reference, so ranks import this."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import submitit
from submitit.helpers import Checkpointable, DelayedSubmission


def multiply(first: int, second: int = 2) -> int:
    return first * second


def divide(first: int, second: int) -> float:
    print("about to divide", file=sys.stderr, flush=True)
    return first / second


def say(word: str) -> int:
    """Prints on both streams."""
    rank = submitit.JobEnvironment().global_rank
    print(f"{word} of {rank}", flush=True)
    print(f"no {word} of {rank}", file=sys.stderr, flush=True)
    return rank


def wait_for_file(path: str, answer: int) -> int:
    """Leaves a mark, and returns when the file is there."""
    Path(f"{path}.{answer}.seen").touch()
    deadline = time.monotonic() + 120
    while not Path(path).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return answer


def describe_place() -> dict[str, Any]:
    """Every field of the environment that submitit's documentation names."""
    env = submitit.JobEnvironment()
    names = ("job_id", "num_tasks", "num_nodes", "node", "global_rank", "local_rank")
    return {name: getattr(env, name) for name in names}


def list_variables() -> list[str]:
    return sorted(os.environ)


class Stages(Checkpointable):
    """Goes through stages, as a training would: load, prepare, fit. The last awaits a file."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.starts = 0

    def __call__(self, folder: str, *, model_path: str) -> list[str]:
        self.starts += 1
        Path(folder, f"start.{self.starts}").touch()
        for stage in ("load", "prepare"):
            if stage not in self.done:
                print(f"stage {stage}", flush=True)
                self.done.append(stage)
        Path(folder, f"prepared.{self.starts}").touch()
        if self.starts == 1:
            time.sleep(120)  # interrupted here
        print("fit", flush=True)
        Path(model_path).write_text(f"fitted in start {self.starts}")
        return [*self.done, f"fitted in start {self.starts}"]

    def checkpoint(self, *args: Any, **kwargs: Any) -> DelayedSubmission:
        print(f"checkpoint after {self.done[-1]}", flush=True)
        return super().checkpoint(*args, **kwargs)


class Turns:
    """Its checkpoint() submits something else: another number, or nothing."""

    def __init__(self, again: int | None) -> None:
        self.again = again

    def __call__(self, folder: str, number: int) -> int:
        Path(folder, f"turn.{number}").touch()
        if number == 0:
            time.sleep(120)  # interrupted here
        return number

    def checkpoint(self, folder: str, number: int) -> DelayedSubmission | None:
        if self.again is None:
            return None
        return DelayedSubmission(Turns(None), folder, number=self.again)


def meet_by_torch() -> float:
    """The sum of all ranks, by torch's own init."""
    import torch

    environment = submitit.helpers.TorchDistributedEnvironment().export()
    torch.distributed.init_process_group(backend="gloo")
    assert environment.rank == torch.distributed.get_rank()
    assert environment.world_size == torch.distributed.get_world_size()
    total = environment.rank * torch.ones(1)
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    return float(total)
