"""A shared folder that each node mounts over its own link: cutting the link cuts the files too.

        the machine                                   node a1 (own network and mounts)
    LAB/shared, a plain folder ◄── sshd on the bridge ══ eth0 ══ sshfs on LAB/shared

The kernel here has no NFS client, so sshfs stands in for one, set up as a hard NFS mount is: a call
waits for as long as the link is cut and goes on when it is back, a written file is flushed when it
is closed, attributes and names are cached for seconds. It refuses keys and ports not its own.

What differs from NFS (sshfs 3.7, OpenSSH 9.2):

- `flock` holds within a node alone; NFS 4 locks hold across nodes, and a cut-off node loses its own
  after the lease. Here a second node gets the lock at once.
- Every error but a few is EPERM: a full disk, and a hard link onto a name that another node made in
  the same moment. So the disk is not filled here, and missing names are never cached (an NFS client
  may deny a new file for a minute), which makes that moment a millisecond.
- `st_nlink` is always 1 and `st_ino` the client's own.
- One connection for all: after a cut nothing is asked twice, so no answer gets lost.
"""

import contextlib
import socket
from pathlib import Path

from tests.cluster import processes
from tests.cluster.network import enter
from tests.cluster.processes import run, wait_for
from tests.cluster.record import LabPaths
from tests.cluster.requirements import find_program
from tests.cluster.shape import Shape

FILES_PORT = 27820
DAEMON = "sshd"
CACHE_S = 3
"""As NFS has it at the least (acregmin); a folder's attributes 30 s and more there."""
FILES_PACKAGES = ("sshfs", "openssh-server")
_PROGRAMS = ("sshfs", "sshd", "ssh-keygen", "fusermount3")

_SSHD_CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {etc}/ssh_host_key
AuthorizedKeysFile {etc}/ssh_key.pub
PidFile none
# Of root, by key alone; the key lies in the lab's folder.
PermitRootLogin forced-commands-only
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
# A node that is cut off comes back to the session it has, however long it took.
TCPKeepAlive no
ClientAliveInterval 0
MaxStartups 100
Subsystem sftp internal-sftp
ForceCommand internal-sftp -u 0077
"""

_MOUNT_SCRIPT = """\
#!/bin/sh
# Run in a node's namespaces, before its slurmd: mounts the shared folder over the node's link.
set -eu
# After a cut the link is tried again every two seconds (Linux 6.15 and later), and never given up
# before eight minutes.
rto=/proc/sys/net/ipv4/tcp_rto_max_ms
[ ! -e "$rto" ] || echo 2000 >"$rto"
echo 255 >/proc/sys/net/ipv4/tcp_retries2
exec {sshfs} -p {port} root@{address}:{shared} {shared} \\
  -o IdentityFile={etc}/ssh_key,UserKnownHostsFile={etc}/ssh_known_hosts \\
  -o StrictHostKeyChecking=yes,BatchMode=yes,TCPKeepAlive=no,ServerAliveInterval=0 \\
  -o attr_timeout={cache_s},entry_timeout={cache_s},dcache_timeout={cache_s},negative_timeout=0 \\
  -o allow_other,default_permissions
"""


def explain_no_files() -> str | None:
    """Why this machine cannot serve files to the nodes, in one line; None where it can."""
    missing = [name for name in _PROGRAMS if find_program(name) is None]
    if missing:
        return (
            f"files over a network need {', '.join(missing)}; "
            f"apt-get install --yes --no-install-recommends {' '.join(FILES_PACKAGES)}"
        )
    if not Path("/dev/fuse").exists():
        return "files over a network need /dev/fuse, which is not here"
    return None


def start_server(shape: Shape, paths: LabPaths) -> None:
    """Start an sshd of the lab's own, and lay the script down by which nodes mount."""
    from tests.cluster import daemons

    etc = paths.slurm_conf.parent
    paths.shared.mkdir(mode=0o755, exist_ok=True)
    for name in ("ssh_host_key", "ssh_key"):
        if not (etc / name).exists():
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", f"{etc / name}"])
    address = shape.controller_address
    key = (etc / "ssh_key.pub").read_text()
    (etc / "ssh_key.pub").write_text(
        key if key.startswith("command=") else f'command="internal-sftp" {key}'
    )
    host_key = " ".join((etc / "ssh_host_key.pub").read_text().split()[:2])
    (etc / "ssh_known_hosts").write_text(f"[{address}]:{FILES_PORT} {host_key}\n")
    config = etc / "sshd_config"
    config.write_text(_SSHD_CONFIG.format(port=FILES_PORT, address=address, etc=etc))
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd wants it, empty

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((address, FILES_PORT), 1):
            return True
        return False

    daemons.start(paths, DAEMON, ["sshd", "-D", "-e", "-f", f"{config}"], answers)
    script = _MOUNT_SCRIPT.format(
        sshfs=find_program("sshfs"),
        port=FILES_PORT,
        address=address,
        shared=paths.shared,
        etc=etc,
        cache_s=CACHE_S,
    )
    paths.mount_script.write_text(script)
    paths.mount_script.chmod(0o755)


def stop_server(paths: LabPaths) -> None:
    paths.mount_script.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        processes.end(processes.read_record(paths.pid_record(DAEMON)))
        paths.pid_record(DAEMON).unlink()


def mount(node: str, paths: LabPaths) -> None:
    """Mount in a node that runs already; one that starts later mounts before its slurmd."""
    run(_enter_mounts(node, paths, f"{paths.mount_script}"))
    wait_for(lambda: is_mounted(node, paths), 10, f"{node} has mounted {paths.shared}")


def unmount(node: str, paths: LabPaths) -> None:
    run(_enter_mounts(node, paths, "umount", "--lazy", f"{paths.shared}"), check=False)


def is_mounted(node: str, paths: LabPaths) -> bool:
    pid = processes.read_record(paths.pid_record(node)).pid
    lines = Path(f"/proc/{pid}/mounts").read_text().splitlines()
    return any(line.split()[1:3] == [f"{paths.shared}", "fuse.sshfs"] for line in lines)


def _enter_mounts(node: str, paths: LabPaths, *command: str) -> list[str]:
    pid = processes.read_record(paths.pid_record(node)).pid
    return enter(paths.namespace(node), "nsenter", f"--mount=/proc/{pid}/ns/mnt", *command)
