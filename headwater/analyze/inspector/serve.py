"""The inspector with the live model behind it, for this machine's browser; writes no file.

It listens on 127.0.0.1. The address holds a random token, without which nothing answers; a request
under another host name, or from another site's page, is refused, so that no page elsewhere can
reach it through the browser.
"""

import json
import secrets
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

from headwater.errors import UserError

from .inspection import Inspection
from .page import make_page, payload

Look = Callable[[str], Sequence[Inspection]]
LONGEST = 100_000  # bytes of a request
DISCARDED = 10_000_000  # bytes at most of a longer one that are read before it is refused
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class InspectorServer(ThreadingHTTPServer):
    """Serves the page of `look(prompt)`, and `look` of other prompts as the page asks. `port` 0:
    any that is free.

    `address` is where a browser finds it. Use `serve_forever`, and `server_close` at the end, as of
    any HTTP server.
    """

    daemon_threads = True

    def __init__(self, look: Look, prompt: str, port: int = 0) -> None:
        self.page = make_page(look(prompt), served=True)
        self.look, self.lock = look, Lock()
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"port {port} of 127.0.0.1 cannot be had ({error}): give another, or 0"
            ) from None
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: InspectorServer
    timeout = 30  # seconds for a request to arrive
    server_version, sys_version = "headwater", ""

    def do_GET(self) -> None:
        if self._welcome(""):
            self._answer(HTTPStatus.OK, self.server.page, "text/html")

    def do_POST(self) -> None:
        if not self._welcome("inspect"):
            return
        try:
            prompt = self._read_prompt()
            with self.server.lock:  # one at a time: the model has one machine
                data = payload(self.server.look(prompt)) | {"served": True}
        except UserError as error:
            self._answer_json(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        else:
            self._answer_json(HTTPStatus.OK, data)

    def _read_prompt(self) -> str:
        """The prompt of a request. Raises UserError for a request that has none."""
        length = self.headers.get("Content-Length", "")
        # Python turns no text of thousands of digits into a number.
        size = int(length) if length.isdecimal() and len(length) < 10 else None
        if size is None or size > LONGEST:
            # A browser reads the answer once it has sent its text, which nobody needs.
            self.rfile.read(min(size or 0, DISCARDED))
            raise UserError(f"a prompt may have {LONGEST} bytes")
        try:
            prompt = json.loads(self.rfile.read(size))["prompt"]
            prompt.encode()  # half an emoji is no text
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise UserError("a request is JSON with a prompt") from None
        return prompt

    def _welcome(self, page: str) -> bool:
        """Check that the request may be answered; otherwise refuse it, and tell it nothing."""
        origin = self.headers.get("Origin")
        foreign = origin is not None and origin.removeprefix("http://") not in self.server.hosts
        elsewhere = self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        if self.headers.get("Host") not in self.server.hosts or foreign or elsewhere:
            self._answer_json(HTTPStatus.FORBIDDEN, {"error": "refused"})
            return False
        path = self.path.partition("?")[0].encode()
        if not secrets.compare_digest(path, f"/{self.server.token}/{page}".encode()):
            self._answer_json(HTTPStatus.NOT_FOUND, {"error": "not found"})
            return False
        return True

    def _answer_json(self, status: HTTPStatus, data: dict[str, Any]) -> None:
        self._answer(status, json.dumps(data, allow_nan=False), "application/json")

    def _answer(self, status: HTTPStatus, content: str, kind: str) -> None:
        body = content.encode()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        try:
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:
            self.close_connection = True  # the page was closed or loaded again while the model ran

    def log_message(self, format: str, *args: Any) -> None:
        """Prompts are nobody's business."""


def serve(look: Look, prompt: str, port: int = 0, announce: Callable[[str], None] = print) -> None:
    """Serve until Ctrl-C. `announce` is told the address."""
    with InspectorServer(look, prompt, port) as server:
        announce(server.address)
        announce("Open this address in a browser of this machine. Ctrl-C stops it.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            announce("stopped")
