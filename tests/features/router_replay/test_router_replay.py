"""Router replay in training, on a real engine: what is replayed, when, and that nothing else changes."""

import math

import pytest
import torch
from peft import LoraConfig

from testing.chats import Keypad, chat_tokenizer, chats, turns
from testing.reference_experts import offered_fp8_experts
from testing.runs import SMALL_K3, arguments, column, dataset, generate_calls, recorded, rows, training
from trl_fp8.features.router_replay.routes import Routes
from trl_fp8.recipe.names import NOWHERE


pytestmark = pytest.mark.engine

# FP8 linears and KV cache of these random models turn a tenth of the routes;
# a route that belongs to another token agrees in one of 28 (two of eight experts)
ALIGNED = 0.4
ROUNDING = 5e-6  # of two log_softmax in FP32
OFF = {"fp8_weights": False, "kv_cache_dtype": "auto", "use_vllm": True}


@pytest.fixture(scope="module")
def moe(checkpoint):
    return checkpoint("qwen3_moe", num_experts=8)


def history(trainer):
    kept = ("loss", "grad_norm", "reward", "mismatch/k3_kl")
    return [[row[name] for name in kept] for row in rows(trainer)]


def test_monitoring_changes_nothing_and_says_how_often_routers_disagree(moe, tmp_path):
    found = []
    for mode in ("off", "monitor"):
        with training(moe, arguments(tmp_path, bf16=False, router_replay=mode)) as trainer:
            trainer.train()
            found.append(history(trainer))
            has_metrics = ["router/disagreement" in row for row in rows(trainer)]
    assert found[0] == found[1] and all(has_metrics)
    assert all(0 < row["router/disagreement"] == row["router/own_disagreement"] < ALIGNED for row in rows(trainer))


def forwards(trainer):
    """For each forward of the first router: whether it computes gradients, and the experts that it used."""
    router, seen = trainer.model.model.layers[0].mlp.gate, []
    router.register_forward_hook(
        lambda module, args, output: seen.append((torch.is_grad_enabled(), output[-1].clone()))
    )
    return seen


def replayed(trainer):
    """The routes that each loss was computed with."""
    return recorded(trainer, "compute_loss", lambda _, model, inputs, *__, **___: inputs.get("routed_experts"))


def as_set(routes):
    return {tuple(row.flatten().tolist()) for row in routes.long()}


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_training_uses_the_experts_of_the_rollouts(gradient_checkpointing, moe, tmp_path):
    args = arguments(tmp_path, bf16=False, router_replay="rollout", gradient_checkpointing=gradient_checkpointing)
    with training(moe, args) as trainer:
        batches = recorded(trainer, "_generate_and_score_completions", lambda output, *_: output["routed_experts"])
        generated = recorded(trainer.vllm_generation.llm, "generate", lambda outputs, *_, **__: outputs)
        given, seen = replayed(trainer), forwards(trainer)
        trainer.train()
    assert all(row["router/disagreement"] == 0 < row["router/own_disagreement"] < ALIGNED for row in rows(trainer))
    assert all(0 < row["mismatch/k3_kl"] < SMALL_K3 and math.isfinite(row["loss"]) for row in rows(trainer))
    used = [experts for gradients, experts in seen if gradients]
    forwards_per_loss = 2 if gradient_checkpointing else 1
    assert len(used) == 3 * forwards_per_loss
    for step, (batch, routes, outputs) in enumerate(zip(batches, given, generated, strict=True)):
        assert as_set(batch) == as_set(routes)  # TRL shuffles
        known = routes[:, :, 0] != NOWHERE
        fed = sum(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1 for output in outputs)
        assert known.all(-1).sum() == fed  # all but the last token of each
        for again in range(forwards_per_loss):
            experts = used[forwards_per_loss * step + again].view(known.shape)
            assert torch.equal(experts[known], routes[:, :, 0][known].long())


def test_later_updates_replay_the_old_log_prob_pass(moe, tmp_path):
    """Two updates a generation: after the first the policy has changed, its routes have not."""
    flags = {"num_iterations": 2, "learning_rate": 3e-2, "max_steps": 2, "router_replay": "policy"}
    with training(moe, arguments(tmp_path, bf16=False, **flags)) as trainer:
        seen = forwards(trainer)
        trainer.train()
        updates = [used.view(8, -1, 2) for gradients, used in seen if gradients]
        scored = [
            used.view(8, -1, 2) for gradients, used in seen if not gradients and used.numel() == updates[0].numel()
        ]
        assert trainer.feature(Routes).replay._routes_BSLK is None
    assert len(updates) == 2 and len(scored) == 1
    assert as_set(scored[0]) == as_set(updates[0]) == as_set(updates[1])


def test_without_fp8_the_engines_routes_are_the_trainers(moe, tmp_path):
    """Routers of one policy in BF16 on both sides; an error of one place, of padding or of layer would leave 0.8."""
    with training(moe, arguments(tmp_path, router_replay="monitor", **OFF)) as trainer:
        trainer.train()
        assert trainer.recipe is not None and not trainer.recipe.fp8_weights
        assert all(row["router/disagreement"] < 0.1 for row in rows(trainer))


@pytest.mark.parametrize(
    "flags, lora",
    [
        ({"vllm_importance_sampling_correction": False, "beta": 0.04}, False),
        ({"vllm_importance_sampling_correction": False, "beta": 0.04}, True),
        ({"mask_truncated_completions": True}, False),
        ({"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2}, False),
    ],
    ids=["reference-first", "adapters-off-first", "truncations-masked", "several-updates"],
)
def test_rollout_replay_goes_with_what_trl_does_around_it(flags, lora, moe, tmp_path):
    adapter = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]) if lora else None
    args = arguments(tmp_path, bf16=False, router_replay="rollout", **flags)
    with training(moe, args, peft_config=adapter) as trainer:
        begun = recorded(
            trainer.feature(Routes).replay, "begin", lambda _, routes, replay, **__: (routes is not None, replay)
        )
        trainer.train()
    assert all(math.isfinite(row["loss"]) for row in rows(trainer))
    updates = 3 * args.gradient_accumulation_steps
    assert begun.count((True, True)) >= updates
    # the reference routes itself: an untouched policy is not its copy
    assert column(trainer, "kl_floor") == ([column(trainer, "kl")[0]] if args.beta else [])
    assert all(0 < floor < SMALL_K3 for floor in column(trainer, "kl_floor"))
    scored = [row for row in rows(trainer) if "router/disagreement" in row]
    assert bool(scored) == args.vllm_importance_sampling_correction
    assert all(row["router/disagreement"] == 0 and row["router/own_disagreement"] < ALIGNED for row in scored)


def test_conversations_with_tools_replay_every_turn(moe, tmp_path):
    budget = {"max_completion_length": 64, "max_tool_calling_iterations": 2, "vllm_max_model_length": 96}
    args = arguments(tmp_path, bf16=False, generation_kwargs={"max_tokens": 8}, router_replay="rollout", **budget)
    options = {
        "tools": [Keypad().press],
        "train": chats(),
        "processing_class": chat_tokenizer(),
        "reward_funcs": turns,
    }
    with training(moe, args, **options) as trainer:
        generations = generate_calls(trainer)
        batches = recorded(trainer, "_generate_and_score_completions", lambda output, *_: output)
        trainer.train()
    assert len(generations) > len(batches)  # there were turns
    for row, batch in zip(rows(trainer), batches, strict=True):
        assert row["router/disagreement"] == 0 < row["router/own_disagreement"] < ALIGNED
        known = (batch["routed_experts"][:, :, 0, 0] != NOWHERE).sum(1)
        fed = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1) - 1
        assert (known <= fed).all() and (known == fed).any()  # less where a tool had the last word


def test_evaluation_replays_too(moe, tmp_path):
    args = arguments(tmp_path, bf16=False, max_steps=1, router_replay="rollout", eval_strategy="steps", eval_steps=1)
    with training(moe, args, eval_dataset=dataset(8)) as trainer:
        trainer.train()
    evaluated = [row for row in trainer.state.log_history if "eval_router/disagreement" in row]
    assert evaluated and all(row["eval_router/disagreement"] == 0 for row in evaluated)


LORA_ON_EXPERTS = LoraConfig(
    task_type="CAUSAL_LM",
    target_modules=["q_proj"],
    target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    init_lora_weights=False,  # loud from the start
)


@pytest.mark.parametrize("flags", [{}, {"fp8_forward": "one_forward"}], ids=["plain", "one_forward"])
@pytest.mark.parametrize("lora", [None, LORA_ON_EXPERTS], ids=["all weights", "LoRA"])
def test_fp8_experts_train_with_replay(lora, flags, moe, tmp_path):
    """As on CUDA: weights of experts quantized and synced at every step, read back, and routes replayed."""
    args = arguments(tmp_path, bf16=False, router_replay="rollout", learning_rate=1e-2, max_steps=2, **flags)
    with offered_fp8_experts(fused_activation=True), training(moe, args, peft_config=lora) as trainer:
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
        assert trainer.recipe.fp8_experts and trainer.vllm_generation.audit_failures == 0
        assert trainer.vllm_generation.numerics.kernels["Fp8MoeBackend.TRITON"] == 2
        changed = {n for n, p in trainer.model.named_parameters() if n in before and not torch.equal(p, before[n])}
    # weights of routers and experts, or adapters of both kinds of layers
    learned = ("experts", "gate.weight") if lora is None else ("experts", "q_proj.lora_B")
    assert all(any(part in name for name in changed) for part in learned)
    for row in rows(trainer):
        assert row["router/disagreement"] == 0 and row["mismatch/k3_kl"] < SMALL_K3
        assert (row["router/own_disagreement"] == 0) == (row["mismatch/logp_difference_max"] < ROUNDING) == bool(flags)
        assert row["fp8/dead_blocks"] == 0


@pytest.mark.parametrize(
    "flags",
    [
        {"router_replay": "monitor"},
        {"router_replay": "rollout", "gradient_checkpointing": True},
        {"router_replay": "policy", "num_iterations": 2, "max_steps": 4},
    ],
    ids=lambda flags: flags["router_replay"],
)
def test_a_policy_that_follows_the_engine_chooses_as_it_does(flags, moe, tmp_path):
    """With every kind of replay, as weights change; experts are unquantized, linears and KV cache FP8."""
    with training(moe, arguments(tmp_path, fp8_forward="one_forward", learning_rate=1e-2, **flags)) as trainer:
        trainer.train()
    scored = [row for row in rows(trainer) if "router/disagreement" in row]
    assert len(scored) == (2 if "num_iterations" in flags else 3)
    for row in scored:
        assert row["router/disagreement"] == row["router/own_disagreement"] == 0
        assert row["mismatch/logp_difference_max"] < ROUNDING and math.isfinite(row["grad_norm"])


def test_models_without_routers_are_refused_by_flag(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="router_replay='rollout': Qwen3ForCausalLM is not a mixture of experts"):
        with training(checkpoint("qwen3"), arguments(tmp_path, router_replay="rollout")):
            pass


def test_rollouts_from_elsewhere_are_refused(moe, tmp_path):
    def made_up(prompts, trainer):
        ids = trainer._tokenize_prompts(prompts)[0]
        completions = [[5, 6, 7]] * len(ids)
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[-1.0] * 3] * len(ids)}

    with training(moe, arguments(tmp_path, router_replay="rollout"), rollout_func=made_up) as trainer:
        with pytest.raises(RuntimeError, match="8 of 8 rollouts were not generated by the trainer's engine"):
            trainer.train()
