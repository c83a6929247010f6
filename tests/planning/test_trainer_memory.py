"""The trainer's bytes, against those of a real training step and figures that stand elsewhere."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from testing import published, tiny_models
from trl_fp8.config import FP8GRPOConfig
from trl_fp8.features.one_forward.between import FollowedFusedMLP, FollowedMLP
from trl_fp8.planning.trainer_memory import Setup, engine_adapters, trainer_memory
from trl_fp8.policy.swapped import own_gradient
from trl_fp8.recipe.from_model import outline_of
from trl_fp8.recipe.names import checkpoint_name
from trl_fp8.recipe.recipe import recipe_for


GIB = 2**30


def setup(flags=None, **options):
    steps = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    return Setup(FP8GRPOConfig("run", use_cpu=True, bf16=False, **steps | (flags or {})), **options)


def memory(name, flags=None, ranks=1, **options):
    outline = published.outline(name)
    return trainer_memory(outline, setup(flags, **options), recipe_for(outline, tensor_parallel_size=ranks))


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [None, 8])
def test_states_are_those_of_a_training_step(dtype, rank):
    policy = AutoModelForCausalLM.from_config(tiny_models.config("qwen3"), dtype=getattr(torch, dtype))
    outline = outline_of(policy)
    if rank is not None:  # as TRL: PEFT makes adapters of a BF16 model FP32
        policy = get_peft_model(policy, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW(trained := [p for p in policy.parameters() if p.requires_grad])
    with torch.autocast("cpu", torch.bfloat16):
        policy(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.float().sum().backward()
    optimizer.step()
    moments = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    recipe = recipe_for(outline)
    counted = trainer_memory(outline, setup(lora_rank=rank, dtype=dtype), recipe)
    assert counted.weights == bytes_of(policy.parameters())
    assert counted.gradients == bytes_of(p.grad for p in trained)
    assert counted.optimizer == bytes_of(moments)
    if rank is not None:  # what the policy has beside the engine's FP8 weights
        rest = [p for name, p in policy.named_parameters() if checkpoint_name(name) not in recipe.fp8_tensors]
        shared = trainer_memory(outline, setup({"fp8_base": True}, lora_rank=rank, dtype=dtype), recipe)
        assert shared.weights == bytes_of(rest) < counted.weights
        assert (shared.gradients, shared.optimizer) == (counted.gradients, counted.optimizer)


@pytest.mark.parametrize("is_trained, casts", [(True, 1), (False, 3)])
def test_autocast_keeps_copies_of_trained_weights_through_a_forward(is_trained, casts):
    """Three uses under checkpointing, one cast: the copy is kept. Frozen weights are cast anew, as LoRA's base is."""
    linear = torch.nn.Linear(8, 8).requires_grad_(is_trained)
    x = torch.ones(2, 8, requires_grad=True)
    with torch.profiler.profile() as profile, torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            checkpoint(lambda: torch.nn.functional.linear(x.bfloat16(), linear.weight), use_reentrant=False)
    of_x = 3
    assert sum(event.key == "aten::_to_copy" and event.count or 0 for event in profile.key_averages()) == casts + of_x


@pytest.mark.parametrize(
    "name, options, gib",
    [  # gpu/README.md, "What fits on one GPU"
        ("Qwen/Qwen3-8B", {}, 122),
        ("Qwen/Qwen3-8B", {"dtype": "bfloat16"}, 61),
        ("Qwen/Qwen3-1.7B", {}, 26),
        # comments of examples/configs
        ("Qwen/Qwen3-8B", {"gpus": 8}, 15),
        ("Qwen/Qwen3-4B", {}, 60),
        ("Qwen/Qwen3-30B-A3B", {"gpus": 8}, 57),
        ("meta-llama/Llama-3.1-8B", {"gpus": 8}, 15),
        ("meta-llama/Llama-3.1-8B", {"gpus": 8, "flags": {"beta": 0.1}}, 15 + 4),
    ],
)
def test_states_are_those_that_are_stated_elsewhere(name, options, gib):
    assert round(memory(name, **options).states / GIB) == gib


def test_a_forward_needs_inputs_copies_and_logits():
    eight = memory("Qwen/Qwen3-8B", gpus=8, tokens=21504)
    assert eight.inputs == 36 * 21504 * 4096 * 2 and eight.copies == 0
    assert eight.head == 151936 * 4096 * 4  # on every rank
    one = memory("Qwen/Qwen3-4B", {"per_device_train_batch_size": 4}, tokens=5120)
    assert one.inputs == 36 * 4 * 5120 * 2560 * 4
    norms = 36 * (2 * 2560 + 2 * 128) + 2560
    assert one.copies == 2 * (memory("Qwen/Qwen3-4B").weights / 4 - 151936 * 2560 - norms)  # embeddings are not cast
    lora = memory("Qwen/Qwen3-8B", {"beta": 0.1}, lora_rank=32)
    assert lora.head == lora.copies == lora.reference == 0  # without adapters it is its own reference


def test_sharded_parameters_are_trained_in_fp32():
    """accelerate 1.15, utils/fsdp_utils.py: trainable parameters are cast up under mixed precision."""
    assert memory("Qwen/Qwen3-8B", gpus=8, dtype="bfloat16").states == memory("Qwen/Qwen3-8B", gpus=8).states
    frozen = memory("Qwen/Qwen3-8B", gpus=8, dtype="bfloat16", lora_rank=32).weights
    assert frozen < 0.6 * memory("Qwen/Qwen3-8B", gpus=8, lora_rank=32).weights


def test_a_large_micro_batch_leaves_less_of_a_gpu():
    """Of each token a layer saves some 64 bytes an element while its backward runs."""
    small, large = (
        memory("Qwen/Qwen3-8B", {"per_device_train_batch_size": n}, lora_rank=32, tokens=8704).uncounted
        for n in (1, 16)
    )
    assert large - small == 15 * 8704 * 4096 * 64 and large > 0.15 * 80 * GIB > small


def test_an_fp8_base_is_the_engines_unless_the_engine_is_split():
    """Qwen3-8B by hand: embedding, head and norms stay, in BF16; layers of an engine's two ranks do not make one."""
    options = {"lora_rank": 32, "dtype": "bfloat16", "tokens": 4096}
    base = memory("Qwen/Qwen3-8B", {"fp8_base": True}, **options)
    linears = 36 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 12288)
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    adapters = 4 * 36 * 32 * (2 * 8192 + 2 * 5120 + 3 * 16384)
    assert base.weights == 2 * (2 * 151936 * 4096 + norms) + adapters
    merged = memory("Qwen/Qwen3-8B", **options)
    assert merged.weights - base.weights == 2 * linears
    assert base.uncounted - merged.uncounted == 2 * 12288 * 4096  # one of gate, up and down, dequantized
    split = memory("Qwen/Qwen3-8B", {"fp8_base": True}, ranks=2, gpus=2, **options)
    whole = memory("Qwen/Qwen3-8B", {"fp8_base": True}, gpus=2, **options)
    assert whole.weights == base.weights / 2 and split.weights - whole.weights == linears * (1 + 4 / 128**2)
    experts = memory("Qwen/Qwen3-30B-A3B", {"fp8_base": True}, **options)
    assert experts.weights < 2.0 * GIB
    dequantized = experts.uncounted - memory("Qwen/Qwen3-30B-A3B", **options).uncounted
    assert dequantized == 2 * 128 * (1536 + 768) * 2048  # gate, up and down of one layer's experts
    followed = memory("Qwen/Qwen3-30B-A3B", {"fp8_base": True, "fp8_forward": "one_forward"}, lora_rank=32)
    assert followed.uncounted == memory("Qwen/Qwen3-30B-A3B", {"fp8_base": True}, lora_rank=32).uncounted


def test_under_one_forward_a_reference_has_its_weights_as_the_engine_has_them_too():
    """Qwen3-8B by hand: codes, scales of 128x128 blocks, output head and norms; the embedding is the model's own."""

    def reference(flags=None, **options):
        flags = {"beta": 0.1, "fp8_forward": "one_forward"} | (flags or {})
        return memory("Qwen/Qwen3-8B", flags, **options).reference

    linears, norms = 36 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 12288), 36 * (2 * 4096 + 2 * 128) + 4096
    held = linears * (1 + 4 / 128**2) + 2 * (151936 * 4096 + norms)
    assert reference() == memory("Qwen/Qwen3-8B").weights + held
    assert reference(gpus=8) == memory("Qwen/Qwen3-8B", gpus=8).weights + held
    assert reference(lora_rank=32) == held
    assert reference({"fp8_base": True}, lora_rank=32) == 36 * 32 * 2 * (3 * 10240 + 2 * 28672 + 8192 + 16384)
    assert reference({"beta": 0.0}) == 0


def test_an_engines_adapters_have_a_block_for_each_layer_that_it_fuses():
    outline = published.outline("Qwen/Qwen3-8B")
    qkv, gate_up = 3 * (4096 + 6144), 2 * (4096 + 24576)
    o, down = 4096 + 4096, 12288 + 4096
    assert engine_adapters(outline, 32) == 36 * 32 * (qkv + gate_up + o + down)


class Peak(TorchDispatchMode):
    """`most`: bytes of all tensors, but those of `given`, that were made inside the block and there at once."""

    def __init__(self, given):
        super().__init__()
        self.given = {tensor.untyped_storage()._cdata for tensor in given}
        self.made, self.most = {}, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for storage in [each.untyped_storage() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]:
            if storage._cdata not in self.given:  # a view of it
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.made = {key: held for key, held in self.made.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.made.values()))
        return result


def peak_of_backward(policy, *inputs, **options):
    """Bytes at once of the backward of `own_gradient`, which is the same code on every device."""
    leaves = [each.requires_grad_() for each in inputs]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)  # which the plan counts by itself; a backward adds to it
    output = own_gradient(lambda *given: policy(*(each.bfloat16() for each in given)), policy, *leaves, **options)
    gradient = torch.ones_like(output)
    with Peak([gradient, *leaves, *(leaf.grad for leaf in leaves)]) as peak:
        output.backward(gradient)
    return peak.most


TOKENS, WIDTH = 64, 1024


@pytest.mark.parametrize(
    ("name", "columns", "own"),
    [
        ("Qwen/Qwen3-8B", [WIDTH, WIDTH], FollowedMLP._policy_value),
        ("microsoft/phi-4", [2 * WIDTH], FollowedFusedMLP._policy_value),
    ],
)
def test_one_forward_recomputes_an_mlp_in_fp32(name, columns, own):
    """The plan's bytes are those that a backward has, to 1 %; at 8k tokens gigabytes."""
    mlp = SimpleNamespace(act_fn=F.silu, activation_fn=F.silu)
    inputs = [torch.randn(TOKENS, each).bfloat16() for each in columns]
    measured = peak_of_backward(lambda *given: own(mlp, *given), *inputs) / (TOKENS * WIDTH)
    full, off = (memory(name, {"fp8_forward": each}, tokens=8192).uncounted for each in ("one_forward", "off"))
    width = published.CONFIGS[name]["intermediate_size"]
    assert full - off == pytest.approx(measured * 8192 * width, rel=0.01)
    assert full - off > 2.8e9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_forward_recomputes_experts_with_weights_and_gradients_in_bf16(dtype):
    """Tokens are few here, so that what is measured is that of the weights."""
    weight, x = torch.randn(512, 1024).to(getattr(torch, dtype)), torch.randn(2, 1024).bfloat16()
    measured = peak_of_backward(lambda x, w: x @ w.T, x, weight, dtype=torch.bfloat16) / weight.numel()
    few = {"tokens": 1, "dtype": dtype}
    full, off = (
        memory("Qwen/Qwen3-30B-A3B", {"fp8_forward": each}, **few).uncounted for each in ("one_forward", "off")
    )
    assert full - off == pytest.approx(measured * 128 * 3 * 768 * 2048, rel=0.03)
