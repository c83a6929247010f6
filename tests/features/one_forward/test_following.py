"""Training with a full FP8 forward: the policy's log-probs stay the engine's while the weights move."""

import copy
import gc
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback

from testing import engines, tiny_models
from testing.fake_engine import followed
from testing.runs import arguments, column, dataset, recorded, training
from trl_fp8.engine.protocol import EngineNumerics
from trl_fp8.features.kv_cache.kv_cache import KVCache
from trl_fp8.features.one_forward.followed_linear import FollowedLinear
from trl_fp8.features.one_forward.following import Following
from trl_fp8.features.truncated_sampling.truncation import Truncation
from trl_fp8.quantization.formats import TENSOR, ActivationScaling
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.upstream.vllm import engine_model


pytestmark = pytest.mark.engine

FULL = {"fp8_forward": "one_forward"}
MISMATCH = "sampling/sampling_logp_difference/mean"
# Both sides take a log_softmax of the same logits in FP32, in other orders: a few 2**-24 of magnitudes around 5
ROUNDING = 1e-5
# What quantization alone makes of this model's log-probs is 0.05 and more (test_against_engine.py)
VISIBLE = 1e-3


def run(model, folder, **flags):
    with training(model, arguments(folder, **flags)) as trainer:
        trainer.train()
    return trainer


@pytest.mark.parametrize(
    "flags",
    [
        {"bf16": False},
        {"gradient_checkpointing": True, "optim": "adamw_torch_fused"},
        {"num_iterations": 2, "max_steps": 4},
        {"fp8_backward": "fp8", "bf16": False},
        {"fp8_weight_format": "tensor", "bf16": False},
        {"fp8_scale_format": "fp32", "fp8_weight_format": "tensor", "fp8_backward": "fp8"},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_the_mismatch_stays_at_rounding_while_weights_change(flags, checkpoint, tmp_path):
    model = checkpoint("qwen3")
    trainer = run(model, tmp_path, **(FULL | flags))
    mismatch = column(trainer, MISMATCH)
    fresh = 2 if "num_iterations" in flags else 3
    assert len(mismatch) == fresh and max(mismatch) < ROUNDING, mismatch
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    moved = {name: value for name, value in trainer.model.state_dict().items() if not torch.equal(value, start[name])}
    assert len(moved) == len(start)
    assert any(
        part.batch_invariant for part in trainer.vllm_generation.parts
    )  # compiled, the engine would keep its roundings
    assert min(column(trainer, "grad_norm")) > 0


def test_without_one_forward_the_mismatch_is_that_of_quantization(checkpoint, tmp_path):
    trainer = run(checkpoint("qwen3"), tmp_path, simulate_kv_cache=True)
    mismatch = column(trainer, MISMATCH)
    assert min(mismatch) > VISIBLE, mismatch
    assert not any(part.batch_invariant for part in trainer.vllm_generation.parts)


def bare_trainer(model, recipe, sharded=False, **flags):
    """Return an object with what one forward reads of a trainer before there is an engine."""
    defaults = {
        "fp8_forward": "one_forward",
        "fp8_base": False,
        "fp8_backward": "bf16",
        "fp8_gemm_backend": "fake_quant",
    }
    args = SimpleNamespace(**defaults | flags)
    return SimpleNamespace(
        args=args,
        recipe=recipe,
        model=model,
        is_fsdp_enabled=sharded,
        is_deepspeed_enabled=False,
        feature=lambda kind: None,
    )


def test_contradicting_flags_are_refused_before_an_engine_starts():
    model, recipe = tiny_models.build("qwen3"), FP8Recipe(("a",), format=TENSOR)
    before, _ = followed(model)  # of an earlier trainer
    Following(bare_trainer(model, recipe))
    assert not before.modules
    with pytest.raises(ValueError, match="fp8_gemm_backend='scaled_mm' on CPU"):
        Following(bare_trainer(model, recipe, fp8_gemm_backend="scaled_mm"))
    with pytest.raises(
        ValueError, match="one_forward' with a policy of type 'glm4_moe': only the layers of cohere, g"
    ):
        Following(bare_trainer(tiny_models.build("glm4_moe"), recipe))
    model.model.embed_tokens.__class__ = type("OddEmbedding", (torch.nn.Embedding,), {"forward": lambda *args: None})
    with pytest.raises(ValueError, match="the model's embedding is a OddEmbedding"):
        Following(bare_trainer(model, recipe))


def test_an_engine_without_fp8_kernels_has_nothing_to_call():
    trainer = bare_trainer(tiny_models.build("qwen3"), FP8Recipe(("a", "b"), fp8_experts=("c",)))
    expected = "2 linear layers and 1 layers of experts.*but none of the kernels.*Remove linear_backend"
    with pytest.raises(RuntimeError, match=expected):
        Following(trainer).engine_started(EngineNumerics(kernels={}), None)
    of_a_batch = EngineNumerics(kernels={"SomeKernel": 2}, linears=ActivationScaling("fp32", scope="tensor"))
    with pytest.raises(RuntimeError, match=r"\['SomeKernel'\] quantize activations with one scale per batch"):
        Following(trainer).engine_started(of_a_batch, None)
    quantizing = EngineNumerics(kernels={"SomeKernel": 2})
    with pytest.raises(RuntimeError, match="the engine offers no kernels that the trainer could call"):
        Following(trainer).engine_started(quantizing, None)


def test_the_trained_policy_is_saved_and_generates_in_high_precision(checkpoint, tmp_path):
    with training(checkpoint("qwen3"), arguments(tmp_path, **FULL)) as trainer:
        assert trainer.args.bf16
        trainer.train()
        mismatch = column(trainer, MISMATCH)
        trainer.save_model(str(tmp_path / "saved"))
        policy = trainer.model
        before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
        assert {parameter.dtype for parameter in before.values()} == {torch.float32}
        ids = torch.tensor([[5, 6, 7, 8]])
        generated = policy.generate(input_ids=ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert generated.shape == (1, 10) and torch.equal(generated[:, :4], ids)
    assert len(mismatch) == 3 and max(mismatch) < ROUNDING, mismatch
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert type(saved.lm_head) is torch.nn.Linear
    assert all(torch.equal(parameter, before[name]) for name, parameter in saved.named_parameters())


@pytest.fixture
def stale(monkeypatch):
    """Count the linears, of 14, of which the engine holds other weights than the policy when a loss begins."""
    begin_loss, found = Following.begin_loss, []

    def begun(following, inputs):
        begin_loss(following, inputs)
        linears = [module for module in following.forward.modules.values() if getattr(module, "is_fp8", False)]
        found.append(sum(not holds(linear) for linear in linears))
        assert len(linears) == 14

    monkeypatch.setattr(Following, "begin_loss", begun)
    return found


@pytest.mark.parametrize("is_synced_by_trl", [True, False])
def test_each_optimizer_step_reaches_the_engine_before_the_next_forward(
    is_synced_by_trl, checkpoint, tmp_path, monkeypatch, stale
):
    """One that is fused moves no version counter: it is the callback that tells."""
    if not is_synced_by_trl:
        monkeypatch.setattr(Following, "on_optimizer_step", lambda *args, **kwargs: None)
    flags = {"num_iterations": 2, "max_steps": 4, "optim": "adamw_torch_fused", "learning_rate": 1e-2}
    trainer = run(checkpoint("qwen3"), tmp_path, **(FULL | flags))
    assert stale == ([0] * 4 if is_synced_by_trl else [0, 14, 0, 14])
    assert max(column(trainer, MISMATCH)) < ROUNDING
    # e4m3 has steps of at most 1/8: a uniform error of at most 1/8 / sqrt(12)
    assert max(column(trainer, "fp8/weight_relative_error")) < 0.04


def holds(linear):
    """Whether the engine holds the codes of the layer's weight."""
    fresh, codes = linear.one_forward.backward.quantize_weights([linear.weight])[0], linear.engine.codes(linear.name)
    return torch.equal(codes.qdata.view(torch.uint8), fresh.qdata.view(torch.uint8))


@pytest.mark.parametrize("backward", ["bf16", "fp8"])
def test_between_forward_and_backward_no_copy_of_a_weight_is_kept(backward, checkpoint, tmp_path):
    """Weights gathered for a forward, under FSDP2 or ZeRO-3, would otherwise stay until the backward."""
    args = arguments(tmp_path, max_steps=1, fp8_backward=backward, **FULL)
    with training(checkpoint("qwen3"), args) as trainer:
        trainer.train()
        saved_tensors, engine_tensors = [], trainer.vllm_generation.engine.layout.held.values()
        lasting = {tensor.untyped_storage().data_ptr() for tensor in [*trainer.model.parameters(), *engine_tensors]}
        keep = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved_tensors.append(tensor) or tensor, lambda tensor: tensor
        )
        with trainer.feature(Following).forward.switched(on=True), trainer.feature(KVCache).as_rollouts_saw(), keep:
            trainer.model(input_ids=torch.tensor([[5, 6, 7]]))
        weights = [
            tensor for tensor in saved_tensors if tensor.numel() >= 64 * 128
        ]  # the smallest; activations have 3 rows
        assert len(weights) >= 15 and len(saved_tensors) > 2 * len(weights)
        assert all(tensor.untyped_storage().data_ptr() in lasting for tensor in weights)


def test_another_training_begins_with_the_weights_that_are_there(checkpoint, tmp_path, monkeypatch):
    """TRL takes weights of the same step for the same, and steps are counted from 0 again."""
    args = arguments(tmp_path, **(FULL | {"max_steps": 1, "learning_rate": 1e-2, "optim": "adamw_torch_fused"}))
    with training(checkpoint("qwen3"), args) as trainer:
        with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
            stopped.setattr(trainer, "compute_loss", Mock(side_effect=KeyboardInterrupt))
            trainer.train()
        engines.perturb(trainer.model, seed=1)
        for _ in range(2):
            trainer.train()
            assert not trainer.feature(Following).forward.on  # outside of a training, the policy computes by itself
            linears = [module for module in trainer.model.modules() if isinstance(module, FollowedLinear)]
            assert not all(holds(linear) for linear in linears if linear.is_fp8)  # an optimizer step came after
            assert column(trainer, MISMATCH)[-1] < ROUNDING


class Averages(TrainerCallback):
    """Puts other weights into the policy for each evaluation, and its own back afterwards."""

    evaluated = 0

    def on_step_end(self, args, state, control, model, **kwargs):
        self.own = copy.deepcopy(model.state_dict())
        engines.perturb(model, seed=state.global_step)

    def on_evaluate(self, args, state, control, model, **kwargs):
        model.load_state_dict(self.own)
        self.evaluated += 1


@pytest.mark.parametrize(
    "flags, bound",
    [
        (FULL, ROUNDING),
        (FULL | {"num_iterations": 2, "max_steps": 4}, ROUNDING),
        (FULL | {"kv_calibration": "policy"}, ROUNDING),
        # FP8 moves log-probs by less than 0.3 on average (tests/trainer/test_trainer.py)
        ({}, 0.3),
    ],
    ids=["full", "full-two-iterations", "full-policy-scales", "off"],
)
def test_an_evaluation_of_other_weights_leaves_none_of_them_in_the_engine(flags, bound, checkpoint, tmp_path, stale):
    callback, evaluation = Averages(), {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    options = {"eval_dataset": dataset(4), "callbacks": [callback]}
    with training(checkpoint("qwen3"), arguments(tmp_path, **evaluation, **flags), **options) as trainer:
        trainer.train()
        assert callback.evaluated == trainer.args.max_steps
        for kind in ("", "eval_"):
            assert max(column(trainer, f"{kind}mismatch/logp_difference_mean")) < bound
        assert bool(stale) == bool(flags) and not any(stale)
        for seed in (1, 2) if flags else ():  # two evaluations of one step
            engines.perturb(trainer.model, seed)
            callback.own = copy.deepcopy(trainer.model.state_dict())
            metrics = trainer.evaluate()
            assert metrics["eval_mismatch/logp_difference_mean"] < bound


def test_a_policy_that_outlives_its_trainer_holds_no_engine(checkpoint, tmp_path):
    with training(checkpoint("qwen3"), arguments(tmp_path, max_steps=1, **FULL)) as trainer:
        trainer.train()
        policy, engine = trainer.model, weakref.ref(engine_model(trainer.vllm_generation.llm))
    trainer.vllm_generation = None
    del trainer
    for _ in range(2):  # the first one ends the trainer, and what its policy held is free for the second
        gc.collect()
    assert not any(isinstance(module, FollowedLinear) for module in policy.modules())
    assert engine() is None


def test_an_engine_ends_with_its_trainer_in_one_run_of_the_garbage_collector(checkpoint, tmp_path):
    """A second one may never come, as in a process that freezes what is alive, and its port stays taken until then."""
    with training(checkpoint("qwen3"), arguments(tmp_path, max_steps=1, **FULL)) as trainer:
        trainer.train()
        engine = weakref.ref(engine_model(trainer.vllm_generation.llm))
    del trainer
    gc.collect()
    assert engine() is None


def test_a_loss_outside_of_a_training_step_ends_with_it_or_before_the_next_generation(checkpoint, tmp_path):
    args = arguments(tmp_path, max_steps=1, top_k=8, **FULL)
    with training(checkpoint("qwen3"), args) as trainer:
        trainer.train()
        hook, truncation = trainer.feature(KVCache).hook, trainer.feature(Truncation)
        trainer.loss_type, inputs = "bnpo", trainer._buffered_inputs[0] | {"num_items_in_batch": None}

        def under_way():
            return trainer.feature(Following).forward.on, hook.scales_L3 is not None, truncation._current is not None

        with torch.no_grad():
            trainer.compute_loss(trainer.model, inputs)
        assert under_way() == (False, False, False)
        trainer.compute_loss(trainer.model, inputs).backward()
        assert under_way() == (True, True, True)  # gradient checkpointing would run the forward again
        begun = recorded(trainer.vllm_generation, "generate", lambda *_, **__: under_way())
        trainer._generate([row["prompt"] for row in dataset(8)])
        assert begun == [(False, False, False)]


def test_a_loss_outside_of_a_training_step_leaves_the_reference_alone(checkpoint, tmp_path):
    """Adapters that are not zero: the engine's merged weights are the policy's, not the reference's."""
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    args = arguments(tmp_path, max_steps=1, beta=0.1, **FULL)
    with training(checkpoint("qwen3"), args, peft_config=lora) as trainer:
        trainer.train()
        following, ids = trainer.feature(Following), torch.tensor([[5, 6, 7, 8]])
        inputs = ids, torch.ones_like(ids), 2
        following.begin_loss({})
        with torch.no_grad(), trainer.model.disable_adapter():
            on = trainer._get_per_token_logps_and_entropies(trainer.model, *inputs)[0]
            following.end_loss()
            off = trainer._get_per_token_logps_and_entropies(trainer.model, *inputs)[0]
    assert torch.equal(on, off)
