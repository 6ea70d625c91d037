"""Includes and references: as a plain model of both; errors name the file, the line and the key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs.conf.test_load import MINIMAL, find_more, parse, parse_more
from vjob.jobs.conf.loading.compose import fill_tree, include_files
from vjob.jobs.conf.loading.load import load_conf, parse_conf
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.conf.write import render_resolved
from vjob.jobs.conf.yaml_tree import Items, Node, Scalar, parse_tree
from vjob.jobs.errors import ConfError

NAMES = st.sampled_from("abcd")
VALUES = st.recursive(
    st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=2),
    lambda inner: st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
TREES = st.dictionaries(NAMES, VALUES, max_size=4)


def to_plain(node: Node) -> Any:
    """A tree as Python's own values."""
    if isinstance(node, Scalar):
        return yaml.safe_load(node.text) if node.plain else node.text
    if isinstance(node, Items):
        return [to_plain(one) for one in node.items]
    return {name: to_plain(entry.node) for name, entry in node.entries.items()}


def merge(under: Any, over: Any) -> Any:
    """The model: mappings key by key, else the second."""
    if not isinstance(under, dict) or not isinstance(over, dict):
        return over
    return {**under, **{n: merge(under[n], v) if n in under else v for n, v in over.items()}}


@given(st.lists(TREES, min_size=1, max_size=4), st.booleans())
def test_included_files_merge_as_the_model_says(trees: list[dict[str, Any]], nested: bool) -> None:
    """In a list, or each included by the next."""
    files = {f"{number}.yaml": yaml.safe_dump(tree) for number, tree in enumerate(trees[:-1])}
    names = list(files)
    if nested:
        for name, below in zip(names[1:], names, strict=False):
            files[name] = yaml.safe_dump({"include": below, **yaml.safe_load(files[name])})
        names = names[-1:]
    own, _ = parse_tree(yaml.safe_dump({"include": names, **trees[-1]}), "main.yaml")
    found, problems = include_files(
        own, "main.yaml", Path("/conf"), lambda path, _: files[path.name], {}
    )
    expected: Any = {}
    for tree in trees:
        expected = merge(expected, tree)
    assert to_plain(found) == expected and not problems


@st.composite
def draw_references(draw: st.DrawFn) -> dict[str, str]:
    """Texts that refer to earlier ones, in any order of their keys."""
    texts: dict[str, str] = {}
    for number in range(draw(st.integers(1, 6))):
        plain = st.sampled_from(["x", "-", "$ ", "$${", "}", " {", "7"])
        known = [f"${{{name}}}" for name in texts]
        part = plain | st.sampled_from(known) if known else plain
        texts[f"k{number}"] = "".join(draw(st.lists(part, min_size=1, max_size=4)))
    return dict(draw(st.permutations(list(texts.items()))))


def fill_model(texts: Mapping[str, str], text: str) -> str:
    """The model: one pass from the left."""
    done, at = "", 0
    while at < len(text):
        if text.startswith("$${", at):
            done, at = done + "${", at + 3
        elif text.startswith("${", at) and "}" in text[at:]:
            end = text.index("}", at)
            done, at = done + fill_model(texts, texts[text[at + 2 : end]]), end + 1
        else:
            done, at = done + text[at], at + 1
    return done


@given(draw_references())
def test_references_are_filled_as_the_model_says(texts: dict[str, str]) -> None:
    tree, _ = parse_tree(yaml.safe_dump(texts, default_style='"'), "main.yaml")
    found, problems = fill_tree(tree)
    assert not problems
    assert to_plain(found) == {name: fill_model(texts, text) for name, text in texts.items()}


def load(folder: Path, *overrides: str, **files: str) -> JobConf:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return load_conf(folder / "conf.yaml", overrides, {}).conf


def find(folder: Path, *overrides: str, **files: str) -> list[str]:
    with pytest.raises(ConfError) as caught:
        load(folder, *overrides, **files)
    return [str(one).replace(f"{folder}/", "") for one in caught.value.problems]


def test_a_conf_includes_one_that_includes_another(tmp_path: Path) -> None:
    conf = load(
        tmp_path,
        "train.seed=3",
        conf="include: [shared/site.yaml, mine.yaml]\n" + MINIMAL + "env: {B: two}\n",
        shared__site="include: queues.yaml\nenv: {A: one, B: one}\nlog_folder: logs\n",
        shared__queues="cluster: {nodes: [{group: a, queue: gpu1}], walltime_min: 2h}\n",
        mine="train: {steps: 7}\ncluster: {walltime_min: 1h}\n",
    )
    assert conf.env == {"A": "one", "B": "two"} and conf.cluster.nodes[0].queue == "gpu1"
    assert (conf.train.steps, conf.train.seed, conf.cluster.walltime_min) == (7, 3, 60)
    assert conf.log_folder == str(tmp_path / "logs")
    assert parse_conf(render_resolved(conf), "resolved.yaml", tmp_path) == conf


def test_problems_name_the_file_and_the_line_they_are_in(tmp_path: Path) -> None:
    said = find(
        tmp_path,
        conf=MINIMAL + "include: [base.yaml, none.yaml, deep/a.yaml]\n",
        base="train:\n  stesp: 5\n  seed: x\n",
        deep__a="include: b.yaml\n",
        deep__b="include: [../conf.yaml, a.yaml]\nenv: [\n",
    )
    assert said[0] == 'base.yaml:2: train.stesp = 5: unknown key; did you mean "steps"?'
    assert said[1] == "base.yaml:3: train.seed = x: must be a whole number"
    assert said[2].startswith("conf.yaml:3: include = none.yaml: cannot be read: No such file")
    assert said[3].startswith("deep/b.yaml:") and "not YAML" in said[3]


def test_a_cycle_is_refused_where_it_closes(tmp_path: Path) -> None:
    said = find(tmp_path, conf=MINIMAL + "include: a.yaml\n", a="include: ./b.yaml\n",
                b="name: x\ninclude: conf.yaml\n")  # fmt: skip
    assert said == [
        "b.yaml:2: include = conf.yaml: includes itself: conf.yaml > a.yaml > b.yaml > conf.yaml"
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("include: 3\n", "include = 3: cannot be read"),
        ("include: {a: b}\n", "include: must be the name of a file, or a list of them"),
        ("include:\n", "include: must be the name of a file, or a list of them"),
        ("include: list.yaml\n", "include = list.yaml: must be a conf, a mapping of keys"),
        ("include: /dev/zero\n", "include = /dev/zero: is a device, not a file"),
    ],
)
def test_what_cannot_be_included_is_said(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "list.yaml").write_text("[1]\n")
    (said,) = find(tmp_path, conf=MINIMAL + text)
    assert said.startswith("conf.yaml:3: ") and says in said


def test_only_a_file_includes_and_no_override_does(tmp_path: Path) -> None:
    assert find_more("include: base.yaml\n") == [
        "conf.yaml:3: include: only a conf file can include others"
    ]
    (said,) = find(tmp_path, "include=x.yaml", conf=MINIMAL)
    assert "include = x.yaml: is read from the conf file only; set the included keys" in said


def test_a_reference_takes_the_value_and_its_type() -> None:
    conf = parse_more(
        """\
log_folder: logs/${name}-${train.steps}-${train.optimizer.name}
train: {steps: 7, checkpoint: {every: "${train.steps}", folder: "ck/${env.WHO}/$${x}"}}
env: {WHO: "me-${name}", LATE: "${parallel.data}"}
cluster:
  nodes: [{group: a, count: 3, gpus: a10:2}]
  sbatch: {comment: "${cluster.nodes[0].gpus} on ${cluster.nodes[0].ranks}"}
  walltime_min: ${train.steps}
parallel:
  pipeline: ${cluster.nodes[0].count}
""".replace(" on ${cluster.nodes[0].ranks}", "")
    )
    assert conf.log_folder == "/conf/logs/run-7-adamw" and conf.train.checkpoint.every == 7
    assert conf.train.checkpoint.folder == "/conf/ck/me-run/${x}"
    assert conf.env == {"WHO": "me-${name}", "LATE": "${parallel.data}"}
    assert conf.parallel.pipeline == 3 and conf.cluster.sbatch == {"comment": "a10:2"}
    assert conf.cluster.walltime_min == 7
    again = parse_conf(render_resolved(conf), "resolved.yaml", Path("/conf"), environ={})
    assert again == conf


def test_a_reference_may_be_a_list_a_mapping_or_a_models_size() -> None:
    conf = parse_more("""\
model: gpt2-xl
cluster: {exclude: [n1, n2], sbatch: {constraint: ib}}
env: {A: "1"}
profile: {ranks: [0, 1], options: "${cluster.exclude}"}
train: {schedule: {warmup_steps: "${model.layers}"}}
""")
    assert conf.profile.options == ("n1", "n2") and conf.train.schedule.warmup_steps == 48


def test_a_mapping_that_is_not_written_is_an_empty_one() -> None:
    conf = parse_more("cluster: {nodes: [{group: a, env: '${env}'}], sbatch: '${prices}'}\n")
    assert conf.cluster.nodes[0].env == {} and conf.cluster.sbatch == {}


def test_shell_text_and_patterns_keep_their_dollars() -> None:
    text = """\
setup: ['export A="${HOME}" $${B}']
notify: {command: 'echo ${VJOB_RUN:-x}'}
progress: 'it (?P<step>\\d+)${'
"""
    conf = parse_more(text)
    assert conf.setup == ('export A="${HOME}" $${B}',)
    assert conf.notify.command == "echo ${VJOB_RUN:-x}" and conf.progress.endswith("${")
    assert parse_conf(render_resolved(conf), "r.yaml", Path("/conf"), environ={}) == conf


def test_an_override_is_referred_to_and_may_refer() -> None:
    conf = parse(
        f"{MINIMAL}log_folder: l/${{train.seed}}\n", "train.seed=5", "workdir=w/${train.seed}"
    )
    assert (conf.log_folder, conf.workdir) == ("/conf/l/5", "/conf/w/5")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("${train.step}", '${train.step} is not a conf key; did you mean "train.steps"?'),
        ("a/${steps}", "did you mean ${train.steps} or ${train.evaluate.steps}?"),
        ("${HOME}/x", "to pass a variable of your shell, write pass_env: [HOME]"),
        ("${workdir}", "refers back to itself: workdir > workdir"),
        ("${log_folder}", "refers back to itself: log_folder > workdir > log_folder"),
        ("${train.checkpoint.local}", "has no value: set train.checkpoint.local"),
        ("${parallel.data}", "is auto, which is not known yet: write parallel.data, or refer"),
        ("x${cluster}", "${cluster} has no value: set cluster"),
        ("x${env}", "${env} is a list or a mapping, which cannot be a part of a text"),
        ("${env.API_TOKEN}", "is a secret: pass it by env or pass_env"),
        ("${x", "is not closed by }; for a literal ${ write $${"),
    ],
)
def test_what_cannot_be_filled_is_said_with_its_line(text: str, says: str) -> None:
    said = find_more(f"env: {{API_TOKEN: abc}}\nlog_folder: '${{workdir}}'\nworkdir: '{text}'\n")
    assert any(one.startswith("conf.yaml:5: workdir = ") and says in one for one in said) or (
        "refers back" in says and any("refers back to itself" in one for one in said)
    )
    assert not any("must be" in one for one in said)


def test_a_mapping_with_a_secret_goes_nowhere_but_into_an_environment() -> None:
    text = MINIMAL + "env: {API_TOKEN: abc}\nnotify: {webhook: https://hooks/abc}\n"
    found = parse(text + "cluster: {nodes: [{group: a, env: '${env}'}]}\n")
    assert found.cluster.nodes[0].env == {"API_TOKEN": "abc"}
    for key in ("env", "notify"):
        with pytest.raises(ConfError, match="contains a secret"):
            parse(text + f"cluster: {{sbatch: '${{{key}}}'}}\n")


def test_references_that_grow_without_bound_are_refused() -> None:
    texts = [f"  A{n}: '${{env.A{n + 1}}}${{env.A{n + 1}}}'" for n in range(30)]
    said = find_more("env:\n" + "\n".join([*texts, "  A30: xx"]) + "\nworkdir: ${env.A0}\n")
    assert len(said) == 1 and "longer than" in said[0]
    texts = [f"  A{n}: '${{env.A{n + 1}}}'" for n in range(60)]
    said = find_more("env:\n" + "\n".join([*texts, "  A60: xx"]) + "\nworkdir: ${env.A0}\n")
    assert len(said) == 1 and "refers through more than 50 keys" in said[0]
