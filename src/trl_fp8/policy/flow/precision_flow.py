"""The policy in the engine's precision: FP8 linears, FP8 experts, and with a full FP8 forward BF16 between them.

The flow reproduces an engine's roundings module by module, which was shown for the model types below. Where a model
computes something that no module shows (a product in its own forward, another rotary embedding), or where kernels add
in another order, it goes on without an error, as slow as a flow and no nearer to the engine: hence `flow_warning`.
"""

from torch import nn
from torchao.quantization import Float8Tensor

from trl_fp8.policy.attention.hook import AttentionHook
from trl_fp8.recipe.recipe import FP8Recipe

from .bf16_modules import BF16Modules
from .experts import FP8ExpertModules
from .flow import FP8Flow
from .linear import FP8Linears
from .swapped_modules import SwappedModules


# Shown by tests/engine/test_precision_flow.py, and with FP8 experts by tests/engine/test_experts.py
VERIFIED = ("gemma", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
VERIFIED_WITH_FP8_EXPERTS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
# Mean |log-prob difference|. BF16 rollouts of two layers leave 3e-3 (benchmarks/results/mismatch_ladder_cpu.json), a
# flow that holds at most 1e-5
LIMIT = 1e-3


class PrecisionFlow(SwappedModules):
    """FP8 experts and linears by checkpoint name, installed on a policy before it is wrapped for training.

    Those of `recipe` compute `flow`, experts `experts_flow`, where the engine's kernels for them differ. `hook` is the
    policy's attention hook, if its KV cache is FP8.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: FP8Recipe,
        flow: FP8Flow,
        hook: AttentionHook | None,
        experts_flow: FP8Flow | None = None,
    ):
        self.flow = flow
        # A quantized weight lives until the weight changes, so that a sync's can be kept; torchao quantizes by itself
        self.keeps_weights = flow.cache_weights and flow.backend != "torchao"
        experts = FP8ExpertModules.install(model, recipe.fp8_experts, experts_flow or flow)
        linears = FP8Linears.install(model, recipe.fp8_modules, flow, recipe.tensor_parallel_size)
        super().__init__(experts.modules | linears.modules)
        if flow.forward == "full":
            BF16Modules.install(model)
            if hook is not None and hook.device.type == "cpu":  # as the engine's reference
                hook.sum_in_fp64()

    def keep_weight(self, name: str, codes: Float8Tensor) -> None:
        """Compute with `codes`, which a sync has just made of this weight (a checkpoint name), until it changes."""
        module, _, parameter = name.rpartition(".")
        self.modules[module].keep(codes, parameter)


def flow_warning(
    mismatch: float, model_type: str, *, adapters: bool = False, kv_cache_left_out: bool = False
) -> str | None:
    """What to tell of a full flow that leaves this `mismatch`, a mean |log-prob difference|; None if it holds."""
    if not mismatch > LIMIT:
        return None
    known = VERIFIED + VERIFIED_WITH_FP8_EXPERTS
    if kv_cache_left_out:
        reason = "simulate_kv_cache=False leaves out what the FP8 KV cache rounds: set it to True."
    elif adapters:
        reason = "The engine quantizes the sum of base and adapters, the trainer the base alone."
    elif model_type in known:
        reason = (
            f"On CPU this model type ({model_type}) was shown to be followed, with FP8 experts where it has experts. "
            "GPU kernels round in other places, and modules in BF16 add in another order, which grows with depth."
        )
    else:
        reason = (
            f"model_type={model_type!r} is not one of those that were shown to be followed "
            f"({', '.join(sorted(known))}): it rounds somewhere that the flow does not know."
        )
    return (
        f"fp8_forward='full', but the mean difference of log-probs of the latest rollouts is {mismatch:.2g}, where "
        f"a flow that holds leaves less than {LIMIT:g}. {reason} Rollout correction works as without the flow; "
        "fp8_forward='off' is faster and may be as near (compare mismatch/logp_difference_mean)."
    )
