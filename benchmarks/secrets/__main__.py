"""Secrets that others would see, beside what two scanners find.

    python -m benchmarks.secrets [--seeds 3] [--rules gitleaks.toml] [--harmless FOLDER] [--write]

`--rules` names gitleaks' own file of rules, which is not part of this project; `--harmless` a
folder of real confs and patches without secrets, in which what is held is held for nothing. What
others see of a run is looked for in one that is submitted here (commands.py).
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import tomllib
import yaml

from benchmarks import RESULTS
from benchmarks.secrets import commands
from benchmarks.secrets.corpus import Shape, draw_shapes
from varuna_core.records.secrets import (
    REDACTED,
    find_secrets,
    redact_arguments,
    withhold,
)
from vjob.jobs.conf.redact import redact_text

PAGE = RESULTS / "secrets.md"
LEAST_LEFT = 8
"""Letters of a secret that are one still."""


def show(artefact: str, text: str) -> str:
    """The text as others would see it."""
    if artefact == "args":
        return " ".join(map(withhold, redact_arguments(text.split("\x1f"))))
    if artefact in ("conf", "comment", "notify"):
        return withhold(redact_text(text))
    if artefact == "output":  # a file in which one is found is not shared
        return "" if list(find_secrets(text, in_output=True)) else text
    return withhold(text)


def is_seen(secret: str, shown: str) -> bool:
    """True where the secret is left, or a piece of it."""
    return any(
        secret[at : at + LEAST_LEFT] in shown for at in range(max(1, len(secret) - LEAST_LEFT + 1))
    )


def misses_ours(shape: Shape) -> bool:
    return is_seen(shape.secret, show(shape.artefact, shape.text))


def build_detect_secrets() -> Callable[[Shape], bool]:
    from detect_secrets.core.secrets_collection import SecretsCollection
    from detect_secrets.settings import default_settings

    names = {"conf": "c.yaml", "code": "c.py", "setup": "c.sh", "packages": "requirements.txt"}

    def misses(shape: Shape) -> bool:
        with tempfile.TemporaryDirectory() as folder, default_settings():
            path = Path(folder, names.get(shape.artefact, "c.txt"))
            path.write_text(shape.text.replace("\x1f", " ") + "\n")
            found = SecretsCollection()
            found.scan_file(str(path))
            values = [one.secret_value or "" for _, one in found]
        return not any(overlap(value, shape) for value in values)

    return misses


def overlap(value: str, shape: Shape) -> bool:
    """A scanner points: it is enough that it names a part of the secret, or a key's first line."""
    return bool(value) and (
        shape.secret[:LEAST_LEFT] in value or (value in shape.text and "PRIVATE KEY" in shape.text)
    )


def build_gitleaks(path: Path) -> Callable[[Shape], bool]:
    rules = []
    for rule in tomllib.loads(path.read_text())["rules"]:
        if "regex" not in rule:
            continue
        text = rule["regex"].replace(r"\z", r"\Z")
        text = re.sub(r"\[\[:alnum:\]\]", "[A-Za-z0-9]", text).replace("[:alnum:]", "A-Za-z0-9")
        flags = re.IGNORECASE if "(?i)" in text else 0
        pattern = re.compile(re.sub(r"\(\?-i:", "(?-i:", text.replace("(?i)", "")), flags)
        rules.append((pattern, rule.get("keywords", ()), rule.get("entropy", 0.0), rule))

    def misses(shape: Shape) -> bool:
        text = shape.text.replace("\x1f", " ") + "\n"
        for pattern, keywords, least, rule in rules:
            if keywords and not any(word.lower() in text.lower() for word in keywords):
                continue
            for match in pattern.finditer(text):
                groups = [group for group in match.groups() if group]
                value = match[rule["secretGroup"]] if "secretGroup" in rule else ""
                value = value or (groups[0] if groups else match[0])
                if measure_entropy(value) >= least and overlap(value, shape):
                    return False
        return True

    return misses


def measure_entropy(text: str) -> float:
    counts = Counter(text).values()
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts)


def render_harmless(folder: Path) -> list[str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    rows, words, held, with_any = [], 0, 0, 0
    for path in files:
        text = path.read_text(errors="replace")
        if path.suffix in (".yaml", ".yml"):
            try:
                shown = withhold(redact_text(text))
            except yaml.YAMLError:
                shown = withhold(text)
        else:
            shown = withhold(text)
        here = shown.count(REDACTED) - text.count(REDACTED)
        words += len(text.split())
        held += here
        with_any += here > 0
        rows.append((path.name, here))
    print(*(f"{name}: {here}" for name, here in rows if here), sep="\n", file=sys.stderr)
    return [
        "## Held for nothing",
        "",
        f"In {len(files)} confs and patches of public repositories, none known to have a secret; "
        "drawn after the rule of entropy was chosen:",
        "",
        "| | number | of | per cent | at most |",
        "|---|---|---|---|---|",
        f"| words held | {held} | {words} | {100 * held / max(1, words):.3f} | 2 |",
        f"| files with any | {with_any} | {len(files)} | {100 * with_any / len(files):.0f} | |",
        "",
    ]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Secrets that others would see.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rules", type=Path)
    parser.add_argument("--harmless", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(words)
    shapes = [shape for seed in range(given.seeds) for shape in draw_shapes(seed)]
    ways: dict[str, Callable[[Shape], bool]] = {"vjob": misses_ours}
    skipped = []
    if find_spec("detect_secrets"):
        ways["detect-secrets"] = build_detect_secrets()
    else:
        skipped.append("detect-secrets: not installed")
    if given.rules:
        ways["gitleaks' rules"] = build_gitleaks(given.rules)
    else:
        skipped.append("gitleaks' rules: --rules names no file")
    missed = {way: [shape for shape in shapes if misses(shape)] for way, misses in ways.items()}
    kinds = {shape.name for shape in shapes}
    lines = [
        "# Secrets that others would see",
        "",
        f"{len(kinds)} shapes in {len({s.artefact for s in shapes})} artefacts, each drawn "
        f"{given.seeds} times: {len(shapes)} texts. A miss is a text of which others would see "
        f"{LEAST_LEFT} letters of the secret; of a scanner, one in which it names no part of it. "
        "The corpus is this project's own, so its zero says less than the peers' share: they look "
        "for secrets in repositories, where one held for nothing costs more than here.",
        "",
        "| | misses | of | shapes missed anywhere |",
        "|---|---|---|---|",
    ]
    for way, out in missed.items():
        names = {shape.name for shape in out}
        lines.append(f"| {way} | {len(out)} | {len(shapes)} | {len(names)} of {len(kinds)} |")
    lines += ["", *(f"Not measured: {reason}." for reason in skipped)]
    artefacts = sorted({shape.artefact for shape in shapes})
    lines += ["", f"| misses in | texts | {' | '.join(ways)} |", "|---" * (len(ways) + 2) + "|"]
    for artefact in artefacts:
        total = sum(shape.artefact == artefact for shape in shapes)
        counts = [sum(s.artefact == artefact for s in missed[way]) for way in ways]
        lines.append(f"| {artefact} | {total} | {' | '.join(map(str, counts))} |")
    lines += [
        "",
        "Missed by vjob: "
        + (", ".join(sorted({f"{s.name} ({s.artefact})" for s in missed["vjob"]})) or "none")
        + ".",
        "",
    ]
    lines += commands.render(commands.measure(0))
    lines += render_harmless(given.harmless) if given.harmless else []
    text = "\n".join(lines)
    print(text)
    if given.write:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
