"""Two-digit addition for a character model: small enough for two CPU cores, with something left for GRPO to find.

The policy is pretrained, and stopped early, on two ways to give the same answer:

    47+85=132                             direct: three quarters of the rows
    47+85=(7+5+0=12,4+8+1=13)132          written out with carries, units first: one quarter

Ten pairs of unit digits, 7 and 2 among them, are left out of pretraining. Faced with 47+82 the policy seldom knows the
sum, but in the tens column of written-out answers it did see 7+2, so that written-out answers are right three to five
times as often. It copies the mix it was shown all the same. The reward looks at the final number only, and GRPO has to
discover that writing out pays: reward and completion length rise together.

Three disjoint sets: pretraining, reinforcement (unseen by pretraining, for GRPO) and held out (unseen by both).
Pretraining stops by its accuracy on reinforcement problems, so that nothing is chosen by a look at the held-out ones.

    checkpoint = cached_checkpoint()                                     # about half a minute on two cores, once
    checkpoint = cached_checkpoint(PretrainRecipe.moe())                 # or a mixture of experts
    trainer = GRPOTrainer(str(checkpoint), exact_answer, train_dataset=reinforcement_dataset(), ...)
    held_out_accuracy(policy_sampler(trainer.model, trainer.processing_class))

Shape letters: B rows, T characters of a row (the prompt included), V vocabulary.
"""

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from math import cos, pi
from pathlib import Path
from time import perf_counter

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func


SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
# 60 characters and 4 special tokens make 64, the multiple to which vLLM pads a vocabulary. `\ { } $` let the same
# model be rewarded by verifiers that accept LaTeX only.
ALPHABET = "0123456789+-*/=?<>()., :\n" + "abcdefghijklmnopqrstuvwxyz" + "\\{}$^_|;!"
PROMPT_CHARACTERS = len("47+85=")
MAX_COMPLETION_TOKENS = 32  # the longest right completion is written out: 22 characters and <eos>
# Part of the cache key. Raise it when code below changes what the same recipe produces.
REVISION = 1

# A closed walk over the ten digits: 0 and 7, 7 and 2, ..., 5 and 0. Each digit is once the unit of x and once that of
# y, and no pair comes with its mirror image, so a problem and its commuted twin are never both unseen.
_WALK = (0, 7, 2, 9, 4, 1, 6, 8, 3, 5)
UNSEEN_UNITS = frozenset(zip(_WALK, _WALK[1:] + _WALK[:1], strict=True))

Generate = Callable[[list[str]], list[str]]

ARCHITECTURES = ("qwen3", "qwen3_moe")
# Of a recipe's fields, those that say nothing about a dense model
_OF_EXPERTS = ("experts", "experts_per_token", "balance_weight")


@dataclass(frozen=True)
class PretrainRecipe:
    """Everything that decides the checkpoint, bit for bit on one kind of CPU and one release of torch. The sizes of
    all linears and experts are multiples of 128, so that they can be FP8 in 128x128 blocks; lm_head, with its 64 rows,
    is not, and neither is a router, with a row per expert.
    """

    arch: str = "qwen3"
    hidden_size: int = 128
    layers: int = 2
    attention_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 256  # with experts: of each
    # With the usual 0.02 both styles generalise equally (0.57 and 0.60 after 300 steps), and writing out pays little
    initializer_range: float = 0.06
    rope_theta: float = 300.0
    direct_rows: int = 96  # of a batch
    written_out_rows: int = 32  # of a batch
    learning_rate: float = 6e-3
    warmup_steps: int = 50
    max_steps: int = 400  # also the length of the cosine
    evaluate_every: int = 25  # steps
    target_accuracy: float = 0.25  # sampled at temperature 1 on reinforcement problems; ends the pretraining
    minimum_accuracy: float = 0.1  # after max_steps; with less, too few rewards differ for GRPO to learn from
    seed: int = 0
    experts: int = 8  # of every layer
    experts_per_token: int = 2
    # Without it an expert in eight gets one in 300 choices; with it none gets less than one in 15
    balance_weight: float = 0.01

    @classmethod
    def moe(cls, **overrides: object) -> "PretrainRecipe":
        """Mixture of experts: 1.0 M parameters, of which a token uses as many as the dense recipe has, 0.4 M."""
        return cls(**{"arch": "qwen3_moe", "intermediate_size": 128, "learning_rate": 5e-3} | overrides)

    @classmethod
    def of(cls, arch: str, **overrides: object) -> "PretrainRecipe":
        """The recipe that is tuned for `arch`."""
        _refuse_unknown(arch)
        return cls.moe(**overrides) if arch == "qwen3_moe" else cls(**overrides)

    @property
    def deciding(self) -> dict[str, object]:
        """Without the fields that this architecture has no use for: they must not make a second checkpoint."""
        ignored = _OF_EXPERTS if self.arch == "qwen3" else ()
        return {name: value for name, value in asdict(self).items() if name not in ignored}

    def learning_rate_factor(self, step: int) -> float:
        """`step` counts from 0."""
        warmup = min(1.0, (step + 1) / self.warmup_steps)
        return warmup * max(0.05, 0.5 * (1 + cos(pi * step / self.max_steps)))


def _refuse_unknown(arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"arch={arch!r}: the addition task knows {' and '.join(map(repr, ARCHITECTURES))}; pass one of them"
        )


@dataclass(frozen=True)
class PretrainRecord:
    """How a pretraining went. `losses` in nats per answer character, one per step; `accuracies` are (step, sampled
    accuracy).
    """

    losses: tuple[float, ...]
    accuracies: tuple[tuple[int, float], ...]
    seconds: float

    @property
    def accuracy(self) -> float:
        return self.accuracies[-1][1] if self.accuracies else 0.0


# Problems


@dataclass(frozen=True)
class Problem:
    x: int
    y: int

    @property
    def prompt(self) -> str:
        return f"{self.x}+{self.y}="

    @property
    def answer(self) -> str:
        return str(self.x + self.y)

    @property
    def written_out(self) -> str:
        """Column addition, units first, as `(digit+digit+carry=total,...)sum`."""
        units = self.x % 10 + self.y % 10
        carry = units // 10
        tens = self.x // 10 + self.y // 10 + carry
        units_column = f"{self.x % 10}+{self.y % 10}+0={units:02d}"
        return f"({units_column},{self.x // 10}+{self.y // 10}+{carry}={tens:02d}){self.answer}"


@dataclass(frozen=True)
class ProblemSplit:
    pretraining: tuple[Problem, ...]
    reinforcement: tuple[Problem, ...]
    held_out: tuple[Problem, ...]


@cache
def split_problems() -> ProblemSplit:
    """All 8100 problems. Those whose unit digits are in UNSEEN_UNITS, 810, are not pretrained on; a shuffle halves
    them.
    """
    problems = [Problem(x, y) for x in range(10, 100) for y in range(10, 100)]
    pretraining = [p for p in problems if (p.x % 10, p.y % 10) not in UNSEEN_UNITS]
    unseen = [p for p in problems if (p.x % 10, p.y % 10) in UNSEEN_UNITS]
    random.Random(0).shuffle(unseen)
    half = len(unseen) // 2
    return ProblemSplit(tuple(pretraining), tuple(unseen[:half]), tuple(unseen[half:]))


def reinforcement_dataset() -> Dataset:
    """Columns `prompt` and `answer`, 405 rows: what GRPO trains on, never seen in pretraining."""
    return _dataset(split_problems().reinforcement)


def held_out_dataset() -> Dataset:
    """Columns `prompt` and `answer`, 405 rows: seen neither in pretraining nor by GRPO."""
    return _dataset(split_problems().held_out)


def _dataset(problems: Sequence[Problem]) -> Dataset:
    return Dataset.from_dict({"prompt": [p.prompt for p in problems], "answer": [p.answer for p in problems]})


# Reward and evaluation


def exact_answer(completions: Sequence[str], answer: Sequence[str], **kwargs: object) -> list[float]:
    """1.0 where the text after the last `)`, or the whole text where there is none, is the answer; else 0.0."""
    return [float(text.rsplit(")", 1)[-1] == right) for text, right in zip(completions, answer, strict=True)]


def held_out_accuracy(generate: Generate, samples: int = 1) -> float:
    """Mean reward over `samples` completions of each of the 405 held-out problems; with one sample its standard error
    is at most 0.025. `generate` maps prompts to completions, in order: any engine's, or `policy_sampler`.
    """
    return _accuracy(generate, split_problems().held_out * samples)


def _accuracy(generate: Generate, problems: Sequence[Problem]) -> float:
    rewards = exact_answer(generate([p.prompt for p in problems]), [p.answer for p in problems])
    return sum(rewards) / len(rewards)


def policy_sampler(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    temperature: float = 1.0,
    seed: int = 0,
    max_tokens: int = MAX_COMPLETION_TOKENS,
) -> Generate:
    """Prompts to completions with the model's own forward. Has its own generator: sampling leaves torch's global one
    alone.
    """

    def generate(prompts: list[str]) -> list[str]:
        ids_BT = torch.tensor(_character_ids(tokenizer, prompts), device=model.device)
        generator = torch.Generator(model.device).manual_seed(seed)
        training = model.training
        model.eval()
        sampled = _sample(model, ids_BT, tokenizer.eos_token_id, temperature, generator, max_tokens)
        model.train(training)
        return tokenizer.batch_decode(sampled, skip_special_tokens=True)

    return generate


@torch.no_grad()
def _sample(
    model: PreTrainedModel,
    prompt_BT: torch.Tensor,
    eos: int,
    temperature: float,
    generator: torch.Generator,
    max_tokens: int,
) -> list[list[int]]:
    """Token ids per prompt, without <eos>. Prompts are equally long, so nothing is padded; rows that have ended leave
    the batch and the cache, as three quarters do after four characters.
    """
    sampled = [[] for _ in prompt_BT]
    running_B = torch.arange(len(prompt_BT), device=prompt_BT.device)
    next_BT, past = prompt_BT, None
    for _ in range(max_tokens):
        output = model(input_ids=next_BT, past_key_values=past, use_cache=True, logits_to_keep=1)
        probabilities_BV = torch.softmax(output.logits[:, -1].float() / temperature, dim=-1)
        next_BT, past = torch.multinomial(probabilities_BV, 1, generator=generator), output.past_key_values
        going_B = (next_BT[:, 0] != eos).nonzero()[:, 0]
        if len(going_B) == 0:
            break
        next_BT, running_B = next_BT[going_B], running_B[going_B]
        past.batch_select_indices(going_B)
        for row, token in zip(running_B.tolist(), next_BT[:, 0].tolist(), strict=True):
            sampled[row].append(token)
    return sampled


# Tokenizer and model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of ALPHABET; any other character is <unk>."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


def build_model(recipe: PretrainRecipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """An untrained float32 model. Its weights follow torch's global generator."""
    _refuse_unknown(recipe.arch)
    shared = dict(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.attention_heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        initializer_range=recipe.initializer_range,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    if recipe.arch == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**shared))
    config = Qwen3MoeConfig(
        **shared,
        moe_intermediate_size=recipe.intermediate_size,
        num_experts=recipe.experts,
        num_experts_per_tok=recipe.experts_per_token,
        router_aux_loss_coef=recipe.balance_weight,  # GRPO's too, unless it is told another
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        experts_implementation="eager",  # on one thread a step takes 0.17 s; grouped_mm 0.18 s, batched_mm 4 s
    )
    return Qwen3MoeForCausalLM(config)


# Pretraining


@dataclass(frozen=True)
class _Rows:
    """Every pretraining problem in one style. `labels_BT` is -100 on the prompt and on padding."""

    ids_BT: torch.Tensor
    labels_BT: torch.Tensor

    def pick(self, count: int, generator: torch.Generator) -> "_Rows":
        chosen_B = torch.randint(len(self.ids_BT), (count,), generator=generator)
        return _Rows(self.ids_BT[chosen_B], self.labels_BT[chosen_B])


def _character_ids(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]


def _rows(tokenizer: PreTrainedTokenizerFast, answers: Sequence[str]) -> _Rows:
    prompts = [p.prompt for p in split_problems().pretraining]
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    ids = [row + [eos] for row in _character_ids(tokenizer, [p + a for p, a in zip(prompts, answers, strict=True)])]
    longest = max(map(len, ids))
    ids_BT = torch.tensor([row + [pad] * (longest - len(row)) for row in ids])
    labels_BT = ids_BT.masked_fill(ids_BT == pad, -100)
    labels_BT[:, :PROMPT_CHARACTERS] = -100
    return _Rows(ids_BT, labels_BT)


def _loss(model: PreTrainedModel, batch: Sequence[_Rows]) -> torch.Tensor:
    """Mean over all answer characters of all parts, and what experts add. One forward per style:
    padding direct rows to the length of written-out ones would double the work.
    """
    total, characters, imbalance = torch.zeros(()), 0, torch.zeros(())
    balance_weight = getattr(model.config, "router_aux_loss_coef", 0.0)
    asked = {"output_router_logits": True} if balance_weight else {}
    for rows in batch:
        output = model(input_ids=rows.ids_BT[:, :-1], use_cache=False, **asked)
        targets_BT = rows.labels_BT[:, 1:]
        total = total + cross_entropy(output.logits.flatten(0, 1), targets_BT.flatten(), reduction="sum")
        characters += int((targets_BT != -100).sum())
        if balance_weight:
            imbalance = imbalance + _imbalance(output.router_logits, model.config.num_experts_per_tok) / len(batch)
    return total / characters + balance_weight * imbalance


def _imbalance(router_logits: Sequence[torch.Tensor], experts_per_token: int) -> torch.Tensor:
    """Mean over layers of the load balancing loss. The model's own `aux_loss` adds up the layers' counts first, where
    an expert that is idle in one layer is made good by its namesake in another.
    """
    losses = [load_balancing_loss_func((one,), one.shape[-1], experts_per_token) for one in router_logits]
    return torch.stack(losses).mean()


def pretrain(
    recipe: PretrainRecipe, tokenizer: PreTrainedTokenizerFast, progress: bool = True
) -> tuple[Qwen3ForCausalLM | Qwen3MoeForCausalLM, PretrainRecord]:
    """Train on the CPU until `target_accuracy` or `max_steps`, whichever is first. Leaves torch's global generator as
    it was.
    """
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.seed)
        model = build_model(recipe, tokenizer)
        return model, _train(model, recipe, tokenizer, progress)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The same bits on any number of cores, and no threads that wait for each other where the cores are shared: two
    threads on two busy cores took over ten times as long as one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _train(
    model: PreTrainedModel, recipe: PretrainRecipe, tokenizer: PreTrainedTokenizerFast, progress: bool
) -> PretrainRecord:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.learning_rate_factor)
    problems = split_problems().pretraining
    direct = _rows(tokenizer, [p.answer for p in problems])
    written_out = _rows(tokenizer, [p.written_out for p in problems])
    picker = torch.Generator().manual_seed(recipe.seed)
    sampler = policy_sampler(model, tokenizer, seed=recipe.seed)

    started, losses, accuracies = perf_counter(), [], []
    with tqdm(total=recipe.max_steps, desc="pretraining", unit="step", disable=None if progress else True) as bar:
        for step in range(1, recipe.max_steps + 1):
            batch = (direct.pick(recipe.direct_rows, picker), written_out.pick(recipe.written_out_rows, picker))
            loss = _loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            bar.update()
            if step % recipe.evaluate_every == 0:
                accuracies.append((step, _accuracy(sampler, split_problems().reinforcement)))
                bar.set_postfix(loss=f"{losses[-1]:.3f}", accuracy=f"{accuracies[-1][1]:.3f}")
                if accuracies[-1][1] >= recipe.target_accuracy:
                    break
    model.eval()
    return PretrainRecord(tuple(losses), tuple(accuracies), perf_counter() - started)


# Cache


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trl-fp8"


def checkpoint_name(recipe: PretrainRecipe) -> str:
    """Differs whenever the recipe, the alphabet or REVISION does."""
    key = json.dumps({"recipe": recipe.deciding, "alphabet": ALPHABET, "revision": REVISION}, sort_keys=True)
    return f"addition-{recipe.arch}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def publish(folder: Path, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a temporary neighbour of `folder`, then rename it: `folder` is complete or does not exist. Of
    two processes that publish at once the first wins; the loser's work is dropped.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(unfinished)
        unfinished.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def cached_checkpoint(
    recipe: PretrainRecipe = PretrainRecipe(), cache_folder: Path | None = None, progress: bool = True
) -> Path:
    """Folder of the pretrained policy, an ordinary Hugging Face checkpoint in bfloat16; pretrained now if it is not
    cached.
    """
    folder = (cache_folder or default_cache()) / checkpoint_name(recipe)
    return folder if folder.is_dir() else publish(folder, lambda unfinished: _make(recipe, unfinished, progress))


def _make(recipe: PretrainRecipe, folder: Path, progress: bool) -> None:
    tokenizer = build_tokenizer()
    if progress:
        print("Pretraining the policy, once: half a minute on two cores, a minute with experts", flush=True)
    model, record = pretrain(recipe, tokenizer, progress)
    if record.accuracy < recipe.minimum_accuracy:
        raise RuntimeError(
            f"pretraining with seed={recipe.seed} reached an accuracy of {record.accuracy:.3f} in "
            f"max_steps={recipe.max_steps}, below minimum_accuracy={recipe.minimum_accuracy}: "
            "GRPO needs right answers to start from; change seed"
        )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "pretraining.json").write_text(json.dumps({"recipe": recipe.deciding, **asdict(record)}, indent=1))
