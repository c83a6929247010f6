"""A stand-in for the part of the Hub's HTTP API that a push uses: repositories as dictionaries, on a loopback port."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import constants, hf_api
from pytest import MonkeyPatch
from transformers.utils import hub


class HubStandIn:
    """Server of the stand-in, inside a `with` block. Weights are sent by Git LFS, all other files in the commit.

    Attributes:
        endpoint: Its URL.
        repos: Id of a repository -> path -> committed bytes.
        commits: Messages of all commits, in order.
        tokens: Authorization headers of all requests.
        objects: LFS objects by hash.
        uploads: Hashes of the LFS objects, in the order of their uploads.
        broken_after: Number of uploads after which the server refuses more; None: never.
    """

    def __init__(self):
        self.repos, self.commits, self.tokens = {}, [], set()
        self.objects, self.uploads, self.branches, self.broken_after = {}, [], [], None
        self.lock = threading.Lock()  # a client sends several files at once
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def connect(self, monkeypatch: MonkeyPatch) -> None:
        """Let huggingface_hub's client of this process send its requests here."""
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hf_api.api, "endpoint", self.endpoint)
        # transformers 5.18 and newer make a client of their own, at its first use
        monkeypatch.setattr(hub, "_hf_api", None, raising=False)

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, method: str, path: str, body: bytes):
        path = path.partition("?")[0]
        if path.endswith("/info/lfs/objects/batch"):
            return {"transfer": "basic", "objects": [self._with_upload(item) for item in json.loads(body)["objects"]]}
        if method == "PUT" and path.startswith("/lfs/"):
            if self.broken_after is not None and len(self.uploads) >= self.broken_after:
                raise ConnectionError("the upload was interrupted")
            oid = path.removeprefix("/lfs/")
            assert hashlib.sha256(body).hexdigest() == oid
            self.uploads.append(oid)
            self.objects[oid] = body
            return {}
        if path == "/api/whoami-v2":
            return {"name": "user", "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}}
        if path == "/api/repos/create":
            repo = "user/" + json.loads(body)["name"]
            self.repos.setdefault(repo, {})
            return {"url": f"{self.endpoint}/{repo}", "id": repo, "name": repo}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path.startswith("/api/models/"):
            owner, name, *rest = path.removeprefix("/api/models/").split("/")
            files = self.repos[f"{owner}/{name}"]
            if rest[:1] == ["preupload"]:
                sent = json.loads(body)["files"]
                modes = {f["path"]: "lfs" if f["path"].endswith(".safetensors") else "regular" for f in sent}
                return {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
            if rest[:1] in (["tree"], ["paths-info"]):
                return [{"type": "file", "path": path, "size": len(files[path]), "oid": "0"} for path in files]
            if rest[:1] == ["branch"]:
                self.branches.append(rest[1])
                return {}
            if rest[:1] == ["commit"]:
                for line in body.decode().splitlines():
                    item = json.loads(line)
                    if item["key"] == "header":
                        self.commits.append(item["value"]["summary"])
                    elif item["key"] == "file":
                        files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
                    elif item["key"] == "lfsFile":
                        files[item["value"]["path"]] = self.objects[item["value"]["oid"]]
                    elif item["key"] == "deletedFile":
                        del files[item["value"]["path"]]
                oid = f"{len(self.commits):040x}"
                return {"commitUrl": f"{self.endpoint}/{owner}/{name}/commit/{oid}", "commitOid": oid}
            if not rest or rest[0] == "revision":
                siblings = [{"rfilename": file} for file in files]
                return {"id": f"{owner}/{name}", "modelId": f"{owner}/{name}", "sha": "0" * 40, "siblings": siblings}
        raise KeyError(f"{method} {path} is not part of the stand-in")

    def _with_upload(self, item: dict) -> dict:
        """Return the item with the URL for its upload, unless its object is there already."""
        if item["oid"] in self.objects:
            return item
        return item | {"actions": {"upload": {"href": f"{self.endpoint}/lfs/{item['oid']}"}}}

    def _handler(self):
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def reply(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if header := self.headers.get("Authorization"):
                    hub.tokens.add(header)
                try:
                    with hub.lock:
                        status, content = 200, json.dumps(hub.answer(self.command, self.path, body)).encode()
                except KeyError as error:
                    status, content = 404, json.dumps({"error": str(error)}).encode()
                except ConnectionError as error:
                    status, content = 403, json.dumps({"error": str(error)}).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_POST = do_HEAD = do_PUT = reply

            def log_message(self, *args):
                pass

        return Handler
