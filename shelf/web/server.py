"""HTTP server of live pages: only GET, only on 127.0.0.1, only for holders of the token.

Every user of a login node can connect to its 127.0.0.1, and every web page that a user has open can
send requests there. Hence

- the path has a token, new for each server, compared in constant time; without it the answer is an
  empty 403;
- the Host header must name this machine, so a foreign name that resolves to 127.0.0.1 is refused;
- there are no CORS headers and no cookies, and a policy forbids pages to load anything from
  elsewhere and to run scripts other than the server's own files;
- the token is not logged (there is no log) and not sent to other sites (no Referer).
"""

from __future__ import annotations

import contextlib
import gzip
import hmac
import json
import re
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from vjob.jobs.errors import InputError, VjobError
from vjob.shelf.web.feed import Feed

HOST = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine at any port, since the user chooses that of `ssh -L`."""
POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "bytes": "application/octet-stream",
}
REQUEST_S = 20.0
"""Seconds after which a silent connection is closed."""
MOST_CONNECTIONS = 64
TO_SHOW_TOKEN_S = 5.0
"""Seconds for a new connection to complete a request with the token, however slowly it sends."""
WAITING = 1024
"""Connections that the kernel may hold for the server."""
PACKED_FROM = 1000
"""Bytes from which an answer is compressed, since it may go through ssh."""
MOST_PAGES = 32
"""The most open pages; the one least recently used is closed."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer to a request; a refusal has an empty one."""

    status: int
    body: bytes = b""
    kind: str = "html"
    location: str = ""
    has_own_policy: bool = False
    """True if the document itself declares what it may load."""


@dataclass(frozen=True, kw_only=True)
class LivePage:
    """A page: its document without data, its scripts, and its feed."""

    document: Callable[[], bytes]
    files: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)
    """Scripts by name."""
    feed: Feed | None = None
    """Source of data; None for a complete document such as a report, which has its own policy."""

    def close(self) -> None:
        if self.feed is not None:
            self.feed.close()


class Site:
    """The pages of a server; `find` opens further ones by their path."""

    def __init__(
        self,
        first: LivePage,
        find: Callable[[str], LivePage | None] = lambda path: None,
        token: str | None = None,
    ) -> None:
        self.token = token or secrets.token_urlsafe(24)
        self._find = find
        self._pages: dict[str, LivePage] = {"": first}
        self._lock = threading.Lock()

    def answer(self, method: str, target: str, host: str) -> Reply:
        """Return the answer to a request. Pure, except that it opens pages."""
        if not is_own_host(host):
            return Reply(status=403)
        url = urlsplit(target)
        token, slash, path = url.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return Reply(status=403)
        if method != "GET":
            return Reply(status=405)
        if not slash:
            return Reply(status=301, location=f"/{self.token}/")
        place, _, name = path.rpartition("/")
        if place == "part" or place.endswith("/part"):
            name, place = f"part/{name}", place.removesuffix("part").removesuffix("/")
        page = self._open(place)
        return Reply(status=404) if page is None else _answer_text(page, name, url.query)

    def close(self) -> None:
        with self._lock:
            pages = list(self._pages.values())
        for page in pages:
            page.close()

    def _open(self, place: str) -> LivePage | None:
        """Return the page of a place, opening it if needed; None if there is none."""
        with self._lock:
            found = self._pages.pop(place, None)
            if found is None:
                try:
                    found = self._find(place)
                except VjobError:
                    return None
            if found is None:
                return None
            self._pages[place] = found  # the last that was looked at is the last
            for old in [name for name in self._pages if name][:-MOST_PAGES]:
                self._pages.pop(old).close()
            return found


def _answer_text(page: LivePage, name: str, query: str) -> Reply:
    if page.feed is None:
        return _answer_whole(page, name)
    if not name:
        return Reply(status=200, body=page.document())
    if name == "state":
        asked = parse_qs(query)
        state = build_state(page.feed, _read_number(asked, "since"), _read_number(asked, "after"))
        return Reply(status=200, body=json.dumps(state).encode(), kind="json")
    if name.startswith("part/"):
        data = page.feed.find_part(name.removeprefix("part/"))
        return Reply(status=404) if data is None else Reply(status=200, body=data, kind="bytes")
    script = page.files.get(name)
    return Reply(status=404) if script is None else Reply(status=200, body=script(), kind="js")


def _answer_whole(page: LivePage, name: str) -> Reply:
    """Return the present document; 404 if its subject is gone."""
    if name:
        return Reply(status=404)
    try:
        return Reply(status=200, body=page.document(), has_own_policy=True)
    except VjobError:
        return Reply(status=404)


def build_state(feed: Feed, since: int, after: int) -> dict[str, Any]:
    """Build the small answer that tabs poll; parts are named only if the version has changed."""
    shown = feed.look()
    lines, last = feed.list_lines(after)
    state: dict[str, Any] = {
        "version": shown.version,
        "note": shown.note,
        "is_trouble": shown.is_trouble,
        "is_over": shown.is_over,
        "every_s": feed.every_s if shown.version else 1.0,
        "last": last,
    }
    if shown.version != since:
        state["parts"] = dict(shown.names)
    if lines:
        state["lines"] = lines
    return state


def _read_number(asked: Mapping[str, list[str]], name: str) -> int:
    text = asked.get(name, ["0"])[0]
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else 0


def is_own_host(host: str) -> bool:
    """Return True if a Host header names this machine."""
    name, colon, port = host.strip().lower().rpartition(":")
    if colon and re.fullmatch(r"[0-9]{1,5}", port):
        return name in HOSTS
    return host.strip().lower() in HOSTS


class Server(socketserver.ThreadingTCPServer):
    """Serves a site; port 0 takes a free one. Raise InputError if the port is taken.

    http.server's own class is not used, since it first asks the name service for its own name.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = WAITING

    def __init__(self, site: Site, port: int = 0) -> None:
        self.site = site
        self._connections: dict[Any, float] = {}
        """Begin of each connection, oldest first; 0.0 for one that showed the token."""
        self._seats = threading.Lock()
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise InputError(
                f"port {port} of {HOST}: {getattr(error, 'strerror', None) or error}; choose "
                "another, or none to use a free one"
            ) from None
        self.port = int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._connections) >= MOST_CONNECTIONS and not self._drop_stranger(0.0):
            self.shutdown_request(request)
            return
        with self._seats:
            self._connections[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Do periodic work, called between connections and at least twice a second."""
        while self._drop_stranger(TO_SHOW_TOKEN_S):
            pass

    def welcome(self, request: Any) -> None:
        """Mark a connection that showed the token, to be kept before others."""
        with self._seats:
            if request in self._connections:
                self._connections[request] = 0.0

    def _drop_stranger(self, least_s: float) -> bool:
        """Close the oldest connection without the token if it is old enough; return True if so."""
        with self._seats:
            strangers = (one for one, since in self._connections.items() if since)
            found = next(strangers, None)
            if found is None or time.monotonic() - self._connections[found] < least_s:
                return False
            del self._connections[found]
        with contextlib.suppress(OSError):
            found.shutdown(socket.SHUT_RDWR)  # its thread reads an end, and closes it
        return True

    def shutdown_request(self, request: Any) -> None:
        with self._seats:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Close the server and all kept-alive connections."""
        super().server_close()
        for request in list(self._connections):
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a broken connection; the tab will open another."""


class Handler(BaseHTTPRequestHandler):
    """Passes requests to the site, without logging."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_S

    def do_GET(self) -> None:
        reply = self.server.site.answer(self.command, self.path, self._find_host())
        if reply.status != 403:
            self.server.welcome(self.connection)
        self._send(reply, is_packed="gzip" in self.headers.get("Accept-Encoding", ""))

    do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = do_GET
    do_TRACE = do_CONNECT = do_GET

    def _find_host(self) -> str:
        """Return the Host header; empty if there is none, or more than one."""
        hosts = self.headers.get_all("Host") or []
        return hosts[0] if len(hosts) == 1 else ""

    def _send(self, reply: Reply, *, is_packed: bool = False) -> None:
        body = reply.body
        is_packed = is_packed and len(body) >= PACKED_FROM
        if is_packed:
            body = gzip.compress(body, 5, mtime=0)
        self.send_response_only(reply.status)
        if reply.status == 200:
            for name, value in HEADERS.items():
                if name != "Content-Security-Policy" or not reply.has_own_policy:
                    self.send_header(name, value)
            self.send_header("Content-Type", TYPES[reply.kind])
        if is_packed:
            self.send_header("Content-Encoding", "gzip")
        if reply.location:
            self.send_header("Location", reply.location)
        self.send_header("Content-Length", str(len(body)))
        if reply.status != 200 or self.command != "GET":
            # What such a request carries is not read: it must not be taken for the next one.
            self.close_connection = True
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer an invalid request without details, which could help an attacker."""
        self.close_connection = True
        self._send(Reply(status=code))

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, since paths contain the token."""
