"""function/facts.json: who pickled the function, so that a rank can tell before it unpickles."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from importlib import metadata

from varuna_core.records.files import PRIVATE_FOLDER, make, read_json, write_json
from varuna_core.records.runfolder import RunFolder


@dataclass(frozen=True)
class FunctionFacts:
    """The function, and the Python that pickled it."""

    name: str
    python: str
    """Major and minor version, `3.11`: pickled code runs on no other."""
    cloudpickle: str
    submitit: str


def describe_python() -> str:
    """Version of this interpreter, as in the facts."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def write_facts(run: RunFolder, name: str) -> FunctionFacts:
    """Write the facts of this process, which pickles `name`; makes the folder of the pickles."""
    facts = FunctionFacts(
        name=name,
        python=describe_python(),
        cloudpickle=metadata.version("cloudpickle"),
        submitit=metadata.version("submitit"),
    )
    run.function_facts.parent.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    write_json(run.function_facts, asdict(facts))
    return facts


def read_facts(run: RunFolder) -> FunctionFacts | None:
    """None where they are missing or from another version of vjob."""
    return make(FunctionFacts, read_json(run.function_facts))
