"""`FP8GRPOConfig`: TRL's `GRPOConfig` plus the flags that say what is FP8.

Each flag is described once, in the `help` of its group in flags/; docs/configuration.md is generated from there. Three
defaults of TRL's own depend on whether anything is FP8, so they are declared as None and resolved in `__post_init__`:
with every FP8 flag off the config is TRL's, field for field.
"""

from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from torch import nn
from trl import GRPOConfig

from .features.correction.correction_flags import CorrectionFlags
from .features.correction.importance import RolloutCorrection
from .features.kv_cache.kv_cache_flags import KVCacheFlags
from .features.one_forward.forward_flags import ForwardFlags
from .features.router_replay.router_flags import RouterFlags
from .recipe.recipe import FP8Recipe, recipe_for_model
from .run.engine_flags import EngineFlags
from .run.flag import flag
from .run.weight_flags import WeightFlags


@dataclass
class FP8GRPOConfig(EngineFlags, CorrectionFlags, WeightFlags, ForwardFlags, RouterFlags, KVCacheFlags, GRPOConfig):
    """Configuration of `FP8GRPOTrainer`: every field of `trl.GRPOConfig`, and the ones below.

    Raises:
        ValueError: From `__post_init__`, if a flag's value is unknown or does not go with another; the message names
            flag, value, reason and remedy.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["rollout_correction", "vllm_engine_kwargs"]

    fp8_run_log: bool = flag(
        True,
        "Whether output_dir/fp8_run.jsonl is written, from which `trl-fp8 report` draws: facts of the "
        "run, its logs, and of each generation a histogram of log-ratios, some pairs of log-probs and the KV "
        "scales (a few KiB).",
    )

    def __post_init__(self):
        given = {item.name for item in fields(self) if getattr(self, item.name) != _default(item)}
        self.check_weights()
        others = {name: getattr(self, name) for name in ("use_liger_kernel", "cast_lm_head_to_fp32")}
        # transformers takes either of the last two for torch_compile=True. A compiler builds the kernels of the loss's
        # forward anew, and the comparison with the engine does not see it: rollouts are scored uncompiled
        others["torch_compile"] = bool(self.torch_compile or self.torch_compile_backend or self.torch_compile_mode)
        self.check_forward(self.fp8_weights, self.fp8_weight_format, self.fp16, self.simulate_kv_cache, others)
        self.resolve_kv_cache(self.blind_pass, alone=self.one_forward or not self.fp8_weights)
        self.resolve_engine(self.any_fp8)
        self.resolve_correction(self.any_fp8)
        super().__post_init__()
        self.check_router(self.use_vllm, self.vllm_mode, self.blind_pass)
        fp8 = f"fp8_weights={self.fp8_weights}, kv_cache_dtype={self.kv_cache_dtype!r}" if self.any_fp8 else None
        self.check_engine(fp8, self.own_engine)
        self.check_correction(self.any_fp8)
        # A second config would tell what its defaults come to, but its making resets accelerate's state
        self.resolved_defaults = {name: value for name, value in self.to_dict().items() if name not in given}

    @property
    def any_fp8(self) -> bool:
        return self.fp8_weights or self.kv_cache_dtype != "auto"

    @property
    def own_engine(self) -> bool:
        """Whether rollouts need this project's engine and not TRL's."""
        return self.any_fp8 or self.routes_returned or self.survivors_returned

    @property
    def survivors_returned(self) -> bool:
        """Whether the trainer's log-probs are of what top-k, top-p and min-p leave, as those of the rollouts are."""
        ours = self.any_fp8 or self.routes_returned or self.rollout_correction is not None
        corrected = self.use_vllm and self.vllm_importance_sampling_correction and self.vllm_mode == "colocate"
        return bool(ours and corrected and self.truncated_by)

    @property
    def correction(self) -> RolloutCorrection | None:
        """The correction in force, if any."""
        return self.correction_in_force(self.any_fp8)

    def recipe_for(self, model: nn.Module, kv_cache_skip_layers: tuple[int, ...] = ()) -> FP8Recipe:
        """Which tensors of `model` are FP8 under these flags, on this machine; `kv_cache_skip_layers` with 'auto'
        resolved.
        """
        return recipe_for_model(
            model,
            fp8_weights=self.fp8_weights,
            kv_cache_dtype=self.kv_cache_dtype,
            kv_cache_skip_layers=self.skip_layers or kv_cache_skip_layers,
            weight_format=self.fp8_weight_format,
            scale_format=self.fp8_scale_format,
            kv_scale_margin=self.kv_scale_margin,
            tensor_parallel_size=self.vllm_tensor_parallel_size,
            ignored_modules=tuple(self.fp8_ignored_modules or ()),
            expert_kernels=self.device.type != "cpu",
        )


def _default(item: Field) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _described(item: Field) -> str:
    kind = item.type.__name__ if isinstance(item.type, type) else str(item.type)
    return (
        f"    {item.name} (`{kind}`, *optional*, defaults to `{_default(item)!r}`):\n        {item.metadata['help']}"
    )


# As TRL documents its configs, from the one place where each flag is described: for help() and notebooks
_OURS = [item for item in fields(FP8GRPOConfig) if item.name not in {of.name for of in fields(GRPOConfig)}]
FP8GRPOConfig.__doc__ = "\n".join(
    [
        *(FP8GRPOConfig.__doc__.rstrip(), "\nParameters:", *map(_described, _OURS)),
        f"\nThe parameters of `trl.GRPOConfig`:\n\n{GRPOConfig.__doc__.strip()}\n",
    ]
)
