"""Times and sizes: each spelling is its value, in confs and flags; nothing is rounded."""

from __future__ import annotations

from fractions import Fraction

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs.conf.test_load import find_more, find_problems, parse, parse_more
from vjob.jobs.conf.quantities import (
    GIB,
    HOURS,
    MINUTES,
    SECONDS,
    parse_duration,
    parse_quantity,
    parse_size,
)
from vjob.shelf.commands.arguments import Duration

WORDS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def spell(seconds: int, between: str = "") -> str:
    """The shortest spelling, largest unit first."""
    parts = []
    for word, size in WORDS:
        count, seconds = divmod(seconds, size)
        parts += [f"{count}{word}"] if count else []
    return between.join(parts) or "0s"


@given(st.integers(0, 10**9), st.sampled_from(["", " "]))
def test_a_duration_is_read_back_as_it_was_spelled(seconds: int, between: str) -> None:
    assert parse_duration(spell(seconds, between)) == seconds


@given(st.integers(0, 99), st.integers(0, 10**5), st.integers(0, 59), st.integers(0, 59))
def test_a_clock_is_hours_minutes_and_seconds(days: int, hours: int, mins: int, secs: int) -> None:
    total = hours * 3600 + mins * 60 + secs
    assert parse_duration(f"{hours}:{mins:02}:{secs:02}") == total
    assert parse_duration(f"{days}-{hours}:{mins}:{secs}") == days * 86400 + total


@given(st.integers(0, 10**9), st.sampled_from("KMGT"), st.sampled_from(["", "B", "iB"]))
def test_a_size_is_read_back_as_it_was_spelled(count: int, power: str, end: str) -> None:
    size = count * 1024 ** ("KMGT".index(power) + 1)
    assert parse_size(f"{count}{power}{end}") == parse_size(f"{count} {power.lower()}{end}") == size


@given(st.text(max_size=12))
def test_another_text_is_none_and_never_an_error(text: str) -> None:
    found = parse_quantity(text, MINUTES)
    assert found is None or (found >= 0 and any(char.isdigit() for char in text))


def test_a_number_alone_counts_in_the_unit_of_its_key() -> None:
    assert parse_quantity("90", SECONDS) == parse_quantity("90", MINUTES) == 90
    assert parse_quantity("2h", MINUTES) == 120 and parse_quantity("90s", MINUTES) == Fraction(3, 2)
    assert parse_quantity("64", GIB) == parse_quantity("65536M", GIB) == 64


@pytest.mark.parametrize(
    ("written", "minutes"),
    [("90", 90), ("1:30:00", 90), ("2h", 120), ("1d12h", 2160), ('"1-12:00:00"', 2160)],
)
def test_a_conf_takes_times_with_their_unit(written: str, minutes: int) -> None:
    text = f"cluster: {{walltime_min: {written}}}\n"
    text = text if '"' in written else f"cluster:\n  walltime_min: {written}\n"
    assert parse_more(text).cluster.walltime_min == minutes


def test_each_time_and_size_of_a_conf_takes_units() -> None:
    conf = parse_more("""\
cluster:
  grace_s: 1m
  join_s: 1h
  finish_s: 0s
  log_limit_mb: 2G
  nodes: [{group: a, memory_gb: 1T}, {group: b, memory_gb: 0}]
""")
    assert (conf.cluster.grace_s, conf.cluster.join_s, conf.cluster.finish_s) == (60, 3600, 0)
    assert conf.cluster.log_limit_mb == 2048
    assert [group.memory_gb for group in conf.cluster.nodes] == [1024, 0]


@pytest.mark.parametrize(
    ("key", "written", "says"),
    [
        ("walltime_min", "12:30", "could be hours or minutes: write 12:30:00, or 12m30s"),
        ("walltime_min", "90s", "must be a whole number of minutes"),
        ("walltime_min", "soon", "or a time such as 90s, 30m, 2h, 1d12h or 1:30:00"),
        ("walltime_min", "2h 1d", "must be a whole number of minutes, or a time such as"),
        ("walltime_min", '"90"', "must be a whole number or null, without quotes"),
        ("grace_s", "-5m", "must be a whole number of seconds, or a time"),
        ("log_limit_mb", "64Q", "or a size such as 512M, 64G or 1T"),
        ("log_limit_mb", "64K", "must be a whole number of MiB"),
    ],
)
def test_what_is_no_time_or_size_is_refused_with_its_line(
    key: str, written: str, says: str
) -> None:
    (problem,) = find_more(f"cluster:\n  {key}: {written}\n")
    assert problem.startswith(f"conf.yaml:4: cluster.{key} = ") and says in problem


def test_arguments_in_one_text_are_split_as_a_shell_would() -> None:
    def read(written: str) -> tuple[str, ...]:
        return parse(f"name: run\nprogram:\n  script: a.py\n  args: {written}\n").program.args

    assert read("--lr 1e-4 --name 'my run' $HOME") == ("--lr", "1e-4", "--name", "my run", "$HOME")
    assert read('"--steps ${train.steps} # two"') == ("--steps", "${train.steps}", "#", "two")
    assert read('""') == ()


def test_arguments_with_an_open_quote_are_refused() -> None:
    assert find_problems("name: run\nprogram:\n  script: a.py\n  args: --name 'my\n") == [
        "conf.yaml:4: program.args = --name 'my: cannot be split as a shell would: No closing "
        "quotation"
    ]


def test_a_flag_takes_its_unit_or_a_time() -> None:
    @click.command()
    @click.option("--for", "hours", type=Duration(HOURS, is_open=True), default=1)
    @click.option("--wait", type=Duration(whole=True), default=60)
    @click.option("--every", type=Duration(least=0.2), default=1.0)
    def command(hours: float, wait: int, every: float) -> None:
        click.echo(f"{hours:g} {wait}")

    def run(*words: str) -> str:
        return CliRunner().invoke(command, words).output.strip()

    assert run() == "1 60" and run("--for", "90m", "--wait", "1:00:01") == "1.5 3601"
    assert run("--wait", "0.2") == "1 1"
    assert run("--every", "0.2") == "1 60"
    assert "give at least 0.2 seconds" in run("--every", "0.1")
    assert "give more than 0 hours" in run("--for", "0")
    assert "give a number of seconds, or a time such as" in run("--wait", "a while")
