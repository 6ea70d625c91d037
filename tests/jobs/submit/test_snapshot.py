"""Runs of a copy of the user's code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.command import Vjob, read_out, wait_for
from tests.jobs.programs.code.repositories import commit, git, make_repository, write_files
from varuna_core.records.plan import Plan, read_plan
from varuna_core.records.record import CodeRecord, read_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.loading.load import parse_conf
from vjob.jobs.errors import InputError
from vjob.jobs.programs.start import get_starter
from vjob.jobs.submit.build_plan import PlanContext, build_plan
from vjob.jobs.submit.snapshot import relocate, take_snapshot

CONF = """
name: kept
program: {script: src/train.py, snapshot: MODE}
cluster: {scheduler: local, nodes: [{group: m}]}
"""
WAIT = """
name: first
program: {script: wait.py, snapshot: none}
cluster: {scheduler: local, nodes: [{group: m}]}
"""
TRAIN = """
import os, pathlib, sys
import helper
print("RAN", "old", helper.WORD, os.getcwd(), pathlib.Path("in.txt").read_text().strip())
here = pathlib.Path(__file__).parent
print("DATA", (here.parent / "data/x").read_text().strip())
pathlib.Path("out.txt").write_text("out")
"""
HOLD = """
import pathlib, time
end = time.monotonic() + 100
while not pathlib.Path("go").exists() and time.monotonic() < end:
    time.sleep(0.1)
"""


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    home = tmp_path / "home"
    make_repository(
        home,
        DOTgitignore="state/\nlog/\ndata/\nin.txt\ngo\nout.txt\n__pycache__/\n",
        src__train_py=TRAIN,
        src__helper_py="WORD = 'helped'\n",
        wait_py=HOLD,
    )
    write_files(home, data__x="some data\n", **{"in.txt": "input\n"})
    vjob = Vjob(home)
    write(vjob, "auto")
    commit(home)
    return vjob


def write(vjob: Vjob, mode: str, more: str = "") -> str:
    return vjob.write(CONF.replace("MODE", mode) + more)


def submit(vjob: Vjob, mode: str, more: str = "", *options: str) -> RunFolder:
    return vjob.submit(CONF.replace("MODE", mode) + more, *options)


def code_of(run: RunFolder) -> CodeRecord:
    record = read_record(run)
    assert record is not None and record.code is not None
    return record.code


def find_word(run: RunFolder, word: str) -> str:
    (line,) = [line for line in read_out(run).splitlines() if f"{word} " in line]
    return line[line.index(f"{word} ") :]


@pytest.mark.parametrize("mode", ["auto", "copy", "git"])
def test_an_edit_while_the_job_waits_changes_nothing(vjob: Vjob, mode: str) -> None:
    if mode == "git":  # the conf's own mode is then committed too
        write(vjob, mode)
        commit(vjob.folder)
    vjob.write(WAIT, "wait.yaml")
    said = vjob("submit", "wait.yaml", "--json").stdout
    first = RunFolder(Path(json.loads(said)["folder"]))
    run = submit(vjob, mode, "", "--after", str(first.path)) if mode != "git" else None
    if run is None:
        (vjob.folder / "wait.yaml").unlink()
        said = vjob("submit", "conf.yaml", "--json", "--after", str(first.path)).stdout
        run = RunFolder(Path(json.loads(said)["folder"]))
    train = vjob.folder / "src/train.py"
    train.write_text(TRAIN.replace('"old"', '"new"'))
    (vjob.folder / "src/helper.py").unlink()
    (vjob.folder / "go").write_text("")
    vjob.wait_over(run)
    where = run.code if mode != "auto" else vjob.folder
    assert find_word(run, "RAN") == f"RAN old helped {where} input"
    assert find_word(run, "DATA") == "DATA some data"
    assert code_of(run).kept == ("git" if mode == "git" else "copy")
    assert (where / "out.txt").read_text() == "out"


def test_without_a_snapshot_the_edit_counts(vjob: Vjob) -> None:
    vjob.write(WAIT, "wait.yaml")
    first = RunFolder(Path(json.loads(vjob("submit", "wait.yaml", "--json").stdout)["folder"]))
    run = submit(vjob, "none", "", "--after", str(first.path))
    (vjob.folder / "src/train.py").write_text(TRAIN.replace('"old"', '"new"'))
    (vjob.folder / "go").write_text("")
    vjob.wait_over(run)
    assert find_word(run, "RAN").startswith("RAN new")
    assert not run.code.exists() and code_of(run).kept == ""


def test_a_submit_says_what_it_keeps_and_a_dry_run_writes_nothing(vjob: Vjob) -> None:
    write(vjob, "copy")
    before = sorted(vjob.folder.rglob("*"))
    shown = vjob("submit", "conf.yaml", "--dry-run").stdout
    assert sorted(vjob.folder.rglob("*")) == before
    assert "# Its code: a copy of 5 files" in shown and "/code/src/train.py" in shown
    said = vjob("submit", "conf.yaml").stdout
    assert "code    a copy of 5 files" in said and "on main, dirty" in said
    vjob.wait_over(RunFolder(next((vjob.folder / "log").glob("kept-*"))))


def test_a_changed_tree_is_no_commit(vjob: Vjob) -> None:
    write_files(vjob.folder, src__helper_py="WORD = 'changed'\n")
    write(vjob, "git")
    said = vjob("submit", "conf.yaml", code=2).stderr
    assert "conf.yaml, src/helper.py changed; commit or stash" in said
    git(vjob.folder, "stash")
    write_files(vjob.folder, src__new_py="")
    git(vjob.folder, "add", "src/new.py")
    assert "src/new.py changed" in vjob("submit", write(vjob, "git"), code=2).stderr


def test_a_program_that_no_commit_has_cannot_run_from_one(vjob: Vjob) -> None:
    write(vjob, "git")
    commit(vjob.folder)
    write_files(vjob.folder, new_py="")
    said = vjob("submit", "conf.yaml", "--set", "program.script=new.py", code=2).stderr
    assert "git ignores" in said and "or no commit has it" in said


def test_outside_of_git_a_copy_is_of_the_programs_folder(tmp_path: Path) -> None:
    vjob = Vjob(tmp_path, {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)})
    write_files(tmp_path, src__train_py="import helper; print('RAN', helper.WORD)\n")
    write_files(tmp_path, src__helper_py="WORD = 'helped'\n", other="")
    assert code_is_none(submit(vjob, "auto"))
    assert (
        "lies in no git repository; use copy" in vjob("submit", write(vjob, "git"), code=2).stderr
    )
    run = submit(vjob, "copy")
    vjob.wait_over(run)
    assert sorted(path.name for path in run.code.glob("*.py")) == ["helper.py", "train.py"]
    assert code_of(run).commit == "" and code_of(run).root == str(tmp_path / "src")


def code_is_none(run: RunFolder) -> bool:
    record = read_record(run)
    return record is not None and record.code is None and not run.code.exists()


def test_without_git_on_path_auto_keeps_nothing_and_copy_takes_the_folder(
    vjob: Vjob, tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "env", "hostname", "tail", "sleep"):
        found = next(
            Path(folder, name)
            for folder in os.environ["PATH"].split(":")
            if Path(folder, name).exists()
        )
        (tools / name).symlink_to(found)
    vjob.env["PATH"] = str(tools)
    write(vjob, "auto")
    assert "Its code" not in vjob("submit", "conf.yaml", "--dry-run").stdout
    write(vjob, "git")
    assert "git is not on PATH" in vjob("submit", "conf.yaml", code=2).stderr
    write(vjob, "copy")
    assert "a copy of 2 files" in vjob("submit", "conf.yaml", "--dry-run").stdout


def test_pythonpath_in_the_tree_leads_into_the_copy(vjob: Vjob) -> None:
    write_files(vjob.folder, lib__mine_py="WORD = 'mine'\n")
    more = f"env: {{PYTHONPATH: '{vjob.folder}/lib:/elsewhere:src:data'}}\n"
    run = submit(vjob, "auto", more)
    plan = read_plan(run.plan)
    assert plan is not None
    assert plan.env["PYTHONPATH"] == f"{run.code}/lib:/elsewhere:{run.code}/src:data"
    assert plan.workdir == str(vjob.folder)
    vjob.wait_over(run)


def test_a_large_repository_is_not_copied_unasked_and_a_submit_says_so(vjob: Vjob) -> None:
    for number in range(600):
        write_files(vjob.folder, **{f"many__f{number}": ""})
    said = vjob("submit", "conf.yaml").stdout
    assert "not copied:" in said and "most of it is in many 600 files" in said
    run = RunFolder(next((vjob.folder / "log").glob("kept-*")))
    vjob.wait_over(run)
    assert code_of(run).note.startswith("not copied:") and code_of(run).commit


def test_an_argument_that_is_read_from_the_tree_is_named(vjob: Vjob) -> None:
    write_files(vjob.folder, cfg__a_yaml="")
    options = ("--set", "program.args=[--config=cfg/a_yaml, other]", "--dry-run")
    shown = vjob("submit", "conf.yaml", *options).stdout
    assert "--config=cfg/a_yaml is read from" in shown
    write(vjob, "copy")
    assert "is read from" not in vjob("submit", "conf.yaml", *options).stdout


def test_a_disk_that_is_full_leaves_nothing(vjob: Vjob, tmp_path: Path) -> None:
    full = tmp_path / "patch/sitecustomize.py"
    write_files(
        tmp_path,
        patch__sitecustomize_py=(
            "import shutil\n"
            "def fail(*given):\n    raise OSError(28, 'No space left on device')\n"
            "shutil.copyfileobj = fail\n"
        ),
    )
    vjob.env["PYTHONPATH"] = f"{full.parent}:{vjob.env['PYTHONPATH']}"
    said = vjob("submit", "conf.yaml", code=1).stderr
    assert "No space left on device; nothing was submitted" in said
    assert not list((vjob.folder / "log").glob("kept*"))


def test_runs_of_a_sweep_have_the_code_of_the_first(vjob: Vjob) -> None:
    vjob("submit", "conf.yaml", "--sweep", "env.X=1,2", "--sweep-name", "two")
    for number in (1, 2):
        run = RunFolder(vjob.folder / f"log/two-{number}")
        wait_for(lambda run=run: "RAN old" in read_out(run), 60)  # type: ignore[misc]
        assert json.loads(run.code_files.read_text())["root"] == str(vjob.folder)
        assert (run.code / "data").resolve() == vjob.folder / "data"
        vjob.wait_over(run)


def test_a_resolved_conf_names_the_users_own_files(vjob: Vjob) -> None:
    run = submit(vjob, "copy")
    text = run.resolved.read_text()
    assert f"script: {vjob.folder}/src/train.py" in text and "snapshot: copy" in text
    vjob.wait_over(run)


# Plans of containers, and of other programs than scripts.


def plan_of(folder: Path, text: str) -> tuple[Plan, Path]:
    conf = parse_conf(text, "conf.yaml", folder)
    run = RunFolder(folder / "log/run")
    here = PlanContext(
        run="run", scheduler="local", python="/py", base=str(folder), user_id=0, environ={},
        folder=str(run.path), found=get_starter(conf).read_files(conf),
    )  # fmt: skip
    moved, there = relocate(conf, here, take_snapshot(conf, folder, os.environ), run.code)
    return build_plan(moved, there), run.code


CONTAINED = """
name: c
program: {script: SCRIPT, snapshot: copy}
container: {runtime: apptainer, image: "docker://u:1", MORE}
cluster: {nodes: [{group: m}]}
"""


def mounts_of(plan: Plan) -> str:
    return " ".join(
        " ".join(words) for words in [*plan.containers[0].prepare, plan.containers[0].start]
    )


def test_a_container_sees_the_copy_and_what_its_links_lead_to(tmp_path: Path) -> None:
    make_repository(tmp_path, src__train_py="", sub__x="")
    text = CONTAINED.replace("SCRIPT", "src/train.py").replace(", MORE", "")
    plan, code = plan_of(tmp_path, text)
    assert plan.command[-1] == f"{code}/src/train.py"
    assert plan.containers[0].workdir == str(code)
    words = mounts_of(plan)
    assert f"source={tmp_path}," in words and f"source={code.parent}," in words
    assert f"source={code}," not in words


def test_a_script_by_its_path_in_the_container_is_found_by_the_mount(tmp_path: Path) -> None:
    make_repository(tmp_path, src__train_py="", DOTgitignore="data/\n", data__x="")
    more = f'mounts: ["{tmp_path}:/work"], workdir: /work/src'
    text = CONTAINED.replace("SCRIPT", "/work/src/train.py").replace("MORE", more)
    plan, code = plan_of(tmp_path, text)
    assert plan.command[-1] == f"{code}/src/train.py"
    assert plan.containers[0].workdir == f"{code}/src"
    snapshot = take_snapshot(parse_conf(text, "c", tmp_path), tmp_path, os.environ)
    assert snapshot.seen_root == Path("/work") and snapshot.tree is not None
    assert snapshot.tree.links == ("data",)


def test_a_script_of_the_image_cannot_be_copied(tmp_path: Path) -> None:
    make_repository(tmp_path, x="")
    text = CONTAINED.replace("SCRIPT", "/opt/train.py").replace(", MORE", "")
    with pytest.raises(InputError, match=r"/opt/train\.py is not on this machine"):
        plan_of(tmp_path, text)
    plan, _ = plan_of(tmp_path, text.replace("copy", "auto"))
    assert plan.command[-1] == "/opt/train.py"


def test_a_megatron_checkout_is_copied_if_it_is_asked_for(tmp_path: Path) -> None:
    make_repository(tmp_path, M__pretrain_gpt_py="", M__megatron__arguments_py="")
    text = "name: m\nprogram: {megatron: M, snapshot: copy}\nmodel: gpt2-small\n"
    text += "data: {synthetic: true}\ncluster: {nodes: [{group: m, gpus: 1}]}\n"
    plan, code = plan_of(tmp_path, text)
    assert f"{code}/M/pretrain_gpt.py" in plan.command
    plan, code = plan_of(tmp_path, text.replace("copy", "auto"))
    assert f"{tmp_path}/M/pretrain_gpt.py" in plan.command


def test_a_tree_is_found_through_links_to_it(tmp_path: Path) -> None:
    make_repository(tmp_path / "real", src__train_py="")
    (tmp_path / "link").symlink_to("real")
    text = "name: m\nprogram: {script: src/train.py, snapshot: copy}\n"
    plan, code = plan_of(tmp_path / "link", text)
    assert (plan.command[-1], plan.workdir) == (f"{code}/src/train.py", str(code))


def test_a_file_that_cannot_be_read_stops_a_copy_that_was_asked_for_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_repository(tmp_path, train_py="", secret="")
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("secret"))
    text = "name: m\nprogram: {script: train.py, snapshot: copy}\n"
    with pytest.raises(InputError, match="1 files cannot be read: secret"):
        plan_of(tmp_path, text)
    plan, _ = plan_of(tmp_path, text.replace("copy", "auto"))
    assert plan.command[-1] == f"{tmp_path}/train.py"


def test_a_script_that_git_ignores_is_not_copied_unasked(tmp_path: Path) -> None:
    make_repository(tmp_path, DOTgitignore="scratch/\n", x="")
    write_files(tmp_path, scratch__train_py="")
    text = "name: m\nprogram: {script: scratch/train.py}\n"
    snapshot = take_snapshot(parse_conf(text, "c", tmp_path), tmp_path, os.environ)
    assert snapshot.tree is None and "git ignores" in snapshot.note


def test_a_package_that_was_installed_from_the_tree_is_imported_from_the_copy(
    tmp_path: Path,
) -> None:
    home = make_repository(tmp_path / "home", train_py="", src__mine_py="")
    site = tmp_path / "env/lib/python3.11/site-packages"
    write_files(site, **{"mine.pth": f"{home}/src\n"})
    (tmp_path / "env/pyvenv.cfg").write_text("")
    text = f"name: m\nprogram: {{script: train.py, python: {tmp_path}/env/bin/python}}\n"
    plan, code = plan_of(home, text)
    assert plan.env["PYTHONPATH"] == f"{code}/src"
    plan, code = plan_of(home, text + "env: {PYTHONPATH: /other}\n")
    assert plan.env["PYTHONPATH"] == f"/other:{code}/src"
    plan, _ = plan_of(home, text + "setup: [module load x]\n")
    assert "PYTHONPATH" not in plan.env


def test_all_attempts_of_a_run_have_the_same_copy(vjob: Vjob) -> None:
    write_files(
        vjob.folder,
        src__train_py="import os, sys\n"
        "print('RAN', os.environ['VJOB_ATTEMPT'], 'old', flush=True)\n"
        "if os.environ['VJOB_ATTEMPT'] == '0':\n"
        f"    open({str(vjob.folder / 'src/train.py')!r}, 'w').write('raise SystemExit(9)')\n"
        "    sys.exit(5)\n",
    )
    run = submit(vjob, "auto", "", "--set", "cluster.restarts=1")
    vjob.wait_over(run, may_fail=True)
    assert "RAN 1 old" in read_out(run, attempt=1)
    assert (vjob.folder / "src/train.py").read_text() == "raise SystemExit(9)"


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("{module: src.train, snapshot: auto}", "RAN old helped HOME input"),
        ("{module: src.train, snapshot: copy}", "RAN old helped CODE input"),
        ("{command: python src/train.py, snapshot: auto}", "RAN old helped HOME input"),
        ("{command: 'python src/train.py', snapshot: copy}", "RAN old helped CODE input"),
        ("{command: src/go.sh, snapshot: copy}", "RAN old helped CODE input"),
    ],
)
def test_a_module_and_a_command_run_from_the_copy(vjob: Vjob, program: str, line: str) -> None:
    if "module" in program:
        text = TRAIN.replace("import helper", "import src.helper as helper")
        (vjob.folder / "src/train.py").write_text(text)
    go = vjob.folder / "src/go.sh"
    go.write_text("#!/bin/sh\nexec python src/train.py\n")
    go.chmod(0o700)
    conf = CONF.replace("{script: src/train.py, snapshot: MODE}", program)
    run = vjob.submit(conf)
    vjob.wait_over(run)
    assert find_word(run, "RAN") == line.replace("HOME", str(vjob.folder)).replace(
        "CODE", str(run.code)
    )
    plan = read_plan(run.plan)
    assert plan is not None
    assert ("-P" in plan.command) == ("auto" in program and "module" in program)
    assert code_of(run).kept == "copy"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("src.train", "a copy of"),
        ("src.other", "src is in HOME, but has no other.py in HOME/src"),
        ("src", "src is a package in HOME, but `python -m` needs its __main__.py"),
        ("elsewhere.train", ""),
    ],
)
def test_a_module_that_its_package_lacks_is_refused(vjob: Vjob, module: str, said: str) -> None:
    (vjob.folder / "src/__init__.py").write_text("")
    vjob.write(CONF.replace("{script: src/train.py, snapshot: MODE}", f"{{module: {module}}}"))
    done = vjob("submit", "conf.yaml", "--dry-run")
    assert said.replace("HOME", str(vjob.folder)) in " ".join((done.stdout + done.stderr).split())
    assert ("would be refused" in done.stderr) == said.startswith("src ")
