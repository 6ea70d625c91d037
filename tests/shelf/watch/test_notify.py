"""Notices by mail, webhook and command: real servers, real processes, and no secret anywhere."""

from __future__ import annotations

import email
import email.policy
import http.server
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command import PROGRAMS, Vjob, wait_for
from tests.shelf.watch.test_watch import make_snapshot, make_verdict
from varuna_core.records.record import read_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.monitor.model.snapshot import Health, Line
from vjob.shelf.watch import notify
from vjob.shelf.watch.notify import (
    WAITS_S,
    Channels,
    build_mail,
    check_webhook,
    choose_channels,
    post,
    read_webhook,
    run_command,
    send,
    send_mail,
)
from vjob.shelf.watch.watch import FINE, Notice

SECRET = "T0/s3cret-hook"


def make_notice(news: str = "STALLED", reason: str = "no step for 130 s") -> Notice:
    line = Line(text="RuntimeError: Connection closed", node="b2", rank=3)
    verdict = make_verdict(Health.STALLED, reason=reason, evidence=(line,), advice="vjob stacks 12")
    return Notice(news=news, snapshot=make_snapshot("/runs/gpt-1"), verdict=verdict)


class Server:
    """Answers with these codes, one a request; 0 is a silence."""

    def __init__(self, codes: list[int]) -> None:
        self.heard: list[dict[str, object]] = []
        self.headers: list[str] = []
        self.quiet = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.heard.append(json.loads(body))
                outer.headers.append(str(self.headers["Content-Type"]))
                code = codes.pop(0)
                if code == 0:
                    outer.quiet.wait(60)
                    return
                self.send_response(code)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def do_GET(self) -> None:
                outer.heard.append({"method": "GET"})

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/{SECRET}?key={SECRET}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.quiet.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    monkeypatch.setenv("no_proxy", "*")
    servers: list[Server] = []

    def start(*codes: int) -> Server:
        servers.append(Server([*codes]))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Pauses(list[float]):
    """How long was waited for."""

    def __call__(self, seconds: float) -> bool:
        self.append(seconds)
        return True


def test_a_webhook_that_is_out_of_order_gets_the_notice_later(
    serve: Callable[..., Server],
) -> None:
    server, pauses = serve(500, 429, 200), Pauses()
    post(server.url, make_notice().as_json(), pauses)
    assert pauses == [1, 2]
    assert len(server.heard) == 3 and server.headers[0] == "application/json"
    told = server.heard[-1]
    assert told["news"] == "STALLED" and told["jobs"] == ["12"]
    assert str(told["text"]).splitlines() == [
        "gpt-1 is STALLED: no step for 130 s",
        "b2: RuntimeError: Connection closed",
        "vjob stacks 12",
    ]


def test_one_that_stays_so_is_given_up_and_its_address_is_not_told(
    serve: Callable[..., Server],
) -> None:
    server, pauses = serve(500, 502, 503, 504), Pauses()
    with pytest.raises(VjobError, match="HTTP 504") as caught:
        post(server.url, make_notice().as_json(), pauses)
    assert pauses == list(WAITS_S) and len(server.heard) == 4
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("code", [400, 404, 410, 302, 307])
def test_what_is_refused_for_good_is_not_sent_again(
    code: int, serve: Callable[..., Server]
) -> None:
    server, pauses = serve(code), Pauses()
    with pytest.raises(VjobError, match=f"HTTP {code}"):
        post(server.url, make_notice().as_json(), pauses)
    assert pauses == [] and len(server.heard) == 1


def test_a_server_that_never_answers_is_left(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "TRY_S", 0.2)
    pauses = Pauses()
    post(serve(0, 200).url, make_notice().as_json(), pauses)
    assert pauses == [1]


def test_nobody_there_is_said_without_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/{SECRET}"
        with pytest.raises(VjobError, match="Connection refused") as caught:
            post(url, {}, Pauses())
    assert SECRET not in str(caught.value)


def test_who_wants_to_leave_does_not_wait_for_more_tries(serve: Callable[..., Server]) -> None:
    server = serve(500)
    with pytest.raises(VjobError, match="HTTP 500"):
        post(server.url, {}, lambda seconds: False)
    assert len(server.heard) == 1


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h/x",
        "https://?a=b",
        "hooks",
        "http://[h/x",
        "http://h:x/y",
        "http://h/a b",
        "http://h/\n",
        "http://h/ü",
        "file:///etc",
    ],
)
def test_what_is_no_web_address_is_refused_unseen(url: str) -> None:
    with pytest.raises(InputError) as caught:
        check_webhook(url)
    assert url not in str(caught.value)


@given(st.text(min_size=1, max_size=40))
def test_no_address_breaks_a_watch(text: str) -> None:
    url = f"http://127.0.0.1:1/{text}"
    try:
        check_webhook(url)
    except InputError:
        return
    with pytest.raises(VjobError) as caught:
        post(url, {}, lambda seconds: False)
    assert len(text) < 9 or text not in str(caught.value)


SENDMAIL = """#!{python}
import os, sys
from pathlib import Path
folder = Path(__file__).parent
(folder / "mail").write_bytes(sys.stdin.buffer.read())
(folder / "argv").write_text(repr(sys.argv[1:]))
print("relay: me@host denied", file=sys.stderr)
sys.exit(int(os.environ.get("SENDMAIL_CODE", "0")))
"""


@pytest.fixture
def mailer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mailer"
    folder.mkdir()
    program = folder / "sendmail"
    program.write_text(SENDMAIL.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_a_mail_goes_through_the_local_mailer(mailer: Path) -> None:
    send_mail(make_notice(reason="no step ünd\nBcc: you@example.org"), "me@example.org")
    mail = email.message_from_bytes((mailer / "mail").read_bytes(), policy=email.policy.default)
    assert mail["To"] == "me@example.org"
    assert mail["Bcc"] is None
    assert mail["Subject"].startswith("vjob: gpt-1 is STALLED: no step ünd Bcc:")
    assert "vjob stacks 12" in mail.get_content() and "/runs/gpt-1" in mail.get_content()
    assert "example" not in (mailer / "argv").read_text()


@given(st.text(max_size=400))
def test_whatever_a_reason_says_the_mail_has_one_recipient(reason: str) -> None:
    try:
        data = build_mail(make_notice(reason=reason), "me@example.org").as_bytes()
    except UnicodeEncodeError:
        assert any("\ud800" <= char <= "\udfff" for char in reason)
        return
    mail = email.message_from_bytes(data, policy=email.policy.default)
    assert (mail["To"], mail["Cc"], mail["Bcc"]) == ("me@example.org", None, None)


def test_a_mailer_that_refuses_or_is_missing_is_said(
    mailer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SENDMAIL_CODE", "75")
    with pytest.raises(VjobError, match="exited 75: relay: me@host denied"):
        send_mail(make_notice(), "me@example.org")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(notify, "MAILERS", ())
    with pytest.raises(VjobError, match="no sendmail"):
        send_mail(make_notice(), "me@example.org")


def test_a_command_gets_the_notice_and_its_text_is_in_no_process_list(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    told = tmp_path / "told"
    script = (
        f"cat > {told}; HOOK={SECRET}; tr '\\0' ' ' < /proc/$$/cmdline > {seen}; test -n \"$HOOK\""
    )
    run_command(script, make_notice().as_json())
    assert json.loads(told.read_text())["verdict"]["health"] == "STALLED"
    assert SECRET not in seen.read_text()


def test_a_command_that_fails_or_hangs_is_said_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(VjobError, match="exited 3: no such team"):
        run_command("echo no such team >&2; exit 3", {})
    monkeypatch.setattr(notify, "COMMAND_S", 1)
    pid = tmp_path / "pid"
    with pytest.raises(VjobError, match="did not end within 1 s"):
        run_command(f"sleep 60 & echo $! > {pid}; wait", {})
    wait_for(lambda: not Path(f"/proc/{pid.read_text().strip()}").exists(), 20)
    run_command("exec 0<&-; exit 0", {"text": "x" * 10**6})  # it does not read


def test_one_channel_that_fails_keeps_no_other_from_its_notice(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    server = serve(404)
    told = tmp_path / "told"
    failing = Channels(webhook=server.url, command=f"cat > {told}")
    problems = send(make_notice(FINE), failing, Pauses())
    assert list(problems) == ["webhook at 127.0.0.1"]
    assert json.loads(told.read_text())["news"] == "recovered"
    loud = Channels(webhook=server.url, command=f"echo curl {server.url} failed; exit 1")
    server = serve(404)
    assert SECRET not in str(send(make_notice(), loud, lambda seconds: False))
    assert SECRET not in repr(loud)


CONF = """
name: quick
program: {{script: {script}, args: ["0", "exit:0"]}}
cluster: {{scheduler: local, walltime_min: 1}}
notify: {{webhook: "https://hooks.example.org/{secret}", mail: me@example.org}}
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    vjob = Vjob(tmp_path)
    found = vjob.submit(CONF.format(script=PROGRAMS / "fail_as_told.py", secret=SECRET))
    vjob("cancel", str(found.path), "--now", code=None)
    vjob.wait_over(found)
    return found


def find_conf(run: RunFolder) -> Path:
    record = read_record(run)
    assert record is not None
    return Path(record.conf)


def test_the_webhook_comes_from_the_conf_as_the_run_does_not_keep_it(run: RunFolder) -> None:
    conf = find_conf(run)
    for path in run.path.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path
    found = choose_channels(run, conf, Channels(), {})
    assert found.webhook == f"https://hooks.example.org/{SECRET}"
    assert found.names == ["mail to me@example.org", "webhook at hooks.example.org"]
    given = Channels(mail="you@example.org", webhook="https://h.org/y")
    assert choose_channels(run, conf, given, {}) == given
    told = {"VJOB_WEBHOOK": "https://e.org/z"}
    assert choose_channels(run, conf, Channels(), told).webhook == "https://e.org/z"
    conf.unlink()
    with pytest.raises(InputError, match=r"notify\.webhook is hidden.*set VJOB_WEBHOOK"):
        choose_channels(run, conf, Channels(), {})
    assert choose_channels(run, conf, Channels(), told).mail == "me@example.org"


def test_a_webhook_is_read_from_a_file_and_never_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "hook"
    path.write_text("https://h.org/x\n")
    assert read_webhook(path) == "https://h.org/x"
    assert read_webhook(None) is None
    path.write_text(" \n")
    for wrong in (path, tmp_path / "no", Path(f"https://h.org/{SECRET}")):
        with pytest.raises(InputError) as caught:
            read_webhook(wrong)
        assert SECRET not in str(caught.value)
