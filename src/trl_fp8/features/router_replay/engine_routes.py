"""Routes: the experts that the engine's routers chose, for every token of every rollout.

vLLM's V2 model runner (CUDA) returns routes with each completion (`enable_return_routed_experts`). A CPU has only the
V1 runner, which returns none. There `RouterCapture` sets the hook of vLLM's routers that the V2 runner uses. This
needs prefix caching off, because no router runs for a cached token. A sequence of T tokens has T - 1 rows, because its
last token was sampled, but never fed back.

Shape letters: T tokens, L decoder layers of the model (dense ones too), K experts per token.
"""

from functools import partial

import numpy as np
import torch
from transformers import PretrainedConfig
from vllm import LLM, RequestOutput
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from trl_fp8.engine.vllm.colocated import Generation
from trl_fp8.engine.vllm.part import RolloutLog
from trl_fp8.engine.vllm.platform import Platform
from trl_fp8.recipe.names import NOWHERE
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.upstream import vllm as upstream


class RouteLog(RolloutLog):
    """Routes `[T - 1, L, K]` of each rollout since `begin`, as the notes of a `RolloutLog`.

    Routes are `NOWHERE` at tokens that were never fed to the engine, such as the last result of a tool.
    """

    not_known = "no router's choice is known for them"
    cannot_return = "router_replay: vLLM cannot return the experts that it chooses"
    vllm_reason = r"AuxOutput[^\[\n]*"
    remedy = "set router_replay='off'"

    def arguments(self, platform: Platform, recipe: FP8Recipe, config: PretrainedConfig, user: dict) -> dict:
        # On CUDA vLLM returns routes of cached tokens, too, and vLLM 0.31 refuses to return routes without a prefix
        # cache. On CPU routers are read while they run, and they do not run for a cached token
        on_cuda = platform.name == "cuda"
        if on_cuda and recipe.tensor_parallel_size > 1:
            raise ValueError(
                f"router_replay with vllm_tensor_parallel_size={recipe.tensor_parallel_size} on cuda: only the first "
                "rank of a vLLM engine returns the experts that it chose, and its other ranks fail without them. "
                "Set vllm_tensor_parallel_size=1, or router_replay='off'."
            )
        if on_cuda and user.get("async_scheduling"):
            raise ValueError(
                "vllm_engine_kwargs sets async_scheduling=True with router_replay: vLLM cannot reset its prefix "
                "cache after a weight sync while a batch whose routes it returns is in flight. Remove it, or set "
                "router_replay='off'."
            )
        if user.get("enable_prefix_caching", on_cuda) != on_cuda:
            raise ValueError(
                f"vllm_engine_kwargs sets enable_prefix_caching={not on_cuda} with router_replay, which needs "
                f"{on_cuda} on {platform.name}. Remove it, or set router_replay='off'."
            )
        arguments = {"enable_prefix_caching": on_cuda}
        if on_cuda:
            # With asynchronous scheduling a batch could be in flight when a sync resets the prefix cache, and then an
            # assertion in `begin_step` (`aux_output_connector/worker.py`) fails
            arguments |= {"enable_return_routed_experts": True, "async_scheduling": False}
        return arguments

    def started(self, generation: Generation) -> None:
        returned = generation.platform.name == "cuda"
        self.source = returned_routes if returned else RouterCapture(generation.llm)

    def check(self, note: np.ndarray, length: int) -> None:
        if len(note) != length - 1:
            raise RuntimeError(
                f"the engine returned routes for {len(note)} tokens of a rollout, and computed {length - 1}. Replay "
                "would shift them; set router_replay='off'."
            )

    def merged(self, notes: list[np.ndarray], length: int) -> np.ndarray:
        merged = np.full((length - 1, *notes[0].shape[1:]), NOWHERE, np.int16)
        # Notes of several calls in one conversation, in the order of the calls. The call that first fed a token also
        # computed the log-prob of the next token, so the routes of that call count: write the first call's routes last
        for routes in reversed(notes):
            merged[: len(routes)] = routes[: length - 1]
        return merged


def returned_routes(outputs: list[RequestOutput]) -> list[np.ndarray]:
    """Return the routes that vLLM itself returned."""
    routes = [output.outputs[0].routed_experts for output in outputs]
    if any(found is None for found in routes):
        raise RuntimeError("vLLM returned no routed experts although enable_return_routed_experts was set.")
    return routes


class RouterCapture:
    """Records the choices of routers of vLLM's V1 model runner, which has to run eagerly, without a prefix cache."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self._step: dict[int, torch.Tensor] = {}  # layer -> experts chosen in the forward that is running
        self._chunks: dict[str, list[tuple[int, np.ndarray]]] = {}  # request -> (first position, routes) of its chunks
        routers = {}
        for module in upstream.engine_model(llm).modules():
            if isinstance(getattr(module, "router", None), BaseRouter):
                routers[module.layer_id] = module.router
        if not routers:
            raise ValueError(
                "router_replay: the engine's model has no routers whose choice could be read. Set router_replay='off'."
            )
        self._layers = llm.llm_engine.model_config.get_total_num_hidden_layers()
        self._last = max(routers)  # the last layer of a forward
        for layer, router in routers.items():
            router.set_capture_fn(partial(self._capture, layer))

    def __call__(self, outputs: list[RequestOutput]) -> list[np.ndarray]:
        """Return the routes of requests that just finished. For a token that was computed twice, return the first."""
        chunks = self._chunks
        self._chunks = {}
        found = []
        for output in outputs:
            found.append(np.concatenate(_without_repetitions(chunks[output.request_id])))
        return found

    def _capture(self, layer: int, experts: torch.Tensor) -> None:
        """Note a router's choice. After the last layer, add the routes of this forward to each request's chunks."""
        self._step[layer] = experts
        if layer != self._last:
            return
        routes = np.full((len(experts), self._layers, experts.shape[1]), NOWHERE, np.int16)
        for routed_layer, chosen in self._step.items():
            routes[:, routed_layer] = chosen.numpy()
        for request, position, start, end in upstream.scheduled_tokens(self._llm):
            self._chunks.setdefault(request, []).append((position, routes[start:end]))


def _without_repetitions(chunks: list[tuple[int, np.ndarray]]) -> list[np.ndarray]:
    """Return the chunks without positions that an earlier chunk has, because a preempted request is computed again.

    A chunk is the first of its positions, and the routes from there on.
    """
    rows = []
    filled = 0  # number of positions that have routes
    for start, chunk in chunks:
        if start + len(chunk) > filled:
            rows.append(chunk[max(0, filled - start) :])
            filled = start + len(chunk)
    return rows
