"""Checkpoints in the layout of the original Varuna are read, and a training goes on from them."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import small as models
from varuna_core import Varuna
from varuna_core.checkpoint.cli import main
from varuna_core.checkpoint.foreign import varuna as varuna_folders
from varuna_core.checkpoint.foreign.varuna import import_varuna
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.store.reader import CheckpointReader

BATCH, STEP = 8, 300
RATE = 0.01


@dataclass(kw_only=True)
class Training:
    """A plain one, and what Varuna's ranks would have had of it."""

    model: nn.Module = field(default_factory=lambda: build())
    steps: int = 3
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The gradient of a key's bias is rounding alone: a usual eps would make steps of it.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, weight_decay=0.1, eps=1e-3
        )

    def run(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            loss = self.model(**models.make_inputs(BATCH, seed=step))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return models.NamedPairGpt()


def find_segment(name: str) -> int:
    """Embeddings, four blocks, head: as its CutPoints lie."""
    if name.startswith("blocks."):
        return min(int(name.split(".")[1]) + 1, 3)
    return 3 if name.startswith(("norm", "head", "lm_head")) else 0


def write_varuna(
    training: Training, store: Path, *, replicas: int = 1, step: int = STEP, fused: bool = True
) -> Path:
    """The layout as it is documented: a file a segment and kind, of several shards with `shard`;
    NVIDIA's optimizers count the step in their groups, torch's in the state."""
    folder = store / f"varuna_ckpt_{step}"
    (folder / "markers").mkdir(parents=True)
    params: dict[tuple[int, int], dict[str, Any]] = {}
    states: dict[tuple[int, int], dict[str, Any]] = {}
    marked = [0] * replicas
    for number, (name, parameter) in enumerate(training.model.named_parameters()):
        shard = number % replicas
        key = find_segment(name), shard
        marked[shard] += 1
        params.setdefault(key, {})[name] = parameter
        state = dict(training.optimizer.state[parameter])
        if fused:
            del state["step"]
        states.setdefault(key, {})[name] = state
    for segment in range(4):
        for shard in range(replicas):
            ending = f"_{shard}" if replicas > 1 else ""
            key = segment, shard
            torch.save(params.get(key, {}), folder / f"opt-fp32-params-{segment}{ending}")
            torch.save(states.get(key, {}), folder / f"opt-state-{segment}{ending}")
    common = training.optimizer.state_dict()
    common["state"] = {}
    if fused:
        for group in common["param_groups"]:
            group |= {"step": training.steps, "bias_correction": 1}
    torch.save(common, folder / "opt-common-state")
    for rank in range(2 * replicas):
        count = marked[rank // 2] if rank % 2 else 0
        (folder / "markers" / f"complete_{rank}.txt").write_text(str(count))
    return folder


@pytest.fixture
def training() -> Training:
    made = Training()
    made.run(0, made.steps)
    return made


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("fused", [True, False])
def test_a_training_goes_on_from_it_as_it_would_have(
    tmp_path: Path, training: Training, replicas: int, fused: bool
) -> None:
    write_varuna(training, tmp_path / "old", replicas=replicas, fused=fused)
    words = ["import", str(tmp_path / "old"), str(tmp_path / "new"), "--optimizer", "AdamW"]
    assert main(words) == 0
    varuna = Varuna(
        build(seed=4), "0;", models.make_inputs(BATCH), BATCH, 2,
        device="cpu", schedule="interleaved", stages_per_rank=2,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(varuna.parameters(), lr=1.0, weight_decay=0.1)
    varuna.set_optimizer(optimizer)
    assert varuna.load_checkpoint(tmp_path / "new") == STEP
    assert varuna.iteration == STEP and optimizer.param_groups[0]["lr"] == RATE
    assert optimizer.param_groups[0]["eps"] == 1e-3
    losses = []
    for step in range(training.steps, training.steps + 3):
        losses.append(varuna.step(models.make_inputs(BATCH, seed=step))[0].item())
        optimizer.step()
        varuna.zero_grad()
    assert losses == pytest.approx(training.run(training.steps, training.steps + 3), rel=1e-5)
    found = varuna.gather_state_dict()
    assert found is not None
    for name, tensor in training.model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, atol=2e-6, rtol=2e-5, msg=name)
    varuna.close()


def test_weights_alone_are_taken_without_an_optimizer(
    tmp_path: Path, training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_varuna(training, tmp_path / "old")
    for path in folder.glob("opt-state-*"):
        path.unlink()
    assert main(["import", str(folder), str(tmp_path / "new")]) == 0
    assert "its weights alone: say --optimizer" in capsys.readouterr().out
    with CheckpointReader.open(tmp_path / "new") as reader:
        state = training.model.state_dict()
        assert reader.iteration == STEP and set(reader.names()) == set(state)
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in state.items())
        assert reader.read_optimizer("wte.weight") is None


def test_the_newest_or_the_one_that_is_named(tmp_path: Path, training: Training) -> None:
    for step in (20, 100):
        write_varuna(training, tmp_path / "old", step=step)
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    assert main(["import", old, new]) == 0
    assert main(["import", old, new, "--iteration", "20"]) == 0
    assert {one.name for one in (tmp_path / "new").glob("varuna_ckpt_*")} == {
        "varuna_ckpt_20",
        "varuna_ckpt_100",
    }
    assert main(["import", old, new, "--iteration", "7"]) == 2


def test_a_pair_of_shared_weights_becomes_one_and_must_be_equal(
    tmp_path: Path, training: Training
) -> None:
    pair = ["wte.weight", "lm_head_weight"]
    folder = write_varuna(training, tmp_path / "old")
    with pytest.raises(CheckpointError, match="are not equal, so they are not tied"):
        import_varuna(folder, tmp_path / "new", ties=[pair])
    with torch.no_grad():
        training.model.get_parameter(pair[1]).copy_(training.model.get_parameter(pair[0]))
    folder = write_varuna(training, tmp_path / "equal")
    made = import_varuna(folder, tmp_path / "new", ties=[pair], optimizer="AdamW")
    with CheckpointReader(made) as reader:
        assert reader.state.ties == [pair] and pair[1] not in reader.names()
        assert reader.read_optimizer(pair[1])["state"]["step"] == training.steps


def test_what_varuna_left_out_comes_from_another_file(tmp_path: Path, training: Training) -> None:
    folder = write_varuna(training, tmp_path / "old")
    rest = {"norm.running_mean": torch.arange(3.0), "wte.weight": torch.zeros(1)}
    torch.save(rest, tmp_path / "rest.pt")
    words = ["import", str(folder), str(tmp_path / "new"), "--rest", str(tmp_path / "rest.pt")]
    assert main(words) == 0
    with CheckpointReader.open(tmp_path / "new") as reader:
        assert reader.read("norm.running_mean").tolist() == [0, 1, 2]
        assert torch.equal(reader.read("wte.weight"), training.model.state_dict()["wte.weight"])


def remove(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def cut_short(name: str) -> Any:
    return lambda folder: os.truncate(folder / name, 200)


def resave(name: str, change: Any) -> Any:
    def run(folder: Path) -> None:
        held = torch.load(folder / name)
        change(held)
        torch.save(held, folder / name)

    return run


def write_text(name: str, text: str) -> Any:
    return lambda folder: (folder / name).write_text(text)


class Evil:
    """Leaves a file where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVIL"],)


def first_state(held: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(held.values()))
    return found


FAULTS: dict[str, tuple[Any, str]] = {
    "segment": (remove("opt-fp32-params-1"), "opt-fp32-params-1 is missing"),
    "last": (remove("opt-fp32-params-3"), "files after opt-fp32-params-2 are missing, or markers"),
    "state": (remove("opt-state-2"), "opt-state-2 is missing"),
    "common": (remove("opt-common-state"), "opt-common-state is missing"),
    "markers": (
        lambda folder: [path.unlink() for path in (folder / "markers").iterdir()],
        "markers holds no complete_<rank>.txt: no rank ended its save",
    ),
    "marker": (
        write_text("markers/complete_0.txt", "x"),
        "complete_0.txt is not a number of param",
    ),
    "unfinished": (write_text("markers/complete_1.txt", "3"), "was not finished: it holds"),
    "short": (cut_short("opt-fp32-params-2"), "opt-fp32-params-2 is no whole file of torch.save"),
    "two saves": (
        lambda folder: torch.save({}, folder / "opt-fp32-params-0_1"),
        "opt-fp32-params-0 is whole, and opt-fp32-params-0_1 beside it are shards of another save",
    ),
    "no parameter": (
        resave("opt-fp32-params-0", lambda held: held.update(x=3)),
        "opt-fp32-params-0: 'x' is a int, not a parameter",
    ),
    "list": (lambda folder: torch.save([1], folder / "opt-state-0"), "opt-state-0 holds a list"),
    "key": (
        resave("opt-state-1", lambda held: first_state(held).pop("exp_avg_sq")),
        "opt-state-1: the state of 'blocks.0.* has no 'exp_avg_sq', which AdamW needs; it has 'ex",
    ),
    "shape": (
        resave("opt-state-1", lambda held: first_state(held).update(exp_avg=torch.ones(2))),
        r"opt-state-1: 'exp_avg' of 'blocks.0.*' is \[2\], its parameter \[",
    ),
    "stranger": (
        resave("opt-state-1", lambda held: held.update(x=first_state(held))),
        "opt-state-1: 'x' has a state and no parameter",
    ),
    "step": (
        resave("opt-common-state", lambda held: held["param_groups"][0].pop("step")),
        "nothing says how many steps .* has taken",
    ),
    "groups": (resave("opt-common-state", lambda held: held.clear()), "has no param_groups"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_folder_is_named(tmp_path: Path, training: Training, fault: str) -> None:
    folder = write_varuna(training, tmp_path / "old")
    damage, said = FAULTS[fault]
    damage(folder)
    with pytest.raises(CheckpointError, match=said):
        import_varuna(folder, tmp_path / "new", optimizer="AdamW")
    assert not list(tmp_path.glob("new/varuna_ckpt_*"))


def test_a_missing_shard_is_named(tmp_path: Path, training: Training) -> None:
    folder = write_varuna(training, tmp_path / "old", replicas=3)
    (folder / "opt-fp32-params-2_1").unlink()
    with pytest.raises(CheckpointError, match="opt-fp32-params-2_1 is missing"):
        import_varuna(folder, tmp_path / "new")


def test_what_would_run_is_not_read(
    tmp_path: Path, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    folder = write_varuna(training, tmp_path / "old")
    torch.save({"wte.weight": Evil()}, folder / "opt-fp32-params-0")
    with pytest.raises(
        CheckpointError, match=r"params-0 is not read: unpickling it would run \S*mkdir"
    ):
        import_varuna(folder, tmp_path / "new")
    assert not (tmp_path / "evil").exists()


def test_files_of_the_format_before_zip_are_read_too(tmp_path: Path, training: Training) -> None:
    folder = write_varuna(training, tmp_path / "old")
    for path in folder.glob("opt-*"):
        held = torch.load(path)
        torch.save(held, path, _use_new_zipfile_serialization=False)
    made = import_varuna(folder, tmp_path / "new", optimizer="AdamW")
    with CheckpointReader(made) as reader:
        name = "blocks.1.up.weight"
        wanted: Tensor = training.model.state_dict()[name]
        assert torch.equal(reader.read(name), wanted)


def test_files_are_read_twice_at_most_and_one_at_a_time(
    tmp_path: Path, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for what is in them, once where it is written."""
    folder = write_varuna(training, tmp_path / "old", replicas=2)
    read: Counter[str] = Counter()

    def count(path: Path) -> dict[str, Any]:
        read[path.name] += 1
        return read_pickle(path)

    read_pickle = varuna_folders.read_pickle
    monkeypatch.setattr(varuna_folders, "read_pickle", count)
    import_varuna(folder, tmp_path / "new", optimizer="AdamW")
    assert len(read) == 2 * 4 * 2 + 1 and max(read.values()) == 2, read


def test_flags_for_others_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "x.pt")
    words = ["import", str(tmp_path / "x.pt"), str(tmp_path / "new"), "--optimizer", "AdamW"]
    assert main(words) == 1
    assert "--optimizer is for checkpoints of Varuna" in capsys.readouterr().err
