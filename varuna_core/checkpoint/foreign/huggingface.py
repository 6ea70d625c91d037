"""Convert Hugging Face's folders (safetensors, config.json) to our checkpoints, and back.

    import   folder ─► a checkpoint of weights, under their names or a built-in program's
    export   a checkpoint of any layout ─► model-00001-of-00003.safetensors ..., index, config.json

Tensors are converted one by one, so only one is in memory at a time, twice if it is transposed. A
model that the built-in program would compute differently is refused with the reason.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varuna_core.checkpoint.foreign.names import (
    Place,
    Program,
    Sizes,
    find_place,
    find_program,
    find_tie,
    list_differences,
    list_shapes,
    read_known,
    read_sizes,
    render_config,
)
from varuna_core.checkpoint.foreign.weight_files import INDEX, SINGLE, Weights, open_weights
from varuna_core.checkpoint.format.box import Box, whole
from varuna_core.checkpoint.format.document import make_folder
from varuna_core.checkpoint.format.entries import DTYPES, Entry, write_file
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.format.manifest import WEIGHT, find_leads
from varuna_core.checkpoint.store.exchange import list_stored_names, name_stored, save_weights
from varuna_core.checkpoint.store.reader import CheckpointReader

CONFIG = "config.json"
BESIDE = ("generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json")
"""Files that are copied from the folder of the given config to the folder of the exported model."""

TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Types of an exported model: the name in its config, and the name in safetensors."""

FLOATS = ("F64", "F32", "F16", "BF16")
SHARD_BYTES = 5 * 10**9


# Import.


def import_folder(
    source: Path,
    store: Path,
    *,
    iteration: int = 0,
    ties: Sequence[Sequence[str]] = (),
    program: Program | None = None,
    vocab: int | None = None,
    sequence: int | None = None,
    optimizer: str | None = None,
) -> Path:
    """Write the folder's weights as a checkpoint, which any layout loads; return its folder.

    For a torch.distributed.checkpoint folder, the state of an `optimizer` of this class is imported
    too. For a built-in `program` weights get its names and layout. `vocab` then adds tokens with
    weights of zero, whose logits count in the loss; `sequence` drops later positions.
    """
    stored = open_weights(source)
    if program is None:
        entries = [_take_stored(stored, name, name) for name in stored]
        state, trees = stored.take_optimizer(optimizer) if optimizer is not None else ([], {})
        return save_weights(store, [*entries, *state], ties, iteration, source.name, trees)
    config = read_config(source)
    _refuse_differences(program, config, source)
    sizes, heads = read_sizes(program, config)
    tie = find_tie(program, sizes)
    entries = [
        _resize(_take_ours(program, sizes, stored, name, shape, source), sizes, vocab, sequence)
        for name, shape in list_shapes(program, sizes, heads).items()
        if tie is None or name != tie[1]
    ]
    more = [] if tie is None else [tie]
    model: dict[str, Any] = {"heads": heads}
    if sizes.llama is not None:
        model |= {"sequence": sequence or sizes.sequence, "llama": asdict(sizes.llama)}
    return save_weights(store, entries, [*ties, *more], iteration, source.name, model=model)


def read_config(path: Path) -> dict[str, Any]:
    """Read the config.json of a folder, or the file at this path."""
    file = path / CONFIG if path.is_dir() else path
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as a config.json: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is not a config.json: it holds a {type(found).__name__}")
    return found


def _refuse_differences(program: Program, config: Mapping[str, Any], source: Path) -> None:
    differences = list_differences(program, config)
    if differences:
        raise CheckpointError(
            f"{source} holds a model that {program} would compute differently: "
            f"{'; '.join(differences)}. Train the model itself, with cut_before and open_weights"
        )


def _take_stored(stored: Weights, theirs: str, name: str) -> Entry:
    laid = stored.describe(theirs)
    return Entry(
        kind=WEIGHT,
        name=name,
        shape=laid.extent,
        box=whole(laid.extent),
        dtype=laid.dtype,
        load=lambda: stored[theirs],
    )


def _take_ours(
    program: Program,
    sizes: Sizes,
    stored: Weights,
    name: str,
    shape: tuple[int, ...],
    source: Path,
) -> Entry:
    """Return the entry of a built-in program's tensor; the Hugging Face tensor is converted when
    the entry is written."""
    place = find_place(program, name, sizes.llama)
    found = [_find_theirs(stored, part) for part in place.parts]
    if None in found and place.also:
        found = [_find_theirs(stored, other) for other in place.also]
    parts = [_take_stored(stored, theirs, name) for theirs in found if theirs is not None]
    if len(parts) < len(place.parts):
        lost = next(part for part, there in zip(place.parts, found, strict=True) if there is None)
        kind = "GPT2LMHeadModel" if program == "pretrain_gpt" else "BertForPreTraining"
        kind = kind if sizes.llama is None else "ForCausalLM"
        raise CheckpointError(f"{source} has no {lost!r}: {program} needs the weights of a {kind}")
    wanted = _shape_theirs(place, shape)
    for theirs, part in zip(found, parts, strict=True):
        if part.shape != wanted:
            raise CheckpointError(
                f"{theirs!r} has shape {list(part.shape)} in {source}, but its config says "
                f"{list(wanted)}"
            )
        if part.dtype != parts[0].dtype:
            raise CheckpointError(f"{theirs!r} is {part.dtype}, {found[0]!r} is {parts[0].dtype}")
    return parts[0]._replace(shape=shape, box=whole(shape), load=lambda: _join(place, parts))


def _shape_theirs(place: Place, shape: tuple[int, ...]) -> tuple[int, ...]:
    first, *rest = shape
    cut = (first // len(place.parts), *rest)
    return cut[::-1] if place.transposed else cut


def _join(place: Place, parts: Sequence[Entry]) -> Tensor:
    tensors = [part.load() for part in parts]
    made = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    return made.t().contiguous() if place.transposed else made


def _find_theirs(stored: Weights, name: str) -> str | None:
    """Return the tensor's name in the file, which may lack the model's prefix (a model without its
    head) or spell norms as BERT's first files do; None if it is missing."""
    older = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    older = older.replace("LayerNorm.bias", "LayerNorm.beta")
    spelled = (name, name.partition(".")[2], older, older.partition(".")[2])
    return next((one for one in spelled if stored.holds(one)), None)


def _resize(entry: Entry, sizes: Sizes, vocab: int | None, sequence: int | None) -> Entry:
    """Add rows of zeros for additional tokens, or drop the rows of later positions."""
    if entry.name in _list_words(sizes) and vocab not in (
        None,
        sizes.vocab,
    ):
        if vocab < sizes.vocab:
            raise CheckpointError(
                f"vocab {vocab} is less than the {sizes.vocab} tokens of the checkpoint"
            )
        return with_rows(entry, vocab)
    if entry.name == "positions.weight" and sequence not in (None, sizes.sequence):
        if sequence > sizes.sequence:
            raise CheckpointError(f"sequence {sequence} exceeds {sizes.sequence} positions")
        return with_rows(entry, sequence)
    return entry


def _list_words(sizes: Sizes) -> tuple[str, ...]:
    """Return the names of tensors with a row per token; a tied head is the embedding itself."""
    untied = sizes.llama is not None and not sizes.llama.tied
    return ("tokens.weight", "token_head.decoder.bias", *(["head.weight"] if untied else []))


def with_rows(entry: Entry, rows: int) -> Entry:
    """Return the entry cut to this number of rows, or padded with rows of zeros."""
    shape = (rows, *entry.shape[1:])

    def load() -> Tensor:
        made, held = torch.zeros(shape, dtype=DTYPES[entry.dtype]), entry.load()
        made[: len(held)] = held[:rows]
        return made

    return entry._replace(shape=shape, box=whole(shape), load=load)


# Export.


def export_folder(
    folder: Path,
    target: Path,
    *,
    config: Path | None = None,
    heads: int | None = None,
    vocab: int | None = None,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
    prefix: str = "",
) -> list[str]:
    """Export a checkpoint to a new folder for `from_pretrained`, and return the names of its files.

    A built-in program's weights get Hugging Face's names and a config; others keep their names,
    with the model's `config` (a file or a folder). `vocab` drops tokens added as padding. `prefix`
    selects the tensors of a part of the trained model and is removed from their names.
    """
    with make_folder(target) as part:
        if config is not None:
            read_config(config)  # before anything is written
        part.mkdir(parents=True)
        with CheckpointReader(folder) as reader:
            entries, made = _take_model(reader, config, heads, vocab, dtype, prefix)
            entries = [_cast(entry, TYPES[dtype]) for entry in entries]
            _write_shards(part, entries, shard_bytes)
        if made is not None:
            (part / CONFIG).write_text(json.dumps(made, indent=2) + "\n")
        if config is not None and config.is_dir():
            for pattern in BESIDE:
                for path in config.glob(pattern):
                    shutil.copyfile(path, part / path.name)
    return sorted(path.name for path in target.iterdir())


def _take_model(
    reader: CheckpointReader,
    config: Path | None,
    heads: int | None,
    vocab: int | None,
    dtype: str,
    prefix: str,
) -> tuple[list[Entry], dict[str, Any] | None]:
    """Return the entries under their exported names, tied ones once, and the config."""
    shapes = reader.state.shapes or {name: reader.shape(name) for name in list_stored_names(reader)}
    later = {name for names in reader.state.ties for name in names[1:]}
    known = read_known(reader.state.user)
    found = find_program(shapes, known)
    given = None if config is None else read_config(config)
    if found is None:
        if heads is not None or vocab is not None:
            raise CheckpointError(
                f"{reader.folder} was not written by a built-in program, so heads and vocab do "
                "not apply: omit them"
            )
        made = None if given is None else {**given, "dtype": dtype}
        if made is not None:
            made.pop("torch_dtype", None)  # as it was called before
        return list(_take_named(reader, shapes, prefix)), made
    if prefix:
        raise CheckpointError(
            f"{reader.folder} has a built-in model, which takes no prefix: omit prefix {prefix!r}"
        )
    program, sizes = found
    if given is not None:
        _refuse_differences(program, given, reader.folder)
        heads = heads or read_sizes(program, given)[1]
    heads = heads or infer_heads(reader)
    if sizes.hidden % heads and sizes.llama is None:
        raise CheckpointError(f"the model's width {sizes.hidden} is not divisible by {heads} heads")
    kept = sizes.vocab if vocab is None else vocab
    if not 0 < kept <= sizes.vocab:
        raise CheckpointError(f"vocab {kept}: expected 1 to {sizes.vocab}")
    entries = [
        entry
        for name in shapes
        if name not in later
        for entry in _take_theirs(reader, program, sizes, name, kept)
    ]
    return entries, render_config(program, replace(sizes, vocab=kept), heads, dtype)


def _take_named(reader: CheckpointReader, names: Iterable[str], prefix: str) -> Iterator[Entry]:
    """Yield the tensors whose names begin with `prefix`, without the prefix; tied ones once."""
    leads = find_leads(reader.state.ties)
    done: set[str] = set()
    for name in names:
        lead = leads.get(name, name)
        if name.startswith(prefix) and lead not in done:
            done.add(lead)
            yield name_stored(reader, name)._replace(name=name.removeprefix(prefix))
    if not done:
        raise CheckpointError(f"{reader.folder} has no name that begins with {prefix!r}")


def infer_heads(reader: CheckpointReader) -> int:
    heads = read_known(reader.state.user).heads
    if heads is None:
        raise CheckpointError(
            f"{reader.folder} does not record the model's number of attention heads: add --heads"
        )
    return heads


def _take_theirs(
    reader: CheckpointReader, program: Program, sizes: Sizes, name: str, vocab: int
) -> Iterator[Entry]:
    """Yield Hugging Face's tensors for one of the program's; each is read when it is written."""
    place = find_place(program, name, sizes.llama)
    rows, *rest = reader.shape(name)
    if name in _list_words(sizes):
        rows = vocab
    count = rows // len(place.parts)
    theirs = place.also[:1] or place.parts
    for number, part in enumerate(theirs):
        box = Box((number * count, *[0] * len(rest)), (count, *rest))
        shape = box.extent[::-1] if place.transposed else box.extent
        yield name_stored(reader, name)._replace(
            name=part,
            shape=shape,
            box=whole(shape),
            load=_load_box(reader, name, box, place.transposed),
        )


def _load_box(
    reader: CheckpointReader, name: str, box: Box, transposed: bool
) -> Callable[[], Tensor]:
    def load() -> Tensor:
        held = reader.read(name, box=box)
        return held.t().contiguous() if transposed else held

    return load


def _cast(entry: Entry, word: str) -> Entry:
    """Convert floating-point tensors to another type; leave others unchanged."""
    if entry.dtype == word or entry.dtype not in FLOATS:
        return entry
    return entry._replace(dtype=word, load=lambda: entry.load().to(DTYPES[word]))


def deal_shards(entries: Sequence[Entry], shard_bytes: int) -> list[list[Entry]]:
    """Divide entries, in order, into shards of at most `shard_bytes`; a larger tensor is alone."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    return shards


def _write_shards(folder: Path, entries: Sequence[Entry], shard_bytes: int) -> None:
    shards = deal_shards(entries, shard_bytes)
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    )
    with ThreadPoolExecutor(1) as beside:
        for name, held in zip(names, shards, strict=True):
            write_file(folder / name, held, {}, beside).result()
    if len(shards) > 1:
        listed = {e.name: name for name, held in zip(names, shards, strict=True) for e in held}
        total = sum(entry.num_bytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": listed}
        (folder / f"model{INDEX}").write_text(json.dumps(index, indent=2) + "\n")
