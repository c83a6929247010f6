"""Flags of the engine's FP8 KV cache."""

import math
from dataclasses import dataclass
from typing import Any

from trl_fp8.planning.risks import Risk
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import FP8Recipe, is_vision
from trl_fp8.run.feature import FlagGroup, flag


KV_CACHE_DTYPES = ("fp8", "auto")
KV_CALIBRATIONS = ("rollout", "policy")
K_NORMS = ("k_norm", "k_layernorm", "key_layernorm", "k_layer_norm")  # names of the normalization of k in transformers


@dataclass
class KVCacheFlags(FlagGroup):
    """Flags of the FP8 KV cache and of its scales."""

    OFF_VALUES = {"kv_cache_dtype": "auto"}

    kv_cache_dtype: str = flag(
        "fp8",
        "Type of the engine's KV cache: 'fp8' (e4m3 with per-tensor scales, recalibrated on the policy at "
        "every sync) or 'auto' (the model's type).",
    )
    kv_cache_skip_layers: list[str] | None = flag(
        None,
        "Decoder layers whose KV cache stays in BF16, by number (e.g. [0, 27], on a command line 0 27), or 'auto': "
        "those whose k has outliers on the first prompts of the dataset, as happens where k has a bias and no "
        "normalization (Qwen2). Not set: none.",
    )
    kv_calibration: str | None = flag(
        None,
        "Where the scales of q, k and v come from: 'rollout' (the trainer's old-log-prob pass over the "
        "latest rollouts, which runs anyway) or 'policy' (the updated weights are run over coming prompts "
        "and latest rollouts). Before the first rollouts both run the coming prompts. Not set: 'rollout', unless the "
        "old-log-prob pass misses tokens (vllm_importance_sampling_correction=False skips it, "
        "mask_truncated_completions=True hides truncated completions from it); then 'policy'.",
    )
    kv_scale_margin: float = flag(
        1.05,
        "The scale covers this factor times the largest |q|, |k| and |v| that calibration saw, because later tokens "
        "may be larger. At least 1. It is doubled before the first rollouts, when calibration has seen only prompts, "
        "and each time that rollouts of training saturate. The scale is rounded up to a power of two.",
    )
    kv_calibration_tokens: int = flag(
        8192,
        "Limit on the tokens per process that calibration runs through the policy, from the coming prompts and the "
        "previous rollouts. It is also the limit on the padded positions of one forward. If padding exceeds it, the "
        "sequences are split over several forwards.",
    )
    simulate_kv_cache: bool | None = flag(
        None,
        "Whether the trainer's attention sees k and v (and q, if the engine's attention rounds it) as the "
        "engine's FP8 KV cache held them during the rollout, under the same scales; gradients pass straight "
        "through. It has a visible effect only without FP8 weights, whose mismatch is larger, or if both sides "
        "compute with the same kernels. Not set: on with fp8_weights=False and with fp8_forward='one_forward', which "
        "needs it.",
    )

    @property
    def skip_layers(self) -> tuple[int, ...] | None:
        """Return `kv_cache_skip_layers` as numbers: () if it is not set, None for 'auto' (a run finds the layers)."""
        if self.kv_cache_skip_layers == ["auto"]:
            return None
        return tuple(int(layer) for layer in self.kv_cache_skip_layers or ())

    def flag_ruling_out_fp8_base(self, model) -> str | None:
        return "kv_cache_skip_layers='auto'" if self.skip_layers is None else None

    def check(self) -> None:
        if self.base_in_engine and self.skip_layers is None:
            raise ValueError(
                "kv_cache_skip_layers='auto' with fp8_base=True: 'auto' runs the policy before the engine starts, but "
                "the base weights exist only in the engine. Name the layers, set kv_cache_skip_layers=None, or set "
                "fp8_base=False."
            )

    def risks(self, outline: Outline, recipe: FP8Recipe) -> list[Risk]:
        if not recipe.fp8_kv_cache or (self.base_in_engine and self.kv_cache_skip_layers):
            return []
        if not any(_has_unnormalized_bias(name, outline) for name in outline.parameters):
            return []
        text = f"{outline.model_type} has biases in q, k, v: some layers' keys may have outliers that FP8 keeps badly."
        if self.base_in_engine:
            text += " Give their numbers to kv_cache_skip_layers; a run without fp8_base finds them with 'auto'."
            return [Risk(text)]
        text += " kv_cache_skip_layers='auto' looks for them before the first rollout."
        return [Risk(text, {"kv_cache_skip_layers": "auto"})]

    def recipe_fields(self) -> dict[str, Any]:
        return {
            "kv_cache_dtype": self.kv_cache_dtype,
            "kv_cache_skip_layers": self.skip_layers or (),
            "kv_scale_margin": self.kv_scale_margin,
        }

    def resolve(self) -> None:
        """Normalize the flags and fill in defaults.

        Raises:
            ValueError: A value is unknown, out of range, or has no effect without an FP8 cache.
        """
        if self.kv_cache_dtype == "fp8_e4m3":  # vLLM's other name for "fp8"
            self.kv_cache_dtype = "fp8"
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype={self.kv_cache_dtype!r}: the trainer can calibrate and check only scales of "
                "e4m3. Use 'fp8' (e4m3), or 'auto' (the model's own dtype)."
            )
        if not 1 <= self.kv_scale_margin < math.inf:
            raise ValueError(
                f"kv_scale_margin={self.kv_scale_margin} is not a finite number of at least 1. Below 1 even the "
                "largest calibrated value would not fit into the KV cache. Use 1.0 or more (default 1.05)."
            )
        if self.kv_calibration == "rollout" and self.setting_against_full_pass and self.kv_cache_dtype == "fp8":
            raise ValueError(
                f"kv_calibration='rollout' with {self.setting_against_full_pass}: then the old-log-prob pass, which "
                "calibration would observe, does not see every token of the rollouts. Use kv_calibration='policy', or "
                "leave it unset."
            )
        if self.kv_calibration not in (*KV_CALIBRATIONS, None):
            raise ValueError(
                f"kv_calibration={self.kv_calibration!r} is unknown. Use one of {list(KV_CALIBRATIONS)}: scales have "
                "to be calibrated, because no default scale is safe."
            )
        if self.kv_calibration_tokens < 1 and self.kv_cache_dtype == "fp8":
            raise ValueError(
                f"kv_calibration_tokens={self.kv_calibration_tokens} leaves nothing to calibrate the KV cache on. Use "
                "a positive number (default 8192), or kv_cache_dtype='auto' for a KV cache without scales."
            )
        skipped = self.kv_cache_skip_layers
        if skipped is not None:
            items = [skipped] if isinstance(skipped, str | int) else skipped
            layers = [str(item) for item in items]
            if layers != ["auto"] and not all(item.isdigit() for item in layers):
                raise ValueError(
                    f"kv_cache_skip_layers={skipped!r} is neither 'auto' nor a list of layer numbers, for example "
                    "kv_cache_skip_layers=[0, 27]."
                )
            self.kv_cache_skip_layers = layers
        if self.kv_cache_dtype == "auto" and (self.simulate_kv_cache or self.kv_cache_skip_layers):
            settings = []
            if self.simulate_kv_cache:
                settings.append(f"simulate_kv_cache={self.simulate_kv_cache!r}")
            if self.kv_cache_skip_layers:
                settings.append(f"kv_cache_skip_layers={self.kv_cache_skip_layers!r}")
            without_effect = ", ".join(settings)
            raise ValueError(
                f"{without_effect} with kv_cache_dtype='auto': without an FP8 KV cache it has no effect. Set "
                "kv_cache_dtype='fp8', or remove it."
            )
        if self.simulate_kv_cache is None:
            # FP8 weights make a larger mismatch than the cache, and hide the effect of a simulation. If the policy
            # calls the engine's kernels, FP8 weights make no mismatch
            has_effect = self.policy_calls_engine or not self.fp8_weights
            self.simulate_kv_cache = self.kv_cache_dtype == "fp8" and has_effect
        if self.kv_calibration is None:
            self.kv_calibration = "rollout" if self.setting_against_full_pass is None else "policy"


def _has_unnormalized_bias(name: str, outline: Outline) -> bool:
    """Return whether the parameter `name` is the bias of a k projection without a normalization after it."""
    attention, is_bias, _ = name.partition("k_proj.bias")
    if not is_bias or is_vision(name):
        return False
    norms = [f"{attention}{norm}.weight" for norm in K_NORMS]
    return not any(norm in outline.parameters for norm in norms)
