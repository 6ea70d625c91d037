"""The evidence that a node gathers when its ranks hang."""

import os
import socket
import socketserver
import subprocess
import sys
import threading

import pytest

from varuna_core.agent.processes import evidence
from varuna_core.agent.processes.evidence import (
    ask_nccl,
    describe_queues,
    gather_evidence,
    list_processes,
    list_sockets,
    parse_socket,
    read_ras_address,
)
from varuna_core.agent.processes.kernel_log import parse_records

SENDER = """
import socket, sys
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
link.sendall(b"x" * 500)
print("sent", flush=True)
sys.stdin.read()
"""
STATUS = "NCCL version 2.27.5\nJob summary\n  Communicators... INCOMPLETE\n"


def test_bytes_that_a_rank_has_not_read_are_told_with_their_sender():
    with socket.create_server(("127.0.0.1", 0)) as ear:
        words = [sys.executable, "-c", SENDER, str(ear.getsockname()[1])]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(words, text=True, **pipes) as child:
            link, _ = ear.accept()
            assert child.stdout.readline() == "sent\n"
            ranks = {0: os.getpid(), 1: child.pid}
            found = list_sockets(ranks)
            processes = list_processes(ranks)
            link.close()
            child.stdin.close()
    own = next(one for one in found if (one["rank"], one["peer"]) == (0, 1))
    assert (own["unread"], own["state"]) == (500, "established")
    assert "rank 0 has not read 500 bytes from rank 1" in describe_queues(found)
    assert {one["rank"] for one in processes} == {0, 1}
    assert all(one["threads"] for one in processes if one["pid"] in ranks.values())


LINE = " 0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 42 1"
LINE6 = (
    " 1: 0000000000000000FFFF00000100007F:1F90 00000000000000000000000001000000:0050 01 "
    "00000010:00000020 01:00000014 00000003 0 0 43 2"
)


@pytest.mark.skipif(sys.byteorder != "little", reason="the lines are of a little-endian machine")
@pytest.mark.parametrize(
    ("line", "local", "remote", "state", "numbers"),
    [
        (LINE, ("127.0.0.1", 8080), ("0.0.0.0", 0), "listen", (0, 0, 0, 42)),
        (LINE6, ("127.0.0.1", 8080), ("::1", 80), "established", (16, 32, 3, 43)),
    ],
)
def test_a_line_of_the_kernels_table_of_sockets(line, local, remote, state, numbers):
    found = parse_socket(line)
    assert (found["local"], found["remote"], found["state"]) == (local, remote, state)
    assert tuple(found[key] for key in ("unsent", "unread", "resent", "inode")) == numbers


@pytest.mark.parametrize(
    ("record", "parsed"),
    [
        ("6,339,5140900,-;NVRM: Xid 79\n SUBSYSTEM=pci\n", [(5.1409, "NVRM: Xid 79")]),
        ("damaged", []),
        ("6,339,x,-;no time", []),
    ],
)
def test_a_record_of_the_kernels_log(record, parsed):
    assert parse_records(record) == parsed


class Ras(socketserver.StreamRequestHandler):
    """Stand-in for NCCL's RAS: the lines of its text protocol."""

    def handle(self):
        assert self.rfile.readline() == b"CLIENT PROTOCOL 2\n"
        self.wfile.write(self.server.hello)
        if self.server.hello.startswith(b"SERVER"):
            assert self.rfile.readline() == b"TIMEOUT 5\n"
            self.wfile.write(b"OK\n")
            assert self.rfile.readline() == b"VERBOSE STATUS\n"
            self.wfile.write(STATUS.encode())


@pytest.mark.parametrize(
    ("hello", "expected"), [(b"SERVER PROTOCOL 3\n", STATUS), (b"HTTP/1.1 400\r\n", None)]
)
def test_nccl_is_asked_where_it_listens(hello, expected, monkeypatch):
    with socketserver.TCPServer(("127.0.0.1", 0), Ras) as server:
        server.hello = hello
        threading.Thread(target=server.handle_request, daemon=True).start()
        host, port = server.server_address
        spelled = {"NCCL_RAS_ADDR": f"{host}:{port}"}
        monkeypatch.setattr(evidence, "read_environment", lambda pid: spelled)
        address = read_ras_address([1])
        if expected is None:
            with pytest.raises(ValueError, match="not NCCL"):
                ask_nccl(address)
        else:
            assert ask_nccl(address) == {"text": STATUS}


def test_a_part_that_hangs_or_fails_says_so_and_holds_up_no_other():
    release = threading.Event()

    def fail():
        raise OSError("no such device")

    late = gather_evidence({}, {"gpus": release.wait}, limit_s=0.0)
    release.set()
    assert late["gpus"] == {"problem": "no answer within 0 s"}
    found = gather_evidence({0: os.getpid()}, {"stacks": fail}, limit_s=60)
    assert found["stacks"] == {"problem": "OSError: no such device"}
    assert os.getpid() in {one["pid"] for one in found["processes"]}
