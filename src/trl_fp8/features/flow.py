"""The policy in the engine's precision (`fp8_forward`), told when its weights change; a warning where it fails."""

from collections.abc import Mapping

from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from trl import GRPOTrainer

from trl_fp8.engine.protocol import ActivationScaling, EngineNumerics
from trl_fp8.policy.attention.tap import AttentionTap
from trl_fp8.policy.flow.flow import FP8Flow
from trl_fp8.policy.flow.precision_flow import PrecisionFlow, flow_warning
from trl_fp8.sync.weight_stream import Share

from .feature import Batch, Feature, Rollouts


logger = get_logger(__name__)


class Flow(Feature):
    """Makes the policy compute what the engine's kernels were found to compute.

    Args:
        trainer: The trainer, with its recipe.
        numerics: How its engine computes.
        tap: The policy's attention tap, if the KV cache is FP8.

    Attributes:
        flow: Installed on the policy.

    Raises:
        RuntimeError: The engine has no FP8 kernel that could be followed.
    """

    def __init__(self, trainer: GRPOTrainer, numerics: EngineNumerics, tap: AttentionTap | None):
        super().__init__(trainer)
        recipe, experts = trainer.recipe, None
        if numerics.linears is None and numerics.experts is None:
            raise RuntimeError(
                f"fp8_forward={trainer.args.fp8_forward!r} follows the engine's FP8 kernels: expected are those "
                f"of {len(recipe.fp8_modules)} linear layers and {len(recipe.fp8_experts)} layers of experts, found "
                "is none (as vLLM 0.31 names them). Remove linear_backend and moe_backend from vllm_engine_kwargs, or "
                "set fp8_forward='off'."
            )
        if numerics.experts is not None:
            experts = self._flow(numerics.experts, fused_activation=numerics.fused_experts)
        linears = self._flow(numerics.linears or numerics.experts)
        self.flow = PrecisionFlow(trainer.model, recipe, linears, tap, experts)
        self._warned = False

    def _flow(self, scaling: ActivationScaling, **options) -> FP8Flow:
        trainer = self.trainer
        return FP8Flow(
            **trainer.args.flow,
            format=trainer.recipe.format,
            scale_format=trainer.recipe.scale_format,
            activation=scaling,
            cache_weights=not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled),
            **options,
        )

    @property
    def share(self) -> Share | None:
        """Where a sync leaves the weights that it quantized; None if the flow makes its own each time."""
        return self.flow.keep_weight if self.flow.keeps_weights else None

    def __str__(self) -> str:
        return str(self.flow.flow)

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.flow.weights_changed()

    def after_generation(self, rollouts: Rollouts) -> Mapping[str, float]:
        if is_peft_model(self.trainer.model):
            self.flow.weights_changed()  # the sync merged and unmerged adapters
        return {}

    def extend_batch(self, batch: Batch) -> None:
        mismatch, trainer = batch.metrics.get("mismatch/logp_difference_mean"), self.trainer
        if mismatch is None or self._warned or trainer.args.fp8_forward != "full":
            return
        left_out = trainer.recipe.fp8_kv_cache and not trainer.args.simulate_kv_cache
        known = {"adapters": is_peft_model(trainer.model), "kv_cache_left_out": left_out}
        if warning := flow_warning(mismatch, trainer.recipe.model_type, **known):
            self._warned = True
            logger.warning(warning)
