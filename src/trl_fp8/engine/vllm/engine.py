"""`ColocatedEngine`: a started vLLM, in this process, as a delivery sees it."""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from vllm import LLM

from trl_fp8.quantization.kv_scales import KVScales
from trl_fp8.recipe.from_model import persistent_buffers
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.policy_checks import require_same_names
from trl_fp8.upstream import vllm as upstream

from .auditable import require_auditable
from .kv_scales import fp8_attention_layers, verify_kv_scales
from .layout import engine_layout
from .numerics import engine_numerics, fp8_experts
from .platforms import Platform


class ColocatedEngine:
    """`sync.delivery.Engine` by vLLM's reload; `wake` gives the weights memory if the engine sleeps.

    `ValueError` if it holds tensors under other names than the policy's, or where no sync can reach; `RuntimeError` if
    a kernel or an attention layer does not keep what it is sent.
    """

    def __init__(self, llm: LLM, policy: nn.Module, recipe: FP8Recipe, platform: Platform, wake: Callable[[], None]):
        self.llm, self.wake, self._skip_layers = llm, wake, recipe.kv_cache_skip_layers
        self.model = upstream.engine_model(llm)
        require_auditable(self.model)
        buffers = {recipe.engine_name(name) for name, _ in persistent_buffers(policy)}
        self.layout = engine_layout(self.model, buffers)
        require_same_names(policy, recipe, self.layout)
        if recipe.fp8_kv_cache:
            fp8_attention_layers(self.model, self._skip_layers)
        if unreadable := self.layout.unreadable:
            platform.accept_unreadable(len(unreadable), "; ".join(sorted(set(unreadable.values()))))
        self.numerics = engine_numerics(self.model)

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        upstream.reload_weights(self.llm, tensors, fp8_experts(self.model))

    def abort(self) -> None:
        upstream.abort_reload(self.llm)

    def verify_kv_scales(self, sent: KVScales) -> None:
        verify_kv_scales(self.model, sent, self._skip_layers)

    def reset_prefix_cache(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache after a weight sync, because requests are still running: cached "
                "prefixes of the old weights would be reused. Finish or abort running requests before the sync."
            )
