"""Convert Megatron-LM's GPT checkpoints to ours, and back to torch_dist: only the weights.

    legacy      iter_0000100/mp_rank_01_002/model_optim_rng.pt     one file for each rank
    torch_dist  iter_0000100/.metadata, __0_0.distcp               pieces of whole tensors
                             common.pt                             arguments, before Core 0.19
                             metadata.json                         the name of the format

For both formats, latest_checkpointed_iteration.txt is in the parent folder. Their query, key and
value are interleaved by heads; ours follow one another. A model that ours would compute differently
is refused with the reasons; settings that the file's own arguments lack are not checked.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varuna_core.checkpoint.foreign.distcp import (
    METADATA,
    Stored,
    list_stored,
    read_object,
    write_stored,
)
from varuna_core.checkpoint.foreign.huggingface import TYPES, infer_heads, with_rows
from varuna_core.checkpoint.foreign.names import TIES, Sizes, find_program, list_shapes
from varuna_core.checkpoint.foreign.pickles import StandIn, load_torch_file
from varuna_core.checkpoint.format.box import Box, whole
from varuna_core.checkpoint.format.document import make_folder, sync_folder
from varuna_core.checkpoint.format.entries import DTYPES, Entry
from varuna_core.checkpoint.format.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint
from varuna_core.checkpoint.format.manifest import WEIGHT
from varuna_core.checkpoint.store.exchange import save_weights
from varuna_core.checkpoint.store.reader import CheckpointReader

LATEST = "latest_checkpointed_iteration.txt"
FILES = ("model_optim_rng.pt", "model_rng.pt")
COMMON = "common.pt"
COMMON_STATE = "common_state/shard_0_1"
"""Name under which Core, since 0.19, writes the arguments among the pieces; Core still reads the
file common.pt too."""
FORMAT = "metadata.json"
TORCH_DIST = {
    **{"sharded_backend": "torch_dist", "sharded_backend_version": 1},
    **{"common_backend": "torch", "common_backend_version": 1},
}
_STATE = re.compile(r"(?:optimizer|chained_\d+)\.")
"""Prefixes of names in torch_dist that belong to the optimizer, not to the model."""
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_ITERATION = re.compile(r"iter_(\d+)")

BLOCK = {
    "norm_1": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.output": "self_attention.linear_proj",
    "norm_2": "pre_mlp_layernorm",
    "mlp.inner": "mlp.linear_fc1",
    "mlp.output": "mlp.linear_fc2",
}
"""Maps the names of a block's layers in our model to megatron-core's names."""
_OTHER_NAMES = {
    "self_attention.query_key_value": "attention.qkv",
    "attention.query_key_value": "attention.qkv",
    "self_attention.dense": "attention.output",
    "attention.dense": "attention.output",
    "post_attention_layernorm": "norm_2",
    "mlp.dense_h_to_4h": "mlp.inner",
    "mlp.dense_4h_to_h": "mlp.output",
}
"""Names in releases before megatron-core, with our parts of a block."""
_NORM_IN = {"self_attention.linear_qkv": "norm_1", "mlp.linear_fc1": "norm_2"}
"""Layers of Transformer Engine and of torch_dist that include the preceding norm."""
_NORM_OF = {ours: f"{theirs}.layer_norm_" for theirs, ours in _NORM_IN.items()}
PARTS = {theirs: ours for ours, theirs in BLOCK.items()} | _OTHER_NAMES
_IN_BLOCK = re.compile(
    r"(?:decoder|(?:language_model\.)?(?:encoder|transformer))\.layers\.(?:(\d+)\.)?(.+)"
)
OUTSIDE = {
    "tokens.weight": "embedding.word_embeddings.weight",
    "positions.weight": "embedding.position_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "norm.bias": "decoder.final_layernorm.bias",
}
"""Our tensors outside of blocks, with megatron-core's names."""
_OUTSIDE = (
    (r"(?:language_model\.)?embedding\.word_embeddings\.weight", "tokens.weight"),
    (r"(?:language_model\.)?embedding\.position_embeddings\.weight", "positions.weight"),
    (
        r"(?:decoder|language_model\.(?:encoder|transformer))\.final_layernorm\.(weight|bias)",
        "norm.",
    ),
    (r"(?:language_model\.)?output_layer\.weight", "head.weight"),
    (r"word_embeddings(?:_for_head)?\.weight", "head.weight"),
)
_OTHERS = (
    (r"experts\.|\.router\.", "a mixture of experts"),
    (r"tokentype_embeddings|lm_head\.|binary_head\.|pooler\.", "BERT"),
    (r"cross_?attention|inter_attention", "T5"),
    (r"\.mixer\.", "Mamba"),
)
"""Patterns of tensor names, with the kind of model that has such tensors."""
_ROWS = ("tokens", "head", "attention.qkv", "mlp.inner")
_COLUMNS = ("attention.output", "mlp.output")
"""Layers whose weights tensor parallelism splits by rows or by columns; each rank has all others.
"""

WANTED: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("learned_absolute",),
    "use_rotary_position_embeddings": (False,),
    "normalization": ("LayerNorm",),
    "norm_epsilon": (1e-5,),
    "layernorm_epsilon": (1e-5,),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "add_bias_linear": (True,),
    "swiglu": (False,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "untie_embeddings_and_output_weights": (False,),
    "group_query_attention": (False,),
    "multi_latent_attention": (False,),
    "qk_layernorm": (False,),
    "num_experts": (None,),
}
"""Megatron's arguments with the values that our model has; missing arguments are not checked."""


@dataclass(frozen=True, kw_only=True)
class MegatronCheckpoint:
    """A checkpoint of Megatron-LM."""

    tensors: dict[str, Entry]
    """Tensors by our names; query, key and value are still in Megatron's order."""
    args: dict[str, Any] | None
    iteration: int | None


def find_folder(path: Path, iteration: int | None = None) -> Path | None:
    """Return the folder of a Megatron-LM checkpoint: the path itself, or in it the wanted iteration
    or else the latest; None if there is none."""
    if is_theirs(path):
        return path
    if not path.is_dir():
        return None
    held = {
        int(match[1]): one
        for one in path.iterdir()
        if (match := _ITERATION.fullmatch(one.name)) and is_theirs(one)
    }
    if iteration is not None and held:
        if iteration not in held:
            listed = ", ".join(map(str, sorted(held)))
            raise NoCheckpoint(f"{path} has no iteration {iteration}: {listed}")
        return held[iteration]
    try:
        latest = (path / LATEST).read_text().strip()
    except OSError:
        latest = ""
    if latest == "release" and is_theirs(path / "release"):
        return path / "release"
    if latest.isdecimal() and int(latest) in held:
        return held[int(latest)]
    return held[max(held)] if held else None


def is_theirs(path: Path) -> bool:
    return bool(_list_ranks(path)) or is_torch_dist(path)


def is_torch_dist(path: Path) -> bool:
    """Return True for a folder with a distributed checkpoint, complete or not."""
    return (path / METADATA).is_file() or "sharded_backend" in _read_format(path)


def _read_format(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / FORMAT).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _list_ranks(path: Path) -> dict[tuple[int, int], Path]:
    """Return the file of each (pipeline, tensor) rank."""
    found: dict[tuple[int, int], Path] = {}
    if not path.is_dir():
        return found
    for one in sorted(path.iterdir()):
        match = _RANK.fullmatch(one.name)
        file = next((one / name for name in FILES if (one / name).is_file()), None)
        if match and file is not None:
            found[int(match[2] or 0), int(match[1])] = file
    return found


def import_megatron(
    folder: Path,
    store: Path,
    *,
    iteration: int | None = None,
    heads: int | None = None,
    vocab: int | None = None,
    sequence: int | None = None,
) -> tuple[Path, list[str]]:
    """Import weights for pretrain_gpt; return the new checkpoint's folder, and notes on settings
    that could not be checked.

    `vocab` drops padding tokens, or adds tokens with weights of zero; `sequence` drops later
    positions.
    """
    held = _read_torch_dist(folder) if is_torch_dist(folder) else _read_legacy(folder)
    unknown = []
    if held.args is None:
        unknown = ["no arguments are stored, so activation, norms and positions were not checked"]
        args: dict[str, Any] = {}
    else:
        args = held.args
    heads = heads or args.get("num_attention_heads")
    if not isinstance(heads, int):
        raise CheckpointError(
            f"{folder} does not record the model's number of attention heads: add --heads"
        )
    entries = list_entries(held.tensors, folder, heads=heads, vocab=vocab, sequence=sequence)
    number = held.iteration if iteration is None else iteration
    made = save_weights(
        store, entries, [TIES["pretrain_gpt"]], number or 0, folder.name, model={"heads": heads}
    )
    return made, unknown


def refuse_differences(differences: Sequence[str], folder: Path) -> None:
    if differences:
        raise CheckpointError(
            f"{folder} holds a model that pretrain_gpt would compute differently: "
            f"{'; '.join(differences)}"
        )


def list_differences(args: Mapping[str, Any]) -> list[str]:
    """Return the settings in which Megatron's model differs from pretrain_gpt, by its `args`."""
    found = [
        f"{name} {args[name]!r}, ours is {wanted[0]!r}"
        for name, wanted in WANTED.items()
        if name in args and not isinstance(args[name], StandIn) and args[name] not in wanted
    ]
    gelu = [args[name] for name in ("bias_gelu_fusion", "openai_gelu") if name in args]
    if gelu and not any(gelu):
        found.append("an exact gelu (no bias_gelu_fusion, no openai_gelu), not the tanh form")
    hidden, inner = args.get("hidden_size"), args.get("ffn_hidden_size")
    if isinstance(hidden, int) and isinstance(inner, int) and inner != 4 * hidden:
        found.append(f"ffn_hidden_size {inner}, ours is {4 * hidden}")
    return found


def list_entries(
    tensors: Mapping[str, Entry],
    folder: Path,
    *,
    heads: int,
    vocab: int | None = None,
    sequence: int | None = None,
) -> list[Entry]:
    """Convert Megatron-LM's tensors, which have pretrain_gpt's names already, to those of
    pretrain_gpt, vjob's own GPT; raise CheckpointError for a model that pretrain_gpt cannot
    compute.

    Megatron-LM groups query, key and value by head; here they follow one another.
    """
    for name in ("tokens.weight", "positions.weight"):
        if name not in tensors:
            theirs = "word" if name.startswith("tokens") else "position"
            raise CheckpointError(
                f"{folder} has no {theirs} embedding, so it is not a GPT model for pretrain_gpt"
            )
    blocks = {int(name.split(".")[1]) for name in tensors if name.startswith("blocks.")}
    (rows, hidden), (positions, _) = (
        tensors["tokens.weight"].shape,
        tensors["positions.weight"].shape,
    )
    sizes = Sizes(layers=len(blocks), hidden=hidden, sequence=positions, vocab=rows)
    if hidden % heads:
        raise CheckpointError(f"the model's width of {hidden} is not divisible by {heads} heads")
    wanted = list_shapes("pretrain_gpt", sizes)
    more = [f"has {name}, which pretrain_gpt has not" for name in tensors if name not in wanted]
    first, tied = TIES["pretrain_gpt"]
    for name, shape in wanted.items():
        if name not in tensors and name != tied:
            more.append(f"has no {name}")
        elif name in tensors and tensors[name].shape != shape:
            more.append(f"{name} is {list(tensors[name].shape)}, ours is {list(shape)}")
    if (
        not more
        and tied in tensors
        and not torch.equal(tensors[tied].load(), tensors[first].load())
    ):
        more.append("the output layer and the word embedding are not tied")
    if len(more) > 6:
        more[6:] = [f"{len(more) - 6} more"]
    refuse_differences(more, folder)
    if sequence is not None and sequence > sizes.sequence:
        raise CheckpointError(f"sequence {sequence}: {folder} has {sizes.sequence} positions")
    counts = {"tokens.weight": vocab, "positions.weight": sequence}
    entries = []
    for name in wanted:
        if name == tied:
            continue
        entry = tensors[name]
        if ".attention.qkv." in name:
            entry = entry._replace(load=_turned(entry.load, heads))
        count = counts.get(name)
        entries.append(entry if count is None else with_rows(entry, count))
    return entries


def _turned(load: Callable[[], Tensor], heads: int) -> Callable[[], Tensor]:
    return lambda: split_heads(load(), heads)


def split_heads(packed: Tensor, heads: int) -> Tensor:
    """Reorder query, key and value of each head to all queries, all keys, all values."""
    rest = packed.shape[1:]
    return packed.reshape(heads, 3, -1, *rest).transpose(0, 1).reshape(packed.shape)


def interleave_heads(packed: Tensor, heads: int) -> Tensor:
    """Reverse `split_heads`."""
    rest = packed.shape[1:]
    return packed.reshape(3, heads, -1, *rest).transpose(0, 1).reshape(packed.shape)


def read_name(name: str) -> tuple[int | None, str] | None:
    """Return a tensor's block number and pretrain_gpt's name without it; None if unknown.

    The number is None outside of blocks, and -1 if the first dimension counts the blocks.
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    for pattern, ours in _OUTSIDE:
        match = re.fullmatch(pattern, name)
        if match is not None:
            return None, ours + (match[1] if match.groups() else "")
    match = _IN_BLOCK.fullmatch(name)
    if match is None:
        return None
    number = -1 if match[1] is None else int(match[1])
    if match[2] in ("final_layernorm.weight", "final_layernorm.bias"):
        return None, match[2].replace("final_layernorm", "norm")
    part, _, kind = match[2].rpartition(".")
    if kind.startswith("layer_norm_") and part in _NORM_IN:
        return number, f"{_NORM_IN[part]}.{kind.removeprefix('layer_norm_')}"
    if part in PARTS and kind in ("weight", "bias"):
        return number, f"{PARTS[part]}.{kind}"
    return None


def build_unknown(theirs: str, path: Path) -> CheckpointError:
    """Build the error for a tensor that pretrain_gpt's model does not have."""
    other = next((f"is of {kind}: it " for mark, kind in _OTHERS if re.search(mark, theirs)), "")
    return CheckpointError(
        f"{path} {other}has {theirs!r}, which pretrain_gpt's model does not have"
    )


# Distributed checkpoints.


def _read_torch_dist(folder: Path) -> MegatronCheckpoint:
    backend = _read_format(folder).get("sharded_backend", "torch_dist")
    if backend != "torch_dist":
        raise CheckpointError(
            f"{folder} has the format {backend!r}, which is not supported: load and save it "
            "with Megatron-LM's --ckpt-format torch_dist"
        )
    if not (folder / COMMON).exists() and not (folder / FORMAT).exists():
        raise CheckpointError(
            f"{folder} has no {COMMON}: it is a plain torch.distributed.checkpoint (FSDP, "
            "torch_dcp), not Megatron-LM's torch_dist: give this folder itself to `import`"
        )
    held = None if (folder / COMMON).exists() else read_object(folder, COMMON_STATE)
    common = load_torch_file(folder / COMMON) if held is None else held
    if "checkpoint_version" in common:
        expect_known_order(common, folder)
    refuse_differences(list_differences(read_args(common) or {}), folder)
    tensors: dict[str, Entry] = {}
    for theirs, stored in list_stored(folder, lambda name: not _STATE.match(name)).items():
        found = read_name(theirs)
        if found is None:
            raise build_unknown(theirs, folder)
        for entry in _list_layers(stored, *found):
            if entry.name in tensors:
                raise CheckpointError(f"{folder} has {entry.name} twice, once as {theirs!r}")
            tensors[entry.name] = entry
    return MegatronCheckpoint(
        tensors=tensors, args=read_args(common), iteration=read_iteration(common, folder)
    )


def _list_layers(stored: Stored, number: int | None, name: str) -> Iterator[Entry]:
    """Yield an entry for a stored tensor. If `number` is -1, the tensor stacks all blocks: yield an
    entry for each block. Else `number` is the block's index, or None outside the blocks."""
    if number != -1:
        name = name if number is None else f"blocks.{number}.{name}"
        yield make_lazy_entry(name, stored.shape, stored.dtype, stored.read)
        return
    count = stored.shape[0] if stored.shape and all(stored.shape) else 0
    for block in range(count):
        box = Box((block, *[0] * (len(stored.shape) - 1)), (1, *stored.shape[1:]))
        load = partial(_read_block, stored, box)
        yield make_lazy_entry(f"blocks.{block}.{name}", stored.shape[1:], stored.dtype, load)


def _read_block(stored: Stored, box: Box) -> Tensor:
    return stored.read(box)[0]


# Legacy files.


def _read_legacy(folder: Path) -> MegatronCheckpoint:
    files = _list_ranks(folder)
    num_stages, num_halves = (max(rank[axis] for rank in files) + 1 for axis in (0, 1))
    for stage in range(num_stages):
        for half in range(num_halves):
            if (stage, half) not in files:
                name = f"mp_rank_{half:02d}" + (f"_{stage:03d}" if num_stages > 1 else "")
                raise DamagedCheckpoint(f"{folder}/{name} is missing")
    read = {rank: load_torch_file(path) for rank, path in files.items()}
    common = read[0, 0]
    expect_known_order(common, folder)
    refuse_differences(list_differences(read_args(common) or {}), folder)
    tensors: dict[str, list[Tensor]] = {}
    first = 0
    for chunk, stage in _list_chunks(read, num_stages):
        numbers: set[int] = set()
        for half in range(num_halves):
            path = files[stage, half]
            for theirs, tensor in _flatten(read[stage, half][chunk], path):
                found = read_name(theirs)
                if found is None:
                    raise build_unknown(theirs, path)
                number, name = found
                if number is not None:
                    numbers.add(number)
                    name = f"blocks.{first + number}.{name}"
                held = tensors.setdefault(name, [])
                if len(held) == half:  # of several chunks with the embedding the first
                    held.append(tensor)
        first += len(numbers)
    return MegatronCheckpoint(
        tensors={
            name: join_parts(name, parts, folder, num_halves) for name, parts in tensors.items()
        },
        args=read_args(common),
        iteration=read_iteration(common, folder),
    )


def expect_known_order(common: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError if query, key and value may be stored in another order."""
    version = common.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < 2:
        raise CheckpointError(
            f"{folder} has checkpoint_version {version}, which stores query, key and value in "
            "another order: load and save it with a later Megatron-LM"
        )


def read_args(common: Mapping[str, Any]) -> dict[str, Any] | None:
    args = common.get("args")
    return vars(args) if isinstance(args, StandIn) else args if isinstance(args, dict) else None


def read_iteration(common: Mapping[str, Any], folder: Path) -> int | None:
    found = common.get("iteration")
    match = _ITERATION.fullmatch(folder.resolve().name)
    return found if isinstance(found, int) else int(match[1]) if match else None


def _list_chunks(
    read: Mapping[tuple[int, int], dict[str, Any]], num_stages: int
) -> Iterator[tuple[str, int]]:
    """Yield each stage's `model`; of interleaved stages first each `model0`, then each `model1`."""
    names = [name for name in read[0, 0] if re.fullmatch(r"model\d*", name)]
    for name in sorted(names, key=lambda name: int(name.removeprefix("model") or 0)):
        for stage in range(num_stages):
            if name in read[stage, 0]:
                yield name, stage


def _flatten(
    state: Mapping[Any, Any], path: Path, prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dicts, with names joined by dots."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, path, f"{prefix}{name}.")
        elif isinstance(value, Tensor) and not str(name).endswith("_extra_state"):
            yield f"{prefix}{name}", value
        elif not str(name).endswith("_extra_state") and value is not None:
            kind = value.named if isinstance(value, StandIn) else type(value).__name__
            raise CheckpointError(f"{path}: {prefix}{name} is a {kind}, not a tensor")


def join_parts(
    name: str, parts: Sequence[Tensor], folder: Path, num_halves: int | None = None
) -> Entry:
    """Join the parts of a tensor that tensor parallelism split."""
    if num_halves is not None and len(parts) < num_halves:
        raise DamagedCheckpoint(f"{folder}: {name} is on only {len(parts)} of {num_halves} ranks")
    axis = find_axis(name)
    shape = list(parts[0].shape)
    if axis is not None:
        shape[axis] = sum(part.shape[axis] for part in parts)
    elif not all(torch.equal(part, parts[0]) for part in parts[1:]):
        raise DamagedCheckpoint(f"{folder}: {name} differs between ranks")
    return make_lazy_entry(
        name,
        tuple(shape),
        parts[0].dtype,
        lambda: parts[0] if axis is None else torch.cat(list(parts), axis),
    )


def find_axis(name: str) -> int | None:
    """Return the dimension along which tensor parallelism splits one of our tensors, or None."""
    owner, _, kind = re.sub(r"^blocks\.\d+\.", "", name).rpartition(".")
    if owner in _COLUMNS and kind == "weight":
        return 1
    return 0 if owner in _ROWS else None


def make_lazy_entry(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, load: Callable[[], Tensor]
) -> Entry:
    words = [word for word, known in DTYPES.items() if known == dtype]
    if not words:
        raise CheckpointError(f"{name} has type {dtype}, which is not supported")
    return Entry(kind=WEIGHT, name=name, shape=shape, box=whole(shape), dtype=words[0], load=load)


# Export.


def export_torch_dist(
    folder: Path,
    target: Path,
    *,
    heads: int | None = None,
    vocab: int | None = None,
    dtype: str = "float32",
) -> Path:
    """Export a checkpoint of pretrain_gpt to a new folder as a distributed checkpoint of
    megatron-core, which any number of ranks loads; return the folder of its iteration.

    The blocks are stacked, which is what all releases load by default. `vocab` adds tokens.
    """
    with make_folder(target) as part, CheckpointReader(folder) as reader:
        model = GptReader.of(reader, heads, vocab, dtype)
        place = part / f"iter_{reader.iteration:07d}"
        place.mkdir(parents=True)
        _save(model.list_common(), place / COMMON)
        write_stored(place, model.list_stacked(), model.list_objects())
        (place / FORMAT).write_text(json.dumps(TORCH_DIST))
        sync_folder(place)
        (part / LATEST).write_text(str(reader.iteration))
    return target / place.name


def _save(held: Mapping[str, Any], path: Path) -> None:
    with path.open("xb") as file:
        torch.save(held, file)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True, kw_only=True)
class GptReader:
    """Reads the tensors of the built-in GPT from a checkpoint of Varuna, with the rows of query,
    key and value in the order of Megatron-LM."""

    reader: CheckpointReader
    sizes: Sizes
    heads: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        reader: CheckpointReader,
        heads: int | None = None,
        vocab: int | None = None,
        dtype: str = "float32",
    ) -> GptReader:
        found = find_program(reader.state.shapes)
        if found is None or found[0] != "pretrain_gpt":
            raise CheckpointError(f"{reader.folder} is not a checkpoint of pretrain_gpt")
        sizes, heads = found[1], heads or infer_heads(reader)
        if sizes.hidden % heads:
            raise CheckpointError(
                f"the model's width of {sizes.hidden} is not divisible by {heads} heads"
            )
        if vocab is not None and vocab < sizes.vocab:
            raise CheckpointError(f"vocab {vocab}: the checkpoint has {sizes.vocab} tokens")
        sizes = replace(sizes, vocab=vocab or sizes.vocab)
        return cls(reader=reader, sizes=sizes, heads=heads, dtype=DTYPES[TYPES[dtype]])

    def load(self, name: str) -> Tensor:
        tensor = self.reader.read(name).to(self.dtype)
        if name == "tokens.weight" and len(tensor) < self.sizes.vocab:
            more = tensor.new_zeros(self.sizes.vocab - len(tensor), self.sizes.hidden)
            return torch.cat([tensor, more])
        return interleave_heads(tensor, self.heads) if ".attention.qkv." in name else tensor

    def list_stacked(self) -> Iterator[Entry]:
        """Yield Megatron's torch_dist tensors; a stacked tensor has one piece for each block."""
        for name, shape in list_shapes("pretrain_gpt", self.sizes).items():
            load = partial(self.load, name)
            block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
            if name in OUTSIDE:
                yield make_lazy_entry(OUTSIDE[name], shape, self.dtype, load)
            elif block is not None:
                number, part, kind = int(block[1]), block[2], block[3]
                theirs = _NORM_OF.get(part) or f"{BLOCK[part]}."
                whole_shape = (self.sizes.layers, *shape)
                entry = make_lazy_entry(
                    f"decoder.layers.{theirs}{kind}",
                    whole_shape,
                    self.dtype,
                    partial(_add_axis, load),
                )
                yield entry._replace(box=Box((number, *[0] * len(shape)), (1, *shape)))

    def list_objects(self) -> list[str]:
        """Return the names of empty objects that Megatron's layers look for besides tensors: the
        state of low-precision formats."""
        layers = self.sizes.layers
        return [
            f"decoder.layers.{theirs}._extra_state/shard_{number}_{layers}"
            for number in range(layers)
            for theirs in BLOCK.values()
            if ".linear_" in theirs
        ]

    def list_common(self) -> dict[str, Any]:
        return {
            "args": argparse.Namespace(**self.list_args()),
            "checkpoint_version": 3.0,
            "iteration": self.reader.iteration,
        }

    def list_args(self) -> dict[str, Any]:
        """Return the arguments that Megatron's `--use-checkpoint-args` and our import need."""
        sizes = self.sizes
        return {
            "num_layers": sizes.layers,
            "hidden_size": sizes.hidden,
            "ffn_hidden_size": 4 * sizes.hidden,
            "num_attention_heads": self.heads,
            "max_position_embeddings": sizes.sequence,
            "seq_length": sizes.sequence,
            "padded_vocab_size": sizes.vocab,
            "position_embedding_type": "learned_absolute",
            "add_position_embedding": True,
            "normalization": "LayerNorm",
            "norm_epsilon": 1e-5,
            "bias_gelu_fusion": True,
            "add_bias_linear": True,
            "swiglu": False,
            "untie_embeddings_and_output_weights": False,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "params_dtype": self.dtype,
            "no_save_optim": True,
            "no_save_rng": True,
        }


def _add_axis(load: Callable[[], Tensor]) -> Tensor:
    return load()[None]
