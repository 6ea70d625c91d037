"""A container of an AMD node, with stand-ins for the devices and the driver's files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.containers.real import Tools
from tests.containers.test_behaviour import CONF
from tests.hardware.stand_ins import make_amd, write_files

MOUNTS = """
cd {node}
mkdir -p real shown/dri
for name in kfd dri/renderD128; do
  [ -e shown/$name ] || mknod -m 666 shown/$name c 1 3
done
mount --rbind /dev real
mount -t overlay stand-ins -o lowerdir=shown:real /dev
for name in pts shm; do mount --rbind real/$name /dev/$name; done
mount --bind sys/class /sys/class; mount --bind sys/bus /sys/bus
cd -; exec "$@"
"""
LOOK = """
import json, os
names = [*os.listdir("/dev"), *("dri/" + one for one in os.listdir("/dev/dri"))]
visible = {key: value for key, value in os.environ.items() if "VISIBLE" in key}
print(json.dumps({"rank": os.environ["RANK"], "devices": sorted(
    one for one in names if one.startswith(("kfd", "dri/", "nvidia"))), "visible": visible}))
"""


@pytest.mark.podman
@pytest.mark.skipif(os.getuid() != 0, reason="only root makes device files and mounts over /sys")
def test_ranks_of_an_amd_node_get_its_devices(
    tmp_path: Path, image: Path, scratch: Path, tools: Tools
) -> None:
    tools.need("podman")
    write_files(tmp_path / "node", make_amd(2))
    (tmp_path / "look.py").write_text(LOOK)
    conf = CONF.format(
        script=json.dumps(str(tmp_path / "look.py")), args="[]", runtime="podman",
        image=json.dumps(str(image)), scratch=json.dumps(str(scratch)), more="",
    )  # fmt: skip
    group = "count: 1, devices: [0, 1]"
    (tmp_path / "conf.yaml").write_text(conf.replace("count: 2, ranks: 2", group))
    mounts = ["unshare", "-m", "bash", "-ec", MOUNTS.format(node=tmp_path / "node"), "sh"]
    done = subprocess.run(
        [*mounts, sys.executable, "-m", "vjob", "submit", "conf.yaml", "--follow"],
        cwd=tmp_path, env={**os.environ, "PATH": tools.path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    rows = [json.loads(one) for one in re.findall(r"\| \d: (\{.*\})$", done.stdout, re.M)]
    assert done.returncode == 0, done
    assert sorted(rows, key=lambda row: str(row["rank"])) == [
        {"rank": rank, "devices": ["dri/renderD128", "kfd"],
         "visible": {"ROCR_VISIBLE_DEVICES": "0,1"}}
        for rank in "01"
    ]  # fmt: skip
