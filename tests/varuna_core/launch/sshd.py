"""A real sshd on loopback with a key, a config and a port of its own; no system service."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from varuna_core.records.runfolder import RunFolder

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
NUM_TRIES = 5
START_S = 30.0


class Sshd:
    """One server, for the user who runs the tests."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder = folder
        self.user = getpass.getuser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # it will not start without
        for name in ("host_key", "key", "stranger"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
        shutil.copy(folder / "key.pub", folder / "authorized_keys")
        self._settings = settings
        self._start()
        self.known_hosts = folder / "known_hosts"
        host_key = (folder / "host_key.pub").read_text()
        self.known_hosts.write_text(f"[localhost]:{self.port} {host_key}")
        self.config = self.write_config("config")

    @property
    def machine(self) -> str:
        """As a machine list spells it."""
        return f"{self.user}@localhost:{self.port}"

    def write_config(self, name: str, key: str = "key", known_hosts: Path | None = None) -> Path:
        """A client's config."""
        path = self.folder / name
        path.write_text(
            f"Host *\n  IdentityFile {self.folder / key}\n  IdentitiesOnly yes\n"
            f"  AddressFamily inet\n  UserKnownHostsFile {known_hosts or self.known_hosts}\n"
            "  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking ask\n"
        )
        path.chmod(0o600)
        return path

    @property
    def pid(self) -> int:
        return self._server.pid

    def stop(self) -> None:
        self._server.terminate()
        self._server.wait(timeout=10)

    def _start(self) -> None:
        assert SSHD is not None
        for _ in range(NUM_TRIES):  # somebody else may take the port that we found free
            self.port = _find_free_port()
            config = self.folder / "sshd_config"
            lines = [
                f"Port {self.port}",
                "ListenAddress 127.0.0.1",
                f"HostKey {self.folder / 'host_key'}",
                f"AuthorizedKeysFile {self.folder / 'authorized_keys'}",
                "PidFile none",
                "UsePAM no",
                "StrictModes no",
                "PasswordAuthentication no",
                "KbdInteractiveAuthentication no",
                "PermitRootLogin prohibit-password",
                *self._settings,
            ]
            config.write_text("\n".join(lines) + "\n")
            log = (self.folder / "sshd.log").open("wb")
            with log:
                self._server = subprocess.Popen(
                    [SSHD, "-D", "-e", "-f", str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            deadline = time.monotonic() + START_S
            while self._server.poll() is None and time.monotonic() < deadline:
                if _answers(self.port):
                    return
                time.sleep(0.02)
            self._server.kill()
            self._server.wait()
        raise AssertionError((self.folder / "sshd.log").read_text())


def find_step(run: RunFolder, program: str = "ssh") -> int:
    """The process of a start over ssh, or of the step itself."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            env = (path / "environ").read_bytes()
            parent = Path(f"/proc/{(path / 'stat').read_text().split()[3]}/environ").read_bytes()
        except OSError:  # it has ended, or its parent is somebody else's
            continue
        is_it = words[0] == b"ssh" if program == "ssh" else b"varuna_core.launch.step" in words
        mark = os.fsencode(f"VJOB_RUN={run.path}")
        if is_it and (mark in env or mark in parent):
            return int(path.name)
    raise AssertionError(f"no {program}")


def _find_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    with socket.socket() as test:
        return test.connect_ex(("127.0.0.1", port)) == 0
