"""Logs without training in short form: what a program prints at each count, and how many."""

from __future__ import annotations

import math
from collections.abc import Callable

from benchmarks.formats.log import Log, render_tqdm
from benchmarks.formats.model import Negative

Printer = Callable[[Log, int], None]


def counts(
    last: int, every: int = 1, first: int = 1, step_s: float = 0.4, head: str = ""
) -> Callable[[Printer], Negative]:
    """Make a Negative of a function that prints one count."""

    def make_negative(show: Printer) -> Negative:
        def write(log: Log) -> None:
            if head:
                log.out(head)
            for at in log.steps(last, every, first, step_s):
                show(log, at)

        return Negative(name=show.__name__, write=write)

    return make_negative


@counts(60, head="A new study created in memory with name: lr_and_epochs")
def optuna_trials(log: Log, at: int) -> None:
    """Trials of a search, with the names of what a training has."""
    log.err(
        f"[I {log.stamp()}] Trial {at} finished with value: {log.near(0.9)} and parameters: "
        f"{{'lr': {log.near(0.01)}, 'epochs': {log.pick(3, 30)}, 'batch_size': 64}}. "
        f"Best is trial 3 with value: 0.9312."
    )


@counts(60, head="Fitting 5 folds for each of 12 candidates, totalling 60 fits")
def grid_search(log: Log, at: int) -> None:
    log.out(f"[CV {at % 5 + 1}/5] END ....depth={at // 5};, score={log.near(0.8):.3f} "
            f"total time={log.near(0.9):5.1f}s")  # fmt: skip


@counts(60_000, 1000, 1000, 0.0005, head='#"Step","Potential Energy (kJ/mole)","Temperature (K)"')
def openmm(log: Log, at: int) -> None:
    """Molecular dynamics: a table with steps."""
    log.out(f"{at},{-log.near(412012.0)},{log.near(300.0)}")


@counts(30, head="     Self-consistent Calculation")
def quantum_espresso(log: Log, at: int) -> None:
    """Iterations of a solver that converges."""
    log.out(f"\n     iteration #{at:3d}     ecut=    60.00 Ry     beta= 0.70\n"
            f"     Davidson diagonalization\n     cpu time {log.now_s:10.1f} secs\n\n     total "
            f"energy              = {-log.near(31.0):16.8f} Ry\n     estimated scf accuracy    <   "
            f"{math.exp(-at / 2):12.8f} Ry")  # fmt: skip


@counts(2000, 100, 100, 0.02, head="Gradient evaluation took 0.00021 seconds")
def stan_chains(log: Log, at: int) -> None:
    """Samples of four chains."""
    for chain in range(1, 5):
        name = "Warmup" if at <= 1000 else "Sampling"
        log.out(f"Chain {chain} Iteration: {at:4d} / 2000 [{at // 20:3d}%]  ({name})")


@counts(120, head="index created!\nRunning per image evaluation...")
def coco_eval(log: Log, at: int) -> None:
    """A bar of a detector's evaluation."""
    name = (
        "                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95):"
    )
    log.bar(render_tqdm(at, 120, at * 0.4, name))


@counts(313)
def sentence_encode(log: Log, at: int) -> None:
    log.bar(render_tqdm(at, 313, at * 0.4, "Batches"))


@counts(160, head="perplexity: calculating perplexity over 655 chunks, n_ctx=512, batch_size=2048")
def llama_perplexity(log: Log, at: int) -> None:
    """A running perplexity behind the number of each chunk."""
    log.out(f"[{at}]{log.near(6.0):.4f},")


@counts(40, head="processing 41000 samples for training into shards of 1000")
def webdataset(log: Log, at: int) -> None:
    log.out(f"# writing train-{at:06d}.tar {at * 1000 % 7000} {at * 0.3:.1f} GB {at * 1000}")


@counts(80)
def uvicorn(log: Log, at: int) -> None:
    log.err(
        f'INFO:     10.0.0.{at % 9}:{40000 + at} - "POST /train/status?step={at} HTTP/1.1" 200 OK'
    )


@counts(200, 10, 10, 0.05, head="Benchmarking the training data loader with 8 workers")
def loader_benchmark(log: Log, at: int) -> None:
    """Batches that are read and thrown away."""
    log.out(
        f"batch {at}/200: {log.near(0.05):.4f} s, {log.near(5100.0):.1f} samples/s, no model is run"
    )


@counts(24, head="T/V                N    NB     P     Q               Time                 Gflops")
def linpack(log: Log, at: int) -> None:
    """Factorizations whose number grows in a table."""
    log.out(f"Column={at * 4000:012d} Fraction={at / 24:5.3f} Gflops={log.near(41000.0):.3e}")


@counts(96)
def mlperf_loadgen(log: Log, at: int) -> None:
    log.out(f"Processed {at * 256} of 24576 samples, {log.near(2100.0):.2f} samples/s")


@counts(3000, 100, 0, 0.02, head="Decoding with the model of epoch 30")
def speech_decode(log: Log, at: int) -> None:
    """Batches that a trained model decodes."""
    log.err(
        f"{log.stamp()} INFO [decode.py:412] batch {at}/?, cuts processed until now is {at * 12}"
    )


@counts(500)
def cache_latents(log: Log, at: int) -> None:
    """Images that are encoded before a training."""
    log.bar(render_tqdm(at, 500, at * 0.4, more="caching latents"))


@counts(60, head="Compare 60s")
def gpu_burn(log: Log, at: int) -> None:
    log.out(
        f"{at / 0.6:.1f}%  proc'd: {at * 31} (41012 Gflop/s)  errors: 0  temps: {log.pick(50, 80)}"
    )


@counts(400, 10, 10, 0.1)
def evaluate_steps(log: Log, at: int) -> None:
    """An evaluation that names a loss at each of its steps."""
    log.out(f"Eval step {at}/400: loss {log.near(2.3):.4f}, accuracy {log.near(0.7):.4f}")
