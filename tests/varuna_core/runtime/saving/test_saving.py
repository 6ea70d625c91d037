"""Saved in any layout, loaded in any other: the training goes on as if nothing had been."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import small as models
from tests.ranks.save_rank import BATCH, KINDS, SAVED, STEPS, Case, build_model, train, write_cases
from tests.ranks.start import collect, start_ranks
from varuna_core import Varuna
from varuna_core.checkpoint.store.exchange import export_checkpoint
from varuna_core.checkpoint.store.store import find_damage, list_complete
from varuna_core.records.checkpoints import list_damaged

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2x1": (2, {"stage_map": "0;1;", "schedule": "interleaved", "stages_per_rank": 2}),
    "1x2": (2, {"stage_map": "0,1;"}),
    "2x2": (4, {"stage_map": "0,2;1,3;", "schedule": "zbv"}),
    "4x1": (4, {"stage_map": "0;1;3;2;"}),
    "2x2 zero": (4, {"stage_map": "0,1;2,3;", "zero": 1}),
    "2x2 sliced zero": (4, {"stage_map": "3,2;1,0;", "zero": 3, "offload": "optimizer"}),
    "1x2 zero": (2, {"stage_map": "1,0;", "zero": 2, "offload": "optimizer"}),
}
NAMES = list(LAYOUTS)
ZERO = [name for name in NAMES if name.endswith("zero")]


def saves(world_size: int) -> list[Case]:
    return [
        Case(name=f"{kind} {name}", kind=kind, store=f"{kind} {name}", **layout)
        for kind in KINDS
        for name, (size, layout) in LAYOUTS.items()
        if size == world_size
    ]


def pairs(kind: str) -> list[tuple[str, str]]:
    """Layouts that save and that load: each the next one's; of one kind also its own, all that are
    without ZeRO, and 2x2 with those that have it."""
    every = [(a, b) for a in NAMES for b in NAMES]
    far = (0, 1) if kind == "groups" else (1,)
    near = {(a, b) for a, b in every if (NAMES.index(b) - NAMES.index(a)) % len(NAMES) in far}
    if kind != "groups":
        return [pair for pair in every if pair in near]
    plain = {(a, b) for a, b in every if not (a in ZERO or b in ZERO) or "2x2" in (a, b)}
    return [pair for pair in every if pair in near | plain]


def name_load(kind: str, source: str, target: str) -> str:
    return f"{kind} {source} in {target}"


def loads(world_size: int) -> list[Case]:
    return [
        Case(
            name=name_load(kind, source, target),
            kind=kind,
            store=f"{kind} {source}",
            load=True,
            order="first" if NAMES.index(source) % 2 else "last",
            **LAYOUTS[target][1],
        )
        for kind in KINDS
        for source, target in pairs(kind)
        if LAYOUTS[target][0] == world_size
    ]


def outputs(world_size: int) -> list[Case]:
    return [
        Case(name=f"outputs {name}", kind="groups", store="", outputs=True, **layout)
        for name, (size, layout) in LAYOUTS.items()
        if size == world_size and name not in ZERO
    ]


def start(folder: Path, world_size: int, cases: list[Case]) -> None:
    write_cases(folder, cases)
    with start_ranks("tests.ranks.save_rank", world_size, str(folder)) as ranks:
        done = collect(ranks)
    assert not any(code for code, _ in done), "\n".join(out for _, out in done)


def spoil(folder: Path) -> None:
    """Stores that cannot be loaded, of the last stage's files, which rank 1 of 2x1 alone reads."""
    bad = folder / "bad"
    good = folder / "stores" / "groups 2x1" / f"varuna_ckpt_{SAVED * 10}"
    for name in ("changed", "cut", "missing", "other"):
        source = folder / "stores" / "norm 2x1" / good.name if name == "other" else good
        shutil.copytree(source, bad / name / good.name)
    (bad / "empty").mkdir()
    shutil.copytree(good, bad / "changed" / "varuna_ckpt_20")
    files = {name: max((bad / name / good.name).glob("segment*")) for name in ("changed", "cut")}
    data = bytearray(files["changed"].read_bytes())
    data[-3] ^= 4
    files["changed"].write_bytes(data)
    files["cut"].write_bytes(files["cut"].read_bytes()[:-5])
    max((bad / "missing" / good.name).glob("segment*")).unlink()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("saving")
    start(made, 2, saves(2))
    spoil(made)
    start(made, 4, [*saves(4), *loads(4), *outputs(4)])
    failing = Case(name="bad", kind="groups", store="groups 2x1", order="bad", **LAYOUTS["2x1"][1])
    start(made, 2, [*loads(2), *outputs(2), failing])
    return made


def read(folder: Path, name: str, layout: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}.{rank}.pt") for rank in range(LAYOUTS[layout][0])]


ALL = [(kind, source, target) for kind in KINDS for source, target in pairs(kind)]


@pytest.mark.parametrize(("kind", "source", "target"), ALL, ids=[name_load(*one) for one in ALL])
def test_it_goes_on_as_the_uninterrupted_run(
    folder: Path, kind: str, source: str, target: str
) -> None:
    saved = read(folder, f"{kind} {source}", source)
    loaded = read(folder, name_load(kind, source, target), target)
    close = {"rtol": 0.0, "atol": 0.0}
    if source != target:
        half = KINDS[kind].precision != "fp32"
        close = {"rtol": 2e-3, "atol": 2e-4} if half else {"rtol": 2e-5, "atol": 2e-6}
    assert_goes_on(kind, saved, loaded, close)
    if source == target:
        assert [rank["drawn"] for rank in loaded] == [rank["drawn"] for rank in saved]


def assert_goes_on(
    kind: str, saved: list[dict[str, Any]], loaded: list[dict[str, Any]], close: dict[str, float]
) -> None:
    """What loaded took the steps that were left as what saved did."""
    expected = {name: tensor for rank in saved for name, tensor in rank["state"].items()}
    # Each replica has averages of its own; those of the first one are kept.
    buffers = {n: b for rank in saved if not rank["replica"] for n, b in rank["buffers"].items()}
    seen: set[str] = set()
    for rank in loaded:
        assert rank["first"] == SAVED and len(rank["losses"]) == STEPS - SAVED
        assert rank["scales"] == saved[0]["scales"][SAVED:]
        assert rank["rates"] == saved[0]["rates"][SAVED:]
        assert rank["user"] == ({"best": (1.5, float("inf")), "at": {7: b"x"}}, SAVED * BATCH)
        torch.testing.assert_close(
            torch.stack(rank["losses"]), torch.stack(saved[0]["losses"][SAVED:]), **close
        )
        for name, tensor in rank["buffers"].items():
            assert torch.equal(tensor, buffers[name])
        for name, tensor in rank["state"].items():
            if name not in buffers:
                torch.testing.assert_close(tensor, expected[name], **close)
        seen |= rank["state"].keys()
    assert seen == expected.keys() == build_model(KINDS[kind], 0).state_dict().keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", NAMES)
def test_one_process_takes_it_up_too(folder: Path, kind: str, source: str) -> None:
    case = Case(name="", kind=kind, stage_map="0;", store=f"{kind} {source}", load=True)
    saved = read(folder, f"{kind} {source}", source)[0]
    losses = train(case, folder)["losses"]
    torch.testing.assert_close(
        torch.stack(losses), torch.stack(saved["losses"][SAVED:]), rtol=2e-3, atol=0
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", NAMES)
def test_what_lies_there_is_whole_and_no_more_than_was_asked_for(
    folder: Path, kind: str, source: str
) -> None:
    store = folder / "stores" / f"{kind} {source}"
    (found,) = list_complete(store)
    assert found.path.name == f"varuna_ckpt_{SAVED * 10}"
    assert list(find_damage(found.path)) == []
    shared = any(".rank-" in path.name for path in found.path.iterdir())
    asked = KINDS[kind].saving.get("shard", False) and source in ("1x2", "2x2")
    assert shared == (asked or source in ZERO)  # each owner writes its own


def test_the_scale_of_fp16_had_changed_before_it_was_saved(folder: Path) -> None:
    scales = read(folder, "half 2x1", "2x1")[0]["scales"]
    assert scales[0] > scales[SAVED]


def test_what_cannot_be_loaded_is_the_same_error_on_every_rank(folder: Path) -> None:
    first, second = read(folder, "bad", "2x1")
    assert first == second and len(first) == 10
    assert "rank 1 (stages 1 and 3, replica 0): " in first["changed by name"]
    assert "was changed: the checksum of" in first["changed by name"]
    assert first["changed by name"].count("; load iteration 20 instead") == 1
    assert first["cut by name"].startswith("DamagedCheckpoint: ")
    assert "were written" in first["cut by name"]
    assert "is missing" in first["missing by name"] and "segment-" in first["missing by name"]
    assert first["empty"].startswith("NoCheckpoint: ")
    assert "CheckpointError: " in first["other"] and "Damaged" not in first["other"]


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_it_loaded(
    folder: Path,
) -> None:
    """Rank 1 alone reads what was changed; every attempt found it again, and the run ended."""
    first, second = read(folder, "bad", "2x1")
    # What lies there as 20 is a copy, and says so itself.
    assert first["changed"] == second["changed"] == f"loaded {SAVED * 10}"
    store = folder / "bad" / "changed"
    (aside,) = list_damaged(store)
    assert aside.iteration == SAVED * 10 and "was changed: the checksum of" in aside.reason
    assert "rank 1 " in aside.reason
    assert list(find_damage(Path(aside.path))) and len(list(Path(aside.path).glob("segment*"))) > 1
    assert [found.iteration for found in list_complete(store)] == [20]


def test_where_none_is_whole_a_training_does_not_begin_anew(folder: Path) -> None:
    first, second = read(folder, "bad", "2x1")
    for name in ("cut", "missing"):
        assert first[name] == second[name]
        assert first[name].startswith("DamagedCheckpoint: ")
        assert "holds no intact checkpoint: 1 damaged" in first[name]
        assert len(list_damaged(folder / "bad" / name)) == 1


def test_a_model_starts_from_an_exported_file(folder: Path, tmp_path: Path) -> None:
    store = folder / "stores" / "norm 2x2" / f"varuna_ckpt_{SAVED * 10}"
    export_checkpoint(store, tmp_path / "model.pt")
    weights = torch.load(tmp_path / "model.pt")
    build_model(KINDS["norm"], 1).load_state_dict(weights)
    model = build_model(KINDS["norm"], 1)
    varuna = Varuna(model, "0;", models.make_images(4), 4, 2, device="cpu", state_dict=weights)
    for name, tensor in varuna.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    varuna.close()


@pytest.mark.parametrize("layout", [name for name in NAMES if name not in ZERO])
def test_outputs_are_those_of_the_plain_model(folder: Path, layout: str) -> None:
    model = build_model(KINDS["groups"], 0).eval()
    torch.manual_seed(0)
    bert = models.Bert()
    with torch.no_grad():
        loss = model(**models.make_inputs(24))
        whole = bert(**models.make_bert_inputs(7), return_dict=True)
    for rank in read(folder, f"outputs {layout}", layout):
        with torch.no_grad():
            logits = model(models.make_inputs(5 + rank["replica"], seed=rank["replica"])["ids"])
        torch.testing.assert_close(rank["logits"], logits)
        assert (rank["last"] is not None) == rank["holds_last"]
        if rank["holds_last"]:
            assert torch.equal(rank["last"], rank["logits"])
        torch.testing.assert_close(rank["loss"], loss)
        assert rank["dict"].keys() == {"loss", "state"}
        torch.testing.assert_close(rank["dict"]["state"], whole["state"])
        assert rank["dict"]["loss"].shape == ()
