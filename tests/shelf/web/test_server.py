"""Who may ask what of the server, and what an answer carries."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from vjob.jobs.errors import InputError
from vjob.shelf.web.feed import Feed, JobReading
from vjob.shelf.web.server import MOST_CONNECTIONS, LivePage, Server, Site, is_own_host

TOKEN = "secret-of-this-server"
OWN = "127.0.0.1:8765"


def make_page(name: str = "first") -> LivePage:
    feed = Feed(lambda: JobReading(parts={"page": name.encode()}, note="live"), every_s=1000)
    feed.renew()
    return LivePage(
        document=lambda: b"<title>" + name.encode(), files={"page.js": lambda: b"1;"}, feed=feed
    )


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site(make_page(), lambda path: make_page(path) if path == "run/a" else None, TOKEN)
    yield site
    site.close()


def test_without_the_token_there_is_no_word(site: Site) -> None:
    wrong = ["/", "", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/", f"//{TOKEN}/", "/state", "/page.js"]
    for path in (*wrong, f"/x/{TOKEN}/", f"/?token={TOKEN}", "/\u00ff/", f"http://a/{TOKEN[:3]}/"):
        for method in ("GET", "POST"):
            reply = site.answer(method, path, OWN)
            assert (reply.status, reply.body, reply.location) == (403, b"", ""), path


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        (OWN, True),
        ("localhost:1", True),
        ("127.0.0.1", True),
        ("[::1]:8765", True),
        ("LOCALHOST:8765", True),
        ("", False),
        ("evil.example", False),
        ("evil.example:8765", False),
        ("127.0.0.1.evil.example:8765", False),
        ("127.0.0.1:8765@evil.example", False),
        ("127.0.0.1:x", False),
        ("10.0.0.1:8765", False),
    ],
)
def test_a_name_that_somebody_points_here_gets_nothing(host: str, is_own: bool, site: Site) -> None:
    assert is_own_host(host) is is_own
    assert site.answer("GET", f"/{TOKEN}/", host).status == (200 if is_own else 403)


def test_only_get_is_served(site: Site) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE"):
        assert site.answer(method, f"/{TOKEN}/", OWN).status == 405


def test_a_page_has_a_document_scripts_a_state_and_parts(site: Site) -> None:
    def get(path: str) -> tuple[int, bytes, str]:
        reply = site.answer("GET", f"/{TOKEN}/{path}", OWN)
        return reply.status, reply.body, reply.kind

    assert get("") == (200, b"<title>first", "html")
    assert get("page.js") == (200, b"1;", "js")
    status, state, kind = get("state?since=0&after=0")
    assert (status, kind) == (200, "json") and b'"version": 1' in state and b'"parts"' in state
    assert b'"parts"' not in get("state?since=1")[1]
    assert get("state?since=x&after=%00")[0] == 200
    page = site.answer("GET", f"/{TOKEN}/state", OWN).body.decode().split('"page": "')[1][:20]
    assert get(f"part/{page}") == (200, b"first", "bytes")
    assert get("run/a/") == (200, b"<title>run/a", "html")
    assert get("run/a/page.js")[0] == 200 and get("run/a/state")[0] == 200
    for path in ("part/x", "part/../page.js", "run/b/", "run/b/state", "other", "%2e%2e/x"):
        assert get(path)[0] == 404, path


def test_pages_that_are_opened_are_few(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[LivePage] = []

    def find(path: str) -> LivePage:
        opened.append(make_page(path))
        return opened[-1]

    monkeypatch.setattr("vjob.shelf.web.server.MOST_PAGES", 2)
    site = Site(make_page(), find, TOKEN)
    for name in ("a", "b", "a", "c", "a", "b"):
        assert site.answer("GET", f"/{TOKEN}/{name}/", OWN).body == b"<title>" + name.encode()
    assert [page.document().decode()[7:] for page in opened] == ["a", "b", "c", "b"]
    assert site.answer("GET", f"/{TOKEN}/", OWN).body == b"<title>first"


@pytest.fixture
def server(site: Site) -> Iterator[Server]:
    with Server(site) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(
    server: Server, method: str, path: str, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, dict(answer.getheaders())


def test_it_listens_on_this_machine_alone_and_keeps_still(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    status, body, headers = ask(server, "GET", f"/{TOKEN}/")
    assert (status, body) == (200, b"<title>first")
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["X-Frame-Options"] == "DENY"
    assert not any(name.lower().startswith("access-control") for name in headers)
    for method, path in (("GET", "/"), ("POST", "/x"), ("HEAD", "/"), ("BREW", "/")):
        status, body, headers = ask(server, method, path, Origin="http://evil.example")
        assert status in (403, 501) and body == b""
        assert headers.keys() <= {"Content-Length", "Connection"}, headers
    assert ask(server, "GET", f"/{TOKEN}/", Host="evil.example")[:2] == (403, b"")
    assert ask(server, "GET", f"/{TOKEN}")[2]["Location"] == f"/{TOKEN}/"
    assert capfd.readouterr() == ("", "")


def test_what_is_no_http_gets_nothing(server: Server) -> None:
    for text in (
        b"\0\1\2\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET " + b"a" * 70000 + b"\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as link:
            link.sendall(text)
            link.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while piece := link.recv(4096):
                    answer += piece
            except ConnectionError:  # it was not read to its end
                pass
            assert b"html" not in answer.lower() and b"python" not in answer.lower()
    assert ask(server, "GET", f"/{TOKEN}/")[0] == 200


def test_strangers_that_trickle_do_not_keep_the_owner_out(server: Server) -> None:
    """64 connections without the token held every seat for as long as they liked."""
    with contextlib.ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS + 8):
            link = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            link.sendall(b"GET / HTTP/1.1\r\nX-A: b\r\n")
        assert ask(server, "GET", f"/{TOKEN}/")[0] == 200


def test_a_stranger_ends_however_it_trickles_and_the_owner_stays(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    owner.request("GET", f"/{TOKEN}/")
    owner.getresponse().read()
    monkeypatch.setattr("vjob.shelf.web.server.TO_SHOW_TOKEN_S", 0.0)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(100) == b""
    owner.request("GET", f"/{TOKEN}/")
    assert owner.getresponse().status == 200
    owner.close()


def test_a_port_that_is_taken_is_said(server: Server, site: Site) -> None:
    with pytest.raises(InputError, match=f"port {server.port} .*choose another, or none"):
        Server(site, server.port)
