"""The `vjob data` commands: convert text to token files.

The work is done in varuna_core/data.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from vjob.jobs.errors import InputError
from vjob.shelf.commands.arguments import OrderedGroup, print_object
from vjob.shelf.commands.terminal import say

TOKENIZERS = ("bpe", "wordpiece-lower", "wordpiece-cased", "whitespace")
Option = Callable[[Callable[..., Any]], Callable[..., Any]]


class DataGroup(OrderedGroup):
    """Command group that converts errors of varuna_core.data to ours."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            from varuna_core.data.errors import DataError

            try:
                return super().invoke(ctx)
            except DataError as error:
                raise InputError(str(error)) from None
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("numpy", "tokenizers", "zstandard"):
                raise
            raise InputError(f"{error}: run pip install '.[data]' in vjob's checkout") from None


@click.group(cls=DataGroup)
def data() -> None:
    """Make training data from text.

    \b
    vjob data prepare wiki.jsonl.gz -o data/wiki --train 32000 --append-eod

    In a conf: `data: {prefix: data/wiki_text_document, split: "969,30,1"}`.
    """


def _path_option(name: str, text: str) -> Option:
    kind = click.Path(exists=True, dir_okay=False, path_type=Path)
    return click.option(name, type=kind, metavar="FILE", help=text)


tokenizer_option = click.option(
    "--tokenizer", type=click.Choice(TOKENIZERS), default="bpe", show_default=True
)
vocab_option = _path_option("--vocab", "vocab.json (bpe, whitespace) or vocab.txt (wordpiece).")
merges_option = _path_option("--merges", "merges.txt, for bpe.")


@data.command()
@click.argument("inputs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--output", "-o", required=True, metavar="PREFIX", help="_text_document is added.")
@tokenizer_option
@vocab_option
@merges_option
@click.option("--train", type=click.IntRange(1), metavar="N", help="Train a vocabulary of N first.")
@click.option(
    "--train-mb", type=click.IntRange(1), default=1000, show_default=True, help="Text to train on."
)
@click.option("--key", default="text", show_default=True, help="Key of the text in a JSON object.")
@click.option("--append-eod", is_flag=True, help="End each document with <|endoftext|>.")
@click.option("--split-sentences", is_flag=True, help="Make each sentence a sequence, for BERT.")
@click.option("--keep-newlines", is_flag=True, help="With --split-sentences: keep line breaks.")
@click.option("--skip-bad", is_flag=True, help="Skip lines that are not documents, and count them.")
@click.option("--processes", "-p", type=click.IntRange(1), help="Default: one a core.")
@click.option("--again", is_flag=True, help="Make the data again if they exist.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def prepare(
    inputs: tuple[Path, ...],
    output: str,
    tokenizer: Any,
    vocab: Path | None,
    merges: Path | None,
    train: int | None,
    train_mb: int,
    key: str,
    append_eod: bool,
    split_sentences: bool,
    keep_newlines: bool,
    skip_bad: bool,
    processes: int | None,
    again: bool,
    as_json: bool,
) -> None:
    """Make PREFIX_text_document.bin and .idx of INPUTS, as Megatron-LM reads them.

    \b
    vjob data prepare *.jsonl.zst -o data/wiki --train 32000 --append-eod
    vjob data prepare a.txt.gz -o data/a --vocab vocab.json --merges merges.txt
    vjob data prepare a.jsonl -o data/bert --tokenizer wordpiece-lower \\
        --vocab vocab.txt --split-sentences
    vjob data prepare a.txt -o data/a --tokenizer whitespace --vocab vocab.json

    INPUTS are JSON lines (.jsonl, .json: the text under --key) or plain text, a document a line;
    .gz and .zst files are recognized by their contents. Unfinished work is kept in
    PREFIX_text_document.part: after Ctrl-C the same command continues from there.
    """
    from varuna_core.data import prepare as preparing
    from varuna_core.data.progress import ProgressLine

    settings = preparing.Settings(
        inputs=inputs,
        output=output,
        kind=tokenizer,
        vocab=vocab,
        merges=merges,
        train=train,
        train_bytes=train_mb * 1_000_000,
        key=key,
        append_eod=append_eod,
        split_sentences=split_sentences,
        keep_newlines=keep_newlines,
        skip_bad=skip_bad,
        again=again,
        num_processes=processes or len(os.sched_getaffinity(0)),
    )
    total = sum(path.stat().st_size for path in inputs if path.is_file())
    progress = ProgressLine(total, sys.stderr)
    try:
        summary = preparing.prepare(settings, _note, progress.show)
    except KeyboardInterrupt:
        progress.close()
        part = Path(f"{settings.prefix}.part")
        _note(f"interrupted; {_what_is_left(part)}")
        sys.exit(130)
    progress.close()
    if as_json:
        print_object(summary)
    else:
        say(_render(summary))


def _what_is_left(part: Path) -> str:
    if not part.exists():
        return "nothing was kept"
    return f"run the same command again to continue from here, or remove {part} to start over"


def _note(text: str) -> None:
    """Print a progress note on standard error, so that standard output has only the result."""
    say(f"vjob: {text}", err=True)


def _render(summary: dict[str, Any]) -> str:
    lines = [
        f"{summary['prefix']}.bin .idx: {summary['tokens']:,} tokens ({summary['dtype']}) in "
        f"{summary['documents']:,} documents, {summary['sequences']:,} sequences",
        f"  vocabulary  {summary['vocabulary_size']:,} ({', '.join(summary['vocabulary'])})",
    ]
    for key in ("bad_lines", "empty_documents", "blank_lines"):
        if summary[key]:
            lines.append(f"  {summary[key]:,} {key.replace('_', ' ')} passed over")
    lines.append(f"  in a conf   data: {{prefix: {summary['prefix']}}}")
    return "\n".join(lines)
