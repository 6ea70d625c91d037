"""Cost of a checkpoint beside moving the same bytes, and beside torch.distributed.checkpoint.

    python -m benchmarks.runtime.checkpoint [--folder .] [--rounds 9] [--millions 20] [--write]

AdamW's state of a model of equal layers in fp32. Each ratio is of two things timed in turn, round
by round, in one process with one compute thread; `--folder` says on which file system. The stall is
of the saving call alone: what follows it under the next step is checkpoint_stall.py's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks import RESULTS
from tests.ranks.device import CPU
from varuna_core.checkpoint.format.box import Box
from varuna_core.checkpoint.format.entries import CheckpointPart, Entry, make_entry, view_bytes
from varuna_core.checkpoint.format.manifest import TrainingState
from varuna_core.checkpoint.store.reader import OPTIMIZER, CheckpointReader, WantedTensor
from varuna_core.checkpoint.store.writer import CheckpointWriter

RESULT = RESULTS / "checkpoint.md"
LAYERS = 8
KINDS = ("weight", OPTIMIZER + "exp_avg", OPTIMIZER + "exp_avg_sq")
BOUNDS = {"save": 1.2, "load": 1.3, "stall": 0.1}
CHUNK = 16 << 20


@dataclass
class State:
    """Tensors by (kind, name), two matrices and a vector a layer."""

    tensors: dict[tuple[str, str], Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def part(self, iteration: int, layers: range, rank: int) -> CheckpointPart:
        segments: dict[int, list[Entry]] = {layer: [] for layer in layers}
        shapes = {}
        for (kind, name), tensor in self.tensors.items():
            layer = int(name.split(".")[0])
            shapes[name] = tuple(tensor.shape)
            if layer in segments:
                segments[layer].append(make_entry(kind, name, tensor))
        training = TrainingState(partition="4-4", shapes=shapes) if rank == 0 else None
        return CheckpointPart(iteration=iteration, segments=segments, state=training)


def build_state(millions: float, device: torch.device = CPU) -> State:
    width = max(8, int((millions * 1e6 / LAYERS / 8) ** 0.5))
    made = {}
    for layer in range(LAYERS):
        for name, shape in (
            ("up", (4 * width, width)),
            ("down", (width, 4 * width)),
            ("b", (width,)),
        ):
            for kind in KINDS:
                made[kind, f"{layer}.{name}"] = torch.randn(shape, device=device)
    return State(made)


def time_s(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Ratios:
    """Ratios of seconds, one a round, in order of size; and the ratio of the best rounds."""

    each: list[float]
    best: float


def compare(ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> Ratios:
    """In turn; who goes first changes each round."""
    pairs = []
    for number in range(rounds + 1):
        if number % 2:
            mine, other = ours(), theirs()
        else:
            other, mine = theirs(), ours()
        if number:  # the first round makes buffers and folders
            pairs.append((mine, other))
    best = min(mine for mine, _ in pairs) / min(other for _, other in pairs)
    return Ratios(sorted(mine / other for mine, other in pairs), best)


def write_bytes(path: Path, tensors: list[Tensor]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for tensor in tensors:
        data = view_bytes(tensor)
        while data:
            data = data[os.write(fd, data[:CHUNK]) :]
    os.fsync(fd)
    os.close(fd)


def measure_save(state: State, folder: Path, rounds: int) -> Ratios:
    writer = CheckpointWriter(folder / "ours", job="bench", keep=1)
    tensors = list(state.tensors.values())

    def ours() -> float:
        part = state.part(writer._count, range(LAYERS), 0)
        writer.close()  # the checkpoint before the last is deleted now, beside nothing
        os.sync()
        return time_s(lambda: writer.save(part))

    def theirs() -> float:
        writer.close()
        path = folder / "bytes"
        path.unlink(missing_ok=True)
        os.sync()
        return time_s(lambda: write_bytes(path, tensors))

    return compare(ours, theirs, rounds)


def forget(folder: Path) -> None:
    """Out of the page cache, so that the disk is read."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def save_two_stages(state: State, folder: Path) -> None:
    for rank in (0, 1):
        writer = CheckpointWriter(folder / "two", job="bench", rank=rank, world_size=2)
        writer.save(state.part(1, range(4 * rank, 4 * rank + 4), rank))


def measure_load(state: State, folder: Path, rounds: int, cold: bool, halves: bool) -> Ratios:
    """Saved by two stages of four layers; one loads the middle four, or its half of every tensor.

    Against reading the same layers' files into memory, with nothing checked.
    """
    path = folder / "two" / "varuna_ckpt_1"
    layers = range(2, 6)
    wanted = []
    for (kind, name), tensor in state.tensors.items():
        if int(name.split(".")[0]) in layers:
            rows = (len(tensor) // 2, *tensor.shape[1:]) if halves else tuple(tensor.shape)
            low = (len(tensor) - rows[0], *(0 for _ in rows[1:]))
            out = torch.zeros(rows)
            wanted.append(WantedTensor(name=name, kind=kind, out=out, box=Box(low, rows)))
    files = [path / f"segment-{layer:04d}.safetensors" for layer in layers]
    share = sum(one.out.nbytes for one in wanted) / sum(file.stat().st_size for file in files)
    buffers = [bytearray(int(file.stat().st_size * share)) for file in files]

    def ours() -> float:
        if cold:
            forget(path)

        def load() -> None:
            with CheckpointReader(path) as reader:
                reader.fill(wanted)

        return time_s(load)

    def theirs() -> float:
        if cold:
            forget(path)

        def read() -> None:
            for file, buffer in zip(files, buffers, strict=True):
                with open(file, "rb", buffering=0) as handle:
                    view = memoryview(buffer)
                    while view:
                        view = view[handle.readinto(view) or len(view) :]

        return time_s(read)

    return compare(ours, theirs, rounds)


def measure_stall(
    state: State, folder: Path, rounds: int, tempdir: Path | None
) -> tuple[Ratios, float]:
    """Ratios of the time that the caller waits, and the median of ours in milliseconds."""
    store = Path(tempfile.mkdtemp(dir=folder))
    writer = CheckpointWriter(store, job="bench", keep=1, background=True, tempdir=tempdir)
    plain = {f"{kind}/{name}": tensor for (kind, name), tensor in state.tensors.items()}
    stalls = []

    def ours() -> float:
        part = state.part(writer._count, range(LAYERS), 0)
        stalls.append(time_s(lambda: writer.save(part, later=True)))
        writer.wait()
        return stalls[-1]

    def theirs() -> float:
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        start = time.perf_counter()
        with contextlib.redirect_stderr(None), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done: Any = dcp.async_save(plain, checkpoint_id=str(folder / "dcp"))
        stall = time.perf_counter() - start
        done.result()
        return stall

    ratios = compare(ours, theirs, rounds)
    writer.close()
    return ratios, statistics.median(stalls[1:]) * 1000


def measure_memory(state: State, folder: Path, background: bool) -> float:
    """Most memory beyond the state while a first checkpoint is written, as a share of the state."""
    writer = CheckpointWriter(folder / f"memory-{background}", job="b", background=background)
    writer.save(build_state(0.1).part(0, range(LAYERS), 0))  # imports, threads
    writer.wait()
    Path("/proc/self/clear_refs").write_text("5")
    before = read_kib("VmRSS")
    writer.save(state.part(1, range(LAYERS), 0))
    writer.close()
    return (read_kib("VmHWM") - before) * 1024 / state.num_bytes


def read_kib(word: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(word + ":"):
            return int(line.split()[1])
    raise LookupError(word)


def render_row(what: str, bound: float, ratios: Ratios) -> str:
    least, most = ratios.each[0], ratios.each[-1]
    middle = statistics.median(ratios.each)
    return f"| {what} | {bound} | {least:.2f} | {middle:.2f} | {most:.2f} | {ratios.best:.2f} |"


HEAD = (
    "| what, over what | bound | smallest | median | largest | best round / best round |",
    "|---|---|---|---|---|---|",
)


def measure(state: State, folder: Path, rounds: int) -> list[str]:
    blocking = measure_memory(state, folder, background=False)
    copied = measure_memory(state, folder, background=True)
    rows = [
        *HEAD,
        render_row(
            "blocking save / the same bytes and fsync",
            BOUNDS["save"],
            measure_save(state, folder, rounds),
        ),
    ]
    save_two_stages(state, folder)
    for cold in (True, False):
        for halves in (False, True):
            what = f"load of {'half the rows' if halves else '4 of 8 layers'} at another shape"
            over = f"reading the bytes from {'the disk' if cold else 'the page cache'}"
            ratios = measure_load(state, folder, rounds, cold, halves)
            rows.append(render_row(f"{what} / {over}", BOUNDS["load"], ratios))
    return [
        *rows,
        *measure_stalls(state, folder, rounds),
        "",
        f"Memory above the state, as a share of it: blocking {blocking:.2f} (bound: the largest "
        f"layer, {1 / LAYERS:.2f}), in the background {copied:.2f} (bound: one copy).",
    ]


def measure_stalls(state: State, folder: Path, rounds: int) -> list[str]:
    rows, stalls = [], []
    places = [("memory", None), ("a folder in memory", Path("/dev/shm")), ("a disk", folder / "t")]
    for place, tempdir in places:
        ratios, ours_ms = measure_stall(state, folder, rounds, tempdir)
        rows.append(render_row(f"stall, copy in {place} / DCP async_save", BOUNDS["stall"], ratios))
        stalls.append(f"{place} {ours_ms:.0f}")
    return [*rows, "", f"Our stalls, ms: {', '.join(stalls)}."]


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("."))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--millions", type=float, default=20, help="of parameters")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = build_state(options.millions, CPU)
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        rows = measure(state, folder, options.rounds)
        dist.destroy_process_group()
    head = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, one "
        f"compute thread, {state.num_bytes / 2**20:.0f} MiB of state, {options.rounds} rounds."
    )
    text = "\n".join([head, "", *rows])
    print(text)
    if options.write:
        command = f"python -m benchmarks.runtime.checkpoint --rounds {options.rounds} --write"
        title = "# Checkpoints beside the bytes they hold"
        RESULT.write_text(f"{title}\n\nMade by `{command}`. {text}\n")


if __name__ == "__main__":
    main()
