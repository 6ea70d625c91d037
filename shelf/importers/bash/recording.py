"""Read the launches of a script, as found by bash itself: `read_script` returns a `Recording`.

    found = read_script(path, environ=os.environ)
    for launch in found.walk():
        launch.file, launch.line           # its place in the script
        launch.texts                       # its words as bash has them, with the launcher
        launch.program                     # the words after srun, env, a container's runtime
        launch.words[i].unknown            # values from the job, arguments or unset names
        launch.cwd, launch.env             # its working directory and environment

`walk` descends into `bash -c`, here-documents and scripts of the same folder, each with its own
`Recording`, whose launches it yields instead of the shell's. Bash reads the script several times:
as rank 0; as another rank of another job, to find words that only the job knows; if nothing was
started, as if every tested file existed; and with a mark in each unset variable and argument. A
script that uses an unset value is not refused here: such words are open (`Word.is_open`), and
`Recording.problems` has bash's messages. `options` are the #SBATCH lines, `setup` the preparing
commands (`module load`), `variables` those that the script set.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import pwd
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import takewhile
from pathlib import Path

from varuna_core.records.files import read_bytes
from varuna_core.records.secrets import is_secret
from vjob.jobs.errors import InputError
from vjob.shelf.importers.bash.passes import (
    Jail,
    Pass,
    Record,
    Variable,
    find_failed,
    open_jail,
    repair,
    run_pass,
)
from vjob.shelf.importers.bash.wrappers import SHELLS, find_batch_file, is_launch, locate_program

MOST_DEPTH = 4
MAX_FILE = 1_000_000
ENTERED = ("enroot", "docker", "nvidia-docker", "podman", "apptainer", "singularity")
SUFFIXES = (".sh", ".sbatch", ".slurm", ".bash")
_TOKEN = re.compile(r"@(?P<kind>OUT|ARG|UNSET|ENV|NODE|IP|NODELIST|NAME)(?P<more>[^@\s]*)@")
_MARK = re.compile(r"@(?:ARG\d*|(?:UNSET|ENV):\w+)@")
_PART = re.compile(r"@(?:NODELIST|NODE\d|IP\d)")
PART = "$(part of a name)"
"""Text that replaces a part of a word if the script cut this part out of a name that only the job
knows."""
REST = "@ARG@"
"""Placeholder for all further arguments of the script."""
_FUNCTION = re.compile(r"(?ms)^[ \t]*(?:function\s+)?[\w-]+\s*\(\s*\)\s*\{.*?^[ \t]*\}")
_ENTERS = re.compile(r"\s*(?:cd|pushd)\s")
_NEEDS_MORE = re.compile(r"(.*/)?python[\d.]*|-m")
"""Words after which the next word belongs to the program too: an interpreter, or `-m`."""
PLACEHOLDER = re.compile(r"<[^<>\n=]+>|\{\{[^{}\n]+\}\}|\{[A-Z][A-Z_ ]+\}")
"""Pattern of a word that the user must replace, such as `<your account>`."""
_UNREAD = re.compile(r"[a-z]+: .*(?:No such file or directory|Permission denied|Is a directory)")
_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)", re.ASCII)
_ASSIGNED = re.compile(
    r"(?:^|[\s;({&|\"])(?:(?:for|select|read|mapfile|readarray)\s+(?:-\S+\s+(?:\d+\s+|'[^']*'\s+)?)*)?"
    r"([A-Za-z_]\w*)(?=\+?=|\[[^\]]*\]\+?=|\s+in\b|\s*(?:$|[<;]))",
    re.ASCII | re.MULTILINE,
)
_DEFAULTED = re.compile(r"\$\{([A-Za-z_]\w*)(:?=|:?[-+])", re.ASCII)
_BARE = re.compile(r"\$([A-Za-z_]\w*)|\$\{([A-Za-z_]\w*)(?!\w|:?[-=+])", re.ASCII)
_OF_A_JOB = re.compile(
    r"SLURM|hostname|HOSTNAME|-smi\b|nproc|scontrol|\b(?:srun|env|printenv|declare|export\s+-p|set|compgen)\b"
    r"|\$\{!"
)
"""Words of a script whose result may differ for another rank of another job."""
_OWN_WORDS = re.compile(r"\bg?awk\b[^'\n|;]*(?:'[^'\n]*'[^'\n|;]*)+")
"""An awk program, in which $1 is not an argument of the script."""
_RANDOM = re.compile(r"^[^#]*\bRANDOM\b")
_COUNTED = re.compile(r"\$\{?#\}?\"?\s*\)?(?:-\w\w|[!=<>]+)\s*\"?([1-9])\b", re.ASCII)
_OWN = frozenset(
    "BASHPID CONDA_PREFIX CPATH DIRSTACK EPOCHREALTIME EPOCHSECONDS EUID FUNCNAME GROUPS HOME "  # noqa: SIM905
    "HOSTNAME HOSTTYPE IFS LANG LD_LIBRARY_PATH LIBRARY_PATH LINENO LOGNAME MACHTYPE OLDPWD OPTARG "
    "OPTIND OSTYPE PATH PIPESTATUS PPID PS1 PWD PYTHONPATH RANDOM REPLY SECONDS SHELL SHLVL TERM "
    "TMPDIR UID USER VIRTUAL_ENV".split()
)
_NEVER_EXPORTED = frozenset(
    ("HOSTNAME", "LC_ALL", "LOGNAME", "OLDPWD", "PWD", "SHLVL", "TMPDIR", "USER", "_")
)
"""Variables that every shell or login sets, so that the script's export of them is ignored."""
SEARCH_PATHS = ("CPATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "PYTHONPATH")
ACTIVATED = ("CONDA_PREFIX", "VIRTUAL_ENV")
"""Variables that modules and environments set in the job, whatever their values on this machine."""
ARRAY_TASK = "SLURM_ARRAY_TASK_ID"
SUBMIT_DIR = "SLURM_SUBMIT_DIR"
_NEEDS_TASK = re.compile(rf"(?m)^[^#\n]*\$\{{?{ARRAY_TASK}\b")
_ASKS_FOR_TASK = re.compile(rf"{ARRAY_TASK}:?[-+=]|-[nzv]\s+[\"']?\$?\{{?{ARRAY_TASK}")
"""Uses of the array's task id that also work if the job is no array: with a default, or in a
test."""
JOB_VALUES: Mapping[str, tuple[str, str]] = {
    "SLURM_JOB_ID": ("7300421", "7300842"),
    "SLURM_JOBID": ("7300421", "7300842"),
    "SLURM_PROCID": ("0", "71"),
    "SLURM_NODEID": ("0", "37"),
    "SLURM_LOCALID": ("0", "5"),
    "SLURM_ARRAY_JOB_ID": ("7300421", "7300842"),  # a conf's job is no array
}
"""Variables that only the job knows, with their values for two ranks of two jobs."""
_TEXTS: Mapping[str, str] = {
    "SLURM_JOB_NODELIST": "@NODELIST@",
    "SLURM_NODELIST": "@NODELIST@",
    "SLURM_STEP_NODELIST": "@NODELIST@",
    "SLURM_LAUNCH_NODE_IPADDR": "@IP0@",
    "SLURMD_NODENAME": "@ENV:SLURMD_NODENAME@",
}
_COUNTS = {"nodes": (2, 3), "ntasks": (6, 12), "gpus": (8, 5), "cpus": (64, 48)}
"""Two values for each count that no option sets, so that words that depend on the count differ."""
_NODES = ("2", "3")
A_COUNT = "a count of the job"
ALL_THERE = "all files that the script tests exist"
ENDED = ("timeout", "full", -9, 137, 247)
"""Exit statuses of a pass that was ended before bash finished."""


@dataclass(frozen=True)
class Word:
    """A word of a command line."""

    text: str
    """Text of the word, with `${NAME}`, `$1` or `$(command)` in place of each unknown part."""

    unknown: frozenset[str] = frozenset()
    """Unknown parts, each as spelled in the text, or A_COUNT."""

    shell: str = ""
    """Shell expression by which a shell in the job computes the word; empty if it cannot."""

    @property
    def is_open(self) -> bool:
        """True if the text has unknown parts, or is a placeholder for the user to replace."""
        return bool(self.unknown) or bool(PLACEHOLDER.fullmatch(self.text))


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of an #SBATCH line, or of an sbatch command."""

    name: str
    """Long name, without dashes."""

    value: str
    line: int
    file: str
    component: int = 0
    """Number of the component of a het job."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that the script would start."""

    words: tuple[Word, ...]
    file: str
    line: int
    cwd: str
    env: Mapping[str, Word]
    """Variables that the script exported or set before the launch and that differ from its
    environment."""

    inner: Recording | None = None
    """Recording of the text, here-document or script that this launch runs."""

    only: str = ""
    """Condition under which the command is started; empty if it always is."""

    is_step: bool = False
    """True if srun starts the command."""

    is_asked: bool = False
    """True if the script takes the command's output, by a pipe or `$(...)`."""

    ends_script: bool = False
    """True under `set -e`, where the script ends if the command fails."""

    absent: tuple[str, ...] = ()
    """Unset variables that stand for whole words, of which there are none."""

    after: frozenset[str] = frozenset()
    """Places of the launches that the same script started before."""

    @property
    def texts(self) -> list[str]:
        return [word.text for word in self.words]

    @property
    def raw(self) -> str:
        """Words as a person writes them: quoted if empty or with blanks."""
        return " ".join(
            shlex.quote(one) if not one or re.search(r"\s", one) else one for one in self.texts
        )

    @property
    def is_contained(self) -> bool:
        """True if the command enters a container."""
        before = self.texts[: locate_program(self.texts)]
        return any(
            posixpath.basename(word) in ENTERED or word.startswith("--container-image")
            for word in before
        )

    @property
    def program(self) -> tuple[Word, ...]:
        return self.words[locate_program(self.texts) :]

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(kw_only=True)
class Recording:
    """The record of what bash did with one script."""

    file: str
    options: list[Option] = field(default_factory=list)
    launches: list[Command] = field(default_factory=list)
    setup: list[Command] = field(default_factory=list)
    """Commands that prepare the launch; also `cd` to a folder that does not exist here."""

    sourced: list[str] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    tested: dict[str, str] = field(default_factory=dict)
    """Tested files that do not exist here, with the place of the test."""

    once: dict[str, str] = field(default_factory=dict)
    """Commands with a different output in each run, such as `date`, with their places; the output
    of one run is used."""

    drawn: dict[str, set[str]] = field(default_factory=dict)
    """Parts of recorded commands that change with the output of a command in `once`, keyed by that
    command."""

    wrote: dict[str, str] = field(default_factory=dict)
    """Files that the script writes, with their places."""

    task: tuple[str, str] | None = None
    """Place at which the script uses the number of its task in a job array, and the number that it
    got."""

    submit_dir: str = ""
    """Place at which it uses the folder of its submit, other than to enter it."""

    late: list[int] = field(default_factory=list)
    """Numbers of its #SBATCH lines that sbatch does not read."""

    loops: dict[str, str] = field(default_factory=dict)
    """Programs that the script starts again and again in an endless loop, with their places."""

    unset: list[str] = field(default_factory=list)
    """Unset variables that words need; `$1` for an argument."""

    arguments: list[str] = field(default_factory=list)
    """Arguments that the script uses but did not get: `$1`, `$@`."""

    problems: list[str] = field(default_factory=list)
    """Error messages of bash, and the reason why bash was stopped."""

    unread: list[str] = field(default_factory=list)
    """Messages of filters, such as `head`, about files that they cannot read."""

    is_endless: bool = False
    """True if bash was stopped before the end of the script."""

    waits: dict[str, str] = field(default_factory=dict)
    """Its pauses, such as `sleep 10`, with their places."""

    written: dict[str, str] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    """Layers of the jail in which the script was read."""

    def walk(self) -> Iterator[Command]:
        """Yield the launches; for a shell that runs a script or text, the launches inside."""
        for launch in self.launches:
            inner = list(launch.inner.walk()) if launch.inner is not None else []
            yield from inner or [launch]

    def walk_recordings(self) -> Iterator[Recording]:
        yield self
        for launch in self.launches:
            if launch.inner is not None:
                yield from launch.inner.walk_recordings()


def read_script(
    path: Path,
    *,
    args: Sequence[str] = (),
    environ: Mapping[str, str],
    trust: bool = False,
    without: Sequence[str] = (),
) -> Recording:
    """Let bash read a file. Raise InputError if it is not a script, or if this machine has no jail.

    The script gets HOME, USER and the variables that it uses without setting them from `environ`,
    the user's environment, except for secrets. `without` disables layers of the jail, for tests.
    """
    text = read_text(path)
    layers = ("jail",) if trust else tuple(without)
    with open_jail() as jail:
        reader = _Reader(path.absolute().parent, environ, layers, jail)
        return reader.read([_ScriptInput(text=text, args=list(args), env={})] * 3, path.name, 0)


def list_arguments(*texts: str) -> list[str]:
    """Return a placeholder, found again by its text, for each positional argument (`$1`, `$2`) that
    the scripts use."""
    whole = "\n".join(map(_drop_comments, texts))
    numbers = [int(one) for one in re.findall(r"\$\{?([1-9])(?!:?[-=+])", whole)]
    numbers += [int(one) for one in _COUNTED.findall(whole)]
    count = max([*numbers, len(re.findall(r"\bshift\b", whole)) if numbers else 0, 0])
    marks = [f"@ARG{index}@" for index in range(1, count + 1)]
    return [*marks, REST] if re.search(r"\$\{?[@*]", whole) else marks


def _list_missing(text: str, given: int) -> list[str]:
    """Return placeholders for the positional arguments that a script uses and that were not given;
    `given` is the number of those that were. Arguments of the script's functions do not count. If
    the script uses shift, getopts, `$@` or `$#`, it is not known which are missing: return none."""
    outside = _FUNCTION.sub("", text)
    if re.search(r"\b(shift|getopts?)\b|\$\{?[@*#]", outside):
        return []
    return list_arguments(outside)[given:]


def _drop_comments(text: str) -> str:
    return _OWN_WORDS.sub("awk", re.sub(r"(?m)^\s*#.*$", "", text))


def read_text(path: Path) -> str:
    if path.stat().st_size > MAX_FILE:
        raise InputError(f"{path} is larger than 1 MB, the limit for a shell script")
    text = read_bytes(path, MAX_FILE).decode("utf-8-sig", "replace").rstrip("\\")
    return text.replace("\r\n", "\n").replace("\0", "")


@dataclass(frozen=True, kw_only=True)
class _ScriptInput:
    """The input of a script in one pass."""

    text: str
    args: Sequence[str]
    env: Mapping[str, str]
    cwd: str = ""
    """Folder in which the script starts, if that is not the script's own folder."""

    is_inside: bool = False
    """True if the script runs in a container, whose folders are not the conf's."""


@dataclass(frozen=True, kw_only=True)
class _How:
    """Settings that all passes over a script share."""

    name: str
    options: Sequence[Option]
    is_job: bool
    is_step: bool
    files: bool = False
    """True if every file that the script tests is to exist."""

    globs: bool = False
    """True if a pattern that matches no file is dropped."""

    repaired: frozenset[int] = frozenset()
    """Indices of lines whose redirections go to the scratch folder."""


_Records = tuple[Record, Record, Record]


@dataclass
class _Reader:
    folder: Path
    environ: Mapping[str, str]
    without: tuple[str, ...]
    jail: Jail
    written: list[dict[str, str]] = field(default_factory=lambda: [{}, {}, {}])
    """Files that scripts wrote, for each of the three passes."""
    time: int = field(default_factory=lambda: int(time.time()))

    def read(
        self,
        given: Sequence[_ScriptInput],
        name: str,
        depth: int,
        asked: Sequence[Option] = (),
        around: Sequence[Option] = (),
    ) -> Recording:
        """Read one script; `asked` are options of the sbatch command, `around` those of the
        surrounding job."""
        mine, its, marks = given
        found = Recording(file=name, options=[*asked, *read_options(mine.text, name)])
        found.late = list_late_options(mine.text)
        for number, line in enumerate(mine.text.splitlines(), 1):
            if SUBMIT_DIR in _drop_comments(line) and not _ENTERS.match(line):
                found.submit_dir = found.submit_dir or f"{name}:{number}"
        job = found.options or list(around)
        how = _How(name=name, options=job, is_step=depth > 0,
                   is_job="#SBATCH" in mine.text or "srun" in mine.text or depth > 0)  # fmt: skip
        main, lines = self._run(mine, how)
        how = replace(how, repaired=lines)
        if main.status in ENDED:
            self._note(found, mine.text.splitlines(), main)
            return found
        texts = self._list_texts(mine.text, main)
        is_same = its == given[0]
        marks = mine if marks == given[0] else marks
        own = build_environment(job, 0, is_job=how.is_job)
        task = (own | self._inherit(mine.text)).get(ARRAY_TASK)
        for number, line in enumerate(mine.text.splitlines(), 1):
            if task is not None and ARRAY_TASK in _drop_comments(line):
                found.task = found.task or (f"{name}:{number}", task)
        unset = self._mark_unset(texts, {**own, **marks.env})
        words = [] if depth or marks.args else list_arguments(*texts)
        missing = words if depth or not marks.args else _list_missing(mine.text, len(marks.args))
        found.arguments = [_spell(one) for one in map(_TOKEN.fullmatch, missing) if one]
        if unset or words or marks is not mine:
            marks = replace(marks, env={**marks.env, **unset}, args=words or marks.args)
        is_plain = marks is mine
        marked, marked_how = (main, how) if is_plain else self._seek(marks, how)
        without, main_how = main, how
        if not _has_launch(main, marked) and (is_plain or marked_how.files):
            main, main_how = self._seek(mine, how, main)
            marked, marked_how = (main, main_how) if is_plain else (marked, marked_how)
        self._note(found, mine.text.splitlines(), without, main, marked)
        if not _has_launch(main, marked) and _has_launch(marked, marked):
            base, shown, how = marks, marked, marked_how
        else:
            base, shown, how = mine, main, main_how
        other = main
        if not is_same or any(map(_OF_A_JOB.search, texts)):
            other, _ = self._run(base if is_same else its, how, rank=1)
        self.written = [{**known, **one.written} for known, one in
                        zip(self.written, (main, other, marked), strict=True)]  # fmt: skip
        globs = shown
        if any(re.search(r"^\S*\*\S*$", word) for one in shown.records if is_launch(one.words)
               for word in one.words):  # fmt: skip
            globs, _ = self._run(base, replace(how, globs=True))
        for text in found.once:
            redrawn, _ = self._run(base, how, drawn=text)
            found.drawn[text] = _list_changed(shown.records, redrawn.records)
        launches = self._compare(found, (shown, other, marked, globs), how, base)
        for launch, records in launches:
            inner = self._go_down(launch, records, mine, depth, job)
            is_read = inner is not None and not inner.problems and not inner.unset
            if inner is not None and is_read and inner.setup and not any(inner.walk()):
                found.setup += inner.setup  # a shell that only prepares
            else:
                found.launches.append(replace(launch, inner=inner))
        return found

    def _run(
        self, given: _ScriptInput, how: _How, *, rank: int = 0, drawn: str = ""
    ) -> tuple[Pass, frozenset[int]]:
        """Run the script once as `rank` and record its commands. Return the record, and the numbers
        of the lines whose output `repair` had to send elsewhere. A batch script runs on the
        first node, and the script of a step on the node of the rank. The command `drawn`, such as
        `date`, has another output than otherwise."""
        env = build_environment(how.options, rank, is_job=how.is_job)
        own = pwd.getpwuid(os.getuid())
        env["HOME"] = self.environ.get("HOME", own.pw_dir)
        env |= {key: self.environ.get(key, own.pw_name) for key in ("USER", "LOGNAME")}
        env |= {name: f"@ENV:{name}@" for name in SEARCH_PATHS}
        env["HOSTNAME"] = f"@NODE{rank * how.is_step}@"
        if how.is_job:
            env[SUBMIT_DIR] = str(self.folder)
        env |= self._inherit(given.text) | dict(given.env)
        if _NEEDS_TASK.search(given.text) and not _ASKS_FOR_TASK.search(given.text):
            env.setdefault(ARRAY_TASK, f"@UNSET:{ARRAY_TASK}@")
        env |= {key: value[rank] for key, value in JOB_VALUES.items() if key in env}
        env |= {
            "__VJ_RANK": str(rank * how.is_step),
            "__VJ_FILES": str(int(how.files)),
            "__VJ_GLOBS": str(int(how.globs)),
            "__VJ_SEED": "12" if drawn == "RANDOM" else "11",
            "__VJ_DRAWN": drawn,
            "__VJ_CWD": given.cwd or str(self.folder),
            "__VJ_TIME": str(self.time),
        }
        lines = how.repaired
        for _ in range(4):
            text = repair(given.text, lines)
            done = run_pass(self.jail, text, name=how.name, folder=str(self.folder),
                            args=given.args, env=env, without=self.without)  # fmt: skip
            failed = find_failed(text, done.error)
            if not failed:
                break
            lines |= failed
        return done, lines

    def _seek(self, given: _ScriptInput, how: _How, done: Pass | None = None) -> tuple[Pass, _How]:
        """Return the pass `done`, or run one; if it starts nothing although the script tests files,
        run the script again as if every tested file existed. Also return the settings of the
        returned pass."""
        done = done or self._run(given, how)[0]
        is_asked = any(kind == "file" for kind, *_ in done.notes)
        if not is_asked or _has_launch(done, done):
            return done, how
        how = replace(how, files=True)
        return self._run(given, how)[0], how

    def _inherit(self, text: str) -> dict[str, str]:
        """Return the variables of the user's environment that the script uses."""
        names = set(_NAME.findall(text)) - _OWN
        return {
            name: self.environ[name]
            for name in names
            if name in self.environ
            and not is_secret(name)
            and (name == ARRAY_TASK or not name.startswith("SLURM_"))
        }

    def _mark_unset(self, texts: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
        """Return a distinctive placeholder value for each variable that the script uses and that
        nobody sets."""
        whole = "\n".join(map(_drop_comments, texts))
        known = {*_ASSIGNED.findall(whole), *given, *_OWN}
        known |= {name for name, sign in _DEFAULTED.findall(whole) if sign.endswith("=")}
        known |= self._inherit(whole).keys()
        names = {one or two for one, two in _BARE.findall(whole)} - known
        names = {name for name in names if not name.startswith(("BASH", "__VJ"))}
        own = {name: f"@ENV:{name}@" for name in ACTIVATED if name in _NAME.findall(whole)}
        return {one: f"@UNSET:{one}@" for one in names} | own

    @staticmethod
    def _list_texts(text: str, main: Pass) -> list[str]:
        """Return the script's text, and those of the sourced files that bash accepted."""
        texts = [text]
        for path in {path for kind, path, _, _ in main.notes if kind == "source"}:
            if re.search(rf"{re.escape(path)}: line \d+: syntax error", main.error):
                continue
            with contextlib.suppress(OSError, InputError):
                texts.append(read_text(Path(path)))
        return texts

    def _note(self, found: Recording, lines: Sequence[str], *passes: Pass) -> None:
        for done in passes:
            for kind, text, file, line in done.notes:
                where = f"{posixpath.basename(file)}:{line}"
                if kind == "source" and text not in found.sourced:
                    found.sourced.append(text)
                elif kind == "loop":
                    found.loops.setdefault(text, where)
                elif kind == "sleep":
                    found.waits.setdefault(text, where)
                elif kind == "once":
                    found.once.setdefault(text.strip(), where)
                elif kind in ("file", "condition"):
                    found.tested.setdefault(text, where)
                elif kind == "write" and text:
                    found.wrote.setdefault(make_word(text, text).text, where)
        if number := next((n for n, line in enumerate(lines, 1) if _RANDOM.search(line)), 0):
            found.once.setdefault("RANDOM", f"{found.file}:{number}")
        main = passes[0]
        found.layers = main.layers
        found.variables = dict(main.variables)
        found.written = dict(main.written)
        found.is_endless = main.status in ENDED
        if found.is_endless:
            found.problems.append(
                "the script does not end: bash was stopped after some seconds"
                if main.status != "full"
                else "the script writes without end: bash was stopped"
            )
        for said in main.error.splitlines():
            short = re.sub(r"^.*?(?=line \d+:)", "", said)
            is_bashs = re.match(r"line \d+: (?!.*Permission denied)", short)
            if is_bashs and short not in found.problems:
                found.problems.append(short)
            elif _UNREAD.match(said) and said not in found.unread:
                found.unread.append(said)

    def _compare(
        self,
        found: Recording,
        passes: tuple[Pass, Pass, Pass, Pass],
        how: _How,
        given: _ScriptInput,
    ) -> list[tuple[Command, _Records]]:
        """Return the launches of the input `given`, each with its records as rank 0, as another
        rank, and with placeholders for unset values. `passes` are these three, and one that drops
        patterns that match no file."""
        shown, _, marked, globs = passes
        mine, its, marks, matched = (_index(one.records) for one in passes)
        taken = self._inherit(given.text) | {"HOME": self.environ.get("HOME", "")}
        login = {name: text for name, text in taken.items() if name not in shown.variables}
        launches: list[tuple[Command, _Records]] = []
        files = ALL_THERE if how.files else ""
        rows = [(key, files, mine) for key in mine]
        if _has_launch(shown, marked):
            rows += [
                (key, "the rank is not 0", its)
                for key, record in its.items()
                if key not in mine and is_launch(record.words)
            ]
        for key, only, table in rows:
            record, same = table[key], _find_same(key, marks)
            words, missing = _settle(record, its.get(key), same)
            if globs is not shown and table is mine:
                words = _open_patterns(words, matched.get(key))
            launch = Command(
                words=words,
                file=posixpath.basename(record.frames[0][0]) if record.frames else found.file,
                line=record.frames[0][1] if record.frames else 0,
                cwd=posixpath.normpath(record.cwd or str(self.folder)),
                env=_find_env(record, its.get(key), same, login, given.env.get("PATH", "$PATH")),
                only=only,
                is_asked=record.is_asked,
                ends_script=record.ends_script,
                absent=_list_absent(words, same),
                after=frozenset(one.where for one, _ in launches),
            )
            if _starts(record, same):
                launches.append((launch, (record, its.get(key, record), same or record)))
                found.unset += [name for name in missing if name not in found.unset]
            else:
                found.setup.append(launch)
        return launches

    def _go_down(
        self,
        launch: Command,
        records: _Records,
        outer: _ScriptInput,
        depth: int,
        job: Sequence[Option],
    ) -> Recording | None:
        """Read the text or script that a launch runs; None if it runs neither."""
        if depth >= MOST_DEPTH:
            return None
        asked: list[Option] = []
        if posixpath.basename(launch.texts[0]) == "sbatch":
            at, _ = find_batch_file(launch.texts)
            asked = parse_options(launch.texts[1:at], launch.file, launch.line)
        given: list[_ScriptInput] = []
        name = ""
        for record, written in zip(records, self.written, strict=True):
            run = self._find_text(record, written, launch.file)
            if run is None and not given:
                return None
            if run is None or (given and run[1] != name):
                given.append(given[0])
                continue
            text, name, args = run
            if name == launch.file:  # bash is to count lines as the file does
                head, found, _ = outer.text.partition(text)
                text = "\n" * (head.count("\n") if found else max(launch.line - 1, 0)) + text
            env = {key: record.env[key] for key in launch.env if key in record.env}
            is_inside = outer.is_inside or launch.is_contained
            cwd = "" if is_inside or _TOKEN.search(record.cwd) else record.cwd
            given.append(_ScriptInput(text=text, args=args, env=env, cwd=cwd, is_inside=is_inside))
        inner = self.read(given, name, depth + 1, asked, () if asked else job)
        if _TOKEN.search(launch.cwd):  # bash cannot be started in a folder that only the job knows
            inner.launches = [
                replace(one, cwd=launch.cwd) if one.cwd == str(self.folder) else one
                for one in inner.launches
            ]
        return inner

    def _find_text(
        self, record: Record, written: Mapping[str, str], file: str
    ) -> tuple[str, str, list[str]] | None:
        """Return text, name and arguments of what a shell, or a script of the folder, runs."""
        words = list(record.words)
        at = locate_program(words)
        if posixpath.basename(words[0]) == "sbatch":
            at, wrap = find_batch_file(words)
            if wrap is not None:
                return wrap, file, []
        words = words[at:]
        fed = (record.stdin, file, list[str]()) if record.stdin else None
        if not words:
            return fed
        if posixpath.basename(words[0]) in SHELLS:
            at = 1
            while at < len(words) and words[at].startswith(("-", "+")):
                if "c" in words[at] and not words[at].startswith("--") and at + 1 < len(words):
                    at = next((i for i in range(at + 1, len(words)) if words[i][:1] != "-"), at + 1)
                    return words[at], file, words[at + 2 :]
                at += 1
            words = words[at:]
            if not words or fed:
                return fed
        name = posixpath.basename(words[0])
        if name in written:
            return written[name], name, words[1:]
        if not name.endswith(SUFFIXES):
            return None
        for path in (Path(record.cwd, words[0]), self.folder / words[0], self.folder / name):
            if path.is_file() and path.resolve().is_relative_to(self.folder.resolve()):
                return read_text(path), name, words[1:]
        return None


def _has_launch(done: Pass, marked: Pass) -> bool:
    marks = _index(marked.records)
    return any(_starts(one, _find_same(key, marks)) for key, one in _index(done.records).items())


_Key = tuple[tuple[tuple[str, int], ...], str, int]
"""Key of a record: its call stack, its first word, and the count of such records so far."""


def _index(records: Sequence[Record]) -> dict[_Key, Record]:
    seen: dict[tuple[object, str], int] = {}
    table: dict[_Key, Record] = {}
    for record in records:
        head = posixpath.basename(record.words[0])
        place = (record.frames, head)
        seen[place] = seen.get(place, 0) + 1
        table[(record.frames, head, seen[place])] = record
    return table


def _list_changed(records: Sequence[Record], others: Sequence[Record]) -> set[str]:
    """Return the parts of the records' words and variables that are not in the same records of
    another pass; what only the job knows parts them."""
    table, parts = _index(others), set[str]()
    for key, record in _index(records).items():
        other = table.get(key, record)
        pairs = [*zip(record.words, other.words, strict=False)]
        pairs += [(value, other.env.get(name, "")) for name, value in record.env.items()]
        for mine, its in pairs:
            parts |= set(_split_known(mine)) - set(_split_known(its))
    return parts


def _split_known(text: str) -> list[str]:
    return re.sub(rf"{_TOKEN.pattern}|(?<!\d)7300421(?!\d)", "\0", text).split("\0")


def _find_same(key: _Key, marks: Mapping[_Key, Record]) -> Record | None:
    """Return the record of the same command from the pass with placeholders; a command with an
    unset name is found by its place."""
    if key in marks or not key[1].startswith("-"):
        return marks.get(key)
    nameless = [one for (frames, head, _), one in marks.items()
                if frames == key[0] and _TOKEN.match(head)]  # fmt: skip
    return next(iter(nameless), None)


def _starts(record: Record, marked: Record | None) -> bool:
    """Return True for a launch, also if its program is an unset variable."""
    is_nameless = record.words[0].startswith("-") or bool(_MARK.match(record.words[0]))
    return is_launch(record.words) or (is_nameless and marked is not None)


def _settle(
    record: Record, other: Record | None, marked: Record | None
) -> tuple[tuple[Word, ...], list[str]]:
    """Return the words of a launch, and the names of the unset variables and arguments that the
    words need. A word is open if it differs in another job (`other`), or if placeholders for unset
    values change it (`marked`)."""
    texts = list(record.words)
    if marked is not None and marked is not record:
        texts = _merge(texts, _drop_rest(marked.words))
    needs = [_spell(found) for word in texts for found in _TOKEN.finditer(word)
             if found["kind"] in ("ARG", "UNSET")]  # fmt: skip
    is_marked = bool(needs) or texts != list(record.words)
    others = list(texts)
    if other is not None and not is_marked and len(other.words) == len(texts):
        others = list(other.words)
    elif other is not None and is_marked:  # the marks stand in no other pass
        kept = [at for at, text in enumerate(texts)
                if not _MARK.fullmatch(text) or text in record.words]  # fmt: skip
        if len(kept) == len(record.words) == len(other.words):
            for at, own, its in zip(kept, record.words, other.words, strict=True):
                others[at] = its if texts[at] == own else texts[at]
    words: list[Word] = []
    for mine, its in zip(texts, others, strict=True):
        word = make_word(mine, its)
        option = words[-1].text if words else ""
        is_named = bool(word.shell) or not word.unknown
        words.append(word if is_named else _name_port(word, mine, its, option))
    return tuple(words), list(dict.fromkeys(needs))


def _list_absent(words: Sequence[Word], marked: Record | None) -> tuple[str, ...]:
    """Return the unset variables that would be words of their own, if they were set."""
    known = {name for word in words for name in word.unknown}
    found = [_TOKEN.fullmatch(word) for word in (marked.words if marked is not None else ())]
    names = [_spell(one) for one in found if one is not None and one["kind"] == "UNSET"]
    return tuple(name for name in dict.fromkeys(names) if name not in known)


def _open_patterns(words: Sequence[Word], matched: Record | None) -> tuple[Word, ...]:
    """Return the words; patterns for files that do not exist here become open.

    Such patterns are absent from `matched`, the record of a pass that drops unmatched patterns.
    Without that record, a pattern may stand for several launches, and no shell expression is given.
    """
    left = set(matched.words) if matched is not None else set()
    return tuple(
        Word(word.text, frozenset([word.text]), word.text if matched is not None else "")
        if "*" in word.text and not word.unknown and word.text not in left
        else word
        for word in words
    )


def _drop_rest(words: Sequence[str]) -> list[str]:
    """Remove the placeholder for "$@", which may be empty, except after an interpreter."""
    pairs = zip(["", *words], words, strict=False)
    return [
        word if _NEEDS_MORE.fullmatch(before) else word.replace(REST, "")
        for before, word in pairs
        if word != REST or _NEEDS_MORE.fullmatch(before)
    ]


def _merge(mine: Sequence[str], marked: Sequence[str]) -> list[str]:
    """Return the words of a script without arguments, with placeholders where the script needs a
    value.

    There is no placeholder where the script has a default, or where the words appear only if there
    is a value.
    """
    found: list[str] = []
    matcher = SequenceMatcher(None, mine, marked, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        ours, theirs = mine[a:b], marked[c:d]
        if kind == "equal" or not any(map(_MARK.search, theirs)):
            found += ours
        elif len(ours) == len(theirs):
            found += [one if has_default(one, mark) else mark
                      for one, mark in zip(ours, theirs, strict=True)]  # fmt: skip
        elif ours:
            found += theirs
        elif all(map(_MARK.fullmatch, theirs)):
            found += [word for at, word in enumerate(theirs, c)
                      if at == 0 or re.match(r"--?[A-Za-z]", marked[at - 1])
                      or _NEEDS_MORE.fullmatch(marked[at - 1])]  # fmt: skip
    return found


def has_default(word: str, marked: str) -> bool:
    """Return True if a default stands in place of each placeholder, or if there is none."""
    pieces = [re.escape(piece) for piece in _MARK.split(marked)]
    return bool(re.fullmatch("(.+?)".join(pieces), word, re.DOTALL))


def _name_port(word: Word, mine: str, its: str, option: str) -> Word:
    """Replace a master port that the script computes from the job's values with vjob's own port."""
    found = re.fullmatch(r"(.*?)(\d{4,5}|\$\((?:shuf|python3?)\))", _TOKEN.sub(_spell, mine),
                         re.DOTALL)  # fmt: skip
    if (
        found is None
        or PART in word.unknown
        or not re.fullmatch(r"(?s).*?(\d{4,5}|@OUT:\w+@)", its)
    ):
        return word
    head, of = found[1], f"{option} {found[0]}"
    is_masters = any(
        ("master" in name or "main" in name) and name.endswith(("-port", "_port"))
        for name in re.findall(r"[\w-]+", of)
    )
    if not (head.endswith(":") or is_masters):
        return word
    text = head.replace("${MASTER_ADDR}", "@")
    if "$" in text:
        return word
    pieces = [shlex.quote(one) if one else "" for one in text.split("@")]
    shell = '"${MASTER_ADDR}"'.join(pieces) + '"${MASTER_PORT}"'
    names = ["${MASTER_PORT}", *(["${MASTER_ADDR}"] if "@" in text else [])]
    return Word(f"{head}${{MASTER_PORT}}", frozenset(names), shell)


_IN_THE_JOB = re.compile(
    r"\$\{(SLURMD?_(?!ARRAY_)\w+|MASTER_ADDR|MASTER_PORT|"
    rf"TMPDIR|{'|'.join((*SEARCH_PATHS, *ACTIVATED))})\}}"
)
"""Names that a shell in the job can expand."""


def make_word(mine: str, its: str) -> Word:
    """Build a word from its texts as rank 0 and in another job: differing parts become unknown."""
    pieces: list[tuple[str, str]] = []
    """Text and, for an unknown part, its name; one of the two is empty."""
    pattern = rf"{_TOKEN.pattern}|(?<!\d)7300421(?!\d)"
    at = 0
    for found in re.finditer(pattern, mine):
        pieces.append((mine[at : found.start()], ""))
        if found[0].startswith("@"):
            pieces.append(("", _spell(found)))
        else:
            pieces.append(("", "${SLURM_JOB_ID}"))
        at = found.end()
    pieces.append((mine[at:], ""))
    if mine != its and "".join(text or _value(name, 1) for text, name in pieces) != its:
        ranks = {name: pair for name, pair in JOB_VALUES.items() if pair[0] == "0"}
        for name, (one, two) in {**ranks, "SLURM_NNODES": _NODES}.items():
            parts = re.split(rf"(?<![\w.]){two}(?![\w.])", its)
            if len(parts) == 2 and one.join(parts) == mine:
                pieces = [(parts[0], ""), ("", f"${{{name}}}"), (parts[1], "")]
                break
        else:
            return Word(f"{_TOKEN.sub(_spell, _share(mine, its))}({A_COUNT})", frozenset([A_COUNT]))
    names = frozenset(name for _, name in pieces if name)
    text = "".join(piece or name for piece, name in pieces)
    if _PART.search("".join(piece for piece, _ in pieces)):
        return Word(_PART.sub(PART, text), names | {PART})
    is_named = all(map(_IN_THE_JOB.fullmatch, names))
    shell = "".join(
        shlex.quote(piece) if piece else f'"{name}"' if name else "" for piece, name in pieces
    )
    return Word(text, names, shell if is_named else "")


def _share(mine: str, its: str) -> str:
    """Return the common beginning of two words, without a number at its end."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(mine, its, strict=False))
    return "".join(one for one, _ in pairs).rstrip("0123456789")


def _value(name: str, rank: int) -> str:
    """Return the value of a variable in a pass, as set by the prelude and the environment."""
    pair = JOB_VALUES.get(name.strip("${}"))
    if pair is not None:
        return pair[rank]
    return {"${MASTER_ADDR}": "@NODE0@", "${SLURM_JOB_NODELIST}": "@NODELIST@"}.get(name, name)


def _spell(found: re.Match[str]) -> str:
    """Return the variable or argument that a placeholder stands for, as the script spells it."""
    kind, more = found["kind"], found["more"].lstrip(":")
    if kind == "ARG":
        return f"${more or '@'}"
    if kind == "OUT":
        return f"$({more})"
    if kind in ("UNSET", "ENV"):
        return f"${{{more}}}"
    if kind in ("NODE", "IP"):
        return "${MASTER_ADDR}" if more == "0" else "$(hostname)"
    return "${SLURM_JOB_NODELIST}" if kind == "NODELIST" else "${SLURM_JOB_NAME}"


def _find_env(
    record: Record,
    other: Record | None,
    marked: Record | None,
    login: Mapping[str, str],
    path: str,
) -> dict[str, Word]:
    """Return the variables that the script exported. `login` has those that it only has from the
    user's shell; `path` is the PATH with which it was started."""
    found = {}
    for name, mine in record.env.items():
        if name.startswith("SLURM_") or name in _NEVER_EXPORTED:
            continue
        theirs = other.env.get(name, mine) if other is not None else mine
        marks = marked.env.get(name, mine) if marked is not None else mine
        value = mine
        if name == "PATH":
            value, theirs, marks = (one.replace("$PATH", path) for one in (mine, theirs, marks))
        if login.get(name) == value or value in ("$PATH", f"@ENV:{name}@"):
            continue
        if _MARK.search(marks) and not has_default(value, marks):
            found[name] = make_word(marks, marks)
        else:
            found[name] = make_word(value, theirs)
    return found


def build_environment(options: Sequence[Option], rank: int, *, is_job: bool) -> dict[str, str]:
    """Return Slurm's variables in a job with these options; an unset count differs between the
    ranks."""
    named: dict[str, int] = {}
    for option in options:
        value = option.value.removesuffix(")")
        digits = value[len(value.rstrip("0123456789")) :]
        if option.component == 0 and digits:
            named.setdefault(option.name, int(digits))
    nodes = named.get("nodes", _COUNTS["nodes"][rank])
    per = named.get("ntasks-per-node")
    gpus = named.get("gpus-per-node", named.get("gres", _COUNTS["gpus"][rank]))
    tasks = named.get("ntasks", nodes * per if per else None)
    if tasks is None:
        tasks = nodes if "nodes" in named else _COUNTS["ntasks"][rank]
    if "nodes" not in named and "ntasks" in named and named["ntasks"] == 1:
        nodes = 1
    cpus = named.get("cpus-per-task")
    env = {"__VJ_GPUS": str(gpus), "__VJ_CPUS": str(_COUNTS["cpus"][rank])}
    if not is_job:
        return env
    values: dict[str, object] = {
        "NNODES": nodes, "JOB_NUM_NODES": nodes, "NTASKS": tasks, "NPROCS": tasks,
        "NTASKS_PER_NODE": per, "GPUS_ON_NODE": gpus, "CPUS_PER_TASK": cpus,
        "GPUS_PER_NODE": named.get("gpus-per-node"), "CPUS_ON_NODE": _COUNTS["cpus"][rank],
        "TASKS_PER_NODE": f"{per}(x{nodes})" if per else None,
    }  # fmt: skip
    name = next((one.value for one in options if one.name == "job-name"), "@NAME@")
    values["JOB_NAME"] = name
    values["JOB_PARTITION"] = next((one.value for one in options if one.name == "partition"), None)
    array = next((one.value for one in options if one.name == "array"), "")
    if found := re.match(r"\[?(\d+)", array):
        values["ARRAY_TASK_ID"] = found[1]  # of its first task
    env |= {f"SLURM_{key}": str(value) for key, value in values.items() if value is not None}
    env |= {key: pair[rank] for key, pair in JOB_VALUES.items()}
    return env | dict(_TEXTS)


SHORT: Mapping[str, str] = {
    "J": "job-name", "N": "nodes", "n": "ntasks", "p": "partition", "c": "cpus-per-task",
    "t": "time", "A": "account", "q": "qos", "x": "exclude", "o": "output", "e": "error",
    "w": "nodelist", "C": "constraint", "G": "gpus", "D": "chdir", "d": "dependency", "a": "array",
    "M": "clusters", "L": "licenses", "H": "hold", "s": "oversubscribe", "m": "distribution",
    "b": "begin", "i": "input", "k": "no-kill", "W": "wait", "O": "overcommit",
    "l": "label", "u": "unbuffered", "K": "kill-on-bad-exit", "v": "verbose", "Q": "quiet",
}  # fmt: skip
"""Long names of one-letter options of sbatch and srun."""
_HET = re.compile(r"(?:--)?(?:hetjob|packjob)")


def read_options(text: str, file: str) -> list[Option]:
    """Parse the #SBATCH lines before the first command; sbatch ignores later ones, too."""
    found: list[Option] = []
    component = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            break
        if not line.startswith("#SBATCH"):
            continue
        try:
            words = shlex.split(line[7:], comments=True)
        except ValueError:
            words = line[7:].split()
        if words and _HET.fullmatch(words[0]):
            component += 1
            continue
        found += parse_options(words, file, number, component)
    return found


def list_late_options(text: str) -> list[int]:
    """Return the line numbers of the #SBATCH lines that sbatch ignores because they come after the
    first command. Return none for a script with a here-document or a call of sbatch: the lines may
    belong to another script, which it writes."""
    lines = text.splitlines()
    first = next((at for at, line in enumerate(lines) if line.strip() and line[0] != "#"), 0)
    if re.search(r"<<|\bsbatch\b", text):
        return []
    return [at + 1 for at, line in enumerate(lines) if at > first and line.startswith("#SBATCH")]


def parse_options(words: Sequence[str], file: str, line: int, component: int = 0) -> list[Option]:
    found = []
    left = list(words)
    while left and left[0].startswith("-"):
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            name, value = word[1:2], word[2:].removeprefix("=")
            name, equals = SHORT.get(name, name), value
        if not equals and left and not left[0].startswith("-"):
            value = left.pop(0)
        found.append(
            Option(name=name.lstrip("-"), value=value, line=line, file=file, component=component)
        )
    return found
