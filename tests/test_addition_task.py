"""The demo's task: what it calls unseen is unseen, what it rewards is right, and a checkpoint is whole or absent."""

import importlib.util
import json
import math
import multiprocessing
import os
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeForCausalLM


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


def test_tokenizer_does_not_drop_characters_it_lacks(tokenizer):
    assert tokenizer("1Q2")["input_ids"] == [
        tokenizer.convert_tokens_to_ids("1"),
        tokenizer.unk_token_id,
        tokenizer.convert_tokens_to_ids("2"),
    ]


# Problems


def test_split_is_disjoint_and_complete(task):
    split = task.split_problems()
    parts = [{(p.x, p.y) for p in part} for part in (split.pretraining, split.reinforcement, split.held_out)]
    assert [len(part) for part in parts] == [7290, 405, 405]
    assert set.union(*parts) == {(x, y) for x in range(10, 100) for y in range(10, 100)}
    assert sum(map(len, parts)) == 8100  # with the union above: no pair is in two parts
    prompts = [set(data["prompt"]) for data in (task.reinforcement_dataset(), task.held_out_dataset())]
    assert [len(one) for one in prompts] == [405, 405] and prompts[0].isdisjoint(prompts[1])


def test_no_unit_digits_of_unseen_problems_are_pretrained_on_and_every_digit_is(task):
    split = task.split_problems()
    units = [{(p.x % 10, p.y % 10) for p in part} for part in (split.pretraining, split.reinforcement, split.held_out)]
    assert units[1] == units[2] and units[0].isdisjoint(units[1])
    assert sorted(x for x, _ in units[1]) == sorted(y for _, y in units[1]) == list(range(10))
    twins = {(p.y, p.x) for p in split.reinforcement + split.held_out}
    assert twins <= {(p.x, p.y) for p in split.pretraining}


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


def test_reward_keeps_the_order_and_refuses_unequal_lengths(task):
    assert task.exact_answer(["46", "46", "7"], answer=["46", "47", "7"]) == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError):
        task.exact_answer(["46"], answer=["46", "47"])


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


def test_sampler_follows_the_softmax_and_leaves_the_global_generator_alone(task, tokenizer, untrained):
    count, prompt = 2000, "47+85="
    with torch.no_grad():
        logits = untrained(torch.tensor([tokenizer(prompt)["input_ids"]])).logits[0, -1]
    before = torch.get_rng_state()
    sampler = task.policy_sampler(untrained, tokenizer, temperature=2.0, max_tokens=1)
    texts = sampler([prompt] * count)
    assert torch.equal(before, torch.get_rng_state())
    assert texts == sampler([prompt] * count) != task.policy_sampler(untrained, tokenizer, 2.0, 1, 1)([prompt] * count)
    probabilities = torch.softmax(logits / 2.0, dim=-1)
    for character in task.ALPHABET:
        p = probabilities[tokenizer.convert_tokens_to_ids(character)].item()
        # five standard deviations of a binomial share, and one count for the rarest
        assert abs(texts.count(character) / count - p) <= 5 * math.sqrt(p * (1 - p) / count) + 1 / count


def test_held_out_accuracy_asks_every_held_out_problem_and_only_those(task):
    asked = []

    def right_on_even_x(prompts):
        asked.extend(prompts)
        pairs = [tuple(map(int, prompt[:-1].split("+"))) for prompt in prompts]
        return [f"({x}){x + y}" if x % 2 == 0 else "0" for x, y in pairs]

    held_out = task.split_problems().held_out
    share = sum(p.x % 2 == 0 for p in held_out) / len(held_out)
    assert task.held_out_accuracy(right_on_even_x, samples=2) == pytest.approx(share, abs=1e-12)
    assert sorted(asked) == sorted([p.prompt for p in held_out] * 2)


# Pretraining


def test_labels_are_the_answer_and_its_end_alone(task, tokenizer):
    problems = task.split_problems().pretraining
    rows = task._rows(tokenizer, [p.written_out for p in problems])
    for row in (0, 100, len(problems) - 1):
        labels = rows.labels_BT[row]
        assert tokenizer.decode(labels[labels != -100]) == problems[row].written_out + "<eos>"
        kept = labels != -100
        assert torch.equal(rows.ids_BT[row][kept], labels[kept])
        assert (
            tokenizer.decode(rows.ids_BT[row], skip_special_tokens=True)
            == problems[row].prompt + problems[row].written_out
        )


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


def test_fields_of_experts_do_not_touch_a_dense_pretraining(task, tokenizer, short, trained):
    other, record = task.pretrain(
        replace(short, experts=4, experts_per_token=1, balance_weight=1.0), tokenizer, progress=False
    )
    assert equal_states(state_of(other), trained[0]) and record.losses == trained[1].losses


def test_pretraining_uses_one_thread_and_gives_the_others_back(task, tokenizer, short, monkeypatch):
    # vLLM's CPU worker replaces torch.set_num_threads for the whole process; engines of other tests may have run here
    monkeypatch.setattr(torch, "set_num_threads", torch._C.set_num_threads)
    used, loss, threads = [], task._loss, torch.get_num_threads()
    monkeypatch.setattr(task, "_loss", lambda *given: used.append(torch.get_num_threads()) or loss(*given))
    try:
        torch.set_num_threads(2)
        task.pretrain(replace(short, max_steps=1), tokenizer, progress=False)
        assert used == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_pretraining_stops_at_the_target(task, tokenizer, short):
    _, reached = task.pretrain(replace(short, evaluate_every=2, target_accuracy=0.0), tokenizer, progress=False)
    assert len(reached.losses) == 2 and [step for step, _ in reached.accuracies] == [2]
    _, missed = task.pretrain(replace(short, evaluate_every=2, target_accuracy=1.1), tokenizer, progress=False)
    assert len(missed.losses) == 5 and [step for step, _ in missed.accuracies] == [2, 4]


def test_every_linear_but_lm_head_is_128_aligned(task, tokenizer):
    model = task.build_model(task.PretrainRecipe(), tokenizer)
    linears = {name: m.weight.shape for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert [name for name, (n, k) in linears.items() if n % 128 or k % 128] == ["lm_head"]
    assert len(linears) == 2 * 7 + 1
    assert 0.40e6 < sum(p.numel() for p in model.parameters()) < 0.42e6
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


def test_every_linear_and_expert_but_routers_and_lm_head_is_128_aligned(task, tokenizer):
    recipe = task.PretrainRecipe.moe()
    model = task.build_model(recipe, tokenizer)
    assert isinstance(model, Qwen3MoeForCausalLM)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.dim() > 1}
    aligned = {name for name, shape in shapes.items() if shape[-1] % 128 == 0 and shape[-2] % 128 == 0}
    routers = {f"model.layers.{layer}.mlp.gate.weight" for layer in range(recipe.layers)}
    assert shapes.keys() - aligned == {"model.embed_tokens.weight", "lm_head.weight"} | routers
    assert len(aligned) == recipe.layers * (4 + 2)
    assert shapes["model.layers.1.mlp.experts.gate_up_proj"] == (8, 256, 128)
    assert shapes["model.layers.1.mlp.experts.down_proj"] == (8, 128, 128)
    assert 1.00e6 < sum(p.numel() for p in model.parameters()) < 1.01e6


def test_a_token_takes_as_many_weights_of_experts_as_a_dense_mlp_has(task):
    dense, moe = task.PretrainRecipe(), task.PretrainRecipe.moe()
    assert moe.intermediate_size * moe.experts_per_token == dense.intermediate_size


def test_imbalance_is_least_where_every_layer_uses_all_experts(task):
    """Two tokens, two layers, two experts, one per token."""
    to_first, to_second = torch.tensor([[9.0, -9.0]]), torch.tensor([[-9.0, 9.0]])
    even, first = torch.cat([to_first, to_second]), torch.cat([to_first, to_first])
    assert task._imbalance((even, even), 1).item() == pytest.approx(1.0, abs=1e-6)
    assert task._imbalance((first, first), 1).item() == pytest.approx(2.0, abs=1e-6)
    # Counts added up over both layers would call this even
    assert task._imbalance((first, -first), 1).item() == pytest.approx(2.0, abs=1e-6)


def test_pretraining_of_experts_minds_their_balance(task, tokenizer, short_moe, trained_moe):
    _, record = task.pretrain(replace(short_moe, max_steps=1, balance_weight=0.0), tokenizer, progress=False)
    # At the start routers are nearly even: the imbalance is little above its least, the number of experts per token
    least = short_moe.balance_weight * short_moe.experts_per_token
    assert least < trained_moe[1].losses[0] - record.losses[0] < 1.5 * least


def test_unknown_architecture_is_named(task, tokenizer):
    known = "arch='gpt2'.*'qwen3' and 'qwen3_moe'"
    with pytest.raises(ValueError, match=known):
        task.build_model(task.PretrainRecipe(arch="gpt2"), tokenizer)
    with pytest.raises(ValueError, match=known):
        task.PretrainRecipe.of("gpt2")


def test_a_recipe_of_each_architecture(task):
    assert task.PretrainRecipe.of("qwen3", seed=3) == task.PretrainRecipe(seed=3)
    assert task.PretrainRecipe.of("qwen3_moe", seed=3) == task.PretrainRecipe.moe(seed=3)
    assert [task.PretrainRecipe.of(arch).arch for arch in task.ARCHITECTURES] == list(task.ARCHITECTURES)


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


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_every_field_that_the_architecture_uses_and_the_code_version_are_in_the_key(task, arch, monkeypatch):
    recipe = task.PretrainRecipe.of(arch)
    of_experts = {"experts", "experts_per_token", "balance_weight"} if arch == "qwen3" else set()
    used = [f.name for f in fields(recipe) if f.name not in of_experts]
    other = {"qwen3": "qwen3_moe", "qwen3_moe": "qwen3"}[arch]
    changed = [replace(recipe, **{name: other if name == "arch" else getattr(recipe, name) + 1}) for name in used]
    names = [task.checkpoint_name(one) for one in (recipe, *changed)]
    monkeypatch.setattr(task, "REVISION", task.REVISION + 1)
    names.append(task.checkpoint_name(recipe))
    monkeypatch.undo()
    monkeypatch.setattr(task, "ALPHABET", task.ALPHABET[::-1])
    names.append(task.checkpoint_name(recipe))
    monkeypatch.undo()
    assert len(set(names)) == len(names) == len(used) + 3
    assert task.checkpoint_name(task.PretrainRecipe.of(arch)) == names[0]
    unused = [replace(recipe, **{name: getattr(recipe, name) + 1}) for name in of_experts]
    assert {task.checkpoint_name(one) for one in unused} <= {names[0]}
    assert recipe.deciding.keys() == set(used)


def test_a_failed_write_leaves_nothing(task, short, tmp_path, monkeypatch):
    def full_disk(tokenizer, folder):
        assert (Path(folder) / "model.safetensors").is_file()  # the write was under way
        raise OSError("No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(task.PreTrainedTokenizerFast, "save_pretrained", full_disk)
        task.cached_checkpoint(short, tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []
    folder = task.cached_checkpoint(short, tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / "tokenizer.json").is_file()


def _die_while_writing(publish, folder):
    def write(unfinished):
        (unfinished / "model.safetensors").write_text("half")
        os._exit(9)  # no `finally` runs

    publish(folder, write)


def test_a_killed_write_is_not_picked_up(task, tmp_path):
    folder = tmp_path / "addition"
    process = multiprocessing.get_context("fork").Process(target=_die_while_writing, args=(task.publish, folder))
    process.start()
    process.join(30)
    assert process.exitcode == 9
    assert len(list(tmp_path.iterdir())) == 1 and not folder.exists()
    task.publish(folder, lambda unfinished: (unfinished / "model.safetensors").write_text("whole"))
    assert (folder / "model.safetensors").read_text() == "whole"


def test_of_two_writers_the_first_wins(task, tmp_path):
    folder = tmp_path / "addition"

    def slow(unfinished):
        (unfinished / "who").write_text("slow")
        task.publish(folder, lambda other: (other / "who").write_text("fast"))

    task.publish(folder, slow)
    assert (folder / "who").read_text() == "fast"
    assert [one.name for one in tmp_path.iterdir()] == ["addition"]


def test_too_poor_a_policy_is_an_error_and_not_cached(task, short, tmp_path):
    with pytest.raises(RuntimeError, match=r"seed=3.*max_steps=5.*minimum_accuracy=0\.9"):
        task.cached_checkpoint(replace(short, seed=3, minimum_accuracy=0.9), tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []
