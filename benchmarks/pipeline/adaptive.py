"""`schedule: auto` where costs turn out otherwise: beside the best order for the true costs.

    slow stage   one of eight stages takes 1.6 times its given cost, from the first step
    slow link    after 50 steps a message between stages 3 and 4 takes three units, not nothing

Ten steps after the change, rounds of three jobs in the same processes: the one that adapts, one
that was given the true costs and one that was given the wrong ones, both of which keep their order.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pipeline import jobs, network, staged, waits
from benchmarks.pipeline.ranks import run_ranks, serve
from benchmarks.pipeline.rounds import measure, run_rounds
from benchmarks.pipeline.table import Bound, Part, Table, ratios, show_seconds
from varuna_core.schedule.costs import Costs

NUM_STAGES = staged.NUM_STAGES
SLOW_STAGE = 3
SLOWER = 1.6
UNITS = 3
"""That a message takes on the slow link."""
STEPS_BEFORE, STEPS_AFTER = 50, 10
OF_BEST = 1.02
MOST_CHANGES = 2

ADAPTS, TRUE, GIVEN = "adapts", "fixed, given the true costs", "fixed, given the wrong ones"


def make_costs(is_true: bool, has_slow_link: bool) -> Costs:
    seconds = list(staged.EVEN)
    if is_true and not has_slow_link:
        seconds[SLOW_STAGE] *= SLOWER
    return staged.make_costs(seconds, UNITS * waits.UNIT_S if is_true and has_slow_link else 0.0)


def build(name: str, has_slow_link: bool, batch: torch.Tensor) -> jobs.Job:
    model = waits.WaitingModel(list(staged.EVEN))
    costs = make_costs(name == TRUE, has_slow_link)
    partition = "-".join(["1"] * NUM_STAGES)
    ours = jobs.Ours(schedule="auto")
    job = jobs.build_ours(
        ours, model, {"x": batch}, 1, NUM_STAGES, partition, costs, opportunistic=name == ADAPTS
    )
    job.name = name
    return job


def work(options: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """In a rank: one of the two cases."""
    torch.manual_seed(0)
    has_slow_link, rounds = options["has_slow_link"], options["rounds"]
    batch = torch.rand(options["microbatches"], options["message"])
    built = [build(name, has_slow_link, batch) for name in (ADAPTS, TRUE, GIVEN)]
    adapting = built[0]
    changed: list[int] = []
    adapt = adapting.varuna.plans.adapt

    def note(*args: Any) -> Any:
        said = adapt(*args)
        if said is not None:
            changed.append(adapting.varuna.iteration + 1)
        return said

    adapting.varuna.plans.adapt = note

    def step() -> None:
        dist.barrier()
        adapting.time_step()
        adapting.clear()

    if has_slow_link:
        if not rank % (NUM_STAGES // 2):
            network.set_rate(None)
        for _ in range(STEPS_BEFORE):
            step()
        if not rank % (NUM_STAGES // 2):
            network.set_rate(staged.RATE_MBIT)
    elif rank == SLOW_STAGE:
        waits.jitter.factor = SLOWER
    for _ in range(STEPS_AFTER):
        step()
    times = measure([adapting], world)[ADAPTS]["engine"]
    run_rounds(built, rounds, rank, same_model=False)
    measured = measure(built, world)
    for result in measured.values():
        result.pop("traces", None)
    for job in built:
        job.close()
    return {"measured": measured, "first": times, "changed": changed}


def run(options: dict[str, Any]) -> Part:
    """In the parent: both cases."""
    part = Part(title="Costs that turn out otherwise: eight stages, eight processes, timed waits")
    part.notes.append(
        f"{__doc__.split(chr(10), 1)[0]} The engine's part of a step; waits of "
        f"{waits.UNIT_S * 1e3:g} ms. Steps are counted from the start of the adapting one, whose "
        "rounds follow them."
    )
    microbatches = max(options["microbatches"])
    common = {**options, "microbatches": microbatches, "message": staged.SMALL_MESSAGE}
    stage = run_ranks(__name__, NUM_STAGES, {**common, "has_slow_link": False})
    _tabulate(part, f"a stage {SLOWER} times slower, m={microbatches}", stage, 0)
    obstacle = network.find_obstacle()
    if obstacle is not None:
        part.notes.append(f"Slow link: not measured: {obstacle}.")
        return part
    message = UNITS * staged.MESSAGE
    with network.slow_link(staged.RATE_MBIT) as sides:
        link = run_ranks(
            __name__,
            NUM_STAGES,
            {**common, "has_slow_link": True, "message": message},
            prefixes=[sides[stage > staged.SLOW_LINK] for stage in range(NUM_STAGES)],
            environment={"GLOO_SOCKET_IFNAME": "eth0"},
        )
    _tabulate(part, f"a link slow from step {STEPS_BEFORE + 1} on, m={microbatches}", link,
              STEPS_BEFORE)  # fmt: skip
    return part


def _tabulate(part: Part, case: str, result: dict[str, Any], before: int) -> None:
    times = {name: each["engine"] for name, each in result["measured"].items()}
    table = Table(title=f"{case}, over {TRUE}", columns=("seconds",))
    for name, seconds in times.items():
        table.add(name, ratios(seconds, times[TRUE]), show_seconds(seconds))
    part.tables.append(table)
    changed, first = result["changed"], result["first"]
    shown = " ".join(f"{seconds:.2f}" for seconds in first[max(0, before - 2) :])
    part.notes.append(
        f"{case}: another order from step {', '.join(map(str, changed)) or 'none'} on; seconds of "
        f"steps {max(0, before - 2) + 1} to {len(first)}: {shown}."
    )
    value = statistics.median(ratios(times[ADAPTS], times[TRUE]))
    part.bounds.append(Bound(what=f"{case}: {ADAPTS} over {TRUE}", value=value, limit=OF_BEST))
    late = sum(step > before + STEPS_AFTER for step in changed)
    for what, value, limit in (
        ("changes of the order", len(changed), MOST_CHANGES),
        (f"of these later than {STEPS_AFTER} steps after", late, 0),
    ):
        part.bounds.append(Bound(what=f"{case}: {what}", value=value, limit=limit, digits=0))


if __name__ == "__main__":
    serve(work)
