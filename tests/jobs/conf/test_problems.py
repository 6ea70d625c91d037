"""What is no good conf: every problem at once with its line, no secret shown, never a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.jobs.conf.test_load import MINIMAL, find_more, find_problems, parse, parse_more
from varuna_core.records.secrets import is_secret
from vjob.jobs.conf.document import list_sections
from vjob.jobs.conf.loading.load import read_conf
from vjob.jobs.conf.parse import get_hints
from vjob.jobs.conf.redact import show
from vjob.jobs.conf.yaml_tree import parse_tree
from vjob.jobs.errors import ConfError, Problem


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
        "conf.yaml:4: train.precision = fp61: must be one of fp32, fp16, bf16, fp8",
        "conf.yaml:5: train.steps = x: must be a whole number",
        "conf.yaml:6: train.steps: given twice; the first one is on line 5",
        "conf.yaml:7: nodes = 3: unknown key; write `nodes: 3` in cluster",
        "conf.yaml:10: cluster.nodes[0].partition = a: unknown key; write `queue: a`",
        "conf.yaml:10: cluster.nodes[0].count = two: must be a whole number",
    ]


def test_the_first_round_says_that_it_is_not_the_last(tmp_path: Path) -> None:
    conf = tmp_path / "c.yaml"
    conf.write_text("name: last\nprogram: {script: t.py}\ntrain: {seed: x}\n")
    with pytest.raises(ConfError) as caught:
        read_conf(conf)
    first = str(caught.value).splitlines()
    assert len(first) == 2 and "fix these first; checks across keys run afterwards" in first[0]
    conf.write_text(conf.read_text().replace("x}", "5}"))
    with pytest.raises(ConfError) as caught:
        read_conf(conf)
    assert str(caught.value).splitlines()[0] == "2 problems in the conf:"


def test_an_unknown_key_like_no_other_lists_the_valid_ones() -> None:
    assert find_more("morph: {zzz: 1}\n") == [
        "conf.yaml:3: morph.zzz = 1: unknown key; valid keys: enabled, mode, "
        "min_nodes, max_nodes, warm, grow, leave_slow, look_s, "
        "stop_s, return_s, manager_failures"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: [", "conf.yaml:1: not YAML: while parsing a flow node expected the node content"),
        ("a: b: c", "conf.yaml:1: not YAML: a colon is not allowed here"),
        ("name: run\n\tx: 1", "conf.yaml:2: not YAML: the line begins with a tab"),
        ("name: a\n\x00", "conf.yaml:2: not YAML: the character U+0000 is not allowed"),
        ('"\\UFFFFFFFF"', "conf.yaml:1: not YAML: an escape or a version that does not exist"),
        ("- a", "conf.yaml:1: a conf is a mapping of keys, not a list"),
        ("a: 1\n---\nb: 2", "conf.yaml:2: a second document starts here"),
        ("a: *b", "conf.yaml:1: *b has no &b before it"),
        ("a: &b [*b]", "conf.yaml:1: *b is inside &b: it would never end"),
        ("[" * 1000, "conf.yaml:1: nested more than 20 levels deep"),
        ("a: [" + "1," * 30_000 + "]", "conf.yaml:1: more than 20000 values"),
        ("#" * 300_000, "conf.yaml:1: larger than 256 KiB"),
        ("? [a]\n: b", "conf.yaml:1: a key must be text"),
        ("a: !!python/name:os.system x", "conf.yaml:1: a: tags are not supported in a conf"),
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


def test_a_problem_of_the_whole_file_has_no_key() -> None:
    problem = Problem(where="a.yaml", key="", value="", message="cannot be read")
    assert str(problem) == "a.yaml: cannot be read"


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
@example("a" + ".a" * 5000 + "=1")
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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: a\nprogram:\n\tscript: t.py\n", ":3: not YAML: the line begins with a tab"),
        ('name: "a\nb: c\n', ":1: not YAML: the quote that opens in this line is never closed"),
        ("name: a\nprogram: {script: t.py\n", ":2: not YAML: the { of this line is never closed"),
        ("name: a\nenv: [A\n", ":2: not YAML: the [ of this line is never closed"),
        ("name: a: b\n", ":1: not YAML: a colon is not allowed here: quote a value that contains"),
        ("name: @a\n", ":1: not YAML: a value that begins with @ must be in quotes"),
    ],
)
def test_common_mistakes_of_yaml_have_words_of_their_own(text: str, says: str) -> None:
    with pytest.raises(ConfError) as caught:
        parse_tree(text, "c")
    assert f"c{says}" in str(caught.value)


def test_a_folder_in_place_of_a_conf_names_a_conf_in_it(tmp_path: Path) -> None:
    (tmp_path / "conf.yaml").write_text("name: a\n")
    with pytest.raises(
        ConfError, match=r"is a folder, not a conf: name a file in it, such as .*/conf"
    ):
        read_conf(tmp_path)
