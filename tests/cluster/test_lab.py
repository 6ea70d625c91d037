"""The lab is what it says: real nodes, queues, GPUs, accounting and accidents."""

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.cluster.processes import run, wait_for
from tests.cluster.shape import LabError

pytestmark = pytest.mark.slurm


def submit(lab: Lab, script: Path, *options: str) -> str:
    return lab.run(["sbatch", "--parsable", *options, str(script)]).stdout.strip()


def read_job(lab: Lab, job_id: str, key: str) -> str:
    text = lab.run(["scontrol", "--oneliner", "show", "job", job_id]).stdout
    return dict(part.partition("=")[::2] for part in text.split())[key]


def wait_job(lab: Lab, job_id: str, state: str, timeout_s: float = 30) -> None:
    wait_for(lambda: read_job(lab, job_id, "JobState") == state, timeout_s, f"job {job_id} {state}")


def write_script(folder: Path, text: str) -> Path:
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\n{text}\n")
    return script


def call_cli(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run([sys.executable, "-m", "tests.cluster", *arguments], check=False)


def test_all_nodes_are_idle(clean_lab: Lab) -> None:
    assert clean_lab.read_node_states() == dict.fromkeys(clean_lab.nodes, "idle")


def test_every_node_has_a_host_name_and_an_address_of_its_own(clean_lab: Lab) -> None:
    resolve = 'getent ahostsv4 "$(hostname)" | head -1 | cut -d" " -f1'
    told = f'echo "$(hostname) $(hostname -I) $({resolve})"'
    lines = clean_lab.run(["srun", "--nodes=6", "sh", "-c", told]).stdout.splitlines()
    seen = {name: (address, resolved) for name, address, resolved in map(str.split, lines)}
    assert seen == {name: (ip, ip) for name, ip in clean_lab.node_addresses.items()}


def test_local_folder_differs_from_node_to_node(clean_lab: Lab) -> None:
    local = clean_lab.paths.local
    pair = ["srun", "--partition=gpu1", "--nodes=2"]  # all of it: the same two nodes both times
    clean_lab.run([*pair, "sh", "-c", f"hostname >{local}/name"])
    seen = clean_lab.run([*pair, "cat", f"{local}/name"]).stdout.split()
    assert sorted(seen) == ["a1", "a2"]


def test_het_step_sorts_the_node_list_but_not_the_ranks(clean_lab: Lab, tmp_path: Path) -> None:
    line = "$SLURM_PROCID $(hostname) $SLURM_JOB_NODELIST $SLURM_JOB_NODELIST_HET_GROUP_0"
    script = write_script(
        tmp_path,
        "#SBATCH --partition=gpu2 --nodes=1 --ntasks=1\n"
        "#SBATCH hetjob\n"
        "#SBATCH --partition=gpu1 --nodes=2 --ntasks=2\n"
        f"srun --het-group=0,1 sh -c 'echo {line}'",
    )
    job_id = submit(clean_lab, script, f"--output={tmp_path}/out")
    wait_job(clean_lab, job_id, "COMPLETED")
    ranks = sorted((tmp_path / "out").read_text().splitlines())
    # The trap: the first host of the list is a1, but rank 0 runs on b1.
    assert ranks == [
        "0 b1 a[1-2],b1 b1",
        "1 a1 a[1-2],b1 b1",
        "2 a2 a[1-2],b1 b1",
    ]


def test_gpus_asked_for_become_visible_devices(clean_lab: Lab) -> None:
    show = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    seen = clean_lab.run(["srun", "-p", "gpu2", "--gres=gpu:a10:3", *show]).stdout.strip()
    assert seen == "0,1,2"


def test_a_gpu_type_of_another_queue_is_refused(clean_lab: Lab) -> None:
    result = clean_lab.run(["srun", "-p", "gpu2", "--gres=gpu:a100:1", "true"], check=False)
    assert "Requested node configuration is not available" in result.stderr


def test_accounting_rows_arrive(clean_lab: Lab, tmp_path: Path) -> None:
    job_id = submit(clean_lab, write_script(tmp_path, "exit 3"), "--output=/dev/null")
    query = ["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State,ExitCode"]
    wait_for(lambda: clean_lab.run(query).stdout == "FAILED|3:0\n", 30, "row in sacct")


def test_without_accounting_sacct_is_disabled_and_jobs_run(clean_lab: Lab) -> None:
    with clean_lab.without_accounting():
        result = clean_lab.run(["sacct"], check=False)
        assert (result.returncode, "disabled" in result.stderr) == (1, True)
        assert clean_lab.run(["srun", "hostname"]).stdout == "a1\n"
    assert clean_lab.run(["sacct"]).returncode == 0


def test_crashed_node_fails_its_job_and_comes_back(clean_lab: Lab, tmp_path: Path) -> None:
    script = write_script(tmp_path, "srun sleep 300")
    job_id = submit(clean_lab, script, "--nodelist=b4", "--no-requeue", f"--output={tmp_path}/out")
    wait_job(clean_lab, job_id, "RUNNING")
    clean_lab.crash_node("b4")
    wait_job(clean_lab, job_id, "NODE_FAIL")
    assert clean_lab.read_node_states()["b4"] == "down*"
    clean_lab.restore_node("b4")
    assert clean_lab.read_node_states()["b4"] == "idle"
    assert clean_lab.run(["srun", "--nodelist=b4", "hostname"]).stdout == "b4\n"


def test_low_queue_is_preempted_and_requeued(clean_lab: Lab, tmp_path: Path) -> None:
    script = write_script(tmp_path, "sleep 300")
    where = ("--nodelist=b1", "--exclusive")
    low = submit(clean_lab, script, "-p", "low", *where, "--requeue", "--output=/dev/null")
    wait_job(clean_lab, low, "RUNNING")
    clean_lab.run(["srun", *where, "true"])
    assert read_job(clean_lab, low, "Restarts") == "1"
    wait_job(clean_lab, low, "RUNNING")


def test_controller_comes_back_with_its_jobs(clean_lab: Lab, tmp_path: Path) -> None:
    script = write_script(tmp_path, "sleep 300")
    job_id = submit(clean_lab, script, "--output=/dev/null")
    wait_job(clean_lab, job_id, "RUNNING")
    clean_lab.stop_controller()
    assert " is DOWN" in clean_lab.run(["scontrol", "ping"], check=False).stdout
    clean_lab.start_controller()
    assert read_job(clean_lab, job_id, "JobState") == "RUNNING"


def test_slow_link_is_slow_until_cleared(clean_lab: Lab) -> None:
    """At 20 Mbit/s the link takes over a second for it, however busy the machine."""

    def send_megabits(count: float) -> float:
        with socket.create_server((clean_lab.shape.controller_address, 0)) as server:
            port = server.getsockname()[1]
            took: list[float] = []
            sink = threading.Thread(target=lambda: took.append(_drain(server)))
            sink.start()
            to = f"/dev/tcp/{clean_lab.shape.controller_address}/{port}"
            send = f"head -c {int(count * 125_000)} /dev/zero >{to}"
            clean_lab.run(["srun", "--nodelist=b2", "bash", "-c", send])
            sink.join(timeout=30)
            return took[0]

    clean_lab.slow_link("b2", rate_mbit=20, latency_ms=100)
    slow_s = send_megabits(30)
    clean_lab.clear_link("b2")
    fast_s = send_megabits(30)
    assert slow_s > max(1.0, fast_s)


def _drain(server: socket.socket) -> float:
    """Seconds from the connection to the last byte: without what Slurm takes to start a step."""
    connection, _ = server.accept()
    start = time.monotonic()
    with connection:
        while connection.recv(1 << 20):
            pass
    return time.monotonic() - start


def test_unknown_node_is_refused_by_name(clean_lab: Lab) -> None:
    with pytest.raises(LabError, match="no node 'c1'; the lab has a1, a2"):
        clean_lab.crash_node("c1")


def test_up_when_one_is_up_says_so(clean_lab: Lab) -> None:
    result = call_cli("up")
    assert result.returncode == 0
    assert "already up" in result.stdout
    other = call_cli("up", "--nodes", "1,1")
    assert other.returncode == 1
    assert "not what was asked for" in other.stderr


def test_status_names_every_node(clean_lab: Lab) -> None:
    status = json.loads(call_cli("status", "--json").stdout)
    assert {name: node["address"] for name, node in status["nodes"].items()} == (
        clean_lab.node_addresses
    )
