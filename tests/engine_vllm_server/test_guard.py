"""Order of calls to a server's guard, in front of an application that answers each of them with 200."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from trl_fp8.engine.vllm_server.guard import Guard
from trl_fp8.engine.vllm_server.plugin import TOKEN, TRAINER, WAIT


UPDATE = ("start_weight_update", "update_weights", "finish_weight_update")


@contextmanager
def guarded_app():
    """Yield a function that posts a call of a trainer and returns the answer."""

    async def answer(request):
        return JSONResponse({})

    async def collective_rpc(method):
        """Do nothing: there are no workers."""

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])], middleware=[Middleware(Guard)])
    app.state.engine_client = SimpleNamespace(collective_rpc=collective_rpc)
    with TestClient(app) as client:
        yield lambda path, trainer="a": client.post(
            f"/{path}", headers={"Authorization": "Bearer secret", TRAINER: trainer}
        )


@pytest.fixture
def call(monkeypatch):
    monkeypatch.setenv(TOKEN, "secret")
    monkeypatch.setenv(WAIT, "0.2")
    with guarded_app() as calling:
        yield calling


def sync(call):
    for path in ("pause?mode=keep", *UPDATE, "resume"):
        assert call(path).status_code == 200, path


@pytest.mark.parametrize("path", UPDATE)
def test_each_update_begins_with_a_pause(call, path):
    for _ in range(2):
        sync(call)
        answer = call(path)
        assert answer.status_code == 409 and "does not follow an update that is none" in answer.text
        assert call("v1/completions").status_code == 200  # the policy is whole


@pytest.mark.parametrize("path", [*UPDATE, "resume"])
def test_a_server_that_was_restarted_says_so_and_names_no_other_trainer(call, path):
    answer = call(path)
    assert answer.status_code == 409
    assert "no trainer has paused this server since it started (was it restarted?)" in answer.text
    assert call("v1/completions").status_code == 503


def test_a_trainer_that_another_one_interrupted_is_refused(call):
    sync(call)
    assert call("pause?mode=keep", "a").status_code == call("pause?mode=keep", "b").status_code == 200
    assert "another trainer has paused this server" in call(UPDATE[0], "a").text
    for path in (*UPDATE, "resume"):
        assert call(path, "b").status_code == 200
    assert call("v1/completions").status_code == 200
