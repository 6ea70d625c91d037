"""The peer of the morph benchmark: torchrun's elastic restart around a plain DDP script.

Started by `benchmarks.morph`; as a script, under torchrun, it is the training itself: the same
model as ours from `varuna_core.programs`, in DDP, saved and loaded by torch.distributed.checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.morph.ours import BATCH, Size, wait_until
from varuna_core.agent.processes.proc import list_below, list_stats

LIMIT_S = 90.0
"""Where torchrun comes to no step after a loss: on a busy machine its agents can take each other
for lost, too."""

TUNED = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt={attempts}"
"""torchrun would wait 30 s for others to join, and 15 s for a sign of life of a lost node."""
FRESH = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""A store for each generation. In the one that torch 2.13 shares between them workers find the
addresses of the dead; and TORCHELASTIC_RESTART_COUNT, which could name a generation in there, is
not the same on all nodes: who restarts because others do does not count it."""


class Peer:
    """One elastic job of torchrun: an agent for each node, on this machine."""

    def __init__(self, folder: Path, size: Size, nodes: int, *, silence_s: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        conf = TUNED.format(attempts=silence_s)
        words = [f"{value}" for value in (*asdict(size).values(),)]
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes=2:{nodes}",
            "--nproc-per-node=1", "--max-restarts=20", "--monitor-interval=0.1",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=peer",
            f"--rdzv-conf={conf}", "-m", "benchmarks.morph.peer", str(folder), *words,
        ]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), FRESH: "1"}
        self._agents: list[subprocess.Popen[bytes]] = []
        for node in range(nodes):
            with open(folder / f"{node}.log", "wb") as log:
                self._agents.append(
                    subprocess.Popen(
                        command, env=env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
                    )
                )
            if node == 0:  # it holds the store, and is not the one that is lost
                wait_until(lambda: _is_listening(port), "torchrun's store")

    def wait_for_new_step(self) -> float:
        """When the workers that come after those of now have done a step."""
        known = self._list_workers()
        return wait_until(lambda: self._list_workers() - known, "a step after a loss", LIMIT_S)

    def _list_workers(self) -> set[str]:
        """The process ids of all first workers that have done a step."""
        path = self._folder / "steps"
        return {line.split()[0] for line in path.read_text().splitlines() if line.split()}

    @property
    def said(self) -> str:
        """The ends of the agents' logs."""
        texts = (path.read_text(errors="replace") for path in sorted(self._folder.glob("*.log")))
        return "\n".join(text[-2000:] for text in texts)

    def wait_for_save(self, step: int) -> None:
        wait_until(lambda: find_newest(self._folder) >= step, f"the checkpoint of step {step}")

    def kill_node(self, node: int) -> float:
        pid = self._agents[node].pid
        own = [pid, *list_below([pid], list_stats())]
        now = time.time()
        for number in own:
            os.kill(number, signal.SIGKILL)
        return now

    def end(self) -> None:
        for agent in self._agents:
            if agent.poll() is None:
                for number in [agent.pid, *list_below([agent.pid], list_stats())]:
                    os.kill(number, signal.SIGKILL)
            agent.wait()


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def find_newest(folder: Path) -> int:
    """The step of the newest complete checkpoint; torch writes .metadata last."""
    steps = [int(path.parent.name) for path in folder.glob("save/*/.metadata")]
    return max(steps, default=-1)


def train(folder: Path, size: Size) -> None:
    """One worker of torchrun."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.nn.parallel import DistributedDataParallel

    from varuna_core.programs.gpt import Gpt

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        Gpt(
            layers=size.layers,
            hidden=size.hidden,
            heads=size.heads,
            sequence=size.sequence,
            vocab=size.vocab,
            dropout=0.0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = find_newest(folder)
    if step >= 0:
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=str(folder / "save" / str(step)))
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    step = max(step, 0)
    with open(folder / "steps", "a", buffering=1, encoding="utf-8") as lines:
        while True:
            step += 1
            tokens = torch.randint(size.vocab, (BATCH // world, size.sequence + 1))
            for sample in tokens.split(1):  # micro-batches of one, as ours
                (model(sample) / len(tokens)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                lines.write(f"{os.getpid()} {world} {step}\n")
            if step % size.save_every == 0:
                weights, moments = get_state_dict(model, optimizer)
                state = {"model": weights, "optimizer": moments}
                dcp.save(state, checkpoint_id=str(folder / "save" / str(step)))


if __name__ == "__main__":
    name, *numbers = sys.argv[2:]
    fields = ("layers", "hidden", "heads", "sequence", "vocab", "save_every")
    train(
        Path(sys.argv[1]),
        Size(name=name, **dict(zip(fields, map(int, numbers), strict=True))),
    )
