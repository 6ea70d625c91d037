"""A script that is read can do no harm: attempts to escape, with each layer of the jail left out.

What a kernel lacks cannot be tried on it; the attempts run with the layers that are here.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vjob.jobs.errors import InputError
from vjob.shelf.importers.bash.passes import Pass, open_jail, run_pass
from vjob.shelf.importers.bash.recording import read_script

WITHOUT = [(), ("landlock",), ("calls",), ("spaces",), ("landlock", "calls")]
WRITES = {
    "a program": "/bin/touch {out}; /usr/bin/rm -rf {kept}",
    "a redirection": "echo x > {out}; echo x >> {kept}; : > {kept}",
    "builtin exec": "builtin exec /usr/bin/touch {out}",
    "no prelude": "trap - DEBUG; unset -f command_not_found_handle exec; PATH=/usr/bin:/bin;"
                  " \\touch {out}; \\rm {kept}",
    "command -p": "builtin command -p touch {out}; builtin command -p rm {kept}",
    "a trap": "trap '/usr/bin/touch {out}' EXIT; trap '/usr/bin/touch {out}' DEBUG",
    "a coprocess": "coproc /usr/bin/touch {out}; wait",
    "text filters": "sed -n 'w {out}' <(echo b); awk 'BEGIN{{print 1 > \"{out}\"; "
                    "system(\"/bin/touch {out}\")}}'; echo b | tee {out}",
    "the history": "set -o history; HISTFILE={out}; history -s x; history -w {out}",
    "builtin cd": "builtin cd {folder} && echo x > out; builtin cd / && echo x > {out}",
    "another bash": "BASH_ENV= builtin exec /bin/bash -c 'echo x > {out}'",
    "the loader": "( builtin exec /lib64/ld-linux-x86-64.so.2 /usr/bin/touch {out} )",
    "python": "( builtin exec /lib64/ld-linux-x86-64.so.2 {python} -c 'open(\"{out}\", \"w\")' )",
    "a library": "builtin enable -f /lib/x86_64-linux-gnu/libc.so.6 x; echo x > {out}",
    "an array": "printf -v 'a[$(/bin/touch {out})]' x; x='a[$(/bin/touch {out})]'; echo $((x))",
    "its own group": "set -m; {{ /bin/touch {out}; echo x > {out}; }} & disown -a",
    "a mount": "/bin/mount -t tmpfs x {folder}; echo x > {out}",
    "unshare": "( builtin exec /lib64/ld-linux-x86-64.so.2 /usr/bin/unshare -Ur touch {out} )",
}  # fmt: skip
ENDLESS = {
    "a loop": "while :; do :; done",
    "a fork bomb": "f() { f | f & }; f; builtin wait",
    "memory": "x=a; while :; do x=$x$x; done",
    "output": "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx >&2; done",
    "one file": "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done > $TMPDIR/big",
    "files": "i=0; while :; do : > $TMPDIR/f$((i++)); done",
    "a pipe": "coproc { builtin read x; }; builtin read y <&${COPROC[0]}",
    "orphans": "set -m; { while :; do :; done; } & disown -a; builtin exit 0",
}


def run(text: str, folder: Path, without: tuple[str, ...], seconds: float = 4.0) -> Pass:
    with open_jail() as ask:
        return run_pass(ask, text, name="x.sh", folder=str(folder), args=[], without=without,
                        env={"__VJ_RANK": "0", "__VJ_FILES": "0", "__VJ_GPUS": "1"},
                        seconds=seconds)  # fmt: skip


@pytest.mark.parametrize("without", WITHOUT, ids=str)
def test_nothing_is_written_or_deleted(without: tuple[str, ...], tmp_path: Path) -> None:
    kept, out = tmp_path / "kept", tmp_path / "out"
    kept.write_text("kept")
    for what, attempt in WRITES.items():
        line = attempt.format(out=out, kept=kept, folder=tmp_path, python=sys.executable)
        found = run(line + "\n", tmp_path, without)
        assert not {"landlock", "calls"} & set(without) & set(found.layers), what
        assert kept.read_text() == "kept" and not out.exists(), what
        assert [path.name for path in tmp_path.iterdir()] == ["kept"], what


@pytest.fixture
def port() -> Iterator[tuple[socket.socket, int]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        yield server, server.getsockname()[1]


@pytest.mark.parametrize("without", WITHOUT, ids=str)
def test_nobody_is_called(
    without: tuple[str, ...], tmp_path: Path, port: tuple[socket.socket, int]
) -> None:
    server, number = port
    run(
        f"echo x > /dev/tcp/127.0.0.1/{number}\nbuiltin exec 5<>/dev/tcp/127.0.0.1/{number}\n",
        tmp_path, without,
    )  # fmt: skip
    with pytest.raises(TimeoutError):
        server.accept()


@pytest.mark.parametrize("without", WITHOUT, ids=str)
def test_no_process_is_killed(without: tuple[str, ...], tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        run(f"builtin kill -9 {other.pid}; builtin kill -9 -1; builtin kill -9 $PPID\n",
            tmp_path, without)  # fmt: skip
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("without", WITHOUT, ids=str)
def test_no_secret_is_read(
    without: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    (tmp_path / "scripts").mkdir()
    monkeypatch.setenv("HUNTER_TOKEN", "hunter2")
    attempts = (f"$(<{secret})", f"$(cat {secret})", f"$(head {tmp_path}/*)", "$HUNTER_TOKEN",
                f"$(</proc/{os.getpid()}/environ)", "$(</etc/shadow)", "$(env)")  # fmt: skip
    for attempt in attempts:
        found = run(f'python t.py "{attempt}"\n', tmp_path / "scripts", without)
        assert "hunter2" not in str(found.records) + found.error, attempt
        assert "root:" not in str(found.records), attempt


@pytest.mark.parametrize("without", WITHOUT[:4], ids=str)
@pytest.mark.parametrize("name", ENDLESS)
def test_what_does_not_end_is_ended(name: str, without: tuple[str, ...], tmp_path: Path) -> None:
    found = run(ENDLESS[name] + "\n", tmp_path, without, seconds=0.5)
    assert found.status != 0 or name in ("orphans", "a fork bomb")
    assert len(found.error) <= 1 << 20
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in left


def test_without_files_held_nothing_runs(tmp_path: Path) -> None:
    for without in (("landlock", "root"), ("landlock", "spaces"), ("calls", "spaces")):
        (tmp_path / "x.sh").write_text("python t.py\n")
        with pytest.raises(InputError, match=r"no jail for it .* with --trust it runs"):
            read_script(tmp_path / "x.sh", environ={}, without=without)
    found = read_script(tmp_path / "x.sh", environ={}, trust=True)
    assert [launch.texts for launch in found.walk()] == [["python", "t.py"]]
    assert found.layers == ("trust",)
