"""A hub on the loopback interface: the routes that huggingface_hub uses, with switches for what can go wrong."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin", ".pth", "tokenizer.json")  # kept in LFS
_REVISION = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+|[^/]+)/revision/(?P<revision>.+)")
_TREE = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+|[^/]+)/tree/(?P<revision>[^/]+)")
_FILE = re.compile(r"/(?P<name>[^/]+/[^/]+|[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class Asked:
    """A request that the hub got."""

    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class FakeHub:
    """`repositories`: the files of each commit of each model; `revisions`: commits by model and branch or tag."""

    url: str = ""
    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    revisions: dict[tuple[str, str], str] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    gated: set[str] = field(default_factory=set)  # names whose files need the token "good"
    flipped: set[str] = field(default_factory=set)  # paths whose first byte is another one than listed
    cuts: dict[str, list[int]] = field(default_factory=dict)  # bytes after which the next connections of a path end
    without_ranges: bool = False
    without_digests: bool = False
    status: int | None = None  # of every response
    body: bytes | None = None  # of every response
    elsewhere: str | None = None  # where the content of large files is
    dripped: threading.Event = field(default_factory=threading.Event)  # set when a connection has ended after a byte

    def add(self, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Add a commit and make `revision` name it. Returns the commit."""
        commit = hashlib.sha1(json.dumps([name, sorted(files)]).encode() + b"".join(files.values())).hexdigest()
        self.repositories.setdefault(name, {})[commit] = files
        self.revisions[name, revision] = commit
        return commit

    def sent(self, method: str = "GET") -> list[str]:
        """The files that were asked for, in order of their names."""
        found = [_FILE.fullmatch(one.path) for one in self.asked if one.method == method]
        return sorted(match["path"] for match in found if match and match["path"])

    def ranges(self) -> list[str | None]:
        return [one.range for one in self.asked if one.method == "GET" and one.path.endswith(".safetensors")]


class _Handler(BaseHTTPRequestHandler):
    """One connection per request (HTTP/1.0)."""

    hub: FakeHub

    def do_GET(self) -> None:
        self._handle()

    def do_HEAD(self) -> None:
        self._handle()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _handle(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append(Asked(self.command, path, self.headers["Range"], self.headers["Authorization"]))
        if hub.status is not None or hub.body is not None:
            return self._send(hub.status or 200, hub.body or b"")
        if found := _REVISION.fullmatch(path):
            if (commit := self._commit(found)) is not None:
                self._send(200, json.dumps({"id": found["name"], "sha": commit, "siblings": []}).encode())
        elif found := _TREE.fullmatch(path):
            if (commit := self._commit(found)) is not None:
                files = hub.repositories[found["name"]][commit]
                self._send(200, json.dumps([self._entry(*file) for file in files.items()]).encode())
        elif found := _FILE.fullmatch(path):
            if (commit := self._commit(found)) is not None:
                self._file(found["name"], commit, found["path"])
        else:
            self._send(404, b"")

    def _commit(self, found: re.Match[str]) -> str | None:
        """The commit that a request names; None if an error was sent."""
        hub, name, revision = self.hub, found["name"], found["revision"]
        if name not in hub.repositories:
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        commit = revision if revision in hub.repositories[name] else hub.revisions.get((name, revision))
        if commit is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        return commit

    def _entry(self, path: str, content: bytes) -> dict[str, object]:
        entry: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": _git(content)}
        if path.endswith(LARGE) and not self.hub.without_digests:
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry

    def _file(self, name: str, commit: str, path: str) -> None:
        hub, content = self.hub, self.hub.repositories[name][commit][path]
        if name in hub.gated and self.headers["Authorization"] != "Bearer good":
            return self._send(401, b"", {"X-Error-Code": "GatedRepo"})
        digest = hashlib.sha256(content).hexdigest() if path.endswith(LARGE) else _git(content)
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if path in hub.flipped:
            content = bytes([content[0] ^ 1]) + content[1:]
        if self.command == "GET" and hub.elsewhere and path.endswith(LARGE):
            return self._send(302, b"", {"Location": f"{hub.elsewhere}/{name}/resolve/{commit}/{path}"})
        status, start = 200, 0
        if self.headers["Range"] and not hub.without_ranges:
            start, status = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cuts = hub.cuts.get(path, [])
        self._send(status, content[start:], headers, cut=cuts.pop(0) if cuts and self.command == "GET" else None)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, *, cut: int | None = None) -> None:
        """`cut`: end the connection after so many bytes of the body."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut == 1:
            self.hub.dripped.set()


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that closing waits for them

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has ended its connection is no error of the hub."""


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Within the block the hub has an address."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
