"""Read and write function/facts.json, which names the Python that pickled the function."""

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
    """Major and minor version, such as `3.11`; other versions cannot run the pickled code."""
    cloudpickle: str
    submitit: str


def describe_python() -> str:
    """Return the version of this interpreter in the format used in facts.json."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def write_facts(run: RunFolder, name: str) -> FunctionFacts:
    """Write the facts of this process, which pickles `name`, and make the folder for pickles."""
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
    """Return the facts; None if the file is missing or from an incompatible vjob version."""
    return make(FunctionFacts, read_json(run.function_facts))
