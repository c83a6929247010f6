"""Corrections by name, each with its source.

A preset does what its source does, including the choice of denominator; it is not a recommendation. Narrow bands
around 1 (`geometric_ratio` 0.999 .. 1.001) were published for BF16 rollouts, and reject most FP8 sequences.
`fp8_geometric_token_tis` has a band for FP8. docs/rollout_correction.md has the arithmetic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import NamedTuple

from .importance import RolloutCorrection
from .rejection import Rejection


class Preset(NamedTuple):
    """A correction and its source."""

    correction: RolloutCorrection
    source: str


_VETO = Rejection("token_veto", minimum=1e-4)
_FP8_BAND = Rejection("geometric_ratio", 0.98, 1.02, centre="measured")  # around exp(-KL), wide enough for FP8
_VERL_BAND = Rejection("geometric_ratio", 0.999, 1.001)
_VERL_SEQUENCES = Rejection("sequence_ratio", 0.5, 2.0)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "monitor": Preset(RolloutCorrection(monitor_only=True), "this package: fp8_token_tis measured, not applied"),
        "fp8_token_tis": Preset(RolloutCorrection(), "FP8-RL (arXiv 2601.18150) and verl's FP8 recipe; the default"),
        "fp8_geometric_token_tis": Preset(RolloutCorrection(reject=(_FP8_BAND, _VETO)), "this package"),
        "trl_sequence_mask": Preset(RolloutCorrection("sequence", "mask", bound_max=3.0), "TRL 1.16's default"),
        "nemo_icepop": Preset(RolloutCorrection("token", "mask", 0.5, 5.0), "NeMo-RL 'icepop' and the IcePop paper"),
        "verl_sequence_is_rs": Preset(
            RolloutCorrection("sequence", reject=(_VERL_SEQUENCES,), denominator="shrink"), "verl decoupled_seq_is_rs"
        ),
        # verl rejects inside the loss here, after it has counted the tokens that the loss is divided by
        "verl_bypass_geometric": Preset(
            RolloutCorrection(level=None, bypass=True, reject=(_VERL_BAND,)), "verl bypass_ppo_clip_geo_rs"
        ),
        "slime_mis": Preset(
            RolloutCorrection(bound_min=0.0, reject=(Rejection("token_ratio", 0.5, 2.0), _VETO), batch_normalize=True),
            "slime examples/train_infer_mismatch_helper",
        ),
    }
)


def correction_from(value: str | Mapping[str, object]) -> RolloutCorrection:
    """Return the correction for the name of a preset or for a mapping of fields of `RolloutCorrection`.

    The field `"reject"` lists rules in the syntax of `Rejection.parse`, e.g. `"geometric_ratio:0.98:1.02:measured"`.

    Raises:
        ValueError: The preset or a field is unknown, or the fields contradict each other.
    """
    if isinstance(value, str):
        if value not in PRESETS:
            raise ValueError(f"{value!r} is not a preset; the presets are {', '.join(PRESETS)}.")
        return PRESETS[value].correction
    known = {field.name for field in fields(RolloutCorrection)}
    unknown = sorted(set(value) - known)
    if unknown:
        raise ValueError(f"{unknown} are not fields of a correction; the fields are {', '.join(sorted(known))}.")
    rules = value.get("reject", ())
    if not isinstance(rules, Sequence) or isinstance(rules, str):
        raise ValueError(f"reject={rules!r} is not a list of rules: write reject: ['token_veto:1e-4:'].")
    rules = tuple(Rejection.parse(rule) if isinstance(rule, str) else rule for rule in rules)
    return RolloutCorrection(**{**value, "reject": rules})
