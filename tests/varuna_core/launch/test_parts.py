"""The launcher's pure parts: lists, layouts, environment files, quoting, ssh's own words."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_core.launch.envfile import parse_env_file
from varuna_core.launch.errors import InputError
from varuna_core.launch.machines import (
    Machine,
    name_machines,
    parse_machine,
    parse_machine_list,
)
from varuna_core.launch.plan import RankProgram, build_plan, lay_out
from varuna_core.launch.ssh import (
    ProbeRequest,
    build_ssh_command,
    explain_failure,
    find_problem,
    find_twins,
    parse_probe,
    render_probe,
    render_script,
)
from varuna_core.records.layout import parse_stage_map

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
    with pytest.raises(InputError, match="no machine in it"):
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


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 12), st.integers(1, 5))
def test_every_rank_has_a_place_and_a_pipeline_lies_together(
    machines: int, gpus: int, stages: int, share: int
) -> None:
    replicas = machines * gpus // stages
    if replicas == 0:
        with pytest.raises(InputError, match="needs a GPU a stage"):
            lay_out(
                machines=machines, gpus_per_node=gpus, stages=stages, batch_size=8, chunk_size=1
            )
        return
    layout = lay_out(
        machines=machines,
        gpus_per_node=gpus,
        stages=stages,
        batch_size=share * replicas,
        chunk_size=2,
    )
    places = parse_stage_map(layout.stage_map, layout.world)
    assert layout.share == share
    for rank in range(layout.world):
        assert places.find(rank) == (rank % stages, rank // stages)
    assert 0 <= layout.idle_gpus < stages
    assert layout.world + layout.idle_gpus == machines * gpus
    assert sum(count * ranks for count, ranks in layout.nodes) == layout.world
    assert sum(count for count, _ in layout.nodes) == layout.machines
    assert layout.machines + layout.idle_machines == machines


def test_the_stage_map_and_the_idle_are_varunas() -> None:
    layout = lay_out(machines=2, gpus_per_node=4, stages=3, batch_size=8, chunk_size=2)
    assert layout.stage_map == "0,3;1,4;2,5;"
    assert layout.nodes == ((1, 4), (1, 2))
    assert layout.describe() == [
        "3 stages x 2 replicas on 2 machines; a step is 4 samples a replica in micro-batches of 2",
        "2 GPUs idle: too few for one more replica of 3 stages",
    ]
    layout = lay_out(machines=3, gpus_per_node=2, stages=4, batch_size=1, chunk_size=1)
    assert "2 GPUs idle, 1 machine of them whole" in layout.describe()[1]


def test_a_batch_that_cannot_be_dealt_out_is_refused_with_its_neighbours() -> None:
    with pytest.raises(InputError, match="take 9 or 12"):
        lay_out(machines=3, gpus_per_node=2, stages=2, batch_size=10, chunk_size=2)
    with pytest.raises(InputError, match="take 3, or"):
        lay_out(machines=3, gpus_per_node=2, stages=2, batch_size=2, chunk_size=2)
    with pytest.raises(InputError, match="--chunk_size 0"):
        lay_out(machines=3, gpus_per_node=2, stages=2, batch_size=6, chunk_size=0)


@given(st.dictionaries(NAMES.filter(lambda name: name != "export"), WORDS), st.booleans())
def test_an_environment_file_gives_back_what_a_shell_would(
    env: dict[str, str], is_exported: bool
) -> None:
    start = "export " if is_exported else ""
    lines = [f"{start}{name}={shlex.quote(value)} # it's" for name, value in env.items()]
    assert parse_env_file("# don't\n\n" + "\n".join(lines), "e") == env


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("ab =:#'\"\\\n\t$~`;&(*"), max_size=12))
def test_what_is_taken_is_what_a_real_shell_takes(tail: str) -> None:
    text = f"A={tail}\nB=1 C=2 # x\n"
    try:
        found = parse_env_file(text, "e")
    except InputError:
        return  # a command of the shell, or an open quote
    shell = ["env", "-i", "/bin/bash", "-c", 'set -a; eval "$1" || exit 9; printenv -0', "-", text]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = dict(item.split("=", 1) for item in done.stdout.split("\0") if item)
    assert found == {name: said[name] for name in found}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=1\nB=hush hush2", "e:2: want NAME=VALUE after B; quote"),
        ("A=1\n\nB='hush\n", "e:3: a quote is opened"),
        ("PATH=/hush:$PATH", "e:1: PATH: a shell would act on the $"),
        ('P="hush`id`"', "e:1: P: a shell would act on the `"),
        ("P=~/hush", "e:1: P: a shell would act on the ~"),
        ("P=http://hush?a&b", "e:1: P: a shell would act on the &"),
        ("1=hush", "e:1: want NAME=VALUE"),
        ("A=hush\0", "e:1: A holds a NUL"),
    ],
)
def test_a_bad_line_is_named_and_its_value_never_shown(text: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_env_file(text, "e")
    assert str(raised.value).startswith(message) and "hush" not in str(raised.value)


def test_a_dollar_that_belongs_to_the_value_is_kept() -> None:
    assert parse_env_file("A='$x'\nB=a\\$b\nC=5$", "e") == {"A": "$x", "B": "a$b", "C": "5$"}


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


@given(WORDS.filter(bool), st.lists(WORDS))
def test_arguments_of_the_user_are_not_filled_in(script: str, args: list[str]) -> None:
    layout = lay_out(machines=1, gpus_per_node=2, stages=1, batch_size=4, chunk_size=1)
    program = RankProgram(
        python="p", code_dir="/c", script=script, args=args, env={}, is_on_gpus=False
    )
    command = build_plan("r", layout, program).command
    known = {"percent": "%", "rank": "1", "local_rank": "0"}
    filled = [re.sub(r"%\{(\w+)\}", lambda m: known.get(m[1], m[0]), word) for word in command]
    own = ["--stage_to_rank_map=0,1;", "--chunk_size=1", "--batch-size=2"]
    assert filled == ["p", "-u", script, "--rank=1", "--local_rank=0", *own, *args]


RECORDED = [
    ("root@localhost: Permission denied (publickey).", "it refused the login: `ssh -p 7 ann@b`"),
    (
        "No ED25519 host key is known for [localhost]:7 and you have requested strict checking.\n"
        "Host key verification failed.",
        "its host key is not known here",
    ),
    (
        "@@@@@@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n@@@@@@@@\n"
        "Host key verification failed.",
        "its host key is not the one in known_hosts",
    ),
    ("ssh: connect to host b port 7: Connection refused", "it cannot be reached"),
    ("ssh: connect to host b port 22: No route to host", "it cannot be reached"),
    ("ssh: Could not resolve hostname b: Name or service not known", "no such host is known"),
    ("client_loop: send disconnect: Broken pipe", "ssh: client_loop: send disconnect"),
    ("", "ssh failed without a word"),
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
    assert find_problem(asked, said) is None, done.stderr
    assert said["agent"] == "python3" and (folder / "m").exists()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("end", "cut off"),
        ("sees", "does not see the run folder .*--log_folder; you are user 0 here and 1 there"),
        ("writes", "cannot write"),
        ("agent", "neither /bin/sh nor a python3"),
        ("python", "/bin/sh is not there: install it, or name another with --python"),
        ("code", "--code_dir .* is not there"),
        ("script", "t is not in"),
    ],
)
def test_what_a_probe_misses_is_one_line(tmp_path: Path, key: str, message: str) -> None:
    names = ("sees", "writes", "agent", "python", "code", "script", "machine", "end")
    said = {"user": "1", **{name: "yes" for name in names if name != key}}
    problem = find_problem(ask(tmp_path), said)
    assert problem is not None and re.search(message, problem) and "\n" not in problem


def test_two_entries_of_one_machine_are_found() -> None:
    assert find_twins(["a", "b", "c"], ["x", "y", "x"]) == [("a", "c")]


def test_a_plan_of_the_launcher_is_whole_json() -> None:
    layout = lay_out(machines=2, gpus_per_node=4, stages=3, batch_size=8, chunk_size=2)
    program = RankProgram(
        python="p", code_dir="/c", script="a/b c.py", args=(), env={"A": "1"}, is_on_gpus=True
    )
    plan = build_plan("r", layout, program)
    assert json.dumps(plan.env) == '{"A": "1"}' and plan.name == "b-c"
    assert [(g.count, g.ranks, g.gpus, g.first_node, g.first_rank) for g in plan.groups] == [
        (1, 4, 4, 0, 0),
        (1, 2, 2, 1, 4),
    ]
    assert plan.must_exist == ("/c", "/c/a/b c.py")
