"""`vjob doctor --nodes`: measure the nodes of a conf by a run on all of them, and find the slow
ones.

    conf ─► a run of probe.py on its nodes ─► probe.json ─► judge ─► diagnoses

A figure is compared only with figures of equal parts: GPUs of one name, nodes of one group, links
between the same groups. Among three or more equal parts, a slow one is named. Of two that differ,
neither is named, since it is not known which one is slow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import varuna_core
from varuna_core.facts.remedy import Action, Context, Remedy, Target, render_all
from varuna_core.records.files import read_json
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.api.executor import VjobExecutor
from vjob.jobs.conf.schema import (
    JobConf,
    Morph,
    Notify,
    OnHang,
    Parallel,
    Profile,
    Program,
    Track,
    Train,
)
from vjob.jobs.errors import VjobError
from vjob.jobs.planning.resolve_auto import Resolved
from vjob.jobs.schedulers.choose import LOCAL
from vjob.jobs.schedulers.diagnosis import Diagnosis

PROBE = Path(varuna_core.__file__).parent / "profiling/probe.py"
"""Path of the probe, a program that runs on the nodes by itself and is never imported by this
module."""
WALLTIME_MIN = 10
LEAST_EQUALS = 3


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A quantity that is measured on each node, GPU or link."""

    key: str
    name: str
    unit: str
    share: float
    """A figure is an outlier if it is less than this fraction of the median of equal parts; for a
    time, if the median is less than this fraction of the time."""
    is_time: bool = False
    """True for a time, for which less is better."""


OF_GPUS = (
    Measure(key="tflop_s", name="matrix product", unit="TFLOP/s", share=0.85),
    Measure(key="gpu_gb_s", name="GPU memory", unit="GB/s", share=0.85),
)
OF_NODES = (
    Measure(key="cpu_mb_s", name="processor", unit="MB/s hashed", share=0.7),
    Measure(key="memory_mb_s", name="memory", unit="MB/s copied", share=0.6),
    Measure(key="run_disk_mb_s", name="disk of the run", unit="MB/s", share=0.4),
    Measure(key="node_disk_mb_s", name="disk of the node", unit="MB/s", share=0.4),
)
OF_LINKS = (
    Measure(key="link_mb_s", name="links", unit="MB/s by TCP", share=0.5),
    Measure(key="us", name="answer over links", unit="us by TCP", share=0.33, is_time=True),
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure, and what it was measured on."""

    place: str
    """Name of the part that was measured, such as `n3`, `GPU 2 of n3`, `n3 to n4`."""
    nodes: tuple[str, ...]
    equals: str
    """Name that all parts share with which the figure is compared, such as the name of a GPU."""
    value: float


def examine_nodes(resolved: Resolved, say: Callable[[str], object]) -> list[Diagnosis]:
    """Run the probe on all nodes of a conf and judge what it measured. Ctrl-C cancels the run."""
    conf = build_probe(resolved.conf)
    chosen = replace(resolved.chosen, conf=conf, prediction=None, layouts=None, layout_steps=None)
    job = VjobExecutor(conf.log_folder).submit_conf(replace(resolved, chosen=chosen))
    say(f"job {job.job_id}, in {job.folder}; it waits for the nodes and then takes about a minute")
    try:
        job.wait()
    except KeyboardInterrupt:
        job.cancel(now=True)
        raise
    results = read_results(RunFolder(job.folder))
    if results is None:
        raise VjobError(
            f"the run ended without a result, {job.status().verdict.reason}: "
            f"vjob logs {job.job_id} --errors"
        )
    found = judge(results)
    if conf.cluster.scheduler == LOCAL and len({one.get("node") for one in results}) > 1:
        text = "these nodes are processes on one machine and share its hardware"
        found.insert(0, Diagnosis(name="nodes", status="note", text=text))
    return found


def build_probe(conf: JobConf) -> JobConf:
    """Return the conf of the probe: the same nodes and container, without the training."""
    python = conf.program.python
    if python is None:
        python = "python3" if conf.container.image is not None else sys.executable
    command = (python, "-c", PROBE.read_text(encoding="utf-8"))
    cluster = conf.cluster
    shorter = min(cluster.walltime_min or WALLTIME_MIN, WALLTIME_MIN)
    return replace(
        conf,
        name=f"doctor-{conf.name}"[:64],
        program=Program(kind="command", command=command, launch="torchrun", snapshot="none"),
        model=None,
        data=None,
        train=Train(),
        parallel=Parallel(),
        progress=None,
        profile=Profile(timeline=False),
        morph=Morph(),
        on_hang=OnHang(),
        notify=Notify(),
        track=Track(),
        cluster=replace(
            cluster, walltime_min=shorter, requeue=False, restarts=None, signal_before_end_s=0
        ),
    )


def read_results(run: RunFolder) -> list[Mapping[str, Any]] | None:
    """Read what all ranks measured; None if the run ended before it wrote the results."""
    attempts = run.attempts()
    found = read_json(attempts[-1].path / "probe.json") if attempts else None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        return None
    return found


def judge(results: Sequence[Mapping[str, Any]]) -> list[Diagnosis]:
    """Compare the results that the probe measured on each node. Return a diagnosis for each thing
    that was measured, and one more for each node that is slower than nodes like it."""
    found = list(_judge_errors(results))
    for measures, collect in (
        (OF_GPUS, partial(_list_parts, like="gpu")),
        (OF_NODES, partial(_list_parts, like="group")),
        (OF_LINKS, _list_links),
    ):
        for measure in measures:
            by_kind: dict[str, list[Figure]] = {}
            for figure in collect(results, measure.key):
                by_kind.setdefault(figure.equals, []).append(figure)
            for kind, figures in by_kind.items():
                found += _judge_equals(measure, kind, figures)
    return found


def _judge_errors(results: Sequence[Mapping[str, Any]]) -> Iterator[Diagnosis]:
    reasons: dict[str, list[str]] = {}
    for one in results:
        if "gpu_error" in one:
            text = f"rank {one['rank']} of {one['host']}: {one['gpu_error']}"
            yield Diagnosis(name="gpu", status="fail", text=text, remedy=_leave_out(one["host"]))
        elif "no_gpu" in one:
            reasons.setdefault(str(one["no_gpu"]), []).append(str(one["host"]))
        for link in one.get("links", ()):
            if "error" in link:
                names = _name_nodes(results)
                text = f"{names.get(link['a'])} to {names.get(link['b'])}: {link['error']}"
                remedy = "open the ports between the nodes, or set cluster.nodes[].interface"
                yield Diagnosis(name="links", status="fail", text=text, remedy=remedy)
    for reason, hosts in reasons.items():
        text = f"no GPU measured on {', '.join(dict.fromkeys(hosts[:3]))}: {reason}"
        if len(set(hosts)) > 3:
            text = f"no GPU measured on {len(set(hosts))} nodes: {reason}"
        yield Diagnosis(name="gpus", status="note", text=text)


def _judge_equals(measure: Measure, kind: str, figures: Sequence[Figure]) -> Iterator[Diagnosis]:
    """Yield a diagnosis with the range of the figures of equal parts, and one for each slow
    part."""
    name, values = measure.name, [one.value for one in figures]
    if len(figures) == 1:
        text = f"{figures[0].place}: {values[0]:,.0f} {measure.unit}, the only figure of its kind"
        yield Diagnosis(name=name, status="note", text=text)
        return
    middle, low, high = median(values), min(values), max(values)
    slow = [one for one in figures if _compute_share(measure, one.value, middle) < measure.share]
    of = f"{len(figures)} of {kind}" if kind else str(len(figures))
    spread = f"{of}: {low:,.0f} to {high:,.0f} {measure.unit}, median {middle:,.0f}"
    if len(figures) < LEAST_EQUALS:
        best, worst = (low, high) if measure.is_time else (high, low)
        differ = _compute_share(measure, worst, best) < measure.share
        doubt = "; the two differ, but which is slow is unknown" if differ else ""
        yield Diagnosis(name=name, status="note" if differ else "ok", text=f"{spread}{doubt}")
        return
    yield Diagnosis(name=name, status="ok", text=spread)
    for one in _blame(slow, figures):
        share = one.value / middle
        text = f"{one.place}: {one.value:,.0f} {measure.unit}, {share:.2f} of the median"
        remedy = _leave_out(one.nodes[0]) if len(one.nodes) == 1 else "ask an admin to check it"
        yield Diagnosis(name=name, status="warn", text=text, remedy=remedy)


def _blame(slow: Sequence[Figure], figures: Sequence[Figure]) -> list[Figure]:
    """Return the slow figures. If all links of a node are slow, one figure that names the node
    replaces them."""
    if not slow or len(slow[0].nodes) == 1:
        return list(slow)
    left = list(slow)
    found = []
    for node in dict.fromkeys(node for one in slow for node in one.nodes):
        own = [one for one in figures if node in one.nodes]
        if len(own) > 1 and all(one in left for one in own):
            worst = min(own, key=lambda one: one.value)
            found.append(replace(worst, place=f"all {len(own)} links of {node}", nodes=(node,)))
            left = [one for one in left if one not in own]
    return [*found, *left]


def _compute_share(measure: Measure, value: float, middle: float) -> float:
    good, bad = (middle, value) if measure.is_time else (value, middle)
    return good / bad if bad else 1.0


def _leave_out(host: str) -> str:
    remedies = (Remedy(Action.EXCLUDE, Target.NODE, host), Remedy(Action.TELL_ADMIN))
    return render_all(remedies, Context.CONF)


def _name_nodes(results: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    return {one["node"]: str(one["host"]) for one in results if "node" in one}


def _list_parts(results: Sequence[Mapping[str, Any]], key: str, like: str) -> Iterator[Figure]:
    """Yield the figures of nodes or GPUs; those with an equal value of `like` are compared."""
    for one in results:
        if isinstance(one.get(key), (int, float)):
            host, equals = str(one["host"]), str(one.get(like, ""))
            place = f"GPU {one.get('index')} of {host}" if like == "gpu" else host
            yield Figure(place=place, nodes=(host,), equals=equals, value=float(one[key]))


def _list_links(results: Sequence[Mapping[str, Any]], key: str) -> Iterator[Figure]:
    hosts = _name_nodes(results)
    groups = {one["node"]: str(one.get("group", "")) for one in results if "node" in one}
    for one in results:
        for link in one.get("links", ()):
            if isinstance(link.get(key), (int, float)):
                ends = (hosts.get(link["a"], "?"), hosts.get(link["b"], "?"))
                kinds = sorted({groups.get(link["a"], ""), groups.get(link["b"], "")})
                place = f"{ends[0]} to {ends[1]}"
                value = float(link[key])
                yield Figure(place=place, nodes=ends, equals=" and ".join(kinds), value=value)
