"""Send notices by mail, a webhook, or a command of the user.

A channel that fails is reported without raising, and the watch continues. The webhook's address is
a secret (whoever has it can write there): errors and events contain only its host.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from pathlib import Path
from typing import Any

from varuna_core.records.runfolder import RunFolder
from varuna_core.records.secrets import REDACTED, withhold
from vjob.jobs import process
from vjob.jobs.conf.loading.load import read_conf
from vjob.jobs.conf.schema import Notify
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.runs.owner import is_ours
from vjob.jobs.runs.resolved import read_resolved
from vjob.shelf.watch.watch import Notice

WEBHOOK_VARIABLE = "VJOB_WEBHOOK"
TRY_S = 10.0
WAITS_S = (1.0, 2.0, 4.0)
"""Seconds between the tries of a webhook."""
COMMAND_S = 60.0
MAILERS = ("/usr/sbin/sendmail", "/usr/lib/sendmail")
RUN_COMMAND = ["sh", "-c", 'eval "$VJOB_NOTIFY"']
"""Shell that evaluates a variable: the list of processes would show a command's secrets."""

Pause = Callable[[float], bool]
"""Function that waits some seconds; returns False if the wait should end."""


@dataclass(frozen=True, kw_only=True)
class Channels:
    """The channels to which notices are sent."""

    mail: str | None = None
    webhook: str | None = None
    command: str | None = None

    def __repr__(self) -> str:
        return f"Channels({', '.join(self.names) or 'none'})"

    @property
    def names(self) -> list[str]:
        """Names of the channels, without secrets."""
        found = [f"mail to {self.mail}"] if self.mail else []
        found += [f"webhook at {shorten_url(self.webhook)}"] if self.webhook else []
        return [*found, "command"] if self.command else found


def choose_channels(
    run: RunFolder, conf: Path, given: Channels, environ: Mapping[str, str] = os.environ
) -> Channels:
    """Return the channels: `given` first, then VJOB_WEBHOOK, then `notify` of the run.

    A run folder has no secrets, so hidden values are looked up in the submitted conf. For another
    user's run, only given channels count.
    """
    kept = _read_kept(run) if is_ours(run) else {}
    wanted = {
        name: getattr(given, name) or kept.get(name) for name in ("mail", "webhook", "command")
    }
    wanted["webhook"] = given.webhook or environ.get(WEBHOOK_VARIABLE) or wanted["webhook"]
    hidden = [name for name, value in wanted.items() if value and REDACTED in value]
    if hidden:
        notify = _read_again(conf)
        for name in hidden:
            wanted[name] = getattr(notify, name, None)
            if not wanted[name]:
                hint = f"set {WEBHOOK_VARIABLE}" if name == "webhook" else f"give --{name}"
                raise InputError(
                    f"notify.{name} is hidden in the run's folder, and {conf} no longer sets "
                    f"it: {hint}, or use `--quiet` to send no notices"
                )
    if wanted["webhook"]:
        check_webhook(wanted["webhook"])
    return Channels(**wanted)


def _read_kept(run: RunFolder) -> dict[str, str]:
    try:
        notify = read_resolved(run).get("notify") or {}
        return {name: str(value) for name, value in notify.items() if value}
    except AttributeError:
        return {}


def _read_again(conf: Path) -> Notify | None:
    try:
        return read_conf(conf, require_paths=False, require_env=False).notify
    except (VjobError, OSError):  # moved, or rewritten since
        return None


def read_webhook(path: Path | None) -> str | None:
    """Return the URL in a file; on a command line, all users of the machine could read it."""
    if path is None:
        return None
    if str(path).startswith(("http:/", "https:/")):
        raise InputError(
            f"--webhook takes a file with the URL in it, or set {WEBHOOK_VARIABLE}: anyone on "
            "this machine can read your command lines"
        )
    try:
        words = path.read_text(encoding="utf-8", errors="replace").split()
    except OSError as error:
        raise InputError(f"--webhook {path}: {error.strerror}") from None
    if not words:
        raise InputError(f"--webhook {path}: the file is empty, but must hold a URL")
    return words[0]


def check_webhook(url: str) -> None:
    """Refuse a text that is no web address, without repeating it."""
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or not url.isascii() or not url.isprintable() or " " in url:
        raise InputError("the webhook must be a URL that begins with https:// or http://")


def shorten_url(url: str) -> str:
    """Return the part of a webhook's address that may be shown."""
    try:
        return urllib.parse.urlsplit(url).hostname or "?"
    except ValueError:
        return "?"


def send(notice: Notice, channels: Channels, pause: Pause) -> dict[str, str]:
    """Send to all channels; return the failures by channel, without secrets."""
    deliveries: list[tuple[str | None, Callable[[str], None]]] = [
        (channels.mail, lambda to: send_mail(notice, to)),
        (channels.webhook, lambda url: post(url, notice.as_json(), pause)),
        (channels.command, lambda text: run_command(text, notice.as_json())),
    ]
    wanted = [(value, deliver) for value, deliver in deliveries if value]
    problems = {}
    for name, (value, deliver) in zip(channels.names, wanted, strict=True):
        try:
            deliver(value)
        except VjobError as error:
            problems[name] = withhold(str(error).replace(channels.webhook or "\n", REDACTED))
    return problems


# Mail.


def build_mail(notice: Notice, to: str) -> EmailMessage:
    mail = EmailMessage()
    mail["To"] = to
    mail["Subject"] = " ".join(f"vjob: {notice.headline}".split())[:200]
    mail["Date"] = formatdate(localtime=True)
    mail["Message-ID"] = make_msgid(domain="vjob.invalid")
    mail["Auto-Submitted"] = "auto-generated"
    value = notice.as_json()
    jobs = ", ".join(value["jobs"])
    mail.set_content(
        f"{value['text']}\n\nrun {value['run']}\njob {jobs}\nfiles {value['folder']}\n"
    )
    return mail


def send_mail(notice: Notice, to: str) -> None:
    """Send a mail through the machine's own mailer."""
    program = shutil.which("sendmail") or next(filter(os.path.exists, MAILERS), None)
    if program is None:
        raise VjobError(
            "this machine has no sendmail: run `vjob watch` on one that has it, or use a webhook"
        )
    text = build_mail(notice, to).as_bytes()
    result = process.run_fed([program, "-oi", "-t"], text, env=os.environ, timeout_s=COMMAND_S)
    if result.code != 0:
        raise VjobError(f"{program} exited {result.code}: {result.err.strip()[-300:]}")


# Webhook.


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a redirected POST becomes a GET, and its body is lost."""

    def redirect_request(self, *words: Any, **options: Any) -> None:
        return None


def post(url: str, value: Mapping[str, Any], pause: Pause) -> None:
    """Post until accepted, at most four times; a final refusal is not retried."""
    opener = urllib.request.build_opener(_NoRedirects)
    for wait_s in (*WAITS_S, None):
        request = urllib.request.Request(
            url,
            data=json.dumps(value).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "vjob"},
        )
        begun = time.monotonic()
        try:
            with opener.open(request, timeout=TRY_S):
                return
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code}"
            error.close()
            if error.code < 500 and error.code not in (408, 429):
                raise VjobError(
                    f"{problem}; the server refused it, so it is not sent again"
                ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem = f"{_explain(error)} after {time.monotonic() - begun:.0f} s"
        if wait_s is None or not pause(wait_s):
            break
    raise VjobError(problem)


def _explain(error: Exception) -> str:
    """Explain an error without the address that it may contain."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return "no answer"
    if isinstance(reason, OSError) and reason.strerror:
        return str(reason.strerror)
    return type(reason).__name__


# Command.


def run_command(text: str, value: Mapping[str, Any]) -> None:
    """Run a command with the notice as JSON on its standard input."""
    env = {**os.environ, "VJOB_NOTIFY": text}
    data = json.dumps(value).encode() + b"\n"
    result = process.run_fed(RUN_COMMAND, data, env=env, timeout_s=COMMAND_S)
    if result.code != 0:
        raise VjobError(f"exited {result.code}: {(result.err or result.out).strip()[-300:]}")
