"""conf.yaml to JobConf: spellings, YAML's traps, problems with their lines, overrides."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobs.conf import MODELS, JobConf, Model, Program, is_secret
from jobs.conf_doc import list_sections
from jobs.conf_read import parse_conf, read_conf
from jobs.conf_reader import get_hints
from jobs.conf_redact import show
from jobs.errors import ConfError, Problem

BASE = Path("/conf")
MINIMAL = "name: run\nprogram: {script: train.py}\n"


def parse(text: str, *overrides: str) -> JobConf:
    return parse_conf(text, "conf.yaml", BASE, overrides, environ={"HOME": "/home/me"})


def parse_more(text: str, *overrides: str) -> JobConf:
    return parse(MINIMAL + text, *overrides)


def find_problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfError) as caught:
        parse(text, *overrides)
    return [str(problem) for problem in caught.value.problems]


def find_more(text: str, *overrides: str) -> list[str]:
    return find_problems(MINIMAL + text, *overrides)


def test_the_conf_of_the_design_is_read_as_written() -> None:
    conf = parse("""\
name: gpt2-xl
program: pretrain_gpt
model: gpt2-xl
data: {prefix: data/xl/my-gpt2_text_document, split: "969,30,1"}
train:
  global_batch_size: 64
  precision: fp16
  loss_scale: dynamic
  optimizer: {name: adamw, lr: 1.5e-4, betas: [0.9, 0.95]}
  schedule: {kind: cosine, warmup_steps: 10, min_lr: 1e-5}
  checkpoint: {folder: ckpt, every: 500, keep: 3, local: /scratch}
parallel: {pipeline: 8, data: 4, partition: 0-11-8-8-8-8-5-0}
cluster:
  walltime_min: 120
  account: null
  nodes:
    - {group: master, count: 1, queue: gpu1, gpus: "a100:4"}
    - {group: slave, count: 7, queue: gpu2, gpus: a10:4, cpus: 14, memory_gb: 0, devices: null}
container: {image: pytorch.sqsh, mounts: ["data:/data", ~/x:/x], reuse: auto}
prices: {a100: 32.77, a10: 9}
notify: {}
""")
    assert conf.program == Program(kind="pretrain_gpt")
    assert conf.model == MODELS["gpt2-xl"]
    assert conf.data is not None and conf.data.prefix == "/conf/data/xl/my-gpt2_text_document"
    assert conf.train.optimizer.lr == 1.5e-4 and conf.train.schedule.min_lr == 1e-5
    assert conf.train.checkpoint.folder == "/conf/ckpt"
    assert conf.train.checkpoint.local == "/scratch"
    assert conf.parallel.partition == "0-11-8-8-8-8-5-0"
    assert [group.gpu_type for group in conf.cluster.nodes] == ["a100", "a10"]
    assert [group.num_ranks for group in conf.cluster.nodes] == [4, 4]
    assert conf.container.image == "/conf/pytorch.sqsh"
    assert conf.container.mounts == ("/conf/data:/data", "/home/me/x:/x")
    assert conf.prices == {"a100": 32.77, "a10": 9.0}
    assert conf.log_folder == "/conf/log"


@pytest.mark.parametrize(
    ("spelled", "program"),
    [
        ("pretrain_bert", Program(kind="pretrain_bert")),
        ("{script: t.py}", Program(kind="script", path="/conf/t.py")),
        (
            "{script: /t.py, args: [--lr, 1e-5, on, 010, 'x y'], python: venv/bin/python}",
            Program(
                kind="script",
                path="/t.py",
                args=("--lr", "1e-5", "on", "010", "x y"),
                python="/conf/venv/bin/python",
            ),
        ),
        (
            "{megatron: ., python: python3}",
            Program(kind="megatron", path="/conf", python="python3"),
        ),
        (
            "{deepspeed: ~/t.py, config: ds.json}",
            Program(kind="deepspeed", path="/home/me/t.py", config="/conf/ds.json"),
        ),
    ],
)
def test_each_form_of_a_program_is_read(spelled: str, program: Program) -> None:
    assert parse(f"name: run\nprogram: {spelled}\n").program == program


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        ("train.py", "must be {script: train.py} for a program of your own"),
        ("{script: a, megatron: b}", "must have one of script, megatron and deepspeed"),
        ("{scrpt: a}", 'unknown key; did you mean "script"?'),
        ("{script: a, config: b}", "unknown key; valid keys: script, args, python"),
        ("{script: a, args: --x}", "must be a list of text"),
        ("", "must be pretrain_gpt or pretrain_bert, or a mapping"),
        ("[a]", "must be pretrain_gpt or pretrain_bert, or a mapping"),
    ],
)
def test_another_form_of_a_program_says_what_is_possible(spelled: str, message: str) -> None:
    assert any(message in line for line in find_problems(f"name: run\nprogram: {spelled}\n"))


def test_a_model_is_a_name_or_numbers() -> None:
    conf = parse_more("model: {layers: 2, hidden: 8, heads: 2, dropout: 0}\n")
    assert conf.model == Model(layers=2, hidden=8, heads=2, dropout=0.0)
    assert find_more("model: gpt2-xxl\n") == [
        'conf.yaml:3: model = gpt2-xxl: unknown model; did you mean "gpt2-xl"? '
        "A shape of your own is a mapping with layers, hidden and heads"
    ]
    assert find_more("model: {layers: 2, heads: 1}\n") == [
        "conf.yaml:3: model.hidden: is required: a whole number"
    ]


@pytest.mark.parametrize(
    "text", ["12:30", "on", "no", "010", "1.50", "0x10", "1e-5", "1_000", "2024-01-01", "=", "yes"]
)
def test_a_value_of_the_environment_is_the_text_that_was_written(text: str) -> None:
    assert parse_more(f"env: {{A: {text}}}\n").env == {"A": text}
    assert parse_more("", f"env.A={text}").env == {"A": text}


@pytest.mark.parametrize("text", ["1e-5", "1E-5", ".00001", "0.00001", "+1.0e-05"])
def test_a_number_may_be_written_as_people_write_numbers(text: str) -> None:
    assert parse_more(f"train: {{optimizer: {{lr: {text}}}}}\n").train.optimizer.lr == 1e-5


@pytest.mark.parametrize(
    "text", [".inf", ".nan", "nan", "1e999", "1:30", "'1'", "0x10", "1.2.3", "-"]
)
def test_what_is_no_number_is_refused(text: str) -> None:
    [problem] = find_more(f"train: {{optimizer: {{lr: {text}}}}}\n")
    assert "must be a number" in problem


@pytest.mark.parametrize(
    "text", ["1.0", "1e3", "010", "0x1", "1:30", "true", "'5'", "9" * 30, "null"]
)
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    [problem] = find_more(f"train: {{steps: {text}}}\n")
    assert "must be a whole number" in problem


@pytest.mark.parametrize(("text", "value"), [("yes", True), ("Off", False), ("TRUE", True)])
def test_a_truth_may_be_any_word_of_yaml(text: str, value: bool) -> None:
    assert parse_more(f"profile: {{nsys: {text}}}\n").profile.nsys is value


def test_quotes_make_text_and_the_message_says_so() -> None:
    assert find_more("train: {steps: '5'}\n") == [
        "conf.yaml:3: train.steps = 5: must be a whole number, without quotes"
    ]
    assert parse_more('workdir: "null"\n').workdir == "/conf/null"


def test_unions_take_the_type_that_fits() -> None:
    assert parse_more("cluster: {nodes: [{group: a, gpus: 4}]}\n").cluster.nodes[0].gpus == 4
    assert parse_more("profile: {ranks: [0, 3]}\n").profile.ranks == (0, 3)
    assert parse_more("profile: {ranks: all}\n").profile.ranks == "all"
    assert parse_more("container: {reuse: no}\n").container.reuse is False
    assert parse_more("train: {loss_scale: 128}\n").train.loss_scale == 128.0
    assert find_more("parallel: {data: some}\n") == [
        "conf.yaml:3: parallel.data = some: must be a whole number or auto"
    ]


def test_values_of_sbatch_keep_truths_and_whole_numbers_and_else_the_text() -> None:
    options = "{exclusive: true, nice: 100, begin: 12:30, x: 1.50, constraint: ib, y: '7'}"
    expected = {
        "exclusive": True,
        "nice": 100,
        "begin": "12:30",
        "x": "1.50",
        "constraint": "ib",
        "y": "7",
    }
    assert parse_more(f"cluster: {{sbatch: {options}}}\n").cluster.sbatch == expected
    assert "must be a single value" in find_more("cluster: {sbatch: {a: [b]}}\n")[0]


def test_an_empty_section_is_as_good_as_none() -> None:
    text = "train:\ncontainer: null\nenv:\npass_env:\ncluster:\n  nodes:\nmodel: null\n"
    assert parse_more(text) == parse(MINIMAL)


def test_without_groups_one_node_gets_the_ranks_of_the_layout() -> None:
    [group] = parse_more("parallel: {pipeline: 2, data: 3, tensor: 2}\n").cluster.nodes
    assert (group.group, group.count, group.num_ranks) == ("master", 1, 12)


def test_anchors_and_merge_keys_work() -> None:
    conf = parse_more("""\
cluster:
  nodes:
    - &first {group: a, count: 2, queue: q, env: &env {A: 1, B: 2}}
    - {<<: *first, group: b, env: {<<: *env, B: 3}}
""")
    first, second = conf.cluster.nodes
    assert (second.group, second.count, second.queue) == ("b", 2, "q")
    assert (first.env, second.env) == ({"A": "1", "B": "2"}, {"A": "1", "B": "3"})


def test_all_problems_come_at_once_in_the_order_of_lines() -> None:
    assert find_problems("""\
program: {script: t.py}
train:
  stesp: 5
  precision: fp61
  steps: x
  steps: 6
nodes: 3
cluster:
  nodes:
    - {partition: a, count: two}
""") == [
        "conf.yaml:1: name: is required: text",
        'conf.yaml:3: train.stesp = 5: unknown key; did you mean "steps"?',
        "conf.yaml:4: train.precision = fp61: must be one of fp32, fp16, bf16",
        "conf.yaml:5: train.steps = x: must be a whole number",
        "conf.yaml:6: train.steps: given twice; the first one is on line 5",
        'conf.yaml:7: nodes = 3: unknown key; did you mean "cluster.nodes"?',
        'conf.yaml:10: cluster.nodes[0].partition = a: unknown key; did you mean "queue"?',
        "conf.yaml:10: cluster.nodes[0].count = two: must be a whole number",
        "conf.yaml:10: cluster.nodes[0].group: is required: text",
    ]


def test_an_unknown_key_like_no_other_lists_the_valid_ones() -> None:
    assert find_more("morph: {zzz: 1}\n") == [
        "conf.yaml:3: morph.zzz = 1: unknown key; valid keys: enabled, min_nodes, max_nodes"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: [", "conf.yaml:1: not YAML: while parsing a flow node expected the node content"),
        ("a: b: c", "conf.yaml:1: not YAML: mapping values are not allowed here"),
        ("name: run\n\tx: 1", "conf.yaml:2: not YAML: while scanning for the next token"),
        ("name: a\n\x00", "conf.yaml:2: not YAML: the character U+0000 is not allowed"),
        ('"\\UFFFFFFFF"', "conf.yaml:1: not YAML: an escape or a version that does not exist"),
        ("- a", "conf.yaml:1: a conf is a mapping of keys, not a list"),
        ("a: 1\n---\nb: 2", "conf.yaml:2: a second document starts here"),
        ("a: *b", "conf.yaml:1: *b has no &b before it"),
        ("a: &b [*b]", "conf.yaml:1: *b is inside &b: it would never end"),
        ("[" * 1000, "conf.yaml:1: nested more than 20 deep"),
        ("a: [" + "1," * 30_000 + "]", "conf.yaml:1: more than 20000 values"),
        ("#" * 300_000, "conf.yaml:1: larger than 256 KiB"),
        ("? [a]\n: b", "conf.yaml:1: a key must be text"),
        ("a: !!python/name:os.system x", "conf.yaml:1: a: tags have no use in a conf"),
        ("<<: 3", "conf.yaml:1: <<: << takes a mapping or a list of mappings"),
        ("", "conf.yaml:1: name: is required: text"),
    ],
)
def test_what_is_no_conf_at_all_is_told_with_its_line(text: str, problem: str) -> None:
    assert any(line.startswith(problem) for line in find_problems(text)), find_problems(text)


def test_a_bomb_of_aliases_is_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 15)]
    assert any("more than 20000 values" in line for line in find_problems("\n".join(lines)))


def test_a_text_with_nul_is_refused() -> None:
    assert find_more('env: {A: "x\\0"}\nsetup: ["\\uD800"]\n') == [
        "conf.yaml:3: env.A = 'x\\x00': must not contain a NUL character",
        "conf.yaml:4: setup[0] = '\\ud800': must not contain half of a surrogate pair",
    ]


def test_an_override_replaces_one_key_and_leaves_aliases_alone() -> None:
    text = "cluster:\n  nodes:\n    - &a {group: a, count: 1}\n    - {<<: *a, group: b}\n"
    conf = parse_more(
        text,
        "cluster.nodes[0].count=3",
        "train.optimizer.lr=1e-5",
        "env.NCCL_DEBUG=INFO",
        "setup=[a, b]",
        "train.steps=1",
        "train.steps=2",
    )
    assert [group.count for group in conf.cluster.nodes] == [3, 1]
    assert conf.train.optimizer.lr == 1e-5 and conf.train.steps == 2
    assert conf.env == {"NCCL_DEBUG": "INFO"} and conf.setup == ("a", "b")


def test_an_override_meets_the_same_checks_as_the_file() -> None:
    assert find_problems(
        MINIMAL + "model: gpt2-xl\ntrain: {steps: x}\n",
        "trian.steps=3",
        "train.log_every=x",
        "cluster.nodes[4].count=3",
        "model.layers=3",
        "steps",
        "train.steps={",
        "a..b=1",
    ) == [
        "conf.yaml:4: train.steps = x: must be a whole number",
        "--set: cluster.nodes[4].count = 3: cluster.nodes has 0 entries, counted from 0",
        '--set: model.layers = 3: model is "gpt2-xl", so it has no key layers',
        "--set: steps: write --set key=value, such as --set train.steps=100",
        "--set: train.steps = {: not YAML: while parsing a flow node expected the node content, "
        "but found '<stream end>'",
        "--set: a..b=1: write --set key=value, such as --set train.steps=100",
        "--set: train.log_every = x: must be a whole number",
        '--set: trian = a mapping: unknown key; did you mean "train"?',
    ]


def test_no_secret_is_shown() -> None:
    secret = "hunter2"
    for text in (
        f"env: {{HF_TOKEN: [{secret}]}}\n",
        f"env: [HF_TOKEN={secret}]\n",
        f'env: {{HF_TOKEN: "{secret}\\0"}}\n',
        f"hf_token: {secret}\n",
        f"notify: {{webhook: [{secret}]}}\n",
        f"setup: {{a: {secret}}}\n",
        f"pass_env: HF_TOKEN={secret}\n",
        f"container: {{mounts: docker://me:{secret}@host/x}}\n",
        f"env: {{A: {secret}: x}}\n",
    ):
        assert secret not in "".join(find_more(text)), text
    assert secret not in "".join(find_more("", f"env.HF_TOKEN={{{secret}"))
    assert show("env.TOKENIZERS_PARALLELISM", "false") == "false"
    assert not is_secret("TOKENIZERS_PARALLELISM")


@pytest.mark.parametrize(
    ("runtime", "image", "expected"),
    [
        ("auto", "a/b.sqsh", "/conf/a/b.sqsh"),
        ("auto", "image", "/conf/image"),
        ("auto", "./x#y", "/conf/x#y"),
        ("auto", "docker://ubuntu:24.04", "docker://ubuntu:24.04"),
        ("pyxis", "nvcr.io#nvidia/pytorch:23.04-py3", "nvcr.io#nvidia/pytorch:23.04-py3"),
        ("podman", "ubuntu:24.04", "ubuntu:24.04"),
        ("apptainer", "~/x.sif", "/home/me/x.sif"),
    ],
)
def test_an_image_is_a_path_or_a_reference(runtime: str, image: str, expected: str) -> None:
    conf = parse_more(f"container: {{runtime: {runtime}, image: '{image}'}}\n")
    assert conf.container.image == expected


def test_a_file_that_cannot_be_read_is_a_problem_of_the_conf(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_bytes(b"name: a\nprogram: \xff\n")
    with pytest.raises(ConfError, match=r"broken.yaml:2: is not UTF-8 text \(byte 0xff\)"):
        read_conf(broken)
    with pytest.raises(ConfError, match=r"none.yaml: cannot be read: No such file"):
        read_conf(tmp_path / "none.yaml")


def test_read_conf_also_checks_keys_against_each_other(tmp_path: Path) -> None:
    path = tmp_path / "conf.yaml"
    path.write_text(MINIMAL + "parallel: {pipeline: 2, partition: 1-2-3}\n", encoding="utf-8")
    with pytest.raises(ConfError) as caught:
        read_conf(path, environ={})
    assert [problem.key for problem in caught.value.problems] == [
        "program.script",
        "parallel.partition",
    ]
    assert [problem.where for problem in caught.value.problems] == [f"{path}:2", f"{path}:3"]


def test_a_problem_of_the_whole_file_has_no_key() -> None:
    problem = Problem(where="a.yaml", key="", value="", message="cannot be read")
    assert str(problem) == "a.yaml: cannot be read"


def test_every_field_has_a_type_that_the_reader_knows() -> None:
    known = {str, int, float, bool, typing.Any}
    for section in list_sections():
        for name, hint in get_hints(section.cls).items():
            members = typing.get_args(hint)
            if typing.get_origin(hint) not in (typing.Union, types.UnionType):
                members = (hint,)
            for member in members:
                origin = typing.get_origin(member)
                is_generic = origin in (typing.Literal, tuple) or (
                    isinstance(origin, type) and issubclass(origin, typing.Mapping)
                )
                is_known = member in known or member is types.NoneType
                assert is_known or is_generic or dataclasses.is_dataclass(member), name


def refuse_tracebacks(read: Callable[[], object]) -> None:
    try:
        read()
    except ConfError as error:
        assert error.problems and str(error)


YAML_CHARS = "abe:-[]{}&*!|>'\"%@#?,<~ \n\t0159.=\\Uxu\0\x85\ufeff"


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.text(alphabet=YAML_CHARS, max_size=60))
@example("%YAML 9999999999999999999999999.1\n---\na")
@example("!<%FF> a")
@example("&a : *a")
def test_no_text_makes_a_traceback(text: str) -> None:
    refuse_tracebacks(lambda: parse(text))
    refuse_tracebacks(lambda: parse_more(text))
    refuse_tracebacks(lambda: parse(MINIMAL, text))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
KEYS = st.sampled_from(
    [key for section in list_sections() for key in get_hints(section.cls)] + ["script", "<<", "x"]
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None)
@given(TREES)
def test_no_structure_makes_a_traceback(tree: object) -> None:
    refuse_tracebacks(lambda: parse(yaml.safe_dump(tree, allow_unicode=True)))
    refuse_tracebacks(lambda: parse_more(yaml.safe_dump({"train": tree, "cluster": tree})))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([section.key for section in list_sections()]), KEYS, TREES)
def test_no_override_makes_a_traceback(section: str, key: str, tree: object) -> None:
    text = yaml.safe_dump(tree, default_flow_style=True, allow_unicode=True)
    path = f"{section}.{key}".replace("[]", "[0]").lstrip(".")
    refuse_tracebacks(lambda: parse(MINIMAL, f"{path}={text}"))
