"""Runs of the launcher: started, started once more, ended, found below their log folder."""

from __future__ import annotations

import getpass
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from varuna_core.agent.meeting.link import call_hub
from varuna_core.records.exits import read_outcome
from varuna_core.records.files import list_names, read_json, write_json
from varuna_core.records.machine import identify_machine
from varuna_core.records.plan import read_plan
from varuna_core.records.record import RunRecord
from varuna_core.records.requests import write_stop
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.api.confs import ConfText, resolve
from vjob.jobs.conf.write import dump_yaml
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.monitor.log_lines.print_logs import LineFilter
from vjob.jobs.runs.cancel import cancel_run
from vjob.jobs.runs.find import is_over, view_run, view_runs
from vjob.jobs.schedulers.local.scheduler import state_file
from vjob.shelf.launcher.translate import Arguments, build_conf, read_inputs
from vjob.shelf.run import follow
from vjob.shelf.run.follow import Screen

NAME = "launch"
FROM_FLAGS = Path("launch-flags")
"""Called so in messages; paths in the conf are absolute."""
STATE_FORMAT = 2
KILL_S = 120
POLL_S = 0.2


def start_run(arguments: Arguments, folder: Path) -> int:
    """Submit a new run below `folder` and follow it; its exit code."""
    screen = Screen(NAME)
    inputs = read_inputs(arguments)
    text = dump_yaml(build_conf(arguments, inputs, str(folder)))
    resolved = resolve(ConfText(path=FROM_FLAGS, text=text))
    for line in [*filter(None, [inputs.shape.text]), *inputs.layout.describe()]:
        screen.say(line)

    def fill(run: RunFolder) -> None:
        write_json(run.launch, {"format": STATE_FORMAT, "arguments": asdict(arguments)})

    def announce(run: RunFolder, record: RunRecord) -> None:
        job = ", ".join(job.id for job in record.jobs)
        screen.say(f"job {job} in {run.path}; `vjob status {job}` from any terminal")

    wanted = LineFilter.make(raw=True)
    return follow.start_run(resolved, screen, announce, wanted=wanted, fill=fill, with_batch=True)


def resume_run(run: RunFolder, given: dict[str, Any]) -> int:
    """The same again in a new run folder, with the old arguments below those given now."""
    saved = read_json(run.launch)
    if not isinstance(saved, dict) or saved.get("format") != STATE_FORMAT:
        raise InputError(f"{run.launch} is of another version; start a new run")
    if not is_over(view_run(run)):
        raise InputError(f"{run.path} still runs, or may: --kill it first")
    return start_run(Arguments(**{**saved["arguments"], **given}), run.path.parent)


def kill_run(run: RunFolder) -> int:
    """End a run on all its machines, from wherever the run folder is seen."""
    screen = Screen(NAME)
    state = read_json(state_file(run, None))
    if not isinstance(state, dict) or state.get("machine") in (None, identify_machine()):
        screen.say(cancel_run(run, now=True, wait_s=KILL_S, say=screen.say))
        return 0
    host, plan, attempts = (
        str(state["machine"]).partition(" ")[0],
        read_plan(run.plan),
        run.attempts(),
    )
    if plan is None or plan.morph or not attempts:
        raise InputError(f"{run.path} runs on {host}: do this there")
    reason = f"--kill by {getpass.getuser()} on {platform.node()}"
    write_stop(attempts[-1], "cancel", 143, reason, by=getpass.getuser())
    call_hub(attempts[-1].link)
    deadline = time.monotonic() + plan.timing.grace_s + KILL_S
    while read_outcome(attempts[-1]) is None:
        if time.monotonic() > deadline:
            raise VjobError(f"{run.path} has not ended yet; its master is on {host}")
        time.sleep(POLL_S)
    screen.say(f"{run.path} has ended")
    return 0


def find_launched(folder: Path, named: str | None, *, live: bool) -> RunFolder:
    """The run that is named, else the newest below `folder`; `live` ones are those not over."""
    if named is not None:
        run = RunFolder(Path(named) if os.path.isdir(named) else folder / named)
        if not os.path.exists(run.launch):
            raise InputError(f"--run {named}: no run of the launcher is there, nor in {folder}")
        return RunFolder(run.path.resolve())
    # os.path: another user's folder is passed over
    paths = [folder / name for name in list_names(folder)]
    runs = [RunFolder(path) for path in paths if not os.path.islink(path)]
    views = view_runs([run for run in runs if os.path.exists(run.launch)])
    if live:
        views = [view for view in views if not is_over(view)]
        if len(views) > 1:
            known = ", ".join(sorted(view.run.name for view in views))
            raise InputError(f"several runs are live in {folder}: name one with --run: {known}")
    if not views:
        what = "no run is live" if live else "no run of the launcher is"
        raise InputError(f"{what} in {folder}; --log_folder or --run says where to look")
    return max(views, key=lambda view: view.record.submitted).run
