"""What users combine with `GRPOTrainer`, under FP8 weights and an FP8 KV cache on a real engine."""

import copy
import math
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch._dynamo import OptimizedModule
from transformers import AutoModelForSequenceClassification, Qwen3ForSequenceClassification

from testing import engines, tiny_models
from testing.chats import ROLES, Keypad, chat_tokenizer, chats, turns
from testing.runs import SMALL_K3, arguments, dataset, generate_calls, recorded, reward_digits, rows, training
from trl_fp8.features.kv_cache.kv_cache import KVCache
from trl_fp8.features.kv_cache.observation import observe_sequences
from trl_fp8.quantization.codec.blockwise import quantize_weight
from trl_fp8.quantization.codec.kv_scales import KV_SCALES, kv_scales_from_amax
from trl_fp8.recipe.names import checkpoint_name


pytestmark = pytest.mark.engine


def sync_steps(trainer):
    """Number of optimizer steps done before each sync."""
    return recorded(trainer.vllm_generation, "sync_weights", lambda _: trainer.state.global_step)


@pytest.mark.parametrize(
    "accumulation, every, iterations, steps, beta",
    [(2, 4, 1, 3, 0.0), (2, 4, 2, 5, 0.04), (4, 2, 1, 2, 0.0)],
    ids=["generation-over-two-steps", "two-iterations-with-a-reference", "two-generations-a-step"],
)
def test_syncs_are_those_of_the_step_schedule(accumulation, every, iterations, steps, beta, checkpoint, tmp_path):
    flags = {"gradient_accumulation_steps": accumulation, "steps_per_generation": every, "num_iterations": iterations}
    args = arguments(tmp_path, per_device_train_batch_size=4, max_steps=steps, beta=beta, **flags)
    with training(checkpoint("qwen3"), args) as trainer:
        syncs, generations = sync_steps(trainer), generate_calls(trainer)
        trainer.train()
    rollouts_at = range(0, steps * accumulation, every * iterations)  # counted in micro-batches
    fresh = sorted({micro_batch // accumulation for micro_batch in rollouts_at})
    assert syncs == fresh and len(generations) == len(rollouts_at) and len(rows(trainer)) == steps
    for name in ("fp8/sync_seconds", "mismatch/k3_kl"):
        assert [step for step, row in enumerate(rows(trainer)) if row.get(name, 0) > 0] == fresh
    assert all(row.get("mismatch/k3_kl", 0) < SMALL_K3 for row in rows(trainer))
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows(trainer))
    if beta:
        kl = [row["kl"] for row in rows(trainer)]
        assert kl[0] == 0 and all(value > 0 for value in kl[1:])  # the reference is the policy of the first step


def test_a_compiled_policy_is_observed_and_scored_as_another_one(checkpoint, tmp_path, monkeypatch):
    """Dynamo traces the policy with its hooks; `backend="eager"` runs what it traced without building it anew."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # transformers writes there, for good
    found = []
    for flags in ({}, {"torch_compile_backend": "eager"}):
        args = arguments(tmp_path, max_steps=1, simulate_kv_cache=True, **flags)
        with training(checkpoint("qwen3", num_hidden_layers=1), args) as trainer:
            trainer.train()
            assert isinstance(trainer.model_wrapped, OptimizedModule) is bool(flags)
            scales = trainer.vllm_generation.last_sync.carried[KV_SCALES]
            found.append((rows(trainer)[0]["mismatch/logp_difference_mean"], scales.values.tolist()))
    assert found[0][1] == found[1][1] and found[1][0] == pytest.approx(found[0][0], rel=1e-3)


LOUD = {"target_modules": ["q_proj", "k_proj", "v_proj"], "lora_alpha": 64, "init_lora_weights": False}
NO_OLD_LOG_PROBS = {"vllm_importance_sampling_correction": False, "beta": 0.04}


@pytest.mark.parametrize(
    "flags, lora",
    [({}, {}), (NO_OLD_LOG_PROBS, {}), (NO_OLD_LOG_PROBS, LOUD), ({"mask_truncated_completions": True}, {})],
    ids=["ordinary", "reference-first", "adapters-off-first", "truncations-masked"],
)
def test_the_next_scales_are_those_of_the_policy_on_whole_rollouts(flags, lora, checkpoint, tmp_path):
    """Also where TRL's first forward over new rollouts is the reference's, or attends to no truncated completion."""
    # with such a margin nothing saturates, whatever is sampled, and no margin is doubled
    args = arguments(tmp_path, max_steps=2, learning_rate=0.0, bf16=False, kv_scale_margin=2.0, **flags)
    adapter = LoraConfig(task_type="CAUSAL_LM", **lora) if lora else None
    with training(checkpoint("qwen3"), args, peft_config=adapter) as trainer:
        generations = generate_calls(trainer)
        trainer.train()
        rollouts = [prompt + list(completion) for prompt, completion in zip(*generations[0], strict=True)]
        seen = observe_sequences(trainer.model, trainer.feature(KVCache).hook, rollouts)
    expected = kv_scales_from_amax(seen.amax_L3, args.kv_scale_margin)
    assert torch.equal(trainer.vllm_generation.last_sync.carried[KV_SCALES].values, expected.values)


TIED = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}


@pytest.mark.parametrize(
    "lora, tied, flags",
    [
        ({}, False, {"beta": 0.04}),
        ({"modules_to_save": ["lm_head"]}, False, {}),
        (TIED, True, {}),
        ({}, False, {"fp8_forward": "one_forward"}),
    ],
    ids=["plain", "lm_head", "tied", "one_forward"],
)
def test_lora_trains_adapters_and_the_engine_holds_the_merged_weights(lora, tied, flags, checkpoint, tmp_path):
    """Bit for bit what an engine answers that loads the merged weights from a checkpoint."""
    model = checkpoint("qwen3", **({"tied": True} if tied else {}))
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", **lora)
    args = arguments(tmp_path / "run", max_steps=2, learning_rate=1e-2, **flags)
    with training(model, args, peft_config=adapter) as trainer:
        trainer.train()
        merged = copy.deepcopy(trainer.model).merge_and_unload()
        trainer.vllm_generation.sync_weights()
        synced = engines.log_probs(trainer.vllm_generation.llm)
    assert all(math.isfinite(row["loss"]) and row["mismatch/k3_kl"] < SMALL_K3 for row in rows(trainer))
    assert all((row["mismatch/k3_kl"] > 0) == ("fp8_forward" not in flags) for row in rows(trainer))

    start = {name: tensor.float() for name, tensor in load_file(f"{model}/model.safetensors").items()}
    for name, parameter in trainer.model.named_parameters():
        if ".lora_" in name:
            assert parameter.requires_grad and parameter.any(), name  # B starts at zero
        elif "modules_to_save" in name:
            assert not torch.equal(parameter, start[checkpoint_name(name)]), name
        else:  # each of three syncs merges and unmerges, which rounds twice in fp32
            base = start[checkpoint_name(name.replace(".original_module", ""))]
            assert (parameter - base).abs().max() <= 3 * 2**-22 * base.abs().max(), name
    policies = (weights["model.layers.1.mlp.down_proj.weight"] for weights in (merged.state_dict(), start))
    merged_codes, base_codes = (quantize_weight(weight.bfloat16()).qdata.view(torch.uint8) for weight in policies)
    assert not torch.equal(merged_codes, base_codes)

    source = SimpleNamespace(recipe=trainer.recipe, model=merged, engine_kwargs=None, pinned={})
    scales = trainer.vllm_generation.last_sync.carried[KV_SCALES]
    assert engines.fresh_log_probs(tmp_path / "fresh", source, scales) == synced


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_adapters_that_untie_the_embeddings_are_refused(module, checkpoint, tmp_path):
    """The engine ties them still: it has no place for a head of its own, or takes the new embeddings for one."""
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=[module], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="ensure_weight_tying"):
        with training(checkpoint("qwen3", tied=True), arguments(tmp_path, max_steps=1), peft_config=lora) as trainer:
            trainer.train()


def test_evaluation_has_its_own_group_size_and_a_sync_of_its_own(checkpoint, tmp_path):
    flags = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    with training(checkpoint("qwen3"), arguments(tmp_path, max_steps=2, **flags), eval_dataset=dataset(4)) as trainer:
        syncs, generations = sync_steps(trainer), generate_calls(trainer)
        trainer.train()
    # 4 prompts in groups of 2 are two batches of 4. The training step after an evaluation may have other weights.
    groups = [(len(prompts), len(set(map(tuple, prompts)))) for prompts, _ in generations]
    assert groups == [(8, 2), (4, 2), (4, 2)] * 2 and syncs == [0, 1, 1, 2]
    assert all("fp8/sync_seconds" in row for row in rows(trainer))
    evaluations = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert len(evaluations) == 2
    for row in evaluations:
        assert 0 <= row["eval_reward"] <= 1 and math.isfinite(row["eval_loss"])
        assert 0 < row["eval_mismatch/k3_kl"] < SMALL_K3 and row["eval_fp8/sync_seconds"] > 0


def test_streamed_prompts_arrive_in_order_and_completions_are_logged(checkpoint, tmp_path):
    flags = {"shuffle_dataset": False, "kv_cache_skip_layers": "auto", "log_completions": True}
    args, stream = arguments(tmp_path, max_steps=2, **flags), dataset().to_iterable_dataset()
    with training(checkpoint("qwen3"), args, train=stream) as trainer:
        generations = generate_calls(trainer)
        trainer.train()
        decode = trainer.processing_class.batch_decode
    asked = [row["prompt"] for row in dataset(4) for _ in range(4)]  # looking for outliers consumed none
    assert [text for prompts, _ in generations for text in decode(prompts)] == asked
    assert all(row["fp8/sync_seconds"] > 0 and 0 < row["mismatch/k3_kl"] < SMALL_K3 for row in rows(trainer))
    files = sorted((tmp_path / "completions").iterdir())
    assert [file.name for file in files] == ["completions_00001.parquet", "completions_00002.parquet"]
    for step, ((_, completions), file) in enumerate(zip(generations, files, strict=True)):
        table = pd.read_parquet(file)
        assert len(table) == 8 and set(table["step"]) == {step + 1}
        assert list(table["prompt"]) == asked[8 * step : 8 * step + 8]
        assert list(table["completion"]) == decode(completions, skip_special_tokens=True)
        assert list(table["reward_digits"]) == pytest.approx(reward_digits(table["completion"]))


def test_conversations_go_through_the_chat_template(checkpoint, tmp_path):
    messages = []

    def reward(completions, **kwargs):
        messages.extend(completions)
        return reward_digits([message["content"] for (message,) in completions])

    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = ROLES
    options = {"train": chats(), "processing_class": tokenizer, "reward_funcs": reward}
    with training(checkpoint("qwen3"), arguments(tmp_path, max_steps=2, shuffle_dataset=False), **options) as trainer:
        generations = generate_calls(trainer)
        calibrated = recorded(
            engines.scales_of(trainer.vllm_generation),
            "calibrate",
            lambda _: trainer.feature(KVCache).kv_state.coming_prompts,
        )
        trainer.train()
    asked = [f"user:{row['prompt']}assistant:" for row in dataset(4) for _ in range(4)]
    assert [text for prompts, _ in generations for text in tokenizer.batch_decode(prompts)] == asked
    assert calibrated == [prompts for prompts, _ in generations]
    answers = [answer for _, answers in generations for answer in answers]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    assert messages == [[{"role": "assistant", "content": text}] for text in texts]
    assert all(0 < row["mismatch/k3_kl"] < SMALL_K3 for row in rows(trainer))


@pytest.mark.parametrize(
    "source, forward",
    [
        ({"tools": [Keypad().press]}, "off"),
        ({"environment_factory": Keypad, "reward_funcs": None}, "off"),
        ({"tools": [Keypad().press]}, "one_forward"),
    ],
    ids=["tools", "environment", "one-forward"],
)
def test_tools_are_called_and_their_output_is_not_corrected(source, forward, checkpoint, tmp_path):
    """Several turns on the real engine. Tool output has no rollout log-prob; TRL fills in 0, which is far off."""
    budget = {"max_completion_length": 64, "max_tool_calling_iterations": 2, "vllm_max_model_length": 96}
    args = arguments(tmp_path, max_steps=2, generation_kwargs={"max_tokens": 8}, fp8_forward=forward, **budget)
    options = {"train": chats(), "processing_class": chat_tokenizer(), "reward_funcs": turns} | source
    with training(checkpoint("qwen3"), args, **options) as trainer:
        watched = recorded(trainer.feature(KVCache).hook, "observing", lambda _, observation: observation)
        syncs, generations = sync_steps(trainer), generate_calls(trainer)
        outputs = recorded(trainer, "_generate_and_score_completions", lambda output, _: dict(output))
        trainer.train()
    assert syncs == [0, 1] and len(generations) > 2  # later turns come from the same policy
    for output, row in zip(outputs, rows(trainer), strict=True):
        calls = round(8 * row["tools/call_frequency"])
        own = (output["completion_mask"] * output["tool_mask"]).bool()
        external = (output["completion_mask"] * (1 - output["tool_mask"])).bool()
        text = trainer.processing_class.decode(output["completion_ids"][external])
        assert text.count("tool:key ") == text.count("assistant:") == calls > 0 == row["tools/failure_frequency"]
        log_r = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).double()
        k3 = torch.expm1(log_r) - log_r
        assert row["mismatch/k3_kl"] == pytest.approx(k3[own].mean().item(), rel=1e-5)
        assert row["mismatch/k3_kl"] < SMALL_K3 and k3[external].mean() > 1
        assert (row["mismatch/logp_difference_mean"] < 1e-5) == (forward == "one_forward")
        assert row["correction/ratio_min"] == pytest.approx(log_r[own].min().exp().item(), rel=1e-5)
    # every token of prompts, turns and tool output was observed, and k of a layer has 2 heads of 64
    seen = [observation.elements_L3[0, 1].item() for observation in watched if observation.limits_L3 is not None]
    masks = [torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1) for output in outputs]
    assert seen == [128 * mask.sum() for mask in masks]
    assert all(row["fp8/kv_saturation_fraction"] == 0 for row in rows(trainer))


def test_outlier_layers_are_looked_for_in_environments_too(checkpoint, tmp_path):
    args = arguments(tmp_path, max_steps=1, kv_cache_skip_layers="auto")
    options = {"processing_class": chat_tokenizer(), "environment_factory": Keypad, "reward_funcs": None}
    with training(checkpoint("qwen3"), args, train=None, **options) as trainer:
        trainer.train()
    assert trainer.recipe.kv_cache_skip_layers == () and 0 < rows(trainer)[0]["mismatch/k3_kl"] < SMALL_K3


def test_reward_models_and_asynchronous_rewards(checkpoint, tmp_path):
    """A reward model of the policy's class: what FP8 makes of the policy's modules does not reach it."""
    texts, judge = [], tmp_path / "judge"
    config = tiny_models.config()
    config.num_labels = 1
    torch.manual_seed(1)
    Qwen3ForSequenceClassification(config).save_pretrained(judge)

    async def later(prompts, completions, **kwargs):
        texts.append([prompt + completion for prompt, completion in zip(prompts, completions, strict=True)])
        return reward_digits(completions)

    # bf16=False: else accelerate runs the reward model under autocast, as it does for TRL
    args = arguments(tmp_path / "run", max_steps=2, fp8_forward="one_forward", bf16=False)
    rewards = {"reward_funcs": [str(judge), later], "reward_processing_classes": [tiny_models.tokenizer(), None]}
    with training(checkpoint("qwen3"), args, **rewards) as trainer:
        trainer.train()
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32).eval()
    for row, batch in zip(rows(trainer), texts, strict=True):
        inputs = tiny_models.tokenizer()(batch, return_tensors="pt", padding=True, padding_side="right")
        with torch.no_grad():
            judged = model(**inputs).logits.mean().item()
        digits = sum(c.isdigit() for text in batch for c in text.partition("=")[2]) / 8 / len(batch)
        assert row["rewards/judge/mean"] == pytest.approx(judged, rel=1e-5)
        assert row["rewards/later/mean"] == pytest.approx(digits) and digits > 0
        assert row["reward"] == pytest.approx(judged + digits, rel=1e-5)


def test_generation_and_engine_arguments_reach_the_engine(checkpoint, tmp_path):
    flags = {"generation_kwargs": {"max_tokens": 3}, "vllm_engine_kwargs": {"max_num_batched_tokens": 512}}
    with training(checkpoint("qwen3"), arguments(tmp_path, max_steps=1, **flags)) as trainer:
        trainer.train()
        config = trainer.vllm_generation.llm.llm_engine.vllm_config
    assert config.scheduler_config.max_num_batched_tokens == 512 and config.cache_config.cache_dtype == "fp8"
    assert rows(trainer)[0]["completions/max_length"] == 3 and 0 < rows(trainer)[0]["mismatch/k3_kl"] < SMALL_K3
