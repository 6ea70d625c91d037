"""TCP connections of this very process."""

import os
import socket
import sys

import pytest

from varuna_core.agent.processes.sockets import has_socket, list_inodes, read_received

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it asks the kernel")


def test_bytes_are_those_that_a_connection_received_but_for_the_masters_port():
    with socket.create_server(("127.0.0.1", 0)) as ear:
        port = ear.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as near, ear.accept()[0] as far:
            far.sendall(b"x" * 5_000)
            near.recv(5_000, socket.MSG_WAITALL)
            own = os.fstat(near.fileno()).st_ino
            assert own in list_inodes(os.getpid())
            assert read_received(besides=0)[own] == 5_000
            assert own not in read_received(besides=port)
            assert has_socket(os.getpid(), port) and not has_socket(os.getpid(), 1)
