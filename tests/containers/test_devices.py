"""A rank in a container gets the device files of its own vendor, on nodes of each vendor.

apptainer and enroot show the node's own /dev, in which the job's control group closes the devices
of others; podman and docker make a /dev of their own, and get each device by an option.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.containers.request import make_request
from tests.varuna_core.agent.local_run import make_group, make_plan
from tests.varuna_core.agent.test_preflight import make_site
from varuna_core.agent.gpu.accelerator import NoAccelerator, list_accelerators
from varuna_core.agent.setup.container import fill_in
from vjob.containers.registry import RUNTIMES

VENDORS = {one.name: one for one in (*list_accelerators(), NoAccelerator())}
DEVICES = {
    ("podman", "nvidia"): ["--device=nvidia.com/gpu=all"],
    ("podman", "amd"): ["--device=/dev/kfd", "--device=/dev/dri"],
    ("podman", "intel"): ["--device=/dev/dri"],
    ("docker", "nvidia"): ["--gpus=all"],
    ("docker", "amd"): ["--device=/dev/kfd", "--device=/dev/dri"],
    ("docker", "intel"): ["--device=/dev/dri"],
    ("apptainer", "nvidia"): ["--nv"],
    ("apptainer", "amd"): ["--rocm"],
}
"""Options that show devices; a runtime and vendor without any have the node's /dev, or none."""
_OPTION = re.compile(r"--(?:device=|gpus=|nv$|rocm$)")


@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize("runtime", ["podman", "docker", "apptainer", "enroot"])
@pytest.mark.parametrize("gpus", [True, False])
def test_a_rank_gets_the_devices_of_its_own_vendor(
    runtime: str, vendor: str, gpus: bool, tmp_path: Path
) -> None:
    made = RUNTIMES[runtime]
    image = "docker.io/library/alpine" if runtime == "docker" else "/images/one.sqsh"
    request = make_request(image, tmp_path, gpus=gpus)
    if runtime == "docker":
        request = replace(request, kind=next(iter(made.kinds)))
    container = made().plan(request)
    site = replace(
        make_site(tmp_path, make_plan(make_group("a", 1, 1, gpus=int(gpus)))),
        container=container,
        accelerator=VENDORS[vendor],
    )
    every = [container.start, container.hold, *container.prepare]
    words = [fill_in(argv, site, 0) for argv in every]
    for argv in words:
        found = [word for word in argv if _OPTION.match(word)]
        assert found in ([], DEVICES.get((runtime, vendor), []) if gpus else [])
    shown = {word for argv in words for word in argv if _OPTION.match(word)}
    assert shown == set(DEVICES.get((runtime, vendor), []) if gpus else [])
