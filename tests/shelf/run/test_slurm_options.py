"""Slurm's options as the conf's keys: spellings of values, counts of nodes and ranks."""

from __future__ import annotations

from typing import Any

import pytest

from vjob.jobs.errors import InputError
from vjob.shelf.run.slurm_options import OPTIONS, build_cluster, find_asked


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("2:00:00", 120),
        ("1-0", 1440),
        ("1-12", 2160),
        ("1-12:30", 2190),
        ("1-0:0:1", 1441),
        ("12:30", 13),
        ("0:30", 1),
        ("2h", 120),
        ("90s", 2),
        ("1d12h", 2160),
    ],
)
def test_a_time_is_slurms_or_has_a_unit(text: str, minutes: int) -> None:
    assert build_cluster({"time": text}) == {"walltime_min": minutes}


@pytest.mark.parametrize(
    ("given", "group"),
    [
        ({"nodes": "2"}, {"count": 2}),
        ({"partition": "gpu,spare"}, {"queue": "gpu,spare"}),
        ({"ntasks": "4"}, {"ranks": 4}),
        ({"ntasks": "8", "nodes": "2"}, {"count": 2, "ranks": 4}),
        ({"ntasks": "8", "ntasks-per-node": "4"}, {"count": 2, "ranks": 4}),
        ({"ntasks-per-node": "4", "nodes": "3"}, {"count": 3, "ranks": 4}),
        ({"gpus": "4"}, {"gpus": 4}),
        ({"gpus": "a100:8", "nodes": "2"}, {"count": 2, "gpus": "a100:4"}),
        ({"gpus-per-node": "a100:4"}, {"gpus": "a100:4"}),
        ({"gres": "gpu"}, {"gpus": 1}),
        ({"gres": "gpu:2"}, {"gpus": 2}),
        ({"gres": "gpu:a100:4", "gpus-per-node": "4"}, {"gpus": "a100:4"}),
        ({"gpus-per-task": "1", "ntasks-per-node": "4"}, {"gpus": 4}),
        ({"ntasks": "1", "gpus": "4"}, {"gpus": 4, "ranks": 1}),
        ({"ntasks": "4", "gpus": "4"}, {"gpus": 4}),
        ({"cpus-per-task": "8", "ntasks": "4"}, {"ranks": 4, "cpus": 32}),
        ({"cpus-per-task": "8", "gpus": "4"}, {"gpus": 4, "cpus": 32}),
        ({"cpus-per-task": "8"}, {"cpus": 8}),
        ({"mem": "64G"}, {"memory_gb": 64}),
        ({"mem": "65536"}, {"memory_gb": 64}),
        ({"mem": "1T"}, {"memory_gb": 1024}),
        ({"mem": "0"}, {"memory_gb": 0}),
    ],
    ids=str,
)
def test_counts_are_by_node(given: dict[str, str], group: dict[str, Any]) -> None:
    assert build_cluster(given) == {"nodes": [{"group": "all", **group}]}


def test_other_options_have_their_keys_or_are_given_to_sbatch() -> None:
    given = {"account": "ml", "qos": "high", "exclude": "n1,n[4-7]", "requeue": True}
    passed = {"constraint": "ib&a100", "nodelist": "n[1-2]", "exclusive": True}
    assert build_cluster({**given, **passed}) == {
        "account": "ml",
        "qos": "high",
        "exclude": ["n1", "n[4-7]"],
        "requeue": True,
        "sbatch": passed,
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"time": "soon"}, "--time soon: give a time such as 2h, 90 (minutes) or 2:00:00"),
        ({"nodes": "2-4"}, "--nodes 2-4: give one number of nodes, not a range"),
        ({"ntasks": "0"}, "--ntasks 0: give a number of ranks"),
        ({"ntasks": "5", "nodes": "2"}, "--ntasks 5 cannot be divided by 2 nodes"),
        ({"ntasks": "4", "nodes": "2", "ntasks-per-node": "4"}, "remove one of them"),
        ({"gpus": "5", "nodes": "2"}, "--gpus 5 cannot be divided by 2 nodes"),
        ({"gpus": "a100:4", "gres": "gpu:h100:4"}, "remove one of them"),
        ({"gres": "gpu:2", "gpus-per-node": "4"}, "remove one of them"),
        ({"gres": "license:2"}, "set other resources with --set"),
        ({"gpus-per-task": "1"}, "--gpus-per-task needs the ranks"),
        ({"ntasks": "16", "gpus-per-node": "4"}, "give the number of nodes with -N"),
        ({"mem": "lots"}, "--mem lots: give a size such as 64G"),
    ],
    ids=str,
)
def test_a_value_without_a_place_in_the_conf_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(InputError) as refused:
        build_cluster(given)
    assert said in str(refused.value)


def test_options_that_count_here_too_do_not_ask_for_slurm() -> None:
    assert find_asked({"ntasks": "2", "gpus": "2", "job-name": "x"}) == []
    assert find_asked({"ntasks": "2", "partition": "gpu"}) == ["--partition"]
    shorts = [option.short for option in OPTIONS if option.short]
    assert len(shorts) == len(set(shorts)) and "d" not in shorts and "m" not in shorts
