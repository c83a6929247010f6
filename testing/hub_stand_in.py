"""A stand-in for the part of the Hub's HTTP API that a push uses: repositories as dictionaries, on a loopback port."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def _mode(file: dict) -> str:
    return "lfs" if file["path"].endswith(".safetensors") else "regular"


class HubStandIn:
    """`with HubStandIn() as hub: ...` serves at `hub.endpoint`;
    `hub.repos[id][path]` are the bytes that were committed.

    Weights go through Git LFS, as on the Hub, everything else into the commit.

    Attributes:
        commits: Messages of all commits, in order.
        tokens: Authorization headers that were seen.
        objects: LFS objects by hash.
        uploads: Hashes in the order in which they were sent.
        broken_after: From this number of uploads on, the connection is refused; None: never.
    """

    def __init__(self):
        self.repos, self.commits, self.tokens = {}, [], set()
        self.objects, self.uploads, self.broken_after = {}, [], None
        self.one_by_one = threading.Lock()  # a client sends several files at once
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, method: str, path: str, body: bytes):
        path = path.partition("?")[0]
        if path.endswith("/info/lfs/objects/batch"):
            return {"transfer": "basic", "objects": [self._placed(item) for item in json.loads(body)["objects"]]}
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
                return {"files": [{"path": f["path"], "uploadMode": _mode(f), "shouldIgnore": False} for f in sent]}
            if rest[:1] in (["tree"], ["paths-info"]):
                return [{"type": "file", "path": path, "size": len(files[path]), "oid": "0"} for path in files]
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

    def _placed(self, item: dict) -> dict:
        """Return where to send an object; nowhere if it is here already."""
        upload = {"upload": {"href": f"{self.endpoint}/lfs/{item['oid']}"}}
        return item if item["oid"] in self.objects else item | {"actions": upload}

    def _handler(hub):  # noqa: N805, the handler's `self` is another object
        class Handler(BaseHTTPRequestHandler):
            def reply(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if header := self.headers.get("Authorization"):
                    hub.tokens.add(header)
                try:
                    with hub.one_by_one:
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
