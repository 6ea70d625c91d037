"""Find what in this machine and its Slurm would trouble a job, each with a remedy: `vjob doctor`.

Pure functions make diagnoses from the output of commands, so that each can be tested with a
recorded text.
"""

from __future__ import annotations

import importlib.metadata
import os
import socket
import sys
from collections.abc import Mapping

from varuna_core.agent.gpu.accelerator import choose_accelerator
from varuna_core.agent.meeting.network import list_addresses
from varuna_core.records.secrets import withhold
from vjob.jobs.conf.loading import load
from vjob.jobs.conf.loading.site import SITE, list_default_keys, load_site
from vjob.jobs.errors import VjobError
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.diagnosis import Diagnosis, read_text
from vjob.shelf.doctor.containers import examine_containers

BROKEN = "no conf can be read until the file is fixed; `VJOB_SITE= vjob ...` skips the site's file"


def examine() -> list[Diagnosis]:
    """Examine this machine and its Slurm, without raising an exception."""
    diagnoses = examine_site(os.environ)
    for scheduler in schedulers.list_with_queue():
        obstacle = scheduler.find_obstacle()
        if not obstacle:
            diagnoses += scheduler.examine()
            continue
        diagnoses.append(Diagnosis(name=scheduler.name, status="note", text=obstacle))
    if (own := schedulers.choose_auto()).can.inside_job:
        diagnoses += own.examine()
    has_gpus = bool(choose_accelerator().list_models())
    diagnoses.append(judge_python(find_version("torch"), find_version("numpy"), has_gpus))
    diagnoses += examine_containers()
    diagnoses.append(judge_host_name(socket.gethostname(), _resolve(socket.gethostname())))
    diagnoses.append(judge_interfaces(list_addresses()))
    diagnoses.append(judge_ports(read_text("/proc/sys/net/ipv4/ip_local_port_range")))
    return diagnoses


def examine_site(environ: Mapping[str, str]) -> list[Diagnosis]:
    """Examine the site's file and the user's: what each sets for every conf, and where."""
    try:
        site = load_site(environ, load.read_text)
    except VjobError as error:
        return [Diagnosis(name="site", status="fail", text=str(error), remedy=BROKEN)]
    rows = []
    defaults = list(list_default_keys(site.defaults))
    for path, source in site.files.items():
        own = [f"{key} (line {place[len(path) + 1 :]})" for key, place in defaults
               if place.rpartition(":")[0] == path]  # fmt: skip
        parts = {"cluster": site.cluster, "defaults": ", ".join(own)}
        if source == "site":
            parts["locked"] = ", ".join(site.locks)
        said = [f"{name} {text}" for name, text in parts.items() if text]
        rows.append(Diagnosis(name=source, status="ok", text="; ".join([path, *said])))
    if site.queues:
        text = f"for queue: auto, in this order: {', '.join(site.queues)}"
        rows.append(Diagnosis(name="queues", status="ok", text=text))
    if site.message:
        rows.append(Diagnosis(name="message", status="note", text=site.message))
    none = f"there is no {SITE}, and you have no site file of your own"
    return rows or [Diagnosis(name="site", status="ok", text=none)]


def judge_python(torch: str | None, numpy: str | None, has_gpus: bool) -> Diagnosis:
    """Judge versions from the packages' metadata, since importing torch takes seconds."""
    missing = [name for name, version in (("torch", torch), ("numpy", numpy)) if version is None]
    if missing:
        return Diagnosis(
            name="training",
            status="note",
            text=f"no {' and no '.join(missing)} under {sys.executable}, where bare ranks run",
            remedy="with this Python, run pip install '.[train]' in vjob's checkout; or set "
            "program.python or container.image",
        )
    if has_gpus and str(torch).endswith("+cpu"):
        return Diagnosis(
            name="training",
            status="warn",
            text=f"torch {torch} is a build for CPUs, but this machine has GPUs",
            remedy=f"install torch for these GPUs under {sys.executable}, or set container.image",
        )
    return Diagnosis(name="training", status="ok", text=f"torch {torch}, numpy {numpy}")


def find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge_host_name(name: str, address: str | None) -> Diagnosis:
    if address is None:
        return Diagnosis(
            name="host name",
            status="warn",
            text=f"{name} does not resolve",
            remedy=f"add a line `ADDRESS {name}` to /etc/hosts",
        )
    if address.startswith("127."):
        return Diagnosis(
            name="host name",
            status="warn",
            text=f"{name} resolves to {address}: other nodes cannot reach it there",
            remedy=f"in /etc/hosts replace `{address} {name}` by this machine's network address",
        )
    return Diagnosis(name="host name", status="ok", text=f"{name} is {address}")


def judge_interfaces(names: Mapping[str, str]) -> Diagnosis:
    """Judge the interface of each address, as the agent finds them without `ip`."""
    shown = [f"{name} {address}" for address, name in names.items() if name != "lo"]
    if not shown:
        return Diagnosis(name="interfaces", status="warn", text="no network address but loopback")
    return Diagnosis(name="interfaces", status="ok", text=", ".join(shown))


def judge_ports(text: str | None) -> Diagnosis:
    low, _, high = (text or "32768 60999").strip().partition("\t")
    if int((high or "60999").strip() or 60999) >= 61000:
        return Diagnosis(
            name="ports",
            status="warn",
            text=f"the ephemeral range {low}-{high.strip()} covers 61000 and up, where vjob takes "
            "the master's port",
            remedy="set cluster.port to a port outside that range, or lower ip_local_port_range",
        )
    return Diagnosis(name="ports", status="ok", text="61000 and up are free of ephemeral ports")


def render(diagnoses: list[Diagnosis]) -> str:
    """Render each diagnosis in a line, with the remedy below."""
    lines = []
    for diagnosis in diagnoses:
        lines.append(f"{diagnosis.status:<5} {diagnosis.name}: {withhold(diagnosis.text)}")
        if diagnosis.remedy and diagnosis.status != "ok":
            lines.append(f"      {withhold(diagnosis.remedy)}")
    return "\n".join(lines)


def _resolve(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None
