"""KV cache calibration as a share of a training step, for both sources of scales.

    python -m benchmarks.bench_calibration [--size qwen3_8b] [--sequences 32] [--length 2048]

"step" is the old-log-prob pass and the training passes (forward and backward, with gradient
checkpointing) over the same sequences, on TRL's fused output head. Generation and the optimizer are left
out, so that the shares are upper bounds.

rollout   kv_calibration="rollout": what observing q, k, v adds to the old-log-prob pass, and the scales made of it
policy    kv_calibration="policy": a forward over `--calibration-tokens` tokens of the same sequences, and the scales

Plain and observed passes alternate; shares are of one repeat's own step. The policy is in BF16, without an engine.
"""

import tempfile
from collections.abc import Callable

import torch
from accelerate import PartialState
from trl.trainer.utils import add_fused_lm_head

from testing import record
from trl_fp8.features.kv_cache.calibration import Calibration, KVState, next_scales
from trl_fp8.policy.hook import AttentionHook
from trl_fp8.quantization.codec.kv_scales import KVScales

from . import harness, shapes


class Step:
    """The passes of a training step over `ids` `[B, T]`, in micro-batches of `micro_batch` sequences."""

    def __init__(self, model: torch.nn.Module, ids: torch.Tensor, micro_batch: int):
        self.model, self.batches = model, ids.split(micro_batch)

    def _log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(shapes.DEVICE, dtype=torch.bfloat16, enabled=shapes.DEVICE == "cuda"):
            mask = torch.ones_like(ids)
            return self.model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True).log_probs

    @torch.no_grad()
    def old_log_probs(self) -> None:
        self.model.eval()
        for ids in self.batches:
            self._log_probs(ids)

    def train(self) -> None:
        self.model.train()
        for ids in self.batches:
            (-self._log_probs(ids).mean() / len(self.batches)).backward()
        self.model.zero_grad(set_to_none=False)


def measure(step: Step, hook: AttentionHook, ids: torch.Tensor, tokens: int) -> dict[str, float]:
    """Seconds of one repeat: the passes, and what each source of scales adds."""
    rows = ids.tolist()
    options = {"margin": 1.05, "max_tokens": tokens, "fused_lm_head": True}
    sources = {mode: Calibration(hook, mode=mode, **options) for mode in ("rollout", "policy")}
    scales = KVScales(torch.full((hook.layers, 3), 2.0**-5))
    states = {name: KVState(margin=1.05).after_rollouts(how, rows, scales, step=0) for name, how in sources.items()}

    def observed() -> None:
        with states["rollout"].watching(hook):
            step.old_log_probs()

    def made(name: str) -> Callable[[], object]:
        return lambda: next_scales(states[name], sources[name], step.model)

    found = {"old_log_probs": shapes.seconds_of(step.old_log_probs)}
    found["observed_old_log_probs"] = shapes.seconds_of(observed)
    found["old_log_probs_again"] = shapes.seconds_of(step.old_log_probs)
    found["rollout_scales"] = shapes.seconds_of(made("rollout"))
    found["policy_scales"] = shapes.seconds_of(made("policy"))
    found["training"] = shapes.seconds_of(step.train)
    return found


def summarize(rows: list[dict[str, float]]) -> dict:
    """Spreads over the repeats, of seconds and of shares of the step."""
    plain = [(row["old_log_probs"] + row["old_log_probs_again"]) / 2 for row in rows]
    steps = [pass_ + row["training"] for pass_, row in zip(plain, rows, strict=True)]
    added = {
        "rollout": [
            row["observed_old_log_probs"] - pass_ + row["rollout_scales"]
            for pass_, row in zip(plain, rows, strict=True)
        ],
        "policy": [row["policy_scales"] for row in rows],
    }
    return {
        "seconds": {name: record.spread([row[name] for row in rows]) for name in rows[0]},
        "step_seconds": record.spread(steps),
        "noise_share": record.spread(
            [abs(row["old_log_probs_again"] - row["old_log_probs"]) / s for row, s in zip(rows, steps, strict=True)]
        ),
        "added_seconds": {name: record.spread(seconds) for name, seconds in added.items()},
        "share_of_step": {name: harness.ratios(seconds, steps) for name, seconds in added.items()},
    }


def main() -> None:
    parser = harness.parser(__doc__, budget=300, engine=False)
    on_gpu = shapes.DEVICE == "cuda"
    parser.add_argument("--sequences", type=int, default=32 if on_gpu else 4)
    parser.add_argument("--length", type=int, default=2048 if on_gpu else 64)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--calibration-tokens", type=int, default=8192, help="kv_calibration_tokens")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    PartialState()  # calibration warns on the main process alone
    ids = shapes.random_tokens(options.size, options.sequences, options.length).to(shapes.DEVICE)
    run = harness.Run("calibration", options, 0, sequences=options.sequences, length=options.length)
    run.results["calibration_tokens"] = min(options.calibration_tokens, ids.numel())
    with tempfile.TemporaryDirectory() as folder:
        model = shapes.policy(shapes.write_folder(options.size, folder), torch.bfloat16 if on_gpu else torch.float32)
    add_fused_lm_head(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    hook, step = AttentionHook(model), Step(model, ids, options.micro_batch)
    rows, took = [], 0.0
    for repeat in range(options.repeats + 1):  # one to warm up
        before = run.left
        if before < took:
            run.results["not_measured"][f"repeat {repeat}"] = "did not fit into the budget"
            break
        row = measure(step, hook, ids, options.calibration_tokens)
        took = before - run.left
        if repeat:
            rows.append(row)
            run.n, run.results["calibration"] = repeat, summarize(rows)
            run.save()
    run.finish()


if __name__ == "__main__":
    main()
