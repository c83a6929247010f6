"""Middleware of an FP8 server (vLLM's `--middleware`), which sees every request before vLLM does.

token    Endpoints that change state require the token; for others use vLLM's --api-key. Unknown endpoints are refused,
         except to read (GET, HEAD).
update   A trainer pauses the server, sends its weights, compares checksums, and resumes. Meanwhile, and before the
         first update, requests for completions wait here. After `TRL_FP8_WAIT` seconds they get status 503. Requests
         that vLLM has paused also get status 503, because vLLM would let them wait for ever.
upload   A trainer whose files the workers cannot see sends them here, in chunks (uploads.py). vLLM does not see them.
hang     vLLM's /health answers even if the engine hangs. So if a request waits long, the guard calls the workers. If
         they do not answer, the request gets status 504.
order    One call at a time, all calls of an update from one trainer: pause, start, update, finish, resume. vLLM's
         workers raise at any other order, and with several workers an error puts all later answers out of order
         (receiver.py).
"""

import asyncio
import hmac
import json
import os
from collections.abc import Awaitable, Sequence
from enum import Enum
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .plugin import DEFAULT_FOLDER, FOLDER, TOKEN, TRAINER, UPLOAD, WAIT
from .uploads import MAX_CHUNK_BYTES, UploadRefused, Uploads


GENERATES = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")  # endpoints that sample
HARMLESS = ("/tokenize", "/detokenize")  # endpoints that neither sample nor change state
CONTROL = (  # endpoints that change state
    "/pause",
    "/resume",
    "/reset_prefix_cache",
    "/collective_rpc",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    UPLOAD,
)
# Seconds that a request waits before the guard calls the workers, and also the seconds that the workers may take to
# answer. They answer between two steps of the engine. Both times together are less than TRL's asynchronous trainer
# waits (600 s)
ENGINE_SECONDS = 240.0
MAX_BODY_BYTES = 64 * 2**20  # the largest body is a model's tensor table, 10 MB for 100,000 tensors


class Update(Enum):
    """Stage of the latest update."""

    NONE = "none"  # not paused: no trainer has paused the server yet, or the latest one has resumed
    UNCHANGED = "unchanged"  # paused; workers still hold their complete policy
    PAUSED = "paused"  # paused; workers may hold parts of two policies
    OPEN = "open"  # started; workers receive weights
    FINISHED = "finished"  # all weights are sent; the trainer has not resumed, and may not have compared checksums


# Call -> the stages in which it is allowed
FOLLOWS = {
    "/start_weight_update": (Update.UNCHANGED, Update.PAUSED),
    "/update_weights": (Update.OPEN,),
    "/finish_weight_update": (Update.OPEN,),
    "/resume": (Update.UNCHANGED, Update.FINISHED),
}
# Call -> the stage after it, if it succeeds
REACHES = {
    "/start_weight_update": Update.OPEN,
    "/update_weights": Update.OPEN,
    "/finish_weight_update": Update.FINISHED,
    "/resume": Update.NONE,
}


class Guard:
    """ASGI middleware. `RuntimeError` if the environment variable `TRL_FP8_TOKEN` is not set."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self._token = os.environ.get(TOKEN, "")
        if not self._token:
            raise RuntimeError(f"{TOKEN} is not set: anybody could change this server's weights. Use trl-fp8 serve.")
        self._wait_seconds = float(os.environ.get(WAIT, 120))
        self._policy_is_complete = asyncio.Event()  # not set at first: vLLM starts with dummy weights
        self._abandoned = asyncio.Event()  # set if an update has taken longer than `_wait_seconds`
        self._update = Update.NONE
        self._trainer = b""  # the trainer that paused the server last
        self._control_lock = asyncio.Lock()
        self._uploads = Uploads(os.environ.get(FOLDER, DEFAULT_FOLDER))
        self._timer: asyncio.TimerHandle | None = None  # sets `_abandoned`
        self._question: asyncio.Future | None = None  # latest call of the workers, see `_engine_hangs`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "not served by an FP8 server"})
            return
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        refusal = self._why_refused(scope)
        if refusal is not None:
            await _answer(send, *refusal)
            return
        receive = _bounded(receive)
        if scope["path"] in GENERATES:
            await self._generate(scope, receive, send)
        elif scope["path"] == UPLOAD:
            await self._upload(scope, receive, send)
        elif scope["path"] in CONTROL:
            await self._control(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _why_refused(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason of a refusal; None if the request may pass."""
        path = scope["path"]
        if path in GENERATES or path in HARMLESS:
            return None
        if path not in CONTROL:
            return 404, f"an FP8 server does not serve {path}: it could change weights or caches unseen."
        token = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(token, f"Bearer {self._token}".encode()):
            return 401, f"{path} changes state: it needs the token of trl-fp8 serve ({TOKEN})."
        if path == "/pause" and scope["query_string"] != b"mode=keep":
            return 400, "/pause needs mode=keep alone: other modes leave caches of another policy, or end requests."
        if path in ("/pause", UPLOAD) and not _trainer_of(scope):
            return 400, f"{path} needs the header {TRAINER}, by which the server knows the calls of its trainer."
        return None

    def _why_out_of_order(self, path: str, trainer: bytes) -> str | None:
        """Return why a trainer's call is out of order; None if it is in order."""
        if path not in FOLLOWS:
            return None
        if not self._trainer:
            return (
                f"{path}: no trainer has paused this server since it started (was it restarted?). Sync again, from "
                "/pause."
            )
        if trainer != self._trainer:
            return f"{path}: another trainer has paused this server since. Give each trainer a server of its own."
        if self._update not in FOLLOWS[path]:
            return (
                f"{path} does not follow an update that is {self._update.value}: the calls of one are pause, start, "
                "update, finish, resume. Sync again, from /pause."
            )
        return None

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call of a `CONTROL` endpoint on if it is in order, and set the stage of the update."""
        async with self._control_lock:
            path = scope["path"]
            trainer = _trainer_of(scope)
            problem = self._why_out_of_order(path, trainer)
            if problem is not None:
                await _answer(send, 409, problem)
                return
            if path == "/pause":
                self._trainer = trainer
                self._uploads.remove_others(trainer)
                self._update = Update.UNCHANGED if self._policy_is_complete.is_set() else Update.PAUSED
                self._policy_is_complete.clear()
                self._start_timer()
            elif path == "/start_weight_update":
                # Drop an update that a trainer left open: vLLM's workers would raise for a second start
                await scope["app"].state.engine_client.collective_rpc("fp8_begin")
            if path in FOLLOWS and path != "/resume":
                self._update = Update.PAUSED  # this stage stays if the call fails

            async def send_and_follow(message: Message) -> None:
                if message["type"] == "http.response.start" and message["status"] == 200:
                    self._update = REACHES.get(path, self._update)
                    if path == "/finish_weight_update":
                        self._uploads.remove("patch")
                    if path == "/resume":
                        self._stop_timer()
                        self._policy_is_complete.set()
                await send(message)

            await self._app(scope, receive, send_and_follow)

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write a chunk of a trainer's file, and answer with the file's path."""
        chunk = bytearray()
        has_more = True
        while has_more and len(chunk) <= MAX_CHUNK_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                return  # an incomplete chunk is not written
            chunk += message.get("body", b"")
            has_more = message.get("more_body", False)
        try:
            if len(chunk) > MAX_CHUNK_BYTES:
                raise UploadRefused(413, f"a chunk of more than {MAX_CHUNK_BYTES} bytes.")
            try:
                query = dict(parse_qsl(scope["query_string"].decode()))
                kind, offset, size = query["kind"], int(query["offset"]), int(query["size"])
            except (KeyError, ValueError) as error:
                raise UploadRefused(400, f"{UPLOAD} needs kind, offset and size: {error!r}.") from error
            async with self._control_lock:
                most_bytes = sum(await scope["app"].state.engine_client.collective_rpc("fp8_bytes"))
                path = await asyncio.to_thread(
                    self._uploads.write, _trainer_of(scope), kind, offset, size, bytes(chunk), most_bytes
                )
        except UploadRefused as refusal:
            await _answer(send, refusal.status, str(refusal))
            return
        await _send_json(send, 200, {"path": path})

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on once the policy is complete. End it if an update is abandoned meanwhile, or the engine
        hangs.
        """
        try:
            await asyncio.wait_for(self._policy_is_complete.wait(), self._wait_seconds)
        except TimeoutError:
            await _answer(send, 503, self._reason())
            return
        is_started = False
        ended = asyncio.Event()  # tells vLLM that the client is gone, so that it frees the request

        async def send_unless_ended(message: Message) -> None:
            nonlocal is_started
            if not ended.is_set():
                is_started = True
                await send(message)

        async def receive_until_ended() -> Message:
            """Return the client's next message, or a disconnect once the request is ended."""
            message = await _first(receive(), ended.wait())
            if message is None:
                return {"type": "http.disconnect"}
            return message

        request = asyncio.ensure_future(self._app(scope, receive_until_ended, send_unless_ended))
        abandoned = asyncio.ensure_future(self._abandoned.wait())
        ends = (request, abandoned)
        refusal = None  # status and text of an answer that ends the request
        try:
            while not request.done() and refusal is None:
                await asyncio.wait(ends, timeout=ENGINE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if abandoned.done():
                    refusal = 503, self._reason()
                elif not request.done() and await self._engine_hangs(scope, ends):
                    text = (
                        f"the engine has not answered for {ENGINE_SECONDS:g} seconds: it hangs, although /health "
                        "answers. Look at the log of the server, and at its GPUs; then start it again."
                    )
                    refusal = 504, text
            if not request.done():
                ended.set()
                if not is_started:
                    await _answer(send, *refusal)
            await request
        finally:
            abandoned.cancel()
            request.cancel()

    async def _engine_hangs(self, scope: Scope, ends: Sequence[asyncio.Future]) -> bool:
        """Return whether the workers do not answer within `ENGINE_SECONDS`; False as soon as one of `ends` completes.
        All requests share one call of the workers.
        """
        if self._question is None or self._question.done():
            self._question = asyncio.ensure_future(scope["app"].state.engine_client.collective_rpc("fp8_bytes"))
        done, _ = await asyncio.wait(
            (self._question, *ends), timeout=ENGINE_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        return not done

    def _reason(self) -> str:
        """Return the text of a 503 answer."""
        return (
            f"no complete policy for {self._wait_seconds:g} seconds: no trainer has synced yet, or the latest update "
            "did not end. A trainer that syncs makes the server whole again."
        )

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._wait_seconds, self._abandoned.set)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._abandoned.clear()


def _bounded(receive: Receive) -> Receive:
    """Wrap `receive` so that it raises once a body exceeds `MAX_BODY_BYTES`. Counts bytes, not content-length."""
    size = 0

    async def receive_bounded() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, f"a body of more than {MAX_BODY_BYTES} bytes.")  # FastAPI answers with it
        return message

    return receive_bounded


async def _first(message: Awaitable[Message], end: Awaitable) -> Message | None:
    """Return the message; None if `end` completes first."""
    message_task = asyncio.ensure_future(message)
    end_task = asyncio.ensure_future(end)
    try:
        await asyncio.wait((message_task, end_task), return_when=asyncio.FIRST_COMPLETED)
        return message_task.result() if message_task.done() else None
    finally:
        message_task.cancel()
        end_task.cancel()


def _trainer_of(scope: Scope) -> bytes:
    """Return the number by which a trainer marks its calls (header `TRAINER`); empty without it."""
    return dict(scope["headers"]).get(TRAINER.lower().encode(), b"")


async def _answer(send: Send, status: int, text: str) -> None:
    """Send an error with vLLM's JSON form."""
    await _send_json(send, status, {"error": {"message": text, "code": status}})


async def _send_json(send: Send, status: int, content: dict) -> None:
    body = json.dumps(content).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})
