"""S3 servers for tests: moto's server on the loopback interface, and a proxy that injects faults.

Test modules import the fixtures `s3`, which is the server's address, and `s3_proxy`, a new FaultProxy.
"""

import contextlib
import http.client
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit
from xml.sax.saxutils import escape

import botocore.loaders
import pytest

from tests.conftest import free_port

BUCKET = "training"
SECRET = "canary-of-the-secret-key"  # Secret key that must not appear in any output
ERROR = "<?xml version='1.0' encoding='UTF-8'?><Error><Code>{}</Code><Message>{}</Message></Error>"
PAGE = 50  # Maximum number of keys in a response to a list request. AWS sends up to 1,000 keys.


def aws_env(endpoint: str) -> dict[str, str]:
    """Return environment variables for an S3 client that ignores the machine's configuration."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": "",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        "NO_PROXY": "127.0.0.1",
    }


def use_s3(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Send all S3 requests by this process and its children to this endpoint."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    for name, value in aws_env(endpoint).items():
        patch.setenv(name, value)


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """Start a server with the bucket BUCKET in another process, and yield its address, http://host:port."""
    port = free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    env = aws_env("") | {"MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE)}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            _make_bucket(port, process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _make_bucket(port: int, process: subprocess.Popen, log) -> None:
    end_s = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("PUT", f"/{BUCKET}")
            assert connection.getresponse().status == 200
            connection.close()
            return
        if process.poll() is not None or time.monotonic() > end_s:
            log.seek(0)
            pytest.fail(f"moto's server did not start:\n{log.read()}")
        time.sleep(0.05)


@dataclass
class Fault:
    """Fault that affects the next `times` matching requests, or all requests until clear() if `times` is
    None.
    """

    name: str
    times: int | None
    method: str
    path: str
    header: str  # Regular expression that matches the "name: value" form of a header
    do: Callable  # Function of the request's handler and body that returns True if it has handled the request

    def matches(self, handler: BaseHTTPRequestHandler) -> bool:
        headers = [f"{name}: {value}" for name, value in handler.headers.items()]
        return (
            self.times != 0
            and re.fullmatch(self.method, handler.command) is not None
            and re.search(self.path, handler.path) is not None
            and (not self.header or any(re.match(self.header, line, re.I) for line in headers))
        )


class FaultProxy:
    """HTTP proxy to which tests can add faults at any time. If several faults match, the oldest applies
    first.

    Each fault accepts the keyword arguments `where`: `times` (default 1, or None for a fault that lasts until
    clear()), and regular expressions for `method`, `path` (with the query) and `header` ("name: value").

    Attributes:
        faults: Number of occurrences of each fault, by the fault's name.
        requests: Method, path and headers of each request that the proxy received.
    """

    def __init__(self, server: str):
        self.faults: Counter[str] = Counter()
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.target = urlsplit(server).netloc
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._holding = threading.Event()  # Setting this event makes black holes close their connections
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.proxy = self
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self.clear()
        self._http.shutdown()
        self._http.server_close()

    def clear(self) -> None:
        """Remove all faults and close the connections of requests in a black hole."""
        with self._lock:
            self._faults.clear()
            self._holding.set()
            self._holding = threading.Event()

    def add(self, name: str, do: Callable, times=1, method="[A-Z]+", path="", header="") -> None:
        with self._lock:
            self._faults.append(Fault(name, times, method, path, header, do))

    def fail(self, status: int = 503, code: str = "SlowDown", message: str = "broken on purpose", **where):
        """Respond to matching requests with an error. `code` is the error code and the fault's name."""
        self.add(code, lambda handler: handler.error(status, code, message), **where)

    def echo(self, message: str, status: int = 403, code: str = "Odd", **where) -> None:
        """Respond with an error whose message and code contain the request's {headers} or {path}."""

        def answer(handler: "_Handler") -> bool:
            seen = {
                "headers": " ".join(f"{name}: {value}" for name, value in handler.headers.items()),
                "path": handler.path,
            }
            return handler.error(status, code.format(**seen), escape(message.format(**seen)))

        self.add("echo", answer, **{"times": None} | where)

    def delay(self, seconds: float, **where) -> None:
        self.add("delay", lambda handler: time.sleep(seconds), **{"times": None} | where)

    def cut_upload(self, after: int, **where) -> None:
        """Reset the connection after receiving this number of bytes of a PUT request's body."""
        self.add("cut_upload", lambda handler: handler.cut_upload(after), **{"method": "PUT"} | where)

    def cut_download(self, after: int, **where) -> None:
        """Close the connection after sending this number of bytes of the response to a GET request."""
        self.add("cut_download", lambda handler: handler.forward(after), **{"method": "GET"} | where)

    def stall_download(self, after: int, **where) -> None:
        """Stall after sending this number of bytes of the response to a GET request."""
        self.add("stall_download", lambda handler: handler.forward(after, True), **{"method": "GET"} | where)

    def lose_answer(self, **where) -> None:
        """Forward the request but drop the server's response to the client."""
        self.add("lose_answer", lambda handler: handler.forward(-1), **where)

    def black_hole(self, **where) -> None:
        """Accept the request and never respond."""
        self.add("black_hole", lambda handler: handler.hold(), **{"times": None} | where)

    def expire_credentials(self) -> None:
        self.fail(400, "ExpiredToken", "The provided token has expired.", times=None)

    def refuse_conditional_writes(self, status: int = 501, code: str = "NotImplemented") -> None:
        self.fail(status, code, "A header you provided is not known", times=None, header="if-none-match:")

    def ignore_conditional_writes(self) -> None:
        """Write objects without checking If-None-Match, as some stores do."""
        header = "if-none-match:"
        self.add("ignored", lambda handler: handler.headers.__delitem__("If-None-Match"), None, header=header)

    def refuse_checksums(self) -> None:
        """Refuse the headers that boto3 sends with checksums. Over TLS, boto3 sends checksums as trailers."""
        header = r"x-amz-(trailer|sdk-checksum|checksum)|content-encoding:.*aws-chunked"
        self.fail(501, "NotImplemented", "A header you provided is not known", times=None, header=header)

    def require_checksums(self, code: str, message: str) -> None:
        """Refuse objects without a checksum, as a bucket with object retention does."""

        def answer(handler: "_Handler") -> bool:
            is_checked = any(name.lower().startswith("x-amz-checksum") for name in handler.headers)
            return not is_checked and handler.error(400, code, message)

        self.add("unchecked", answer, None, "PUT")

    def refuse_bulk_delete(self) -> None:
        self.add("MissingContentMD5", _Handler.refuse_bulk_delete, None, "POST", r"\?delete")

    def on(self, method: str, path: str, callback: Callable[[], Any], times: int | None = 1) -> None:
        """Call callback() before forwarding a request, and drop the request if callback() returns True."""
        self.add("callback", lambda handler: callback() is True and handler._close(), times, method, path)

    def due(self, handler: "_Handler") -> Iterator[Fault]:
        """Yield the faults that match this request."""
        with self._lock:
            self.requests.append((handler.command, handler.path, dict(handler.headers)))
            faults = [fault for fault in self._faults if fault.matches(handler)]
        for fault in faults:
            with self._lock:
                if fault.times == 0:  # A concurrent request has used up this fault
                    continue
                fault.times = fault.times and fault.times - 1
                self.faults[fault.name] += 1
            yield fault


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    proxy: FaultProxy

    def handle_error(self, request, client_address) -> None:
        """Ignore errors that are caused by disconnected clients."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args) -> None:
        pass

    def handle_expect_100(self) -> bool:
        return True  # _read() sends `100 Continue`, because a fault may occur before the body is read

    def __getattr__(self, name: str):
        if name.startswith("do_"):
            return self._do
        raise AttributeError(name)

    def _do(self) -> None:
        self.content: bytes | None = None
        for fault in self.server.proxy.due(self):
            if fault.do(self):
                return
        self.forward()

    def _read(self, size: int) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        return self.rfile.read(size)

    def _body(self) -> bytes:
        if self.content is None:
            self.content = self._read(int(self.headers.get("Content-Length", 0)))
        return self.content

    def error(self, status: int, code: str, message: str) -> bool:
        self._body()
        text = ERROR.format(code, message).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)
        return True

    def refuse_bulk_delete(self) -> bool:
        if self.headers.get("Content-MD5"):
            return False
        return self.error(400, "MissingContentMD5", "Missing required header for this request: Content-MD5")

    def cut_upload(self, after: int) -> bool:
        self._read(min(after, int(self.headers.get("Content-Length", 0))))
        # SO_LINGER makes the kernel reset a connection with unread data.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return self._close()

    def hold(self) -> bool:
        self.server.proxy._holding.wait()
        return self._close()

    def _close(self) -> bool:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        return True

    def forward(self, cut_after: int | None = None, stall: bool = False) -> bool:
        """Forward the request to the server, and the server's response to the client.

        Args:
            cut_after: Number of bytes of the response body to forward. The value -1 drops the whole response.
            stall: Whether to keep the connection open after the cut.
        """
        body = self._body()
        server = http.client.HTTPConnection(self.server.proxy.target, timeout=60)
        server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("expect", "connection"):
                server.putheader(name, value)
        server.endheaders(body)
        answer = server.getresponse()
        content = answer.read()
        server.close()
        if cut_after == -1:
            return self._close()
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length or 0))
        self.end_headers()
        self.wfile.write(content if cut_after is None else content[:cut_after])
        if cut_after is None:
            return True
        return self.hold() if stall else self._close()


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Yield the address of moto's server.

    Clients in this process share boto3's AWS data, which take 0.1 s to read.
    """
    loader = botocore.loaders.create_loader()
    with pytest.MonkeyPatch.context() as patch, moto_server() as endpoint:
        patch.setattr("botocore.loaders.create_loader", lambda *args: loader)
        yield endpoint


@pytest.fixture
def s3_proxy(s3) -> Iterator[FaultProxy]:
    proxy = FaultProxy(s3)
    yield proxy
    proxy.close()
