"""A checkpoint loads at any other shape: by pieces, by ranks, by optimizer, by a plain file."""

from __future__ import annotations

import ctypes
import tempfile
import threading
from collections.abc import Iterator
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.ranks.checkpoint_world import (
    IN_MEMORY,
    NUM_SEGMENTS,
    SHAPES,
    Job,
    World,
    expect_state,
    make_part,
    open_world,
    save_all,
)
from varuna_core.checkpoint.cli import main
from varuna_core.checkpoint.format import box as boxes
from varuna_core.checkpoint.format.box import Box, split_range, whole
from varuna_core.checkpoint.format.entries import DTYPES, CheckpointPart, deal, make_entry
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.format.manifest import TrainingState
from varuna_core.checkpoint.store.reader import CheckpointReader, WantedTensor
from varuna_core.checkpoint.store.store import find_damage, list_complete
from varuna_core.checkpoint.store.torch_state import take_state
from varuna_core.checkpoint.store.writer import CheckpointWriter, Staging


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_world() as opened:
        yield opened


def save_one(store: Path, tensors: dict[str, torch.Tensor], job: str = "a", **state: Any) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    entries = [make_entry("weight", name, tensor) for name, tensor in tensors.items()]
    writer = CheckpointWriter(store, job=job)
    training = TrainingState(partition="", shapes=shapes, **state)
    writer.save(CheckpointPart(iteration=1, segments={0: entries}, state=training))
    writer.close()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.sampled_from(sorted(DTYPES)),
    st.integers(1, 4),
    st.integers(1, 64),
    st.data(),
)
def test_any_pieces_are_read_from_any_other_pieces(
    shape: tuple[int, ...], word: str, num_ranks: int, block_bytes: int, data: st.DataObject
) -> None:
    """With blocks of a few bytes, so that each tensor has many."""
    count = prod(shape)
    held = torch.randint(0, 2, shape, dtype=torch.int64).to(DTYPES[word])
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=num_ranks - 1)))
    cuts = [0, *cuts, *[count] * (num_ranks - len(cuts))]
    before, boxes.BLOCK_BYTES = boxes.BLOCK_BYTES, block_bytes
    try:
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
            for rank in range(num_ranks):
                parts = list(split_range(shape, cuts[rank], cuts[rank + 1]))
                if not count and rank == 0:
                    parts = [whole(shape)]
                made = [make_entry("weight", "w", held[box.slices], box, shape) for box in parts]
                training = TrainingState(partition="", shapes={"w": shape}) if not rank else None
                writer = CheckpointWriter(folder, job="a", rank=rank, world_size=num_ranks)
                writer.save(
                    CheckpointPart(iteration=1, segments={0: made}, shared=True, state=training)
                )
            with CheckpointReader.open(folder) as reader:
                assert list(find_damage(reader.folder)) == []
                lows = [data.draw(st.integers(0, size)) for size in shape]
                ends = [
                    data.draw(st.integers(low, size)) for low, size in zip(lows, shape, strict=True)
                ]
                sizes = tuple(end - low for low, end in zip(lows, ends, strict=True))
                box = Box(tuple(lows), sizes)
                assert reader.read("w", box=box).tolist() == held[box.slices].tolist()
                turned = torch.empty(shape[::-1], dtype=torch.float64)
                turned = turned.permute(tuple(reversed(range(len(shape)))))
                if word != "C64":
                    reader.fill([WantedTensor(name="w", out=turned)])
                    assert torch.equal(turned, held.to(torch.float64))
    finally:
        boxes.BLOCK_BYTES = before


LAYOUTS = [(1, 1, False), (2, 1, False), (1, 3, True), (2, 2, True), (2, 2, False), (4, 1, False)]


@pytest.mark.parametrize(("stages", "replicas", "shard"), LAYOUTS)
@pytest.mark.parametrize("background", [False, True])
def test_ranks_of_any_layout_save_what_any_other_reads(
    world: World, tmp_path: Path, stages: int, replicas: int, shard: bool, background: bool
) -> None:
    job = Job(
        store=str(tmp_path),
        job="a",
        iterations=[1, 2, 5],
        stages=stages,
        replicas=replicas,
        shard=shard,
        background=background,
    )
    assert world.run(job) == [(0, "")] * stages * replicas
    assert [found.iteration for found in list_complete(tmp_path)] == [1, 2, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "owner.json",
        "varuna_ckpt_1",
        "varuna_ckpt_2",
        "varuna_ckpt_5",
    ]
    for found in list_complete(tmp_path):
        assert list(find_damage(found.path)) == []
        with CheckpointReader(found.path) as reader:
            expect_state(reader)
            assert [reader.own(rank) for rank in range(stages * replicas)] == [
                {"rank": rank} for rank in range(stages * replicas)
            ]
    if not shard:
        files = {path.name for path in tmp_path.glob("varuna_ckpt_5/*.safetensors")}
        assert files == {f"segment-{number:04d}.safetensors" for number in range(NUM_SEGMENTS)}


def test_a_rank_opens_the_files_of_its_own_segments_only(tmp_path: Path) -> None:
    save_all(Job(store=str(tmp_path), job="a", iterations=[1]), 0)
    (found,) = list_complete(tmp_path)
    for number in (1, 2, 3):
        (found.path / f"segment-{number:04d}.safetensors").unlink()
    with CheckpointReader(found.path, check_complete=False) as reader:
        assert reader.read("a.weight").shape == SHAPES["a.weight"]
        assert reader.read_optimizer("a.bias")["step"] == 1
        with pytest.raises(CheckpointError, match=r"segment-0001.safetensors is missing"):
            reader.read("b.weight")


OPTIMIZERS = [
    lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.Adafactor(p, lr=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
    lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_any_optimizer_goes_on_as_if_nothing_had_happened(make: Any, tmp_path: Path) -> None:
    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = model(torch.arange(12.0).reshape(2, 6)).square().sum()
            value.backward()
            return value

        for _ in range(steps):
            optimizer.step(loss)

    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    segments, trees = {0: [make_entry("weight", n, p) for n, p in model.named_parameters()]}, {}
    for parameter, state in optimizer.state.items():
        name = names[id(parameter)]
        entries, trees[name] = take_state(name, parameter, state)
        segments[0] += entries
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    writer = CheckpointWriter(tmp_path, job="a")
    training = TrainingState(partition="", shapes=shapes)
    writer.save(CheckpointPart(iteration=3, segments=segments, optimizer=trees, state=training))

    other = torch.nn.Linear(6, 4)
    again = make(other.parameters())
    with CheckpointReader.open(tmp_path) as reader:
        reader.fill([WantedTensor(name=n, out=p) for n, p in other.named_parameters()])
        for name, parameter in other.named_parameters():
            state = reader.read_optimizer(name)
            if state is not None:
                again.state[parameter] = state
    train(model, optimizer, 2)
    train(other, again, 2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


def test_a_piece_of_a_parameter_has_the_piece_of_its_state(tmp_path: Path) -> None:
    """As ZeRO saves: each replica has rows of the state, whole weights come from one."""
    weight = torch.arange(24.0).reshape(6, 4)
    for rank in (1, 0):
        rows = Box((3 * rank, 0), (3, 4))
        state = {"exp_avg": weight[rows.slices] + 0.5, "step": 3}
        made, tree = take_state("w", weight[rows.slices], state, rows, (6, 4))
        if rank == 0:
            made.append(make_entry("weight", "w", weight))
        training = TrainingState(partition="", shapes={"w": (6, 4)}) if rank == 0 else None
        CheckpointWriter(tmp_path, job="a", rank=rank, world_size=2).save(
            CheckpointPart(
                iteration=1,
                segments={0: made},
                shared=True,
                optimizer={"w": tree},
                state=training,
            )
        )
    with CheckpointReader.open(tmp_path) as reader:
        middle = Box((2, 1), (3, 2))
        found = reader.read_optimizer("w", middle)
        assert torch.equal(found["exp_avg"], weight[middle.slices] + 0.5) and found["step"] == 3


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_export_and_import_of_a_plain_state_dict(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_all(Job(store=str(tmp_path / "a"), job="a", iterations=[4]), 0)
    file = tmp_path / f"plain.{ending}"
    assert main(["export", str(tmp_path / "a"), str(file)]) == 0
    plain = load_file(file) if ending == "safetensors" else torch.load(file, weights_only=True)
    with CheckpointReader.open(tmp_path / "a") as reader:
        assert plain.keys() == {*SHAPES, "d.tied"}
        for name, tensor in plain.items():
            assert torch.equal(tensor, reader.read(name)), name
    tied = ["--tied", "a.weight", "d.tied"] if ending == "safetensors" else []
    assert main(["import", str(file), str(tmp_path / "b"), "--iteration", "9", *tied]) == 0
    assert main(["verify", str(tmp_path / "b")]) == 0
    with CheckpointReader.open(tmp_path / "b") as reader:
        assert reader.iteration == 9 and reader.state.ties == [["a.weight", "d.tied"]]
        for name, tensor in plain.items():
            assert torch.equal(tensor, reader.read(name)), name
        assert reader.read_optimizer("a.weight") is None
    assert main(["inspect", str(tmp_path / "b"), "--tensors"]) == 0
    assert "plain." in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", file.name]


def test_import_runs_nothing_and_names_what_is_no_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Run:
        def __reduce__(self) -> Any:
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    torch.save({"w": Run()}, tmp_path / "evil.pt")
    assert main(["import", str(tmp_path / "evil.pt"), str(tmp_path / "s")]) == 1
    assert not (tmp_path / "ran").exists()
    torch.save({"step": 3}, tmp_path / "odd.pt")
    assert main(["import", str(tmp_path / "odd.pt"), str(tmp_path / "s")]) == 1
    save_file({"a": torch.ones(2), "b": torch.zeros(2)}, tmp_path / "w.safetensors")
    arguments = [str(tmp_path / "w.safetensors"), str(tmp_path / "s"), "--tied", "a", "b"]
    assert main(["import", *arguments]) == 1
    said = capsys.readouterr().err
    assert "cannot be read safely as a state dict" in said
    assert "'step' is a int" in said and "not tied" in said


def test_an_incomplete_set_of_tensors_is_no_checkpoint(tmp_path: Path) -> None:
    held = {"a": torch.ones(3, 2)}
    with pytest.raises(CheckpointError, match=r"nobody wrote 'b'"):
        entries = [make_entry("weight", name, tensor) for name, tensor in held.items()]
        training = TrainingState(partition="", shapes={"a": (3, 2), "b": (1,)})
        CheckpointWriter(tmp_path, job="a").save(
            CheckpointPart(iteration=1, segments={0: entries}, state=training)
        )
    assert list_complete(tmp_path) == [] and list(tmp_path.glob("varuna_ckpt*")) == []


def test_a_name_that_is_not_there_gets_the_nearest(tmp_path: Path) -> None:
    save_one(tmp_path, {"head.weight": torch.ones(2)})
    with (
        CheckpointReader.open(tmp_path) as reader,
        pytest.raises(CheckpointError, match=r"no weight 'head.weigth'; it has 'head.weight'"),
    ):
        reader.read("head.weigth")


@pytest.mark.parametrize("in_folder", [False, True])
def test_the_copy_is_one_buffer_that_outlives_the_state(in_folder: bool, tmp_path: Path) -> None:
    staging = Staging(tmp_path if in_folder else None)
    job = Job(store="", job="a", iterations=[])
    for iteration in (1, 2):
        part = make_part(job, 0, iteration)
        staging.take(part.segments)
        staged = staging.finish()
        buffer = staging._buffer
        for number, entries in part.segments.items():
            for entry, copy in zip(entries, staged[number], strict=True):
                assert torch.equal(copy.load(), entry.load()) and copy.box == entry.box
                assert copy.load().numel() == 0 or (
                    copy.load().untyped_storage().data_ptr() == buffer.data_ptr()
                )
    assert list(tmp_path.iterdir()) == []
    small = deal(part.segments, 2, 0)
    staging.take(small)
    assert staging._buffer is buffer


@pytest.mark.parametrize("refusal", [0, 1])
def test_gpus_write_to_a_copy_in_a_folder_by_themselves(
    refusal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is asked for each buffer, and told before its memory is freed."""
    pinned: dict[int, int] = {}
    driver = SimpleNamespace(
        cuMemHostRegister_v2=lambda at, size, _: refusal or pinned.update({at.value: size.value}),
        cuMemHostUnregister=lambda at: pinned.pop(at.value),
    )
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    staging = Staging(tmp_path)
    for size in (10, 1000):
        weight = torch.arange(float(size))
        staging.take({0: [make_entry("weight", "w", weight)]})
        buffer = staging._buffer
        assert pinned == ({} if refusal else {buffer.data_ptr(): buffer.numel()})
        assert torch.equal(staging.finish()[0][0].load(), weight)
    del staging, buffer
    assert not pinned


def test_training_goes_on_while_the_copy_is_written(tmp_path: Path) -> None:
    """The state is changed before the background thread has written any of it."""
    weight = torch.ones(1000)
    hold = threading.Event()
    entry = make_entry("weight", "w", weight)
    writer = CheckpointWriter(tmp_path, job="a", background=True)
    original = writer._write

    def wait_first(*arguments: Any) -> None:
        hold.wait(30)
        original(*arguments)

    writer._write = wait_first  # type: ignore[method-assign]
    training = TrainingState(partition="", shapes={"w": (1000,)})
    writer.save(CheckpointPart(iteration=1, segments={0: [entry]}, state=training))
    weight.zero_()
    hold.set()
    writer.close()
    with CheckpointReader.open(tmp_path) as reader:
        assert torch.equal(reader.read("w"), torch.ones(1000))
