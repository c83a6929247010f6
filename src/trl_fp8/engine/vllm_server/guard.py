"""vLLM's `--middleware` of an FP8 server: it sees every request before vLLM does.

token    Endpoints that change state ask for it; vLLM's own --api-key covers others. Unknown endpoints are refused.
whole    From the start of an update until the trainer, which has compared checksums, resumes, requests wait here.
         After `TRL_FP8_WAIT` seconds they get 503, also those that vLLM holds: it would let them wait for ever.
order    One call at a time: pause, start, update, finish, resume, all of one trainer. vLLM's workers raise for another
         order, and with several workers an error puts all later answers out of order (receiver.py).
"""

import asyncio
import hmac
import json
import os
from collections.abc import Awaitable
from enum import Enum

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .plugin import TOKEN, TRAINER, WAIT


GENERATES = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
HARMLESS = ("/tokenize", "/detokenize")
CONTROL = (
    *("/pause", "/resume", "/reset_prefix_cache", "/collective_rpc", "/init_weight_transfer_engine"),
    *("/start_weight_update", "/update_weights", "/finish_weight_update"),
)
MOST_BYTES = 64 * 2**20  # of a body; the table of a model with 100,000 tensors has 10 MB


class Update(Enum):
    """Stages of the latest update."""

    NONE = "none"  # nothing is paused: no trainer has synced yet, or the latest one has resumed
    UNCHANGED = "unchanged"  # paused, and workers hold the policy that they had
    PAUSED = "paused"  # and workers may hold parts of two policies
    OPEN = "open"
    FINISHED = "finished"  # but nobody has compared checksums yet


# Call -> the stages of an update that it may follow
FOLLOWS = {
    "/start_weight_update": (Update.UNCHANGED, Update.PAUSED),
    "/update_weights": (Update.OPEN,),
    "/finish_weight_update": (Update.OPEN,),
    "/resume": (Update.UNCHANGED, Update.FINISHED),
}
# Call -> the stage that it reaches if it succeeds
REACHES = {
    "/start_weight_update": Update.OPEN,
    "/update_weights": Update.OPEN,
    "/finish_weight_update": Update.FINISHED,
    "/resume": Update.NONE,
}


class Guard:
    """ASGI middleware. `RuntimeError` without a token in the environment."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self._token = os.environ.get(TOKEN, "")
        if not self._token:
            raise RuntimeError(f"{TOKEN} is not set: anybody could change this server's weights. Use trl-fp8 serve.")
        self._patience = float(os.environ.get(WAIT, 120))
        self._whole = asyncio.Event()  # not yet: vLLM starts from dummy weights
        self._abandoned = asyncio.Event()  # an update has been open for longer than requests wait
        self._update = Update.NONE
        self._trainer = b""  # that paused the server last
        self._one_at_a_time = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

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
        elif scope["path"] in CONTROL:
            await self._control(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _why_refused(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason; None if the request may pass."""
        path = scope["path"]
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MOST_BYTES:
            return 413, f"a body of more than {MOST_BYTES} bytes."
        if path in GENERATES or path in HARMLESS:
            return None
        if path not in CONTROL:
            return 404, f"an FP8 server does not serve {path}: it could change weights or caches unseen."
        if not hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {self._token}".encode()):
            return 401, f"{path} changes state: it needs the token of trl-fp8 serve ({TOKEN})."
        if path == "/pause" and scope["query_string"] != b"mode=keep":
            return 400, "/pause needs mode=keep alone: other modes leave caches of another policy, or end requests."
        return None

    def _why_out_of_order(self, path: str, trainer: bytes) -> str | None:
        """Return why a call of a trainer does not follow the previous ones; None if it does."""
        if path not in FOLLOWS or (path == "/resume" and self._whole.is_set()):
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
        async with self._one_at_a_time:
            path = scope["path"]
            trainer = dict(scope["headers"]).get(TRAINER.lower().encode(), b"")
            problem = self._why_out_of_order(path, trainer)
            if problem is not None:
                await _answer(send, 409, problem)
                return
            if path == "/pause":
                self._trainer = trainer
                self._update = Update.UNCHANGED if self._whole.is_set() else Update.PAUSED
                self._whole.clear()
                self._restart_timer()
            elif path == "/start_weight_update":
                self._restart_timer()
                # Workers forget an update that a trainer left open, for which vLLM's would raise
                await scope["app"].state.engine_client.collective_rpc("fp8_begin")
            if path in FOLLOWS and path != "/resume":
                self._update = Update.PAUSED  # if the call fails

            async def note(message: Message) -> None:
                if message["type"] == "http.response.start" and message["status"] == 200:
                    self._update = REACHES.get(path, self._update)
                    if path == "/resume":
                        self._stop_timer()
                        self._whole.set()
                await send(message)

            await self._app(scope, receive, note)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for a whole policy, then pass the request on, and end it if an update is abandoned meanwhile."""
        try:
            await asyncio.wait_for(self._whole.wait(), self._patience)
        except TimeoutError:
            await _answer(send, 503, self._reason())
            return
        is_started = False
        ended = asyncio.Event()  # for vLLM, which then frees what it has queued

        async def note(message: Message) -> None:
            nonlocal is_started
            if not ended.is_set():
                is_started = True
                await send(message)

        async def receive_until_ended() -> Message:
            """Return the client's next message, or that it is gone."""
            return await _first(receive(), ended.wait()) or {"type": "http.disconnect"}

        request = asyncio.ensure_future(self._app(scope, receive_until_ended, note))
        abandoned = asyncio.ensure_future(self._abandoned.wait())
        try:
            await asyncio.wait((request, abandoned), return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                ended.set()
                if not is_started:
                    await _answer(send, 503, self._reason())
            await request
        finally:
            abandoned.cancel()
            request.cancel()

    def _reason(self) -> str:
        return (
            f"no complete policy for {self._patience:g} seconds: no trainer has synced yet, or the latest update did "
            "not end. A trainer that syncs makes the server whole again."
        )

    def _restart_timer(self) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._patience, self._abandoned.set)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._abandoned.clear()


def _bounded(receive: Receive) -> Receive:
    """Return `receive`, which ends a body that exceeds `MOST_BYTES`, whatever its content-length says."""
    size = 0

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MOST_BYTES:
            raise HTTPException(413, f"a body of more than {MOST_BYTES} bytes.")  # FastAPI answers with it
        return message

    return counted


async def _first(message: Awaitable[Message], end: Awaitable) -> Message | None:
    """Return the message, or None if the end comes first."""
    both = [asyncio.ensure_future(message), asyncio.ensure_future(end)]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return both[0].result() if both[0].done() else None
    finally:
        for each in both:
            each.cancel()


async def _answer(send: Send, status: int, text: str) -> None:
    body = json.dumps({"error": {"message": text, "code": status}}).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})
