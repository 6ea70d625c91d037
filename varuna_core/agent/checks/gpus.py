"""Compare the GPUs that the ranks of this node will see with those that the plan asks for."""

from __future__ import annotations

import re
from collections.abc import Sequence

from varuna_core.agent.gpu.accelerator import count_visible
from varuna_core.agent.setup.site import CheckResult, Site
from varuna_core.facts.known import NotKnown
from varuna_core.records.nodes import FAIL, OK, WARN
from varuna_core.records.plan import Plan


def check_gpus(site: Site) -> list[CheckResult]:
    group = site.node.group
    site.facts.gpus = 0
    if group.gpus == 0 and group.devices is None:
        return []
    counted = count_visible(site.accelerator, site.env)
    if isinstance(counted, NotKnown):
        return [CheckResult(FAIL if group.gpus else WARN, counted.reason)]
    if group.gpus == 0 and counted.value == 0:  # a conf with devices alone, tried without GPUs
        return [
            CheckResult(
                WARN, f"no GPU was found ({counted.evidence[0].source}), but the plan lists some"
            )
        ]
    count, how = counted.value, counted.evidence[0].source
    needed = group.gpus
    if group.devices is not None:
        out = [index for index in group.devices if index >= count]
        if out:
            return [
                CheckResult(FAIL, f"the plan lists device {out[0]}, but only {count} exist ({how})")
            ]
        needed = len(group.devices)
        site.facts.gpus = needed
    else:
        site.facts.gpus = count
    if count < needed:
        return [CheckResult(FAIL, f"{count} seen ({how}), but the plan needs {needed} per node")]
    other = (
        [] if group.gpu_type is not None else check_kind(site.plan, site.accelerator.list_models())
    )
    return [CheckResult(OK, f"{count} seen ({how}), {needed} used"), *other]


def check_kind(plan: Plan, models: Sequence[str]) -> list[CheckResult]:
    """Warn about GPUs of another model than the layout was planned for."""
    planned = None if plan.prediction is None else plan.prediction.gpu
    if planned is None:
        return []
    others = sorted({model for model in models if not is_called(planned, model)})
    if not others:
        return []
    text = (
        f"{', '.join(others)}, but the layout was planned for {planned}, which is kept, for lack "
        "of a profile for a new plan: profile these nodes, or name the type in cluster.nodes"
    )
    return [CheckResult(WARN, text)]


def is_called(planned: str, model: str) -> bool:
    """Return True if a profile's `A100-40` may be the driver's `NVIDIA A100-SXM4-40GB`.

    The memory sizes are compared only if the driver's name has one.
    """
    words = re.findall(r"[a-z0-9]+", model.lower())
    known = {*words, *(words[i] + words[i + 1] for i in range(len(words) - 1))}
    sizes = {word[:-2] for word in words if re.fullmatch(r"\d+gb", word)}
    for word in re.findall(r"[a-z0-9]+", planned.lower()):
        if word.isdecimal() and word not in known:
            if sizes and word not in sizes:
                return False
        elif word not in known:
            return False
    return True
