"""The policy in the engine's precision (`fp8_forward`), told when its weights change; a warning where it fails."""

from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torchao.quantization import Float8Tensor
from trl import GRPOTrainer

from trl_fp8.engine.protocol import ActivationScaling, EngineNumerics
from trl_fp8.policy.flow.flow import FP8Flow
from trl_fp8.policy.flow.precision_flow import PrecisionFlow, flow_warning

from .feature import Batch, Feature, Rollouts
from .kv_cache import KVCache


logger = get_logger(__name__)


class Flow(Feature):
    """Makes the policy compute what the engine computes. `RuntimeError` if that has no FP8 kernel."""

    def __init__(self, trainer: GRPOTrainer):
        super().__init__(trainer)
        recipe = trainer.recipe  # what can be refused before an engine is started
        self._flow(ActivationScaling(recipe.scale_format, scope=recipe.format.activation_scope))
        self.flow: PrecisionFlow | None = None  # until the engine says what it computes
        self._warned = False

    def engine_started(self, numerics: EngineNumerics) -> None:
        recipe, experts = self.trainer.recipe, None
        if numerics.linears is None and numerics.experts is None:
            raise RuntimeError(
                f"fp8_forward={self.trainer.args.fp8_forward!r} follows the engine's FP8 kernels: expected are those "
                f"of {len(recipe.fp8_modules)} linear layers and {len(recipe.fp8_experts)} layers of experts, found "
                "is none (as vLLM 0.31 names them). Remove linear_backend and moe_backend from vllm_engine_kwargs, or "
                "set fp8_forward='off'."
            )
        if numerics.experts is not None:
            experts = self._flow(numerics.experts, fused_activation=numerics.fused_experts)
        linears, kv_cache = self._flow(numerics.linears or numerics.experts), self.trainer.feature(KVCache)
        self.flow = PrecisionFlow(self.trainer.model, recipe, linears, kv_cache and kv_cache.hook, experts)

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

    def keep_weight(self, name: str, codes: Float8Tensor) -> None:
        """Compute with an FP8 weight that a sync has just quantized, unless the flow makes its own each time."""
        if self.flow.keeps_weights:
            self.flow.keep_weight(name, codes)

    def __str__(self) -> str:
        return str(self.flow.flow)

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.flow.invalidate()

    def after_generation(self, rollouts: Rollouts) -> None:
        if is_peft_model(self.trainer.model):
            self.flow.invalidate()  # the sync merged and unmerged adapters

    def extend_batch(self, batch: Batch) -> None:
        mismatch, trainer = batch.metrics.get("mismatch/logp_difference_mean"), self.trainer
        if mismatch is None or self._warned or trainer.args.fp8_forward != "full":
            return
        left_out = trainer.recipe.fp8_kv_cache and not trainer.args.simulate_kv_cache
        known = {"adapters": is_peft_model(trainer.model), "kv_cache_left_out": left_out}
        if warning := flow_warning(mismatch, trainer.recipe.model_type, **known):
            self._warned = True
            logger.warning(warning)
