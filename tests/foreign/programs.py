"""Programs of other people's manner, each as it was and as it was ported, and their losses.

`plain.py` trains in one process and knows nothing of us; `ported.py` is its copy with as few lines
changed as Varuna needs.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests import command
from varuna_core.records.runfolder import RunFolder

HERE = Path(__file__).parent
STEPS = 30
SLOW = """
import os
import time
import torch.nn.functional as functional

seconds = os.path.join(os.path.dirname(__file__), "seconds")


def slow(name, share):
    plain = getattr(functional, name)

    def run(*values, **options):
        with open(seconds) as file:
            time.sleep(share * float(file.read() or 0))
        return plain(*values, **options)

    setattr(functional, name, run)


slow("gelu", 1)
slow("relu", 0.25)
"""
STATISTICS = """
import torch

plain, calls = torch.nn.BatchNorm2d.forward, {{}}


def forward(self, x):
    calls[self] = calls.get(self, -1) + self.training
    self.momentum = 0.1 if calls[self] % {whole} < {part} else 0.0
    return plain(self, x)


torch.nn.BatchNorm2d.forward = forward
"""
"""The running averages of batch norms see the first `part` of each `whole` micro-batches."""
MICRO_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Program:
    name: str
    title: str
    """What it is, for the documents."""
    plain: tuple[str, ...]
    """Arguments of the original."""
    ported: str
    """Arguments of the port, in YAML."""
    train: str
    """Section `train` of the conf, but for the folder of checkpoints."""
    partition: str
    read: Callable[[str], dict[str, float]]
    """Losses by the words that stand before them."""
    tolerance: float = 1e-5
    """Of a loss, relative: sums in float32 in another order."""

    @property
    def folder(self) -> Path:
        return HERE / self.name


def read_gpt(text: str) -> dict[str, float]:
    found = re.findall(r"(iter \d+): loss (\S+), time", text)
    for step, train, val in re.findall(r"(step \d+): train loss (\S+), val loss (\S+)", text):
        found += [(f"{step} train", train), (f"{step} val", val)]
    return {name: float(loss) for name, loss in found}


def read_huggingface(text: str) -> dict[str, float]:
    found = re.findall(r"(step \d+)/\d+ loss (\S+)", text)
    found += re.findall(r"(epoch \d+): perplexity: \S+ eval_loss: (\S+)", text)
    return {name: float(loss) for name, loss in found}


def read_resnet(text: str) -> dict[str, float]:
    """The loss of a test belongs to the epoch that was named before it."""
    found, epoch = {}, "?"
    line = re.compile(r"Epoch: \[(\d+)\](\[ *\d+/\d+\])\t.*?Loss (\S+)| \* Loss (\S+)")
    for number, batch, train, test in line.findall(text):
        epoch = number or epoch
        found[f"{epoch}{batch}" if train else f"{epoch} test"] = float(train or test)
    return found


def read_llama(text: str) -> dict[str, float]:
    found = re.findall(r"((?:validate )?step: \d+)  loss: (\S+)", text)
    return {name: float(loss) for name, loss in found}


PROGRAMS = {
    program.name: program
    for program in (
        Program(
            name="nanogpt",
            title="GPT, as nanoGPT trains one",
            plain=("--data_dir=text", f"--max_iters={STEPS}", "--eval_iters=8"),
            ported='[--data_dir=text, "--max_iters=${train.steps}", --eval_iters=2, '
            '"--out_dir=${train.checkpoint.folder}", --gradient_accumulation_steps=1, '
            '"--batch_size=${train.global_batch_size}"]',
            train=f"steps: {STEPS}, global_batch_size: 8, micro_batch_size: 2",
            partition="3-1",
            read=read_gpt,
        ),
        Program(
            name="huggingface",
            title="Hugging Face's GPT-2, as `run_clm_no_trainer` trains it",
            plain=("--dataset=text", f"--max_train_steps={STEPS}"),
            ported='[--dataset=text, "--max_train_steps=${train.steps}", '
            "--gradient_accumulation_steps=1, "
            '"--per_device_train_batch_size=${train.global_batch_size}"]',
            train=f"steps: {STEPS}, global_batch_size: 8, micro_batch_size: 2",
            partition="1-3",
            read=read_huggingface,
        ),
        Program(
            name="resnet",
            title="ResNet with batch norm, as PyTorch's ImageNet example trains one",
            plain=("images", "--epochs=3"),
            ported="[images, --epochs, '3', --accumulate, '1']",
            train=f"steps: {STEPS}, global_batch_size: 16, micro_batch_size: 4",
            partition="3-1",
            read=read_resnet,
            # Batch norm enlarges it with each step: on some processors the original itself, with
            # two threads in place of one, has 4.4e-5 after 30 steps.
            tolerance=2e-4,
        ),
        Program(
            name="llama",
            title="A Llama, in the manner of torchtitan's trainer",
            plain=("--data=text", f"--steps={STEPS}"),
            ported='[--data=text, "--steps=${train.steps}"]',
            train=f"steps: {STEPS}, global_batch_size: 8, micro_batch_size: 2",
            partition="2-2",
            read=read_llama,
        ),
    )
}


DISTURBED = ("nanogpt", "huggingface", "resnet")
"""Those that are also cancelled, submitted again, and lose a rank or a node."""


def disturb(usual: str) -> pytest.MarkDecorator:
    """One of them as a rule, the others in `make test-long`."""
    others = [pytest.param(name, marks=pytest.mark.long) for name in DISTURBED if name != usual]
    return pytest.mark.parametrize("name", [usual, *others])


def write_data(folder: Path) -> None:
    """Tokens that grow by little, and images whose brightness is their label."""
    import numpy as np
    import torch

    draw = np.random.default_rng(0)
    tokens = (np.cumsum(draw.integers(1, 4, 20_000)) % 64).astype(np.uint16)
    (folder / "text").mkdir()
    tokens[:16_000].tofile(folder / "text/train.bin")
    tokens[16_000:].tofile(folder / "text/val.bin")
    generator = torch.Generator().manual_seed(1)
    for split, count in (("train", 160), ("val", 48)):
        labels = torch.randint(0, 10, (count,), generator=generator)
        images = torch.randn(count, 3, 16, 16, generator=generator)
        images += (labels / 5 - 1)[:, None, None, None]
        (folder / "images" / split).mkdir(parents=True)
        torch.save(images, folder / "images" / split / "images.pt")
        torch.save(labels, folder / "images" / split / "labels.pt")


def write_pauses(folder: Path, seconds: float) -> None:
    """A folder for PYTHONPATH that makes each activation wait: steps last, processors stay free.

    Its file `seconds` may be written again while ranks run.
    """
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(SLOW)
    (folder / "seconds").write_text(str(seconds))


def train_plainly(program: Program, folder: Path, replicas: int = 2) -> dict[str, float]:
    """The losses of the original, in one process.

    Its batch norms average over the micro-batches of the first of so many replicas, as those of
    torch's data parallel do.
    """
    averages = folder / "averages"
    averages.mkdir()
    part = MICRO_BATCHES // replicas
    text = STATISTICS.format(whole=MICRO_BATCHES, part=part)
    (averages / "sitecustomize.py").write_text(text)
    done = subprocess.run(
        [sys.executable, str(program.folder / "plain.py"), *program.plain],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(averages)},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    losses = program.read(done.stdout + done.stderr)
    assert len(losses) > STEPS, done.stdout + done.stderr
    return losses


def read_rank(run: RunFolder, attempt: int, rank: int = 0) -> str:
    """All that a rank printed."""
    kinds = ("out", "err")
    return "".join(command.read_rank(run, rank, kind, attempt=attempt) for kind in kinds)


def read_losses(program: Program, *runs: RunFolder) -> dict[str, float]:
    """The losses that led to the last weights, of runs that went on from each other."""
    found: dict[str, float] = {}
    for run in runs:
        for attempt in run.attempts():
            found |= program.read(read_rank(run, attempt.number))
    return found


CHECKPOINTS = re.compile(
    r"checkpoint|resume|save_on_signal|state_dict|rng_state|user_state|set_scheduler|output_dir"
    r"|acc1|steps_per_epoch|model\.iteration|best_val_loss = \d|(completed_steps|start_epoch) = \d"
    r"|^ *step = 0"
)
"""Statements that save, load, leave on a signal, and go on at the place in the data."""


def list_of_checkpoints(text: str) -> set[int]:
    """Lines, from 0, of the statements that are there for checkpoints; of an `if`, its body too."""
    lines, found = text.splitlines(), set()

    def is_meant(node: ast.stmt) -> bool:
        if isinstance(node, ast.If):
            return bool(CHECKPOINTS.search(lines[node.lineno - 1])) or all(map(is_meant, node.body))
        if hasattr(node, "body"):
            return False
        whole = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        return bool(CHECKPOINTS.search(whole))

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and is_meant(node):
            assert node.end_lineno is not None
            found |= set(range(node.lineno - 1, node.end_lineno))
    return found


@dataclass(frozen=True, kw_only=True)
class Change:
    """Lines that a port takes out of one place of the original, and those that it puts there."""

    is_for_checkpoints: bool
    gone: list[str]
    new: list[str]

    @property
    def size(self) -> int:
        """A line that is another one counts once."""
        return max(len(self.gone), len(self.new))


@cache
def list_changes(program: Program) -> tuple[Change, ...]:
    """The changes in their order; empty lines are none."""
    plain, ported = ((program.folder / name).read_text() for name in ("plain.py", "ported.py"))
    before, after = plain.splitlines(), ported.splitlines()
    marked = list_of_checkpoints(plain), list_of_checkpoints(ported)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    found = []
    for word, *bounds in matcher.get_opcodes():
        if word == "equal":
            continue
        for kind in (False, True):
            gone, new = (
                [lines[at] for at in range(*span) if lines[at].strip() and (at in held) is kind]
                for lines, span, held in zip(
                    (before, after), (bounds[:2], bounds[2:]), marked, strict=True
                )
            )
            if gone or new:
                found.append(Change(is_for_checkpoints=kind, gone=gone, new=new))
    return tuple(found)


def count_changes(program: Program) -> tuple[int, int, int]:
    """Lines of the original; lines changed to train and evaluate; and for checkpoints."""
    sizes = {kind: 0 for kind in (False, True)}
    for change in list_changes(program):
        sizes[change.is_for_checkpoints] += change.size
    total = len((program.folder / "plain.py").read_text().splitlines())
    return total, sizes[False], sizes[True]


def render_conf(program: Program, cluster: str, path: str, checkpoints: str = "checkpoints") -> str:
    """The conf of the port: two stages of other sizes, and two replicas."""
    train = ", ".join(filter(None, [program.train, f"checkpoint: {{folder: {checkpoints}}}"]))
    return f"""
name: {program.name}
program: {{script: {program.folder}/ported.py, args: {program.ported}}}
train: {{{train}}}
parallel: {{pipeline: 2, data: 2, partition: {program.partition}}}
{cluster.strip()}
env: {{OMP_NUM_THREADS: "1", PYTHONPATH: "{path}", STEPS: "${{train.steps}}"}}
"""
