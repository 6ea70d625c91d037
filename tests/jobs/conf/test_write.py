"""JobConf back to text: the resolved conf, the starter conf, the page of all keys."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests import ROOT
from varuna_core.facts.partition import Partition
from varuna_core.records.secrets import redact_string
from vjob.jobs.conf.document import (
    get_doc,
    list_sections,
    render_conf_doc,
    render_init,
)
from vjob.jobs.conf.loading.check import check_conf
from vjob.jobs.conf.loading.load import complete_groups, parse_conf, parse_conf_lines, read_conf
from vjob.jobs.conf.parse import find_plugin_group, get_hints, get_members, get_section_class
from vjob.jobs.conf.redact import redact_text
from vjob.jobs.conf.schema import Data, JobConf, Llama, Model, NodeGroup, Parallel, Program, Track
from vjob.jobs.conf.write import dump_yaml, render_resolved, resolve_conf

BASE = Path("/conf")

# Any text that a conf can hold; absolute, where it is a path, so that it stays as it is.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
WORDS = st.sampled_from(["1e-5", "12:30", "on", "null", "~", "", "010", "<<", "a: b", "#", "[x"])
PLAIN = TEXTS | WORDS
PATHS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0/:"), min_size=1
).map(lambda name: str(Path("/p", name)))
PATH_FIELDS = {
    "path", "config", "prefix", "folder", "log_folder", "image", "machine_list", "ssh_config",
    "uri", "openmetrics",
}  # fmt: skip
PATHS_OF = (("workdir", JobConf), ("vocab", Data), ("profile", Parallel))
MOUNTS = PATHS.map(lambda path: f"{path}:/x")
SBATCH = st.dictionaries(PLAIN, st.booleans() | st.integers(-(10**9), 10**9) | PLAIN, max_size=3)


def build_strategy(hint: Any, name: str, cls: type) -> st.SearchStrategy[Any]:
    """Values of a field's type, such as a parsed conf has them."""
    options: list[st.SearchStrategy[Any]] = []
    is_path = name in PATH_FIELDS or (name, cls) in PATHS_OF
    for member in get_members(hint):
        origin, args = get_origin(member), get_args(member)
        if find_plugin_group(member):
            continue  # none is installed
        if member is type(None):
            options.append(st.none())
        elif member is Any:
            options.append(st.booleans() | st.integers(-(10**9), 10**9) | PLAIN)
        elif member is Program:
            options.append(PROGRAMS)
        elif get_section_class(member) is not None and origin is not tuple:
            options.append(build_section(member))
        elif member is bool:
            options.append(st.booleans())
        elif member is int:
            options.append(st.integers(-(10**15), 10**15))
        elif member is float:
            options.append(st.floats(allow_nan=False, allow_infinity=False))
        elif member is Partition:
            options.append(st.builds(Partition, st.lists(st.integers(0, 99), min_size=1)))
        elif member is str:
            options.append(PATHS if is_path else PLAIN)
        elif origin is tuple and args[-1] is ...:
            each = MOUNTS if name == "mounts" else build_strategy(args[0], name, cls)
            if get_section_class(member) is NodeGroup:
                each = build_section(NodeGroup)
            least = 1 if name == "nodes" else 0
            options.append(st.lists(each, min_size=least, max_size=3).map(tuple))
        elif origin is tuple:
            options.append(st.tuples(*(build_strategy(arg, name, cls) for arg in args)))
        elif name == "sbatch":
            options.append(SBATCH)
        elif isinstance(origin, type):
            options.append(st.dictionaries(PLAIN, build_strategy(args[1], name, cls), max_size=3))
        else:
            options.append(st.sampled_from(args))
    return st.one_of(options)


def build_section(cls: type) -> st.SearchStrategy[Any]:
    hints = get_hints(cls)
    return st.builds(cls, **{name: build_strategy(hints[name], name, cls) for name in hints})


BUILT_IN = [Program(kind="pretrain_gpt"), Program(kind="pretrain_bert")]
PROGRAMS = (
    st.sampled_from(BUILT_IN)
    | st.builds(
        Program,
        kind=st.sampled_from(["script", "megatron"]),
        path=PATHS,
        args=st.lists(PLAIN, max_size=3).map(tuple),
        python=st.none() | PATHS,
    )
    | st.builds(Program, kind=st.just("script"), path=PATHS, arguments=st.just("varuna"))
    | st.builds(Program, kind=st.just("module"), module=st.just("a.b"), launch=st.just("srun"))
    | st.builds(Program, kind=st.just("command"), command=st.lists(PLAIN, min_size=1).map(tuple))
    | st.builds(Program, kind=st.just("function"), path=PLAIN, python=st.none() | PATHS)
    | st.builds(Program, kind=st.just("deepspeed"), path=PATHS, config=st.none() | PATHS)
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(build_section(JobConf))
def test_a_resolved_conf_reads_back_as_the_same_conf(conf: JobConf) -> None:
    read = parse_conf(render_resolved(conf), "c", Path("/elsewhere"), environ={})
    assert read == complete_groups(conf)


def test_a_resolved_conf_has_every_key() -> None:
    conf = parse_conf("name: a\nprogram: {script: t.py}\nmodel: gpt2-xl\ndata:\n", "c", BASE)
    resolved = resolve_conf(conf)
    assert list(resolved) == [field.name for field in fields(JobConf)]
    assert resolved["program"] == {"script": "/conf/t.py", "args": [], "snapshot": "auto"}
    assert resolved["model"]["layers"] == 48 and resolved["data"] is None
    assert resolved["cluster"]["nodes"][0]["group"] == "master"


def test_a_resolved_conf_without_secrets_is_still_a_conf() -> None:
    text = """\
name: a
program: {script: t.py, args: [--hub-token, hunter2, --wandb-key=hunter2, --lr, 1e-5]}
env: {HF_TOKEN: hunter2, NOTE: plain}
setup: ["export API_KEY='hunter2' && ls"]
notify: {webhook: https://h/hunter2}
container: {image: "docker://me:hunter2@host/x"}
"""
    conf = parse_conf(text, "c", BASE)
    hidden = render_resolved(conf, redact=True)
    assert "hunter2" in render_resolved(conf) and "hunter2" not in hidden
    again = parse_conf(hidden, "c", BASE)
    assert again.env == {"HF_TOKEN": "<redacted>", "NOTE": "plain"}
    assert again.program.args == (
        "--hub-token",
        "<redacted>",
        "--wandb-key=<redacted>",
        "--lr",
        "1e-5",
    )
    assert again.setup == ("export API_KEY=<redacted> && ls",)
    shown = replace(again, env={}, program=conf.program, setup=(), notify=conf.notify)
    assert shown == replace(conf, env={}, setup=(), container=again.container)


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("HF_TOKEN=abc python x.py", "HF_TOKEN=<redacted> python x.py"),
        ('login --api-key "a b" --lr 3', "login --api-key <redacted> --lr 3"),
        ("curl -H 'Authorization: Bearer abc'", "curl -H 'Authorization: <redacted>'"),
        ("http://me:abc@proxy:3128", "http://<redacted>@proxy:3128"),
        ("--tokenizer-type GPT2BPETokenizer", "--tokenizer-type GPT2BPETokenizer"),
        ("module load cuda/12", "module load cuda/12"),
    ],
)
def test_a_line_loses_its_secrets_only(text: str, hidden: str) -> None:
    assert redact_string(text) == hidden


def test_a_confs_text_loses_its_secrets_only() -> None:
    text = """\
# HF_TOKEN: hunter2
name: run   # the name
env: &e {HF_TOKEN: "hunter2", NOTE: 'plain'}
other: {<<: *e, auth: [hunter2, {x: hunter2}]}
text: &t hunter2
secret: *t
API_KEY: |
  hunter2
  hunter2
args: [--api-key, hunter2, --lr, 1e-5]
setup:
  - "export MY_TOKEN=\\"hunter2\\""
empty_token:
last: é  # TOKEN=hunter2
"""
    assert (
        redact_text(text)
        == """\
# HF_TOKEN: <redacted>
name: run   # the name
env: &e {HF_TOKEN: "<redacted>", NOTE: 'plain'}
other: {<<: *e, auth: ["<redacted>", {x: "<redacted>"}]}
text: &t "<redacted>"
secret: *t
API_KEY: "<redacted>"
args: [--api-key, "<redacted>", --lr, 1e-5]
setup:
  - "export MY_TOKEN=<redacted>"
empty_token:
last: é  # TOKEN=<redacted>
"""
    )


# Texts that hold no secret of their own, such as "PWD=0".
OPEN = PLAIN.filter(lambda text: redact_string(text) == text)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(OPEN, OPEN | st.lists(OPEN) | st.dictionaries(OPEN, OPEN), max_size=4))
@example({"token": "a\nb\n", "x": "c"})
def test_a_text_without_secrets_has_the_same_keys(tree: dict[str, Any]) -> None:
    text = yaml.safe_dump(tree, allow_unicode=True)
    hidden = yaml.safe_load(redact_text(text))
    assert hidden.keys() == yaml.safe_load(text).keys()


def test_a_list_is_broken_at_a_hundred_columns_unless_it_is_to_be_one_line() -> None:
    for length in (1, 2, 3):
        value = {"k" * length: ["x"] * 60}
        lines = dump_yaml(value).splitlines()
        assert len(lines) > 1 and max(map(len, lines)) <= 100 + len("x, ")
        assert dump_yaml(value, one_line=True).count("\n") == 1


def test_the_starter_conf_has_no_problems(tmp_path: Path) -> None:
    path = tmp_path / "conf.yaml"
    path.write_text(render_init(), encoding="utf-8")
    (tmp_path / "train.py").touch()
    conf = read_conf(path, environ={})
    assert (conf.name, conf.program.kind) == ("my-run", "script")
    assert render_init() == (ROOT / "tests/jobs/golden/init.yaml").read_text("utf-8")


def test_the_starter_conf_begins_with_what_to_set_first() -> None:
    assert "Set program.script first" in render_init().splitlines()[0]


def test_the_starter_conf_with_every_key_active_is_the_same_conf() -> None:
    active = re.sub(r"(?m)^( *)#(?=[a-z_]+:)", r"\1", render_init())
    active = active.replace("synthetic: false", "synthetic: true ")  # data needs one source
    conf, lines = parse_conf_lines(active, "c", BASE, environ={})
    plain = replace(conf, model=None, data=None, track=Track())
    assert plain == parse_conf(render_init(), "c", BASE, environ={})
    problems = check_conf(conf, lines, require_paths=False)
    assert all("has no effect with program.script" in one.message for one in problems)
    keys = {
        f"{section.key}.{name}".strip(".").replace("[]", "[0]")
        for section in list_sections()
        if section.cls not in (Program, Model, Llama)
        for name in get_hints(section.cls)
    }
    assert keys <= lines.keys()


def test_every_field_has_a_doc_line() -> None:
    for section in list_sections():
        assert section.doc
        for name in get_hints(section.cls):
            assert get_doc(section.cls, name).endswith("."), f"{section.key}.{name}"


def test_the_page_of_all_keys_is_up_to_date() -> None:
    page = (ROOT / "docs" / "conf.md").read_text(encoding="utf-8")
    assert page == render_conf_doc(), "make docs"


def test_the_yaml_of_the_page_can_be_used() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", render_conf_doc(), re.DOTALL)
    assert blocks
    for block in blocks:
        parse_conf(f"name: a\n{block}", "c", BASE)
