"""Build the JSON Schema (draft 2020-12) of conf.yaml for editors, from jobs/conf/schema.py.

It accepts what `vjob submit` accepts: a time or a size with its unit, `1e-5` (text for many YAML
readers), `args` as one text, and a reference instead of any value. Rules between keys are not part
of it; `vjob submit --dry-run` checks those. A conf that includes others need not be complete.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

from varuna_core.facts.partition import Partition
from vjob.jobs.conf.document import get_default, get_doc, list_sections
from vjob.jobs.conf.parse import (
    PROGRAM_KEYS,
    find_bounds,
    find_plugin_group,
    find_unit,
    get_annotations,
    get_hints,
    get_members,
    strip_bounds,
)
from vjob.jobs.conf.schema import (
    BUILT_IN,
    FUNCTION,
    MODELS,
    JobConf,
    Model,
    NodeGroup,
    Program,
    Queue,
    SiteCluster,
    SiteFile,
)

DIALECT = "https://json-schema.org/draft/2020-12/schema"
LIMITS: Mapping[str, str] = {
    ">=": "minimum",
    ">": "exclusiveMinimum",
    "<=": "maximum",
    "<": "exclusiveMaximum",
}
_TEXT: Mapping[str, Any] = {"type": ["string", "number", "boolean"]}
"""Schema of text: YAML's 12:30 and 3 are accepted as text."""
_DEFS: Mapping[str, Any] = {
    "reference": {"type": "string", "pattern": r"\$\{[^}]+\}"},
    "time": {
        "type": "string",
        "pattern": r"^(\d+-)?\d+:\d+:\d+$|^(\d+(\.\d+)? ?(d|h|m|min|s) ?)+$",
        "description": "Such as 90s, 30m, 2h, 1d12h or 1:30:00.",
    },
    "size": {
        "type": "string",
        "pattern": r"^\d+(\.\d+)? ?[KMGTkmgt]([iI]?[bB])?$",
        "description": "Such as 512M, 64G or 1T.",
    },
    "number": {"type": "string", "pattern": r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$"},
    "switch": {"enum": ["yes", "no", "on", "off"]},
}


def build_schema() -> dict[str, Any]:
    """Build the schema of conf.yaml."""
    found = _build_record(JobConf)
    needed = found.pop("required")
    names = {"type": "string"}
    found["properties"]["include"] = {
        "anyOf": [names, {"type": "array", "items": names}],
        "description": "Confs that are read first; this one is merged over them.",
    }
    defs = {section.cls.__name__: _build_section(section.cls) for section in list_sections()}
    del defs[JobConf.__name__]
    return {
        "$schema": DIALECT,
        "title": "conf.yaml of vjob",
        **found,
        "if": {"required": ["include"]},
        "else": {"required": needed},
        "$defs": {**_DEFS, **defs},
    }


def build_site_schema() -> dict[str, Any]:
    """Build the schema of a site's file, whose `defaults` are a conf that may lack any key."""
    conf = build_schema()
    defs = conf.pop("$defs")
    for name in ("if", "else", "$schema", "title"):
        del conf[name]
    del conf["properties"]["include"]
    found = _build_record(SiteFile)
    cluster = _build_record(SiteCluster)
    for one in (found, cluster):
        one["properties"]["defaults"] = {"$ref": "#/$defs/JobConf"}
    program: dict[str, Any] = {}
    for form in defs[Program.__name__]["anyOf"]:
        program |= form.get("properties", {})
    return {
        "$schema": DIALECT,
        "title": "site.yaml of vjob",
        **found,
        "$defs": {
            **defs,
            Program.__name__: {
                "type": "object",
                "properties": program,
                "additionalProperties": False,
            },
            JobConf.__name__: conf,
            SiteCluster.__name__: cluster,
            Queue.__name__: _build_record(Queue),
        },
    }


def _build_section(cls: type) -> dict[str, Any]:
    if cls is Program:
        return _build_program()
    found = _build_record(cls)
    return {"anyOf": [{"enum": [*MODELS]}, found]} if cls is Model else found


def _build_record(cls: type) -> dict[str, Any]:
    hints = get_annotations(cls)
    properties, required = {}, []
    for field in fields(cls):
        default = get_default(field)
        one = {**_build_value(hints[field.name]), "description": get_doc(cls, field.name)}
        if default is MISSING:
            required.append(field.name)
        elif default is not None and not is_dataclass(default):
            one["default"] = list(default) if isinstance(default, tuple) else default
        properties[field.name] = one
    found: dict[str, Any] = {
        "type": "object",
        "description": inspect.getdoc(cls) or "",
        "properties": properties,
        "additionalProperties": False,
    }
    return {**found, "required": required} if required else found


def _build_program() -> dict[str, Any]:
    """Build the schema of `program`: a built-in name, or a mapping with a key that names a file."""
    hints = get_hints(Program)
    docs = {name: {"description": get_doc(Program, name)} for name in hints}
    forms: list[dict[str, Any]] = [{"enum": [*BUILT_IN]}]
    words = {"anyOf": [{"type": "string"}, _build_value(hints["args"])]}
    for kind, names in PROGRAM_KEYS.items():
        keys = {name: {**_build_value(hints[name]), **docs[name]} for name in names}
        keys["args"] = {**words, **docs["args"]}
        named = words if kind == "command" else _TEXT
        forms.append(
            {
                "type": "object",
                "properties": {kind: {**named, **docs.get(kind, docs["path"])}, **keys},
                "additionalProperties": False,
                "required": [kind],
            }
        )
    assert FUNCTION not in PROGRAM_KEYS, "no key of the conf names a function"
    return {"anyOf": forms}


def _build_value(hint: Any) -> dict[str, Any]:
    """Build the schema of a value, which may always be a reference too."""
    forms: list[dict[str, Any]] = []
    for member in get_members(hint):
        forms += _build_member(member)
    if any("$ref" in form or form.get("type") in ("array", "object") for form in forms):
        forms.append({"type": "null"})  # an empty one
    forms.append({"$ref": "#/$defs/reference"})
    unique = [form for at, form in enumerate(forms) if form not in forms[:at]]
    return {"anyOf": unique}


def _build_member(member: Any) -> list[dict[str, Any]]:
    plain, origin, unit = strip_bounds(member), get_origin(strip_bounds(member)), find_unit(member)
    limits = {LIMITS[bound.relation]: bound.limit for bound in find_bounds(member)}
    if member is types.NoneType:
        return [{"type": "null"}]
    if is_dataclass(plain) and isinstance(plain, type):
        return [{"$ref": f"#/$defs/{plain.__name__}"}]
    if origin is Literal:
        return [{"enum": [*get_args(plain)]}]
    if origin is tuple:
        args = get_args(plain)
        found = {"type": "array", "items": _build_value(args[0])}
        if args[0] is NodeGroup:
            return [found, {"type": "integer", "minimum": 1}, {"$ref": "#/$defs/NodeGroup"}]
        exact = {} if args[-1] is ... else {"minItems": len(args), "maxItems": len(args)}
        return [{**found, **exact}]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return [{"type": "object", "additionalProperties": _build_value(get_args(plain)[1])}]
    if plain is bool:
        return [{"type": "boolean"}, {"$ref": "#/$defs/switch"}]
    if plain is int:
        more = [{"$ref": f"#/$defs/{'time' if unit.kind == 'time' else 'size'}"}] if unit else []
        return [{"type": "integer", **limits}, *more]
    if plain is float:
        return [{"type": "number", **limits}, {"$ref": "#/$defs/number"}]
    if find_plugin_group(plain):
        return [{"type": "string"}]
    if plain is Partition:
        return [{"type": ["string", "integer"], "pattern": r"^\d+(-\d+)*$"}]
    return [dict(_TEXT)] if plain is str else [{**_TEXT}, {"type": "null"}]
