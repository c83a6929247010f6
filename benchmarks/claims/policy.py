"""The policy that traces the automaton, pretrained until it is right about as often as its teacher."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from examples.addition_task import PretrainRecipe, build_model, build_tokenizer, default_cache, publish

from .automaton import CELLS, REMARKS, STREAMS, Problem, Teacher, problems


RECIPE = PretrainRecipe(layers=8, learning_rate=3e-3, max_steps=300, target_accuracy=0.28)
ROWS = 24  # of a batch
PROMPT = CELLS + 2
MAX_LENGTH = 256
PRETRAINING, JUDGED, REINFORCEMENT, HELD_OUT = range(STREAMS)
# Part of the folder's name. Raise it when code here or in automaton.py changes what comes out
REVISION = 1


def cached_policy() -> Path:
    """Folder of the pretrained policy in BF16, made now (two minutes on one core) if it is not cached."""
    folder = default_cache() / f"automaton-{REVISION}"
    return folder if folder.is_dir() else publish(folder, _make)


def _make(folder: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.model_max_length = MAX_LENGTH
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same bits on any number of cores
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(RECIPE.seed)
            model = build_model(RECIPE, tokenizer)
            record = _train(model, tokenizer)
    finally:
        torch.set_num_threads(threads)
    if record["accuracies"][-1][1] < RECIPE.target_accuracy:
        raise RuntimeError(f"pretraining ended at {record['accuracies'][-1]}, below {RECIPE.target_accuracy}")
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "pretraining.json").write_text(json.dumps(record, indent=1))


def _train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE.learning_rate, betas=(0.9, 0.98), fused=True)
    schedule = LambdaLR(optimizer, RECIPE.learning_rate_factor)
    teacher, drawn = Teacher(RECIPE.seed), problems(PRETRAINING)
    judged = list(islice(problems(JUDGED), 64))
    began, accuracies = perf_counter(), []
    for step in range(1, RECIPE.max_steps + 1):
        shown = [problem.prompt + problem.trace(teacher) for problem in islice(drawn, ROWS)]
        ids_BT, targets_BT = _rows(tokenizer, shown)
        logits = model(input_ids=ids_BT, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % RECIPE.evaluate_every == 0:
            accuracies.append((step, probability_right(model, tokenizer, judged)))
            if accuracies[-1][1] >= RECIPE.target_accuracy:
                break
    return {"accuracies": accuracies, "loss": loss.item(), "seconds": perf_counter() - began}


def _rows(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Tokens `[B, T]` and the ones that follow them, -100 for those of prompts and padding."""
    ids = [row + [tokenizer.eos_token_id] for row in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
    longest = max(map(len, ids))
    ids_BT = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in ids])
    targets_BT = ids_BT.masked_fill(ids_BT == tokenizer.pad_token_id, -100)
    targets_BT[:, :PROMPT] = -100
    return ids_BT[:, :-1], targets_BT[:, 1:]


@torch.no_grad()
def probability_right(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, asked: Sequence[Problem], rows: int = 32
) -> float:
    """Chance that a sample at temperature 1 is right if its remarks are the teacher's, mean over `asked`."""
    training, teacher = model.training, Teacher(RECIPE.seed)
    remarks = torch.tensor(tokenizer.convert_tokens_to_ids(list(REMARKS)))
    model.eval()
    chances = []
    for start in range(0, len(asked), rows):
        texts = [each.prompt + each.trace(teacher, errs=False) for each in asked[start : start + rows]]
        ids_BT, targets_BT = _rows(tokenizer, texts)
        logps_BTV = model(input_ids=ids_BT, use_cache=False).logits.double().log_softmax(-1)
        right_BT = logps_BTV.gather(-1, targets_BT.clamp_min(0)[..., None])[..., 0]
        any_remark_BT = logps_BTV[..., remarks].logsumexp(-1)
        right_BT = torch.where(torch.isin(targets_BT, remarks), any_remark_BT, right_BT)
        chances += right_BT.where(targets_BT >= 0, 0.0).sum(1).exp().tolist()
    model.train(training)
    return sum(chances) / len(chances)
