"""Google Cloud Storage's XML API in front of an S3 server, as far as obstore speaks it.

The API is that of S3 with other conditions: an object has a generation, a number, which is made of its ETag
here.
"""

import http.client
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

SIGNED = (
    "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)
PASSED = ("range", "content-type", "content-length", "if-match", "if-none-match")
OWN = ("transfer-encoding", "connection", "date", "server")


class GoogleFront(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, s3: tuple[str, int]) -> None:
        handler = type("Handler", (_Handler,), {"s3": s3})
        super().__init__(("127.0.0.1", 0), handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients are killed, too: nothing to tell."""


def generation(etag: str) -> str:
    return str(int(etag.strip('"').partition("-")[0][:14], 16) + 1)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    s3: tuple[str, int]

    def parse_request(self) -> bool:
        """Google's clients quote everything, also the hyphen of a bucket and the slashes of a key."""
        parsed = super().parse_request()
        if parsed:
            path, mark, query = self.path.partition("?")
            self.path = quote(unquote(path)) + mark + query
        return parsed

    def ask(
        self, method: str, headers: Mapping[str, str], body: bytes = b""
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(*self.s3, timeout=30)
        connection.request(method, self.path, body, {**headers, "Authorization": SIGNED})
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        connection.close()
        return answer.status, *found

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() in PASSED}
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted == "0":
            headers["If-None-Match"] = "*"
        elif wanted:
            etag = self.ask("HEAD", {})[1].get("etag")
            headers["If-Match"] = etag if etag and generation(etag) == wanted else '"other"'
        if self.command == "DELETE" and "?" not in self.path and self.ask("HEAD", {})[0] == 404:
            status, found, content = 404, {}, b""  # S3 answers 204
        else:
            status, found, content = self.ask(self.command, headers, body)
        if wanted not in (None, "0") and status == 404:
            status = 412
        self.send_response(status)
        if "etag" in found:
            self.send_header("x-goog-generation", generation(found["etag"]))
        for name, value in found.items():
            if name not in OWN:
                self.send_header(name, value)
        if "content-length" not in found:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        pass
