"""A signal to any rank at any step: all save, leave with 0, and the curve goes on elsewhere."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ranks.signal_rank import EVERY, train
from tests.ranks.start import Rank, collect, start_ranks
from varuna_core.checkpoint.store.store import list_complete
from varuna_core.runtime.comm.agreement import DIGIT, decode, encode
from varuna_core.runtime.saving.preemption import CALLS, SignalCalls

PROGRAM, STEPS = "tests.ranks.signal_rank", 40


def read_until(rank: Rank, step: int) -> str:
    """What it says, to the line of this step."""
    said = ""
    while line := rank.read_line():
        said += line
        if line.startswith(f"step {step} "):
            return said
    raise AssertionError(said)


def interrupt(
    folder: Path, how: str, stage_map: str, number: int, who: list[int], steps: int
) -> dict[int, float]:
    """Train so many steps and send the signal to these ranks; the losses until all have left."""
    world_size = len(re.findall(r"\d+", stage_map))
    words = f"{how} {stage_map} {STEPS}"
    with start_ranks(PROGRAM, world_size, str(folder), words) as ranks:
        first = int(re.search(r"\d+|$", str(newest(folder)))[0] or 0)  # type: ignore[index]
        said = read_until(ranks[0], first + steps)
        for rank in who:
            ranks[rank].send_signal(number)
        done = collect(ranks)
    assert [code for code, _ in done] == [0] * world_size, "\n".join(out for _, out in done)
    return read_losses(said + done[0][1])


def newest(folder: Path) -> int:
    complete = list_complete(folder / "ckpt") if (folder / "ckpt").exists() else []
    return complete[-1].iteration if complete else 0


def read_losses(said: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) (\S+)$", said, re.M)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return train(folder, "none", "0;", STEPS, say=lambda *words, **options: None)


def test_the_curve_is_the_undisturbed_one_over_signals_and_layouts(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    """All signals, to one rank or to all, at seeded steps; each start in another layout."""
    draw = random.Random(7)
    curve: dict[int, float] = {}
    plan = [
        ("plain", "0,1;2,3;", signal.SIGUSR1, [draw.randrange(4)]),
        ("handler", "0,1;", signal.SIGUSR2, [draw.randrange(2)]),
        ("plain", "0;1;", signal.SIGTERM, [0, 1]),
    ]
    for how, stage_map, number, who in plan:
        begun = newest(tmp_path)
        losses = interrupt(tmp_path, how, stage_map, number, who, steps=draw.randrange(1, 6))
        assert min(losses) == begun
        curve |= losses
        left = newest(tmp_path)
        # In whole updates, soon after the signal, without a step that was taken in vain.
        assert left == max(losses) + 1 and left % EVERY == 0
        marker = tmp_path / "ckpt" / "left.json"
        assert marker.exists() == (how == "plain")
        if how == "plain":
            told = json.loads(marker.read_text())
            assert told["iteration"] == left and told["signal"] == number.name
    rest = train(tmp_path, "none", "0;", STEPS, say=lambda *words, **options: None)
    assert not (tmp_path / "ckpt" / "left.json").exists()
    curve |= dict(enumerate(rest, newest(tmp_path)))
    ours = torch.tensor([curve[step] for step in range(STEPS)])
    torch.testing.assert_close(ours, torch.tensor(undisturbed), rtol=2e-4, atol=0)


@pytest.mark.parametrize("how", ["plain", "handler"])
def test_a_signal_that_comes_while_a_rank_leaves_does_not_end_it(tmp_path: Path, how: str) -> None:
    """Nodes hear of a call seconds apart: ranks of the one have left when the other's are told."""
    with start_ranks(PROGRAM, 2, str(tmp_path), f"{how} 0;1; {STEPS}") as ranks:
        read_until(ranks[0], 1)
        while any(rank.poll() is None for rank in ranks):
            for rank in ranks:
                rank.send_signal(signal.SIGUSR1)
            time.sleep(0.002)
        done = collect(ranks)
    assert [code for code, _ in done] == [0, 0], "\n".join(out for _, out in done)
    assert newest(tmp_path) >= 2


def test_a_rank_killed_in_a_save_leaves_the_one_before(tmp_path: Path) -> None:
    with start_ranks(PROGRAM, 2, str(tmp_path), f"killed 0;1; {STEPS}") as ranks:
        (code, output), (killed, _) = collect(ranks)
    assert killed == -signal.SIGKILL and code == 1
    assert "RankFailed: rank 0 (stage 0, replica 0) stops: " in output, output
    assert "misses rank 1" in output
    assert [found.iteration for found in list_complete(tmp_path / "ckpt")] == [0]
    said: list[str] = []
    train(tmp_path, "none", "0;", 2, say=lambda word, **options: said.append(word))
    assert said[0] == "loaded 0"


# The parts.


@pytest.fixture
def calls() -> Iterator[SignalCalls]:
    before = [signal.getsignal(number) for number in CALLS]
    made = SignalCalls({})
    yield made
    made.close()
    assert [signal.getsignal(number) for number in CALLS] == before


def test_the_first_signal_counts_until_it_is_answered(calls: SignalCalls) -> None:
    calls.listen()
    for number in (signal.SIGUSR2, signal.SIGTERM):
        os.kill(os.getpid(), number)
    assert calls.heard == signal.SIGUSR2
    assert calls.answer(signal.SIGTERM) is None and calls.heard == signal.SIGUSR2
    assert calls.answer(signal.SIGUSR2) is None and not calls.heard


def test_a_users_handler_waits_for_the_answer(calls: SignalCalls) -> None:
    got = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        calls.claim_handlers()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not got and calls.heard == signal.SIGUSR1
        handler = calls.answer(signal.SIGUSR1)
        assert handler is not None
        handler(signal.SIGUSR1, None)
        assert got == [signal.SIGUSR1]
        calls.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_nobody_handles_stays_as_it_is(calls: SignalCalls) -> None:
    calls.claim_handlers()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_varuna_knows_the_handler_behind_the_first_ones(calls: SignalCalls) -> None:
    before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    mine = signal.getsignal(signal.SIGUSR2)
    try:
        other = SignalCalls({})
        other.claim_handlers()
        calls.claim_handlers()
        assert calls.own[signal.SIGUSR2] is mine
        other.close()  # not its own any more
        os.kill(os.getpid(), signal.SIGUSR2)
        assert calls.heard == signal.SIGUSR2
        calls.close()
        assert signal.getsignal(signal.SIGUSR2) is mine
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_nccl_keeps_the_signal_that_it_was_given() -> None:
    calls = SignalCalls({"NCCL_PROXY_DUMP_SIGNAL": str(int(signal.SIGUSR1))})
    before = signal.getsignal(signal.SIGUSR1)
    calls.listen()
    try:
        assert signal.getsignal(signal.SIGUSR1) == before
        assert signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL
    finally:
        calls.close()


@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGUSR1, 0)]
)
def test_a_forked_child_ends_by_sigterm_alone(
    calls: SignalCalls, number: signal.Signals, ends: int
) -> None:
    calls.listen()
    child = os.fork()
    if not child:
        os.kill(os.getpid(), number)
        os._exit(bool(calls.heard))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ends
    assert not calls.heard


def test_sums_of_words_tell_the_last_signal_that_any_rank_heard() -> None:
    draw = random.Random(1)
    for _ in range(300):
        size = draw.choice([1, 2, 9, DIGIT - 1])
        heard = [draw.choice([0, *CALLS]) for _ in range(min(size, 9))]
        heard += [draw.choice([0, *CALLS])] * (size - len(heard))
        total = sum(encode(word, CALLS) for word in heard)
        assert float(total) == total
        expected = max((CALLS.index(w) for w in heard if w), default=-1)
        assert decode(total, CALLS) == (CALLS[expected] if expected >= 0 else 0)
