"""The part of docs/evidence.md that says what the age of rollouts costs, and what corrections win back."""

from testing.record import interval


PRECISIONS = {"bf16": "BF16", "fp8": "FP8 linears and KV cache"}
CORRECTIONS = {"none": "none", "combined": "TRL's one ratio", "decoupled": "decoupled, TIS at 2"}
COLUMNS = ("rollouts", "staleness", *CORRECTIONS.values(), "decoupled less none")
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"


def staleness(results: dict) -> str:
    """Return a row for each precision and staleness: held-out accuracies, and a difference seed by seed."""
    accuracies: dict[tuple[str, int, str], dict[int, float]] = {}
    for row in results["rows"]:
        cell = row["precision"], row["staleness"], row["correction"]
        accuracies.setdefault(cell, {})[row["seed"]] = row["held_out"]
    text = HEAD
    for precision, label in PRECISIONS.items():
        for age in sorted({age for kind, age, _ in accuracies if kind == precision}):
            by_correction = [accuracies[precision, age, correction] for correction in CORRECTIONS]
            none, _, decoupled = by_correction
            cells = [_interval(list(by_seed.values())) for by_seed in by_correction]
            cells.append(_interval([decoupled[seed] - none[seed] for seed in none]))
            text += f"| {label} | {age} | {' | '.join(cells)} |\n"
    return text


def _interval(values: list[float]) -> str:
    return "{mean:.3f} ({low:.3f} to {high:.3f})".format(**interval(values))
