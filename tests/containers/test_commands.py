"""Every adapter's commands, whole, against golden files; and that no value stands among them."""

from __future__ import annotations

import difflib
import json
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from tests import ROOT
from tests.varuna_core.agent.local_run import Stage, make_group, make_plan
from varuna_core.records.plan import ContainerPlan
from vjob.containers.registry import RUNTIMES
from vjob.containers.runtime import Argv, ImageKind, Mount, Request, Unsuitable
from vjob.containers.store import read_shell

GOLDEN = ROOT / "tests/containers/golden"
SHELL = ROOT / "containers/shell"

PLAIN = Request(
    run="plain-20260102-030405",
    image="/data/images/py torch.sqsh",
    kind=ImageKind.SQUASHFS,
    mounts=(Mount(source="/home/u/exp", target="/home/u/exp"),),
    workdir="/home/u/exp",
    writable=True,
    remap_root=False,
    reuse="auto",
    gpus=False,
    user_id=1001,
    scratch="/local",
    stamp="104857600-1700000000",
)
STORED = replace(
    PLAIN, image="nvcr.io#nvidia/pytorch:25.01-py3", kind=ImageKind.REFERENCE, stamp=""
)
CASES = {
    "an image file": PLAIN,
    "of root": replace(PLAIN, user_id=0),
    "with GPUs, not to be written": replace(PLAIN, gpus=True, writable=False),
    "shown as root": replace(PLAIN, remap_root=True),
    "unpacked for this run alone": replace(PLAIN, reuse=False),
    "unpacked whenever that was": replace(PLAIN, reuse=True),
    "a folder": replace(PLAIN, image="/data/images/debian", kind=ImageKind.FOLDER),
    "an archive": replace(PLAIN, image="/data/a.tar.gz", kind=ImageKind.ARCHIVE),
    "a .sif file": replace(PLAIN, image="/data/a.sif", kind=ImageKind.SIF),
    "mounts with spaces and commas": replace(
        PLAIN,
        mounts=(
            Mount(source="/my data/a,b", target="/data/x y", read_only=True),
            Mount(source='/a"b/$(id)', target="/it's"),
        ),
    ),
    "a mount with a colon": replace(
        PLAIN, mounts=(Mount(source="/runs/10:30", target="/runs/10:30"),)
    ),
    "a reference": STORED,
    "a reference with GPUs, not to be written, of root": replace(
        STORED, gpus=True, writable=False, user_id=0
    ),
    "a reference, shown as root": replace(STORED, remap_root=True),
    "a reference, renewed": replace(STORED, reuse=False),
    "a reference to docker's hub": replace(STORED, image="docker://pytorch/pytorch"),
    "a reference to this host's docker": replace(STORED, image="dockerd://mine:7"),
    "a reference to this host's podman": replace(STORED, image="podman://mine:7"),
    "no reference": replace(STORED, image="nvcr.io#NVIDIA"),
}


def make_commands(runtime: str) -> Iterator[tuple[str, ContainerPlan | Unsuitable]]:
    """Of each case that the runtime takes, or why it does not."""
    adapter = RUNTIMES[runtime]()
    for name, request in CASES.items():
        if request.kind in adapter.kinds:
            try:
                yield name, adapter.plan(request)
            except Unsuitable as problem:
                yield name, problem


def render(found: ContainerPlan | Unsuitable) -> list[str]:
    """A word a line as a shell would want it, our own shell files by their names."""
    if isinstance(found, Unsuitable):
        return [f"refused: {found}"]
    defaults = {field.name: field.default for field in fields(ContainerPlan)}
    lines = []
    for name, value in asdict(found).items():
        if name in ("runtime", "image", "workdir") or value == defaults[name] or not value:
            continue
        if name in ("prepare", "clean"):
            for argv in value:
                lines += [f"{name}:", *render_argv(argv)]
        elif isinstance(value, tuple):
            lines += [f"{name}:", *render_argv(value)]
        elif isinstance(value, dict):
            lines += [f"{name}: {key}={_quote(item)}" for key, item in value.items()]
        else:
            lines.append(f"{name}: {value}")
    return lines


def render_argv(argv: Argv) -> list[str]:
    texts = {read_shell(path.name): path.name for path in SHELL.glob("*.sh")}
    return [
        f"    <{texts[word]}>" if word in texts else f"    {shlex.quote(word)}" for word in argv
    ]


def _quote(item: str | tuple[str, ...]) -> str:
    return shlex.quote(item) if isinstance(item, str) else shlex.join(item)


def render_all(runtime: str) -> str:
    """The first of a kind whole, of the others what differs."""
    parts: list[str] = []
    bases: dict[bool, list[str]] = {}
    for name, found in make_commands(runtime):
        lines = render(found)
        base = bases.get(is_stored := CASES[name].kind is ImageKind.REFERENCE)
        if base is None or isinstance(found, Unsuitable):
            bases.setdefault(is_stored, lines)
            parts += [name, *(f"  {line}" for line in lines), ""]
        else:
            changes = list(difflib.unified_diff(base, lines, n=0, lineterm=""))[2:]
            parts += [f"{name}, compared with the first"]
            parts += [f"  {line}".rstrip() for line in changes if not line.startswith("@@")] + [""]
    return "\n".join(parts)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_commands_equal_their_golden_files(runtime: str) -> None:
    text, golden = render_all(runtime), GOLDEN / f"{runtime}.txt"
    if os.environ.get("VJOB_WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert golden.read_text() == text


def test_the_golden_folder_holds_nothing_else() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.txt" for name in RUNTIMES}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_plan_has_a_field_for_all_that_an_adapter_says(runtime: str) -> None:
    for _, found in make_commands(runtime):
        if isinstance(found, ContainerPlan):
            ContainerPlan(**asdict(found))


STAND_IN = """\
#!/usr/bin/env python3
import json, os, sys

with open({log!r}, "a") as file:
    print(json.dumps([sys.argv[1:], sorted(os.environ)]), file=file)
if "run" in sys.argv:
    assert {{n for n in os.environ if n.startswith("VJOB_")}} <= {{"VJOB_ENTER", "VJOB_NODE"}}
    first = sys.argv.index({image!r}) + 1
    os.execvp(sys.argv[first], sys.argv[first:])
"""


@pytest.mark.parametrize(
    ("runtime", "image"),
    [
        ("docker", "nvcr.io/nvidia/pytorch:25.01-py3"),
        ("podman", "nvcr.io/nvidia/pytorch:25.01-py3"),
    ],
)
def test_values_are_in_no_command_line(
    runtime: str,
    image: str,
    tmp_path: Path,
    make_stage: Callable[..., Stage],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All users of a node may read command lines."""
    log, program = tmp_path / "log", tmp_path / "bin" / runtime
    program.parent.mkdir()
    program.write_text(STAND_IN.format(log=str(log), image=image))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    request = replace(STORED, user_id=os.getuid(), workdir="/", mounts=())
    plan = make_plan(
        make_group("only", 1, 1),
        command=("sh", "-c", 'echo "got $MY_TOKEN"'),
        env={"MY_TOKEN": "t0ken"},
        containers=(ContainerPlan(**asdict(RUNTIMES[runtime]().plan(request))),),
    )
    stage = make_stage(plan)
    codes, outcome = stage.play()
    assert (codes, outcome.code) == ([0], 0), outcome
    stage.wait_for_log("n0", "out", "got t0ken")
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    verbs = [argv[1] if argv[1] != "--cgroup-manager=cgroupfs" else argv[2] for argv, _ in calls]
    assert verbs == ["info", "image", "ps", "run", "run", "ps"], "tried once, started, cleaned up"
    assert "t0ken" not in log.read_text()
    assert "VJOB_ENTER" in calls[-2][1] and "--env=VJOB_ENTER" in calls[-2][0]
