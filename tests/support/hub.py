"""As much of the Hub's API as an upload needs, on a free port of this host: what it was told, it keeps."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """`files` by repository and path; `tags` by repository, each with the commit it is of. `fail` refuses that call."""

    def __init__(self) -> None:
        self.url = ""
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.tags: dict[str, dict[str, str]] = {}
        self.commits: list[str] = []
        self.tokens: set[str] = set()
        self.fail = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        path = path.partition("?")[0]
        parts = path.strip("/").split("/")
        if self.fail and self.fail in path:
            return 403, {"error": "you may not"}  # what may pass is tried again, for a long time
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if parts[:2] != ["api", "models"] or len(parts) < 4:
            return 404, {"error": f"no such call: {path}"}
        repository, call = "/".join(parts[2:4]), parts[4] if len(parts) > 4 else ""
        if repository not in self.files:
            return 404, {"error": "Repository Not Found"}
        match call:
            case "preupload":
                asked = json.loads(body)["files"]
                return 200, {
                    "files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in asked]
                }
            case "commit":
                return self._commit(repository, body)
            case "tag":
                self.tags[repository][json.loads(body)["tag"]] = parts[5]
                return 200, {}
            case "refs":
                tags = [
                    {"name": name, "ref": f"refs/tags/{name}", "targetCommit": commit}
                    for name, commit in self.tags[repository].items()
                ]
                return 200, {"branches": [], "converts": [], "tags": tags}
            case _:
                return 200, {"id": repository, "modelId": repository, "sha": "0" * 40, "siblings": [], "private": True}

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        repository = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        known = repository in self.files
        self.files.setdefault(repository, {})
        self.tags.setdefault(repository, {})
        if asked.get("private") or asked.get("visibility") == "private":
            self.private.add(repository)
        if known:
            return 409, {"error": "exists", "url": f"{self.url}/{repository}"}
        return 200, {"url": f"{self.url}/{repository}", "name": repository, "id": repository}

    def _commit(self, repository: str, body: bytes) -> tuple[int, Any]:
        oid = f"{len(self.commits) + 1:040x}"
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.commits.append(line["value"]["summary"])
            elif line["key"] == "file":
                self.files[repository][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return 200, {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{repository}/commit/{oid}"}


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def _answer(self) -> None:
            hub.tokens.add(self.headers.get("authorization", ""))
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, document = hub.answer(self.command, self.path, body)
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            if "Not Found" in str(document):
                self.send_header("x-error-code", "RepoNotFound")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
