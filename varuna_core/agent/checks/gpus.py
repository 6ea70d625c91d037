"""Check of the GPUs that the ranks of this node will see, against what the plan asks for."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from varuna_core.agent.processes.process import run
from varuna_core.agent.setup.ranks import split_devices
from varuna_core.agent.setup.site import CheckResult, Site
from varuna_core.records.nodes import FAIL, OK, WARN
from varuna_core.records.plan import Plan

SMI_S = 20.0
DRIVER = Path("/proc/driver/nvidia/gpus")
"""A folder a GPU of the machine."""


def check_gpus(site: Site) -> list[CheckResult]:
    group = site.node.group
    if group.gpus == 0:
        site.facts.gpus = 0
        return []
    count, how = count_gpus(site.env.get("CUDA_VISIBLE_DEVICES"))
    if count is None:
        return [CheckResult(FAIL, how)]
    needed = group.gpus
    if group.devices is not None:
        out = [index for index in group.devices if index >= count]
        if out:
            return [
                CheckResult(FAIL, f"device {out[0]} of the plan, but only {count} seen ({how})")
            ]
        needed = len(group.devices)
        site.facts.gpus = needed
    else:
        site.facts.gpus = count
    if count < needed:
        return [CheckResult(FAIL, f"{count} seen ({how}), the plan has {needed} a node")]
    other = [] if group.gpu_type is not None else check_kind(site.plan, read_models(DRIVER))
    return [CheckResult(OK, f"{count} seen ({how}), {needed} used"), *other]


def check_kind(plan: Plan, models: Sequence[str]) -> list[CheckResult]:
    """Warn of GPUs other than planned for, where the conf names no type."""
    planned = None if plan.prediction is None else plan.prediction.gpu
    if planned is None:
        return []
    others = sorted({model for model in models if not is_called(planned, model)})
    if not others:
        return []
    text = (
        f"{', '.join(others)}, but the layout was planned for {planned}; it is kept, for here is "
        "no profile to plan again with: profile these nodes, or name the type in cluster.nodes"
    )
    return [CheckResult(WARN, text)]


def read_models(driver: Path) -> list[str]:
    """As the driver calls them; nothing where it does not tell."""
    found = []
    for path in sorted(driver.glob("*/information")):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        rows = (row.partition(":") for row in text.splitlines())
        found += [model.strip() for key, _, model in rows if key == "Model" and model.strip()]
    return found


def is_called(planned: str, model: str) -> bool:
    """True if a profile's `A100-40` may be the driver's `NVIDIA A100-SXM4-40GB`.

    Not every model tells its memory: where one does, it counts.
    """
    words = re.findall(r"[a-z0-9]+", model.lower())
    known = {*words, *(words[i] + words[i + 1] for i in range(len(words) - 1))}
    sizes = {word[:-2] for word in words if re.fullmatch(r"\d+gb", word)}
    for word in re.findall(r"[a-z0-9]+", planned.lower()):
        if word.isdigit() and word not in known:
            if sizes and word not in sizes:
                return False
        elif word not in known:
            return False
    return True


def count_gpus(visible: str | None) -> tuple[int | None, str]:
    """The count and where it comes from; None with the reason when nothing tells."""
    if visible is not None:
        return len(split_devices(visible)), f"CUDA_VISIBLE_DEVICES={visible}"
    program = shutil.which("nvidia-smi")
    if program is not None:
        result = run([program, "-L"], timeout_s=SMI_S)
        if result.code == 0:
            return len(re.findall(r"^GPU \d+:", result.out, re.MULTILINE)), "nvidia-smi -L"
        said = (result.err or result.out).strip().splitlines()[-1:] or ["no answer"]
        return None, f"nvidia-smi -L failed: {said[0]}"
    nodes = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return len(nodes), "/dev/nvidia*; no nvidia-smi in PATH"
