"""The part of docs/evidence.md that says where mismatch arises."""

PRECISIONS = {
    "bf16": "BF16",
    "kv": "FP8 KV cache",
    "kv_scale_1": "FP8 KV cache, all scales 1",
    "kv_quarter": "FP8 KV cache, scales a quarter of calibrated ones",
    "linears": "FP8 linears",
    "linears_fp32_scales": "FP8 linears, scales that are no powers of two",
    "linears_tensor": "FP8 linears, one scale per tensor",
    "linears_kv": "FP8 linears and KV cache",
}
LENGTHS = ("8", "32", "256")
COLUMNS = ("the engine computes in", "sequences", "k3", "token weights", *(f"over {n} tokens" for n in LENGTHS))
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
READ = """
With FP8 linears and KV cache k3 is {first:.3f} in the first {width} tokens and {low:.3f} to {high:.3f} after them: it
does not grow with position. Where the policy is surest (an eighth of the tokens, entropy {sure_entropy:.1f} nats) it
is {sure:.3f}, where it is least sure {unsure:.3f}. An optimizer step with learning rate {learning_rate:g} moves
{moved} of the {scales} KV scales to another power of two.
"""


def anatomy(results: dict) -> str:
    """Return a row for each precision of the engine, and what position, entropy and a step change."""
    text = HEAD
    for name, label in PRECISIONS.items():
        if name in results["precisions"]:
            text += f"| {' | '.join(cells(label, results['precisions'][name]))} |\n"
    both = results["precisions"]["linears_kv"]
    first, *later = both["by_position"]
    width = results["tokens"] // len(both["by_position"])
    surest, *_, least_sure = both["by_entropy"]
    of_position = {"first": first, "width": width, "low": min(later), "high": max(later)}
    of_entropy = {"sure_entropy": surest["entropy"], "sure": surest["k3"], "unsure": least_sure["k3"]}
    return text + READ.format(**of_position, **of_entropy, **results["stale"])


def cells(label: str, found: dict) -> list[str]:
    weights = [found["sequence_weight"][length]["measured"] for length in LENGTHS]
    k3 = found["k3"]
    return [
        label,
        str(found["sequences"]),
        f"{k3['value']:.4f} (95 % CI {k3['low']:.4f} to {k3['high']:.4f})",
        f"{found['token_weight']:.3f}",
        *(f"{each['value']:.2g}" if each["value"] >= 1e-4 else "below 0.0001" for each in weights),
    ]
