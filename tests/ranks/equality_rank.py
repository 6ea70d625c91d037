"""A rank that trains drawn models, one after the other: `equality_rank.py <folder> <rank> <world>`.

It asks for draws through the socket in the folder and answers each with a report; the first rank
gathers the others' results and judges. A world whose rank has failed is not used again.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import sys
import traceback
from contextlib import nullcontext
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.varuna_core.equality import defects
from tests.varuna_core.equality.judge import judge
from tests.varuna_core.equality.model import add_hooks, build_model, cut_batch, make_batch
from tests.varuna_core.equality.plain import SEED, build_optimizers, take_closure
from tests.varuna_core.equality.spec import NUM_STEPS, SAVED_AFTER, Spec, deal, load
from varuna_core import Varuna
from varuna_core.runtime.engine import weight_grads
from varuna_core.runtime.optim import grads

DUMP_AFTER_S = 25.0
"""Then a rank that hangs writes where it is."""


def take(varuna: Varuna, tensors: dict[str, Any]) -> list[Any]:
    """Each with where it lies in the whole tensor."""
    taken: list[Any] = []
    slices = varuna._masters.slices
    for name, tensor in tensors.items():
        share = None if varuna.sharding is None else varuna.sharding.shares.find(name)
        pieces = None
        if share is not None and share.pieces:
            pieces = [(o.offset, o.extent, i.offset) for o, i in share.pieces]
        if name in slices:
            box = slices[name].box
            pieces = [(box.offset, box.extent, (0,) * len(box.offset))]
        taken.append((name, tensor.detach().clone(), pieces))
    return taken


def find_limits(before: set[Any], stated: float | None) -> str:
    """Groups made since whose collectives end a run sooner than was stated."""
    groups = [g for g in dist.distributed_c10d._world.pg_map if g not in before]
    limits = set()
    for group in groups:
        backend: Any = group._get_backend(torch.device("cpu"))
        limits.add(backend.options._timeout.total_seconds())
    wrong = {s for s in limits if s != stated and s < 86400}
    return f"{sorted(wrong)} s, stated is {stated}" if wrong else ""


def leave_groups(before: set[Any], varuna: Varuna) -> None:
    """End the groups made since: each has a thread that wakes a hundred times a second."""
    for receiver in varuna.links.receivers:
        receiver.end(10.0)
    if before:
        dist.barrier()
    for group in [g for g in dist.distributed_c10d._world.pg_map if g not in before]:
        dist.destroy_process_group(group)


def fork_child() -> None:
    """A child that collects what it got of its parent, and ends as Python does."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        gc.collect()
        atexit._run_exitfuncs()
    finally:
        os._exit(0)


class Leg:
    """One training of a draw, on this rank."""

    def __init__(self, order: dict[str, Any], rank: int) -> None:
        self.order, self.rank = order, rank
        self.spec: Spec = load(order["spec"])
        self.leg: int = order["leg"]
        self.phase = "make"

    def make(self, layout: Any) -> Varuna:
        spec = self.spec
        model = build_model(spec)
        if spec.hooks == "before":
            add_hooks(model.named_parameters())
        offset = self._find_offset(layout)
        if offset:  # ranks that start from other weights are put right
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(offset)
        options = defects.list_options(spec)
        return Varuna(
            model,
            layout.stage_map,
            (lambda size, device=None: make_batch(spec, 0, size))
            if spec.by_function
            else make_batch(spec, 0, spec.batch_size),
            spec.batch_size,
            spec.chunk_size,
            device="cpu",
            partition=layout.partition,
            schedule=layout.schedule,
            stages_per_rank=layout.stages_per_rank,
            tensor=layout.tensor,
            precision=spec.precision,
            recompute=layout.recompute,
            memory_limit=layout.memory_limit,
            opportunistic=layout.opportunistic,
            hang_timeout_s=layout.hang_timeout_s,
            zero=layout.zero,
            offload="optimizer" if layout.offload else None,
            seed=SEED,
            **options,
        )

    def _find_offset(self, layout: Any) -> int:
        """Zero on the ranks whose weights count: the first replica's, and first tensor rank's."""
        if self.leg:
            return 1
        entry = self.rank // layout.tensor
        row = layout.stage_map.split(";")
        replica = next(r.split(",").index(str(entry)) for r in row if str(entry) in r.split(","))
        return replica + self.rank % layout.tensor

    def train(self) -> dict[str, Any]:
        spec, first = self.spec, SAVED_AFTER if self.leg else 0
        layout = spec.list_layouts(self.leg)[-1]
        before = set(dist.distributed_c10d._world.pg_map)
        varuna = self.make(layout)
        limits = find_limits(before, layout.hang_timeout_s)
        if spec.hooks == "after":
            add_hooks(varuna.named_parameters())
        optimizers = build_optimizers(spec.optimizer, list(varuna.parameters()))
        given = optimizers if len(optimizers) > 1 else optimizers[0]
        if spec.loss_scale == "dynamic":
            varuna.set_optimizer(given, init_loss_scale=2.0**10)
        else:
            varuna.set_optimizer(given, loss_scale=spec.loss_scale)
        if self.leg:
            self.phase = "load"
            varuna.load_checkpoint(self.order["store"])
        result: dict[str, Any] = {
            "losses": [],
            "norms": [],
            "overflows": [],
            "gradients": [],
            "limits": limits,
            "tensor": layout.tensor > 1,
            "boundaries": [held.start - 1 for held in varuna.split.stages if held.start and held],
        }
        for step in range(first, NUM_STEPS):
            if not self.leg and spec.other is not None and step == SAVED_AFTER:
                self.phase = "save"
                varuna.checkpoint(self.order["store"], on_demand=True)
            self.phase = f"step {step}"
            held = deal(spec, layout, step)[varuna.replica]
            batch: Any = cut_batch(make_batch(spec, step), spec.batches[step], held)
            loss, overflow = varuna.step(batch, spec.clip)
            result["losses"].append(loss)
            result["norms"].append(varuna.last_grad_norm)
            result["overflows"].append(overflow)
            if not step:
                named = varuna.masters().items()
                found = {n: p.grad for n, p in named if p.grad is not None}
                result["gradients"] = take(varuna, found)
            for optimizer in optimizers:
                optimizer.step(*take_closure(optimizer))
            varuna.zero_grad()
            if spec.forks:
                fork_child()
        self.phase = "end"
        result["weights"] = take(varuna, varuna.masters())
        result["buffers"] = take(varuna, dict(varuna.named_buffers())) if not varuna.replica else []
        self.phase = "evaluate"
        whole = varuna.gather_state_dict()
        if whole is not None:
            held = [(name, tensor.clone(), None) for name, tensor in whole.items()]
            result["whole"] = held
        varuna.zero_grad()
        varuna.eval()
        result["evaluated"] = [varuna.evaluate(batch)]
        result["shapes"] = {n: list(p.shape) for n, p in varuna.split.model.named_parameters()}
        varuna.close()
        leave_groups(before, varuna)
        return result


def answer(order: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    leg = Leg(order, rank)
    faulthandler.dump_traceback_later(DUMP_AFTER_S)
    try:
        defect = order.get("defect")
        with defects.put_back(defect) if defect else nullcontext():
            mine = leg.train()
        leg.phase = "judge"
        gathered: list[Any] = [mine]
        if world > 1:
            gathered = [None] * world
            dist.gather_object(mine, gathered if rank == 0 else None)
        if rank:
            return {"status": "done"}
        found = judge(leg.spec, leg.leg, gathered)
        status = "differs" if found.problem else "equal"
        status = "void" if found.problem.startswith("void") else status
        return {
            "status": status,
            "ratio": found.ratio,
            "where": found.where,
            "message": found.problem,
        }
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return {
            "status": "raised",
            "phase": leg.phase,
            "message": said,
            "trace": traceback.format_exc(),
        }
    finally:
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    out = os.open(folder / f"said.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(out, number)
    torch.set_num_threads(1)
    weight_grads.LARGE = 0  # layers as small as these go the way of large ones
    grads.BUCKET_BYTES = 300
    with Client(str(folder / "orders")) as orders:
        orders.send(rank)
        if world > 1:
            store = dist.FileStore(str(folder / "store"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        while True:
            try:
                order = orders.recv()
            except EOFError:
                break
            orders.send(answer(order, rank, world))
            gc.collect()  # groups, and their threads, go with the last Varuna
    os._exit(0)  # groups of a world that failed are not waited for


if __name__ == "__main__":
    main()
