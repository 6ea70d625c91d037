"""The `vjob container` commands: import, list and remove container images.

The work is done in jobs/images.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from varuna_core.records.files import locate_cache
from vjob.jobs.conf.quantities import DAYS
from vjob.jobs.errors import InputError, VjobError
from vjob.shelf.commands.arguments import (
    Duration,
    OrderedGroup,
    json_option,
    print_object,
)
from vjob.shelf.commands.terminal import say


class ContainerGroup(OrderedGroup):
    """Command group that says after Ctrl-C that nothing was left behind."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say("vjob: interrupted; unfinished files were removed", err=True)
            sys.exit(130)


@click.group(cls=ContainerGroup)
def container() -> None:
    """Fetch, list and remove container images.

    \b
    vjob container import nvcr.io#nvidia/pytorch:25.11-py3   once, for all nodes
    vjob container list                                      what this node holds
    srun -N4 --ntasks-per-node=1 vjob container clean --all  clear four nodes
    """


def _note(text: str) -> None:
    """Print a progress note on standard error, so that standard output has only the result."""
    say(text, err=True)


scratch_option = click.option(
    "--scratch",
    default="/tmp",  # that of container.scratch, written out: the schema is slow to import
    show_default=True,
    metavar="DIR",
    help="container.scratch of your confs, which holds the image store.",
)
cache_option = click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of imported images, which all nodes must see.  [default: "
    "$XDG_CACHE_HOME/vjob/images or ~/.cache/vjob/images]",
)
again_option = click.option("--again", is_flag=True, help="Import again if the file exists.")


@container.command(name="import")
@click.argument("reference", metavar="REF")
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Make this file instead of one in the cache.",
)
@cache_option
@click.option(
    "--arch",
    metavar="NAME",
    help="Architecture of the nodes, if it is not this machine's: aarch64, x86_64.",
)
@again_option
@json_option
def import_(
    reference: str,
    output: Path | None,
    cache: Path | None,
    arch: str | None,
    again: bool,
    as_json: bool,
) -> None:
    """Fetch REF from a registry once, as a file for all nodes.

    \b
    vjob container import nvcr.io#nvidia/pytorch:25.11-py3
    vjob container import docker://debian:12 -o debian.sqsh
    vjob container import podman://localhost/mine:3    what podman has built here

    Needs enroot. A conf may then name the file or, for enroot and charliecloud, keep `image: REF`.
    podman, docker, apptainer and pyxis take a reference without an import.

    For a registry with a login, enroot reads a line `machine REGISTRY login USER password TOKEN` in
    ~/.config/enroot/.credentials; for nvcr.io also one for authn.nvidia.com.
    """
    from vjob.jobs.images.fetch import import_image
    from vjob.jobs.images.image import read_reference

    name = read_reference(reference).file_name
    target = output or (cache or locate_cache("images")) / name
    path = import_image(reference, target.absolute(), _note, arch=arch, again=again)
    has_usual_place = output is None and cache is None
    if as_json:
        image = reference if has_usual_place else str(path)
        facts = {"reference": reference, "path": str(path), "bytes": path.stat().st_size}
        print_object({**facts, "image": image})
        return
    click.echo(path)
    if has_usual_place:
        _note(f"in a conf: container: {{image: '{reference}'}}, or this path")
    else:
        _note(f"in a conf: container: {{image: '{path}'}}")


@container.command(name="list")
@scratch_option
@cache_option
@json_option
def list_(scratch: str, cache: Path | None, as_json: bool) -> None:
    """List what is unpacked on this node, and what was imported for all.

    SIZE is on disk; USED is when a run last asked for it; STATE is `in use` while ranks run in it.

    \b
    srun -N4 --ntasks-per-node=1 vjob container list      on the nodes of a queue
    """
    from varuna_core.records.formatting import format_size
    from vjob.jobs.images import store as stores
    from vjob.jobs.images.image import list_imported
    from vjob.jobs.images.store import render_table, show_time

    store = stores.NodeStore(scratch, os.getuid())
    folder = cache or locate_cache("images")
    roots, imported = store.find_roots(), list_imported(folder)
    if as_json:
        found = {
            "node": platform.node(),
            "store": str(store.roots),
            "unpacked": [asdict(root) for root in roots],
            "cache": str(folder),
            "imported": [asdict(item) for item in imported],
        }
        print_object(found)
        return
    head = f"unpacked on {platform.node()}, in {store.roots}"
    titles = ("NAME", "SIZE", "USED", "STATE", "IMAGE")
    click.echo(render_table(head, titles, [stores.describe(root) for root in roots]))
    files = [(item.name, format_size(item.bytes), show_time(item.time)) for item in imported]
    click.echo(render_table(f"imported, in {folder}", ("NAME", "SIZE", "MADE"), files))


@container.command()
@click.argument("image", required=False)
@click.option("--all", "-a", "everything", is_flag=True, help="Remove all images that no run uses.")
@click.option(
    "--older-than",
    "days",
    type=Duration(DAYS),
    metavar="DAYS",
    help="Remove images that no run has used for this many days.",
)
@scratch_option
@click.option("--dry-run", "-n", is_flag=True, help="List what would be removed; remove nothing.")
@json_option
def clean(
    image: str | None,
    everything: bool,
    days: float | None,
    scratch: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove unpacked images from this node: IMAGE, or by age, or --all.

    IMAGE is a name of `vjob container list`, or the image it was unpacked from. Images in use
    or being prepared are kept and listed. Image files are not touched.

    \b
    vjob container clean --older-than 14
    srun -N4 --ntasks-per-node=1 vjob container clean --all    on four nodes
    srun -w n7,n8 --ntasks-per-node=1 vjob container clean /shared/pytorch.sqsh
    """
    from vjob.jobs.images import store as stores

    node = platform.node()  # srun mixes the lines of nodes
    store = stores.NodeStore(scratch, os.getuid())
    cleaned = stores.clean(
        store,
        _note if as_json else lambda text: say(f"{node}: {text}"),
        image=_resolve(image),
        everything=everything,
        older_than_days=days,
        dry_run=dry_run,
    )
    if as_json:
        facts = {"node": node, "store": str(store.roots), "is_dry_run": dry_run}
        print_object({**facts, **cleaned.as_json()}, is_line=True)
    if image is not None and cleaned.kept:
        raise VjobError(f"{image} was kept")


def _resolve(image: str | None) -> str | None:
    """Return the file of an imported reference; any other name unchanged."""
    from vjob.jobs.images.image import find_imported

    if image is None or os.path.exists(image):
        return image
    try:
        return str(find_imported(image, os.environ) or image)
    except InputError:
        return image
