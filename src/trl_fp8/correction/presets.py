"""Published corrections by name, with where each comes from.

A preset says what its source does, including the choice of denominator; it is not a recommendation. Bands around 1
(`geometric_ratio` 0.999 .. 1.001) were published for BF16 rollouts and reject most FP8 sequences:
`docs/rollout_correction.md` has the arithmetic, and `fp8_geometric_token_tis` is the version for FP8.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from .importance import RolloutCorrection
from .rejection import Rejection


@dataclass(frozen=True)
class Preset:
    """A correction and its source."""

    correction: RolloutCorrection
    source: str


_VETO = Rejection("token_veto", minimum=1e-4)
_VERL_BAND = Rejection("geometric_ratio", 0.999, 1.001)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "monitor": Preset(
            RolloutCorrection(monitor_only=True), "this package: metrics of the default correction, nothing applied"
        ),
        "fp8_token_tis": Preset(
            RolloutCorrection(),
            "FP8-RL (arXiv 2601.18150) and verl's FP8 recipe: token-level truncation, C = 2; the default here",
        ),
        "fp8_geometric_token_tis": Preset(
            RolloutCorrection(reject=(Rejection("geometric_ratio", 0.98, 1.02, centre="measured"), _VETO)),
            "this package: token truncation behind a band centred on exp(-KL) and wide enough for FP8, with veto",
        ),
        "trl_sequence_mask": Preset(
            RolloutCorrection(level="sequence", bound="mask", bound_max=3.0),
            "TRL 1.16's default (vllm_importance_sampling_mode='sequence_mask', clip_max=3.0)",
        ),
        "nemo_tis": Preset(
            RolloutCorrection(bound_min=0.0),
            "NeMo-RL truncated_importance_sampling_type='tis', ratio 2 as in its Qwen3.5 FP8 recipes",
        ),
        "nemo_icepop": Preset(
            RolloutCorrection(bound="mask", bound_min=0.5, bound_max=5.0),
            "NeMo-RL 'icepop' and the IcePop paper: weight 0 outside [0.5, 5]",
        ),
        "intellect3_icepop": Preset(
            RolloutCorrection(bound="mask", bound_min=0.2, bound_max=5.0), "INTELLECT-3: IcePop with [0.2, 5]"
        ),
        "nemo_seq_mask_tis": Preset(
            # weights are the raw token ratios: a mask without bounds masks nothing
            RolloutCorrection(bound="mask", bound_max=None, reject=(Rejection("geometric_ratio", 0.999, 1.002),)),
            "NeMo-RL 'seq-mask-tis': geometric ratio in [0.999, 1.002], token ratios not truncated",
        ),
        "verl_sequence_is": Preset(
            RolloutCorrection(level="sequence"), "verl decoupled_seq_is: sequence-level truncation, C = 2"
        ),
        "verl_sequence_is_rs": Preset(
            RolloutCorrection(level="sequence", reject=(Rejection("sequence_ratio", 0.5, 2.0),), denominator="shrink"),
            "verl decoupled_seq_is_rs: sequence truncation at 2, sequences outside [0.5, 2] rejected",
        ),
        "verl_geometric_token_tis": Preset(
            RolloutCorrection(reject=(_VERL_BAND,), denominator="shrink"),
            "verl decoupled_geo_rs_token_tis: geometric ratio in [0.999, 1.001], token truncation at 2",
        ),
        "verl_k3_token_tis": Preset(
            RolloutCorrection(reject=(Rejection("sequence_mean_k3", maximum=0.01),), denominator="shrink"),
            "verl decoupled_k3_rs_token_tis: mean k3 at most 0.01, token truncation at 2",
        ),
        "verl_bypass_geometric": Preset(
            RolloutCorrection(level=None, bypass=True, reject=(_VERL_BAND,), denominator="shrink"),
            "verl bypass_ppo_clip_geo_rs: rollout log-probs as old log-probs, geometric ratio in [0.999, 1.001]",
        ),
        "slime_mis": Preset(
            RolloutCorrection(bound_min=0.0, reject=(Rejection("token_ratio", 0.5, 2.0), _VETO), batch_normalize=True),
            "slime examples/train_infer_mismatch_helper: token truncation at 2, tokens outside [0.5, 2] rejected, "
            "veto 1e-4, batch-normalized",
        ),
        "areal_geometric_token_mis": Preset(
            RolloutCorrection(bound="mask", bound_max=5.0, reject=(Rejection("geometric_ratio", maximum=5.0),)),
            "AReaL #1084 / #1218: geometric rejection, then token masking; AReaL's default upper bound 5 for both",
        ),
    }
)


def correction_from(value: str | Mapping[str, object]) -> RolloutCorrection:
    """A correction from what a user writes: a preset's name, or the fields of `RolloutCorrection` as a mapping.

    In a mapping, `"reject"` lists rules in the form of `Rejection.parse`, e.g. `"geometric_ratio:0.98:1.02:measured"`.

    Raises:
        ValueError: Unknown preset or field, or fields that cannot be applied together.
    """
    if isinstance(value, str):
        if value not in PRESETS:
            raise ValueError(f"{value!r} is not a preset; the presets are {', '.join(PRESETS)}.")
        return PRESETS[value].correction
    known = {field.name for field in fields(RolloutCorrection)}
    if unknown := sorted(set(value) - known):
        raise ValueError(f"{unknown} are not fields of a correction; the fields are {', '.join(sorted(known))}.")
    rules = tuple(Rejection.parse(rule) if isinstance(rule, str) else rule for rule in value.get("reject", ()))
    return RolloutCorrection(**{**value, "reject": rules})
