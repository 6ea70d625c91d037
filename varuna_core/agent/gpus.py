"""How many GPUs the ranks of this node will see, against what the plan asks for."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from varuna_core.agent.process import run
from varuna_core.agent.ranks import split_devices
from varuna_core.agent.site import Finding, Site
from varuna_core.records.nodes import FAIL, OK

SMI_S = 20.0


def check_gpus(site: Site) -> list[Finding]:
    group = site.node.group
    if group.gpus == 0:
        site.facts.gpus = 0
        return []
    count, how = count_gpus(site.env.get("CUDA_VISIBLE_DEVICES"))
    if count is None:
        return [Finding(FAIL, how)]
    needed = group.gpus
    if group.devices is not None:
        out = [index for index in group.devices if index >= count]
        if out:
            return [Finding(FAIL, f"device {out[0]} of the plan, but only {count} seen ({how})")]
        needed = len(group.devices)
        site.facts.gpus = needed
    else:
        site.facts.gpus = count
    if count < needed:
        return [Finding(FAIL, f"{count} seen ({how}), the plan has {needed} a node")]
    return [Finding(OK, f"{count} seen ({how}), {needed} used")]


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
