"""Functions that run on ranks; they are pickled by reference, so ranks import this module."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import submitit


def describe_rank() -> dict[str, Any]:
    """What a rank knows of itself, by submitit and by the environment."""
    env = submitit.JobEnvironment()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {
        "cluster": env.cluster,
        "job_id": env.job_id,
        "num_tasks": env.num_tasks,
        "num_nodes": env.num_nodes,
        "node": env.node,
        "global_rank": env.global_rank,
        "local_rank": env.local_rank,
        "hostnames": list(env.hostnames),
        "pickle": str(env.paths.submitted_pickle),
        "stdout": str(env.paths.stdout),
        "env": {name: os.environ[name] for name in names},
        "text": f"{env}",
    }


def fail_on(rank: int, message: str) -> str:
    if submitit.JobEnvironment().global_rank == rank:
        raise ValueError(message)
    print("here", flush=True)
    time.sleep(60)
    return "never"


def return_lock() -> Any:
    return threading.Lock()


def leave_by_exit(code: int) -> None:
    sys.exit(code)


def find_runtime() -> str:
    """Where the rank finds vjob's runtime."""
    import varuna_core
    import varuna_core.schedule.registry

    return str(varuna_core.schedule.registry.__file__)


def meet_by_torch() -> dict[str, Any]:
    """As submitit's documentation has it, unchanged."""
    import torch

    dist_env = submitit.helpers.TorchDistributedEnvironment().export()
    torch.distributed.init_process_group(backend="gloo")
    total = torch.tensor(dist_env.rank)
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    return {
        "total": int(total),
        "rank": dist_env.rank,
        "world_size": dist_env.world_size,
        "local_world_size": dist_env.local_world_size,
        "master": f"{dist_env.master_addr}:{dist_env.master_port}",
        "devices": os.environ["CUDA_VISIBLE_DEVICES"],
        "env": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
    }


class Counter:
    """Counts up to a number, a step at a time; says in a file how far each rank is."""

    def __init__(self, folder: str, last: int, begin: int = 0, saves: int = 0) -> None:
        self.folder, self.last, self.count, self.saves = folder, last, begin, saves

    def __call__(self) -> dict[str, int]:
        rank = submitit.JobEnvironment().global_rank
        begin = self.count
        while self.count < self.last or not Path(self.folder, "go").exists():
            self.count = min(self.count + 1, self.last)
            Path(self.folder, f"{os.environ['VJOB_ATTEMPT']}.{rank}").write_text(str(self.count))
            time.sleep(0.02)
        return {"begin": begin, "count": self.count, "saves": self.saves}

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        again = Counter(self.folder, self.last, self.count, self.saves + 1)
        return submitit.helpers.DelayedSubmission(again)


class Forking(Counter):
    """A counter with a child that has its handlers, such as a data loader's worker."""

    def __call__(self) -> dict[str, int]:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        Path(self.folder, f"child.{os.environ['RANK']}").write_text(str(child.pid))
        return super().__call__()


class Meeting(Counter):
    """A counter whose ranks fail as soon as rank 0 is gone, as those of a collective do."""

    def __call__(self) -> dict[str, int]:
        if submitit.JobEnvironment().global_rank == 0:
            Path(self.folder, "pid").write_text(str(os.getpid()))
            return super().__call__()
        while not Path(self.folder, "pid").exists():
            time.sleep(0.01)
        pid = int(Path(self.folder, "pid").read_text())
        Path(self.folder, f"{os.environ['VJOB_ATTEMPT']}.{os.environ['RANK']}").write_text("1")
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.001)
        raise ConnectionResetError("rank 0 is gone")
