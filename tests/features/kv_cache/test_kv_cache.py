"""The FP8 KV cache in training: simulated in the trainer, recalibrated, watched, and the same after a resume."""

import logging
import random
import shutil
from dataclasses import replace
from statistics import mean

import numpy
import pytest
import torch
from datasets import Dataset
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from testing.runs import arguments, column, dataset, recorded, rows, training, trajectory
from trl_fp8 import FP8GRPOTrainer
from trl_fp8.features.kv_cache.kv_cache import KVCache
from trl_fp8.features.run_log.log_file import read_run
from trl_fp8.quantization.codec.kv_scales import KV_SCALES


pytestmark = pytest.mark.engine

KV_ONLY = {"fp8_weights": False, "learning_rate": 1e-5, "simulate_kv_cache": False}
MISMATCH = "sampling/sampling_logp_difference/mean"


def run(model, folder, **flags):
    with training(model, arguments(folder, **(KV_ONLY | flags))) as trainer:
        trainer.train()
    return trainer


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_simulation_lowers_the_mismatch_of_the_same_rollouts(implementation, checkpoint, tmp_path):
    """KV cache alone, same seed: what is left is the engine's BF16, which a run without FP8 shows."""
    flags = {"model_init_kwargs": {"attn_implementation": implementation}}
    plain = mean(column(run(checkpoint("qwen3"), tmp_path / "off", **flags), MISMATCH))
    simulated = mean(column(run(checkpoint("qwen3"), tmp_path / "on", simulate_kv_cache=True, **flags), MISMATCH))
    assert 0 < simulated < 0.6 * plain


@pytest.mark.parametrize("flags", [{}, {"fp8_forward": "one_forward"}], ids=["off", "one-forward"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_policy_computes_as_without_a_trainer_wherever_the_trainer_scores_nothing(
    implementation, flags, checkpoint, tmp_path
):
    """In reward functions of training and evaluation, and afterwards, with a cache and without. Bit for bit."""
    ids, seen = torch.randint(4, 60, (2, 9), generator=torch.Generator().manual_seed(0)), []
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    loading = {"attn_implementation": implementation, "dtype": torch.float32}
    plain = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), **loading)

    def logits(model):
        model.eval()
        with torch.no_grad():
            whole = model(input_ids=ids, attention_mask=mask).logits
            first = model(input_ids=ids[:, :6], attention_mask=mask[:, :6], use_cache=True)
            rest = model(input_ids=ids[:, 6:], attention_mask=mask, past_key_values=first.past_key_values).logits
        return torch.cat([whole, first.logits, rest], 1)

    def untouched():
        training, model = trainer.model.training, trainer.model
        plain.load_state_dict(model.state_dict())
        seen.append(torch.equal(logits(model), logits(plain)))
        model.train(training)

    def reward(completions, **columns):
        untouched()
        return [float(len(text)) for text in completions]

    args = arguments(
        tmp_path,
        bf16=False,
        beta=0.1,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
        model_init_kwargs=loading,
        **flags,
    )
    with training(checkpoint("qwen3"), args, reward_funcs=reward, eval_dataset=dataset(1)) as trainer:
        steps = [trainer.train, trainer.evaluate, trainer.train, lambda: trainer.predict(dataset(1))]
        for step in steps:
            step()
            untouched()
    assert len(seen) >= 12 and all(seen), seen


@pytest.mark.parametrize("simulated", [True, False])
def test_a_policy_that_has_not_moved_has_no_kl_divergence_from_its_reference(simulated, checkpoint, tmp_path):
    """In BF16, where a shift of positions shows: prompts of several lengths are padded on the left."""
    prompts = Dataset.from_list([{"prompt": "1+" * (1 + row % 5) + "2="} for row in range(32)])
    args = arguments(tmp_path, beta=0.1, learning_rate=0.0, max_steps=1, simulate_kv_cache=simulated)
    with training(checkpoint("qwen3"), args, train=prompts) as trainer:
        trainer.train()
    assert column(trainer, "kl") == [0.0]


def test_simulation_is_the_same_under_gradient_checkpointing_and_lora(checkpoint, tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    results = []
    for checkpointing in (False, True):
        args = arguments(tmp_path / str(checkpointing), simulate_kv_cache=True, gradient_checkpointing=checkpointing)
        with training(checkpoint("qwen3"), args, peft_config=lora) as trainer:
            trainer.train()
        results.append([(row["loss"], row["grad_norm"]) for row in rows(trainer)])
    plain, checkpointed = torch.tensor(results)
    torch.testing.assert_close(plain, checkpointed, rtol=1e-4, atol=1e-5)
    assert (plain[:, 1] > 0).all()


def test_a_batch_keeps_the_scales_of_its_rollouts_through_a_later_sync(checkpoint, tmp_path):
    """Two optimizer steps on one batch of rollouts, with an evaluation (and its sync) in between."""
    seen = []
    args = arguments(
        tmp_path,
        simulate_kv_cache=True,
        num_iterations=2,
        max_steps=2,
        learning_rate=0.05,  # enough to change the scales
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
    )
    with training(checkpoint("qwen3"), args, eval_dataset=dataset(4)) as trainer:
        kv_cache = trainer.feature(KVCache)
        begin_loss = kv_cache.begin_loss

        def record(inputs):
            begin_loss(inputs)
            synced = trainer.vllm_generation.last_sync.carried[KV_SCALES].values
            seen.append((trainer.model.training, kv_cache.hook.scales_L3.clone(), synced))

        kv_cache.begin_loss = record
        trainer.train()
        assert trainer.feature(KVCache).hook.scales_L3 is None
    (_, first, first_synced), (_, second, second_synced) = (row for row in seen if row[0])
    assert torch.equal(first, first_synced)
    assert torch.equal(second, first) and not torch.equal(second_synced, first_synced)
    assert all(torch.equal(used, synced) for training_mode, used, synced in seen if not training_mode)


def test_saturation_is_measured_and_widens_the_margin(checkpoint, tmp_path, caplog):
    with training(checkpoint("qwen3"), arguments(tmp_path, **KV_ONLY)) as trainer:
        kv_cache = trainer.feature(KVCache)
        # prompts-only: 0.5; then scales of at most half the largest value
        kv_cache.calibration = replace(kv_cache.calibration, margin=0.25)
        with caplog.at_level(logging.WARNING, logger="trl_fp8"):
            trainer.train()
    saturated, margins = column(trainer, "fp8/kv_saturation_fraction"), column(trainer, "fp8/kv_margin")
    assert margins[:2] == [0.5, 0.5] and saturated[0] > 1e-4  # of prompts alone, doubled; then widened
    assert margins[-1] == 1.0 or saturated[-1] < saturated[0]
    assert "values were clipped in the KV cache" in caplog.text and "the next sync doubles the margin" in caplog.text


UNKNOWN = "§"  # <unk> to the tokenizer
PLANTED = 8  # times as large as any other v


@pytest.fixture(scope="module")
def planted(checkpoint, tmp_path_factory):
    """A checkpoint whose first layer makes a large v of <unk>, which no other token comes near."""
    folder = tmp_path_factory.mktemp("planted")
    shutil.copytree(checkpoint("qwen3"), folder, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    unknown = AutoTokenizer.from_pretrained(folder).unk_token_id
    with torch.no_grad():
        embeddings, v_proj = model.model.embed_tokens.weight, model.model.layers[0].self_attn.v_proj.weight
        embeddings[:, 7] = 0
        embeddings[unknown] = 0
        embeddings[unknown, 7] = 1.0  # after the norm: sqrt(128)
        largest = (embeddings * embeddings.square().mean(-1, keepdim=True).rsqrt() @ v_proj.T).abs().nan_to_num().max()
        v_proj[:, 7] = PLANTED * largest / 128**0.5
    model.save_pretrained(folder)
    return str(folder)


class EvaluationApart(FP8GRPOTrainer):
    """Evaluations take no random numbers from training, which samples with the same generators."""

    def evaluate(self, *args, **kwargs):
        python, arrays = random.getstate(), numpy.random.get_state()
        with torch.random.fork_rng(devices=[]):
            metrics = super().evaluate(*args, **kwargs)
        random.setstate(python)
        numpy.random.set_state(arrays)
        return metrics


@pytest.mark.parametrize(
    "flags",
    [
        {"num_iterations": 2, "max_steps": 6, "eval_steps": 1, "save_steps": 3},
        {"max_steps": 5, "eval_steps": 2, "save_steps": 2},
        {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "eval_steps": 1, "save_steps": 2},
        {"kv_calibration": "policy", "eval_on_start": True, "eval_steps": 1, "save_steps": 2},
    ],
    ids=["iterations", "default", "two-generations-a-step", "policy"],
)
def test_a_run_with_evaluations_trains_as_one_without_and_as_one_resumed(flags, planted, tmp_path):
    """Bit for bit: scales, saturation, metrics, weights. Training's prompts alone have the token with a large v."""
    prompts = [row["prompt"] for row in dataset(16)]
    train = Dataset.from_list([{"prompt": prompt[row % 3 :] + UNKNOWN} for row, prompt in enumerate(prompts)])
    flags = {"save_strategy": "steps", "per_device_eval_batch_size": 4, "num_generations_eval": 4} | flags
    runs = []
    for evaluates, resume in (
        (False, None),
        (True, None),
        (True, str(tmp_path / f"checkpoint-{flags['save_steps']}")),
    ):
        now = flags if evaluates else flags | {"eval_on_start": False}
        args = arguments(tmp_path, eval_strategy="steps" if evaluates else "no", **now)
        options = {"trainer": EvaluationApart, "train": train, "eval_dataset": dataset(4)}
        with training(planted, args, **options) as trainer:
            rotary = trainer.model.model.rotary_emb
            counted_by_row = recorded(rotary, "forward", lambda _, x, position_ids: len(position_ids) == len(x))
            trainer.train(resume_from_checkpoint=resume)
            assert all(counted_by_row)  # from the first real token, in passes that are observed and those that are not
            weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
            runs.append((trajectory(trainer), read_run(tmp_path).rollouts, weights))
            assert any("eval_loss" in row for row in trainer.state.log_history) == evaluates
    (steps, rollouts, weights), *others = runs
    for found_steps, found_rollouts, found_weights in others:
        assert found_rollouts == rollouts
        assert found_steps == steps
        assert all(torch.equal(found_weights[name], weight) for name, weight in weights.items())
    assert all(row["kv_scales"][0][2] >= 4 * row["kv_scales"][0][1] for row in rollouts)
    assert all(row["kv_saturation"][0][1] == 0 for row in rollouts)


def biased_qwen2(checkpoint, folder, bias=200.0):
    """k of layer 0 has one channel per head that is large in every token, as Qwen2.5's first layers have."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2"))
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias[5] += bias
        model.model.layers[0].self_attn.k_proj.bias[64 + 33] -= bias
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source := type(folder)(checkpoint("qwen2")) / name).exists():
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(source.read_bytes())
    model.save_pretrained(folder)
    return str(folder)


def test_k_outliers_are_named_and_the_automatic_remedy_works(checkpoint, tmp_path, caplog):
    """Threshold: twice the mismatch of the same model without the bias."""
    threshold = 2 * mean(column(run(checkpoint("qwen2"), tmp_path / "normal"), MISMATCH))
    assert "k has outliers" not in caplog.text
    model = biased_qwen2(checkpoint, tmp_path / "biased")
    with caplog.at_level(logging.WARNING, logger="trl_fp8"):
        per_tensor = mean(column(run(model, tmp_path / "per_tensor"), MISMATCH))
    assert "k has outliers in layers" in caplog.text and "kv_cache_skip_layers=[0]" in caplog.text
    assert per_tensor > threshold
    remedied = run(model, tmp_path / "auto", kv_cache_skip_layers="auto")
    assert remedied.recipe.kv_cache_skip_layers == (0,)
    assert "layers [0] stay in BF16" in remedied.plan.table()
    assert mean(column(remedied, MISMATCH)) < threshold


@pytest.mark.engine
def test_steps_without_learning_calibrate_a_run_that_has_ended(checkpoint, tmp_path):
    """As docs/checkpoints.md says: no weight changes, and the export has the scales of the last sync."""
    args = arguments(tmp_path / "scales", max_steps=2, learning_rate=0.0)
    with training(checkpoint("qwen3"), args) as trainer:
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
        trainer.save_fp8_model(tmp_path / "fp8")
        scales_L3 = trainer.feature(KVCache).latest_scales.values
    [weights] = (tmp_path / "fp8").glob("*.safetensors")
    with safe_open(weights, "pt") as stored:
        for layer, scales in enumerate(scales_L3.tolist()):
            names = [f"model.layers.{layer}.self_attn.{part}_scale" for part in "qkv"]
            assert [stored.get_tensor(name).item() for name in names] == scales
