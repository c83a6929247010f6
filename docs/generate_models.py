"""Write docs/models.md from the result file of `make models`, or with --check compare it with that.

python -m docs.generate_models [--check]
"""

import json
import sys
from pathlib import Path


PAGE = Path(__file__).with_name("models.md")
RESULTS = PAGE.parents[1] / "benchmarks" / "results" / "models_cpu.json"
HEAD = """# Which models

{families} families of models went through everything that a run does, each as a tiny policy with random weights and a real vLLM engine on CPU
({hardware}; commit {commit}). No GPU has run any of them. The table is made by `make models` from [its results](../benchmarks/results/models_cpu.json);
[what fits a GPU](capacity.md) is another page.

| family | model type | FP8 parameters | FP8 KV cache | mismatch of FP8 rollouts | `fp8_forward="one_forward"` |
|---|---|---|---|---|---|
"""  # noqa: E501
TAIL = """
- **Tested** of each row ([testing/matrix](../testing/matrix/row.py)): three steps of GRPO; after the first sync, and after one behind the last step, log-probs
  equal to those of a fresh engine that vLLM's own loader fills from disk, bit for bit; the export of `save_fp8_model`, which that engine and
  transformers read, tensor by tensor.
- **FP8 parameters**: share of a published model, or of the tiny one, in an engine on a GPU. On CPU experts stay in BF16, because vLLM has no kernel for them.
- **Mismatch**: the largest of three means of |trainer's log-prob - rollout's log-prob| over the tokens of a step. Policies are tiny and random, so that
  it compares rows and says nothing of trained models. Latent attention (DeepSeek, GLM 4.7 Flash) on a GPU reads prompts [otherwise](kv_cache.md).
- **`fp8_forward="one_forward"`**: *exact* if the same mismatch is below {exact:g}, the rounding of two log-softmaxes; otherwise why not.

What is refused, and why, is in [Troubleshooting](troubleshooting.md#models). A model type that is nowhere on these pages is compared with vLLM's class name by
name before anything is trained, and works or is refused by then; one that vLLM does not know gets one line, and what to do instead.
"""  # noqa: E501


def page() -> str:
    record = json.loads(RESULTS.read_text())
    rows = record["results"]
    text = HEAD.format(families=len(rows), hardware=record["hardware"], commit=record["commit"])
    for row in rows.values():
        share = f"{row['fp8_share']:.1%}{'' if row['share_of'] else ' (tiny)'}"
        cells = [
            row["title"],
            f"`{row['model_type']}`",
            share,
            row["kv"],
            f"{row['mismatch']:.2g}",
            full(**row["full"]),
        ]
        text += f"| {' | '.join(cells)} |\n"
    return text + TAIL.format(exact=rows["qwen3"]["full"]["bound"])


def full(refused: str = "", mismatch: float = 0.0, exact: bool = False, bound: float = 0.0) -> str:
    """What came of a full FP8 forward."""
    if not refused:
        return f"exact ({mismatch:.1g})" if exact else f"{mismatch:.2g}"
    if "which operations" in refused:
        return "no: its operations are not known"
    return f"no: {refused.partition(': ')[2].partition('. Set ')[0].partition(',')[0]}"


def main() -> int:
    if "--check" not in sys.argv:
        PAGE.write_text(page())
        return 0
    if PAGE.exists() and PAGE.read_text() == page():
        return 0
    sys.stderr.write("docs/models.md differs from the results of `make models`: run `make docs`.\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
