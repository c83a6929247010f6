"""What a run installs on its policy before training: the attention tap with its calibrator, and the precision flow."""

from typing import TYPE_CHECKING

from trl import GRPOTrainer

from trl_fp8.policy.attention.calibration import KVCalibrator
from trl_fp8.policy.attention.outliers import outliers_on_first_prompts
from trl_fp8.policy.attention.tap import AttentionTap
from trl_fp8.policy.flow.flow import FP8Flow
from trl_fp8.policy.flow.precision_flow import PrecisionFlow
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.replicas import all_reduce_max


if TYPE_CHECKING:
    from trl_fp8.engine.protocol import ActivationScaling
    from trl_fp8.engine.vllm.generation import FP8VLLMGeneration


def tap_attention(trainer: GRPOTrainer, recipe: FP8Recipe) -> tuple[AttentionTap, KVCalibrator, FP8Recipe]:
    """Tap the policy's attention; the recipe comes back with kv_cache_skip_layers='auto' resolved."""
    reduce_max = all_reduce_max if trainer.accelerator.num_processes > 1 else None
    tap = AttentionTap(trainer.model, recipe.kv_cache_skip_layers)
    if trainer.args.skip_layers is None:
        errors = outliers_on_first_prompts(trainer, tap, reduce_max)
        recipe = trainer.args.recipe_for(trainer.model, tuple(errors))
        tap.high_precision_layers = frozenset(errors)
    calibrator = KVCalibrator(
        tap,
        **trainer.args.calibration,
        pad_token_id=trainer._tokenizer.pad_token_id,
        fused_lm_head=True,
        reduce_max=reduce_max,
    )
    return tap, calibrator, recipe


def follow_attention(trainer: GRPOTrainer, generation: "FP8VLLMGeneration", tap: AttentionTap) -> None:
    """Let simulated attention round what the engine's kernels were found to round."""
    tap.quantize_query = generation.numerics.query_rounded
    if trainer.args.simulate_attention_weights:
        if generation.numerics.attention_weight_offset is None:
            raise ValueError(
                "simulate_attention_weights=True, but the engine's attention does not round its weights to e4m3 "
                "(vLLM's GPU kernels over an FP8 KV cache do, the CPU reference does not). Set "
                "simulate_attention_weights=False."
            )
        tap.round_weights(generation.numerics.attention_weight_offset)


def precision_flow(trainer: GRPOTrainer, generation: "FP8VLLMGeneration", tap: AttentionTap | None) -> PrecisionFlow:
    """Make the policy compute what the engine's kernels were found to compute."""
    _require_something_to_follow(trainer, generation)
    numerics, experts_flow = generation.numerics, None
    if numerics.experts is not None:
        experts_flow = _flow(trainer, numerics.experts, fused_activation=numerics.fused_experts)
    flow = _flow(trainer, numerics.linears or numerics.experts)
    return PrecisionFlow(trainer.model, trainer.recipe, flow, tap, experts_flow)


def _require_something_to_follow(trainer: GRPOTrainer, generation: "FP8VLLMGeneration") -> None:
    if generation.numerics.linears is None and generation.numerics.experts is None:
        recipe = trainer.recipe
        raise RuntimeError(
            f"fp8_forward={trainer.args.fp8_forward!r} follows the engine's FP8 kernels: expected are those of "
            f"{len(recipe.fp8_modules)} linear layers and {len(recipe.fp8_experts)} layers of experts, found is none "
            "(as vLLM 0.31 names them). Remove linear_backend and moe_backend from vllm_engine_kwargs, or set "
            "fp8_forward='off'."
        )


def _flow(trainer: GRPOTrainer, scaling: "ActivationScaling", **options) -> FP8Flow:
    return FP8Flow(
        **trainer.args.flow,
        format=trainer.recipe.format,
        scale_format=trainer.recipe.scale_format,
        activation=scaling,
        cache_weights=not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled),
        **options,
    )
