"""`vjob doctor`: what of this machine and its Slurm would trouble a job, each with its remedy.

Findings are made by pure functions from what commands said, so that each has a test from a
recorded text.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import socket
import sys
from collections.abc import Callable

from jobs.conf import Cluster
from jobs.doctor_containers import examine_containers
from jobs.finding import Finding, ask, read_text
from varuna_core.agent.gpus import DRIVER

EXIT_S = 5
"""What the agents need after the grace, to end what is left and to write the exits."""


def examine() -> list[Finding]:
    """Look at everything; nothing here raises."""
    findings: list[Finding] = []
    if shutil.which("sbatch") is None:
        findings.append(
            Finding(
                name="slurm",
                status="note",
                text="sbatch is not on PATH: runs go to this machine",
                remedy="log in to a cluster node to use Slurm",
            )
        )
    else:
        findings += examine_slurm()
    has_gpus = any(DRIVER.glob("*/information"))
    findings.append(judge_python(find_version("torch"), find_version("numpy"), has_gpus))
    findings += examine_containers()
    findings.append(judge_host_name(socket.gethostname(), _resolve(socket.gethostname())))
    findings.append(judge_interfaces(ask("ip", "-o", "-4", "addr") or ""))
    findings.append(judge_ports(read_text("/proc/sys/net/ipv4/ip_local_port_range")))
    return findings


def examine_slurm() -> list[Finding]:
    facts = read_slurm_config()
    if facts is None:
        return [
            Finding(
                name="slurm controller",
                status="fail",
                text="scontrol show config does not answer",
                remedy="try `scontrol ping`; is SLURM_CONF right?",
            )
        ]
    judges: tuple[Callable[[dict[str, str]], Finding], ...] = (
        judge_version,
        judge_accounting,
        judge_het_steps,
        judge_preemption,
        judge_requeue,
        judge_kill_wait,
    )
    return [judge(facts) for judge in judges]


def read_slurm_config() -> dict[str, str] | None:
    """What `scontrol show config` says; None where it does not answer."""
    config = ask("scontrol", "show", "config")
    return None if config is None else parse_config(config)


def parse_config(text: str) -> dict[str, str]:
    """`Key = Value` lines of `scontrol show config`."""
    return {
        key.strip(): value.strip()
        for key, mark, value in (line.partition("=") for line in text.splitlines())
        if mark
    }


def judge_version(facts: dict[str, str]) -> Finding:
    text = facts.get("SLURM_VERSION", "")
    match = re.match(r"(\d+)\.(\d+)", text)
    version = (int(match.group(1)), int(match.group(2))) if match else (0, 0)
    if version < (20, 11):
        return Finding(
            name="slurm version",
            status="fail" if match else "warn",
            text=f"Slurm {text or 'of unknown version'}",
            remedy="vjob needs 20.11 or later",
        )
    return Finding(name="slurm version", status="ok", text=f"Slurm {text}")


def judge_accounting(facts: dict[str, str]) -> Finding:
    kind = facts.get("AccountingStorageType", "")
    if "slurmdbd" in kind:
        return Finding(name="accounting", status="ok", text=kind)
    return Finding(
        name="accounting",
        status="warn",
        text=f"{kind or 'none'}: Slurm forgets a job soon after its end "
        f"(MinJobAge {facts.get('MinJobAge', 'unknown')})",
        remedy="nothing to do: vjob keeps its own record of each run",
    )


def judge_het_steps(facts: dict[str, str]) -> Finding:
    if "disable_hetjob_steps" in facts.get("SchedulerParameters", ""):
        return Finding(
            name="het jobs",
            status="warn",
            text="SchedulerParameters has disable_hetjob_steps: no step over several components",
            remedy="set cluster.hetero: split in confs with several node groups",
        )
    if "bf_hetjob_immediate" not in facts.get("SchedulerParameters", ""):
        return Finding(
            name="het jobs",
            status="note",
            text="het jobs start only by backfill, without bf_hetjob_immediate: longer waits",
            remedy="an admin may add bf_hetjob_immediate to SchedulerParameters; or hetero: split",
        )
    return Finding(name="het jobs", status="ok", text="steps over components are allowed")


def judge_preemption(facts: dict[str, str]) -> Finding:
    if facts.get("PreemptType", "preempt/none") == "preempt/none":
        return Finding(name="preemption", status="ok", text="jobs are not preempted here")
    parameters = facts.get("PreemptParameters", "") + facts.get("SlurmctldParameters", "")
    if "send_user_signal" in parameters:
        return Finding(name="preemption", status="ok", text="a job is told before it is preempted")
    return Finding(
        name="preemption",
        status="warn",
        text="preempted jobs get only TERM, and the grace time of their queue",
        remedy="an admin may set PreemptParameters=send_user_signal (preempt_send_user_signal in "
        "SlurmctldParameters up to 22.05)",
    )


def judge_requeue(facts: dict[str, str]) -> Finding:
    match = re.search(r"cred_expire=(\d+)", facts.get("AuthInfo", ""))
    delay_s = int(match.group(1)) if match else 120
    text = f"a requeued job waits about {delay_s} s before it can start"
    if facts.get("JobRequeue", "1") == "0":
        text += "; JobRequeue=0, so only requeue: true in the conf asks for it"
    return Finding(name="requeue", status="ok", text=text)


def judge_kill_wait(facts: dict[str, str], grace_s: float = Cluster().grace_s) -> Finding:
    """Slurm kills all of a job KillWait after its TERM, whatever grace the conf gives."""
    match = re.match(r"(\d+)", facts.get("KillWait", ""))
    kill_wait_s = int(match.group(1)) if match else 30
    most_s = max(1, kill_wait_s - EXIT_S)
    if grace_s > most_s:
        return Finding(
            name="kill wait",
            status="warn",
            text=f"Slurm kills {kill_wait_s} s after TERM (KillWait), and cluster.grace_s is "
            f"{grace_s:.0f}: the last moments of the ranks and their exits would be lost",
            remedy=f"set cluster.grace_s to {most_s} or less, or have KillWait raised",
        )
    text = f"KillWait is {kill_wait_s} s: cluster.grace_s up to {most_s} is kept"
    return Finding(name="kill wait", status="ok", text=text)


def judge_python(torch: str | None, numpy: str | None, has_gpus: bool) -> Finding:
    """By their packages' own word: importing torch takes seconds."""
    missing = [name for name, version in (("torch", torch), ("numpy", numpy)) if version is None]
    if missing:
        return Finding(
            name="training",
            status="note",
            text=f"no {' and no '.join(missing)} under {sys.executable}, where bare ranks run",
            remedy="pip install 'vjob[train]' there; or program.python, or container.image",
        )
    if has_gpus and str(torch).endswith("+cpu"):
        return Finding(
            name="training",
            status="warn",
            text=f"torch {torch} is a build without CUDA, and there are GPUs here",
            remedy=f"install torch for CUDA under {sys.executable}, or set container.image",
        )
    return Finding(name="training", status="ok", text=f"torch {torch}, numpy {numpy}")


def find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge_host_name(name: str, address: str | None) -> Finding:
    if address is None:
        return Finding(
            name="host name",
            status="warn",
            text=f"{name} does not resolve",
            remedy=f"add a line `ADDRESS {name}` to /etc/hosts",
        )
    if address.startswith("127."):
        return Finding(
            name="host name",
            status="warn",
            text=f"{name} resolves to {address}: other nodes cannot reach it there",
            remedy=f"in /etc/hosts replace `{address} {name}` by this machine's network address",
        )
    return Finding(name="host name", status="ok", text=f"{name} is {address}")


def judge_interfaces(text: str) -> Finding:
    rows = re.findall(r"^\d+:\s+(\S+)\s+inet\s+(\S+)", text, re.MULTILINE)
    shown = [f"{name} {address}" for name, address in rows if name != "lo"]
    if not shown:
        return Finding(name="interfaces", status="warn", text="no network address but loopback")
    return Finding(name="interfaces", status="ok", text=", ".join(shown))


def judge_ports(text: str | None) -> Finding:
    low, _, high = (text or "32768 60999").strip().partition("\t")
    if int((high or "60999").strip() or 60999) >= 61000:
        return Finding(
            name="ports",
            status="warn",
            text=f"the ephemeral range {low}-{high.strip()} covers 61000 and up, where vjob takes "
            "the master's port",
            remedy="set cluster.port to one outside that range, or lower ip_local_port_range",
        )
    return Finding(name="ports", status="ok", text="61000 and up are free of ephemeral ports")


def render(findings: list[Finding]) -> str:
    """One line a finding, the remedy below."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<5} {finding.name}: {finding.text}")
        if finding.remedy and finding.status != "ok":
            lines.append(f"      {finding.remedy}")
    return "\n".join(lines)


def _resolve(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None
