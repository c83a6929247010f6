"""One forward: the trainer computes with the engine's kernels, on the engine's tensors."""

from collections.abc import Iterator
from contextlib import contextmanager

from trl_fp8.recipe.families import types_with
from trl_fp8.run.feature import Construction, Registration
from trl_fp8.upstream.patches import FOR_GOOD, FOR_ONE_BLOCK, REGISTERED, register

from .forward_flags import ForwardFlags
from .unexplained import mismatch_warnings


@contextmanager
def _construct(construction: Construction) -> Iterator[None]:
    """Restore the classes of a model whose modules still call the engine of an earlier trainer (policy/swapped.py)."""
    model = construction.trainer_kwargs["model"]
    if not isinstance(model, str):
        from trl_fp8.policy.swapped import release

        release(model)
    yield


def _features(trainer) -> Iterator:
    if trainer.args.policy_calls_engine:
        from .following import Following

        yield Following(trainer)
    if trainer.args.any_fp8:
        from .same_model import SameModel

        yield SameModel(trainer)
        compares_logps = getattr(trainer.args, "vllm_importance_sampling_correction", False)
        if compares_logps and trainer.args.explain_mismatch_steps:
            from .explanation import Explanation

            yield Explanation(trainer)


REGISTRATION = Registration(
    flags=ForwardFlags,
    construct=_construct,
    features=_features,
    warnings=lambda metrics, facts: mismatch_warnings(metrics),
)


def _made_by(file: str, reasons: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Return entries of the register of patches: target -> (the file that makes the patch, the reason)."""
    return {target: (f"features/one_forward/{file}", reason) for target, reason in reasons.items()}


INVARIANT = "vllm.model_executor.determinism.batch_invariant"
LAYERS = "vllm.model_executor.layers"
# Folders of transformers.models whose layers can follow an engine; `gemma3_text` is in `gemma3`
FAMILIES = [kind.removesuffix("_text") for kind in types_with("followed")]
ROTARY = [f"transformers.models.{family}.modeling_{family}.apply_rotary_pos_emb" for family in FAMILIES]
ROTATION = "Attention rotates q and k with this; we need the engine's rotation there."
TILES = {
    f"{LAYERS}.quantization.utils.fp8_utils.get_w8a8_block_fp8_configs": (
        "vLLM chooses tiles by the batch; we need the same tiles in every batch."
    ),
    f"{INVARIANT}._get_matmul_config": (
        "vLLM chooses tiles by the batch, some of which leave a GPU idle; we need the same good tiles in every batch."
    ),
    f"{LAYERS}.fused_moe.fused_moe.get_default_config": (
        "vLLM's tiles for batch invariance are slow for FP8 experts; we need fast ones."
    ),
}
NORMS = {"vllm.ir.ops.rms_norm": "vLLM's norm depends on the batch; we need the same bits in every batch."}
ATTENTION = {
    "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend": (
        "vLLM runs different kernels for prefill and decode; we need one."
    )
}
ROUTERS = {"torch.nn.functional.linear": "Routers call this for their logits; we need the engine's logits there."}
START = {
    f"{INVARIANT}.init_batch_invariance": (
        "vLLM slows NCCL down in the whole process; we need the trainer's NCCL unchanged."
    )
}

register(FOR_ONE_BLOCK, _made_by("followed_experts.py", ROUTERS) | _made_by("engine_invariance.py", START))
register(
    FOR_GOOD,
    _made_by("one_forward.py", dict.fromkeys(ROTARY, ROTATION)) | _made_by("engine_invariance.py", TILES),
)
register(REGISTERED, _made_by("engine_invariance.py", NORMS) | _made_by("engine_flash_attention.py", ATTENTION))
