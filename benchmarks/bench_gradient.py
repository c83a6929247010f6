"""What FP8 rollouts do to the gradient of GRPO, and what each correction gives back: bias and variance.

    python -m benchmarks.bench_gradient --gguf SmolLM2-135M-Instruct.Q4_1.gguf [--policies addition smollm2]

No training. For each policy and dose of mismatch a simulated engine (simulated_engine.py) samples groups of 8 for 16
prompts, several times; the policy scores them in FP32. The gradient of GRPO's loss (one step, advantages
scaled by the group's deviation) is taken with the weights of each correction, the package's own, and compared with the
one from BF16 rollouts without a correction. Gradients are kept as sketches: random signs, summed into bins.

    addition   the 8-layer policy of benchmarks/claims; gradient of all layers; reward: the right answer
    smollm2    30 layers of a real checkpoint; gradient of the last two; completions of 32 tokens; reward: the share of
               tokens that begin a word. It needs no model of a task, and the gradient is not that of a real task

All products of different groups are unbiased for products of mean gradients, so that noise adds nothing to a bias.
`bias` is |mean gradient - reference| / |reference|, `cosine` that of both means, `noise` the variance of one group's
gradient over that of BF16 rollouts, and `error` sqrt(bias^2 + variance of a batch of 16 groups), all relative to
|reference|. Intervals are of a jackknife over prompts. `bf16_again` is a second sample of BF16 rollouts, without bias.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from examples.addition_task import PretrainRecipe, cached_checkpoint, exact_answer, reinforcement_dataset
from testing import record
from trl_fp8.features.correction.importance import RolloutCorrection, correct
from trl_fp8.features.correction.measures import measured, mismatch_metrics
from trl_fp8.features.correction.presets import PRESETS
from trl_fp8.features.correction.rejection import Rejection
from trl_fp8.quantization.codec.kv_scales import KVScales
from trl_fp8.run.batch import LogRatio, log_ratio, values_of

from .deep_policies import TEXTS, CheckpointPolicy
from .simulated_engine import Sequences, SimulatedEngine, calibrated_scales


GROUP = 8  # completions
PROMPTS = 16
LAYERS = 30  # of the real checkpoint
BINS = 16384  # of a sketch
CORRECTIONS: dict[str, RolloutCorrection] = {
    "none": RolloutCorrection(level=None),
    "token_tis": RolloutCorrection(),
    "token_mis": RolloutCorrection("token", "mask", bound_max=2.0),
    "sequence_tis": RolloutCorrection("sequence", bound_max=2.0),
    "geometric_band": PRESETS["fp8_geometric_token_tis"].correction,
    "icepop": PRESETS["nemo_icepop"].correction,
    "rejection": RolloutCorrection(level=None, reject=(Rejection("sequence_ratio", 0.5, 2.0),), denominator="shrink"),
}
DOSES = ("bf16", "linears_kv", "linears_kv_quarter", "kv", "bf16_again")
METRICS = ("mismatch/k3_kl", "correction/effective_sample_size", "correction/sequence_effective_sample_size")


@dataclass(frozen=True)
class Case:
    """A policy with prompts, a reward, and its last layers, whose gradient is taken.

    Attributes:
        repeats: Groups of each prompt.
        tokens: Longest completion.
        end: Token that ends one; None: all have the longest.
        reward: Number of a prompt, token ids of its completions -> rewards.
        trained: Its last layers.
        sampled_together: Completions; log-probs over the whole vocabulary take memory.
    """

    model: PreTrainedModel
    prompts: list[list[int]]
    repeats: int
    tokens: int
    end: int | None
    reward: Callable[[int, Sequence[Tensor]], list[float]]
    trained: list[torch.nn.Module]
    sampled_together: int = 256

    def __post_init__(self) -> None:
        self.model.requires_grad_(False)
        for layer in self.trained:
            layer.requires_grad_(True)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for layer in self.trained for parameter in layer.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help=f"a Llama of at least {LAYERS} layers, for smollm2")
    parser.add_argument("--policies", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=0, help="groups of each prompt; 0: the policy's own number")
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the result files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.policies:
        with tempfile.TemporaryDirectory() as folder:
            case = CASES[name](options, Path(folder))
            measure(name, case, options.results)


# -- policies


def addition(options: argparse.Namespace, folder: Path) -> Case:
    """Return the policy of the evidence page that adds two-digit numbers."""
    checkpoint = cached_checkpoint(PretrainRecipe(layers=8, learning_rate=4e-3), progress=False)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    problems = reinforcement_dataset().select(range(PROMPTS))

    def reward(prompt: int, completions: Sequence[Tensor]) -> list[float]:
        texts = tokenizer.batch_decode([ids.tolist() for ids in completions], skip_special_tokens=True)
        return exact_answer(texts, [problems[prompt]["answer"]] * len(texts))

    prompts = [tokenizer(problem["prompt"])["input_ids"] for problem in problems]
    layers = list(model.model.layers)
    return Case(model, prompts, options.repeats or 16, 32, tokenizer.eos_token_id, reward, layers)


def smollm2(options: argparse.Namespace, folder: Path) -> Case:
    """Return the real checkpoint; its reward is the share of tokens that begin a word."""
    checkpoint = CheckpointPolicy(options.gguf).checkpoint(folder, LAYERS)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    begins_word = torch.tensor([_begins_word(token) for token in _vocabulary(tokenizer, model.config.vocab_size)])

    def reward(prompt: int, completions: Sequence[Tensor]) -> list[float]:
        return [begins_word[ids].float().mean().item() for ids in completions]

    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    return Case(model, prompts, options.repeats or 2, 32, None, reward, list(model.model.layers[-2:]), 32)


def _vocabulary(tokenizer, size: int) -> list[str]:
    return [tokenizer.convert_ids_to_tokens(number) or "" for number in range(size)]


def _begins_word(token: str) -> bool:
    return token.startswith(("\u0120", "\u2581"))  # how byte-level BPE and sentencepiece write a space


CASES = {"addition": addition, "smollm2": smollm2}


# -- gradients


def measure(name: str, case: Case, folder: Path) -> None:
    """Sample each dose, take its gradients, and write a row for each correction as it comes."""
    engine = SimulatedEngine(case.model)
    scales = scales_of(case, engine)
    of_policy = {"prompts": len(case.prompts), "repeats": case.repeats, "group": GROUP, "doses": {}}
    of_policy["parameters"] = sum(parameter.numel() for parameter in case.parameters)
    products: dict[str, np.ndarray] = {}
    reference: Tensor | None = None
    for seed, dose in enumerate(DOSES):
        began = time.process_time()
        engine.round(**rounding(dose, engine, scales))
        sketches, facts = of_dose(case, engine, seed, f"{name}_{case.repeats}_{dose}")
        if reference is None:
            reference = sketches["none"]
        for correction, sketch in sketches.items():
            key = f"{name}/{dose}/{correction}"
            for part, values in inner_products(sketch, reference, dose == "bf16").items():
                products[f"{key}/{part}"] = values.float().numpy()
            facts["corrections"][correction] |= compared(products, name, dose, correction)
            print(key, facts["corrections"][correction], flush=True)
        of_policy["doses"][dose] = facts | {"seconds": time.process_time() - began}
        write(name, of_policy, products, folder)


def write(name: str, of_policy: dict, products: dict[str, np.ndarray], folder: Path) -> None:
    """Write the rows of a policy beside those of others, and the products that they follow from."""
    stored = record.path("gradient", folder)
    results = json.loads(stored.read_text())["results"] if stored.exists() else {}
    record.write("gradient", PROMPTS, results | {name: of_policy}, folder)
    others = dict(np.load(product_file(folder))) if product_file(folder).exists() else {}
    np.savez_compressed(product_file(folder), **others | products)


def scales_of(case: Case, engine: SimulatedEngine) -> KVScales:
    """Return KV scales that are calibrated on completions of the policy, as `engine` samples them in BF16."""
    sampled = engine.sample(case.prompts, case.tokens, seed=1000, end=case.end)
    rows = [[*prompt, *ids.tolist()] for prompt, (ids, _) in zip(case.prompts, sampled, strict=True)]
    return calibrated_scales(case.model, rows)


def rounding(dose: str, engine: SimulatedEngine, scales: KVScales) -> dict:
    """Return what the engine rounds at a dose."""
    if dose.startswith("bf16"):
        return {}
    linears = set(engine.linears) if dose.startswith("linears") else set()
    return {"linears": linears, "kv_scales": KVScales(scales.values / 4) if dose.endswith("quarter") else scales}


def of_dose(case: Case, engine: SimulatedEngine, seed: int, name: str) -> tuple[dict[str, Tensor], dict]:
    """Return sketches `[prompts, repeats, bins]` by correction, and facts of the rollouts."""
    prompts = [prompt for prompt in case.prompts for _ in range(case.repeats * GROUP)]
    sampled = []
    for start in range(0, len(prompts), case.sampled_together):
        together = prompts[start : start + case.sampled_together]
        sampled += engine.sample(together, case.tokens, seed * 1000 + start, case.end)
    corrections = CORRECTIONS if not name.endswith(("bf16", "again")) else {"none": CORRECTIONS["none"]}
    sequences = Sequences.of(prompts, [ids.tolist() for ids, _ in sampled])
    mask_BT = sequences.completion[:, 1:]
    rollout_BT = torch.zeros(mask_BT.shape)
    rollout_BT[mask_BT] = torch.cat([logps for _, logps in sampled])
    # The trainer's log-probs first: corrections are of the whole batch
    rows = [slice(start, start + GROUP) for start in range(0, len(sequences), GROUP)]
    groups = [scored(case, sequences.rows(group)) for group in rows]
    trainer_BT = torch.cat([group.logps for group in groups])
    ratio = log_ratio(trainer_BT, rollout_BT, mask_BT)
    rewards = torch.tensor(
        [case.reward(number // case.repeats, [ids for ids, _ in sampled[group]]) for number, group in enumerate(rows)]
    )
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    factors, facts = token_factors(ratio, advantages, corrections)
    sketches = {correction: [] for correction in corrections}
    for place, group in zip(rows, groups, strict=True):
        part = {correction: factor[place] for correction, factor in factors.items()}
        for correction, gradient in gradients(case, group, part):
            sketches[correction].append(sketched(gradient))
    shape = len(case.prompts), case.repeats, BINS
    metrics = values_of(measured(mismatch_metrics(ratio)))
    facts |= {metric: metrics[metric] for metric in METRICS}
    facts |= {"tokens": int(mask_BT.sum()), "reward": rewards.mean().item()}
    facts["groups_with_advantage"] = int((advantages != 0).any(1).sum())
    return {correction: torch.stack(rows).view(shape) for correction, rows in sketches.items()}, facts


def token_factors(
    ratio: LogRatio, advantages: Tensor, corrections: dict[str, RolloutCorrection]
) -> tuple[dict[str, Tensor], dict]:
    """Return d(objective) / d(log-prob) of each token `[B, T]`, by correction, and what each one drops."""
    factors, facts = {}, {"corrections": {}}
    for name, correction in corrections.items():
        corrected = correct(ratio, correction)
        counted_BT = corrected.loss_mask
        tokens = counted_BT.sum() / len(advantages)  # of a group: the mean over a batch, as in the loss "dapo"
        factors[name] = advantages.view(-1, 1) * corrected.loss_weights * counted_BT / tokens
        metrics = values_of(measured(corrected.metrics))
        facts["corrections"][name] = {
            "dropped": metrics["correction/fraction_masked_tokens"],
            "clipped": metrics["correction/fraction_clipped_high"],
        }
    return factors, facts


@dataclass(frozen=True)
class Scored:
    """A group as the trainer scores it: log-probs `[B, T]`, the gradient of each by its hidden state `[B, T, H]`,
    and what the first trained layer got.
    """

    logps: Tensor
    slopes: Tensor
    states: Tensor
    options: dict


def scored(case: Case, sequences: Sequences) -> Scored:
    """Score a group without a graph. A log-prob depends on its own hidden state, so that one backward is enough."""
    model, caught = case.model, []
    catch = case.trained[0].register_forward_pre_hook(
        lambda _, args, options: caught.append((args, options)), with_kwargs=True
    )
    with torch.no_grad():
        found = model.model(input_ids=sequences.ids, attention_mask=sequences.real.long(), use_cache=False)
    catch.remove()
    [((states,), options)] = caught
    hidden, wanted = found.last_hidden_state[:, :-1], sequences.completion[:, 1:]
    leaves = hidden[wanted].requires_grad_()
    chosen = model.lm_head(leaves).log_softmax(-1).gather(-1, sequences.ids[:, 1:][wanted][:, None])[:, 0]
    logps, slopes = torch.zeros(wanted.shape), torch.zeros_like(hidden)
    slopes[wanted] = torch.autograd.grad(chosen.sum(), leaves)[0]
    logps[wanted] = chosen.detach()
    return Scored(logps, slopes, states, options)


def gradients(case: Case, group: Scored, factors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradient of a group, one vector for each correction."""
    hidden = group.states
    for layer in case.trained:
        hidden = layer(hidden, **group.options)
    hidden = case.model.model.norm(hidden)[:, :-1]
    parameters = case.parameters
    for correction, factor in factors.items():
        pulled = torch.autograd.grad(hidden, parameters, factor[..., None] * group.slopes, retain_graph=True)
        yield correction, torch.cat([gradient.flatten() for gradient in pulled])


_SIGNS: dict[int, Tensor] = {}


def sketched(gradient: Tensor) -> Tensor:
    """Return sums `[bins]` of the elements with random signs, whose inner products are those of the gradients, with
    an error of 1 / sqrt(bins) of the norms' product.
    """
    size = -(-len(gradient) // BINS) * BINS
    if size not in _SIGNS:
        generator = torch.Generator().manual_seed(0)
        _SIGNS[size] = torch.randint(2, (size,), generator=generator, dtype=torch.int8) * 2 - 1
    padded = torch.zeros(size)
    padded[: len(gradient)] = gradient
    return (padded * _SIGNS[size]).view(-1, BINS).sum(0)


# -- numbers


def inner_products(sketch: Tensor, reference: Tensor, same: bool) -> dict[str, Tensor]:
    """Return products of groups' gradients, by pairs of prompts `[prompts, prompts]`, means over pairs of groups.

    self         of different groups of this arm
    reference    with groups of the reference; the same groups are left out if the arm is the reference
    squares      `[prompts]`: of each group with itself
    """
    repeats = sketch.shape[1]
    of_prompt, of_reference = sketch.double().sum(1), reference.double().sum(1)
    squares = sketch.double().square().sum(-1)
    own = (of_prompt @ of_prompt.T) / repeats**2
    same_prompt = (of_prompt.square().sum(-1) - squares.sum(1)) / (repeats * (repeats - 1))
    own.diagonal().copy_(same_prompt)
    with_reference = own if same else (of_prompt @ of_reference.T) / repeats**2
    return {"self": own, "reference": with_reference, "squares": squares.mean(1)}


def compared(products: dict[str, np.ndarray], policy: str, dose: str, correction: str) -> dict:
    """Return bias, cosine, noise and error of an arm against the reference, with 95 % intervals over prompts."""
    arm, reference = (
        {part: products[f"{policy}/{key}/{part}"].astype(float) for part in ("self", "reference", "squares")}
        for key in (f"{dose}/{correction}", "bf16/none")
    )
    prompts = len(arm["squares"])
    everything = statistics(arm, reference, np.arange(prompts))
    without = [statistics(arm, reference, np.delete(np.arange(prompts), left_out)) for left_out in range(prompts)]
    found = {}
    for name, value in everything.items():
        values = np.array([each[name] for each in without])
        error = np.sqrt((prompts - 1) / prompts * ((values - values.mean()) ** 2).sum())
        half = student.ppf(0.975, prompts - 1) * error
        found[name] = {"value": float(value), "low": float(value - half), "high": float(value + half)}
    return found


def statistics(arm: dict, reference: dict, prompts: np.ndarray) -> dict[str, float]:
    pairs = np.ix_(prompts, prompts)
    own, with_reference = arm["self"][pairs].mean(), arm["reference"][pairs].mean()
    norm = reference["self"][pairs].mean()
    noise = (arm["squares"] - arm["self"].diagonal())[prompts].mean()
    of_reference = (reference["squares"] - reference["self"].diagonal())[prompts].mean()
    bias_squared = (own + norm - 2 * with_reference) / norm
    return {
        "bias_squared": bias_squared,
        "bias": np.sqrt(max(bias_squared, 0.0)),
        "cosine": with_reference / np.sqrt(max(own, 1e-30) * norm),
        "length": with_reference / norm,
        "noise": noise / of_reference,
        "error": np.sqrt(max(bias_squared, 0.0) + noise / PROMPTS / norm),
    }


def product_file(folder: Path) -> Path:
    return folder / "gradient_products_cpu.npz"


if __name__ == "__main__":
    main()
