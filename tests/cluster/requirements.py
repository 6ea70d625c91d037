"""Requirements of a machine that hosts the lab, and the reason if this one cannot.

It exists so that tests skip with a reason a reader can act on. It refuses to install anything.
"""

import os
import platform
import shutil

from tests.cluster.processes import PATH, run

LAB_PACKAGES = ("slurm-wlm", "slurmdbd", "munge", "mariadb-server", "iproute2")
"""Debian packages; `python -m tests.cluster packages` prints them."""

_PROGRAM_PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "slurmdbd": "slurmdbd",
    "munged": "munge",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "ip": "iproute2",
    "tc": "iproute2",
}


def find_program(name: str) -> str | None:
    return shutil.which(name, path=PATH)


def explain_missing() -> str | None:
    """Why the lab cannot run here, in one line; None when it can."""
    if platform.system() != "Linux":
        return f"the Slurm lab needs Linux namespaces; this is {platform.system()}"
    if os.geteuid() != 0:
        return "the Slurm lab needs root (network namespaces, mknod); run the tests as root"
    missing = sorted({p for name, p in _PROGRAM_PACKAGES.items() if find_program(name) is None})
    if missing:
        return (
            f"the Slurm lab misses {', '.join(missing)}; "
            f"apt-get install --yes --no-install-recommends {' '.join(LAB_PACKAGES)}"
        )
    probe = ["unshare", "--net", "--uts", "--mount", "true"]
    result = run(probe, check=False)
    if result.returncode != 0:
        return (
            f"the Slurm lab may not make namespaces here ({result.stderr.strip()}); "
            "a container needs CAP_SYS_ADMIN and CAP_NET_ADMIN"
        )
    return None
