"""The reference of `beta > 0` is computed as the policy is: an untouched policy has no KL divergence from it."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback

from testing.runs import arguments, column, recorded, training
from trl_fp8.engine.vllm.policy_weights import reference_parameters
from trl_fp8.features.kv_cache.kv_cache import KVCache
from trl_fp8.features.one_forward.followed_reference import ReferenceWeights
from trl_fp8.features.one_forward.following import Following


pytestmark = pytest.mark.engine

BETA = 0.04
FULL = {"fp8_forward": "one_forward"}
SHARED = {"fp8_base": True, **FULL}
MOVING = {"beta": BETA, "learning_rate": 1e-3, "max_steps": 2}
# What quantization makes of the KL divergence of this model from itself is 0.003 and more, e4m3 in the KV cache 0.0009
VISIBLE = 5e-4
ADAPTERS = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"], "modules_to_save": ["norm"]}


def lora(**options):
    return LoraConfig(**(ADAPTERS | {"task_type": "CAUSAL_LM"} | options))


def batches(trainer):
    """Each scored batch, and the policy's parameters then."""

    def note(batch, *_, **__):
        return batch, {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}

    return recorded(trainer, "_generate_and_score_completions", note)


def scored(trainer, batch, model):
    """Log-probs of the batch's completions."""
    ids, mask = (torch.cat([batch[f"{part}_{of}"] for part in ("prompt", "completion")], 1) for of in ("ids", "mask"))
    return trainer._get_per_token_logps_and_entropies(model, ids, mask, batch["completion_ids"].shape[1])[0]


def k3(trainer, batch, reference):
    """Mean over tokens of the KL divergence of the policy from a reference with these log-probs."""
    log_ratio, real = reference - scored(trainer, batch, trainer.model), batch["completion_mask"]
    return ((log_ratio.exp() - log_ratio - 1) * real).sum() / real.sum()


@torch.no_grad()
def in_high_precision(trainer, batch):
    """The log-probs of the reference as TRL computes them."""
    before = trainer.features
    assert trainer.feature(KVCache).reference_hook.scales_L3 is None
    trainer.features = ()
    try:
        return scored(trainer, batch, trainer.ref_model)
    finally:
        trainer.features = before


def restore(trainer, parameters):
    """Give the policy, and the engine, the weights that the policy had; the KV scales stay."""
    trainer.model.load_state_dict(parameters, strict=False)
    trainer.vllm_generation.send_weights()


def gradients(trainer):
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.zero_grad()
    return found


def distance(one, other):
    squares = [[(one[name] - other[name]).square().sum(), other[name].square().sum()] for name in other]
    error, norm = torch.tensor(squares).sum(0).sqrt().tolist()
    return error / norm


def test_a_full_models_reference_follows_what_trl_makes_of_it(checkpoint, tmp_path):
    """With sync_ref_model, which brings it to the policy after each step, and two optimizer steps on each batch."""
    flags = {"num_iterations": 2, "max_steps": 4, "bf16": False, "use_bias_correction_kl": False}
    flags |= {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}
    with training(checkpoint("qwen3"), arguments(tmp_path, **(MOVING | FULL | flags))) as trainer:
        seen = batches(trainer)
        trainer.train()
        first, moved, synced, moved_again = column(trainer, "kl")
        assert first == synced == 0.0 and moved > 0 and moved_again > 0
        assert max(column(trainer, "mismatch/logp_difference_mean")) < 1e-5

        # The reference of the second batch was the policy of that time: scored as a policy it has the same bits
        (_, start), (batch, then) = seen
        assert not torch.equal(start["model.norm.weight"], then["model.norm.weight"])
        now = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        restore(trainer, then)
        reference = scored(trainer, batch, trainer.model).detach()
        assert torch.equal(reference, batch["ref_per_token_logps"])
        # of an untouched policy the KL term has no gradient, but for a reference in high precision
        high = in_high_precision(trainer, batch)
        k3(trainer, batch, batch["ref_per_token_logps"]).backward()
        assert not any(gradient.any() for gradient in gradients(trainer).values())
        (with_high := k3(trainer, batch, high)).backward()
        assert with_high > VISIBLE and all(gradient.any() for gradient in gradients(trainer).values())

        # A step later the gradient of TRL's loss without advantages is that of the KL divergence, times beta
        restore(trainer, now)
        inputs = batch | {"advantages": torch.zeros_like(batch["advantages"]), "num_items_in_batch": None}
        trainer.loss_type = "bnpo"
        trainer.compute_loss(trainer.model, inputs).backward()
        found = gradients(trainer)
        divergence = k3(trainer, batch, reference)
        (BETA * divergence).backward()
        trainer._end_loss()
        expected = gradients(trainer)
        assert divergence.item() == pytest.approx(trainer.logged["kl"][-1], rel=1e-5)
        # sums over tokens in FP32, in another order
        assert distance(found, expected) < 1e-5
        (BETA * k3(trainer, batch, high)).backward()
        assert distance(gradients(trainer), expected) > 0.05


class Resets(TrainerCallback):
    """Brings the reference to the policy after each step, each time in another way, as ProRL does now and then."""

    @torch.no_grad()
    def on_step_end(self, args, state, control, **kwargs):
        policy, reference = self.trainer.model, self.trainer.ref_model
        if state.global_step == 1:
            reference.load_state_dict(policy.state_dict())
        for name, parameter in policy.named_parameters() if state.global_step == 2 else ():
            reference.get_parameter(name).data.copy_(parameter.data)  # which moves no version counter
        for name, parameter in policy.named_parameters() if state.global_step == 3 else ():
            path, _, last = name.rpartition(".")
            setattr(reference.get_submodule(path), last, torch.nn.Parameter(parameter.detach().clone()))


def test_a_reference_that_a_callback_changes_is_followed(checkpoint, tmp_path):
    callback, flags = Resets(), MOVING | FULL | {"max_steps": 4}
    with training(checkpoint("qwen3"), arguments(tmp_path, **flags), callbacks=[callback]) as trainer:
        callback.trainer = trainer
        syncs = recorded(trainer.vllm_generation.delivery, "send", lambda seconds, part, *_: part)
        trainer.train()
        assert column(trainer, "kl") == [0.0] * 4
        reference = trainer.feature(Following).followed_reference._weights._part
        assert syncs.count(reference) == 4
        # and one that has not changed is not written again
        scored(trainer, trainer._buffered_inputs[0], trainer.ref_model)
        scored(trainer, trainer._buffered_inputs[0], trainer.ref_model)
        assert syncs.count(reference) == 4
        trainer.ref_model = copy.deepcopy(trainer.model)
        with pytest.raises(ValueError, match=r"beta=0.04.*was replaced.*ref_model\.load_state_dict"):
            scored(trainer, trainer._buffered_inputs[0], trainer.ref_model)


def test_a_reference_that_is_not_written_anew_is_seen(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(ReferenceWeights, "_sums", lambda weights: torch.zeros(1, dtype=torch.int64))
    flags = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0, "kv_cache_dtype": "auto"}
    with training(checkpoint("qwen3"), arguments(tmp_path, **(MOVING | FULL | flags))) as trainer:
        trainer.train()
        assert column(trainer, "kl")[1] > VISIBLE
        # what was written is proven each time
        weights = trainer.feature(Following).followed_reference._weights
        next(iter(weights._spares.values())).view(torch.uint8)[0, 0] ^= 1
        batch = trainer._buffered_inputs[0]
        with pytest.raises(RuntimeError, match="1 tensors of the reference have changed since they were written"):
            scored(trainer, batch, trainer.ref_model)
        trainer.vllm_generation.delivery.verify()  # and the engine has the policy again
        # written anew it is what TRL made of it after the last step: the policy
        assert torch.equal(*(scored(trainer, batch, model) for model in (trainer.ref_model, trainer.model)))
        # a rank whose own engine is whole raises with the one that found a difference
        weights._reduce_max = lambda verdict: verdict[1].fill_(1)
        with pytest.raises(RuntimeError, match="tensors of the reference on another rank .*see its log"):
            scored(trainer, batch, trainer.ref_model)


@pytest.mark.parametrize("from_peft_model", [False, True], ids=["new", "from_peft_model"])
@pytest.mark.parametrize("flags", [FULL, SHARED], ids=["merged", "shared"])
def test_a_policy_with_adapters_is_its_own_reference(flags, from_peft_model, checkpoint, tmp_path):
    """Its base, or of a `PeftModel` that was given TRL's copy of its adapter."""
    model, config = checkpoint("qwen3"), {"peft_config": lora()}
    if from_peft_model:
        torch.manual_seed(0)
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        model = get_peft_model(whole, lora(init_lora_weights=False))
        config = {}
    with training(model, arguments(tmp_path, **(MOVING | flags)), **config) as trainer:
        assert ("ref" in trainer.model.peft_config) == from_peft_model
        seen = batches(trainer)
        trainer.train()
        (_, start), (batch, _) = seen
        first, moved = column(trainer, "kl")
        assert first == 0.0 and moved > 0 and max(column(trainer, "mismatch/logp_difference_mean")) < 1e-5
        restore(trainer, start)
        assert torch.equal(scored(trainer, batch, trainer.model), batch["ref_per_token_logps"])


@pytest.mark.parametrize(
    "flags, from_peft_model",
    [(FULL, False), (FULL, True), (SHARED, True)],
    ids=["new", "from_peft_model", "shared-given"],
)
def test_base_weights_that_train_beside_adapters_are_the_references_too(flags, from_peft_model, checkpoint, tmp_path):
    """TRL disables the adapters of the policy as it is now. LongLoRA trains norms and embeddings beside adapters."""
    model, config = checkpoint("qwen3"), {"peft_config": lora(modules_to_save=None)}
    if from_peft_model:
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        model, config = get_peft_model(whole, lora(modules_to_save=None)), {}
        free_norms(model)
    args = arguments(tmp_path, **(MOVING | flags | {"learning_rate": 1e-2}))
    with training(model, args, **config) as trainer:
        assert ("ref" in trainer.model.peft_config) == from_peft_model
        free_norms(trainer.model)
        seen = batches(trainer)
        trainer.train()
        (_, start), (batch, then) = seen
        norm = next(name for name in start if name.endswith("layers.0.input_layernorm.weight"))
        assert not torch.equal(start[norm], then[norm])
        # the policy of that time with its adapters as they were in the beginning, which add nothing
        restore(trainer, then | {name: start[name] for name in start if ".lora_" in name})
        assert torch.equal(scored(trainer, batch, trainer.model), batch["ref_per_token_logps"])
        restore(trainer, start)
        assert not torch.equal(scored(trainer, batch, trainer.model), batch["ref_per_token_logps"])


def free_norms(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name.endswith("norm.weight"))


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_a_simulated_cache_is_the_references_too(adapted, checkpoint, tmp_path):
    args = arguments(tmp_path, **(MOVING | {"simulate_kv_cache": True}))
    with training(checkpoint("qwen3"), args, **({"peft_config": lora()} if adapted else {})) as trainer:
        seen = batches(trainer)
        trainer.train()
        first, moved = column(trainer, "kl")
        assert first == 0.0 < moved
        if not adapted:
            batch, start = seen[0]
            restore(trainer, start)
            assert k3(trainer, batch, in_high_precision(trainer, batch)) > VISIBLE


def test_a_reference_has_the_weights_of_its_adapter(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"))
    whole = dict(reference_parameters(model))
    assert whole.keys() == dict(model.named_parameters()).keys()
    adapted = get_peft_model(model, lora())
    adapted.add_adapter("ref", lora())
    copies = adapted.base_model.model.model.norm
    for active in ("default", "ref"):
        adapted.set_adapter(active)
        found = dict(reference_parameters(adapted))
        assert found.keys() == whole.keys() and found["model.norm.weight"] is copies.modules_to_save[active].weight
    with adapted.disable_adapter():
        found = dict(reference_parameters(adapted))
        assert found.keys() == whole.keys() and found["model.norm.weight"] is copies.original_module.weight
