"""Starts of the lab's daemons, each with its sign of readiness.

It refuses to wait blindly: each start ends at a sign of life or fails with the end of the log.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.cluster import config
from tests.cluster.network import enter
from tests.cluster.processes import PATH, is_alive, read_record, run, start_daemon, wait_for
from tests.cluster.record import LabPaths
from tests.cluster.requirements import find_program
from tests.cluster.shape import LabError, Shape

ACCOUNTING_DAEMONS = ("mariadbd", "slurmdbd")
START_TIMEOUT_S = 60

# Runs inside the node's network: own host name, own /etc/hosts, own local folder, maybe files over
# the network (files.py), then slurmd.
_NODE_SCRIPT = """
set -eu
hostname "$1"
mount --bind "$2" /etc/hosts
mount --bind "$3" "$4"
[ ! -x "$6" ] || "$6"
exec "$5" -D -N "$1"
"""


def write_files(shape: Shape, paths: LabPaths, *, host_name: str, accounting: bool) -> None:
    """Folders, configuration, key and fake GPUs."""
    for name in ("pids", "netns", "etc", "log", "dev", "local", "nodes", "munge", "controller"):
        (paths.folder / name).mkdir(mode=0o755, exist_ok=True)
    for node in shape.nodes:
        for name in ("spool", "local"):
            (paths.node(node) / name).mkdir(mode=0o755, parents=True)
    write_slurm_conf(shape, paths, host_name=host_name, accounting=accounting)
    etc = paths.slurm_conf.parent
    (etc / "gres.conf").write_text(config.render_gres_conf(shape, paths))
    (etc / "cgroup.conf").write_text(config.render_cgroup_conf())
    if plugin := os.environ.get("VJOB_LAB_PYXIS"):
        _write_pyxis(shape, paths, plugin)
    paths.hosts.write_text(config.render_hosts(shape, host_name=host_name))
    _write_secret(paths.munge_key, secrets.token_bytes(128))
    for number in range(max(group.num_gpus for group in shape.groups)):
        os.mknod(paths.device(number), 0o666 | stat.S_IFCHR, os.makedev(1, 3))


def _write_pyxis(shape: Shape, paths: LabPaths, plugin: str) -> None:
    """srun and slurmd load the plugin, and find an enroot that keeps to its node."""
    enroot = find_program("enroot")
    if enroot is None or not Path(plugin).is_file():
        missing = "enroot is not installed" if enroot is None else f"{plugin} is not a file"
        raise LabError(f"VJOB_LAB_PYXIS asks for pyxis, but {missing}")
    paths.plugstack_conf.write_text(config.render_plugstack_conf(paths, plugin))
    paths.tools.mkdir()
    wrapper = paths.tools / "enroot"
    wrapper.write_text(config.render_enroot_wrapper(paths, enroot))
    wrapper.chmod(0o755)
    for node in shape.nodes:
        for name in config.ENROOT_FOLDERS:
            (paths.node(node) / "local" / "enroot" / name.lower()).mkdir(parents=True)


def write_slurm_conf(shape: Shape, paths: LabPaths, *, host_name: str, accounting: bool) -> None:
    text = config.render_slurm_conf(shape, paths, host_name=host_name, accounting=accounting)
    temporary = paths.slurm_conf.with_suffix(".new")
    temporary.write_text(text)
    os.replace(temporary, paths.slurm_conf)


def _write_secret(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as sink:
        sink.write(content)


def is_running(paths: LabPaths, name: str) -> bool:
    try:
        return is_alive(read_record(paths.pid_record(name)))
    except FileNotFoundError:
        return False


def list_pid_records(paths: LabPaths) -> list[Path]:
    """The pid records of all daemons ever started in this lab, running or not."""
    folder = paths.pid_record("any").parent
    records = folder.iterdir() if folder.exists() else []
    return sorted(record for record in records if record.suffix != ".new")


def start(
    paths: LabPaths,
    name: str,
    command: list[str],
    ready: Callable[[], bool],
    more_env: Mapping[str, str] | None = None,
) -> None:
    program = find_program(command[0])
    assert program, f"{command[0]}: explain_missing() was to find this"
    env = {"SLURM_CONF": str(paths.slurm_conf), **(more_env or {})}
    start_daemon(
        [program, *command[1:]], record=paths.pid_record(name), output=paths.output(name), env=env
    )
    with _explain(paths, name):
        wait_for(lambda: ready() or not is_running(paths, name), START_TIMEOUT_S, f"{name} ready")
        if not is_running(paths, name):
            raise LabError(f"{name} ended while it started")


@contextlib.contextmanager
def _explain(paths: LabPaths, name: str) -> Iterator[None]:
    try:
        yield
    except LabError as error:
        tail = paths.output(name).read_text(errors="replace").splitlines()[-8:]
        raise LabError("\n  ".join([f"{error}; it said last:", *tail])) from error


def start_munged(paths: LabPaths) -> None:
    command = ["munged", "--foreground", f"--socket={paths.munge_socket}"]
    command += [f"--key-file={paths.munge_key}", f"--pid-file={paths.folder}/munge/pid"]
    command += [f"--seed-file={paths.folder}/munge/seed"]
    start(paths, "munged", command, paths.munge_socket.exists)


def start_database(paths: LabPaths) -> None:
    """A database server of our own: own data, own port, small buffers, no fsync."""
    password = secrets.token_hex(16)
    etc = paths.slurm_conf.parent
    _write_secret(etc / "database.sql", config.render_database_setup(password=password).encode())
    _write_secret(
        etc / "slurmdbd.conf", config.render_slurmdbd_conf(paths, password=password).encode()
    )
    small = ["--innodb-log-file-size=8M", "--innodb-buffer-pool-size=32M"]
    small += ["--innodb-flush-log-at-trx-commit=0"]
    install = ["mariadb-install-db", "--no-defaults", f"--datadir={paths.database}"]
    install += ["--user=root", "--auth-root-authentication-method=normal", "--skip-test-db"]
    run([*install, *small])
    command = ["mariadbd", "--no-defaults", f"--datadir={paths.database}", "--user=root"]
    command += ["--bind-address=127.0.0.1", f"--port={config.DATABASE_PORT}", *small]
    command += [f"--socket={paths.database}/socket", f"--pid-file={paths.database}/pid"]
    command += [f"--init-file={etc}/database.sql"]
    output = paths.output("mariadbd")
    start(paths, "mariadbd", command, lambda: "ready for connections" in output.read_text())


def start_slurmdbd(paths: LabPaths) -> None:
    output = paths.output("slurmdbd")
    start(paths, "slurmdbd", ["slurmdbd", "-D"], lambda: "started" in output.read_text())


def start_slurmctld(paths: LabPaths) -> None:
    env = {"SLURM_CONF": str(paths.slurm_conf)}

    def answers() -> bool:
        return " is UP" in run(["scontrol", "ping"], env=env, check=False).stdout

    start(paths, "slurmctld", ["slurmctld", "-D"], answers)


def start_slurmd(node: str, paths: LabPaths) -> None:
    """Returns when slurmd runs; that the node is idle is the controller's to say."""
    slurmd = find_program("slurmd")
    assert slurmd, "explain_missing() was to find this"
    script = ["sh", "-c", _NODE_SCRIPT, "node", node, str(paths.hosts)]
    script += [str(paths.node(node) / "local"), str(paths.local), slurmd]
    script += [str(paths.mount_script)]
    command = enter(paths.namespace(node), "unshare", "--uts", "--mount", *script)
    env = {"PATH": f"{paths.tools}:{PATH}"} if paths.tools.exists() else {}
    start(paths, node, command, lambda: True, env)
