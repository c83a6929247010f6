"""The demo's task: what it calls unseen is unseen, what it rewards is right, and a checkpoint is whole or absent."""

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


EXAMPLE = Path(__file__).parents[1] / "examples" / "addition_task.py"


@pytest.fixture(scope="module")
def task():
    spec = importlib.util.spec_from_file_location("addition_task_under_test", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def tokenizer(task):
    return task.build_tokenizer()


@pytest.fixture(scope="module")
def short(task):
    """Five steps at the full learning rate, never evaluated, any accuracy accepted."""
    return task.PretrainRecipe(max_steps=5, warmup_steps=1, evaluate_every=100, minimum_accuracy=0.0)


@pytest.fixture(scope="module")
def short_moe(task):
    return task.PretrainRecipe.moe(max_steps=5, warmup_steps=1, evaluate_every=100, minimum_accuracy=0.0)


@pytest.fixture(scope="module")
def trained(task, tokenizer, short):
    """Weights and record of one run of `short`."""
    model, record = task.pretrain(short, tokenizer, progress=False)
    return state_of(model), record


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal_states(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# Tokenizer


def test_tokenizer_gives_one_token_per_character_and_gives_them_back(task, tokenizer, tmp_path):
    text = task.ALPHABET + "\\boxed{46} $(7+5+0=12,4+8+1=13)132"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 64 == len(set(task.ALPHABET)) + len(task.SPECIAL_TOKENS)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(text)["input_ids"] == ids and loaded.decode(ids) == text
    assert loaded.padding_side == "left" and loaded.eos_token_id == tokenizer.eos_token_id


# Problems


def test_split_is_disjoint_and_complete(task):
    split = task.split_problems()
    parts = [{(p.x, p.y) for p in part} for part in (split.pretraining, split.reinforcement, split.held_out)]
    assert [len(part) for part in parts] == [7290, 405, 405]
    assert set.union(*parts) == {(x, y) for x in range(10, 100) for y in range(10, 100)}
    assert sum(map(len, parts)) == 8100  # with the union above: no pair is in two parts
    prompts = [set(data["prompt"]) for data in (task.reinforcement_dataset(), task.held_out_dataset())]
    assert [len(one) for one in prompts] == [405, 405] and prompts[0].isdisjoint(prompts[1])


def test_written_out_answers_are_sound_arithmetic_and_fit(task):
    split = task.split_problems()
    for problem in split.pretraining + split.reinforcement + split.held_out:
        work, _, final = problem.written_out.removeprefix("(").partition(")")
        units, tens = work.split(",")
        for column in (units, tens):
            left, _, total = column.partition("=")
            assert sum(map(int, left.split("+"))) == int(total) and len(total) == 2
        assert int(tens.partition("=")[2]) * 10 + int(units[-1]) == problem.x + problem.y == int(final)
        assert units.startswith(f"{problem.prompt[1]}+{problem.prompt[4]}+0=") and tens[4] == units[-2]
        assert len(problem.written_out) + 1 <= task.MAX_COMPLETION_TOKENS


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("132", 1.0),
        ("(7+5+0=12,4+8+1=13)132", 1.0),
        ("(nonsense)132", 1.0),  # only the final number counts
        ("133", 0.0),
        ("(7+5+0=12,4+8+1=13)13", 0.0),
        ("(7+5+0=12,4+8+1=13)", 0.0),
        ("(7+5+0=12,4+8+1=132", 0.0),  # never closed
        ("132)", 0.0),
        ("1320", 0.0),
        ("0132", 0.0),
        ("132 or 133", 0.0),
        ("\\boxed{132}", 0.0),
        ("", 0.0),
        (")))", 0.0),
        ("<unk>$\n{", 0.0),
    ],
)
def test_reward(task, completion, reward):
    assert task.exact_answer([completion], answer=["132"], prompts=["47+85="], completion_ids=[[1]]) == [reward]


# Sampling


@pytest.fixture(scope="module")
def untrained(task, tokenizer):
    """Its <eos> is likely enough that rows end at different lengths."""
    torch.manual_seed(0)
    model = task.build_model(task.PretrainRecipe(initializer_range=0.3), tokenizer)
    model.lm_head.weight.data[tokenizer.eos_token_id] *= 1.5
    return model


def test_sampler_gives_what_one_prompt_at_a_time_without_cache_gives(task, tokenizer, untrained):
    prompts = [p.prompt for p in task.split_problems().held_out[:40]]
    expected = []
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"]
        start = len(ids)
        while len(ids) - start < 12 and ids[-1] != tokenizer.eos_token_id:
            with torch.no_grad():
                ids.append(int(untrained(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        expected.append(tokenizer.decode(ids[start:], skip_special_tokens=True))
    untrained.train()
    greedy = task.policy_sampler(untrained, tokenizer, temperature=1e-6, max_tokens=12)
    assert greedy(prompts) == expected
    assert untrained.training  # the mode was given back
    assert len({len(text) for text in expected}) > 3  # else no row left the batch early and nothing was tested


# Pretraining


@pytest.fixture(scope="module")
def trained_moe(task, tokenizer, short_moe):
    model, record = task.pretrain(short_moe, tokenizer, progress=False)
    return state_of(model), record


@pytest.mark.parametrize("run", ["trained", "trained_moe"])
def test_five_steps_lower_the_loss(run, request):
    record = request.getfixturevalue(run)[1]
    # An untrained model is near the uniform guess over 64 tokens; knowing only which 15 characters occur in answers
    # (digits, four signs, <eos>) would already save ln 64 - ln 15 = 1.45 nats. Half of that is asked for.
    assert record.losses[0] == pytest.approx(math.log(64), abs=0.5)
    assert record.losses[-1] < record.losses[0] - 0.5 * (math.log(64) - math.log(15))
    assert len(record.losses) == 5 and record.accuracies == ()


@pytest.mark.parametrize(("recipe", "run"), [("short", "trained"), ("short_moe", "trained_moe")])
def test_same_seed_same_weights_other_seed_others(task, tokenizer, recipe, run, request):
    recipe, (state, first) = request.getfixturevalue(recipe), request.getfixturevalue(run)
    torch.manual_seed(11)  # must not matter, and must not be touched
    before = torch.get_rng_state()
    again, record = task.pretrain(recipe, tokenizer, progress=False)
    assert torch.equal(before, torch.get_rng_state())
    assert equal_states(state_of(again), state) and record.losses == first.losses
    other, _ = task.pretrain(replace(recipe, seed=1), tokenizer, progress=False)
    assert not equal_states(state_of(other), state)


# Cache


@pytest.mark.parametrize(
    ("recipe", "run", "most_bytes"), [("short", "trained", 1.0e6), ("short_moe", "trained_moe", 2.2e6)]
)
def test_checkpoint_is_made_once_and_loads_anywhere(task, recipe, run, most_bytes, request, tmp_path, monkeypatch):
    recipe, (state, record) = request.getfixturevalue(recipe), request.getfixturevalue(run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = task.cached_checkpoint(recipe, progress=False)
    assert folder.parent == tmp_path / "trl-fp8"
    assert sum(file.stat().st_size for file in folder.iterdir()) < most_bytes
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    assert equal_states(loaded.state_dict(), {name: one.to(torch.bfloat16) for name, one in state.items()})
    assert json.loads((folder / "pretraining.json").read_text())["losses"] == list(record.losses)
    assert (
        AutoTokenizer.from_pretrained(folder)("47+85=")["input_ids"] == task.build_tokenizer()("47+85=")["input_ids"]
    )

    monkeypatch.setattr(task, "pretrain", None)  # a second pretraining would fail
    assert task.cached_checkpoint(recipe, progress=False) == folder


def test_too_poor_a_policy_is_an_error_and_not_cached(task, short, tmp_path):
    with pytest.raises(RuntimeError, match=r"seed=3.*max_steps=5.*minimum_accuracy=0\.9"):
        task.cached_checkpoint(replace(short, seed=3, minimum_accuracy=0.9), tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []
