"""A server's guard, in front of an application that answers each call with 200, or with 500 if the test says so."""

import asyncio
import os
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from trl_fp8.engine.vllm_server import guard
from trl_fp8.engine.vllm_server.guard import CONTROL, Guard
from trl_fp8.engine.vllm_server.plugin import FOLDER, TOKEN, TRAINER, UPLOAD, WAIT
from trl_fp8.engine.vllm_server.staging import remove_abandoned


UPDATE = ("start_weight_update", "update_weights", "finish_weight_update")


WAITED = 0.2  # seconds that requests wait
MOST = 50  # bytes that workers hold


@contextmanager
def guarded_app(broken, passed):
    """Yield a client of a guarded application that answers paths in `broken` with 500, and notes what is `passed`."""

    async def answer(request):
        passed.append(request.url.path)
        await asyncio.sleep(0.01)  # as long as a request takes at least
        return JSONResponse({}, 500 if request.url.path in broken else 200)

    async def accept(socket):
        await socket.accept()

    async def collective_rpc(method):
        passed.append(method)
        return [MOST - 10, 10]  # bytes of two workers

    routes = [WebSocketRoute("/v1/realtime", accept), Route("/{path:path}", answer, methods=["POST"])]
    app = Starlette(routes=routes, middleware=[Middleware(Guard)])
    app.state.engine_client = SimpleNamespace(collective_rpc=collective_rpc)
    with TestClient(app) as client:
        yield client


@pytest.fixture
def broken():
    """Return the paths that the application answers with 500."""
    return set()


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv(TOKEN, "secret")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(WAIT, str(WAITED))


@pytest.fixture
def passed():
    """Return the paths of requests that reached the application, and methods that its workers were asked for."""
    return []


@pytest.fixture
def client(environment, broken, passed):
    with guarded_app(broken, passed) as client:
        yield client


@pytest.fixture
def call(client):
    """Return a function that posts a call of a trainer and returns the answer."""
    return lambda path, trainer="a": client.post(
        f"/{path}", headers={"Authorization": "Bearer secret", TRAINER: trainer}
    )


def sync(call):
    for path in ("pause?mode=keep", *UPDATE, "resume"):
        assert call(path).status_code == 200, path


def test_a_pause_of_nobody_is_refused(client, call):
    answer = client.post("/pause?mode=keep", headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 400 and f"needs the header {TRAINER}" in answer.text
    sync(call)


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


@pytest.mark.parametrize("path", UPDATE)
def test_an_update_of_which_a_call_failed_is_not_resumed(call, broken, path):
    sync(call)
    broken.add(f"/{path}")
    for each in ("pause?mode=keep", *UPDATE):
        if call(each).status_code != 200:
            break
    assert each == path
    assert call("resume").status_code == 409
    assert call("v1/completions").status_code == 503
    broken.clear()
    sync(call)
    assert call("v1/completions").status_code == 200


def test_a_server_that_may_hold_two_policies_is_not_resumed_after_a_pause_alone(call):
    for before in ((), ("pause?mode=keep", UPDATE[0])):  # no policy yet; a trainer that died in an update
        for path in (*before, "pause?mode=keep"):
            assert call(path).status_code == 200
        assert call("resume").status_code == 409
        assert call("v1/completions").status_code == 503
        sync(call)


def test_an_update_that_has_ended_is_not_taken_for_abandoned_later(call):
    sync(call)
    time.sleep(1.5 * WAITED)
    assert call("v1/completions").status_code == 200


def test_workers_drop_an_update_that_was_left_open_before_the_next_one_starts(call, passed):
    for path in ("pause?mode=keep", UPDATE[0], "pause?mode=keep"):
        call(path)
    passed.clear()
    call(UPDATE[0])
    assert passed == ["fp8_begin", f"/{UPDATE[0]}"]


@pytest.mark.parametrize("path", ["v1/load_lora_adapter", "sleep", "v1/embeddings"])
def test_what_the_guard_does_not_know_reaches_nothing(call, passed, path):
    assert call(path).status_code == 404 and passed == []


@pytest.mark.parametrize("path", CONTROL)
def test_a_call_that_changes_state_needs_the_token(client, passed, path):
    for headers in ({}, {"Authorization": "Bearer other"}):
        answer = client.post(f"{path}?mode=keep", headers=headers | {TRAINER: "a"})
        assert answer.status_code == 401 and passed == []


def test_a_pause_that_would_end_requests_is_refused(call, passed):
    for query in ("", "?mode=abort", "?mode=keep&clear_cache=false"):
        assert call(f"pause{query}").status_code == 400 and passed == []


class Generator:
    """An application that generates until its client is gone, and answers then; other calls it answers at once."""

    def __init__(self, streams: bool):
        self._streams, self.is_client_gone = streams, False

    async def __call__(self, scope, receive, send):
        start = {"type": "http.response.start", "status": 200, "headers": []}
        if scope["path"] != "/v1/completions":
            await send(start)
            return
        if self._streams:
            await send(start)
        while (await receive())["type"] != "http.disconnect":
            pass
        self.is_client_gone = True
        await send({"type": "http.response.body", "body": b"late"} if self._streams else start)


class Caller:
    """A trainer, and a client that asks for a completion and stays."""

    def __init__(self, app, answers=True):
        self.sent = []  # to the client
        self.questions = []  # for which the workers were asked

        async def collective_rpc(method):
            self.questions.append(method)
            await asyncio.sleep(0 if answers or method == "fp8_begin" else 60)

        self._guard = Guard(app)
        headers = [(b"authorization", b"Bearer secret"), (TRAINER.lower().encode(), b"a")]
        engine = SimpleNamespace(collective_rpc=collective_rpc)
        self._scope = {"type": "http", "method": "POST", "headers": headers, "query_string": b"mode=keep"}
        self._scope["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=engine))

    async def call(self, *paths):
        for path in paths:
            await self._guard(self._scope | {"path": f"/{path}"}, None, lambda message: asyncio.sleep(0))

    def request(self) -> asyncio.Task:
        messages = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": b"{}"})

        async def send(message):
            self.sent.append(message)

        return asyncio.ensure_future(self._guard(self._scope | {"path": "/v1/completions"}, messages.get, send))


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_in_flight_ends_with_an_abandoned_update(streams):
    async def main():
        app = Generator(streams)
        caller = Caller(app)
        await caller.call("pause", *UPDATE, "resume")
        request = caller.request()
        await asyncio.sleep(0.1 * WAITED)
        await caller.call("pause")
        await asyncio.wait_for(request, 20 * WAITED)
        return app.is_client_gone, [message.get("status") for message in caller.sent]

    assert asyncio.run(main()) == (True, [200] if streams else [503, None])


@pytest.mark.parametrize("streams", [False, True])
def test_requests_end_if_the_engine_hangs_and_wait_on_if_it_is_busy(streams, monkeypatch):
    monkeypatch.setattr(guard, "ENGINE_SECONDS", 0.1)

    async def main(answers):
        app = Generator(streams)
        caller = Caller(app, answers)
        await caller.call("pause", *UPDATE, "resume")
        caller.questions.clear()
        requests = [caller.request() for _ in range(3)]
        done, waiting = await asyncio.wait(requests, timeout=1.0)
        for request in waiting:
            request.cancel()
        return len(done), caller.questions, caller.sent

    done, questions, _ = asyncio.run(main(answers=True))
    assert done == 0 and len(questions) > 1 and set(questions) == {"fp8_bytes"}
    done, questions, sent = asyncio.run(main(answers=False))
    assert done == 3 and questions == ["fp8_bytes"]
    if not streams:
        assert [message["status"] for message in sent if "status" in message] == [504] * 3
        assert b"the engine has not answered for 0.1 seconds: it hangs, although /health answers" in sent[1]["body"]


def test_an_update_that_is_abandoned_while_the_workers_do_not_answer_ends_requests_as_one(monkeypatch):
    monkeypatch.setattr(guard, "ENGINE_SECONDS", 1.0)

    async def main():
        caller = Caller(Generator(streams=False), answers=False)
        await caller.call("pause", *UPDATE, "resume")
        request = caller.request()
        await asyncio.sleep(1.1)
        for _ in range(200):  # a loaded host may be late
            if len(caller.questions) == 2:
                break
            await asyncio.sleep(0.1)
        assert caller.questions == ["fp8_begin", "fp8_bytes"]
        await caller.call("pause")
        await asyncio.wait_for(request, 20)
        return caller.sent[0]["status"]

    assert asyncio.run(main()) == 503


def test_an_update_that_begins_again_has_its_whole_time_again(monkeypatch):
    monkeypatch.setenv(WAIT, "1")

    async def main():
        caller = Caller(Generator(streams=False))
        await caller.call("pause", *UPDATE, "resume")
        request = caller.request()
        await asyncio.sleep(0.1)
        for _ in range(2):
            await caller.call("pause")
            await asyncio.sleep(0.6)
        in_time = not request.done()
        await asyncio.wait_for(request, 10)
        return in_time

    assert asyncio.run(main())


def test_calls_reach_the_server_one_at_a_time():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["path"])
        await asyncio.sleep(0.01)
        seen.append("answered")

    async def calls():
        headers = [(b"authorization", b"Bearer secret")]
        call = {"type": "http", "method": "POST", "headers": headers, "query_string": b""}
        guard = Guard(app)
        paths = "/collective_rpc", "/reset_prefix_cache"
        await asyncio.gather(*(guard(call | {"path": path}, None, None) for path in paths))

    asyncio.run(calls())
    assert seen == ["/collective_rpc", "answered", "/reset_prefix_cache", "answered"]


def test_a_web_socket_is_refused(client):
    with pytest.raises(WebSocketDisconnect) as refused, client.websocket_connect("/v1/realtime"):
        pass
    assert refused.value.code == 1008


@pytest.fixture
def upload(client):
    """Return a function that posts a chunk and returns the answer."""

    def post(chunk, offset=0, size=6, kind="whole", trainer="a", token="secret"):  # noqa: S107, of a test
        headers = {"Authorization": f"Bearer {token}", TRAINER: trainer}
        query = {"kind": kind, "offset": offset, "size": size}
        return client.post(UPLOAD, params=query, content=chunk, headers=headers)

    return post


def path_of(answer):
    assert answer.status_code == 200, answer.text
    return Path(answer.json()["path"])


def test_chunks_become_a_locked_file_of_the_servers_user_that_is_written_over(upload, tmp_path):
    path = path_of(upload(b"abcd"))
    assert path_of(upload(b"ef", 4)) == path and path.read_bytes() == b"abcdef"
    assert path.parent == tmp_path and path.stat().st_mode & 0o777 == 0o600
    assert remove_abandoned(str(tmp_path)) == []  # its server lives
    assert path_of(upload(b"ghijkl")) == path and path.read_bytes() == b"ghijkl"
    other = path_of(upload(b"ghijklm", size=7))
    assert other != path and list(tmp_path.iterdir()) == [other]  # of another size: a new one
    of_b = path_of(upload(b"ghijklm", size=7, trainer="b"))
    assert list(tmp_path.iterdir()) == [of_b]


@pytest.mark.parametrize(
    "chunk, options, status, message",
    [
        (b"ef", {"offset": 5}, 409, "at byte 5 does not continue"),
        (b"ab", {"offset": 2}, 409, "at byte 2 does not continue"),  # the latest one, repeated
        (b"ef", {"offset": 4, "trainer": "b"}, 409, "does not continue this trainer's"),
        (b"ef", {"offset": 4, "size": 7}, 409, "does not continue"),
        (b"ef", {"offset": 4, "kind": "patch"}, 409, "does not continue"),
        (b"efg", {"offset": 4}, 413, "ends beyond the file's 6"),
        (b"ef", {"offset": -4}, 409, "does not continue"),
        (b"a", {"size": MOST + 1}, 413, "51 bytes exceeds what this server's workers hold, 50"),
        (b"a", {"size": -1}, 413, "exceeds"),
        (b"a" * 9, {"size": 9}, 413, "a chunk of more than 8 bytes"),
        (b"a", {"kind": "../whole"}, 400, "an upload is one of"),
        (b"a", {"offset": "x"}, 400, "needs kind, offset and size"),
        (b"ef", {"offset": 4, "token": "wrong"}, 401, "needs the token"),
        (b"ef", {"offset": 4, "trainer": ""}, 400, "needs the header"),
    ],
)
def test_a_chunk_that_is_out_of_order_or_too_large_or_of_a_stranger_is_refused(
    chunk, options, status, message, upload, monkeypatch
):
    monkeypatch.setattr(guard, "MAX_CHUNK_BYTES", 8)
    path = path_of(upload(b"ab"))
    upload(b"cd", 2)
    answer = upload(chunk, **options)
    assert answer.status_code == status and message in answer.text
    assert path_of(upload(b"ef", 4)).read_bytes() == b"abcdef" and path.exists()


def test_a_folder_without_room_is_named_and_the_next_upload_is_written(upload, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    path_of(upload(b"a", size=1))  # makes room first
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        answer = upload(b"ab")
    assert answer.status_code == 507 and f"{tmp_path} has no room for 6 bytes: No space left" in answer.text
    assert list(tmp_path.iterdir()) == [] and upload(b"cd", 2).status_code == 409
    assert path_of(upload(b"abcdef")).read_bytes() == b"abcdef"


def test_a_chunk_of_a_trainer_that_dies_meanwhile_is_not_written(tmp_path):
    messages = iter([{"type": "http.request", "body": b"ab", "more_body": True}, {"type": "http.disconnect"}])
    sent = []

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", b"Bearer secret"), (TRAINER.lower().encode(), b"a")]
    scope = {"type": "http", "method": "POST", "path": UPLOAD, "headers": headers}
    asyncio.run(Guard(None)(scope | {"query_string": b"kind=whole&offset=0&size=2"}, receive, send))
    assert sent == [] and list(tmp_path.iterdir()) == []


def test_a_patch_is_removed_at_the_end_of_its_update(call, upload, tmp_path):
    whole = path_of(upload(b"abcdef"))
    for path in ("pause?mode=keep", *UPDATE[:2]):
        call(path)
    assert path_of(upload(b"", size=0, kind="patch")).read_bytes() == b""  # nothing has changed
    assert len(list(tmp_path.iterdir())) == 2
    call(UPDATE[2])
    assert list(tmp_path.iterdir()) == [whole]


def test_files_of_a_trainer_are_removed_when_another_one_pauses_the_server(call, upload, tmp_path):
    of_a = path_of(upload(b"abcdef"))
    call("pause?mode=keep", "a")
    assert of_a.exists()
    call("pause?mode=keep", "b")
    assert list(tmp_path.iterdir()) == []
