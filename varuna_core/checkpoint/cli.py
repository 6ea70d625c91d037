"""The commands of `python -m varuna_core.checkpoint`: inspect, verify, export and import.

inspect and verify need no torch. The exit code is 0 for success, 1 for damage or a failure, and 2
for invalid arguments.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from varuna_core.checkpoint.format.errors import CheckpointError, ForeignCheckpoint, NoCheckpoint
from varuna_core.checkpoint.format.manifest import Manifest, group_pieces, read_manifest
from varuna_core.checkpoint.format.remote import RemotePath, beside, parse_path
from varuna_core.checkpoint.store.store import (
    expect_ours,
    find_complete,
    find_damage,
    list_wrong_sizes,
    offer_good,
)
from varuna_core.records.checkpoints import MANIFEST, Complete, list_complete


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _build_parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        return code
    except (NoCheckpoint, ForeignCheckpoint, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    except (CheckpointError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m varuna_core.checkpoint", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    where = "a varuna_ckpt_<iteration> folder, or a folder of such folders"

    inspect = commands.add_parser("inspect", help="show the contents of checkpoints")
    inspect.add_argument("path", type=Path, help=where)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor with its shards")
    inspect.set_defaults(run=_inspect)

    verify = commands.add_parser("verify", help="read all files and compare their checksums")
    verify.add_argument("path", type=Path, help=where + ": then the newest")
    verify.add_argument("--iteration", type=int)
    verify.set_defaults(run=_verify)

    export = commands.add_parser("export", help="write weights and buffers as one plain state dict")
    export.add_argument("path", type=Path, help=where + ": then the newest")
    export.add_argument(
        "target",
        type=parse_path,
        help="a file that ends in .safetensors or .pt; with --hf, --torch-dist a new folder",
    )
    export.add_argument("--iteration", type=int)
    export.add_argument("--hf", action="store_true", help="write a folder for from_pretrained")
    export.add_argument(
        "--dcp", action="store_true", help="write a folder that torch.distributed.checkpoint loads"
    )
    export.add_argument(
        "--under",
        default="",
        metavar="KEY",
        help="--dcp: the key under which the checkpoint holds the state dict, such as model",
    )
    export.add_argument("--config", type=Path, help="--hf: the model's config.json, or its folder")
    export.add_argument(
        "--torch-dist",
        action="store_true",
        help="pretrain_gpt's model in Megatron-LM's torch_dist format, for any number of ranks",
    )
    export.add_argument("--heads", type=int, help="attention heads of the program, if not stored")
    export.add_argument(
        "--vocab",
        type=int,
        help="vocabulary size: --hf drops the padding beyond it, --torch-dist pads to it",
    )
    export.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="--hf, --torch-dist: type of the weights",
    )
    export.add_argument(
        "--prefix", default="", help="--hf: only names with this prefix, such as inner."
    )
    export.add_argument("--shard-mb", type=int, default=5000, help="--hf: maximum file size, in MB")
    export.set_defaults(run=_export)

    take = commands.add_parser("import", help="make a checkpoint from a plain state dict's weights")
    take.add_argument(
        "source",
        type=parse_path,
        help="a file of safetensors or torch.save; a folder of Hugging Face, Megatron-LM (a GPT "
        "for pretrain_gpt) or torch.distributed.checkpoint (FSDP2, torchtitan); the URL of "
        "a folder, such as s3://bucket/model, read with fsspec",
    )
    take.add_argument("store", type=Path, help="the folder of checkpoints")
    number = "checkpoint number (default: 0); Megatron-LM: iteration to import (default: newest)"
    take.add_argument("--iteration", type=int, help=number)
    tied = "names of one tied tensor; repeat the option for each group"
    take.add_argument("--tied", nargs="+", action="append", default=[], metavar="NAME", help=tied)
    take.add_argument(
        "--program",
        choices=("pretrain_gpt", "pretrain_bert"),
        help="import a folder of GPT-2 or BERT for this built-in program",
    )
    take.add_argument(
        "--vocab",
        type=int,
        help="vocabulary size: --program pads to it, Megatron-LM also drops padding beyond it",
    )
    take.add_argument("--heads", type=int, help="attention heads of Megatron-LM, if not stored")
    take.add_argument("--sequence", type=int, help="--program: number of positions to keep")
    take.add_argument(
        "--optimizer",
        choices=("AdamW", "Adam", "SGD", "Lamb"),
        help="torch.distributed.checkpoint: also import the optimizer's state",
    )
    take.set_defaults(run=_import)
    return parser


def _find_folder(path: Path, iteration: int | None) -> Path:
    """Return the path itself if it is a checkpoint, else the checkpoint to use in that folder."""
    if iteration is None and ((path / MANIFEST).exists() or not list_complete(path)):
        if path.is_dir() and not path.name.startswith("varuna_ckpt_"):
            return find_complete(path).path
        expect_ours(path)
        return path
    return find_complete(path, iteration).path


def _inspect(options: argparse.Namespace) -> int:
    complete = list_complete(options.path)
    if not complete:
        folder = _find_folder(options.path, None)
        manifest = read_manifest(folder)
        _print_one(manifest)
        if options.tensors:
            _print_tensors(manifest)
        return _print_wrong(folder)
    return max([_print_row(found) for found in complete])


def _print_row(found: Complete) -> int:
    try:
        manifest = read_manifest(found.path)
    except CheckpointError as error:
        print(f"{found.iteration:>10}  {error}")
        return 1
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.written_at))
    size = sum(held.size for held in manifest.files.values())
    wrong = list_wrong_sizes(found.path)
    what = f"{len(wrong)} files missing or cut short" if wrong else "all files there"
    job = manifest.save.job
    print(f"{found.iteration:>10}  {when}  {size / 2**20:>10.1f} MiB  job {job}  {what}")
    return 1 if wrong else 0


def _print_one(manifest: Manifest) -> None:
    save, state = manifest.save, manifest.state
    found = group_pieces(manifest)
    kinds: dict[str, list[int]] = {}
    for (kind, _), held in found.items():
        row = kinds.setdefault(kind, [0, 0, 0])
        row[0] += 1
        row[1] += len(held)
        row[2] += sum(piece.num_bytes for _, piece in held)
    begun = "" if save.line == save.job else f", which continues {save.line}"
    print(f"iteration {save.iteration}, job {save.job}{begun}")
    print(f"partition {state.partition or '-'}, {manifest.world_size} ranks")
    print(f"{len(manifest.files)} files, {len(state.ties)} groups of tied parameters")
    for kind, (tensors, pieces, size) in kinds.items():
        print(f"  {kind:<24} {tensors:>6} tensors {pieces:>6} pieces {size / 2**20:>10.1f} MiB")
    for word in ("loss_scale", "lr_schedule", "data_position", "user"):
        value = getattr(state, word)
        if value is not None:
            print(f"{word}: {value}")


def _print_tensors(manifest: Manifest) -> None:
    for (kind, name), held in group_pieces(manifest).items():
        piece = held[0][1]
        files = ", ".join(
            f"{file}{'' if piece.box.extent == piece.shape else ' ' + str(piece.box)}"
            for file, piece in held
        )
        print(f"{kind}  {name}  {piece.dtype} {list(piece.shape)}  {files}")


def _print_wrong(folder: Path) -> int:
    wrong = list_wrong_sizes(folder)
    for text in wrong:
        print(text, file=sys.stderr)
    return 1 if wrong else 0


def _verify(options: argparse.Namespace) -> int:
    folder = _find_folder(options.path, options.iteration)
    faults = list(find_damage(folder))
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        print(f"{folder} is damaged{offer_good(folder)}", file=sys.stderr)
        return 1
    print(f"{folder} is intact: all checksums match")
    return 0


def _export(options: argparse.Namespace) -> int:
    folder, target = _find_folder(options.path, options.iteration), options.target
    with beside(target) as options.target:
        code = _export_here(folder, options)
    if options.target is not target:
        print(f"sent to {target}")
    return code


def _export_here(folder: Path, options: argparse.Namespace) -> int:
    if options.dcp:
        from varuna_core.checkpoint.foreign.torch_dcp import export_dcp

        count = export_dcp(folder, options.target, under=options.under)
        print(f"wrote {count} tensors of {folder} to {options.target}: only weights and buffers")
        return 0
    if options.hf:
        from varuna_core.checkpoint.foreign.huggingface import export_folder

        made = export_folder(
            folder,
            options.target,
            config=options.config,
            heads=options.heads,
            vocab=options.vocab,
            dtype=options.dtype,
            shard_bytes=options.shard_mb * 10**6,
            prefix=options.prefix,
        )
        print(f"{folder} in {options.target}: {', '.join(made)}")
        if "config.json" not in made:
            print("no config.json was written: give --config, or copy the model's file there")
        return 0
    if options.torch_dist:
        from varuna_core.checkpoint.foreign.megatron import export_torch_dist

        words = {word: getattr(options, word) for word in ("heads", "vocab", "dtype")}
        place = export_torch_dist(folder, options.target, **words)
        print(f"wrote the weights of {folder} to {place}")
        return 0
    from varuna_core.checkpoint.store.exchange import export_checkpoint

    count = export_checkpoint(folder, options.target)
    print(f"{count} tensors of {folder} in {options.target}")
    return 0


def _import(options: argparse.Namespace) -> int:
    source, store, iteration = options.source, options.store, options.iteration or 0
    is_dcp = source.is_dir() and (source / ".metadata").is_file() and _is_plain_dcp(source)
    is_remote = isinstance(source, RemotePath)
    if source.is_dir() and not is_dcp and not is_remote and _import_megatron(options):
        return 0
    if options.optimizer is not None and not is_dcp:
        raise ValueError(f"{source}: --optimizer is for folders of torch.distributed.checkpoint")
    if source.is_dir():
        from varuna_core.checkpoint.foreign.huggingface import import_folder

        made = import_folder(
            source,
            store,
            iteration=iteration,
            ties=options.tied,
            program=options.program,
            vocab=options.vocab,
            sequence=options.sequence,
            optimizer=options.optimizer,
        )
    elif options.program is not None:
        raise ValueError(f"{source}: --program needs a Hugging Face folder with its config.json")
    else:
        from varuna_core.checkpoint.store.exchange import import_checkpoint

        made = import_checkpoint(source, store, iteration, options.tied)
    print(f"imported {source} as {made}")
    return 0


def _is_plain_dcp(source: Path) -> bool:
    from varuna_core.checkpoint.foreign.torch_dcp import is_plain_dcp

    return is_plain_dcp(source)


def _import_megatron(options: argparse.Namespace) -> bool:
    """Import the source if it is a Megatron-LM checkpoint; return False if it is not."""
    from varuna_core.checkpoint.foreign.megatron import find_folder, import_megatron

    folder = find_folder(options.source, options.iteration)
    if folder is None:
        return False
    made, unknown = import_megatron(
        folder,
        options.store,
        heads=options.heads,
        vocab=options.vocab,
        sequence=options.sequence,
    )
    print(f"imported the weights of {folder} as {made}")
    for line in unknown:
        print(line)
    return True
