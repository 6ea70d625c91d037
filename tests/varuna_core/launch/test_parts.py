"""The pure parts of a start over ssh: lists, quoting, ssh's own words."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_core.launch.errors import InputError
from varuna_core.launch.machines import (
    Machine,
    name_machines,
    parse_machine,
    parse_machine_list,
)
from varuna_core.launch.ssh import (
    ProbeRequest,
    build_ssh_command,
    explain_failure,
    explain_probe,
    find_twins,
    parse_probe,
    render_probe,
    render_script,
)

WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
HOSTS = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,10}", fullmatch=True) | st.sampled_from(
    ["10.0.0.4", "::1", "fe80::1%eth0", "2001:db8::7"]
)
MACHINES = st.builds(
    Machine,
    host=HOSTS,
    user=st.none() | st.sampled_from(["ann", "ann@corp.com", "j_d-1"]),
    port=st.none() | st.integers(1, 65535),
)


@given(st.lists(MACHINES, min_size=1, unique=True), st.sampled_from(["\n", "\r\n", "  # x\n\n#\n"]))
def test_a_machine_list_says_what_its_lines_say(machines: list[Machine], end: str) -> None:
    text = "".join(f" {machine}{end}" for machine in machines)
    assert parse_machine_list(text, "m") == tuple(machines)


@given(st.text())
def test_no_word_of_a_list_becomes_an_option_of_ssh(word: str) -> None:
    machine = parse_machine(word)
    if isinstance(machine, Machine):
        assert re.fullmatch(r"[A-Za-z0-9_.:%-]+", machine.host) and machine.host[0] != "-"
        assert machine.user is None or re.fullmatch(r"[\w.+@][\w.+@-]*", machine.user)


@pytest.mark.parametrize(
    "word", ["-oProxyCommand=x", "a b", "ann@", "@a", "a:0", "a:70000", "a:x", "[::1", "a;b", "a:"]
)
def test_a_line_that_is_no_machine_is_refused_with_its_number(word: str) -> None:
    with pytest.raises(InputError, match=r"m:2: "):
        parse_machine_list(f"good\n{word}\n", "m")


def test_a_list_without_machines_or_with_one_twice_is_refused() -> None:
    with pytest.raises(InputError, match="lists no machine"):
        parse_machine_list("# nothing\n\n", "m")
    with pytest.raises(InputError, match="m:3: a is on line 1 already"):
        parse_machine_list("a\nb\na\n", "m")


def test_only_a_bare_local_name_goes_without_ssh() -> None:
    local = [parse_machine(word) for word in ("127.0.0.1", "localhost", "::1")]
    remote = [parse_machine(word) for word in ("ann@localhost", "localhost:22", "10.0.0.1")]
    assert all(isinstance(item, Machine) and item.is_local for item in local)
    assert not any(isinstance(item, Machine) and item.is_local for item in remote)


@given(st.lists(MACHINES, unique=True), WORDS)
def test_names_of_machines_are_their_own_and_fit_in_files(
    machines: list[Machine], own: str
) -> None:
    names = name_machines(machines, own)
    assert len(set(names)) == len(machines)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in names)


def test_names_are_short_and_addresses_whole() -> None:
    hosts = ["127.0.0.1", "gpu-46.site.org", "10.0.0.4", "gpu-46.other.org"]
    machines = [Machine(host=host) for host in hosts]
    assert name_machines(machines, "head.site.org") == ("head", "gpu-46", "10-0-0-4", "gpu-46-2")


@settings(max_examples=40, deadline=None)
@given(st.lists(WORDS, max_size=4), st.dictionaries(NAMES, WORDS, max_size=2))
def test_any_word_reaches_a_command_over_standard_input(
    words: list[str], env: dict[str, str]
) -> None:
    script = render_script(["printf", "%s\\0", "-", *words], env)
    done = subprocess.run(
        ["/bin/sh", "-s"], input=script.encode(), capture_output=True, check=True, timeout=20
    )
    assert done.stdout.decode() == "\0".join(["-", *words, ""])


def test_secrets_and_arguments_are_no_part_of_the_ssh_command() -> None:
    machine = Machine(host="b", user="ann", port=7)
    command = build_ssh_command(machine, "/etc/x")
    assert command[-2:] == ["b", "exec /bin/sh -s"] and "BatchMode=yes" in command
    assert command[command.index("-l") + 1] == "ann" and command[command.index("-p") + 1] == "7"


RECORDED = [
    (
        "root@localhost: Permission denied (publickey).",
        "it refused the login: run `ssh -p 7 ann@b`",
    ),
    (
        "No ED25519 host key is known for [localhost]:7 and you have requested strict checking.\n"
        "Host key verification failed.",
        "the machine's host key is not known here",
    ),
    (
        "@@@@@@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n@@@@@@@@\n"
        "Host key verification failed.",
        "the machine's host key is not the one in known_hosts",
    ),
    ("ssh: connect to host b port 7: Connection refused", "it cannot be reached"),
    ("ssh: connect to host b port 22: No route to host", "it cannot be reached"),
    ("ssh: Could not resolve hostname b: Name or service not known", "no such host is known"),
    ("client_loop: send disconnect: Broken pipe", "ssh: client_loop: send disconnect"),
    ("", "ssh failed without a message"),
]
"""What OpenSSH 9.2 writes."""


@pytest.mark.parametrize(("errors", "said"), RECORDED)
def test_a_failure_of_ssh_is_one_line_with_what_to_do(errors: str, said: str) -> None:
    text = explain_failure(Machine(host="b", user="ann", port=7), errors)
    assert text.startswith(said) and "\n" not in text


def ask(folder: Path, **changes: str) -> ProbeRequest:
    return ProbeRequest(
        folder=folder,
        token="t",
        python=changes.get("python", "/bin/sh"),
        code_dir=changes.get("code_dir", str(folder)),
        script=changes.get("script", "t"),
        user=0,
    )


def test_a_probe_of_an_odd_folder_finds_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "it's $(odd) `x` \\ %{rank}"
    folder.mkdir()
    (folder / "t").write_text("t")
    asked = ask(folder)
    script = "echo vjob; echo a start file speaks\n" + render_probe(asked, "m")
    done = subprocess.run(["/bin/sh", "-s"], input=script, capture_output=True, text=True)
    said = parse_probe(done.stdout)
    assert explain_probe(asked, said) is None, done.stderr
    assert said["agent"] == "python3" and (folder / "m").exists()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("end", "was interrupted"),
        ("sees", "does not see the run folder .* to one; you are user 0 here and 1 there"),
        ("writes", "cannot write"),
        ("agent", "neither /bin/sh nor a python3"),
        ("python", "the machine has no /bin/sh: install it, or set program.python to another"),
        ("code", "the machine has no workdir .*: the path"),
        ("script", "the machine cannot read .*t"),
    ],
)
def test_what_a_probe_misses_is_one_line(tmp_path: Path, key: str, message: str) -> None:
    names = ("sees", "writes", "agent", "python", "code", "script", "machine", "end")
    said = {"user": "1", **{name: "yes" for name in names if name != key}}
    problem = explain_probe(ask(tmp_path), said)
    assert problem is not None and re.search(message, problem) and "\n" not in problem


def test_a_bare_interpreter_may_come_with_the_setup_lines(tmp_path: Path) -> None:
    said = dict.fromkeys(("sees", "writes", "agent", "code", "script", "end"), "yes")
    assert explain_probe(ask(tmp_path, python="python3.11"), said) is None


def test_two_entries_of_one_machine_are_found() -> None:
    assert find_twins(["a", "b", "c"], ["x", "y", "x"]) == [("a", "c")]
    assert find_twins(["a", "b"], ["", ""]) == []
