"""Random requests to a server's guard, in front of an application that answers each of them with 200."""

import random
from types import SimpleNamespace

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from trl_fp8.engine.vllm_server.guard import CONTROL, HARMLESS, Guard
from trl_fp8.engine.vllm_server.plugin import FOLDER, TOKEN, TRAINER, UPLOAD


SIZES = ((0, 30), (30, 60), (0, 3000), ("x", 1), (-1, 2**70), (0, 0))
UPLOADS = [f"{UPLOAD}?kind={kind}&offset={at}&size={size}" for kind in ("whole", "patch") for at, size in SIZES]
PATHS = (
    *CONTROL,
    *UPLOADS,
    *HARMLESS,
    "/sleep",
    "/pause?mode=keep",
    "/pause?mode=keep",
    "/pause?mode=abort",
    "//",
    "/%2e%2e",
)
SYNC = ("/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume")


def test_of_1000_random_requests_none_breaks_the_guard_or_passes_without_a_token(monkeypatch, tmp_path):
    monkeypatch.setenv(TOKEN, "secret")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    passed = []

    async def answer(request):
        passed.append((request.url.path, request.headers["authorization"]))
        await request.body()
        return JSONResponse({})

    async def collective_rpc(method):
        return [2000]  # bytes of the only worker

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])], middleware=[Middleware(Guard)])
    app.state.engine_client = SimpleNamespace(collective_rpc=collective_rpc)
    draw = random.Random(0)
    found = set()
    with TestClient(app) as client:
        for _ in range(1000):
            token = draw.choice(("secret", "secret", "secret", "wrong", "", "s\u00e9cret"))
            headers = {"Authorization": f"Bearer {token}".encode(), TRAINER: draw.choice("ab")}
            method = draw.choice(("POST", "POST", "POST", "PUT", "DELETE"))
            body = draw.randbytes(draw.choice((0, 1, 30, 3000)))
            found.add(client.request(method, draw.choice(PATHS), headers=headers, content=body).status_code)
        assert found == {200, 400, 401, 404, 405, 409, 413}
        assert len(list(tmp_path.iterdir())) <= 2
        assert {token for path, token in passed if path in CONTROL} == {"Bearer secret"}
        for path in SYNC:
            headers = {"Authorization": "Bearer secret", TRAINER: "a"}
            assert client.post(path, headers=headers).status_code == 200, path
        assert client.post("/v1/completions", headers={"Authorization": ""}).status_code == 200
