"""Shell text to its assignments, #SBATCH lines and command lines; nothing is executed.

Worked out: quotes, `$NAME`, `${NAME:-default}`, `$((A * B))`, `$(dirname ...)` and the like of
known paths, continued lines, `if [ ... ]` with known values, files that are sourced or started and
lie in the same folder, `eval`, functions, `bash -c "$SCRIPT"` and the `NAME=$(cat <<EOF` of such a
script. A value that needs more is unknown, and its line is handed back.
"""

from __future__ import annotations

import ast
import operator
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from vjob.shelf.importers.scanner import (
    NAME,
    PLACEHOLDER,
    Part,
    RawWord,
    Scanner,
    UnreadableError,
)

SHORT: Mapping[str, str] = {
    "J": "job-name",
    "N": "nodes",
    "n": "ntasks",
    "p": "partition",
    "c": "cpus-per-task",
    "t": "time",
    "A": "account",
    "q": "qos",
    "x": "exclude",
    "o": "output",
    "e": "error",
    "w": "nodelist",
    "C": "constraint",
    "G": "gpus",
}
"""One-letter options of sbatch and srun."""
_SBATCH = re.compile(r"#SBATCH\s+(?P<rest>\S.*)", re.IGNORECASE)
_HET = re.compile(r"(hetjob|packjob|--hetjob|--packjob)\s*(#.*)?")
_OPTION = re.compile(r"--(?P<long>[a-z][a-z0-9-]*)(?:(?:=|\s+)(?P<value>.*))?|-(?P<short>\S.*)")
_IGNORED = re.compile(r"\.*|(\.|source)\s+\S*_00_?conf\.sh|set\s+[-+].*", re.ASCII)
_ASSIGN = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=", re.ASCII)
_ARRAY = re.compile(r"[ \t]*([A-Za-z_][A-Za-z0-9_]*)=\(", re.ASCII)
_DEFAULT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(:?[-=+])(.*)", re.ASCII | re.DOTALL)
_SUMS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_MAX_EXPRESSION = 200
_MAX_VALUE = 100_000
"""Characters of a value: one that is doubled line by line would otherwise fill the memory."""
_MAX_DEPTH = 8
"""Files and `eval` within each other."""
_MAX_COMMANDS = 20_000
_EXPORTS = ("export", "readonly", "declare", "local", "typeset")
_EVERYTHING = ("@", "*")
_FUNCTION = re.compile(
    r"[ \t]*(?:function[ \t]+(?P<named>[A-Za-z_][\w-]*)(?:[ \t]*\([ \t]*\))?"
    r"|(?P<plain>[A-Za-z_][\w-]*)[ \t]*\([ \t]*\))\s*\{(?P<first>[^\n]*)\n",
    re.ASCII,
)
_FUNCTION_END = re.compile(r"^[ \t]*\}[ \t]*$", re.MULTILINE)
_COUNTING_FOR = re.compile(r"for[ \t]*\(\(.*\)\)[ \t]*(;[ \t]*)?(do)?")
_DOCUMENT = re.compile(r"\s*cat[ \t]*<<-?[ \t]*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)[ \t]*\n")
_SCRIPT = re.compile(r"[\n;&|]|\bif\b")
"""In the text after `bash -c`: it is more than one command."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One `NAME=value`; the value is None where it could not be worked out."""

    name: str
    value: str | None
    raw: str
    line: int
    exported: bool
    file: str = ""
    uses: frozenset[str] = frozenset()
    """Variables in it, and those in theirs."""
    words: str | None = None
    """Of several words that could not all be worked out: the text, unknown names as ${NAME}."""
    missing: frozenset[str] = frozenset()
    """Those names."""


@dataclass(frozen=True, kw_only=True)
class _Function:
    body: str
    line: int
    """Of its first line."""


@dataclass(kw_only=True)
class JobBlock:
    """The #SBATCH lines of one job script, or of one component of a het job, and its GRES."""

    options: dict[str, tuple[str, int]] = field(default_factory=dict)
    gres: str | None = None
    is_het: bool = False
    """A component of a het job, after its first."""
    file: str = ""


@dataclass(frozen=True)
class Word:
    """A word of a command line; `unknown` names the variables that nothing here sets."""

    text: str
    unknown: frozenset[str] = frozenset()

    @property
    def is_open(self) -> bool:
        """True where its text is not known: a variable, or a place to fill in."""
        return bool(self.unknown) or bool(PLACEHOLDER.fullmatch(self.text))


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line with its variables filled in."""

    words: tuple[Word, ...]
    raw: str
    line: int
    file: str
    uses: frozenset[str]
    env: tuple[Assignment, ...] = ()
    """`NAME=value` before the command."""


@dataclass(kw_only=True)
class ShellConf:
    """Everything found in a text; later assignments win."""

    variables: dict[str, Assignment] = field(default_factory=dict)
    blocks: list[JobBlock] = field(default_factory=list)
    not_understood: list[tuple[int, str]] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """What the reader itself left out, and why."""
    decided: dict[str, str] = field(default_factory=dict)
    """Variables that decided a condition, and the condition."""
    overwritten: list[Assignment] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Those that were read."""


def parse_shell_conf(
    text: str,
    files: Mapping[str, str] | None = None,
    *,
    name: str = "",
    environ: Mapping[str, str] | None = None,
    found: ShellConf | None = None,
) -> ShellConf:
    """Every assignment, #SBATCH line and command of a text.

    `files` are those of its folder by name, read where they are sourced or started; `environ` holds
    the few variables that are the same wherever it runs, such as HOME.
    """
    reader = _Reader(found or ShellConf(), files or {}, environ or {})
    reader.read(text, name)
    return reader.found


@dataclass
class _Frame:
    """An `if` or a loop that is open."""

    line: int
    raw: str
    is_if: bool = True
    active: bool = True
    is_done: bool = False
    """A branch was taken; the others are not."""
    condition: str = ""


class _Reader:
    """Goes through a text in the order in which a shell would."""

    def __init__(
        self, found: ShellConf, files: Mapping[str, str], environ: Mapping[str, str]
    ) -> None:
        self.found = found
        self.files = files
        self.environ = environ
        self.inside: list[str] = []
        self.frames: list[_Frame] = []
        self.num_commands = 0
        self.new_block = True
        self.functions: dict[str, _Function] = {}
        self.called: set[str] = set()
        self.depth = 0
        """Functions and scripts of `bash -c` within each other."""

    def read(self, text: str, name: str) -> None:
        if name in self.inside or len(self.inside) >= _MAX_DEPTH:
            self.found.reasons.append(f"{name or 'eval'}: reads itself; not read again")
            return
        self.inside.append(name)
        self.found.files.append(name)
        self.new_block = True
        self._read_text(text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", ""), name)
        self.inside.pop()
        if not self.inside:
            self._list_uncalled()

    def _read_text(
        self, text: str, name: str, first_line: int = 1, *, is_one_line: bool = False
    ) -> None:
        """`is_one_line`: all of it stands in one command, whose line is named."""
        outer, self.frames = self.frames, []
        scanner = Scanner(text)
        scanner.line = first_line
        while scanner.position < len(text) and self.num_commands < _MAX_COMMANDS:
            self._read_one(scanner, name)
            if is_one_line:
                scanner.line = first_line
        for frame in self.frames:
            self._hand_back(frame.line, frame.raw)
        self.frames = outer

    def _read_inner(self, text: str, line: int, *, is_one_line: bool = False) -> None:
        """A function's body, or the script of a `bash -c`."""
        if self.depth >= _MAX_DEPTH:
            self.found.reasons.append(f"line {line}: starts itself; not read again")
            return
        self.depth += 1
        self._read_text(text, self.inside[-1], line, is_one_line=is_one_line)
        self.depth -= 1

    def _list_uncalled(self) -> None:
        for name, function in self.functions.items():
            if name not in self.called:
                body = " ".join(function.body.split())
                self.found.reasons.append(
                    f"line {function.line}: {name} is called nowhere; left out: {body}"
                )

    def _take_function(self, scanner: Scanner) -> bool:
        """A function to be read where it is called; False where the text is none."""
        match = _FUNCTION.match(scanner.text, scanner.position)
        if match is None:
            return False
        first, stop = match["first"].rstrip(), match.end()
        if first.endswith("}"):
            body = first.removesuffix("}") + "\n"
        else:
            end = _FUNCTION_END.search(scanner.text, stop)
            if end is None:
                return False
            body = first + "\n" + scanner.text[stop : end.start()]
            stop = min(end.end() + 1, len(scanner.text))
        if self._is_active():
            line = scanner.line + match[0].count("\n") - 1
            self.functions[match["named"] or match["plain"]] = _Function(body=body, line=line)
        scanner.move(stop)
        return True

    def _read_one(self, scanner: Scanner, name: str) -> None:
        self.num_commands += 1
        text, start, number = scanner.text, scanner.position, scanner.line
        at_line = start == 0 or text[start - 1] == "\n"
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        line = text[start:end].strip()
        sbatch = _SBATCH.fullmatch(line) if at_line else None
        if sbatch is not None:
            scanner.move(min(end + 1, len(text)))
            self._add_option(sbatch["rest"], number, line)
            return
        if at_line and (line.startswith("#") or _IGNORED.fullmatch(line)):
            scanner.move(min(end + 1, len(text)))
            self._source_ignored(line, name)
            return
        if at_line and (self._take_function(scanner) or self._take_array(scanner, number, name)):
            return
        if at_line and _COUNTING_FOR.fullmatch(line) and self._is_active():
            scanner.move(min(end + 1, len(text)))
            self._open("for", [], line, number)
            return
        first = start + len(text[start:]) - len(text[start:].lstrip(" \t\n;"))
        begin = text.rfind("\n", 0, start) + 1
        try:
            words = scanner.read_words()
        except UnreadableError:
            scanner.position, scanner.line = start, number
            scanner.waiting = []
            scanner.move(min(end + 1, len(text)))
            self._hand_back(number, text[begin:end].strip())
            return
        number += text.count("\n", start, min(first, scanner.position))
        stop = text.find("\n", max(scanner.position - 1, start))
        raw = text[begin : len(text) if stop < 0 else stop].strip()
        raw = re.sub(r"(?:(?<!\s)\s*|(?<=\n))\\?\n\s*", " ", raw)
        for skipped, document in scanner.skipped:
            self._hand_back(skipped, document)
        scanner.skipped = []
        if words:
            self._take(words, raw, number, name)

    def _take_array(self, scanner: Scanner, line: int, file: str) -> bool:
        """`NAME=(words)` as a value of words; False where it is none, or a word has blanks."""
        match = _ARRAY.match(scanner.text, scanner.position)
        if match is None or not self._is_active():
            return False
        try:
            end = scanner.find_close("(", ")", match.end() - 1)
            inner = re.sub(r"(?m)(^|\s)#.*$|\n", " ", scanner.text[match.end() : end])
            words = Scanner(inner).read_words()
        except UnreadableError:
            return False
        spelled = [item for word in words for item in self._expand(word)]
        if scanner.text[end + 1 : end + 2].strip() or any(" " in w.text for w in spelled):
            return False
        value = None if any(w.unknown for w in spelled) else " ".join(w.text for w in spelled)
        self.found.variables[match[1]] = Assignment(
            name=match[1],
            value=value if value is None or len(value) <= _MAX_VALUE else None,
            raw=" ".join(scanner.text[match.end() - 1 : end + 1].split()),
            line=line,
            exported=False,
            file=file,
            uses=self._close(words),
        )
        scanner.move(end + 1)
        return True

    def _source_ignored(self, line: str, name: str) -> None:
        words = line.split()
        if len(words) > 1 and words[0] in (".", "source"):
            self._follow(words[1])

    def _follow(self, path: str) -> bool:
        """Read a file of the folder where it is sourced or started."""
        base = posixpath.basename(path)
        if base not in self.files:
            return False
        if base not in self.inside:
            self.read(self.files[base], base)
        return True

    def _hand_back(self, line: int, raw: str) -> None:
        if raw and (line, raw) not in self.found.not_understood:
            self.found.not_understood.append((line, raw))

    def _is_active(self) -> bool:
        return all(frame.active for frame in self.frames)

    def _take(self, words: list[RawWord], raw: str, line: int, file: str) -> None:
        while words and words[0].text in ("$", "then", "else", "do", "{", "!", "time", "}"):
            if words[0].text == "else" and self.frames:
                self._turn(self.frames[-1], not self.frames[-1].is_done)
            words = words[1:]
        if not words:
            return
        head = words[0].text
        if head in ("if", "elif", "while", "until", "for", "case"):
            self._open(head, words[1:], raw, line)
            return
        if head in ("fi", "done", "esac") and self.frames:
            self.frames.pop()
            return
        if not self._is_active():
            frame = next(frame for frame in self.frames if not frame.active)
            why = f"{frame.condition} {'is so' if frame.is_done else 'is not so'}"
            self.found.reasons.append(f"line {line}: not reached, as {why}: {raw}")
            return
        if self._assign(words, raw, line, file):
            return
        self._run(words, raw, line, file)

    def _turn(self, frame: _Frame, active: bool) -> None:
        if frame.is_if:
            frame.active = active
            frame.is_done = frame.is_done or active

    def _open(self, head: str, words: list[RawWord], raw: str, line: int) -> None:
        if head == "elif" and self.frames:
            frame = self.frames[-1]
            frame.active = True
        else:
            frame = _Frame(line, raw, is_if=head == "if")
            self.frames.append(frame)
        if head not in ("if", "elif"):
            self.found.reasons.append(
                f"line {line}: a {head} is read once, as if it ran once: {raw}"
            )
            return
        if frame.is_done:
            frame.active = False
            return
        shown = " ".join(word.text for word in words)
        expanded = [self._expand(word) for word in words]
        uses = self._close(words)
        flat = [Word(" ".join(w.text for w in ws), frozenset().union(*(w.unknown for w in ws)))
                for ws in expanded]  # fmt: skip
        answer = _decide(flat)
        frame.condition = shown
        for name in uses:
            self.found.decided.setdefault(name, shown)
        if answer is None:
            self.found.reasons.append(
                f"line {line}: {shown} is not known before the run: all branches are read"
            )
            frame.is_if = False
        else:
            frame.active, frame.is_done = answer, answer

    def _assign(self, words: list[RawWord], raw: str, line: int, file: str) -> bool:
        """True where the line is assignments alone."""
        head = words[0].plain
        exported = head == "export" or (head == "declare" and words[1:2] and words[1].text == "-x")
        if head in _EXPORTS:
            words = [word for word in words[1:] if not word.text.startswith("-")]
            if head == "export" and words and all(NAME.fullmatch(w.text) for w in words):
                for word in words:
                    self._mark_exported(word.text)
                return True
        if not words or not all(_is_assignment(word) for word in words):
            if not words or head not in _EXPORTS:
                return False
            if not all(_is_assignment(word) or NAME.fullmatch(word.text) for word in words):
                return False
        made: list[Assignment] = []
        before = dict(self.found.variables)
        for word in words:
            if not _is_assignment(word):
                self._mark_exported(word.text)
                continue
            assignment = self._build(word, line, file, exported=bool(exported))
            if assignment is None:  # an unquoted command: only a shell knows
                self.found.variables = before
                return False
            made.append(assignment)
            self.found.variables[assignment.name] = assignment
        for assignment in made:
            old = before.get(assignment.name)
            is_again = old is not None and old.raw != assignment.raw
            if old is not None and is_again and old.name not in (*assignment.uses, "GRES"):
                self.found.overwritten.append(old)
            self._add_gres(assignment, file)
        return True

    def _build(self, word: RawWord, line: int, file: str, *, exported: bool) -> Assignment | None:
        match = _ASSIGN.match(word.text)
        assert match is not None, "the caller looked"
        name = match[1]
        value_word = RawWord(_drop_chars(word.parts, match.end()), word.text[match.end() :])
        known: list[str] = []
        missing: set[str] = set()
        for part in value_word.parts:
            text, unknown = self._expand_part(part)
            is_command = part.kind == "command" and not part.quoted
            if unknown and is_command and not _DOCUMENT.match(part.text):
                return None
            missing |= unknown
            known.append(text)
        value: str | None = "".join(known)
        old = self.found.variables.get(name)
        if match[2]:
            value = None if old is None or old.value is None else old.value + str(value)
        if value is not None and len(value) > _MAX_VALUE:
            value = None
        words = value if missing and value is not None and " " in value.strip() else None
        uses = self._close([value_word])
        exported = exported or (old is not None and old.exported)
        return Assignment(name=name, value=None if missing else value, raw=value_word.text,
                          line=line, exported=exported, file=file, uses=uses, words=words,
                          missing=frozenset(missing))  # fmt: skip

    def _add_gres(self, assignment: Assignment, file: str) -> None:
        if assignment.name == "GRES" and assignment.value:
            blocks = self.found.blocks
            if not blocks or blocks[-1].gres is not None or blocks[-1].file != file:
                blocks.append(JobBlock(file=file))
            blocks[-1].gres = assignment.value

    def _mark_exported(self, name: str) -> None:
        old = self.found.variables.get(name)
        if old is not None:
            self.found.variables[name] = replace(old, exported=True)

    def _run(self, words: list[RawWord], raw: str, line: int, file: str) -> None:
        env: list[Assignment] = []
        while words and _is_assignment(words[0]):
            assignment = self._build(words[0], line, file, exported=True)
            if assignment is not None:
                env.append(assignment)
            words = words[1:]
        uses = self._close(words).union(*(assignment.uses for assignment in env))
        spelled = [item for word in words for item in self._expand(word)]
        if not spelled:
            self._hand_back(line, raw)
            return
        command = Command(words=tuple(spelled), raw=raw, line=line, file=file, uses=uses,
                          env=tuple(env))  # fmt: skip
        if spelled[0].text == "eval":
            self._evaluate(command)
            return
        if spelled[0].text in self.functions:
            self.called.add(spelled[0].text)
            function = self.functions[spelled[0].text]
            self._read_inner(function.body, function.line)
            return
        if self._start_script(command):
            return
        is_source = spelled[0].text in (".", "source") and len(spelled) > 1
        if is_source and self._follow(spelled[1].text):
            return
        started = self._find_started(spelled)
        if started is None or started not in self.files:
            self.found.commands.append(command)
            return
        if spelled[0].text in ("srun", "enroot"):  # its options say where the file runs
            self.found.commands.append(command)
        if started not in self.found.files:
            self._follow(started)

    def _start_script(self, command: Command) -> bool:
        """`srun ... bash -c "$SCRIPT"`: what stands before, and then the script's own commands."""
        texts = [word.text for word in command.words]
        for index in range(1, len(texts) - 1):
            is_shell = posixpath.basename(texts[index - 1]) in ("bash", "sh")
            if is_shell and texts[index] in ("-c", "-lc", "-ec"):
                script = texts[index + 1].strip()
                if not _SCRIPT.search(script):
                    return False
                if index > 1:
                    self.found.commands.append(replace(command, words=command.words[: index - 1]))
                self._read_inner(script + "\n", command.line, is_one_line=True)
                return True
        return False

    def _find_started(self, words: list[Word]) -> str | None:
        """The file of `./run.sh`, `bash run.sh`, `srun ... bash -c ./run.sh`, `sbatch job.sh`."""
        before: list[str] = []
        for word in words[:60]:
            path = (word.text.split() or [""])[0]
            if path.endswith((".sh", ".sbatch", ".slurm")):
                is_first = not before or before[-1] in ("bash", "sh", "sbatch", "-c", "-lc")
                if is_first or (path.startswith("./") and before[0] in ("srun", "enroot")):
                    return posixpath.basename(path)
            before.append(word.text)
        return None

    def _evaluate(self, command: Command) -> None:
        """The words of `eval` are a command line again."""
        words = tuple(
            Word(part, word.unknown) for word in command.words[1:] for part in word.text.split()
        )
        if words and words[0].text == "eval":
            words = ()
        if words:
            self.found.commands.append(replace(command, words=words))

    def _expand(self, word: RawWord) -> list[Word]:
        """The words that one word becomes; variables outside quotes part at blanks."""
        fields: list[tuple[str, frozenset[str]]] = []
        current: str | None = None
        unknown: frozenset[str] = frozenset()
        for part in word.parts:
            text, missing = self._expand_part(part)
            if part.kind == "name" and part.text in _EVERYTHING:
                continue  # `$@`: arguments of whoever starts the script
            if part.kind == "text" or part.quoted:
                unknown |= missing
                current = (current or "") + text
                continue
            pieces = text.split()
            if pieces and (current is None or not text[:1].isspace()):
                current = (current or "") + pieces[0]
                unknown |= _find_missing(pieces.pop(0), missing)
            for piece in pieces:
                fields.append((current or "", unknown))
                current, unknown = piece, _find_missing(piece, missing)
        if current is not None:
            fields.append((current, unknown))
        return [Word(text, missing) for text, missing in fields]

    def _expand_part(self, part: Part) -> tuple[str, frozenset[str]]:
        """Its text, and the names that are not known."""
        if part.kind == "text":
            return part.text, frozenset()
        if part.kind == "sum":
            result = _calculate(part.text, self.found.variables)
            spelled = f"$(({part.text}))"
            return (spelled, frozenset([spelled])) if result is None else (result, frozenset())
        if part.kind == "command":
            document = self._read_document(part.text)
            if document is not None:
                return document
            found = self._answer(part.text)
            spelled = f"$({part.text})"
            return (spelled, frozenset([spelled])) if found is None else (found, frozenset())
        default = _DEFAULT.fullmatch(part.text)
        name, mark, other = default.groups() if default else (part.text, "", "")
        if name == "0":
            return (self.inside[-1] if self.inside else "") or "script.sh", frozenset()
        if name in _EVERYTHING:
            return "", frozenset()
        value, is_set = self._look_up(name)
        is_given = is_set and (value != "" or mark[:1] != ":")
        if mark.endswith("+"):
            return self._expand_text(other) if is_given and value is not None else ("", frozenset())
        if mark and not is_given:
            return self._expand_text(other)
        if value is not None:
            return value, frozenset()
        assignment = self.found.variables.get(name)
        if assignment is not None and assignment.words is not None:
            return assignment.words, assignment.missing
        return f"${{{name}}}", frozenset([name])

    def _read_document(self, command: str) -> tuple[str, frozenset[str]] | None:
        """What `cat <<EOF` prints, unknown names as ${NAME}; None for another command."""
        head = _DOCUMENT.match(command)
        if head is None:
            return None
        body, _, end = command[head.end() :].rstrip().rpartition("\n")
        if end.strip() != head["end"]:
            return None
        if head["quote"]:
            return body, frozenset()
        try:
            parts = Scanner(body).read_document()
        except UnreadableError:
            return None
        spelled = [self._expand_part(part) for part in parts]
        missing = frozenset[str]().union(*(unknown for _, unknown in spelled))
        return "".join(text for text, _ in spelled), missing

    def _look_up(self, name: str) -> tuple[str | None, bool]:
        assignment = self.found.variables.get(name)
        if assignment is not None:
            return assignment.value, True
        return self.environ.get(name), name in self.environ

    def _expand_text(self, text: str) -> tuple[str, frozenset[str]]:
        """A default: names in it are filled in, one level deep."""
        missing: set[str] = set()

        def replace(match: re.Match[str]) -> str:
            value, _ = self._look_up(match[1])
            if value is None:
                missing.add(match[1])
            return match[0] if value is None else value

        text = re.sub(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?", replace, text.strip("\"'"))
        return text, frozenset(missing)

    def _answer(self, command: str) -> str | None:
        """What a few commands on paths print; None for all others."""
        try:
            words = Scanner(command).read_words()
        except UnreadableError:
            return None
        if len(words) > 6 or any(p.kind == "command" for word in words for p in word.parts):
            return None
        spelled = [item for word in words for item in self._expand(word)]
        if not spelled or any(word.unknown for word in spelled):
            return None
        texts = [word.text for word in spelled if not word.text.startswith("-")]
        if texts == ["pwd"]:
            return self.environ.get("PWD")
        if len(texts) != 2:
            return None
        makers: Mapping[str, Callable[[str], str]] = {
            "realpath": str,
            "readlink": str,
            "dirname": lambda path: posixpath.dirname(path) or ".",
            "basename": posixpath.basename,
            "echo": str,
        }
        maker = makers.get(texts[0])
        return None if maker is None else maker(texts[1])

    def _close(self, words: list[RawWord]) -> frozenset[str]:
        """The variables in words, and those in their values."""
        names: set[str] = set()
        for word in words:
            for part in word.parts:
                if part.kind in ("name", "sum", "command"):
                    names.update(NAME.findall(part.text))
        known = self.found.variables
        inner = (known[name].uses for name in names if name in known)
        return frozenset(names & known.keys()).union(*inner)

    def _add_option(self, rest: str, number: int, line: str) -> None:
        file = self.inside[-1]
        blocks = self.found.blocks
        if _HET.fullmatch(rest.strip()):
            blocks.append(JobBlock(is_het=True, file=file))
            self.new_block = False
            return
        match = _OPTION.fullmatch(re.sub(r"(?<!\s)\s+#.*$", "", rest).strip())
        if match is None:
            self._hand_back(number, line)
            return
        if match["short"] is not None:
            name, value = match["short"][0], match["short"][1:].strip()
            if name not in SHORT:
                self._hand_back(number, line)
                return
            name = SHORT[name]
        else:
            name, value = match["long"], (match["value"] or "").strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        is_new = self.new_block or not blocks or blocks[-1].file != file
        if is_new or name in blocks[-1].options:  # the next script begins
            blocks.append(JobBlock(file=file))
        self.new_block = False
        blocks[-1].options[name] = (value, number)


def _is_assignment(word: RawWord) -> bool:
    match = _ASSIGN.match(word.text)
    if match is None:
        return False
    written = "".join(part.text for part in word.parts if part.kind == "text" and not part.quoted)
    return written.startswith(match[0])


def _find_missing(piece: str, missing: frozenset[str]) -> frozenset[str]:
    """The unknown names of a text that one of its words has; of a command its first word."""
    return frozenset(
        name
        for name in missing
        if (name.startswith("$") and name.split()[0] in piece)
        or f"${{{name}}}" in piece
        or f"${name}" in piece
    )


def _drop_chars(parts: tuple[Part, ...], count: int) -> tuple[Part, ...]:
    """Parts without the first characters, which are unquoted text."""
    left = list(parts)
    while left and count >= len(left[0].text) and left[0].kind == "text" and not left[0].quoted:
        count -= len(left.pop(0).text)
        if count <= 0:
            break
    return tuple(left)


def _decide(words: list[Word]) -> bool | None:
    """Truth of `[ a = b ]`; None where it is not known without a shell."""
    if len(words) == 1 and words[0].text in ("true", "false"):
        return words[0].text == "true"
    if len(words) < 3 or words[0].text not in ("[", "[[", "test"):
        return None
    if any(word.is_open for word in words):
        return None
    texts = [word.text for word in words[1:]]
    if texts[-1] in ("]", "]]"):
        texts.pop()
    is_not = texts[:1] == ["!"]
    texts = texts[1:] if is_not else texts
    answer: bool | None = None
    if len(texts) == 3:
        left, sign, right = texts
        if sign in ("=", "=="):
            answer = left == right
        elif sign == "!=":
            answer = left != right
        elif left.isdecimal() and right.isdecimal() and len(left + right) < 40:
            signs = {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt,
                     "-lt": operator.lt, "-ge": operator.ge, "-le": operator.le}  # fmt: skip
            answer = signs[sign](int(left), int(right)) if sign in signs else None
    elif len(texts) == 2 and texts[0] in ("-z", "-n"):
        answer = (texts[1] == "") is (texts[0] == "-z")
    return None if answer is None else answer is not is_not


def _calculate(text: str, known: Mapping[str, Assignment]) -> str | None:
    """A sum of whole numbers and variables; None for anything else."""
    text = re.sub(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?", r"\1", text).strip()
    if len(text) > _MAX_EXPRESSION:
        return None
    try:
        return str(_calculate_node(ast.parse(text, mode="eval").body, known))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # no sum, or one too deep
        return None


def _calculate_node(node: ast.expr, known: Mapping[str, Assignment]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and node.id in known:
        value = known[node.id].value or ""
        if re.fullmatch(r"[0-9]{1,9}", value):
            return int(value)
    if isinstance(node, ast.BinOp):
        left, right = _calculate_node(node.left, known), _calculate_node(node.right, known)
        if type(node.op) in _SUMS:
            return _SUMS[type(node.op)](left, right)
        if isinstance(node.op, ast.Div | ast.FloorDiv) and left >= 0 and right > 0:
            return left // right
    raise ValueError("not a sum of whole numbers")
