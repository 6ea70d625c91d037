"""Commands used before the first run: write a conf, print its schema, check the machine,
completion."""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import click

from vjob.jobs.conf.starters import KINDS, load_starter, render_starter
from vjob.jobs.errors import InputError
from vjob.shelf.commands.arguments import json_option, print_list
from vjob.shelf.commands.terminal import say


@click.command()
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, path_type=Path),
    help="Translate shell scripts: a file or a folder.",
)
@click.option("--minimal", is_flag=True, help="Print only the required keys.")
@click.option(
    "--for",
    "kind",
    type=click.Choice(KINDS),
    metavar="KIND",
    help=f"Print a short conf for this kind of program: {', '.join(KINDS)}.",
)
@click.option("--line", type=int, help="With --from: line of the launch to use, if several.")
@click.option("--trust", is_flag=True, help="With --from: read even if no jail is possible.")
@click.argument("words", nargs=-1, metavar="[FOLDER | ARGUMENTS]")
def init(
    source: Path | None,
    minimal: bool,
    kind: str | None,
    line: int | None,
    trust: bool,
    words: tuple[str, ...],
) -> None:
    """Print a commented conf.yaml, a short one, or the translation of shell scripts.

    A short conf names the files that must exist; its queue and GPUs are those that sinfo shows.
    With FOLDER it is written to FOLDER/conf.yaml, with a tiny program that trains if the kind has
    one: docs/recipes.md.

    --from lets bash itself read a script, or the scripts of a folder, in a jail where no program
    that they name is started; the conf starts the same program, word for word. Arguments of the
    script follow after --. Whatever the conf leaves out is named, with the reason, above the conf
    and on standard error; a script that starts no program or several is refused.

    \b
    vjob init > conf.yaml
    vjob init --minimal > conf.yaml
    vjob init --for ddp > conf.yaml
    vjob init --for lightning first-try
    vjob init --from train.sbatch > conf.yaml
    vjob init --from examples/pretrain_gpt2_distributed.sh > conf.yaml
    vjob init --from train.sh -- 8 config.yaml > conf.yaml
    vjob init --from Megatron-LM-2/ > conf.yaml
    """
    if (source is not None) + minimal + (kind is not None) > 1:
        raise InputError("give only one of --from, --minimal and --for")
    if words and source is None and (kind is None or len(words) > 1):
        raise InputError(
            f"{words[0]}: only --for KIND writes to a folder, and only --from takes arguments, "
            "those of a script; to keep the conf, redirect it: vjob init > conf.yaml"
        )
    folder = Path(words[0]) if words and kind else None
    if minimal or kind:
        from vjob.jobs.schedulers import choose as schedulers

        groups, note = next(schedulers.list_with_queue()).suggest_nodes()
        kind = kind or "minimal"
        text = render_starter(kind, groups, note, is_alone=folder is None)
        if folder is None:
            click.echo(text, nl=False)
        else:
            _write_recipe(kind, text, folder)
        return
    if source is None:
        from vjob.jobs.conf.document import render_init

        click.echo(render_init(), nl=False)
        return
    from vjob.shelf.importers.translate import Source, import_source

    text, notes = import_source(Source(path=source, args=words, line=line, trust=trust), os.environ)
    click.echo(text, nl=False)
    for note in notes:
        say(f"note: {note}", err=True)


def _write_recipe(kind: str, text: str, folder: Path) -> None:
    """Write conf.yaml and the sample program of a kind, such as `ddp`, to the folder. Raise
    InputError rather than overwrite a file."""
    files = load_starter(kind).files
    names = ["conf.yaml", *files]
    if there := [name for name in names if (folder / name).exists()]:
        raise InputError(f"{folder / there[0]} exists: give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "conf.yaml").write_text(text)
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, folder / name)
    say(f"wrote {', '.join(names)} in {folder}")
    say(f"next: vjob submit {folder / 'conf.yaml'} --follow")


@click.command()
@click.option("--site", is_flag=True, help="Schema of a site file (docs/site.md).")
def schema(site: bool) -> None:
    """Print the JSON Schema of conf.yaml, for completion and checks in an editor.

    \b
    vjob schema > conf.schema.json
    vjob schema --site > site.schema.json

    With the YAML extension of VS Code, and other editors that run yaml-language-server, a conf
    whose first line is `# yaml-language-server: $schema=conf.schema.json` is checked as you type.
    """
    from vjob.jobs.conf.json_schema import build_schema, build_site_schema

    click.echo(json.dumps(build_site_schema() if site else build_schema(), indent=1))


@click.command()
@json_option
@click.option(
    "--report",
    "archive",
    is_flag=True,
    help="Also write vjob-report.zip here, to attach to a bug report.",
)
@click.option(
    "--nodes",
    "conf",
    metavar="CONF",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Measure the nodes of this conf with a run on them, and name slow ones.",
)
def doctor(as_json: bool, archive: bool, conf: Path | None) -> None:
    """Check this machine and its Slurm setup, and say what to fix.

    \b
    vjob doctor                      where you submit
    srun -l -N2 vjob doctor          on two nodes, where the containers are
    vjob doctor --report             for a bug report: this, and the versions
    vjob doctor --nodes conf.yaml    a minute on its nodes: GPUs, disks, links

    To try a program with its GPUs and its container, use `vjob try`. The archive of --report has no
    secrets, and neither your name nor the machine's; read it before you send it.
    """
    from vjob.shelf.doctor import doctor as doctors
    from vjob.shelf.doctor.archive import ARCHIVE, write_archive

    if conf is not None:
        from vjob.jobs.planning.resolve_auto import resolve_conf
        from vjob.shelf.doctor.nodes import examine_nodes

        say_progress = partial(click.echo, err=True)
        findings = examine_nodes(resolve_conf(conf, ()), say_progress)
    else:
        findings = doctors.examine()
    if archive:
        names = write_archive(Path(ARCHIVE), findings)
        click.echo(f"{ARCHIVE} has {' and '.join(names)}; read them before you send it.", err=True)
    if as_json:
        print_list(finding.as_json() for finding in findings)
    else:
        say(doctors.render(findings))
    sys.exit(1 if any(finding.status == "fail" for finding in findings) else 0)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    eval "$(vjob completion bash)"        # or put that line in ~/.bashrc
    vjob completion fish > ~/.config/fish/completions/vjob.fish
    """
    from click.shell_completion import get_completion_class

    from vjob.shelf.commands.completing import register_shells

    register_shells()
    kind = get_completion_class(shell)
    if kind is None:
        raise InputError(f"no completion for {shell}")
    root = click.get_current_context().find_root().command
    click.echo(kind(root, {}, "vjob", "_VJOB_COMPLETE").source())
