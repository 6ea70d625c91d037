"""Checkpoints of the original Varuna, read into ours.

    varuna_ckpt_<step>/
      opt-fp32-params-<segment>[_<shard>]     {name: parameter}, fp32 also of an fp16 training
      opt-state-<segment>[_<shard>]           {name: state of the optimizer}
      opt-common-state                        the optimizer's state_dict() without its state
      markers/complete_<rank>.txt             how many parameters that rank wrote, once it had

All are pickles of `torch.save`. They are read with `weights_only=True`: tensors, numbers and
containers, and nothing that runs; a file with anything else is refused with its name. Buffers,
schedules, random states and the place in the data were never in them.
"""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varuna_core.checkpoint.format.entries import Entry, make_entry
from varuna_core.checkpoint.format.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint
from varuna_core.checkpoint.format.manifest import WEIGHT
from varuna_core.checkpoint.format.plain import to_plain
from varuna_core.checkpoint.store.exchange import read_entries, save_weights
from varuna_core.checkpoint.store.reader import OPTIMIZER
from varuna_core.checkpoint.store.torch_state import take_state

FOLDER = re.compile(r"varuna_ckpt_(\d+)")
FILE = re.compile(r"opt-(fp32-params|state)-(\d+)(?:_(\d+))?")
COMMON = "opt-common-state"
MARKERS = "markers"
OPTIMIZERS = ("AdamW", "Adam", "SGD", "Lamb")
"""Whose state may be made of it: FusedAdam's is that of AdamW (or of Adam, without `adam_w_mode`),
FusedLAMB's that of Lamb."""

OPTIONS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov")
"""Of a group, that torch's optimizers have too."""


@dataclass(frozen=True, kw_only=True)
class VarunaFiles:
    """The files of one folder."""

    iteration: int
    params: Mapping[int, Sequence[Path]]
    """By segment: one, or the shards of several replicas."""

    state: Mapping[int, Sequence[Path]]
    common: Path
    num_marked: int
    """Parameters that the ranks said they wrote."""


def find_folder(path: Path, iteration: int | None = None) -> Path | None:
    """Varuna's checkpoint that is meant: the path itself, or the newest in it; None if neither."""
    if _is_varunas(path):
        return path
    if not path.is_dir():
        return None
    inside = [one for one in path.iterdir() if FOLDER.fullmatch(one.name) and _is_varunas(one)]
    numbered = {int(one.name.removeprefix("varuna_ckpt_")): one for one in inside}
    if iteration is not None and numbered and iteration not in numbered:
        raise NoCheckpoint(
            f"{path} has no varuna_ckpt_{iteration}: {', '.join(map(str, sorted(numbered)))}"
        )
    if not numbered:
        return None
    return numbered[max(numbered) if iteration is None else iteration]


def _is_varunas(path: Path) -> bool:
    return path.is_dir() and any(FILE.fullmatch(one.name) for one in path.iterdir())


def list_files(folder: Path) -> VarunaFiles:
    """The files of a folder; an error names what is not there."""
    match = FOLDER.fullmatch(folder.resolve().name)
    if match is None:
        raise CheckpointError(
            f"{folder}: its name must be varuna_ckpt_<step>, which says its iteration"
        )
    by_kind: dict[str, dict[int, dict[int | None, Path]]] = {
        "fp32-params": defaultdict(dict),
        "state": defaultdict(dict),
    }
    for path in sorted(folder.iterdir()):
        named = FILE.fullmatch(path.name)
        if named is not None:
            kind, segment, shard = named.groups()
            by_kind[kind][int(segment)][None if shard is None else int(shard)] = path
    params = {s: _list_shards(folder, held) for s, held in by_kind["fp32-params"].items()}
    state = {s: _list_shards(folder, held) for s, held in by_kind["state"].items()}
    for segment in range(max(params, default=-1) + 1):
        if segment not in params:
            raise DamagedCheckpoint(f"{folder / f'opt-fp32-params-{segment}'} is missing")
    return VarunaFiles(
        iteration=int(match[1]),
        params=dict(sorted(params.items())),
        state=dict(sorted(state.items())),
        common=folder / COMMON,
        num_marked=_count_marked(folder / MARKERS),
    )


def _list_shards(folder: Path, held: Mapping[int | None, Path]) -> list[Path]:
    """The whole file, or all shards: files of both kinds are of two saves."""
    if None in held:
        if len(held) > 1:
            others = [path.name for shard, path in held.items() if shard is not None]
            raise CheckpointError(
                f"{held[None]} is whole, and {', '.join(others)} beside it are shards of another "
                "save: remove those that are older"
            )
        return [held[None]]
    for shard in range(max(one for one in held if one is not None) + 1):
        if shard not in held:
            first = next(iter(held.values()))
            raise DamagedCheckpoint(f"{folder / first.name.rpartition('_')[0]}_{shard} is missing")
    return [path for _, path in sorted(held.items(), key=lambda one: one[0] or 0)]


def _count_marked(folder: Path) -> int:
    """The number of parameters that the markers add up to."""
    total = 0
    markers = sorted(folder.glob("complete_*.txt")) if folder.is_dir() else []
    if not markers:
        raise DamagedCheckpoint(f"{folder} holds no complete_<rank>.txt: no rank ended its save")
    for path in markers:
        try:
            total += int(path.read_text())
        except ValueError as error:
            raise DamagedCheckpoint(f"{path} is not a number of parameters") from error
    return total


def import_varuna(
    folder: Path,
    store: Path,
    *,
    optimizer: str | None = None,
    rest: Path | None = None,
    ties: Sequence[Sequence[str]] = (),
    iteration: int | None = None,
) -> Path:
    """A checkpoint of ours of one of Varuna's, which any layout loads; its folder.

    With the name of an `optimizer` its state is taken too. `rest` is a file of a plain state dict,
    for what Varuna did not save: buffers, and parameters of the model's root. The iteration is that
    of the folder's name, if none is given.
    """
    found, pickles = list_files(folder), _Pickles()
    params = _list_params(found.params, folder, pickles)
    _expect_marked(found, len(params), folder)
    entries = list(params.values())
    if rest is not None:
        entries += [entry for entry in read_entries(rest)[0] if entry.name not in params]
    trees: dict[str, Any] = {}
    if optimizer is not None:
        leads = {name: names[0] for names in ties for name in names}
        made, trees = _take_optimizer(found, folder, params, optimizer, leads, pickles)
        entries += made
    number = found.iteration if iteration is None else iteration
    return save_weights(store, entries, ties, number, str(folder), trees)


class _Pickles:
    """The contents of files, of one at a time."""

    def __init__(self) -> None:
        self._last: tuple[Path, dict[str, Any]] | None = None

    def read(self, path: Path) -> dict[str, Any]:
        if self._last is None or self._last[0] != path:
            self._last = None
            self._last = path, read_pickle(path)
        return self._last[1]


def _expect_marked(found: VarunaFiles, held: int, folder: Path) -> None:
    """Refuse a save that was not finished, or whose last segment is not there."""
    if found.num_marked < held:
        raise DamagedCheckpoint(
            f"{folder} was not finished: it holds {held} parameters, and its markers tell of "
            f"{found.num_marked}"
        )
    if found.num_marked > held:
        raise DamagedCheckpoint(
            f"{folder} holds {held} parameters, and its markers tell of {found.num_marked}: files "
            f"after opt-fp32-params-{max(found.params)} are missing, or {MARKERS} has some of an "
            "earlier save of other ranks: remove those"
        )


def _list_params(
    files: Mapping[int, Sequence[Path]], folder: Path, pickles: _Pickles
) -> dict[str, Entry]:
    """Every parameter, read again when it is written."""
    held: dict[str, Entry] = {}
    origin: dict[str, Path] = {}
    for path in (path for paths in files.values() for path in paths):
        for name, value in pickles.read(path).items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"{path}: {name!r} is a {type(value).__name__}, not a parameter"
                )
            if name not in held:
                load = partial(_load_again, pickles, path, name)
                held[name] = replace(make_entry(WEIGHT, name, value), load=load)
                origin[name] = path
            elif not torch.equal(_Pickles().read(origin[name])[name], value):
                raise CheckpointError(
                    f"{name!r} differs in {origin[name]} and in {path.name}: they are of two saves"
                )
    if not held:
        raise DamagedCheckpoint(f"{folder} holds no parameters")
    return held


def _load_again(pickles: _Pickles, path: Path, name: str, key: str | None = None) -> Tensor:
    found = pickles.read(path)[name]
    tensor: Tensor = found if key is None else found[key]
    return tensor.detach()


def read_pickle(path: Path) -> dict[str, Any]:
    """A dict that `torch.save` wrote, without running anything of it."""
    try:
        found = _load(path)
    except pickle.UnpicklingError as error:
        first = next(iter(re.findall(r"GLOBAL ([\w.]+)", str(error))), "something unknown")
        raise CheckpointError(
            f"{path} is not read: unpickling it would run {first}. Where you trust it, load it "
            "with torch.load(..., weights_only=False), and save the plain tensors in its place"
        ) from error
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path} is missing") from error
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DamagedCheckpoint(f"{path} is no whole file of torch.save: {first}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise CheckpointError(
            f"{path} holds a {type(found).__name__}, not what Varuna writes there"
        )
    return found


def _load(path: Path) -> Any:
    """Mapped into memory, where its format is one that can be."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:
        return torch.load(path, map_location="cpu", weights_only=True)


# The optimizer.


def _take_optimizer(
    found: VarunaFiles,
    folder: Path,
    params: Mapping[str, Entry],
    kind: str,
    leads: Mapping[str, str],
    pickles: _Pickles,
) -> tuple[list[Entry], dict[str, Any]]:
    """Entries of the state's tensors, and the rest by parameter."""
    if kind not in OPTIMIZERS:
        raise CheckpointError(f"optimizer {kind!r}: one of {', '.join(OPTIMIZERS)}")
    for segment in found.params:
        if segment not in found.state:
            raise DamagedCheckpoint(f"{folder / f'opt-state-{segment}'} is missing")
    options, step = _read_common(found.common)
    entries: list[Entry] = []
    trees: dict[str, Any] = {}
    for path in (path for paths in found.state.values() for path in paths):
        for name, state in pickles.read(path).items():
            if name in trees or leads.get(name, name) != name:
                continue
            if name not in params:
                raise CheckpointError(f"{path}: {name!r} has a state and no parameter")
            fitted = _fit_state(path, name, state, params[name].shape, kind, step)
            like = torch.empty(params[name].shape, device="meta")
            made, tree = take_state(name, like, fitted)
            for entry in made:
                key = entry.kind.removeprefix(OPTIMIZER)
                if entry.shape == params[name].shape and key in state:
                    load = partial(_load_again, pickles, path, name, key)
                    entry = replace(entry, load=load)
                entries.append(entry)
            trees[name] = {"optimizer": kind, "options": options, "state": tree}
    return entries, trees


def _read_common(path: Path) -> tuple[Any, int | None]:
    """The options that all groups agree on, and the step where it is counted in the groups."""
    groups = read_pickle(path).get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError(f"{path} has no param_groups")
    agreed = {
        key: value
        for key, value in (groups[0] if groups else {}).items()
        if key in OPTIONS and all(group.get(key) == value for group in groups)
    }
    steps = {int(group["step"]) for group in groups if "step" in group}
    return to_plain(agreed, str(path)), max(steps, default=None)


def _fit_state(
    path: Path, name: str, state: Any, shape: tuple[int, ...], kind: str, step: int | None
) -> dict[str, Any]:
    """The state as torch's optimizer of that name holds it: the step is a tensor of its own."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: the state of {name!r} is a {type(state).__name__}")
    made = dict(state)
    for key in _list_needed(kind):
        if key not in made:
            raise CheckpointError(
                f"{path}: the state of {name!r} has no {key!r}, which {kind} needs; "
                f"it has {', '.join(map(repr, made)) or 'nothing'}"
            )
        if tuple(made[key].shape) != shape:
            raise CheckpointError(
                f"{path}: {key!r} of {name!r} is {list(made[key].shape)}, its parameter "
                f"{list(shape)}"
            )
    if kind != "SGD":
        counted = made.get("step", step)
        if counted is None:
            raise CheckpointError(f"{path}: nothing says how many steps {name!r} has taken")
        made["step"] = torch.tensor(float(counted))
    return made


def _list_needed(kind: str) -> Iterable[str]:
    return () if kind == "SGD" else ("exp_avg", "exp_avg_sq")
