"""One forward: the trainer computes with the engine's kernels, on the engine's tensors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trl_fp8.recipe.families import types_with
from trl_fp8.run.feature import Construction, Registration
from trl_fp8.upstream.patches import FOR_GOOD, FOR_ONE_BLOCK, REGISTERED, register

from .forward_flags import ForwardFlags
from .unexplained import mismatch_warnings


@contextmanager
def _construct(construction: Construction) -> Iterator[None]:
    """Release a model that still follows the engine of an earlier trainer."""
    model = construction.trainer_kwargs["model"]
    if not isinstance(model, str):
        from trl_fp8.policy.swapped import release

        release(model)
    yield


def _features(trainer) -> Iterator:
    if trainer.args.one_forward:
        from .following import Following

        yield Following(trainer)
    if trainer.args.any_fp8:
        from .same_model import SameModel

        yield SameModel(trainer)
        compared = getattr(trainer.args, "vllm_importance_sampling_correction", False)
        if compared and trainer.args.explain_mismatch_steps:
            from .explanation import Explanation

            yield Explanation(trainer)


def _warnings(metrics: Mapping[str, float], facts: Mapping[str, Any]) -> dict[str, str]:
    return mismatch_warnings(metrics)


REGISTRATION = Registration(flags=ForwardFlags, construct=_construct, features=_features, warnings=_warnings)


def _made_by(file: str, reasons: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Return entries of the register of patches: target -> the file that makes the patch, and the reason."""
    return {target: (f"features/one_forward/{file}", reason) for target, reason in reasons.items()}


INVARIANT = "vllm.model_executor.determinism.batch_invariant"
LAYERS = "vllm.model_executor.layers"
FAMILIES = [kind.removesuffix("_text") for kind in types_with("followed")]  # as transformers names its modules
ROTARY = [f"transformers.models.{family}.modeling_{family}.apply_rotary_pos_emb" for family in FAMILIES]
TILES = {
    f"{LAYERS}.quantization.utils.fp8_utils.get_w8a8_block_fp8_configs": "Its tiles depend on the batch.",
    f"{INVARIANT}._get_matmul_config": "Its tiles depend on the batch, or leave a GPU idle.",
    f"{LAYERS}.fused_moe.fused_moe.get_default_config": "Its tiles for batch invariance are slow for FP8.",
}
NORMS = {"vllm.ir.ops.rms_norm": "The same bits in every batch; on CPU its mean is FP64."}
ATTENTION = {
    "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend": "Prefill and decode would run different kernels."
}
ROUTERS = {"torch.nn.functional.linear": "Routers call it, or what ZeRO-3 puts in its place."}
START = {f"{INVARIANT}.init_batch_invariance": "It would slow the trainer's NCCL down."}

register(FOR_ONE_BLOCK, _made_by("followed_experts.py", ROUTERS) | _made_by("engine_invariance.py", START))
register(
    FOR_GOOD,
    _made_by("one_forward.py", dict.fromkeys(ROTARY, "Attention calls it by this name; the engine rotates q and k."))
    | _made_by("engine_invariance.py", TILES),
)
register(REGISTERED, _made_by("engine_invariance.py", NORMS) | _made_by("engine_flash_attention.py", ATTENTION))
