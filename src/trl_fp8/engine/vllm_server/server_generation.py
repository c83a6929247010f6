"""`ServerGeneration`: `RolloutEngine` whose rollouts come from vLLM servers that `trl-fp8 serve` started.

TRL's client requests completions. Only the first rank talks to servers. All ranks share the servers, and call every
method together.
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list

from trl_fp8.engine.vllm.delivered import DeliveredGeneration
from trl_fp8.engine.vllm.generation import require_same_prompts
from trl_fp8.engine.vllm.policy_weights import PolicyWeights
from trl_fp8.recipe.from_model import outline_of
from trl_fp8.recipe.servable import require_same_positions
from trl_fp8.sync.audit import Replicas, all_reduce_max
from trl_fp8.sync.delivery import InPlaceDelivery
from trl_fp8.sync.records import Occasion

from .client import Control, server_urls
from .plugin import DEFAULT_FOLDER, FOLDER
from .seeded_client import DividedClient, SeededClient
from .staged_engine import StagedEngine
from .transports import require_device


class ServerGeneration(DeliveredGeneration):
    """Servers whose weights and KV scales follow the policy.

    Args:
        transport: Value of the flag `vllm_server_transport`.
        **kwargs: As for `DeliveredGeneration`.

    Raises:
        ValueError: Servers cannot run the policy, `transport` cannot read its device, or a server has another model or
            recipe.
    """

    pinned = {}
    _occasion = Occasion(0, 0, 0)
    _calls: Mapping[Occasion, int] = {}  # occasions of the current step -> number of calls of `generate`

    def __init__(self, *, transport: str = "auto", **kwargs):
        self._transport = transport
        super().__init__(**kwargs)

    def _init_vllm(self) -> None:
        self._require_supported()
        require_device(self._transport, self.accelerator.device)
        require_same_positions(outline_of(self.model), self.max_model_length)
        self._urls = server_urls(self.server_base_url or f"http://{self.server_host}:{self.server_port}")
        controls = [Control(url) for url in self._urls] if self.accelerator.is_main_process else []
        if self.accelerator.num_processes > 1:
            self.replicas = Replicas(self.accelerator.process_index, 1, all_reduce_max, all_reduce_max)
        folder = os.environ.get(FOLDER) or DEFAULT_FOLDER
        device = self.accelerator.device if self.accelerator.device.type != "cpu" else None
        self.engine = StagedEngine(
            controls,
            self.model,
            self.recipe,
            folder,
            patience=self.server_timeout,
            device=device,
            of_first=self._of_first,
            parts=self.parts,
            transport=self._transport,
        )
        self.engine.on_first(self._connect)
        for server in self.engine.servers:
            self.accelerator.print(f"Weights travel to {server.base_url} by {server.transport.name}.")
        self._require_context(self.engine.context)
        self.numerics = self.engine.numerics
        self.weights = self._one_of("weights") or PolicyWeights(self)
        self.delivery = InPlaceDelivery(
            self.engine,
            self.model,
            self.recipe,
            frozen=self.weights.frozen,
            staged=True,
            one_by_one=self.weights.yields_one_by_one(self.model),
            replicas=self.replicas,
            carried=self._one_of("carried"),
        )
        for part in self.parts:
            part.staged(self)

    def _of_first(self, value: Any) -> Any:
        return of_first(value)

    @property
    def sync_metrics(self) -> Mapping[str, float]:
        engine = self.engine
        metrics = {
            "fp8/pause_seconds": engine.pause_seconds,
            "fp8/weight_version": float(engine.version),
            "fp8/patch_over_whole": engine.patch_over_whole,
        }
        if len(self._urls) > 1:
            metrics["fp8/lost_servers"] = float(len(self._urls) - engine.served_by)
        return metrics

    def _connect(self) -> None:
        if len(self._urls) > 1:
            self.vllm_client = DividedClient(self.engine, self.server_timeout)
        else:
            self.vllm_client = SeededClient(base_url=self._urls[0], connection_timeout=self.server_timeout)

    def _require_generated(self) -> None:
        """Raise `RuntimeError` on all ranks if the latest request of the first rank failed. Collective."""
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
        """Raise `ValueError` if the trainer allows longer sequences than the server's, `served` tokens."""
        outline = outline_of(self.model)
        longest = self.max_model_length or int(outline.context * outline.stretch)
        if served < longest:
            raise ValueError(
                f"{self.engine.base_url} serves sequences of up to {served} tokens, and the trainer's may have "
                f"{longest}: the server would cut them short. Set vllm_max_model_length={served}, or start the "
                f"server with --max-model-len {longest}."
            )

    def begin(self, occasion: Occasion, keep_weights: bool) -> None:
        self._occasion = occasion

    def generate(
        self, prompts: list, images: list | None, num_generations: int, profiler: AbstractContextManager | None = None
    ) -> tuple:
        """Generate as TRL does, after a check that the server still holds what was delivered. Collective.

        Raises:
            RuntimeError: The server holds no complete policy, has changed or was started again since the last sync, or
                did not generate.
        """
        self.delivery.verify()
        current = self._occasion
        calls = {}  # `_calls` without the occasions of earlier steps
        for occasion, count in self._calls.items():
            if occasion.run_seed == current.run_seed and occasion.step == current.step:
                calls[occasion] = count
        calls[current] = calls.get(current, 0) + 1
        self._calls = calls
        if self.accelerator.is_main_process:
            self.vllm_client.set_seed((*current, calls[current]))
        is_due = True
        while is_due:
            output = super().generate(prompts, images, num_generations, profiler)
            self._require_generated()
            # Verify again: requests in flight would go on with the weights of another trainer's sync
            self.delivery.verify()
            # Sample again, with the same seeds, if a server was lost before it could be verified
            is_due = len(self._urls) > 1 and self.engine.on_first(lambda: self.vllm_client.has_lost_answers())
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


def tensor_parallel_size(addresses: str, patience: float, state: Accelerator | PartialState, user_size: int) -> int:
    """Return the number of workers that each server has. It decides which layers can be FP8. Collective.

    An error of the first rank is raised on all ranks.

    Raises:
        ValueError: Servers differ, the token is wrong, or `user_size` (the user's flag) is neither that number nor 1.
        RuntimeError: At an address there is no server, or another service.
    """
    sizes: dict[str, int] = {}
    error: Exception | None = None
    urls = server_urls(addresses)
    if not state.is_main_process:
        urls = []  # only the first rank asks the servers
    for url in urls:
        control = Control(url)
        try:
            control.wait_until_up(patience)
            sizes[url] = len(control.rpc("fp8_instance"))
        except (RuntimeError, ValueError) as failed:
            error = failed
        except Exception as failed:  # a rank that raised alone would leave the others waiting
            error = RuntimeError(
                f"{url} does not answer as a server of trl-fp8 serve does ({type(failed).__name__}: {failed}). Set "
                "vllm_server_base_url to the address that it prints."
            )
        if error is not None:
            break
    sizes, error = of_first((sizes, error))
    if error is not None:
        raise error
    url, size = next(iter(sizes.items()))
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"vllm_server_base_url={addresses!r}: the servers have different numbers of workers ({sizes}). Start all "
            "of them with the same --tensor-parallel-size."
        )
    if user_size not in (1, size):
        raise ValueError(
            f"vllm_tensor_parallel_size={user_size}, but the server at {url} has {size} workers. Remove the flag, or "
            f"start the server with --tensor-parallel-size {user_size}."
        )
    return size
