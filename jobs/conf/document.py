"""Render docs/conf.md and the commented conf of `vjob init` from the schema.

Everything about a key comes from its field: type, bounds, default and doc line. `render_conf_doc`
puts these in tables; `render_init` writes them beside the keys, and leaves only the few needed keys
active.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from vjob.jobs.conf import schema
from vjob.jobs.conf.fates import Fate, find_variable, judge_fate, list_leaves
from vjob.jobs.conf.parse import (
    describe,
    get_annotations,
    get_hints,
    get_members,
    get_section_class,
)
from vjob.jobs.conf.schema import MODELS, JobConf, Llama, Model, NodeGroup, Program
from vjob.jobs.conf.write import dump_yaml
from vjob.jobs.conf.yaml_tree import join_key

INTRO = """\
# conf.yaml

The one file that you edit. This page is made from `jobs/conf/schema.py`. To begin with:

- `vjob init > conf.yaml` writes all keys, with comments; `vjob init --minimal` or `--for ddp` (or
  `script`, `gpt`, `deepspeed`, `megatron`) only those that are needed.
- `vjob schema > conf.schema.json` is for editors: with the YAML extension of VS Code, a conf that
  begins with `# yaml-language-server: $schema=conf.schema.json` is checked as you type.

How it is read:

- Paths are relative to the folder of the conf; `~` is your home folder. Shell variables in
  values are not expanded: see `pass_env`.
- YAML anchors and merge keys work. A key given twice or unknown is an error, never ignored.
- A value means what its key needs: `12:30` and `no` are text where text is wanted.
- A time is a number in the unit of its key, or `90s`, `30m`, `2h`, `1d12h`, `1:30:00` (hours,
  minutes, seconds), `1-12:00:00`; a size is a number, or `512M`, `64G`, `1T` (of 1024).
- `args` may be one text, `"--lr 1e-4 --name 'my run'"`: it is split as a shell would, and nothing
  in it is expanded.
- `--set key=value` replaces one key for one run: `--set train.steps=100`,
  `--set "cluster.nodes[0].count=3"`, `--set env.NCCL_DEBUG=INFO`. The value is YAML.
- `${train.steps}` in a value is replaced by the value of that key: `folder: ckpt/${name}`; inside
  `{}` and `[]` YAML needs quotes around it. `program.args` and `env` may refer to keys that are
  `auto`. Write `$${` for a literal `${`. In `setup`, `notify.command` and `progress` every `$` is
  left as it is.
- `include: base.yaml`, or a list of files, reads other confs first. Mappings are merged key by key,
  lists and single values replaced; this file wins over all. A run keeps the result in one file,
  `resolved.yaml`.
- All problems are reported at once, each with its line.
- Values of keys that look secret (`HF_TOKEN`, `WANDB_API_KEY`, `notify.webhook`) are not shown, nor
  kept in the run's copies of the conf. Better still, leave them out and name them in `pass_env`.

**With a script** of your own (`program: {script: ...}`), and with a function, the column *script*
says what becomes of a key that the conf sets. A variable: every rank gets the value in it, and
[`varuna_core.Varuna`](script.md#what-the-conf-says) takes it from there. *acts*: it acts outside
the script, on the cluster, the container or the monitor. *refer*: vjob does nothing with it, so it
is refused unless `program.args` or `env` pass it on as `${key}`.
"""
PROGRAM_FORMS = """\
## program

What every rank runs, in one of these forms. [programs.md](programs.md) is about the built-in ones,
[script.md](script.md) about a script of your own, [external.md](external.md) about the others:
what they take of the rest of the conf.

```yaml
program: pretrain_gpt            # built in; so is pretrain_bert
```
```yaml
program: {script: train.py, args: [--epochs, 3]}
```
```yaml
program: {module: pkg.train, args: [--epochs, 3]}
```
```yaml
program: {command: [accelerate, launch, train.py]}      # or one text: accelerate launch train.py
```
```yaml
program: {megatron: Megatron-LM, args: [--swiglu]}
```
```yaml
program: {deepspeed: train.py, config: ds.json, args: [--epochs, 3]}
```

| key | value | default | script | what |
|---|---|---|---|---|
| `script` | text | | acts | Training script. |
| `module` | text | | acts | A module that runs as with `python -m`, such as pkg.train. |
| `command` | words | | acts | A command that runs as it is; a text is split as a shell would. |
| `megatron` | text | | | Folder of a Megatron-LM checkout, or a pretraining script in it. |
| `deepspeed` | text | | | Training script that uses DeepSpeed. |
"""
PROGRAM_ROWS = ("launch", "arguments", "args", "config", "python", "snapshot")
WORDS: Mapping[Fate, str] = {Fate.ACTS: "acts", Fate.REFERENCE: "refer"}
# Active keys of the starter conf: it runs as it is, anywhere, without data.
STARTER: Mapping[str, object] = {
    "name": "my-run",
    "program": {"script": "train.py", "args": ["--lr", "1.5e-4"]},
    "parallel.pipeline": 1,
    "cluster.nodes[].group": "master",
    "cluster.nodes[].count": 1,
    "cluster.nodes[].ranks": 1,
}
EXAMPLES: Mapping[str, object] = {
    "track.wandb.project": "my-project",
    "track.mlflow.experiment": "my-experiment",
    "track.mlflow.uri": "mlruns",
}
"""Example values of keys that an optional section requires."""
FORMS: Mapping[type, tuple[str, ...]] = {
    Program: (
        "or {module: pkg.train, args: [...]}, or {command: [accelerate, launch, train.py]}",
        "or pretrain_gpt or pretrain_bert, which need the keys model and data",
        "or {megatron: Megatron-LM, args: [...]}",
        "or {deepspeed: train.py, config: ds.json, args: [...]}",
    ),
    Model: ("or {layers: 12, hidden: 768, heads: 12, sequence: 1024, vocab: 50257, dropout: 0.1}",),
}
HEAD = """\
# A conf of vjob. Set program.script first: your training script, which every rank runs.
# Keys that begin with # show their defaults; docs/conf.md explains them all.
# Paths are relative to this file's folder. `vjob submit --dry-run` shows what a conf makes.
"""
_COLUMNS = 100


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table of the page, or a mapping in the commented conf."""

    key: str
    cls: type
    doc: str


def list_sections(cls: type = JobConf, key: str = "") -> Iterator[Section]:
    """Yield sections in the order of the conf, outer ones first."""
    yield Section(key=key, cls=cls, doc=inspect.getdoc(cls) or "")
    for name, hint in get_hints(cls).items():
        inner = get_section_class(hint)
        if inner is not None:
            suffix = "[]" if inner is NodeGroup else ""
            yield from list_sections(inner, join_key(key, name) + suffix)


@cache
def _parse_source() -> dict[str, dict[str, str]]:
    docs: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        docs[node.name] = {}
        for statement, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                docs[node.name][statement.target.id] = " ".join(str(after.value.value).split())
    return docs


def get_doc(cls: type, name: str) -> str:
    """Return the documentation line below a field of a schema class."""
    docs = (_parse_source().get(one.__name__, {}) for one in cls.__mro__)
    return next((found[name] for found in docs if name in found), "")


def get_default(field: Field[Any]) -> Any:
    """Return the default of a field; MISSING if the key is required."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def render_value(value: Any) -> str:
    """Render a value as spelled in a conf."""
    plain = list(value) if isinstance(value, tuple) else value
    text = dump_yaml(plain, one_line=True)
    return text.removesuffix("\n").removesuffix("\n...")


def render_conf_doc() -> str:
    parts = [INTRO]
    for section in list_sections():
        if section.cls is Program:
            parts.append(PROGRAM_FORMS + "".join(_render_rows(section, PROGRAM_ROWS)))
            continue
        title = "Top level" if not section.key else section.key
        names = tuple(field.name for field in fields(section.cls))
        head = (
            f"## {title}\n\n{section.doc}\n\n| key | value | default | script | what |\n"
            "|---|---|---|---|---|\n"
        )
        parts.append(head + "".join(_render_rows(section, names)))
        if section.cls is Model:
            parts.append(_render_models())
    return "\n".join(parts)


def _render_rows(section: Section, names: tuple[str, ...]) -> Iterator[str]:
    hints = get_annotations(section.cls)
    for field in fields(section.cls):
        if field.name not in names:
            continue
        default = get_default(field)
        inner = get_section_class(hints[field.name])
        if inner is not None:
            key = join_key(section.key, field.name) + ("[]" if inner is NodeGroup else "")
            anchor = key.replace(".", "").replace("[]", "").lower()
            value = f"see [{key}](#{anchor})"
        else:
            value = describe(hints[field.name], one_of="").replace("|", "\\|")
        if default is MISSING:
            shown = "required"
        else:
            shown = "" if is_dataclass(default) or inner else f"`{render_value(default)}`"
        doc = get_doc(section.cls, field.name).replace("|", "\\|")
        fate = render_fate(join_key(section.key, field.name))
        yield f"| `{field.name}` | {value} | {shown} | {fate} | {doc} |\n"


def render_fate(key: str) -> str:
    """Return a word for how a script receives the key; empty for a section whose keys are received
    in different ways."""
    if key == "program.config":
        return ""
    variable = find_variable(key)
    if variable is not None:
        return f"`{variable}`"
    fates = {judge_fate(leaf) for leaf in list_leaves() if leaf.startswith(f"{key}.")}
    (fate, *others) = fates or {judge_fate(key)}
    return "" if others else WORDS[fate]


def _render_models() -> str:
    names = [field.name for field in fields(Model) if field.name != "llama"]
    lines = [f"| name | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for name, model in MODELS.items():
        numbers = " | ".join(str(getattr(model, field)) for field in names)
        lines.append(f"| `{name}` | {numbers} |")
    shapes = "Names that stand for a shape:\n\n" + "\n".join(lines) + "\n"
    parts = [
        f"- `{name}`: "
        + ", ".join(
            f"{field.name} {render_value(getattr(model.llama, field.name))}"
            for field in fields(Llama)
            if getattr(model.llama, field.name) != field.default
        )
        for name, model in MODELS.items()
        if model.llama is not None
    ]
    return shapes + "\nTheir `llama`:\n\n" + "\n".join(parts) + "\n"


def render_init() -> str:
    """Render the starter conf, which stays valid if every #key in it is made active."""
    return HEAD + "\n".join(_render_section(JobConf, "", "")) + "\n"


def _render_section(cls: type, key: str, indent: str) -> Iterator[str]:
    hints = get_hints(cls)
    for field in fields(cls):
        inner = get_section_class(hints[field.name])
        path = join_key(key, field.name)
        doc = get_doc(cls, field.name)
        if not indent and (inner is not None or not key):
            yield ""
        if inner in FORMS:
            value = STARTER.get(path, "gpt2-small")
            yield from _render_key(indent, field.name, value, doc, active=path in STARTER)
            yield from (f"{indent}# {form}" for form in FORMS[inner or Model])
        elif inner is NodeGroup:
            yield f"{indent}{field.name}:  # {doc}"
            yield from _render_item(inner, path + "[]", indent + "  ")
        elif inner is not None:
            yield f"{indent}{field.name}:  # {doc}"
            yield from _render_section(inner, path, indent + "  ")
        else:
            yield from _render_field(field, hints[field.name], path, indent, doc)


def _render_field(field: Any, hint: Any, path: str, indent: str, doc: str) -> Iterator[str]:
    first = get_members(hint)[0]
    if get_origin(first) is Literal and len(get_args(first)) > 1:
        doc = f"{describe(hint, one_of='').replace(', ', ' | ')}. {doc}"
    default = STARTER.get(path, EXAMPLES.get(path, get_default(field)))
    assert default is not MISSING, f"STARTER must give {path}"
    yield from _render_key(indent, field.name, default, doc, active=path in STARTER)


def _render_item(cls: type, key: str, indent: str) -> Iterator[str]:
    """Yield the fields of a list item; the first, active field has the dash."""
    first, *others = _render_section(cls, key, indent + "  ")
    yield f"{indent}- {first.strip()}"
    yield from others


def _render_key(indent: str, name: str, value: object, doc: str, *, active: bool) -> Iterator[str]:
    line = f"{indent}{'' if active else '#'}{name}: {render_value(value)}"
    beside = f"{line:<34}  # {doc}"
    if len(beside) <= _COLUMNS:
        yield beside
        return
    prefix = f"{indent}# "
    yield from textwrap.wrap(doc, _COLUMNS, initial_indent=prefix, subsequent_indent=prefix)
    yield line
