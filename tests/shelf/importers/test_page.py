"""docs/from_scripts.md has what `--from` takes, by the tables that it is taken by."""

from __future__ import annotations

from collections.abc import Iterator

from tests import ROOT
from vjob.shelf.importers.megatron_options import DEEPSPEED_KEYS, KEYS, OURS
from vjob.shelf.importers.nodes import COUNTS, NO_KEY, RANKS
from vjob.shelf.importers.program import LAUNCHER_REASONS, SHAPE
from vjob.shelf.importers.values import GROUP_OPTIONS, PYXIS, SRUN_REASONS, TOP_OPTIONS

PAGE = ROOT / "docs/from_scripts.md"
BEGIN, END = "<!-- made from shelf/importers -->\n", "<!-- end -->\n"


def make_tables() -> str:
    """The block of the page."""
    rows = [f"| `{option}` | `{key}` |" for option, (key, _) in KEYS.items()]
    rows += [f"| `{option} {value}` | none: {why} |" for option, (value, why) in OURS.items()]
    parts = ["| option of Megatron-LM | key |\n|---|---|\n" + _join(rows)]
    repeated = ", ".join(f"`{option}`" for option in DEEPSPEED_KEYS)
    said = "With deepspeed all options stay arguments; these set the key too, for ds_config"
    parts.append(f"{said}: {repeated}.\n")
    rows = [f"| `--{name}` | `{key}` |" for name, key in _list_slurm()]
    rows += [f"| srun `--{name}` | none: {why} |" for name, why in SRUN_REASONS.items()]
    parts.append("| option of sbatch and srun | key |\n|---|---|\n" + _join(rows))
    rows = [f"| `{name}` | `count` |" for name in COUNTS]
    rows += [f"| `{name}` | `gpus`, `ranks` |" for name in RANKS]
    rows += [f"| `{name}` | `model.{key}` |" for key, name in SHAPE.items()]
    rows += [f"| `{name}` | {why} |" for name, why in NO_KEY.items()]
    parts.append("| variable | key |\n|---|---|\n" + _join(rows))
    rows = [f"| `--{name}` | {why} |" for name, why in LAUNCHER_REASONS.items()]
    parts.append("| option of a launcher | left out, for |\n|---|---|\n" + _join(rows))
    return "\n".join(parts)


def _join(rows: list[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


def _list_slurm() -> Iterator[tuple[str, str]]:
    for name, (key, _) in GROUP_OPTIONS.items():
        yield name, f"cluster.nodes[].{key}"
    for name, (key, _) in TOP_OPTIONS.items():
        yield name, key
    for name, taken in PYXIS.items():
        if taken is not None:
            yield name, taken[0]


def test_the_page_has_all_that_from_takes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    block = page.partition(BEGIN)[2].partition(END)[0]
    assert block == make_tables(), f"put this into {PAGE.name}:\n{make_tables()}"
