"""The parts of docs/evidence.md that say where mismatch arises, and what it does to the gradient."""

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
SETS = {
    "first and last two": "the first and the last two",
    "worst 8": "the 8 that lower it most, each by itself",
    "worst 16": "the 16 that lower it most, each by itself",
}
SETS_HEAD = """| layers in BF16, of {layers} | their share of the linears' weights | KL, FP8 linears and KV cache |
|---|---|---|
"""
OF_PARTS = """
KL is exact over the vocabulary, on {close} sequences. Of the linears alone it is {linears:.4f}: with only q, k and v
in FP8 {qkv:.4f}, only the attention's output {o:.4f}, only gate and up {gate_up:.4f}, only down {down:.4f}. Any one
layer in BF16 leaves {least:.4f} (the last one) to {most:.4f}. Scales that are no powers of two leave {fp32:.4f}.

"""
ENGINE = """
vLLM scores the first 60 tokens of {close} of these sequences, too ({tokens} tokens with their prompts). With FP8
linears and KV cache its k3 against the trainer is {trainer:.3f}, and against the simulation with the same kinds of
scales still {simulation:.3f}. BF16: {bf16_trainer:.4f} and {bf16_simulation:.4f}. With the engine's own kernels (one
forward) it is {one_forward:g}.
"""
GRADIENTS = (  # policy, rollouts, and what the table calls them
    ("addition", "linears_kv", "addition, FP8 linears and KV cache"),
    ("addition", "linears_kv_quarter", "addition, the same, KV scales a quarter of calibrated ones"),
    ("smollm2", "linears_kv", "SmolLM2-135M, FP8 linears and KV cache"),
)
CORRECTIONS = {
    "none": "none",
    "token_tis": "token TIS at 2",
    "token_mis": "token MIS at 2",
    "sequence_tis": "sequence TIS at 2",
    "geometric_band": "geometric band",
    "icepop": "IcePop",
    "rejection": "rejection of sequences beyond 0.5 .. 2",
}
GRADIENT_HEAD = """| rollouts | correction | squared bias | cosine | noise | error | tokens dropped |
|---|---|---|---|---|---|---|
"""
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
    text += READ.format(**of_position, **of_entropy, **results["stale"]) + parts(results)
    return text + ENGINE.format(close=results["close"], **engine(results["engines"]))


def parts(results: dict) -> str:
    """Return what each kind of linear adds, and how little a few layers in BF16 take away."""
    precisions, kinds = results["precisions"], results["kinds"]
    without_one = {name: row["kl"] for name, row in results["layers"].items()}
    assert min(without_one, key=without_one.get) == f"all but {len(without_one) - 1}", "the text names the last layer"
    of_kinds = {kind: kinds[f"only {kind}"]["kl"] for kind in ("qkv", "o", "gate_up", "down")}
    text = OF_PARTS.format(
        close=results["close"],
        linears=precisions["linears"]["kl"],
        fp32=precisions["linears_fp32_scales"]["kl"],
        least=min(without_one.values()),
        most=max(without_one.values()),
        **of_kinds,
    )
    text += SETS_HEAD.format(layers=len(without_one))
    text += f"| none | 0 | {kl(precisions['linears_kv'])} |\n"
    for name, label in SETS.items():
        row = results["sets"][name]
        text += f"| {label} | {row['bf16_share']:.2f} | {kl(row)} |\n"
    return text


def engine(engines: dict) -> dict[str, float]:
    """Return k3 of vLLM's log-probs against the trainer's and the simulation's."""
    both, bf16 = engines["linears_kv"], engines["bf16"]
    found = {"tokens": both["tokens"], "trainer": both["trainer"]["k3"], "simulation": both["simulation"]["k3"]}
    found |= {"bf16_trainer": bf16["trainer"]["k3"], "bf16_simulation": bf16["simulation"]["k3"]}
    return found | {"one_forward": engines["one_forward"]["trainer"]["k3"]}


def gradient(results: dict) -> str:
    """Return a row for each policy, kind of rollouts and correction."""
    text = GRADIENT_HEAD
    for policy, dose, label in GRADIENTS:
        found = results[policy]["doses"][dose]
        label = f"{label}, k3 {found['mismatch/k3_kl']:.2g}"
        for correction, name in CORRECTIONS.items():
            arm = found["corrections"][correction]
            bias, error = (f"{interval(arm[key])}" for key in ("bias_squared", "error"))
            cosine, noise = (f"{arm[key]['value']:.2f}" for key in ("cosine", "noise"))
            text += f"| {label} | {name} | {bias} | {cosine} | {noise} | {error} | {arm['dropped']:.2g} |\n"
    return text


def interval(found: dict) -> str:
    return f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def kl(row: dict) -> str:
    found = row["kl_interval"]
    return f"{found['value']:.4f} (95 % CI {found['low']:.4f} to {found['high']:.4f})"


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
