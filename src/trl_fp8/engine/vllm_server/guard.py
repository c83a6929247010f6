"""vLLM's `--middleware` of an FP8 server: it sees every request before vLLM does.

token    Endpoints that change state ask for it; vLLM's own --api-key covers others. Unknown endpoints are refused.
whole    From the start of an update until the trainer, which has compared checksums, resumes, requests wait here.
         After `TRL_FP8_WAIT` seconds they get 503, also those that vLLM holds: it would let them wait for ever.
"""

import asyncio
import hmac
import json
import os

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .plugin import TOKEN, WAIT


GENERATES = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
HARMLESS = ("/tokenize", "/detokenize")
CONTROL = (
    *("/pause", "/resume", "/reset_prefix_cache", "/collective_rpc", "/init_weight_transfer_engine"),
    *("/start_weight_update", "/update_weights", "/finish_weight_update"),
)
MOST_BYTES = 64 * 2**20  # of a body; the table of a model with 100,000 tensors has 10 MB


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
        self._finished = False  # the latest update, but nobody has compared checksums yet
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
        if path == "/resume" and not self._whole.is_set() and not self._finished:
            return 409, "the latest update did not end, so the workers hold parts of two policies. Sync again."
        return None

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/start_weight_update":
            self._finished = False
        if path in ("/pause", "/start_weight_update"):
            if path == "/pause" and self._whole.is_set():
                self._finished = True  # nothing has changed so far
            self._whole.clear()
            self._restart_timer()

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                if path == "/finish_weight_update":
                    self._finished = True
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
        started = False

        async def note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        request = asyncio.ensure_future(self._app(scope, receive, note))
        abandoned = asyncio.ensure_future(self._abandoned.wait())
        try:
            await asyncio.wait((request, abandoned), return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                request.result()
        finally:
            abandoned.cancel()
            request.cancel()  # its client has an answer; what vLLM has queued may still run after the next sync
        if not request.done() and not started:
            await _answer(send, 503, self._reason())

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


async def _answer(send: Send, status: int, text: str) -> None:
    body = json.dumps({"error": {"message": text, "code": status}}).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})
