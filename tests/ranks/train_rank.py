"""One rank of a training run, for tests: `train_rank.py <folder> <rank> <world size>`.

The folder holds cases.json, a list of what to train; a file a case and rank comes back.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import small as models
from tests.ranks.device import CPU, choose_device
from tests.ranks.groups import leave_groups
from tests.ranks.rerun import instead_of_cuda_graphs
from tests.ranks.start import DEADLINE_S
from tests.varuna_core.schedule.csv_text import render_csv
from varuna_core import TokenMean, Varuna
from varuna_core.runtime.engine import adapting, weight_grads
from varuna_core.schedule.measured import MEASURED

RATE, MOMENTUM, SEED = 0.05, 0.9, 7
MEANS = ("PaddedGpt", "TiedPaddedGpt", "TwoMeansGpt", "ToldGpt", "SkippingGpt")
"""Models whose loss is a mean over tokens."""
FILE_LIMITS = "TESTS_FILE_LIMITS"
"""Variable: by rank, how many bytes a file of it may have, as JSON."""


@dataclass(kw_only=True)
class Case:
    """What to train, and in which layout."""

    name: str
    stage_map: str
    model: str = "Gpt"
    options: dict[str, Any] = field(default_factory=dict)
    partition: str | None = None
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    recompute: str = "none"
    memory_limit: float | None = None
    opportunistic: bool = True
    batches: list[int] = field(default_factory=lambda: [8, 8, 8])
    """The size of each step's global batch."""

    lengths: list[int] = field(default_factory=list)
    """The length of the samples of each step, if not the same."""

    chunk_size: int = 2
    clip: float | None = None
    shared_weights: list[list[str]] | None = None
    outputs: list[Any] = field(default_factory=list)
    """Parts of the model's outputs that each step is asked for."""
    hooked: bool = False
    """The model's parameters have hooks that change their gradients."""

    compile: bool | str = False
    cuda_graphs: bool = False
    told: list[list[float]] = field(default_factory=list)
    """Seconds of a message between two stages that ranks are told they have measured, each time
    they ask, the last ones again and again; of each stage's actions one. None: as they measure."""


def build_model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(models, case.model)(**case.options)
    for parameter in model.parameters() if case.hooked else ():
        parameter.register_hook(cut_off)
    return model


def cut_off(gradient: Tensor) -> Tensor:
    """Gives of a sum something else than of its parts."""
    return gradient.clamp(-0.01, 0.01)


def make_batch(case: Case, step: int) -> dict[str, Any]:
    """The global batch of a step."""
    length = case.lengths[step] if case.lengths else models.LENGTH
    size = case.batches[step]
    if case.model == "ConvNet":
        return models.make_images(size)
    if case.model == "Bert":
        return models.make_bert_inputs(size, length)
    if case.model in MEANS:
        return models.make_padded_inputs(size, length, seed=step)
    return models.make_inputs(size, length, seed=step)


def read_loss(output: Any) -> Tensor:
    """What a plain training makes of it."""
    if isinstance(output, TokenMean):
        return output.mean()
    if isinstance(output, dict) and isinstance(output["loss"], TokenMean):
        return output["loss"].mean()
    if isinstance(output, dict):
        total, count = output["loss"]
        return torch.as_tensor(total / count)
    loss = output[1] if isinstance(output, tuple) else output
    assert isinstance(loss, Tensor)
    return loss


def cut_batch(inputs: dict[str, Any], size: int, held: range) -> dict[str, Any]:
    return {
        name: value[held.start : held.stop]
        if isinstance(value, Tensor) and value.shape[:1] == (size,)
        else value
        for name, value in inputs.items()
    }


@contextmanager
def telling(case: Case) -> Iterator[None]:
    """What the schedule follows is what the case tells, not what was measured."""
    if not case.told:
        yield
        return
    told = itertools.chain(case.told, itertools.repeat(case.told[-1]))

    def agree(times: Any, links: Any) -> Any:
        hops = next(told)
        stages = len(hops) + 1
        each = {kind: [0.0] * stages for kind in MEASURED}
        return each | {"F": [1.0] * stages, "B": [2.0] * stages}, hops

    with mock.patch.object(adapting, "agree_on_times", agree):
        yield


def recording(case: Case) -> AbstractContextManager[None]:
    """CUDA graphs on a GPU, elsewhere what stands for them."""
    stands_in = case.cuda_graphs and choose_device() == CPU
    return instead_of_cuda_graphs() if stands_in else nullcontext()


def count_recorded(varuna: Varuna) -> int:
    return 0 if varuna.engine.passes.graphs is None else varuna.engine.passes.graphs.num_made


def train(case: Case, rank: int) -> dict[str, Any]:
    model = build_model(case)
    if rank:  # ranks that start from other weights are put right
        with torch.no_grad():
            next(model.parameters()).add_(rank if "," in case.stage_map else 0)
    varuna = Varuna(
        model,
        case.stage_map,
        make_batch(case, 0),
        max(case.batches),
        case.chunk_size,
        device=choose_device(),
        shared_weights=case.shared_weights,
        partition=case.partition,
        schedule=case.schedule,
        stages_per_rank=case.stages_per_rank,
        recompute=case.recompute,  # type: ignore[arg-type]  # text from a file
        memory_limit=case.memory_limit,
        opportunistic=case.opportunistic,
        seed=SEED,
        compile=case.compile,
        cuda_graphs=case.cuda_graphs,
    )
    optimizer = torch.optim.SGD(varuna.parameters(), lr=RATE, momentum=MOMENTUM)
    varuna.set_optimizer(optimizer)
    result: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}, "outputs": []}
    result["orders"] = []
    result["samples"] = (varuna.samples.start, varuna.samples.stop)
    for step, size in enumerate(case.batches):
        batch = make_batch(case, step)
        held = range(
            min(varuna.samples.start, size),
            min(varuna.samples.stop, size),
        )
        own = cut_batch(batch, size, held)
        if case.outputs:
            loss, overflow, told = varuna.step(own, case.clip, outputs=case.outputs)
            result["outputs"].append(told)
        else:
            loss, overflow = varuna.step(own, case.clip)
        assert not overflow
        result["losses"].append(loss)
        result["orders"].append(render_csv(varuna.plans.find(varuna.plans.usual).schedule))
        result["norms"].append(varuna.last_grad_norm)
        if step == 0:
            result["gradients"] = {
                name: parameter.grad.clone()
                for name, parameter in varuna.part.parameters().items()
                if parameter.grad is not None
            }
        optimizer.step()
        varuna.zero_grad()
    varuna.eval()
    size = case.batches[0]
    held = range(min(varuna.samples.start, size), min(varuna.samples.stop, size))
    result["evaluated"] = varuna.evaluate(cut_batch(make_batch(case, 0), size, held))
    result["state"] = varuna.state_dict()
    result["place"] = varuna.place
    result["wires"] = sorted(
        {type(getattr(sender, "wire", sender)).__name__ for sender in varuna.links.senders}
    )
    result["recorded"] = count_recorded(varuna)
    result["costs"] = None if varuna.adapting is None else varuna.adapting.known.costs.as_json()
    result["schedule"] = [str(action) for action in varuna._plan(4)]
    varuna.close()
    return result


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    torch.set_num_threads(1)
    limit = json.loads(os.environ.get(FILE_LIMITS, "{}")).get(str(rank))
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    weight_grads.LARGE = 0  # layers as small as the tests' go the way of large ones
    if world > 1:
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for fields in json.loads((folder / "cases.json").read_text()):
        case = Case(**fields)
        with leave_groups(), telling(case), recording(case):
            result = train(case, rank)
        torch.save(result, folder / f"{case.name}.{rank}.pt")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def write_cases(folder: Path, cases: list[Case]) -> None:
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
