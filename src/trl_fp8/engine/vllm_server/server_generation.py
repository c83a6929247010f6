"""`ServerGeneration`: `RolloutEngine` whose rollouts come from a vLLM server that `trl-fp8 serve` started.

TRL's own client generates. Only the first rank talks to the server; all ranks share it, and call everything together.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from trl.generation.vllm_client import VLLMClient

from trl_fp8.engine.vllm.delivered import DeliveredGeneration
from trl_fp8.engine.vllm.generation import require_same_prompts
from trl_fp8.engine.vllm.policy_weights import PolicyWeights
from trl_fp8.recipe.from_model import outline_of
from trl_fp8.recipe.servable import require_same_positions
from trl_fp8.sync.audit import Replicas, all_reduce_max
from trl_fp8.sync.delivery import InPlaceDelivery

from .client import Control
from .plugin import DEFAULT_FOLDER, FOLDER
from .staged_engine import StagedEngine


CONCURRENT = 64  # requests at a time


class SeededClient(VLLMClient):
    """TRL's client with one request and one seed for each prompt.

    A server's own generators go on from run to run, so that a resumed run would sample other tokens. vLLM adds the
    number of a completion to the seed of its request.
    """

    _seed: tuple[int, ...] = ()
    failure: str | None = None  # why the latest call has no completions

    def begin(self, seed: tuple[int, ...]) -> None:
        """Note the seed of the next call."""
        self._seed = seed

    def generate(self, prompts: list[list[int]], *, generation_kwargs: dict | None = None, **options) -> dict:
        def send(index: int) -> dict:
            state = np.random.SeedSequence([*self._seed, index]).generate_state(1, np.uint64)
            seeded = {**(generation_kwargs or {}), "seed": int(state[0]) >> 2}
            return super(SeededClient, self).generate([prompts[index]], generation_kwargs=seeded, **options)

        options.pop("features", None)
        self.failure = None
        try:
            with ThreadPoolExecutor(CONCURRENT) as executor:
                answers = list(executor.map(send, range(len(prompts))))
        except Exception as error:  # TRL raises `Exception`. Other ranks wait for an answer: `ServerGeneration` raises
            self.failure = f"{type(error).__name__}: {error}"
            empty = [[] for _ in range(len(prompts) * options.get("n", 1))]
            return {"prompt_ids": prompts, "completion_ids": empty, "logprobs": empty, "logprob_token_ids": empty}
        merged = {}
        for key, first in answers[0].items():
            if first is None:  # log-probs for a trainer that reads none, as those that distill
                merged[key] = None
            else:
                merged[key] = list(chain.from_iterable(answer[key] for answer in answers))
        return merged


class ServerGeneration(DeliveredGeneration):
    """Server whose weights and KV scales follow the policy. Takes the arguments of `DeliveredGeneration`.

    `ValueError` for a policy or a trainer's host that this way of weights does not serve, or for a server of another
    model or recipe.
    """

    pinned = {}
    _occasion: tuple[int, int, int] = (0, 0, 0)
    _calls: Mapping[tuple[int, int, int], int] = {}  # occasions of the latest step -> calls of `generate`

    def _init_vllm(self) -> None:
        self._require_supported()
        require_same_positions(outline_of(self.model), self.max_model_length)
        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        control = Control(url) if self.accelerator.is_main_process else None
        if self.accelerator.num_processes > 1:
            self.replicas = Replicas(self.accelerator.process_index, 1, all_reduce_max, all_reduce_max)
        folder = os.environ.get(FOLDER, DEFAULT_FOLDER)
        device = self.accelerator.device if self.accelerator.device.type != "cpu" else None
        self.engine = StagedEngine(control, self.model, self.recipe, folder, self.server_timeout, device, of_first)
        self.engine.on_first(lambda: self._connect(url))
        self._require_context(self.engine.context)
        self.numerics = self.engine.numerics
        self.weights = PolicyWeights(self)
        self.delivery = InPlaceDelivery(
            self.engine,
            self.model,
            self.recipe,
            one_by_one=self.weights.one_by_one(self.model),
            replicas=self.replicas,
            carried=self._one_of("carried"),
        )

    @property
    def sync_metrics(self) -> Mapping[str, float]:
        return {"fp8/pause_seconds": self.engine.pause_seconds, "fp8/weight_version": float(self.engine.version)}

    def _connect(self, url: str) -> None:
        self.vllm_client = SeededClient(base_url=url, connection_timeout=self.server_timeout)

    def _require_generated(self) -> None:
        """Raise `RuntimeError` on all ranks if the server did not answer the first one. Collective."""
        failure = of_first(self.vllm_client.failure if self.accelerator.is_main_process else None)
        if failure is not None:
            raise RuntimeError(
                f"{self.engine.base_url} did not generate ({failure}). Start it again if it has ended, and resume "
                "from a checkpoint."
            )

    def _require_supported(self) -> None:
        config = self.model.config
        if config.get_text_config() is not config:
            raise ValueError(
                f"vllm_mode='server' with FP8: a model of type {config.model_type!r} takes images, which have not "
                "been tried with a server. Set vllm_mode='colocate'."
            )

    def _require_context(self, served: int) -> None:
        """Raise `ValueError` if the server would cut sequences short that the trainer allows."""
        outline = outline_of(self.model)
        longest = self.max_model_length or int(outline.context * outline.stretch)
        if served < longest:
            raise ValueError(
                f"{self.engine.base_url} serves sequences of up to {served} tokens, and the trainer's may have "
                f"{longest}: the server would cut them short. Set vllm_max_model_length={served}, or start the "
                f"server with --max-model-len {longest}."
            )

    def begin(self, occasion: tuple[int, int, int], keep_weights: bool) -> None:
        self._occasion = occasion

    def generate(
        self, prompts: list, images: list | None, num_generations: int, profiler: AbstractContextManager | None = None
    ) -> tuple:
        """Generate as TRL does, if the server holds what was delivered. Collective.

        Raises:
            RuntimeError: The server holds no complete policy, or was changed or started again since the last sync.
        """
        self.delivery.verify()
        calls = {when: count for when, count in self._calls.items() if when[:2] == self._occasion[:2]}  # of this step
        calls[self._occasion] = calls.get(self._occasion, 0) + 1
        self._calls = calls
        if self.accelerator.is_main_process:
            self.vllm_client.begin((*self._occasion, calls[self._occasion]))
        output = super().generate(prompts, images, num_generations, profiler)
        self._require_generated()
        self.delivery.verify()  # another trainer's sync would let requests in flight go on with its weights
        require_same_prompts(prompts, output[0])
        return output

    def prefill(self, tokens: list[int]) -> list[int]:
        tokens = of_first(tokens)
        if self.accelerator.is_main_process:
            self.vllm_client.generate([tokens], max_tokens=1)
        self._require_generated()
        return tokens


def of_first(value: Any) -> Any:
    """Return the first rank's value on all ranks. Collective."""
    values = [value]
    broadcast_object_list(values)
    return values[0]


def tensor_parallel_size(url: str, patience: float, accelerator: Accelerator, user_size: int) -> int:
    """Return the number of the server's workers, which decides which layers can be FP8. Collective.

    `ValueError` if the user's flag has another value than that or 1, its default; `RuntimeError` for another service
    at this address, or none. All ranks raise.
    """
    found: int | Exception = 0
    if accelerator.is_main_process:
        control = Control(url)
        try:
            control.wait_until_up(patience)
            found = len(control.rpc("fp8_instance"))
        except (RuntimeError, ValueError) as error:
            found = error
        except Exception as error:  # a rank that raised alone would leave the others waiting
            found = RuntimeError(
                f"{url} does not answer as a server of trl-fp8 serve does ({type(error).__name__}: {error}). Set "
                "vllm_server_base_url to the address that it prints."
            )
    found = of_first(found)
    if isinstance(found, Exception):
        raise found
    if user_size not in (1, found):
        raise ValueError(
            f"vllm_tensor_parallel_size={user_size}, but the server at {url} has {found} workers. Remove the flag, or "
            f"start the server with --tensor-parallel-size {user_size}."
        )
    return found
