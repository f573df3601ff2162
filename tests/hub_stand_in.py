"""The few endpoints of the Hub that the real client calls to push and fetch a small repository, in memory."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_test"
Files = dict[str, bytes]


@dataclass
class Repo:
    """A repository: what its branches hold now, and what they held at each commit."""

    private: bool
    branches: dict[str, Files] = field(default_factory=lambda: {"main": {}})
    commits: dict[str, Files] = field(default_factory=dict)

    @property
    def main(self) -> Files:
        return self.branches["main"]

    def at(self, revision: str) -> tuple[str, Files] | None:
        """The commit and the files of a branch or a commit."""
        files = self.branches.get(revision, self.commits.get(revision))
        if files is None:
            return None
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[commit] = dict(files)
        return commit, files


@dataclass
class Trouble:
    """Requests whose path has `part` in it fail, `times` times: with `status`, or cut off in the middle."""

    part: str
    times: int
    status: int | None


class HubStandIn(ThreadingHTTPServer):
    """Repositories by name, and the calls that came, for tests to read."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.troubles: list[Trouble] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def storage(self) -> str:
        """Where large files lie: of another name, or the client would not see that it is sent elsewhere."""
        return f"http://localhost:{self.server_address[1]}"


@contextmanager
def hub() -> Iterator[HubStandIn]:
    server = HubStandIn()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
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
        body = self._body()
        path = self.path.partition("?")[0]
        if self._fails(path):
            return None
        if not self._known:
            return self._json({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path.endswith("/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        if path == "/verify":
            asked = json.loads(body)
            there = len(self.server.blobs.get(asked["oid"], b"")) == asked["size"]
            return self._json({}, 200 if there else 422)
        name, action, revision = self._parts(path)
        repo = self.server.repos[name]
        if action == "branch":
            new = revision not in repo.branches
            repo.branches.setdefault(revision, dict(repo.main))
            return self._json({}, 200 if new else 409)
        if revision not in repo.branches:
            return self._json({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        if action == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
            wanted = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            return self._json({"files": wanted})
        assert action == "commit", path
        return self._commit(name, repo, revision, body)

    def do_PUT(self) -> None:  # noqa: N802
        content = self._body()
        path = self.path.partition("?")[0]
        if self._fails(path):
            return None
        oid = path.removeprefix("/lfs/")
        fine = hashlib.sha256(content).hexdigest() == oid
        if fine:
            self.server.blobs[oid] = content
        return self._json({}, 200 if fine else 400)

    def do_GET(self) -> None:  # noqa: N802
        path = self.path.partition("?")[0]
        if self._fails(path):
            return None
        if path.startswith("/lfs/"):
            return self._send(self.server.blobs[path.removeprefix("/lfs/")], 200, {})
        if path.startswith("/api/models/"):
            name, action, revision = self._parts(path)
        else:
            name, _, rest = path.strip("/").partition("/resolve/")
            action, (revision, _, file) = "resolve", rest.partition("/")
        repo = self.server.repos.get(name)
        if repo is None or repo.private and not self._known:
            return self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        found = repo.at(revision or "main")
        if found is None:
            return self._json({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        commit, files = found
        if action == "tree":
            return self._json([{"type": "file", "path": n, "size": len(c), "oid": _oid(c)} for n, c in files.items()])
        if action == "resolve":
            return self._file(files.get(file), file, commit)
        return self._json(
            {"id": name, "sha": commit, "private": repo.private, "siblings": [{"rfilename": n} for n in files]}
        )

    do_HEAD = do_GET  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    @property
    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _parts(self, path: str) -> tuple[str, str, str]:
        """Repository, what is asked of it, and the revision: /api/models/org/name/commit/main."""
        org, name, *rest = path.removeprefix("/api/models/").split("/")
        return f"{org}/{name}", rest[0] if rest else "", rest[1] if len(rest) > 1 else ""

    def _fails(self, path: str) -> bool:
        """Note the call, and do what was arranged to go wrong."""
        self.server.calls.append(f"{self.command} {path}")
        for trouble in self.server.troubles:
            if trouble.part in path and trouble.times > 0:
                trouble.times -= 1
                if trouble.status is None:
                    self.close_connection = True
                    self.connection.close()
                else:
                    self._json({"error": "arranged"}, trouble.status)
                return True
        return False

    def _create(self, asked: dict[str, Any]) -> None:
        name = "/".join(part for part in (asked.get("organization"), asked["name"]) if part)
        new = name not in self.server.repos
        self.server.repos.setdefault(name, Repo(asked.get("private") or asked.get("visibility") == "private"))
        self._json({"url": f"{self.server.url}/{name}", "id": name}, 200 if new else 409)

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for wanted in asked["objects"]:
            places = {"upload": f"lfs/{wanted['oid']}", "verify": "verify"}
            actions = {name: {"href": f"{self.server.storage}/{place}"} for name, place in places.items()}
            objects.append(wanted if wanted["oid"] in self.server.blobs else wanted | {"actions": actions})
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, repo: Repo, revision: str, body: bytes) -> None:
        files = repo.branches[revision]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        found = repo.at(revision)
        assert found is not None
        self._json({"commitUrl": f"{self.server.url}/{name}/commit/{found[0]}", "commitOid": found[0]})

    def _file(self, content: bytes | None, name: str, commit: str) -> None:
        if content is None:
            return self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        if not name.endswith(".safetensors"):
            return self._send(content, 200, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": commit})
        oid = hashlib.sha256(content).hexdigest()
        linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content)), "X-Repo-Commit": commit}
        return self._send(b"", 302, {**linked, "Location": f"{self.server.storage}/lfs/{oid}"})

    def _json(self, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(data).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
