"""Torch's own schedule runtime as an independent oracle: what we make, it accepts and trains with.

Only schedules that torch can spell: no `f`, no `R`.
"""

from __future__ import annotations

import importlib.util
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.start import collect, start_ranks
from tests.varuna_core.schedule.csv_text import parse_csv, render_csv
from varuna_core.schedule.actions import Schedule
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs, build_even_costs
from varuna_core.schedule.registry import build_schedule
from varuna_core.schedule.verify import verify

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)

UNEVEN = [
    ("gpipe", 3, 5, 1),
    ("1f1b", 4, 9, 1),
    ("zero_bubble", 4, 9, 1),
    ("interleaved", 3, 7, 2),
    ("zbv", 3, 8, 2),
]


@pytest.fixture(scope="module")
def torch_schedules() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a numpy that is not there
        from torch.distributed.pipelining import schedules
    yield schedules


@pytest.mark.parametrize(("name", "p", "m", "per_rank"), UNEVEN)
def test_torch_accepts_and_steps_through(
    torch_schedules: Any, name: str, p: int, m: int, per_rank: int
) -> None:
    stages = p * per_rank
    costs = Costs(
        forward=tuple(1.0 + s % 3 for s in range(stages)),
        input_grad=tuple(1.0 + s % 2 for s in range(stages)),
        weight_grad=(2.0,) * stages,
    )
    schedule = build_schedule(name, p, m, stages_per_rank=per_rank, costs=costs)
    orders = {
        rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(render_csv(schedule).splitlines())
    }
    placement = torch_schedules._validate_schedule(orders, p, stages, m)
    assert placement == dict(enumerate(schedule.placement))
    lowered = torch_schedules._add_send_recv(orders, placement.__getitem__, stages)
    torch_schedules._simulate_comms_compute(lowered, placement.__getitem__, stages)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 8), (4, 4), (8, 16), (8, 32)])
def test_zbv_is_never_behind_torchs(torch_schedules: Any, p: int, m: int) -> None:
    """Torch's, read by our parser, passes our verification; from 2p - 1 on both are the optimum."""
    stub = type("Stub", (), {"pp_group_size": p, "_n_microbatches": m, "num_stages": 2 * p})()
    order = torch_schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations
    csv = "\n".join(",".join(str(a or "") for a in order(stub, rank)) for rank in range(p))
    theirs = parse_csv(csv)
    assert max(verify(theirs).graphs) <= 2 * p
    costs = build_even_costs(2 * p)
    ours = simulate(build_schedule("zbv", p, m, stages_per_rank=2), costs).makespan
    assert ours <= simulate(theirs, costs).makespan
    if m >= 2 * p - 1:
        assert ours == simulate(theirs, costs).makespan == 6 * m + p - 1


# One rank of two: trains one step of four linear layers by a CSV, compares with the plain model.
PROGRAM = textwrap.dedent(
    """
    import os, sys, warnings
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    folder, rank = os.path.dirname(__file__), int(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)

    def build():
        torch.manual_seed(0)
        return [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)]

    def loss(output, target):
        return torch.nn.functional.mse_loss(output, target)

    for line in open(f"{folder}/list").read().splitlines():
        name, num_stages, m, owners = line.split()
        num_stages, m = int(num_stages), int(m)
        x, y = torch.randn(2 * m, 8), torch.randn(2 * m, 8)
        dist.broadcast(x, 0), dist.broadcast(y, 0)
        plain, layers = build(), build()
        loss(torch.nn.Sequential(*plain)(x), y).backward()
        size = 4 // num_stages
        mine = [s for s in range(num_stages) if int(owners[s]) == rank]
        stages = [
            PipelineStage(
                torch.nn.Sequential(*layers[s * size:(s + 1) * size]), s, num_stages,
                torch.device("cpu"),
            )
            for s in mine
        ]
        for stage in stages:
            stage.stage_index_to_group_rank = {s: int(o) for s, o in enumerate(owners)}
        runtime = _PipelineScheduleRuntime(stages, m, loss_fn=loss)
        runtime._load_csv(f"{folder}/{name}.csv")
        arguments = (x,) if 0 in mine else ()
        runtime.step(*arguments, **({"target": y} if num_stages - 1 in mine else {}))
        for s in mine:
            for layer in range(s * size, (s + 1) * size):
                for ours, theirs in zip(layers[layer].parameters(), plain[layer].parameters()):
                    torch.testing.assert_close(ours.grad, theirs.grad)
        print(name, "equal")
    dist.destroy_process_group()
    """
)


def test_torch_trains_by_our_csv_to_the_plain_models_gradients(tmp_path: Path) -> None:
    wanted: list[Schedule] = [
        build_schedule("gpipe", 2, 4),
        build_schedule("1f1b", 2, 5),
        build_schedule("zero_bubble", 2, 5),
        build_schedule("interleaved", 2, 5, stages_per_rank=2),
        build_schedule("zbv", 2, 5, stages_per_rank=2),
    ]
    lines = []
    for schedule in wanted:
        (tmp_path / f"{schedule.name}.csv").write_text(render_csv(schedule))
        owners = "".join(map(str, schedule.placement))
        lines.append(f"{schedule.name} {schedule.num_stages} {schedule.num_microbatches} {owners}")
    (tmp_path / "list").write_text("\n".join(lines))
    (tmp_path / "rank.py").write_text(PROGRAM)
    with start_ranks(str(tmp_path / "rank.py"), 2) as ranks:
        ended = collect(ranks, 120)
    for code, output in ended:
        assert code == 0, output
        assert [line for line in output.splitlines() if line.endswith(" equal")] == [
            f"{schedule.name} equal" for schedule in wanted
        ]
