"""A model in any layout is gathered on rank 0 as the plain model's own state dict."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ranks.gather_rank import BATCH, STEPS, Case, build_model, make_batch, write_cases
from tests.ranks.start import collect, start_ranks
from tests.ranks.train_rank import MOMENTUM, RATE
from varuna_core import Varuna
from varuna_core.checkpoint.foreign.weight_files import open_weights
from varuna_core.checkpoint.store.exchange import export_checkpoint

CASES: dict[int, list[Case]] = {
    2: [
        Case(name="tied", stage_map="0;1;"),
        Case(name="turned", stage_map="1;0;", model="NamedPairGpt"),
        Case(name="half", stage_map="0;1;", precision="bf16"),
        Case(name="norm", stage_map="0;1;", model="ConvNet"),
        Case(name="half norm", stage_map="0;1;", model="ConvNet", precision="bf16"),
        Case(name="two stages", stage_map="0;1;", schedule="interleaved", stages_per_rank=2),
        Case(name="zero 2", stage_map="0,1;", model="SparseGpt", zero=2),
        Case(name="zero 3", stage_map="0,1;", model="Gpt", zero=3, precision="bf16"),
        Case(name="offload", stage_map="0,1;", zero=1, offload="optimizer", precision="bf16"),
        Case(name="tensor", stage_map="0;", model="built-in", tensor=2),
    ],
    4: [
        Case(name="2x2", stage_map="0,1;2,3;"),
        Case(name="2x2 zero 1", stage_map="0,1;2,3;", zero=1, precision="bf16"),
        Case(name="2x2 zero 3", stage_map="0,1;2,3;", model="Gpt", zero=3),
        Case(name="2x1 tensor", stage_map="0;1;", model="built-in", tensor=2),
    ],
}
ALL = [(size, case) for size, cases in CASES.items() for case in cases]


@cache
def _train(folder: Path, world_size: int) -> str:
    write_cases(folder, CASES[world_size])
    with start_ranks("tests.ranks.gather_rank", world_size, str(folder)) as ranks:
        done = collect(ranks)
    return "\n".join(f"rank {r} exit {code}\n{out}" for r, (code, out) in enumerate(done) if code)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {size: tmp_path_factory.mktemp(f"gather{size}") for size in CASES}


def train_plain(case: Case) -> dict[str, Tensor]:
    model = build_model(case)
    if case.model == "NamedPairGpt":
        return {}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    for step in range(STEPS):
        model(**make_batch(case, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert BATCH
    return model.state_dict()


@pytest.mark.parametrize(("size", "case"), ALL, ids=[f"{s} {c.name}" for s, c in ALL])
def test_the_gathered_state_dict_is_the_plain_models(
    folders: dict[int, Path], size: int, case: Case
) -> None:
    folder = folders[size]
    wrong = _train(folder, size)
    assert not wrong, wrong
    found = torch.load(folder / f"{case.name}.pt")
    other = build_model(case, seed=9)
    kept = other.state_dict()
    assert list(found) == list(kept)
    assert all(found[n].dtype == kept[n].dtype for n in kept), "fp32, as the plain model's"
    other.load_state_dict(found, strict=True)
    assert all(torch.equal(other.state_dict()[name], found[name]) for name in found)

    saved = folder / f"{case.name}.exported.pt"
    export_checkpoint(next((folder / "stores" / case.name).glob("varuna_ckpt_*")), saved)
    exported = torch.load(saved)
    assert exported.keys() == found.keys()
    assert all(torch.equal(exported[n].to(found[n].dtype), found[n]) for n in found)
    for file in (f"{case.name}.file.safetensors", f"{case.name}.file.pt"):
        written = (
            open_weights(folder / file)
            if file.endswith("safetensors")
            else torch.load(folder / file)
        )
        assert set(written) == set(found)
        assert all(torch.equal(written[name], found[name]) for name in found), file

    if case.precision == "fp32" and case.model != "ConvNet":
        for name, tensor in train_plain(case).items():
            torch.testing.assert_close(found[name], tensor, atol=2e-6, rtol=2e-5, msg=name)


@pytest.mark.parametrize(("size", "case"), ALL, ids=[f"{s} {c.name}" for s, c in ALL])
def test_an_error_of_one_rank_is_that_of_all(
    folders: dict[int, Path], size: int, case: Case
) -> None:
    assert not _train(folders[size], size)
    said = [json.loads((folders[size] / f"{case.name}.{r}.json").read_text()) for r in range(size)]
    assert all(one == said[0] for one in said), said
    name, nowhere, burnt = said[0]
    assert "model.txt: its name must end in .safetensors or .pt" in name
    assert "nowhere" in nowhere
    assert "MemoryError: no room for this piece" in burnt
    assert not list(folders[size].glob("*.part")), "nothing is left of what failed"


def test_a_rank_that_dies_meanwhile_ends_all(tmp_path: Path) -> None:
    """Rank 0 too, which waits for it and is no neighbour of it in the pipeline."""
    case = Case(name="dies", stage_map="0,1;2,3;", zero=1, dies=True)
    write_cases(tmp_path, [case])
    with start_ranks("tests.ranks.gather_rank", 4, str(tmp_path)) as ranks:
        *others, (code, _) = collect(ranks, 100)
    assert code == 3
    for code, said in others:
        assert code == 1 and "RankFailed" in said, said


def test_one_process_gathers_what_it_has(tmp_path: Path) -> None:
    case = Case(name="alone", stage_map="0;", model="ConvNet")
    varuna = Varuna(build_model(case), "0;", make_batch(case, 0), BATCH, 2, device="cpu")
    found = varuna.gather_state_dict()
    assert found is not None
    plain = build_model(case).state_dict()
    assert all(torch.equal(found[name], plain[name]) for name in plain) and len(found) == len(plain)
    assert found._metadata == plain._metadata  # type: ignore[attr-defined]
    with torch.no_grad():
        next(varuna.parameters()).zero_()
    assert all(torch.equal(found[name], plain[name]) for name in plain), "a copy"
    varuna.close()
    with pytest.raises(RuntimeError, match="closed"):
        varuna.gather_state_dict()


def test_what_is_trained_is_gathered_alone() -> None:
    case = Case(name="partly", stage_map="0;", model="ConvNet")
    model = build_model(case)
    frozen, *trained = [name for name, _ in model.named_parameters()]
    model.get_parameter(frozen).requires_grad_(False)
    varuna = Varuna(model, "0;", make_batch(case, 0), BATCH, 2, device="cpu")
    found = varuna.gather_state_dict(only_trained=True)
    varuna.close()
    assert found is not None and sorted(found) == sorted(trained)
