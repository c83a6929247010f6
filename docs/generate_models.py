"""Write docs/models.md from the result file of `make models`, or with --check compare it with that.

python -m docs.generate_models [--check]
"""

import json
import sys
from pathlib import Path

from trl_fp8.upstream.versions import VERSIONS


PAGE = Path(__file__).with_name("models.md")
RESULTS = PAGE.parents[1] / "benchmarks" / "results" / "models_cpu.json"
HEAD = """# Models

{families} families of models go through a whole run, each as a tiny policy with random weights and a real vLLM engine on CPU ({hardware};
commit {commit}). No GPU has run any of them. `make models` makes the table from [its results](../benchmarks/results/models_cpu.json).
[Performance](performance.md#what-fits) says what fits on a GPU.

| family | model type | FP8 parameters | FP8 KV cache | mismatch of FP8 rollouts | `fp8_forward="one_forward"` |
|---|---|---|---|---|---|
"""  # noqa: E501
TAIL = """
- **Tests of each row** ([testing/matrix](../testing/matrix/row.py)): three steps of GRPO. After the first sync, and after one behind the last step, the
  engine's log-probs equal those of a fresh engine that vLLM fills from disk, bit for bit. That engine and transformers read the export of
  `save_fp8_model`, and its tensors are compared.
- **FP8 parameters** is the share of a published model, or of the tiny one, in an engine on a GPU. On CPU experts stay in BF16.
- **[Mismatch](rollout_correction.md#two-measures)** is the largest of three steps. Tiny random policies compare rows and say nothing about trained models. On a GPU, latent attention (DeepSeek, GLM 4.7 Flash) reads prompts [otherwise](kv_cache.md#latent-attention-mla).
- **`fp8_forward="one_forward"`** is *exact* if the same mismatch is below {exact:g}, the rounding of two log-softmaxes. Otherwise the cell has the reason.
{versions}

A model type that is not in the table is compared with vLLM's class name by name before training, and works or is refused then. A type that vLLM does not
know is an error of one line with an alternative. [Troubleshooting](troubleshooting.md#models) lists what is refused, and why. A new row
needs [two lines](../CONTRIBUTING.md#recipes).

## Images

Vision-language models train as [TRL trains them](https://huggingface.co/docs/trl/grpo_trainer): a dataset with a column `image` or `images`,
conversational prompts, and the model's processor.

```python
from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer

trainer = FP8GRPOTrainer(
    model="Qwen/Qwen2.5-VL-7B-Instruct",
    reward_funcs=accuracy_reward,
    args=FP8GRPOConfig("out"),
    train_dataset=dataset,  # {{"prompt": [{{"role": "user", "content": "How many?"}}], "image": <PIL image>}}
)
trainer.train()
```

| part | in the engine | sent at each sync |
|---|---|---|
| projections of the language model | FP8 | yes |
| its KV cache | FP8 | scales |
| vision tower and projector | BF16 | yes, trained or frozen |
| embeddings, norms, output head | BF16 | yes |

- **Prompts.** TRL 1.16 gives vLLM prompts whose image tokens are expanded already, and vLLM 0.31 expands them again
  ([TRL #6294](https://github.com/huggingface/trl/issues/6294)). Here such prompts stay as they are, and after each generation the engine's prompts are
  compared with the trainer's. A difference is an error.
- **Caches of images.** vLLM keeps a tower's output for each image. A sync changes the tower and clears these.
- **Positions.** Qwen's models rotate q and k by three positions per image token; the trainer uses transformers' own, which equal the engine's. Gemma 3
  lets the tokens of an image see each other; on a GPU Triton's attention is pinned, because FlashAttention 3 cannot do that.
- **Scales.** KV scales come from passes that see the images. Before the first rollouts only token ids run, so the scales have the wider margin of prompts,
  and the first pass counts what they clip.
- **Normalization.** The processor normalizes images for both engine and trainer.
- **Not supported.** `fp8_forward="one_forward"` is refused, because the tower computes in the trainer's precision. Videos were not run.
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
    return text + TAIL.format(exact=rows["qwen3"]["full"]["bound"], versions=versions(rows))


def versions(rows: dict[str, dict]) -> str:
    """Return what differs for families of the table with a newer vLLM than the oldest, which made it."""
    lines = []
    for series, vllm in VERSIONS.items():
        computed = [f"`{kind}`" for kind in sorted(vllm.by_transformers - set(vllm.refused)) if kind in rows]
        if computed:
            lines.append(f"- **vLLM {series}** has no class of its own for {', '.join(computed)}:")
            lines.append("  it computes them by transformers' code. They went through the same run there, and")
            lines.append('  `fp8_forward="one_forward"` is refused.')
        lines += [f"  `{kind}` is refused: {reason}." for kind, reason in vllm.refused.items()]
    return "\n".join(lines)


def full(refused: str = "", mismatch: float = 0.0, exact: bool = False, bound: float = 0.0) -> str:
    """Return the cell of a run with one forward."""
    if not refused:
        return f"exact ({mismatch:.1g})" if exact else f"{mismatch:.2g}"
    if ": only the layers of " in refused:
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
