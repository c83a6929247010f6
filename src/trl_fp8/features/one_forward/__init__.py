"""One forward: the trainer computes with the engine's kernels, on the engine's tensors."""

from collections.abc import Iterator
from contextlib import contextmanager

from trl_fp8.recipe.families import types_with
from trl_fp8.run.registration import Construction, Registration
from trl_fp8.upstream.patches import FOR_GOOD, FOR_ONE_BLOCK, REGISTERED, register

from .forward_flags import ForwardFlags


@contextmanager
def _construct(making: Construction) -> Iterator[None]:
    """A model that followed the engine of a trainer before this one computes by itself again."""
    if not isinstance(model := making.given["model"], str):
        from trl_fp8.policy.swapped import release

        release(model)
    yield


def _features(trainer) -> Iterator:
    args = trainer.args
    if args.one_forward:
        from .following import Following

        yield Following(trainer)
    if args.any_fp8:
        from .same_model import SameModel

        yield SameModel(trainer)


REGISTRATION = Registration(flags=ForwardFlags, construct=_construct, features=_features)


FAMILIES = [kind.removesuffix("_text") for kind in types_with("followed")]  # as transformers names its modules

register(
    FOR_ONE_BLOCK,
    {
        "torch.nn.functional.linear": (
            "features/one_forward/followed_experts.py",
            "Routers call it, or what ZeRO-3 puts in its place.",
        ),
        "vllm.model_executor.determinism.batch_invariant.init_batch_invariance": (
            "features/one_forward/engine_invariance.py",
            "It would slow the trainer's NCCL down.",
        ),
    },
)
register(
    FOR_GOOD,
    {
        **{
            f"transformers.models.{family}.modeling_{family}.apply_rotary_pos_emb": (
                "features/one_forward/one_forward.py",
                "Attention calls it by this name; the engine turns q and k.",
            )
            for family in FAMILIES
        },
        "vllm.model_executor.layers.quantization.utils.fp8_utils.get_w8a8_block_fp8_configs": (
            "features/one_forward/engine_invariance.py",
            "Its tiles depend on the batch.",
        ),
        "vllm.model_executor.determinism.batch_invariant._get_matmul_config": (
            "features/one_forward/engine_invariance.py",
            "Its tiles depend on the batch, or leave a GPU idle.",
        ),
        "vllm.model_executor.layers.fused_moe.fused_moe.get_default_config": (
            "features/one_forward/engine_invariance.py",
            "Its tiles for batch invariance are slow for FP8.",
        ),
    },
)
register(
    REGISTERED,
    {
        "vllm.ir.ops.rms_norm": (
            "features/one_forward/engine_invariance.py",
            "The same bits in every batch; on CPU its mean is FP64.",
        ),
        "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend": (
            "features/one_forward/engine_flash_attention.py",
            "Prefill and decode would run different kernels.",
        ),
    },
)
