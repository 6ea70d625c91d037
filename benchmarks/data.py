"""How fast text becomes tokens, and index maps are made, against Megatron's ways in the same run.

    python -m benchmarks.data [--megabytes 40] [--processes 2] [--rounds 5] [--write]

The baseline of preparing is a pool as Megatron's preprocess_data.py has it: the parent hands each
document to a worker (imap, 32 at a time), gets a list of ids back, makes an array of it and writes
that. Ours and the baseline take turns on the same files; each pair gives one ratio. The text is
that of Python's own library (about 13 MB, repeated with changes to reach the size), and our corpus:
one rich in rare words, one poor.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from varuna_core.data.corpus import make_documents
from varuna_core.data.gpt import GptSamples
from varuna_core.data.index_maps import build_maps, build_sample_index, count_epochs, find_fault
from varuna_core.data.indexed import bin_path, idx_path, open_tokens, write_index
from varuna_core.data.prepare import Settings, prepare
from varuna_core.data.vocabulary import (
    VocabularyFiles,
    import_tokenizers,
    read_vocab_json,
    train_bpe,
    train_whitespace,
)

RESULT = Path(__file__).parent / "results" / "data.md"
NUM_TOKENS = 1_050_000_000
NUM_DOCUMENTS = 2_000_000
SEQUENCE = 1024

_encode: Callable[[str], list[int]]


def start_baseline(files: VocabularyFiles) -> None:
    """In each worker of the baseline: a tokenizer, asked for one document at a time."""
    global _encode
    words = read_vocab_json(files.vocab)
    if files.kind == "whitespace":
        unknown = words["<unk>"]
        _encode = lambda text: [words.get(word, unknown) for word in text.split()]  # noqa: E731
        return
    library = import_tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE.from_file(str(files.vocab), str(files.merges)))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    _encode = lambda text: tokenizer.encode(text).ids  # type: ignore[no-any-return]  # noqa: E731


def encode_line(line: str) -> list[int]:
    return _encode(json.loads(line)["text"])


def prepare_baseline(path: Path, prefix: Path, files: VocabularyFiles, processes: int) -> int:
    """Tokens written."""
    lengths = []
    with (
        multiprocessing.get_context("spawn").Pool(processes, start_baseline, (files,)) as pool,
        open(path, encoding="utf-8") as lines,
        open(bin_path(prefix), "wb") as out,
    ):
        for ids in pool.imap(encode_line, lines, 32):
            array = np.array(ids, "<u2")
            out.write(array.tobytes(order="C"))
            lengths.append(array.size)
    with open(idx_path(prefix), "wb") as file:
        write_index(file, np.dtype("<u2"), np.array(lengths), np.arange(len(lengths) + 1))
    return sum(lengths)


def read_library() -> Iterator[str]:
    """Documents of some 3,000 characters from Python's own source."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="replace")
            yield from (text[i : i + 3000] for i in range(0, len(text), 3000))


def repeat_library(megabytes: float) -> Iterator[str]:
    """Each time round with other numbers in it, so that new words go on coming."""
    documents, size, turn = list(read_library()), 0.0, 0
    while True:
        for text in documents:
            changed = text if not turn else text.replace("self", f"self{turn}")
            size += len(changed) / 1e6
            if size > megabytes:
                return
            yield changed
        turn += 1


def repeat_corpus(megabytes: float) -> Iterator[str]:
    size = 0.0
    for text in make_documents(10**9):
        size += len(text) / 1e6
        if size > megabytes:
            return
        yield text


def measure_prepare(
    folder: Path, name: str, documents: Iterator[str], kind: Any, options: argparse.Namespace
) -> str:
    """One row: our tokens a second over the baseline's."""
    path = folder / f"{name}-{kind}.jsonl"
    texts = list(documents)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sample = texts[: len(texts) // 4 + 1]
    (folder / f"{name}-{kind}").mkdir()
    train = train_bpe if kind == "bpe" else train_whitespace
    files = train(sample, 32_000, folder / f"{name}-{kind}")
    settings = Settings(
        inputs=(path,), output=str(folder / "ours"), kind=kind, vocab=files.vocab,
        merges=files.merges, num_processes=options.processes, again=True,
    )  # fmt: skip
    ratios, rates = [], []
    for _ in range(options.rounds):
        begin = time.perf_counter()
        summary = prepare(replace(settings), print, lambda done, note: None)
        middle = time.perf_counter()
        tokens = prepare_baseline(path, folder / "theirs", files, options.processes)
        end = time.perf_counter()
        if bin_path(summary["prefix"]).read_bytes() != bin_path(folder / "theirs").read_bytes():
            raise SystemExit("the two made different tokens")
        ratios.append((end - middle) / (middle - begin))
        rates.append(tokens / 1e6 / (middle - begin))
    bound = 1.2 if kind == "bpe" else 2.0
    size = path.stat().st_size / 1e6
    return (
        f"| {kind}, {name}, {size:.0f} MB | {bound} | {min(ratios):.2f} | "
        f"{statistics.median(ratios):.2f} | {max(ratios):.2f} | {statistics.median(rates):.1f} |"
    )


def time_median(work: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def measure_maps(rounds: int) -> list[str]:
    """Rows in seconds: ours, and megatron-core's C++ where it can be imported."""
    random = np.random.default_rng(0)
    lengths = random.poisson(NUM_TOKENS / NUM_DOCUMENTS, NUM_DOCUMENTS).astype(np.int32)
    documents = np.arange(NUM_DOCUMENTS, dtype=np.int32)
    tokens = int(lengths.sum())
    wanted = (tokens - 1) // SEQUENCE
    state = np.random.RandomState(1)
    order = documents.copy()
    state.shuffle(order)
    maps = build_maps(lengths, documents, num_samples=wanted, sequence=SEQUENCE, seed=1)
    epochs = count_epochs(tokens, wanted, SEQUENCE)
    ours = time_median(
        lambda: build_sample_index(lengths, order, SEQUENCE, epochs.num_samples), rounds
    )
    everything = time_median(
        lambda: build_maps(lengths, documents, num_samples=wanted, sequence=SEQUENCE, seed=1),
        rounds,
    )
    check = time_median(
        lambda: find_fault(maps, lengths, documents, num_samples=wanted, sequence=SEQUENCE), rounds
    )
    theirs = "not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from megatron.core.datasets import helpers

            theirs_s = time_median(
                lambda: helpers.build_sample_idx(lengths, order, SEQUENCE, 1, tokens), rounds
            )
            theirs = f"{theirs_s:.3f}"
        except ImportError:
            pass
    return [
        f"| sample index (megatron-core's C++ the other) | 0.2 | {ours:.3f} | {theirs} |",
        f"| all three maps, shuffles included |  | {everything:.3f} |  |",
        f"| maps that were found, checked against the data set |  | {check:.3f} |  |",
    ]


def measure_reading(folder: Path, rounds: int) -> str:
    """Microseconds a sample of 1,024 tokens, from documents of 500."""
    prefix = folder / "read"
    lengths = np.full(20_000, 500)
    np.zeros(int(lengths.sum()), "<u2").tofile(bin_path(prefix))
    with open(idx_path(prefix), "wb") as file:
        write_index(file, np.dtype("<u2"), lengths, np.arange(len(lengths) + 1))
    samples = GptSamples(
        open_tokens(prefix), "train", range(len(lengths)),
        num_samples=9000, sequence=SEQUENCE, seed=1, may_write=False,
    )  # fmt: skip
    seconds = time_median(lambda: samples.read_batch(range(2000)), rounds)
    return f"A sample of {SEQUENCE} + 1 tokens is read in {seconds / 2000 * 1e6:.0f} us."


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            measure_prepare(folder, text, make(options.megabytes), kind, options)
            for kind in ("bpe", "whitespace")
            for text, make in (("source code", repeat_library), ("toy corpus", repeat_corpus))
        ]
        lines = [
            f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, "
            f"{options.processes} processes, {options.rounds} rounds.",
            "",
            "Tokens a second over those of a pool as Megatron's, start-up included:",
            "",
            "| tokenizer, text | bound | smallest | median | largest | Mtokens/s |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"Index maps of {NUM_TOKENS / 1e9:.2f} billion tokens in {NUM_DOCUMENTS / 1e6:.0f} "
            f"million documents, samples of {SEQUENCE}, s:",
            "",
            "| what | bound | ours | other |",
            "|---|---|---|---|",
            *measure_maps(options.rounds),
            "",
            measure_reading(folder, options.rounds),
        ]
    text = "\n".join(lines)
    print(text)
    if options.write:
        command = f"python -m benchmarks.data --rounds {options.rounds} --write"
        RESULT.write_text(f"# Data: preparing and index maps\n\nMade by `{command}`. {text}\n")


if __name__ == "__main__":
    main()
