"""The few endpoints of the Hub that the real client calls to push and fetch a small repository, in memory."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" + "0" * 34


class HubStandIn(ThreadingHTTPServer):
    """Repositories by name, each a dict of files; and the calls that came, for tests to read."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.calls: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def hub() -> Iterator[HubStandIn]:
    server = HubStandIn()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: HubStandIn

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self._note()
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(part for part in (asked.get("organization"), asked["name"]) if part)
            self.server.repos.setdefault(name, {})
            self._json({"url": f"{self.server.url}/{name}", "id": name})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            self._json({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        elif "/commit/" in path:
            self._commit(path.removeprefix("/api/models/").partition("/commit/")[0], body)
        else:
            self._json({"tag": "ok"})

    def do_GET(self) -> None:  # noqa: N802
        path = self._note()
        if path.startswith("/api/models/"):
            name = "/".join(path.removeprefix("/api/models/").split("/")[:2])
            files = self.server.repos.get(name)
            if files is None:
                return self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            if "/tree/" in path:
                listed = [{"type": "file", "path": n, "size": len(c), "oid": _oid(c)} for n, c in files.items()]
                return self._json(listed)
            return self._json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": n} for n in files]})
        return self._file(path)

    do_HEAD = do_GET  # noqa: N815

    def _commit(self, name: str, body: bytes) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                value = entry["value"]
                self.server.repos[name][value["path"]] = base64.b64decode(value["content"])
        self._json({"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

    def _file(self, path: str) -> None:
        name, _, rest = path.strip("/").partition("/resolve/")
        content = self.server.repos.get(name, {}).get(rest.partition("/")[2])
        if content is None:
            return self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        return self._send(content, 200, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT})

    def _json(self, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(data).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _note(self) -> str:
        path = self.path.partition("?")[0]
        self.server.calls.append(f"{self.command} {path}")
        return path


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
