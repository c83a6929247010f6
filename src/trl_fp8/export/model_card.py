"""The model card's section on FP8: how the run generated, its mismatch, and how to load an export."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import yaml

from trl_fp8.quantization.formats import FormatSpec


# metric -> its name in the card
SHOWN = {
    "mismatch/logp_difference_mean": "mean absolute log-prob difference of engine and trainer, nats",
    "mismatch/logp_difference_max": "largest absolute log-prob difference, nats",
    "mismatch/k3_kl": "KL(rollout, trainer), k3 estimate",
    "mismatch/token_mult_prob_error": "token multiplicative probability error (1 is perfect)",
    "correction/effective_sample_size": "effective sample size of the token ratio",
    "correction/fraction_masked_tokens": "tokens that the correction masked",
    "fp8/kv_saturation_fraction": "KV cache elements beyond their scale",
    "fp8/sync_bytes": "bytes that a sync wrote",
}
LAST = 10  # the card has the mean of a metric's last logged values, at most this many
_FILES = "Files can be compared with `checksums.json`: `trl-fp8 verify FOLDER`.\n"


def fp8_section(facts: Mapping[str, Any], log_history: Sequence[Mapping[str, Any]], audit_failures: int) -> str:
    """Return the section, in Markdown, on a policy that was trained with FP8 rollouts.

    `facts` are the `run_facts` (run/facts.py) of the run. `log_history` is that of TRL's trainer.
    """
    kernels = ", ".join(f"{name} ({count})" for name, count in facts["kernels"].items())
    correction = facts.get("correction") or {}
    settings = [f"{name}={value}" for name, value in correction.items() if value]
    measured = {}
    for metric, label in SHOWN.items():
        values = [row[metric] for row in log_history if metric in row][-LAST:]
        if values:
            measured[f"{label}, last {len(values)} logged steps"] = f"{fmean(values):.3g}"
    rows = {"adapters": facts["adapters"]} if "adapters" in facts else {}
    rows |= {
        "FP8 weights of the engine": _weights(facts),
        "KV cache of the engine": _kv_cache(facts),
        "engine kernels": kernels or "high precision",
        "trainer": facts["trainer"],
        "correction of the mismatch": ", ".join(settings) or "none",
        **measured,
        "syncs that failed their audit": audit_failures,
        "hardware": f"{facts['processes']} x {facts['hardware']}",
        "versions": ", ".join(f"{name} {number}" for name, number in facts["versions"].items()),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        "## FP8 rollouts\n\nCompletions were generated in low precision by a vLLM engine that got "
        f"{facts['each_sync_sends']} at every step (trl-fp8).\n\n| | |\n|---|---|\n{table}\n\n{_plan(facts['plan'])}"
    )


def export_card(
    card: str,
    plan: str,
    spec: FormatSpec,
    has_kv_scales: bool,
    base_model: str | None = None,
    merge: str = "",
    latent: bool = False,
) -> str:
    """Return the policy's `card` with a section on its FP8 checkpoint.

    If `card` is empty, the model was not trained here: the result then begins with a header, and has the table `plan`.
    `merge` has sentences about merged adapters. `latent` says whether the model has latent attention (MLA).
    """
    options = ', kv_cache_dtype="fp8"' if has_kv_scales and not latent else ""
    kv_scales = "KV cache scales are included" if has_kv_scales else "there are no KV cache scales"
    if has_kv_scales and latent:
        kv_scales += ", but vLLM loads none for latent attention (MLA), so that its cache is best left in BF16"
    section = (
        f"## FP8 checkpoint\n\n{merge}Weights are {spec.description} with `weight{spec.scale_suffix}`; {kv_scales}. "
        f'{spec.readers}\n\n```python\nfrom vllm import LLM\n\nllm = LLM("THIS_REPOSITORY"{options})\n```\n\n'
        f"{_FILES}"
    )
    if not card:
        section += f"\n{_plan(plan)}"
        header = {"library_name": "transformers", "tags": ["fp8"]}
        if base_model:
            header["base_model"] = base_model
        card = f"---\n{yaml.safe_dump(header)}---\n\n# {base_model or 'Model'} in FP8\n"
    return f"{card.rstrip()}\n\n{section}"


def merged_card(card: str, merge: str) -> str:
    """Return the policy's card with a section on its BF16 checkpoint."""
    return f"{card.rstrip()}\n\n## Merged checkpoint\n\n{merge}Weights are BF16.\n\n{_FILES}"


def _plan(table: str) -> str:
    """Return a plan's table as a section that unfolds. Leave out its title, which may contain a local path."""
    rows = table.partition("\n")[2].strip("\n")
    return f"<details><summary>What is FP8</summary>\n\n```\n{rows}\n```\n\n</details>\n"


def _weights(facts: Mapping[str, Any]) -> str:
    if not facts["scale_format"]:
        return "none"
    experts = f" and {facts['fp8_experts']} layers of experts" if facts["fp8_experts"] else ""
    return (
        f"{facts['fp8_linears']} linear layers{experts}, {facts['fp8_share']:.1%} of parameters: "
        f"{facts['weight_format']}, {facts['scale_format']} scales, written {facts['fp8_weights_written']}"
    )


def _kv_cache(facts: Mapping[str, Any]) -> str:
    if facts["kv_cache_dtype"] == "auto":
        return "high precision"
    skipped = facts["kv_cache_skip_layers"]
    in_bf16 = f"; layers {skipped} in high precision" if skipped else ""
    return f"e4m3, scales of q, k, v calibrated at every sync{in_bf16}"
