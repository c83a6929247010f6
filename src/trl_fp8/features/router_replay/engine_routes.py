"""Which experts the engine's routers chose, for every token of every rollout.

vLLM's second model runner (CUDA) returns them with each completion (`enable_return_routed_experts`). On CPU it has the
first one only; there `RouterCapture` reads the same hook in its routers, without prefix caching: no router sees a
cached token. A sequence of T tokens has T - 1 rows: the last token was sampled, but never fed back.

Shape letters: T tokens, L decoder layers of the model (dense ones too), K experts per token.
"""

from functools import partial

import numpy as np
import torch
from vllm import LLM, RequestOutput
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from trl_fp8.engine.vllm.rollout_log import RolloutLog
from trl_fp8.recipe.names import NOWHERE
from trl_fp8.upstream import vllm as upstream


class RouteLog(RolloutLog[np.ndarray]):
    """Routes `[T - 1, L, K]` of everything generated since `clear`; `NOWHERE` for tokens that were never fed (a tool's
    last result).
    """

    unknown = "no router's choice is known for them"
    otherwise = "set router_replay='off'"

    def check(self, note: np.ndarray, length: int) -> None:
        if len(note) != length - 1:
            raise RuntimeError(
                f"the engine returned routes for {len(note)} tokens of a rollout that fed {length - 1} to "
                "it. Replay would shift them; set router_replay='off'."
            )

    def merged(self, notes: list[np.ndarray], length: int) -> np.ndarray:
        merged = np.full((length - 1, *notes[0].shape[1:]), NOWHERE, np.int16)
        # in a conversation the first call that fed a token wins: it computed the next token's log-prob
        for routes in reversed(notes):
            merged[: len(routes)] = routes[: length - 1]
        return merged


def returned_routes(outputs: list[RequestOutput]) -> list[np.ndarray]:
    """The routes that vLLM itself returned."""
    routes = [output.outputs[0].routed_experts for output in outputs]
    if any(found is None for found in routes):
        raise RuntimeError("vLLM returned no routed experts although enable_return_routed_experts was set.")
    return routes


class RouterCapture:
    """Reads the routers of an engine with the first model runner, eager, without prefix caching, as they route."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self._step: dict[int, torch.Tensor] = {}  # layer -> experts of the forward that is running
        self._chunks: dict[str, list[tuple[int, np.ndarray]]] = {}  # request -> first position and routes
        modules = upstream.engine_model(llm).modules()
        modules = [module for module in modules if isinstance(getattr(module, "router", None), BaseRouter)]
        if not modules:
            raise ValueError("the engine's model has no routers whose choice could be read.")
        self._layers = llm.llm_engine.model_config.get_total_num_hidden_layers()
        self._last = max(module.layer_id for module in modules)
        for module in modules:
            module.router.set_capture_fn(partial(self._capture, module.layer_id))

    def __call__(self, outputs: list[RequestOutput]) -> list[np.ndarray]:
        """Routes of the requests that just finished; a token that was computed again keeps its first."""
        chunks, self._chunks = self._chunks, {}
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
    """Rows of consecutive positions from 0 on, cut where a preempted request was computed again."""
    kept, filled = [], 0
    for start, chunk in chunks:
        if start + len(chunk) > filled:
            kept.append(chunk[max(0, filled - start) :])
            filled = start + len(chunk)
    return kept
