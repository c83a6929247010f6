"""Flags of the rollout correction. Flags that TRL also has get other defaults if anything is FP8."""

from dataclasses import dataclass
from typing import ClassVar

from trl_fp8.run.feature import FlagGroup, flag

from .importance import RolloutCorrection
from .presets import correction_from


TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
# Sampling setting that changes log-probs -> the values with which it does not change them
NEUTRAL_SAMPLING = {
    "top_p": (1.0,),
    "top_k": (0, -1, None),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
    "vllm_structured_outputs_regex": (None,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "min_tokens": (0,),
    "watermarking": (None, False),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None,),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
    "trace_decode_token_ids": (None,),
}
# Arguments of vLLM's engine that change log-probs, unless they are None or empty
CHANGING_ENGINE_KWARGS = ("speculative_config", "spec_method", "spec_model", "logits_processors", "watermark_config")
LOWEST_TEMPERATURE = 0.01  # vLLM 0.31 raises lower temperatures to this (_MAX_TEMP), and samples greedily at 0


@dataclass
class CorrectionFlags(FlagGroup):
    """Flags of the correction of the mismatch between rollouts and policy."""

    AS_JSON = ("rollout_correction",)

    rollout_correction: dict | str | None = flag(
        None,
        "Correction of the rollout's mismatch beyond TRL's four modes: the name of a preset (e.g. "
        "'fp8_geometric_token_tis', 'nemo_icepop', 'monitor') or the fields of `RolloutCorrection` as JSON, e.g. "
        '\'{"level": "token", "bound_max": 2.0, "reject": ["token_veto:1e-4:"]}\'. Not set: what '
        "`vllm_importance_sampling_mode` says. See docs/rollout_correction.md.",
    )
    vllm_importance_sampling_mode: str | None = flag(
        None,
        "How the mismatch between rollout and trainer log-probs is corrected: 'token_truncate', "
        "'token_mask', 'sequence_truncate' or 'sequence_mask' (TRL's four modes). Not set: 'token_truncate' "
        "(RLOO and GMPO: 'sequence_truncate') if anything is FP8, else 'sequence_mask', as in TRL. This flag and "
        "TRL's bounds are refused beside `rollout_correction`.",
    )
    vllm_importance_sampling_clip_max: float | str | None = flag(
        "auto",
        "Upper bound of the importance ratio, or None (on a command line: none) for no upper bound. 'auto': 2.0 if "
        "anything is FP8, else 3.0, as in TRL.",
    )

    fp8_sampling_mode: ClassVar[str] = "token_truncate"  # default mode if anything is FP8

    @property
    def replaces_correction(self) -> bool:
        return self.rollout_correction is not None

    def resolve(self) -> None:
        if self.rollout_correction is not None:
            self._require_one_choice()
        replaced = self.any_fp8 or self.rollout_correction is not None  # whether this package corrects in TRL's place
        # Set TRL's mode even if a `rollout_correction` replaces TRL's correction: TRL checks its mode in any case, and
        # with VESPO accepts only token modes
        if self.vllm_importance_sampling_mode is None:
            if replaced:
                self.vllm_importance_sampling_mode = self.fp8_sampling_mode
            else:
                self.vllm_importance_sampling_mode = self.trl_default("vllm_importance_sampling_mode")
        clip_max = self.vllm_importance_sampling_clip_max
        if clip_max == "auto":
            clip_max = 2.0 if replaced else self.trl_default("vllm_importance_sampling_clip_max")
        elif isinstance(clip_max, str):  # from a command line or YAML: a number or none
            try:
                clip_max = None if clip_max.strip().lower() in ("none", "null") else float(clip_max)
            except ValueError:
                raise ValueError(
                    f"vllm_importance_sampling_clip_max={clip_max!r} is not a bound. Use a number of at least 1, None "
                    "for no bound, or 'auto'."
                ) from None
        self.vllm_importance_sampling_clip_max = clip_max

    def _require_one_choice(self) -> None:
        """Refuse TRL's modes and bounds beside a `rollout_correction`, which would ignore them."""
        unset = {"mode": None, "clip_max": "auto", "clip_min": None, "cap": None}
        mode, clip_max = self.vllm_importance_sampling_mode, self.vllm_importance_sampling_clip_max
        if mode == self.fp8_sampling_mode and clip_max == 2.0:
            # These are the values that `resolve` sets, so this config was made from the fields of another config
            del unset["mode"], unset["clip_max"]
        also_set = []
        for suffix, default in unset.items():
            name = f"vllm_importance_sampling_{suffix}"
            if getattr(self, name) != default:
                also_set.append(f"{name}={getattr(self, name)!r}")
        if also_set:
            raise ValueError(
                f"rollout_correction={self.rollout_correction!r} and {', '.join(also_set)} both choose the "
                "correction. Remove one of them. The bounds of a rollout_correction are among its own fields: "
                '{"bound_min": ..., "bound_max": ...}.'
            )

    @property
    def correction(self) -> RolloutCorrection | None:
        """Return the correction that this package computes, or None.

        Without FP8 and without `rollout_correction` this package computes none, and TRL corrects by itself.
        """
        if not (self.use_vllm and self.vllm_importance_sampling_correction):
            return None
        if self.rollout_correction is not None:
            return correction_from(self.rollout_correction)
        if not self.any_fp8:
            return None
        bounds = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        return RolloutCorrection.from_trl_mode(self.vllm_importance_sampling_mode, *bounds)

    def check(self) -> None:
        if self.any_fp8 and self.vllm_importance_sampling_mode not in TRL_MODES:
            raise ValueError(
                f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r} is not a correction mode. Use "
                f"one of {list(TRL_MODES)}."
            )
        if self.any_fp8 or self.rollout_correction is not None:
            self._check_sampling()
            self._check_correction()

    def _check_sampling(self) -> None:
        """Refuse sampling that changes vLLM's log-probs but not the trainer's, because a correction compares both."""
        if not self.vllm_importance_sampling_correction:
            return
        fields = {name: getattr(self, name) for name in NEUTRAL_SAMPLING if hasattr(self, name)}
        values = fields | (self.generation_kwargs or {})
        changing = []
        for name, neutral in NEUTRAL_SAMPLING.items():
            if name in values and name not in self.followed_sampling and values[name] not in (*neutral, {}, []):
                changing.append(f"{name}={values[name]!r}")
        engine_kwargs = self.vllm_engine_kwargs or {}
        for name in CHANGING_ENGINE_KWARGS:
            if engine_kwargs.get(name):
                changing.append(f"vllm_engine_kwargs={{{name!r}: {engine_kwargs[name]!r}}}")
        if changing:
            raise ValueError(
                f"{', '.join(changing)} with vllm_importance_sampling_correction=True: then vLLM's log-probs are of "
                "another distribution than the trainer's, so every importance ratio would be off. Remove these "
                "settings (top_p, top_k and min_p are allowed), or set vllm_importance_sampling_correction=False and "
                "accept uncorrected FP8 rollouts."
            )
        if self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature!r} with vllm_importance_sampling_correction=True: vLLM raises a lower "
                f"temperature to {LOWEST_TEMPERATURE}, and samples greedily at 0, but the trainer divides its logits "
                "by the value that is set. So every importance ratio would be off. Set "
                f"temperature={LOWEST_TEMPERATURE} or more, or vllm_importance_sampling_correction=False."
            )

    def _check_correction(self) -> None:
        described = f"rollout_correction={self.rollout_correction!r}"
        if self.rollout_correction is not None and not (self.use_vllm and self.vllm_importance_sampling_correction):
            raise ValueError(
                f"{described} with use_vllm={self.use_vllm}, vllm_importance_sampling_correction="
                f"{self.vllm_importance_sampling_correction}: there is nothing to correct. Set both to True, or "
                "remove rollout_correction (its preset 'monitor' only measures)."
            )
        try:
            correction = self.correction
        except ValueError as error:
            if self.rollout_correction is None:
                described = "vllm_importance_sampling_mode and clip bounds"
            raise ValueError(f"{described}: {error}") from None
        if correction is not None and self.loss_type == "vespo" and not correction.fits_vespo:
            raise ValueError(
                f"loss_type='vespo' with a correction at level={correction.level!r}: VESPO sums log-weights over the "
                "tokens, which would count a sequence's ratio once per token. Use level 'token' or 'geometric'."
            )
