"""Time of a morph beside torchrun's elastic restart and beside a stop and a new submit.

    python -m benchmarks.morph [--rounds 3] [--large] [--write]

Four nodes of this machine, a rank each. In a round a node is killed once in ours and once under
torchrun, whose workers run a plain DDP script with the same model; then a node of ours is asked to
leave, and the same is done by hand. The pause goes until the next completed step is seen.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import RESULTS
from benchmarks.morph.goodput import Costs, compare_goodput
from benchmarks.morph.ours import LARGE, TINY, Ours, Size, count_cpu_s, halted
from benchmarks.morph.peer import Peer
from varuna_core.records.record import MORPH_PARTS, read_morph_parts

RESULT = RESULTS / "morph.md"
NODES = 4
SILENCE_S = 2
"""Without a sign of life a node is lost: ours (morph/node_observer.py); torchrun's set likewise."""
WINDOW_S, PAIRS = 5.0, 6


class Round(NamedTuple):
    """Seconds of one round."""

    ours: float
    peer: float
    parts: dict[str, float]
    leave: float
    by_hand: float


def measure_ours(folder: Path, size: Size) -> tuple[float, dict[str, float], float]:
    """The pause after a loss, its parts as the event has them, and that of a node that is asked."""
    ours = Ours(folder, size, NODES, morph={"min_nodes": 1})
    try:
        ours.wait_for_save(size.save_every)
        ours.wait_for_standby(NODES)
        lost = ours.kill_node(NODES - 1)
        pause = ours.wait_for_steps(1) - lost
        event = ours.wait_for_morph(1)
        ours.wait_for_standby(NODES - 1)
        asked = ours.leave(NODES - 2)
        leave = ours.wait_for_steps(2) - asked
    finally:
        ours.end()
    return pause, read_morph_parts(event), leave


def measure_peer(folder: Path, size: Size) -> float:
    peer = Peer(folder, size, NODES, silence_s=SILENCE_S)
    try:
        peer.wait_for_save(size.save_every)
        lost = peer.kill_node(NODES - 1)
        return peer.wait_for_new_step() - lost
    except TimeoutError as error:
        print(f"torchrun: {error}\n{peer.said}", flush=True)
        return float("inf")
    finally:
        peer.end()


def measure_by_hand(folder: Path, size: Size) -> float:
    """`vjob cancel`, which saves, and as soon as the job has ended a submit with a node less."""
    first = Ours(folder, size, NODES - 1, morph=None)
    try:
        first.wait_for_save(size.save_every)
        asked = time.time()
        first.save_and_leave()
    except BaseException:
        first.end()
        raise
    second = Ours(folder, size, NODES - 2, morph=None, name="again")
    try:
        return second.wait_for_steps(0) - asked
    finally:
        second.end()


class Steady(NamedTuple):
    """A training that nothing happens to."""

    ratios: list[float]
    """A step beside all that morphing adds, over one while that is stopped; of each pair."""
    cpu_share: float
    """Share of one processor that the manager, the nodes' `stay` and waiting ranks take."""
    warm_s: float
    """From the first step until the ranks of the next attempt wait."""
    waiting_mb: float
    """Memory of a rank that waits."""


def measure_steady(folder: Path, size: Size) -> Steady:
    """In one run, whose manager, `stay` and ranks that wait are stopped in every other window:
    shorter than any silence that means something."""
    ours = Ours(folder, size, NODES, morph={"min_nodes": 1})
    try:
        begun = ours.wait_for_steps(0)
        ready = ours.wait_for_standby(NODES)
        own, ratios, share = ours.list_extra(), [], 0.0
        for _ in range(PAIRS):
            used = count_cpu_s(own)
            with_ms = ours.measure_step_ms(WINDOW_S)
            share += (count_cpu_s(own) - used) / WINDOW_S / PAIRS
            with halted(own):
                ratios.append(with_ms / ours.measure_step_ms(WINDOW_S))
        return Steady(ratios, share, ready - begun, ours.measure_waiting_mb())
    finally:
        ours.end()


def measure_round(folder: Path, number: int, size: Size) -> Round:
    """One of each, in another order each time."""
    peer = by_hand = pause = leave = 0.0
    parts: dict[str, float] = {}
    for kind in ("ours", "peer", "by hand")[:: 1 if number % 2 == 0 else -1]:
        path = folder / f"{number}-{kind.replace(' ', '-')}"
        if kind == "ours":
            pause, parts, leave = measure_ours(path, size)
        elif kind == "peer":
            peer = measure_peer(path, size)
        else:
            by_hand = measure_by_hand(path, size)
    found = Round(pause, peer, parts, leave, by_hand)
    print(f"{size.name} {number}: {found}", flush=True)
    return found


def show(figures: Sequence[float], digits: int = 1) -> str:
    low, middle, high = min(figures), statistics.median(figures), max(figures)
    return f"{low:.{digits}f} | {middle:.{digits}f} | {high:.{digits}f}"


def render_rounds(size: Size, rounds: Sequence[Round]) -> str:
    crash = statistics.median(r.ours for r in rounds) / statistics.median(r.peer for r in rounds)
    asked = statistics.median(r.leave for r in rounds) / statistics.median(
        r.by_hand for r in rounds
    )
    parts = "\n".join(
        f"| of ours: {name[:-2].replace('_', ' ')} | | {show([r.parts[name] for r in rounds], 2)} |"
        for name in MORPH_PARTS
    )
    return f"""\
The {size.name} model, rounds: {len(rounds)}, seconds to the next completed step:

| | bound | least | median | most |
|---|---|---|---|---|
| a node is lost, ours | | {show([r.ours for r in rounds])} |
| a node is lost, torchrun and DCP | | {show([r.peer for r in rounds])} |
| ours / torchrun | 0.25 | {show([r.ours / r.peer for r in rounds], 2)} |
| a node is asked to leave, ours | | {show([r.leave for r in rounds])} |
| `vjob cancel`, and a submit with a node less | | {show([r.by_hand for r in rounds])} |
| ours / by hand | 0.5 | {show([r.leave / r.by_hand for r in rounds], 2)} |
{parts}

Median over median: {crash:.2f} where a node is lost, {asked:.2f} where one is asked to leave.
"""


def render_steady(steady: Steady) -> str:
    share = 100 * steady.cpu_share / NODES
    return f"""\
While nothing happens, {PAIRS} pairs of windows of {WINDOW_S:g} s in one run of the tiny model, in
one of each pair all that morphing adds is stopped:

| | bound | least | median | most |
|---|---|---|---|---|
| a step with / a step without | 1.01 | {show(steady.ratios, 3)} |

Once all ranks wait, `stay`, what waits and the manager take {share:.2f} % of a processor a node
(bound 1). They waited {steady.warm_s:.0f} s after the first step, the processors being the
training's, and take {steady.waiting_mb:.0f} MiB each.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="also a model of 99 M parameters")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rounds = [measure_round(folder / "tiny", n, TINY) for n in range(options.rounds)]
        texts = [render_rounds(TINY, rounds)]
        texts.append(render_steady(measure_steady(folder / "steady", TINY)))
        print(texts[-1], flush=True)
        if options.large:
            large = [measure_round(folder / "large", n, LARGE) for n in range(2)]
            texts.append(render_rounds(LARGE, large))
        costs = Costs(
            lost_s=statistics.median(r.ours for r in rounds),
            asked_s=statistics.median(r.leave for r in rounds),
            restart_s=statistics.median(r.by_hand for r in rounds),
        )
        texts.append(compare_goodput(costs))
    words = f"--rounds {options.rounds}{' --large' * options.large}"
    text = f"""\
# How long a morph takes

Made by `python -m benchmarks.morph {words} --write`. torch {torch.__version__}, Python
{platform.python_version()}, {platform.machine()}; {NODES} nodes of one machine with a rank each,
one thread a rank; {load:.1f} processes ran on its {os.cpu_count()} cores before.

torchrun's elastic restart runs with last_call_timeout=1, signs of life each second and
{SILENCE_S} s of silence for a loss, as ours; a store for each generation; its script is plain DDP,
saved and loaded by torch.distributed.checkpoint.

{chr(10).join(texts)}"""
    print(text)
    if options.write:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
