"""Command line of the lab: up, down, status, env, packages.

It exists so that a person can have the cluster that the tests use. Only this module prints.
"""

import argparse
import json
import logging
import shlex
import sys
import time

from tests.cluster.files import FILES_PACKAGES
from tests.cluster.lab import Lab
from tests.cluster.lifecycle import stop_lab
from tests.cluster.requirements import LAB_PACKAGES
from tests.cluster.shape import LabError


def main(arguments: list[str] | None = None) -> int:
    options = _build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        return int(options.run(options))
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted; `python -m tests.cluster down` removes what is left")
        return 1


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start the lab; fine when it is up")
    up.add_argument("--no-accounting", action="store_true", help="no database, no slurmdbd")
    up.add_argument(
        "--nodes",
        type=_parse_counts,
        default=(2, 4),
        metavar="A,B",
        help="nodes in group a and in group b (2,4)",
    )
    up.add_argument(
        "--files",
        choices=("sshfs",),
        help="nodes mount the lab's shared folder over their links (docs/lab.md)",
    )
    up.set_defaults(run=_up)
    commands.add_parser("down", help="stop and remove the lab").set_defaults(run=_down)
    status = commands.add_parser("status", help="what runs; exit code 1 when no lab is up")
    status.add_argument("--json", action="store_true")
    status.set_defaults(run=_status)
    commands.add_parser("env", help="shell lines to use the lab").set_defaults(run=_env)
    commands.add_parser("packages", help="Debian packages needed").set_defaults(run=_packages)
    return parser


def _parse_counts(text: str) -> tuple[int, int]:
    try:
        num_a, num_b = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: two numbers are wanted, as in 2,4") from None
    return num_a, num_b


def _up(options: argparse.Namespace) -> int:
    num_a, num_b = options.nodes
    accounting = not options.no_accounting
    print(f"lab: {num_a} + {num_b} nodes, accounting {'on' if accounting else 'off'}", flush=True)
    start = time.monotonic()
    lab = Lab.start(accounting, num_a=num_a, num_b=num_b)
    if lab.started_here:
        print(f"up in {time.monotonic() - start:.1f} s; logs in {lab.paths.folder / 'log'}")
    else:
        print("already up; nothing done")
    if options.files:
        lab.serve_files()
        print(f"  files over each node's link: {lab.paths.shared}")
    for group in lab.shape.groups:
        print(f"  queue {group.queue}: {', '.join(group.nodes)} ({group.gres} each)")
    print("  queue all (default): every node; queue low: every node, preempted by the others")
    print('use it:   eval "$(python -m tests.cluster env)"; sinfo; srun -N2 hostname')
    print("stop it:  python -m tests.cluster down")
    return 0


def _down(options: argparse.Namespace) -> int:
    print("down" if stop_lab() else "no lab is up; nothing done")
    return 0


def _status(options: argparse.Namespace) -> int:
    try:
        lab = Lab.attach()
    except LabError as error:
        print(json.dumps({"up": False}) if options.json else error)
        return 1
    states = lab.read_node_states()
    if options.json:
        nodes = {
            node: {"address": address, "state": states.get(node)}
            for node, address in lab.node_addresses.items()
        }
        env = lab.env
        print(json.dumps({"up": True, "folder": str(lab.paths.folder), "nodes": nodes, "env": env}))
        return 0
    print(f"up; folder {lab.paths.folder}; subnet {lab.shape.subnet}")
    for node, address in lab.node_addresses.items():
        print(f"  {node:4} {address:12} {states.get(node, 'unknown: no controller')}")
    return 0


def _env(options: argparse.Namespace) -> int:
    for name, value in Lab.attach().env.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def _packages(options: argparse.Namespace) -> int:
    print(" ".join((*LAB_PACKAGES, *FILES_PACKAGES)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
