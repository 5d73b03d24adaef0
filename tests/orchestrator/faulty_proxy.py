"""A proxy before a server of an object storage that fails on demand, on this machine alone."""

import http.client
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Kind = Literal[
    "busy",  # 503 for an answer
    "cut upload",  # the connection is closed in the middle of what is sent
    "cut download",  # the same of what comes
    "short",  # half of what is sent arrives, and all seems well
    "lost answer",  # what is asked for is done, and the connection is closed
    "refused deletion",  # in the answer to a request for several, whose status is 200
    "silent",  # no answer
]


class FaultyProxy:
    """An HTTP proxy in front of an endpoint, which fails requests as a test asks.

    url: the proxy's own.
    requests: "PUT /bucket/key", in the order of their arrival.
    sent: bytes of all answers.
    """

    def __init__(self, host: str, port: int) -> None:
        self.requests: list[str] = []
        self.sent = 0
        self.upstream = host, port
        self._fault: Callable[[str], Kind | None] = lambda request: None
        handler = type("Handler", (_Handler,), {"proxy": self})
        self.server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @contextmanager
    def failing(
        self,
        kind: Kind,
        of: Callable[[str], bool] = lambda request: True,
        *,
        times: float = 1e9,
        for_s: float = 1e9,
    ) -> Iterator[None]:
        """Requests that `of` picks fail: so many of them, or for so long."""
        left, until, lock = [times], time.monotonic() + for_s, threading.Lock()

        def fault(request: str) -> Kind | None:
            with lock:
                if not of(request) or left[0] < 1 or time.monotonic() > until:
                    return None
                left[0] -= 1
                return kind

        with self.failing_by(fault):
            yield
        assert left[0] < times, "nothing failed"

    @contextmanager
    def failing_by(self, fault: Callable[[str], Kind | None]) -> Iterator[None]:
        """Every request fails as `fault` says of it."""
        self._fault = fault
        try:
            yield
        finally:
            self._fault = lambda request: None

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients are killed, too: nothing to tell."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or many a reply takes 40 ms
    wbufsize = 1 << 16
    proxy: "FaultyProxy"

    def answer(self, upstream: tuple[str, int], fault: Kind | None) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if fault == "cut upload" and self.command in ("PUT", "POST"):
            self.rfile.read(length // 2)
            return self.hang_up()
        body = b"".join(self.chunks()) if "Transfer-Encoding" in self.headers else self.rfile.read(length)
        if fault == "silent":
            time.sleep(20)
            return self.hang_up()
        if fault == "busy":
            return self.reply(503, [], b"<Error><Code>SlowDown</Code><Message>busy</Message></Error>")
        if fault == "refused deletion":
            keys = re.findall(rb"<Key>.*?</Key>", body)
            errors = (b"<Error>%s<Code>AccessDenied</Code><Message>no</Message></Error>" % k for k in keys)
            return self.reply(200, [], b"<DeleteResult>%s</DeleteResult>" % b"".join(errors))
        if fault == "short":
            body = body[: len(body) // 2]
        passed = {
            name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP - {"date"}
        }
        connection = http.client.HTTPConnection(*upstream, timeout=30)
        connection.request(self.command, self.path, body=body or None, headers=passed)
        response = connection.getresponse()
        content = response.read()
        if fault == "lost answer":
            return self.hang_up()
        self.proxy.sent += len(content)
        headers = [(name, value) for name, value in response.getheaders() if name.lower() not in HOP_BY_HOP]
        if self.command == "HEAD":
            headers.append(("Content-Length", response.headers.get("Content-Length", "0")))
        self.reply(response.status, headers, content, cut=fault == "cut download")
        connection.close()

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def chunks(self) -> Iterator[bytes]:
        while length := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()

    def reply(
        self, status: int, headers: list[tuple[str, str]], content: bytes, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.wfile.flush()
            self.hang_up()

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        request = f"{self.command} {self.path}"
        self.proxy.requests.append(request)
        self.answer(self.proxy.upstream, self.proxy._fault(request))

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET


HOP_BY_HOP = {"connection", "content-length", "date", "expect", "server", "transfer-encoding"}
