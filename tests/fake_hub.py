"""A local server that speaks as much of the hub's HTTP interface as a download needs.

It can cut a transfer in the middle, stall it, refuse a repo, and it counts what was asked. Below
/wheels/ it is also a page of links for pip.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class FakeRepo:
    files: dict[str, bytes]
    commit: str = "a" * 40
    gated: bool = False  # served only with `Authorization: Bearer good`
    refs: dict[str, str] = field(default_factory=dict)  # branch or tag -> commit

    def commit_of(self, revision: str) -> str | None:
        known = {"main": self.commit, self.commit: self.commit, **self.refs}
        return known.get(revision)


@dataclass
class FakeHub:
    """`with FakeHub() as hub`: `hub.url`, `hub.repos`, `hub.wheels`, `hub.asked`."""

    repos: dict[str, FakeRepo] = field(default_factory=dict)
    wheels: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    cut_after: dict[str, list[int]] = field(default_factory=dict)  # file name -> bytes, per GET
    stall_after: dict[str, int] = field(default_factory=dict)  # file name -> bytes
    broken: bool = False  # answer 500 to everything

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(_Handler):
            fake = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stall_after.clear()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def gets(self, name: str) -> list[tuple[str, str, str]]:
        return [a for a in self.asked if a[0] == "GET" and a[1].endswith(name)]


class _Handler(BaseHTTPRequestHandler):
    fake: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def log_message(self, *_: object) -> None:
        pass

    def _route(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.fake.asked.append((self.command, path, self.headers.get("Range", "")))
        parts = path.strip("/").split("/")
        if parts[0] == "datasets":  # a repo named "datasets/ORG/NAME" here
            parts = ["/".join(parts[:2]), *parts[2:]]
        if self.fake.broken:
            self._answer(500, b"out of order")
        elif parts[0] == "wheels":
            self._wheel(parts[1] if len(parts) > 1 else "")
        elif parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._answer(404, b"")

    def _repo(self, name: str, revision: str) -> tuple[FakeRepo, str] | None:
        """The repo and commit, or None after an error was sent."""
        repo = self.fake.repos.get(name)
        if repo is None:
            self._answer(401, b"", {"X-Error-Code": "RepoNotFound"})
            return None
        commit = repo.commit_of(revision)
        if commit is None:
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return None
        return repo, commit

    def _api(self, name: str, rest: list[str]) -> None:
        found = self._repo(name, rest[1] if len(rest) > 1 else "main")
        if found is None:
            return
        repo, commit = found
        if rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": p, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for p, b in repo.files.items()
            ]
            self._answer(200, json.dumps(entries).encode())
            return
        siblings = [{"rfilename": p} for p in repo.files]
        model = {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []}
        self._answer(200, json.dumps(model | {"private": False}).encode())

    def _resolve(self, name: str, revision: str, file: str) -> None:
        found = self._repo(name, revision)
        if found is None:
            return
        repo, commit = found
        headers = {"X-Repo-Commit": commit}
        if repo.gated and self.headers.get("Authorization") != "Bearer good":
            self._answer(403, b"", {**headers, "X-Error-Code": "GatedRepo"})
        elif file not in repo.files:
            self._answer(404, b"", {**headers, "X-Error-Code": "EntryNotFound"})
        else:
            headers["ETag"] = f'"{hashlib.sha1(repo.files[file]).hexdigest()}"'
            self._serve(file, repo.files[file], headers)

    def _wheel(self, file: str) -> None:
        if file == "":
            links = "".join(f'<a href="/wheels/{w}">{w}</a>' for w in self.fake.wheels)
            page = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
            self._answer(200, page, {"Content-Type": "text/html"})
        elif file in self.fake.wheels:
            self._serve(file, self.fake.wheels[file], {})
        else:
            self._answer(404, b"")

    def _serve(self, file: str, body: bytes, headers: dict[str, str]) -> None:
        asked = self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        part = body[start:]
        self.send_response(206 if asked else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if cuts := self.fake.cut_after.get(file):
            self.wfile.write(part[: cuts.pop(0)])
            self.close_connection = True
            return
        stall = self.fake.stall_after.get(file)
        self.wfile.write(part[:stall])
        self.wfile.flush()
        if stall is not None:
            while file in self.fake.stall_after:
                time.sleep(0.02)
            self.close_connection = True

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def start(spec: str) -> subprocess.Popen[str]:
    """`fetch` in a process of its own; it prints the path."""
    code = f"from dflash_mlx import hub; print(hub.fetch({spec!r}).path)"
    root = Path(__file__).parent.parent
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=pipe, stderr=pipe, text=True
    )


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)
