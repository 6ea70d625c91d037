"""Speed of `vjob data` beside Megatron's ways, and a training's waits for its data.

    python -m benchmarks.runtime.data [--megabytes 40] [--processes 2] [--rounds 5] [--write]

The baseline of preparing is a pool as Megatron's preprocess_data.py has it: the parent hands each
document to a worker (imap, 25 at a time), gets a list of ids back, makes an array of it and writes
that; with the whitespace vocabulary it takes plain lines, and looks up token by token in a method,
as the scripts do that people wrote for it. Ours and the baseline take turns on the same files; each
pair gives one ratio. The text is that of Python's own library (some 13 MB, repeated with changes to
reach the size), and our corpus: one rich in rare words, one poor.

Beside the time that passed stands the processor time of all processes: where others use the machine
too, that is the steadier of the two.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import RESULTS
from tests.corpus import make_documents
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
from vjob.jobs.conf.loading.load import parse_conf
from vjob.jobs.programs.start import ProgramFiles, build_files

SHAPES = {
    "the demo's GPT": ("{layers: 8, hidden: 64, heads: 4, sequence: 64, vocab: 1000}", 200),
    "4 layers of 128, sequence 256": (
        "{layers: 4, hidden: 128, heads: 4, sequence: 256, vocab: 1000}",
        40,
    ),
}
"""Model and number of steps."""
CONF = """
name: waiting
program: pretrain_gpt
model: {model}
data: {{prefix: tokens}}
train: {{steps: {steps}, global_batch_size: 16, micro_batch_size: 4, evaluate: {{every: 0}}}}
"""
DOCUMENTS, LENGTH = 20_000, 500


def measure_waiting(folder: Path) -> list[str]:
    """A row for each shape."""
    random = np.random.default_rng(0)
    random.integers(0, 1000, DOCUMENTS * LENGTH).astype("<u2").tofile(bin_path(folder / "tokens"))
    with open(idx_path(folder / "tokens"), "wb") as file:
        lengths = np.full(DOCUMENTS, LENGTH)
        write_index(file, np.dtype("<u2"), lengths, np.arange(DOCUMENTS + 1))
    return [_measure(folder, name) for name in SHAPES]


def _measure(folder: Path, name: str) -> str:
    model, num_steps = SHAPES[name]
    conf = parse_conf(CONF.format(model=model, steps=num_steps), "conf.yaml", folder)
    for file, text in build_files(conf, ProgramFiles(), str(folder)).items():
        (folder / file).write_text(text)
    trace = folder / "trace.jsonl"
    trace.unlink(missing_ok=True)
    subprocess.run(
        [sys.executable, "-m", "varuna_core.programs.pretrain", folder / "training.json"],
        env={**os.environ, "VJOB_TRACE": str(trace), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    lines = map(json.loads, trace.read_text().splitlines())
    _, *steps = [line for line in lines if isinstance(line, dict) and "step" in line]
    waited = sum(step["sums"]["data"][2] for step in steps)
    took = sum(step["took"] for step in steps)
    mean = took / len(steps) / 1e6
    return f"| {name} | 1 % | {waited / took:.2%} | {mean:.0f} ms |"


RESULT = RESULTS / "data.md"
NUM_TOKENS = 1_050_000_000
NUM_DOCUMENTS = 2_000_000
SEQUENCE = 1024


class BaselineEncoder:
    """The encoder of such a script: a document in, a list of ids out."""

    def __init__(self, files: VocabularyFiles) -> None:
        self.words = read_vocab_json(files.vocab)
        self.is_whitespace = files.kind == "whitespace"
        if not self.is_whitespace:
            library = import_tokenizers()
            model = library.models.BPE.from_file(str(files.vocab), str(files.merges))
            self.tokenizer = library.Tokenizer(model)
            self.tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)

    def find_id(self, token: str) -> int:
        if token in self.words:
            return self.words[token]
        return self.words["<unk>"]

    def encode(self, line: str) -> list[int]:
        if self.is_whitespace:
            return [self.find_id(token) for token in line.strip().split()]
        ids: list[int] = self.tokenizer.encode(json.loads(line)["text"]).ids
        return ids


_encoder: BaselineEncoder


def start_baseline(files: VocabularyFiles) -> None:
    global _encoder
    _encoder = BaselineEncoder(files)


def encode_line(line: str) -> list[int]:
    return _encoder.encode(line)


def prepare_baseline(path: Path, prefix: Path, files: VocabularyFiles, processes: int) -> int:
    """Tokens written."""
    lengths = []
    with (
        multiprocessing.get_context("spawn").Pool(processes, start_baseline, (files,)) as pool,
        open(path, encoding="utf-8") as lines,
        open(bin_path(prefix), "wb") as out,
    ):
        for ids in pool.imap(encode_line, lines, 25):
            array = np.array(ids, "<u2")
            out.write(array.tobytes(order="C"))
            lengths.append(array.size)
        pool.close()
        pool.join()
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
    is_json = kind == "bpe"
    path = folder / f"{name}-{kind}.{'jsonl' if is_json else 'txt'}"
    texts = list(documents) if is_json else [" ".join(text.split()) for text in documents]
    lines = [json.dumps({"text": text}) if is_json else text for text in texts if text]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    sample = texts[: len(texts) // 4 + 1]
    (folder / f"{name}-{kind}").mkdir()
    train = train_bpe if kind == "bpe" else train_whitespace
    files = train(sample, 32_000, folder / f"{name}-{kind}")
    settings = Settings(
        inputs=(path,), output=str(folder / "ours"), kind=kind, vocab=files.vocab,
        merges=files.merges, num_processes=options.processes, again=True,
    )  # fmt: skip
    ratios, processor = [], []
    for _ in range(options.rounds):
        ours = measure(lambda: prepare(settings, print, lambda done, note: None))
        theirs = measure(
            lambda: prepare_baseline(path, folder / "theirs", files, options.processes)
        )
        made = [bin_path(prefix).read_bytes() for prefix in (settings.prefix, folder / "theirs")]
        if made[0] != made[1]:
            raise SystemExit("the two made different tokens")
        ratios.append(theirs[0] / ours[0])
        processor.append(theirs[1] / ours[1])
    bound = 1.2 if kind == "bpe" else 2.0
    size = path.stat().st_size / 1e6
    shown = (min(ratios), statistics.median(ratios), max(ratios), statistics.median(processor))
    figures = " | ".join(f"{ratio:.2f}" for ratio in shown)
    return f"| {kind}, {name}, {size:.0f} MB | at least {bound} | {figures} |"


def measure(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that passed, and of processors, in this process and its children."""
    begin, before = time.perf_counter(), _read_processor()
    work()
    return time.perf_counter() - begin, _read_processor() - before


def _read_processor() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def time_median(work: Callable[[], object], rounds: int) -> float:
    """Processor seconds."""
    taken = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def measure_maps(rounds: int) -> list[str]:
    """Rows in processor seconds: ours, and megatron-core's where it can be imported."""
    random = np.random.default_rng(0)
    lengths = random.poisson(NUM_TOKENS / NUM_DOCUMENTS, NUM_DOCUMENTS).astype(np.int32)
    documents = range(NUM_DOCUMENTS)
    tokens = int(lengths.sum())
    wanted = (tokens - 1) // SEQUENCE
    state = np.random.RandomState(1)
    order = np.arange(NUM_DOCUMENTS, dtype=np.int32)
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
    index, whole = measure_megatron(lengths, order, tokens, rounds)
    return [
        f"| sample index | 0.2 | {ours:.3f} | {index} |",
        f"| all three maps, shuffles included | 0.2 | {everything:.3f} | {whole} |",
        f"| maps that were found, checked against the data set |  | {check:.3f} |  |",
    ]


def measure_megatron(lengths: Any, order: Any, tokens: int, rounds: int) -> tuple[str, str]:
    """megatron-core's sample index (C++), and its three maps as its data set calls for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from megatron.core.datasets import gpt_dataset, helpers
        except ImportError:
            return "not installed", "not installed"

    def build_all() -> None:
        random = np.random.RandomState(1)
        documents = np.arange(len(lengths), dtype=np.int32)
        document = gpt_dataset._build_document_index(documents, 1, random, False)
        sample = helpers.build_sample_idx(lengths, document, SEQUENCE, 1, tokens)
        gpt_dataset._build_shuffle_index(len(sample) - 1, len(sample) - 1, random)

    index = time_median(
        lambda: helpers.build_sample_idx(lengths, order, SEQUENCE, 1, tokens), rounds
    )
    return f"{index:.3f}", f"{time_median(build_all, rounds):.3f}"


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
    return f"A sample of {SEQUENCE} + 1 tokens takes {seconds / 2000 * 1e6:.0f} us of a processor."


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
            measure_prepare(folder, text, make(options.megabytes * scale), kind, options)
            for kind, scale in (("bpe", 1), ("whitespace", 4))
            for text, make in (("source code", repeat_library), ("toy corpus", repeat_corpus))
        ]
        lines = [
            f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, "
            f"{options.processes} processes, {options.rounds} rounds.",
            "",
            "Tokens a second over those of a pool as Megatron's, start-up included:",
            "",
            "| tokenizer, text | bound | smallest | median | largest | processor time |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"Index maps of {NUM_TOKENS / 1e9:.2f} billion tokens in {NUM_DOCUMENTS / 1e6:.0f} "
            f"million documents, samples of {SEQUENCE}, processor seconds:",
            "",
            "| what | bound | ours | megatron-core |",
            "|---|---|---|---|",
            *measure_maps(options.rounds),
            "",
            measure_reading(folder, options.rounds),
            "",
            "What a training from token files, one process, waits for data in its steps:",
            "",
            "| model | bound | waits | a step takes |",
            "|---|---|---|---|",
            *measure_waiting(folder),
        ]
    text = "\n".join(lines)
    print(text)
    if options.write:
        asked = f"--megabytes {options.megabytes:g} --rounds {options.rounds}"
        command = f"python -m benchmarks.runtime.data {asked} --write"
        RESULT.write_text(f"# Data: preparing and index maps\n\nMade by `{command}`. {text}\n")


if __name__ == "__main__":
    main()
