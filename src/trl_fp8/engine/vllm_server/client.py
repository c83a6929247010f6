"""The trainer's client for updates of a server. Completions come through TRL's `VLLMClient`.

Nothing is retried here. TRL's client repeats a POST after 500, 502 and 503, but the first POST may have changed
weights.
"""

import errno
import os
import secrets
import time
from itertools import count

import httpx
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

from .plugin import TOKEN, TRAINER, UPLOAD


def server_urls(addresses: str) -> list[str]:
    """Return the comma-separated addresses of `vllm_server_base_url`. `ValueError` for none, or for one twice."""
    urls = [address.strip().rstrip("/") for address in addresses.split(",") if address.strip()]
    if len(set(urls)) != len(urls) or not urls:
        raise ValueError(
            f"vllm_server_base_url={addresses!r}: name each server once, as in http://one:8000,http://two:8000."
        )
    return urls


class ServerGone(RuntimeError):
    """The server does not answer, or its engine has died."""


class Control(HTTPVLLMWeightSyncClient):
    """vLLM's client for the four calls of an update, with pause, resume and RPCs whose answers are numbered.

    Raises `ServerGone` if the server or its engine has died, `ValueError` for a wrong token, `OSError` for a full
    folder, `RuntimeError` for other errors.
    """

    def __init__(self, base_url: str, timeout: float = 300, token: str | None = None):
        super().__init__(base_url, timeout)
        # Numbers of RPCs. Not from `random`, because two trainers may have seeded it equally
        self._numbers = count(secrets.randbits(40))
        token = os.environ.get(TOKEN, "") if token is None else token
        self._headers = {TRAINER: secrets.token_hex(8)}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def rpc(self, method: str, *args: object) -> list[dict]:
        """Call a method of `receiver.WorkerExtension` in each worker, and return the answers in order of rank."""
        number = next(self._numbers)
        answers = self._post("collective_rpc", {"method": method, "args": [number, *args]})["results"]
        for rank, answer in enumerate(answers):
            if not isinstance(answer, dict) or answer.pop("number", None) != number:
                raise RuntimeError(
                    f"worker {rank} of {self.base_url} answers another question than {method}: its answers are out "
                    "of order. Start the server again."
                )
            if "failed" in answer:
                raise RuntimeError(f"worker {rank} of {self.base_url}, {method}: {answer['failed']}")
        return answers

    def pause(self) -> None:
        """Pause generation. vLLM drops the KV caches of requests in flight, and computes them anew after `resume`."""
        self._post("pause", mode="keep")

    def resume(self) -> None:
        """Let the server generate. Call this only after the checksums were compared."""
        self._post("resume")

    def reset_prefix_cache(self) -> bool:
        return bool(self._post("reset_prefix_cache")["success"])

    def upload(self, kind: str, offset: int, size: int, chunk: bytes) -> str:
        """Send a chunk of a file, and return the file's path at the server. `OSError` if there is no room for it."""
        query = {"kind": kind, "offset": offset, "size": size}
        return self._call("POST", UPLOAD.removeprefix("/"), content=chunk, params=query)["path"]

    def wait_until_up(self, seconds: float) -> None:
        """Wait for a healthy server. `ServerGone` if there is none after `seconds`."""
        end = time.monotonic() + seconds
        while True:
            try:
                if httpx.get(f"{self.base_url}/health", timeout=10).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if time.monotonic() > end:
                raise ServerGone(
                    f"no server at {self.base_url} after {seconds:g} seconds. Start one: trl-fp8 serve MODEL, or "
                    "set vllm_server_base_url to the address that it prints."
                )
            time.sleep(0.2)

    def _post(self, path: str, json: dict | None = None, **query: str) -> dict:
        return self._call("POST", path, json=json, params=query)

    def _call(self, method: str, path: str, **content) -> dict:
        try:
            answer = httpx.request(
                method, f"{self.base_url}/{path}", timeout=self.timeout, headers=self._headers, **content
            )
        except httpx.ReadTimeout as error:
            raise ServerGone(
                f"the server at {self.base_url} has not answered /{path} for {self.timeout:g} seconds. If it answers "
                "/health, its engine hangs: look at the log of the server, and at its GPUs; then start it again."
            ) from error
        except httpx.TransportError as error:
            raise ServerGone(f"the server at {self.base_url} does not answer /{path}: {error!r}") from error
        if answer.status_code == 401:
            raise ValueError(
                f"{TOKEN} is not the token of the server at {self.base_url}. Set it to the value that trl-fp8 serve "
                "prints."
            )
        if answer.status_code == 507:
            raise OSError(errno.ENOSPC, answer.text[:300], f"{self.base_url}/{path}")  # the server's folder is full
        if answer.status_code != 200:
            # vLLM answers with 500 and more if its engine has died
            kind = ServerGone if answer.status_code >= 500 else RuntimeError
            raise kind(f"{self.base_url}/{path}: {answer.status_code}, {answer.text[:300]}")
        return answer.json()
