"""Routes: the experts that the engine's routers chose, for every token of every rollout.

vLLM's second model runner (CUDA) returns them with each completion (`enable_return_routed_experts`). On CPU vLLM has
only the first runner: there `RouterCapture` uses the same hook of its routers, without prefix caching, because no
router sees a cached token. A sequence of T tokens has T - 1 rows: the last token was sampled, but never fed back.

Shape letters: T tokens, L decoder layers of the model (dense ones too), K experts per token.
"""

import re
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
    """Routes `[T - 1, L, K]` of everything generated since `begin`; `NOWHERE` for tokens that were never fed (a tool's
    last result).
    """

    unknown = "no router's choice is known for them"
    otherwise = "set router_replay='off'"

    def arguments(self, platform: Platform, recipe: FP8Recipe, config: PretrainedConfig, user: dict) -> dict:
        # With a prefix cache vLLM (on CUDA) stores the routes of cached tokens, too. On CPU routers are read as they
        # run, and would not run for a cached token
        cached = platform.name == "cuda"
        if cached and recipe.tensor_parallel_size > 1:
            raise ValueError(
                f"router_replay with vllm_tensor_parallel_size={recipe.tensor_parallel_size} on cuda: only the first "
                "rank of a vLLM engine returns the experts that it chose, and its other ranks fail without them. "
                "Set vllm_tensor_parallel_size=1, or router_replay='off'."
            )
        if cached and user.get("async_scheduling"):
            raise ValueError(
                "vllm_engine_kwargs sets async_scheduling=True with router_replay: vLLM cannot reset its prefix "
                "cache after a weight sync while a batch whose routes it returns is in flight. Remove it, or set "
                "router_replay='off'."
            )
        if user.get("enable_prefix_caching", cached) != cached:
            raise ValueError(
                f"vllm_engine_kwargs sets enable_prefix_caching={not cached} with router_replay, which needs "
                f"{cached} on {platform.name}. Remove it, or set router_replay='off'."
            )
        # A batch that is scheduled ahead would be in flight when a sync resets the prefix cache: `begin_step`
        # (`aux_output_connector/worker.py`) then fails an assertion
        returned = {"enable_return_routed_experts": True, "async_scheduling": False} if cached else {}
        return {"enable_prefix_caching": cached, **returned}

    def explain(self, error: ValueError) -> ValueError | None:
        reason = re.search(r"AuxOutput[^\[\n]*", str(error))
        return reason and ValueError(
            f"router_replay: vLLM cannot return the experts that it chooses here: {reason[0].strip()} "
            "Otherwise set router_replay='off'."
        )

    def started(self, generation: Generation) -> None:
        returned = generation.platform.name == "cuda"
        self.source = returned_routes if returned else RouterCapture(generation.llm)

    def check(self, note: np.ndarray, length: int) -> None:
        if len(note) != length - 1:
            raise RuntimeError(
                f"the engine returned routes for {len(note)} tokens of a rollout that fed {length - 1} to "
                "it. Replay would shift them; set router_replay='off'."
            )

    def merged(self, notes: list[np.ndarray], length: int) -> np.ndarray:
        merged = np.full((length - 1, *notes[0].shape[1:]), NOWHERE, np.int16)
        # Several calls of one conversation: later ones are written first, so that a token keeps the routes of the call
        # that first fed it, which computed the next token's log-prob
        for routes in reversed(notes):
            merged[: len(routes)] = routes[: length - 1]
        return merged


def returned_routes(outputs: list[RequestOutput]) -> list[np.ndarray]:
    """Return the routes that vLLM itself reported."""
    routes = [output.outputs[0].routed_experts for output in outputs]
    if any(found is None for found in routes):
        raise RuntimeError("vLLM returned no routed experts although enable_return_routed_experts was set.")
    return routes


class RouterCapture:
    """Records what routers choose as they run. Needs vLLM's first model runner, eager mode and no prefix caching."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self._step: dict[int, torch.Tensor] = {}  # layer -> experts of the forward that is running
        self._chunks: dict[str, list[tuple[int, np.ndarray]]] = {}  # request -> first position and routes
        modules = upstream.engine_model(llm).modules()
        routers = {m.layer_id: m.router for m in modules if isinstance(getattr(m, "router", None), BaseRouter)}
        if not routers:
            raise ValueError("the engine's model has no routers whose choice could be read.")
        self._layers = llm.llm_engine.model_config.get_total_num_hidden_layers()
        self._last = max(routers)
        for layer, router in routers.items():
            router.set_capture_fn(partial(self._capture, layer))

    def __call__(self, outputs: list[RequestOutput]) -> list[np.ndarray]:
        """Return routes of the requests that just finished; a token that was computed again keeps its first."""
        chunks = self._chunks
        self._chunks = {}
        return [np.concatenate(_without_repetitions(chunks[output.request_id])) for output in outputs]

    def _capture(self, layer: int, experts: torch.Tensor) -> None:
        self._step[layer] = experts
        if layer != self._last:
            return
        routes = np.full((len(experts), self._layers, experts.shape[1]), NOWHERE, np.int16)
        for number, chosen in self._step.items():
            routes[:, number] = chosen.numpy()
        for request, position, start, end in upstream.scheduled_tokens(self._llm):
            self._chunks.setdefault(request, []).append((position, routes[start:end]))


def _without_repetitions(chunks: list[tuple[int, np.ndarray]]) -> list[np.ndarray]:
    """Return the chunks without positions that an earlier one has: a preempted request is computed again."""
    rows = []
    filled = 0
    for start, chunk in chunks:
        if start + len(chunk) > filled:
            rows.append(chunk[max(0, filled - start) :])
            filled = start + len(chunk)
    return rows
