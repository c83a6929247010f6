"""`ColocatedEngine`: a started vLLM, in this process, as a delivery sees it."""

from collections.abc import Callable

from torch import nn
from vllm import LLM

from trl_fp8.features.one_forward.engine_part.vllm_kernels import VLLMKernels
from trl_fp8.features.shared_base.adapter_tensors import A, B
from trl_fp8.features.shared_base.engine_adapters import slots_of
from trl_fp8.recipe.from_model import persistent_buffers
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.policy_checks import require_same_tensors
from trl_fp8.upstream import vllm as upstream

from .auditable import require_auditable
from .layout import constants_layout, engine_layout
from .numerics import engine_numerics
from .platforms import Platform


class ColocatedEngine:
    """`sync.delivery.Engine` whose tensors are written in place; `wake` gives them memory if the engine sleeps.

    `ValueError` if it holds tensors under other names than the policy's, or where no sync can reach; `RuntimeError` if
    a kernel does not keep what it is sent.
    """

    def __init__(self, llm: LLM, policy: nn.Module, recipe: FP8Recipe, platform: Platform, wake: Callable[[], bool]):
        self.llm, self.wake = llm, wake
        self.model = upstream.engine_model(llm)
        require_auditable(self.model)
        buffers = {recipe.engine_name(name) for name, _ in persistent_buffers(policy)}
        self.layout = engine_layout(self.model, recipe.linears, buffers)
        self.constants = constants_layout(self.model, self.layout)
        found = slots_of(self.model, recipe.linears)
        self.slots = {recipe.linears[name]: slot for name, slot in found.items()}  # by the policy's names
        adapters = {f"{name}.{which}.weight" for name in found for which in (A, B)}
        require_same_tensors(policy, recipe, self.layout.part(set(self.layout.names) - adapters))
        self.numerics = engine_numerics(self.model)
        tokens = upstream.engine_config(llm).scheduler_config.max_num_batched_tokens
        self.kernels = VLLMKernels(self.model, self.layout, recipe, platform.attention, tokens)

    def reset_prefix_cache(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache after a weight sync, because requests are still running: cached "
                "prefixes of the old weights would be reused. Finish or abort running requests before the sync."
            )
        self.llm.llm_engine.reset_encoder_cache()  # what a vision tower made of images
