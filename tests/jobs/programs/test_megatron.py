"""A conf as Megatron-LM's arguments, against what people wrote by hand and a real copy's parser."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import ROOT
from tests.command import Vjob, read_out
from tests.jobs.confs import make_conf
from tests.jobs.programs.recipes import ONE_MACHINE, TODAY, TODAY_FORMS
from tests.varuna_core.trace.test_engines import order_1f1b
from varuna_core.checkpoint.cli import main
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.loading.check import check_conf
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.conf.world_size import get_replicas, get_world
from vjob.jobs.programs import megatron
from vjob.jobs.programs.megatron import LAYOUT_FILE, Checkout, find_checkout
from vjob.jobs.programs.start import get_starter
from vjob.reports.load.tables import load_job

GOLDEN = ROOT / "tests/jobs/golden/external/megatron.json"
PARSER = ROOT / "tests/programs/megatron_parser.py"
PYTHON = os.environ.get("VJOB_MEGATRON_PYTHON", sys.executable)
"""An interpreter with what a real copy imports."""
V1 = Checkout(script="/m/pretrain_gpt2.py", generation="v1", partition=None)
V2 = Checkout(script="/m/pretrain_gpt.py", generation="v2", partition="balance")


def build(text: str, checkout: Checkout | None = None) -> tuple[str, ...]:
    conf = make_conf(text)
    assert check_conf(conf, {}, require_paths=False) == []
    return megatron.build_arguments(
        conf,
        checkout or Checkout(),
        replicas=get_replicas(conf) or 1,
        world=get_world(conf),
    )


@pytest.mark.parametrize(
    ("parts", "pipeline", "wanted"),
    [
        ((6, 6, 6), 3, []),
        ((5, 6, 7), 3, ["first 5", "last 7"]),
        ((5, 6, 6), 3, ["first 5"]),
        ((6, 6, 5), 3, ["last 5"]),
        ((7, 5), 2, ["first 7"]),
        ((5, 6, 7, 6), 4, None),  # the middle is uneven
        ((0, 6, 6), 3, None),  # its own check wants more than none
        ((5, 6, 7), 1, None),  # chunks of one stage
    ],
)
def test_the_ends_of_a_partition_are_options_of_core_before_its_layout(
    parts: tuple[int, ...], pipeline: int, wanted: list[str] | None
) -> None:
    found = megatron.spell_partition(parts, Checkout(partition="ends"), pipeline)
    said = "--decoder-{}-pipeline-num-layers"
    assert found == (
        wanted
        if wanted is None
        else [(said.format(end), count) for end, count in map(str.split, wanted)]
    )


def pair(words: tuple[str, ...] | list[str]) -> dict[str, list[str]]:
    """Options with their values."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            found[flag := word] = []
        else:
            found[flag].append(word)
    return found


def test_the_one_machine_recipe_comes_out_as_it_was_written_by_hand() -> None:
    by_hand = """--model-parallel-size 1 --num-layers 24 --hidden-size 1024
        --num-attention-heads 16 --batch-size 8 --seq-length 1024 --max-position-embeddings 1024
        --train-iters 500 --lr-decay-iters 320000 --save /data/MLM --load /data/MLM
        --data-path /data/train/nist02-32k_text_sentence --vocab-file /data/train/vocab.json
        --merge-file /data/train/bpe32k --data-impl mmap --split 900,50,50
        --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5
        --weight-decay 1e-2 --clip-grad 1.0 --warmup .01 --checkpoint-activations
        --log-interval 10 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16"""
    ours, theirs = pair(build(ONE_MACHINE, V1)), pair(by_hand.split())
    for flag, values in theirs.items():
        assert list(map(read_number, ours[flag])) == list(map(read_number, values)), flag
    added = {"--hidden-dropout", "--attention-dropout", "--seed"}
    assert ours.keys() - theirs.keys() == added, "which that parser has by the same defaults"


def read_number(text: str) -> float | str:
    return float(text) if re.fullmatch(r"[0-9.e-]+", text) else text


def find_copy(needed: str) -> Path:
    """A checkout of Core 0.13 or later, or the newest wheel, that has this file."""
    ours = Path(sys.prefix, "megatron")
    root = Path(os.environ.get("VJOB_MEGATRON") or ours)
    if not (root / needed).is_file():
        pytest.skip(f"no {needed}: VJOB_MEGATRON=<checkout>, or `make .venv/.installed-recipes`")
    assert find_checkout(str(root)).partition == "layout"
    return root


def test_every_option_that_is_written_is_in_a_list() -> None:
    source = Path(megatron.__file__).read_text(encoding="utf-8")
    older = "--balance --batch-size --checkpoint-activations --data-impl --model-parallel-size "
    older += "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers"
    written = set(re.findall(r'"(--[a-z0-9-]+)"', source)) - {*older.split(), "--warmup"}
    assert written <= {word for words in make_golden().values() for word in words}


def make_golden() -> dict[str, list[str]]:
    return {name: list(build(text)) for name, text in TODAY_FORMS.items()}


def test_the_lists_are_those_that_a_real_copy_has_accepted() -> None:
    """VJOB_WRITE_GOLDEN=1 writes them anew; then let a real copy judge them (VJOB_MEGATRON)."""
    made = make_golden()
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    if os.environ.get("VJOB_WRITE_GOLDEN") and golden["lists"] != made:
        golden = {"accepted_by": {}, "lists": made}
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    assert golden["lists"] == made
    assert golden["accepted_by"], "let a real copy judge the new lists: VJOB_MEGATRON=<checkout>"


@pytest.mark.slow
def test_a_real_copys_parser_accepts_the_lists() -> None:
    root = find_copy("megatron/training/arguments.py")
    made = make_golden()
    asked = {
        name: {"words": words, "world": get_world(make_conf(TODAY_FORMS[name]))}
        for name, words in made.items()
    }
    done = subprocess.run(
        [PYTHON, "-W", "ignore", PARSER, root],
        input=json.dumps(asked),
        env={**os.environ, **get_starter(make_conf(TODAY)).build_env(make_conf(TODAY))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"the copy needs more: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    for name, words in made.items():
        layout = pair(words).get("--pipeline-model-parallel-layout", [None])[0]
        assert said["layouts"][name] == layout, name
    if os.environ.get("VJOB_WRITE_GOLDEN"):
        golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
        golden["accepted_by"][said["version"]] = datetime.date.today().isoformat()
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


@given(st.lists(st.integers(0, 30), min_size=2, max_size=12))
def test_a_layout_says_the_layers_of_each_stage(parts: list[int]) -> None:
    stages = megatron.spell_layout(parts).split("|")
    grown = [re.sub(r"t\*(\d+)", lambda m: "t" * int(m[1]), stage) for stage in stages]
    assert [stage.count("t") for stage in grown] == parts
    assert grown[0].startswith("E") and grown[-1].endswith("L")
    assert "".join(grown).count("E") == "".join(grown).count("L") == 1


def test_a_partition_that_counts_both_ends_is_given_in_layers() -> None:
    assert megatron.split_layers(make_conf(TODAY_FORMS["units"])) == (6,) * 8


def test_a_fork_with_balance_gets_the_partition_as_it_was() -> None:
    text = TODAY.replace("nsys: true, ", "")
    assert pair(build(text, V2))["--balance"] == ["0-11-8-8-8-8-5-0"]


@pytest.mark.parametrize(
    ("args", "gone"),
    [
        ("--bf16", ["--fp16"]),
        ("--lr=3e-4", ["--lr"]),
        ("--recompute-activations", ["--recompute-granularity", "--recompute-num-layers"]),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file v.json", ["--vocab-size"]),
        ("--pipeline-model-parallel-layout E|t*48|L", []),
    ],
)
def test_what_the_arguments_name_is_left_to_them(args: str, gone: list[str]) -> None:
    conf = make_conf(TODAY)
    conf = replace(conf, program=replace(conf.program, args=tuple(args.split())))
    words = megatron.build_arguments(conf, Checkout(), replicas=4, world=32)
    assert words[-len(args.split()) :] == tuple(args.split())
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert len(flags) == len(set(flags))
    assert not set(gone) & set(words[: -len(args.split())])


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (("model: gpt2-xl\n", ""), "model"),
        (("data: {prefix: xl/my-gpt2_text_document}\n", ""), "data"),
        (("zero: 1", "zero: 3"), "parallel.zero"),
        (("recompute: full", "recompute: offload"), "parallel.recompute"),
        (("recompute: full", "recompute: selective"), "parallel.recompute"),
        (("zero: 1", "schedule: zero_bubble"), "parallel.schedule"),
        (("steps: 50", "optimizer: {name: lamb}"), "train.optimizer.name"),
        (("steps: 50", "compile: true"), "train.compile"),
        (("steps: 50", "cuda_graphs: true"), "train.cuda_graphs"),
        (("precision: fp16", "precision: fp8"), "train.precision"),
        (("folder: ckpt", "folder: ckpt, local: /scratch"), "train.checkpoint.local"),
        (("text_document}", "text_document, vocab: v.txt}"), "data.vocab"),
        (
            ("Megatron-LM}", "Megatron-LM, args: [--pipeline-model-parallel-size, 4]}"),
            "program.args",
        ),
        (("nsys: true", "nsys: true, ncu: true"), "profile.ncu"),
    ],
)
def test_what_megatron_cannot_do_is_refused_by_its_key(change: tuple[str, str], key: str) -> None:
    text = TODAY.replace(*change)
    assert text != TODAY
    problems = check_conf(make_conf(text), {}, require_paths=False)
    assert [problem.key for problem in problems] == [key]


@pytest.mark.parametrize(
    ("checkout", "text", "key"),
    [
        (Checkout(partition=None), TODAY, "parallel.partition"),
        (Checkout(), TODAY.replace(", partition: 0-11-8-8-8-8-5-0", ""), None),
        (
            Checkout(),
            TODAY.replace(", partition: 0-11-8-8-8-8-5-0", "").replace("gpt2-xl", "gpt2-2.5b"),
            "parallel.pipeline",
        ),
        (replace(V1, flags=frozenset({"--num-layers"})), ONE_MACHINE, "program.megatron"),
    ],
)
def test_what_one_checkout_cannot_do_is_refused(
    checkout: Checkout, text: str, key: str | None
) -> None:
    keys = [found for found, _, _ in megatron.find_unable(make_conf(text), checkout)]
    assert keys == ([] if key is None else [key])


def test_the_generation_of_a_checkout_is_read_off_its_files(tmp_path: Path) -> None:
    def write(name: str, text: str = "") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    assert find_checkout("/no/where") == Checkout(script="/no/where/pretrain_gpt.py")
    script = write("old/pretrain_gpt2.py")
    write("old/megatron/arguments.py", "add('--model-parallel-size')\nadd('--local_rank')")
    found = find_checkout(str(tmp_path / "old"))
    assert (found.script, found.generation, found.partition) == (script, "v1", None)
    assert "--local_rank" in found.flags
    script = write("fork/_00_pretrain_gpt.py")
    write("fork/megatron/arguments.py", "'--tensor-model-parallel-size' \"--balance\"")
    found = find_checkout(script)
    assert (found.script, found.generation, found.partition) == (script, "v2", "balance")
    write("core/megatron/training/arguments.py")
    assert find_checkout(str(tmp_path / "core")).partition is None
    write("core/megatron/training/arguments.py", f"add('{megatron.FIRST}')")
    assert find_checkout(str(tmp_path / "core")).partition == "ends"
    write(f"core/{LAYOUT_FILE}")
    assert find_checkout(str(tmp_path / "core")).partition == "layout"


def test_profiled_steps_lie_within_a_short_run() -> None:
    conf: JobConf = make_conf(TODAY.replace("steps: 50", "steps: 3"))
    words = megatron.build_arguments(conf, Checkout(), replicas=4, world=32)
    options = pair(words)
    assert (options["--profile-step-start"], options["--profile-step-end"]) == (["2"], ["3"])
    assert options["--profile-ranks"] == ["0", "31"]


OVERRIDE = "--override-opt_param-scheduler"
STOCK = """
name: stock
program:
  python: {python}
  megatron: checkout/pretrain_cpu.py
  args: [--distributed-backend, gloo, --use-cpu-initialization, --transformer-impl, local,
    --no-gradient-accumulation-fusion, --no-masked-softmax-fusion, --no-persist-layer-norm,
    --no-bias-dropout-fusion, --no-rope-fusion, --num-workers, "0", --override-opt_param-scheduler]
model: {{layers: 4, hidden: 32, heads: 4, sequence: 16, vocab: 64, dropout: 0.0}}
data: {{synthetic: true}}
train:
  steps: {steps}
  global_batch_size: 8
  micro_batch_size: 2
  precision: fp32
  log_every: 1
  optimizer: {{lr: 1.0e-3}}
  checkpoint: {{folder: weights, every: 2}}
parallel: {{pipeline: {ranks}, partition: {layers}}}
profile: {{timeline: true}}
cluster:
  scheduler: local
  walltime_min: 10
  nodes: [{{group: all, count: 1, ranks: {ranks}}}]
"""


@pytest.mark.slow
def test_its_own_program_trains_in_uneven_stages_and_has_a_timeline(tmp_path: Path) -> None:
    """pretrain_gpt.py itself, on CPUs: two stages of 3 and 1 layers have the losses of one."""
    root = find_copy("pretrain_gpt.py")
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for item in root.iterdir():
        (checkout / item.name).symlink_to(item)
    programs = ROOT / "tests/programs"
    shutil.copy(programs / "engines/megatron_stock.py", checkout / "pretrain_cpu.py")
    shutil.copy(programs / "megatron_imports.py", checkout)
    vjob = Vjob(tmp_path)

    def train(
        ranks: int, layers: str, steps: int, more: str = OVERRIDE
    ) -> tuple[RunFolder, list[float]]:
        text = STOCK.format(python=PYTHON, ranks=ranks, layers=layers, steps=steps)
        text = text.replace(OVERRIDE, more)
        run = vjob.submit(text)
        assert vjob.wait_over(run, 240)["verdict"] == "COMPLETED", vjob.explain(run)
        return run, [float(loss) for loss in re.findall(r"lm loss: (\S+)", read_out(run))]

    train(1, "4", 2)  # its first weights depend on the layout: begin with equal ones
    shutil.copytree(tmp_path / "weights", tmp_path / "kept")
    _, whole = train(1, "4", 5)
    shutil.rmtree(tmp_path / "weights")
    shutil.move(tmp_path / "kept", tmp_path / "weights")
    run, halves = train(2, "3-1", 5)
    assert halves == pytest.approx(whole, rel=1e-5) and len(whole) == 3
    # The same weights through ours and back: it goes on with equal losses.
    fresh = "--finetune, --no-load-optim, --no-load-rng"
    assert main(["import", str(tmp_path / "weights"), str(tmp_path / "ours")]) == 0
    assert main(["export", "--torch-dist", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    _, own = train(1, "4", 2, fresh)
    shutil.rmtree(tmp_path / "weights")
    shutil.move(tmp_path / "back", tmp_path / "weights")
    assert train(1, "4", 2, fresh)[1] == own and len(own) == 2
    job = load_job(run.path)
    events = job.events.sort_values("begin_s")
    acts = events[events["kind"].isin(["F", "B"]) & (events["what"] != "goes on")]
    for (stage, _), own in acts.groupby(["stage", "step"]):
        found = [f"{stage}{k}{m}" for k, m in zip(own["kind"], own["microbatch"], strict=True)]
        assert found == order_1f1b(int(stage)), stage
    assert acts["step"].nunique() >= 2 and set(acts["stage"]) == {0, 1}
    said = vjob("report", str(run.path), "--text").stdout
    for words in ("traced steps: 3\n", "\nSTAGES\n"):
        assert words in said, said
