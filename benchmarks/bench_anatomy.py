"""Where the mismatch of a real model arises: by number format, position, entropy, layer and kind of linear.

    python -m benchmarks.bench_anatomy --gguf SmolLM2-135M-Instruct.Q4_1.gguf [--engines] [--results DIR]

No training. 64 completions of 256 tokens (anatomy_tokens.jsonl.gz, sampled once from the BF16 policy) are scored by
the policy in FP32, as a trainer on CPU does, and by its simulated engine (simulated_engine.py). Each row of the file
is a precision of that engine:

    k3          mean(1/r - 1 + log r) over all completion tokens, r = trainer / engine. The tokens come from the
                trainer's side; with r and 1/r exchanged it is `mismatch/k3_kl`, of the other direction
    kl          KL(engine || trainer) per token, exact over the vocabulary, at the tokens of the first 16 sequences
    weight      effective sample size of weights r of a token; `sequence` of products of r over windows of a length

Layers, kinds and sets of layers are measured by `kl`, and other precisions than the usual four,
on these 16 sequences: 64 did not fit into the time. --engines compares the simulation with
vLLM's log-probs of the first tokens of 16 sequences. A second run adds the missing rows.
"""

import argparse
import gzip
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from testing import record
from trl_fp8.policy.hook import AttentionHook
from trl_fp8.quantization.codec.kv_scales import KVScales
from trl_fp8.quantization.formats import TENSOR

from . import harness
from .deep_policies import TEXTS, CheckpointPolicy
from .measure_depth import in_a_process
from .simulated_engine import KINDS, Sequences, SimulatedEngine, calibrated_scales, log_probs


LAYERS = 30
SEQUENCES, TOKENS = 64, 256
CLOSE = 16  # sequences that layers, kinds and unusual precisions are measured on
USUAL = ("bf16", "linears_kv", "linears", "kv")
WINDOWS = (8, 16, 32, 64, 128, 256)
FAR = (512, 1024)  # lengths that are extrapolated to
POSITIONS = 8  # bins of positions, and of entropy
STEP = 1e-5  # learning rate of the step that makes scales stale
TABLE = Path(__file__).parent / "anatomy_tokens.jsonl.gz"
ENGINE_TOKENS = 60  # of prompt and completion, which the test engine's context holds
DRAWS = 1000  # of a bootstrap over sequences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help=f"a Llama of at least {LAYERS} layers")
    parser.add_argument("--layers", type=int, default=LAYERS, help="first layers of the checkpoint")
    parser.add_argument("--engines", action="store_true", help="compare with vLLM, too")
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the result files")
    parser.add_argument("--cell", help="measure this engine only and print its row; used by the benchmark itself")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = CheckpointPolicy(options.gguf)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = source.checkpoint(Path(folder), options.layers)
        policy = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        if options.cell:
            return harness.emit(engine_row(checkpoint, policy, options.cell))
        engine = SimulatedEngine(policy)
        if not TABLE.exists():
            tokenizer = AutoTokenizer.from_pretrained(checkpoint)
            write_tokens(engine, [tokenizer(text)["input_ids"] for text in TEXTS])
        Anatomy(policy, engine, options.results, source.source).measure()
    if options.engines:
        add_engines(options.results)


# -- the tokens


def write_tokens(engine: SimulatedEngine, prompts: list[list[int]]) -> None:
    """Sample completions in BF16 and write them with their prompts."""
    prompts = (prompts * SEQUENCES)[:SEQUENCES]
    found = engine.sample(prompts, TOKENS, seed=0)
    rows = [{"prompt": p, "completion": ids.tolist()} for p, (ids, _) in zip(prompts, found, strict=True)]
    lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    TABLE.write_bytes(gzip.compress(lines.encode(), mtime=0))


def read_tokens() -> Sequences:
    rows = [json.loads(line) for line in gzip.decompress(TABLE.read_bytes()).splitlines()]
    return Sequences.of([row["prompt"] for row in rows], [row["completion"] for row in rows])


# -- rows


class Anatomy:
    """All rows of one policy, each written as it comes.

    Attributes:
        results: What the result file holds.
        log_ratios: Name of a row -> trainer's log-probs less the engine's, float16 `[sequences, tokens]`, in the file
            anatomy_logps_cpu.npz, from which `of_log_ratios` follows.
    """

    def __init__(self, policy: PreTrainedModel, engine: SimulatedEngine, folder: Path, source: str):
        self.policy, self.engine, self.folder = policy, engine, folder
        self.sequences = read_tokens()
        self.close = self.sequences.rows(slice(CLOSE))
        self.layers = policy.config.num_hidden_layers
        stored = record.path("anatomy", folder)
        empty = {"policy": source, "sequences": SEQUENCES, "tokens": TOKENS, "close": CLOSE}
        empty |= {"precisions": {}, "layers": {}, "kinds": {}, "sets": {}, "seconds": {}}
        self.results = json.loads(stored.read_text())["results"] if stored.exists() else empty
        self.log_ratios = read_log_ratios(folder)
        self.trainer: list[Tensor] = []  # the trainer's log-probs over the vocabulary, of the close sequences

    def measure(self) -> None:
        self.of_trainer()
        linears, kv = set(self.engine.linears), self.scales
        quarter = KVScales(kv.values / 4)
        ones = KVScales(torch.ones_like(kv.values))
        stale = self.stale_scales
        precisions = {
            "bf16": {},
            "linears_kv": {"linears": linears, "kv_scales": kv},
            "linears": {"linears": linears},
            "kv": {"kv_scales": kv},
            "kv_scale_1": {"kv_scales": ones},
            "kv_quarter": {"kv_scales": quarter},
            "linears_tensor": {"linears": linears, "spec": TENSOR},
            "linears_fp32_scales": {"linears": linears, "scale_format": "fp32"},
        }
        if not torch.equal(stale.values, kv.values):  # else that row is `kv`
            precisions["kv_one_step_stale"] = {"kv_scales": stale}
        for name, options in precisions.items():
            count = SEQUENCES if name in USUAL else CLOSE
            rows = self.sequences.rows(slice(count))
            self.add(
                "precisions", name, lambda name=name, rows=rows, options=options: self.of_rows(name, rows, options)
            )
        self.of_parts(linears)
        self.of_sets(linears, kv)

    def add(self, group: str, name: str, measure: Callable[[], dict]) -> None:
        """Measure a row that is not there yet, and write the file."""
        if name in self.results[group]:
            return
        began = time.process_time()
        row = measure()
        self.results[group][name] = row
        self.results["seconds"][f"{group} {name}"] = time.process_time() - began
        record.write("anatomy", SEQUENCES, self.results, self.folder)
        np.savez_compressed(log_ratio_file(self.folder), **self.log_ratios)
        shown = {key: value for key, value in row.items() if isinstance(value, float)}
        print(group, name, shown, f"{time.process_time() - began:.0f} s", flush=True)

    def of_trainer(self) -> None:
        """Score all tokens by the policy, and note its scales."""
        self.scales = calibrated_scales(self.policy, self.sequences.token_lists())
        self.stale_scales = scales_before_a_step(self.policy, self.sequences)
        moved = (self.scales.values != self.stale_scales.values).sum().item()
        self.results["stale"] = {"learning_rate": STEP, "scales": self.scales.values.numel(), "moved": moved}
        exponents = self.scales.values.log2()
        self.results["scale_exponents"] = {"q": exponents[:, 0].int().tolist(), "k": exponents[:, 1].int().tolist()}
        self.results["scale_exponents"]["v"] = exponents[:, 2].int().tolist()
        chosen, entropies = [], []
        for log_probs_nV, tokens in log_probs(self.policy, self.sequences):
            chosen.append(log_probs_nV.gather(-1, tokens[:, None])[:, 0])
            entropies.append(-(log_probs_nV.exp() * log_probs_nV).sum(-1))
            if len(self.trainer) * 4 < CLOSE:
                self.trainer.append(log_probs_nV)
        self.trainer_logps = torch.cat(chosen).view(-1, self.tokens)
        self.log_ratios["entropy"] = torch.cat(entropies).view(-1, self.tokens).numpy().astype(np.float16)

    @property
    def tokens(self) -> int:
        return int(self.sequences.completion[0].sum())

    def of_rows(self, name: str, rows: Sequences, rounding: dict) -> dict:
        """Return the row of a precision over some sequences."""
        self.engine.round(**rounding)
        found, divergences = [], []
        for index, (log_probs_nV, tokens) in enumerate(log_probs(self.engine.model, rows)):
            found.append(log_probs_nV.gather(-1, tokens[:, None])[:, 0])
            if index < len(self.trainer):
                divergences.append(kl(log_probs_nV, self.trainer[index]))
        log_r = self.trainer_logps[: len(rows)] - torch.cat(found).view(-1, self.tokens)
        self.log_ratios[name] = log_r.numpy().astype(np.float16)
        divergence = torch.cat(divergences).view(-1, self.tokens)
        row = of_log_ratios(self.log_ratios[name], self.log_ratios["entropy"])
        return row | {"sequences": len(rows)} | mean_and_interval(divergence)

    def of_close(self, rounding: dict) -> dict:
        """Return the exact divergence over the close sequences."""
        self.engine.round(**rounding)
        pairs = zip(log_probs(self.engine.model, self.close), self.trainer, strict=True)
        divergence = torch.cat([kl(of_engine, of_trainer) for (of_engine, _), of_trainer in pairs])
        return mean_and_interval(divergence.view(-1, self.tokens))

    def of_parts(self, linears: set[str]) -> None:
        """Add each layer alone in BF16, and each kind of linear alone in FP8 and alone in BF16."""
        kinds = {kind: {name for name in linears if name.endswith(ends)} for kind, ends in KINDS.items()}
        for kind, part in kinds.items():
            self.add("kinds", f"only {kind}", lambda part=part: self.of_close({"linears": part}))
        parts = {("layers", str(layer)): in_layers(linears, [layer]) for layer in range(self.layers)}
        parts |= {("kinds", kind): part for kind, part in kinds.items()}
        for (group, name), part in parts.items():
            self.add(group, f"all but {name}", lambda part=part: self.of_close({"linears": linears - part}))

    def of_sets(self, linears: set[str], kv: KVScales) -> None:
        """Add the layers that raise the divergence most, together in BF16, and what that costs."""
        order = worst_layers(self.results["layers"])
        sets = {f"worst {n}": in_layers(linears, order[:n]) for n in (1, 2, 4, 8, 16)}
        ends = [0, 1, self.layers - 2, self.layers - 1]
        sets |= {"first and last two": in_layers(linears, ends)}
        size = {name: module.weight.numel() for name, module in self.engine.linears.items()}
        for name, part in sets.items():
            extra = {"bf16_share": sum(size[n] for n in part) / sum(size.values())}
            extra["layers"] = sorted({int(each.split(".")[1]) for each in part})

            def row(part=part, extra=extra) -> dict:
                return self.of_close({"linears": linears - part, "kv_scales": kv}) | extra

            self.add("sets", name, row)


def in_layers(linears: set[str], layers: list[int]) -> set[str]:
    return {name for name in linears if int(name.split(".")[1]) in layers}


def worst_layers(rows: dict) -> list[int]:
    """Return the numbers of the layers, the one first whose BF16 alone lowers the divergence most."""
    left = {int(name.removeprefix("all but ")): row["kl"] for name, row in rows.items() if name.startswith("all")}
    return sorted(left, key=left.get)


def scales_before_a_step(policy: PreTrainedModel, sequences: Sequences) -> KVScales:
    """Return the scales of the policy one optimizer step away, after which `policy` is what it was.

    The step is Adam's first, which moves every weight by the learning rate, along the gradient of the log-likelihood
    of two sequences.
    """
    part = sequences.rows(slice(2))
    labels = part.ids.masked_fill(~part.completion, -100)
    policy(input_ids=part.ids, attention_mask=part.real.long(), labels=labels, use_cache=False).loss.backward()
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(STEP * parameter.grad.sign())
    policy.zero_grad(set_to_none=True)
    scales = calibrated_scales(policy, sequences.token_lists())
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(before[name])
    return scales


# -- numbers


def kl(of_engine: Tensor, of_trainer: Tensor) -> Tensor:
    """Return KL(engine || trainer) of log-probs `[n, V]`, `[n]`."""
    return (of_engine.exp() * (of_engine - of_trainer)).sum(-1)


def mean_and_interval(divergence: Tensor) -> dict:
    """Return the mean of `[sequences, tokens]` and its 95 % interval over sequences."""
    of_sequences = divergence.double().mean(1).tolist()
    found = record.interval(of_sequences)
    return {"kl": found["mean"], "kl_interval": {"value": found["mean"], "low": found["low"], "high": found["high"]}}


def read_log_ratios(folder: Path) -> dict[str, np.ndarray]:
    path = log_ratio_file(folder)
    return dict(np.load(path)) if path.exists() else {}


def log_ratio_file(folder: Path) -> Path:
    return folder / "anatomy_logps_cpu.npz"


def of_log_ratios(log_r: np.ndarray, entropy: np.ndarray) -> dict:
    """Return what follows from the log-ratios (trainer / engine) of tokens `[sequences, tokens]`."""
    log_r, entropy = log_r.astype(np.float64), entropy[: len(log_r)].astype(np.float64)
    k3 = np.expm1(-log_r) + log_r
    places = np.array_split(np.arange(log_r.shape[1]), POSITIONS)
    ranked = np.array_split(np.argsort(entropy, axis=None, kind="stable"), POSITIONS)  # ties as on any host
    return {
        "k3": over_sequences(k3),
        "mean_distance": float(np.abs(log_r).mean()),
        "largest_distance": float(np.abs(log_r).max()),
        "by_position": [float(k3[:, place].mean()) for place in places],
        "by_entropy": [
            {"entropy": float(entropy.ravel()[rows].mean()), "k3": float(k3.ravel()[rows].mean())} for rows in ranked
        ],
        "token_weight": float(1 / np.exp(log_r).mean()),
        "sequence_weight": {str(length): window_weights(log_r, length) for length in windows_of(log_r)},
        "extrapolated": {str(length): extrapolated(log_r, length) for length in FAR},
    }


def windows_of(log_r: np.ndarray) -> Iterator[int]:
    return (length for length in WINDOWS if length <= log_r.shape[1])


def over_sequences(values: np.ndarray) -> dict:
    """Return the mean of `[sequences, tokens]` and its 95 % interval over sequences."""
    found = record.interval(values.mean(1).tolist())
    return {"value": found["mean"], "low": found["low"], "high": found["high"]}


def window_sums(log_r: np.ndarray, length: int) -> np.ndarray:
    """Return sums of log-ratios over neighbouring windows, `[sequences, windows]`."""
    count = log_r.shape[1] // length
    return log_r[:, : count * length].reshape(len(log_r), count, length).sum(-1)


def window_weights(log_r: np.ndarray, length: int) -> dict:
    """Return the effective sample size of products of r over `length` tokens: measured, and if they were lognormal.

    With tokens of the trainer's side it is 1 / E[product]. Few windows have the largest products, so that with little
    overlap the measured one is too large. A lognormal product with variance v of its logarithm has exp(-v).
    """
    sums = window_sums(log_r, length)
    draws = np.random.default_rng(0).integers(len(sums), size=(DRAWS, len(sums)))
    measured = 1 / np.exp(sums).mean()
    again = [1 / np.exp(sums[rows]).mean() for rows in draws]
    lognormal = [math.exp(-sums[rows].var()) for rows in draws]
    return {
        "windows": sums.size,
        "measured": {"value": measured, **ends(again)},
        "lognormal": {"value": math.exp(-sums.var()), **ends(lognormal)},
    }


def extrapolated(log_r: np.ndarray, length: int) -> dict:
    """Return exp(-v) at a length beyond the tokens, v in proportion to that of the longest windows."""
    longest = max(windows_of(log_r))
    sums = window_sums(log_r, longest)
    draws = np.random.default_rng(0).integers(len(sums), size=(DRAWS, len(sums)))
    factor = length / longest
    found = [math.exp(-factor * sums[rows].var()) for rows in draws]
    return {"value": math.exp(-factor * sums.var()), **ends(found)}


def ends(draws: list[float]) -> dict:
    low, high = np.percentile(draws, [2.5, 97.5])
    return {"low": float(low), "high": float(high)}


# -- vLLM


ENGINES = {
    "bf16": {"fp8_weights": False, "kv_cache_dtype": "auto"},
    "linears_kv": {},
    "one_forward": {},
}


def add_engines(folder: Path) -> None:
    """Add what vLLM says of the same tokens, an engine in a process of its own."""
    stored = record.path("anatomy", folder)
    results = json.loads(stored.read_text())["results"]
    for name in ENGINES:
        if name in results.setdefault("engines", {}):
            continue
        row = in_a_process(name)
        if row is None:
            raise SystemExit(f"the engine {name} failed, see the log")
        results["engines"][name] = row
        record.write("anatomy", SEQUENCES, results, folder)


def engine_row(checkpoint: str, policy: PreTrainedModel, name: str) -> dict:
    """Return how far vLLM's log-probs are from the simulation's and from the trainer's."""
    from vllm import SamplingParams

    from testing import engines
    from testing.rollouts import follow, scored
    from trl_fp8.features.one_forward.engine_kernels import SharedKernelsPart

    rows = [row[:ENGINE_TOKENS] for row in read_tokens().token_lists()[:CLOSE]]
    parts = [SharedKernelsPart()] if name == "one_forward" else []
    generation = engines.start(checkpoint, parts=parts, model=policy, **ENGINES[name])
    scales = calibrated_scales(policy, read_tokens().token_lists())
    if generation.recipe.fp8_kv_cache:
        engines.scales_of(generation).calibrate = lambda: scales
    generation.sync_weights()
    sampling = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0)
    outputs = generation.llm.generate([{"prompt_token_ids": row} for row in rows], sampling, use_tqdm=False)
    of_vllm = []
    for row, output in zip(rows, outputs, strict=True):
        found = zip(output.prompt_logprobs[1:], row[1:], strict=True)
        of_vllm.append(torch.tensor([logps[token].logprob for logps, token in found]))
    of_vllm = torch.cat(of_vllm)
    sequences = Sequences.of([row[:1] for row in rows], [row[1:] for row in rows])
    if name == "one_forward":
        hook = AttentionHook(policy)
        forward = follow(generation, hook)
        hook.simulate(scales.values)
        of_trainer = torch.cat(scored(forward, policy, rows))
    else:
        of_trainer = chosen_log_probs(policy, sequences)
    found = {"tokens": len(of_vllm), "trainer": distance(of_vllm, of_trainer)}
    if name != "one_forward":
        simulated = SimulatedEngine(policy)
        if name == "linears_kv":
            simulated.round(simulated.linears, kv_scales=scales, activations=generation.numerics.linears)
        found["simulation"] = distance(of_vllm, chosen_log_probs(simulated.model, sequences))
        found["activations"] = list(generation.numerics.linears or [])
    return found


def chosen_log_probs(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    return torch.cat([found.gather(-1, tokens[:, None])[:, 0] for found, tokens in log_probs(model, sequences)])


def distance(one: Tensor, other: Tensor) -> dict:
    """Return the mean and the largest |difference|, and k3 = mean(r - 1 - log r) with log r = other - one."""
    log_r = (other - one).double()
    return {
        "mean": log_r.abs().mean().item(),
        "largest": log_r.abs().max().item(),
        "k3": (torch.expm1(log_r) - log_r).mean().item(),
    }


if __name__ == "__main__":
    main()
