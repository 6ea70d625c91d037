"""The start of a rank's Python: nothing of the program's own changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from varuna_core.agent.bundle import write_bundle
from varuna_core.agent.setup.container import ENTRY_COMMAND, ENTRY_VARIABLE, build_entry
from varuna_core.agent.setup.ranks import STARTUP
from varuna_core.records.exits import read_uncaught

PYTHON = os.path.realpath(sys.executable)
"""Without the packages of this environment, which has a varuna_core of its own."""
SAY = "print([name for name in sys.modules if name.startswith('varuna_core.trace.')] != [])"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "agent.pyz")
    (tmp_path / "own/torch").mkdir(parents=True)
    (tmp_path / "own/torch/__init__.py").write_text("answer = 42\n")
    (tmp_path / "own/sitecustomize.py").write_text("import sys\nsys.of_the_user = __file__\n")
    return tmp_path


def run(folder: Path, code: str, *paths: str) -> subprocess.CompletedProcess[str]:
    path = ":".join([f"{folder}/{STARTUP}", *(paths or (f"{folder}/own",))])
    return subprocess.run(
        [PYTHON, "-s", "-c", f"import sys; {code}"],
        env={"PYTHONPATH": path, "VJOB_TRACE": f"{folder}/0.jsonl", "VJOB_WATCH": "1"},
        cwd=folder, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip


def test_the_users_own_start_is_read_and_engines_are_watched_from_torch_on(folder: Path) -> None:
    found = run(folder, f"{SAY}; import torch; {SAY}; import sitecustomize as s; "
                "print(torch.answer, s.__file__ == sys.of_the_user, sys.path[1])")  # fmt: skip
    assert found.stderr == ""
    assert found.stdout.splitlines() == ["False", "True", f"42 True {folder}/own"]
    assert not (folder / "0.jsonl").exists(), "written is what an engine does, and there is none"


def test_without_torch_nothing_is_loaded(folder: Path) -> None:
    found = run(folder, f"import json; {SAY}", f"{folder}/none")
    assert (found.stdout, found.stderr) == ("False\n", "")
    code = "\ntry:\n import torch\nexcept ModuleNotFoundError as error:\n print(error)"
    found = run(folder, code, f"{folder}/none")
    assert (found.stdout, found.stderr) == ("No module named 'torch'\n", "")


def test_an_unfit_varuna_core_of_the_programs_own_costs_a_line_and_the_timeline(
    folder: Path,
) -> None:
    (folder / "own/varuna_core").mkdir()
    (folder / "own/varuna_core/__init__.py").write_text("")
    found = run(folder, "import torch; print(torch.answer)")
    assert found.stdout == "42\n"
    (line,) = found.stderr.splitlines()
    assert line.startswith("vjob: no timeline of this rank: No module named 'varuna_core.trace'")


def test_a_varuna_core_that_only_a_finder_knows_is_the_programs_own(folder: Path) -> None:
    """As that of an editable install; the agent's copy would hide it, and its runtime with it."""
    path = str(ROOT / "varuna_core/__init__.py")
    (folder / "own/sitecustomize.py").write_text(
        "import sys, importlib.util as u\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'varuna_core':\n"
        f"            return u.spec_from_file_location(name, {path!r})\n"
        "sys.meta_path.append(Finder())\n"
    )
    found = run(folder, "import torch, varuna_core; print(varuna_core.__file__)")
    assert (found.stdout, found.stderr) == (f"{path}\n", "")


@pytest.mark.parametrize(("given", "expected"), [(None, "/first"), ("/image", "/first:/image")])
def test_in_a_container_the_images_own_path_stays(given: str | None, expected: str) -> None:
    entry = build_entry({}, "/", reads_image=False, python_path="/first")
    done = subprocess.run(
        [*ENTRY_COMMAND, "sh", "-c", 'echo "$PYTHONPATH ${vjob_path-}"'],
        env={ENTRY_VARIABLE: entry, **({} if given is None else {"PYTHONPATH": given})},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == expected


CAUGHT = "\nimport traceback\ntry:\n 1 / 0\nexcept ZeroDivisionError:\n traceback.print_exc()\n"
ENDS = [
    # A program, and the exception that it left uncaught: empty if none, None if not known.
    ("raise ValueError('no data\\nat all')", "ValueError: no data"),
    ("d = {}; d['path']", "KeyError: 'path'"),
    (CAUGHT + "sys.exit(1)", ""),
    (CAUGHT + "raise ValueError('the real one')", "ValueError: the real one"),
    (CAUGHT, ""),
    (CAUGHT + "import os; os._exit(1)", None),
    (CAUGHT + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None),
    ("import threading as t; a = t.Thread(target=lambda: 1 / 0); a.start(); a.join(); sys.exit(1)",
     ""),
    ("import os\nif os.fork() == 0: raise ValueError('of a child')\nos.wait(); sys.exit(1)", ""),
    ("import subprocess as s; s.run([sys.executable, '-c', 'raise ValueError']); sys.exit(1)", ""),
    ("import subprocess as s; s.run([sys.executable, '-c', '1 / 0'], check=True)",
     "subprocess.CalledProcessError: Command"),
    ("sys.excepthook = lambda *a: None; raise ValueError('hidden')", "ValueError: hidden"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "uncaught"), ENDS)
def test_the_exception_that_ended_a_program_is_noted(
    code: str, uncaught: str | None, folder: Path
) -> None:
    """A traceback that was caught and printed right before sys.exit(1) looks the same in a log."""
    note = folder / "0.ended"
    env = {"PYTHONPATH": f"{folder}/{STARTUP}", "VJOB_ENDED": str(note)}
    program = [PYTHON, "-s", "-c", f"import sys; {code}"]
    subprocess.run(program, env=env, cwd=folder, capture_output=True, timeout=60, check=False)
    found = read_uncaught(note)
    assert found is None if uncaught is None else (found or "").startswith(uncaught)
    assert uncaught != "" or found == ""


@pytest.mark.parametrize(
    ("script", "uncaught"),
    [("a; b", None), ("b; b", "ValueError: b"), ("a", ""), ("a & b; wait", None)],
)
def test_several_programs_of_a_rank_that_disagree_tell_nothing(
    script: str, uncaught: str | None, folder: Path
) -> None:
    note = folder / "0.ended"
    env = {"PYTHONPATH": f"{folder}/{STARTUP}", "VJOB_ENDED": str(note)}
    names = {"a": f"{PYTHON} -s -c pass", "b": f"{PYTHON} -s -c 'raise ValueError(\"b\")'"}
    words = [names.get(word, word) for word in script.replace(";", " ;").split()]
    command = ["/bin/bash", "-c", " ".join(words)]
    subprocess.run(command, env=env, cwd=folder, capture_output=True, timeout=60, check=False)
    assert read_uncaught(note) == uncaught


@pytest.mark.parametrize(
    ("code", "code_is"),
    [("raise KeyboardInterrupt", -2), ("sys.exit(3)", 3), ("raise ValueError", 1), ("pass", 0)],
)
def test_the_note_changes_no_exit_code(code: str, code_is: int, folder: Path) -> None:
    """An interrupt ended with 1 in place of SIGINT: an import at the end had run `eval`."""
    env = {"PYTHONPATH": f"{folder}/{STARTUP}", "VJOB_ENDED": f"{folder}/0.ended"}
    program = [PYTHON, "-s", "-c", f"import sys; {code}"]
    ended = subprocess.run(program, env=env, capture_output=True, timeout=60, check=False)
    assert ended.returncode == code_is
