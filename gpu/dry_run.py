"""What vLLM's CUDA build would run for this project, found out on a machine without a GPU. Nothing executes.

    pip install -e ".[cuda]"                    # Linux, x86-64; needs `cc`
    python -m gpu.dry_run                       # prints the tables of gpu/NOTES.md; minutes, 2 GB of memory
    python -m gpu.dry_run --capabilities 9.0 --layers 2 --json found.json
    python -m gpu.dry_run --capabilities 9.0 10.0 12.0 --weight-format mxfp8

For each compute capability, in a process of its own that takes itself for such a GPU (pretended_gpu.py), and for each
shape: vLLM's configuration from this project's engine arguments, without and with a trainer that follows, for each
kernel of linears that could be chosen, and with the kernels left to vLLM; the CUDA model of it on fake tensors, its
weights processed as after a load; what engine/vllm/{numerics,layout}.py say to it. With the pinned ones
also: names that are held are compared with those that a sync sends, and a decoder layer is called with prompts and
with single tokens.

The exit status is 1 if, with the pinned kernels, an operator does not answer or the layout is not what is sent.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from gpu.pretended_gpu import (
    GPUS,
    become_a_rank,
    call_layer,
    calls_recorded,
    driver_environment,
    give_caches,
    pretend,
    process_weights,
)
from testing.published import CONFIGS
from trl_fp8.quantization.formats import BLOCKS, FORMATS


if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention import Attention

    from trl_fp8.recipe.recipe import FP8Recipe


ROOT = Path(__file__).parents[1]
ALIKE = dict(num_attention_heads=32, head_dim=128, vocab_size=151936, max_position_embeddings=40960, rope_theta=1e6)
OTHER_KINDS = (
    *("deepseek-ai/DeepSeek-V3", "google/gemma-2-9b", "microsoft/phi-4", "openai/gpt-oss-20b"),
    *("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-35B-A3B"),
)
SHAPES = {  # as published
    "Qwen3-8B": ALIKE
    | dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    | dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_key_value_heads=8),
    "Qwen3-30B-A3B": ALIKE
    | dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    | dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_key_value_heads=4)
    | dict(moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True),
}
FAMILIES = {  # of other kinds: attention, experts, names
    **{name.rpartition("/")[2]: shape for name, shape in CONFIGS.items() if name in OTHER_KINDS},
    "GLM-4.5-Air": dict(model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"])
    | dict(hidden_size=4096, intermediate_size=10944, num_hidden_layers=46, num_attention_heads=96)
    | dict(num_key_value_heads=8, head_dim=128, vocab_size=151552, moe_intermediate_size=1408, n_routed_experts=128)
    | dict(num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=1, attention_bias=True),
    "gemma-3-4b-it": CONFIGS["google/gemma-3-4b-it"] | dict(vision_config=dict(vision_use_head=False)),
    "MiniMax-M2": dict(model_type="minimax_m2", architectures=["MiniMaxM2ForCausalLM"])
    | dict(hidden_size=3072, intermediate_size=1536, num_hidden_layers=62, num_attention_heads=48)
    | dict(num_key_value_heads=8, head_dim=128, vocab_size=200064, num_local_experts=256, num_experts_per_tok=8),
    "Qwen3-VL-8B": dict(model_type="qwen3_vl", architectures=["Qwen3VLForConditionalGeneration"])
    | dict(text_config=dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32))
    | dict(vision_config=dict(out_hidden_size=4096)),
}
PINNED, FOLLOWED, OWN = "pinned", "pinned, one forward", "vLLM's own"
# Over the pins, as a user could ask for it
OWN_CHOICE = {"linear_backend": "auto", "moe_backend": "auto", "attention_backend": None}
NO_STREAM = "getting stream native handle"  # what CuTe DSL's kernels ask of a device
SEQUENCES, LENGTH = 64, 4096  # max_num_seqs, max_model_len
BATCHES = {"prompts": (4, 256), "a few tokens": (2, 1), "decoding": (SEQUENCES, 1)}  # sequences, tokens of each
# What a trainer that shares the engine's kernels calls, too (one_forward/engine_invariance.py), and others
SHARED = "triton::_rms_norm_kernel", "triton::matmul_kernel_persistent", "_C::rotary_embedding"
NOT_SHARED = "_C::rms_norm", "_C::fused_add_rms_norm", "_vllm_fa3_C::get_scheduler_metadata"
FLASH, UNQUANTIZED = "_vllm_fa3_C::fwd", "triton::matmul_kernel_persistent"
TILE = "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages"
MX_QUANTIZE = "vllm::mxfp8_quantize"  # always with powers of two
SILU, FUSED_SILU, QUANTIZE = "_C::silu_and_mul", "_C::silu_and_mul_per_block_quant", "_C::per_token_group_fp8_quant"


@dataclass
class Found:
    """One shape on one GPU.

    Attributes:
        backend: Of linears, one of those that could be chosen.
        weight_format: Value of the flag fp8_weight_format.
        refused: By whom and why; what follows is then what was found before.
        kernels: Of FP8 linears and experts -> number of layers.
        scales: Of activations, of linears and of experts: "fp32" or "pow2".
        unrounded: Whether experts quantize act(gate) * up in one kernel.
        attention: Implementation and version -> number of layers.
        compiled, graphs: vLLM's modes.
        operations: Layer class -> `forward_cuda` (an operator of vLLM's) or `forward_native` (torch, compiled).
        not_held, never_sent: Names of the weight stream that the engine lacks, and the other way round.
        reshaped: Parameters that are not stored as they were loaded, and what was computed with them.
        derived: Number of tensors that are computed from others after a sync, as vLLM does after a load.
        calls: Operator or Triton kernel -> the arguments that it was called with.
        not_followed: Steps that no machine without a GPU can take: they need values, or a kernel that wants a device.
        problems: What must not be, in a pinned engine.
    """

    model: str
    capability: str
    choice: str
    backend: str | None = None
    weight_format: str = BLOCKS.name
    refused: list[str] = field(default_factory=list)
    kernels: dict[str, int] = field(default_factory=dict)
    scales: list[str] = field(default_factory=list)
    unrounded: bool = False
    attention: dict[str, int] = field(default_factory=dict)
    kv_cache: str = ""
    compiled: str = ""
    graphs: str = ""
    norms: str = ""
    operations: dict[str, str] = field(default_factory=dict)
    held: int = 0
    not_held: list[str] = field(default_factory=list)
    never_sent: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    derived: int = 0
    calls: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    not_followed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def look(capability: str, models: list[str], layers: int | None, weight_format: str) -> list[dict]:
    """Everything about one GPU, in this process; of families the pinned engine, built and not called."""
    pretend(_pair(capability))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        become_a_rank(Path(folder))
        policies = {model: policy_on_meta(Path(folder) / model, model, layers) for model in models}
        recipes = {model: recipe_of(policy, weight_format) for model, policy in policies.items()}
        candidates = {model: _candidates(policy, recipes[model]) for model, policy in policies.items()}
        for choice in (PINNED, OWN, FOLLOWED):  # the last one for good: vLLM asks its environment in every call
            for model, policy in policies.items():
                if model in FAMILIES and choice != PINNED:
                    continue
                kernels = [None] if choice == OWN else candidates[model]
                if choice == FOLLOWED:  # Gemm.check refuses what changes with the batch
                    kernels = [name for name in kernels if name != "flashinfer_cutlass"] or kernels
                for backend in kernels[:1] if model in FAMILIES else kernels:
                    found.append(Found(model, capability, choice, backend, weight_format))
                    with _prepared(choice, policy):
                        _look_at(found[-1], policy, recipes[model])
    found.sort(key=lambda each: (models.index(each.model), (PINNED, FOLLOWED, OWN).index(each.choice)))
    return [asdict(each) for each in found]


def _prepared(choice: str, policy: "PreTrainedModel") -> AbstractContextManager[None]:
    """In the block an engine of this project starts as it would, but for the checks that compute."""
    import torch

    from trl_fp8.engine.vllm.platform import platform_of
    from trl_fp8.features.one_forward.engine_invariance import invariant_on_cuda

    shared = choice == FOLLOWED and platform_of(torch.device("cuda")).flash_attention == 3
    return invariant_on_cuda() if shared else nullcontext()


def _candidates(policy: "PreTrainedModel", recipe: "FP8Recipe") -> list[str]:
    """Return the kernels of linears that could be chosen, or the first one if none can: its row then says why.

    vLLM has them, and they pass what needs no values of the check.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from trl_fp8.engine.vllm.gemms import CHECKED, CHECKED_ROWS, Gemm
    from trl_fp8.engine.vllm.numerics import keep_untiled_scale, why_linear_unverifiable
    from trl_fp8.engine.vllm.platform import platform_of

    if not recipe.fp8_modules:
        return ["auto"]
    device = torch.device("cuda")
    names, candidates = platform_of(device).linear_backends(recipe), []
    for name in names:
        gemm = Gemm(name, recipe.format, recipe.scale_format, device, policy.config)
        try:
            with FakeTensorMode(), calls_recorded():
                kernel, layer = gemm.kernel_and_layer(CHECKED)
                kernel.process_weights_after_loading(layer)
                keep_untiled_scale(kernel, layer)
                reason = why_linear_unverifiable(kernel, layer)
                for rows in [] if reason else CHECKED_ROWS:
                    kernel.apply_weights(layer, torch.empty(rows, CHECKED[1], dtype=torch.bfloat16, device=device))
        except ValueError as error:
            reason = str(error)
        candidates += [] if reason else [name]
        print(f"{name}: {reason or 'can be chosen'}", file=sys.stderr)
    return candidates or [names[0]]


def _pair(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor)


def policy_on_meta(folder: Path, model: str, layers: int | None) -> "PreTrainedModel":
    """A policy without memory, and the folder with the config that vLLM reads."""
    import torch
    import transformers

    shape = deepcopy((SHAPES | FAMILIES)[model])
    shape.pop("quantization_config", None)  # of what is published; a policy is in high precision
    text = shape.get("text_config", shape)
    if layers:
        text["num_hidden_layers"] = layers
        text |= {"layer_types": text["layer_types"][:layers]} if "layer_types" in text else {}
    tied = {} if model in FAMILIES else {"tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(**shape, **tied)
    config.save_pretrained(folder)
    with torch.device("meta"):
        policy = getattr(transformers, config.architectures[0])._from_config(config, dtype=torch.bfloat16)
    policy.config._name_or_path = str(folder)
    return policy


def recipe_of(policy: "PreTrainedModel", weight_format: str = BLOCKS.name) -> "FP8Recipe":
    """All that can be FP8 in this format; where no linear is a multiple of its blocks, the KV cache."""
    from trl_fp8.recipe.recipe import recipe_for_model

    try:
        return recipe_for_model(policy, weight_format=weight_format)
    except ValueError:
        return recipe_for_model(policy, fp8_weights=False)


def _look_at(found: Found, policy: "PreTrainedModel", recipe: "FP8Recipe") -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from trl_fp8.engine.vllm.numerics import keep_untiled_scales
    from trl_fp8.features.one_forward.engine_invariance import CUDA, require_invariant_routers
    from trl_fp8.upstream.vllm import forget_choices

    try:
        config = _configured(found, policy, recipe)
    except ValueError as refusal:
        found.refused.append(f"engine arguments: {refusal}")
        return
    try:
        if found.choice == FOLLOWED:
            CUDA.require(config)
        config.kernel_config.ir_op_priority.set_default()
        forget_choices()
        with (
            set_current_vllm_config(config),
            FakeTensorMode(allow_non_fake_inputs=True),
            set_default_torch_dtype(torch.bfloat16),
            torch.device("cuda"),
        ):
            engine = initialize_model(vllm_config=config, model_config=config.model_config)
            found.reshaped = process_weights(engine)
            keep_untiled_scales(engine)
            _note_kernels(found, config, engine, policy)
            if found.choice == FOLLOWED:
                require_invariant_routers(engine)
            if found.choice != OWN:
                _note_layout(found, engine, recipe, policy)
                _call_a_layer(found, config, engine)
    except Exception as error:  # a report of whatever happens
        traceback.print_exc()
        found.problems.append(f"{type(error).__name__}: {error}")


def _configured(found: Found, policy: "PreTrainedModel", recipe) -> "VllmConfig":
    """vLLM's configuration as TRL and this project make it."""
    import torch
    from vllm.engine.arg_utils import EngineArgs

    from trl_fp8.engine.vllm.platform import platform_of
    from trl_fp8.features.one_forward.engine_kernels import SharedKernelsPart

    ours = platform_of(torch.device("cuda")).arguments(
        recipe,
        policy.config,
        max_num_seqs=SEQUENCES,
        max_model_len=LENGTH,
        parts=[SharedKernelsPart()] if found.choice == FOLLOWED else [],
        user=OWN_CHOICE if found.choice == OWN else {"linear_backend": found.backend},
    )
    trls = dict(
        model=policy.config._name_or_path,
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.3,
        max_model_len=LENGTH,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=4096,
        enable_sleep_mode=True,
        distributed_executor_backend="external_launcher",
        logprobs_mode="processed_logprobs",
    )
    return EngineArgs(**(trls | ours)).create_engine_config()


def _note_kernels(found: Found, config: "VllmConfig", engine: "nn.Module", policy: "PreTrainedModel") -> None:
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    from trl_fp8.engine.vllm.numerics import (
        activation_scaling,
        attention_layers,
        fp8_experts,
        fp8_kernels,
        quantizes_query,
        require_auditable,
    )
    from trl_fp8.engine.vllm.scale_copies import fp8_attention_layers
    from trl_fp8.recipe.from_model import caches_of
    from trl_fp8.recipe.outline import kv_layers_of

    compilation = config.compilation_config
    found.compiled, found.graphs = compilation.mode.name, compilation.cudagraph_mode.name
    found.norms = config.kernel_config.ir_op_priority.rms_norm[0]
    found.operations = {
        type(module).__name__: module._forward_method.__name__
        for module in engine.modules()
        if hasattr(module, "_forward_method")
    }
    found.kernels = dict(fp8_kernels(engine))
    found.attention = dict(Counter(_attention_name(layer) for layer in attention_layers(engine).values()))
    found.kv_cache = config.cache_config.cache_dtype + (", q too" if quantizes_query(engine) else "")
    cached = kv_layers_of(caches_of(policy.config.get_text_config()))
    for check in (lambda: require_auditable(engine), lambda: fp8_attention_layers(engine, cached)):
        try:
            check()
        except RuntimeError as refusal:
            found.refused.append(str(refusal))
    if not found.refused:
        # vLLM's Triton experts follow DeepGEMM's setting although they do not call it: power-of-two scales where it is
        # in use (Hopper, Blackwell), else fp32 scales, and activation and quantization in one kernel
        experts = ["pow2" if is_deep_gemm_e8m0_used() else "fp32"] if fp8_experts(engine) else []
        scaling = activation_scaling(engine)
        found.scales = [scaling.scale_format, *experts] if scaling else experts
        found.unrounded = experts == ["fp32"]


def _attention_name(layer: "Attention") -> str:
    number = getattr(layer.impl, "vllm_flash_attn_version", None)
    return type(layer.impl).__name__ + (f" {number}" if number else "")


def _note_layout(found: Found, engine: "nn.Module", recipe, policy: "PreTrainedModel") -> None:
    from trl_fp8.engine.vllm.layout import engine_layout
    from trl_fp8.recipe.from_model import persistent_buffers
    from trl_fp8.sync.policy_checks import require_same_tensors

    buffers = {recipe.engine_name(name) for name, _ in persistent_buffers(policy)}
    layout = engine_layout(engine, recipe.linears, buffers)
    sent = {recipe.engine_name(name) for name, _ in policy.named_parameters()} | buffers
    sent |= {recipe.scale_name(name) for name in recipe.fp8_tensors}
    found.held = len(layout.pieces)
    found.not_held = sorted(sent - set(layout.pieces))
    derived = {piece.name for piece in layout.derived}
    found.derived = len(derived)
    found.never_sent = sorted(set(layout.pieces) - sent - derived)
    found.problems += [f"sent, not held: {name}" for name in found.not_held]
    found.problems += [f"held, never sent: {name}" for name in found.never_sent]
    reshaped = [name for name in found.reshaped if f"{name} in tiles" not in derived]
    found.problems += [f"not as it was loaded: {name}" for name in reshaped]
    found.problems += found.refused
    if not found.problems:
        require_same_tensors(policy, recipe, layout)


def _call_a_layer(found: Found, config: "VllmConfig", engine: "nn.Module") -> None:
    """The last decoder layer, which adds a residual, too, uncompiled; and this project's kernels."""
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from vllm import ir

    give_caches(config)
    layer = getattr(engine, "language_model", engine).model.layers[-1]
    steps = {name: partial(call_layer, layer, config, *batch) for name, batch in BATCHES.items()}
    steps["kernels of the sync"] = _call_own_kernels
    if found.choice == FOLLOWED:
        steps["the trainer's attention"] = partial(_call_packed_attention, layer.self_attn.attn)
        steps["output head"] = partial(_call_head, engine.lm_head)
        steps["an adapter"] = partial(_call_adapter, engine.lm_head)
    for step, call in steps.items():
        with calls_recorded() as calls, ir.enable_torch_wrap(False):
            try:
                call()
            except (DataDependentOutputException, torch.AcceleratorError):
                found.not_followed.append(step)
            except Exception as error:  # a report of whatever happens
                if NO_STREAM in str(error):
                    found.not_followed.append(step)
                    continue
                traceback.print_exc()
                last = f", after {calls[-1][0]}" if calls else ""
                found.problems.append(f"{step}{last}: {type(error).__name__}: {error}")
        for name, arguments in calls:
            seen = found.calls.setdefault(name, [])
            if arguments not in seen:
                seen.append(arguments)
    found.problems += _contradictions(found)


def _call_own_kernels() -> None:
    """What a sync launches, with each number of warps that a device may be faster with."""
    import torch

    from trl_fp8.quantization.codec.kernel_check import results
    from trl_fp8.quantization.kernels import block_kernels

    for warps in block_kernels.WARPS:
        block_kernels.block_warps = lambda *_, warps=warps: warps  # there is no device to time them on
        results(torch.empty(160, 320, dtype=torch.bfloat16))


def _call_packed_attention(layer: "Attention") -> None:
    """Three sequences, forward and backward."""
    import torch

    from trl_fp8.features.one_forward.engine_flash_attention import PackedAttention
    from trl_fp8.features.one_forward.followed_attention import flash_gradients

    attend, starts = PackedAttention(layer), torch.empty(4, dtype=torch.int32)
    query, *of_key = (
        torch.empty(300, heads, layer.head_size) for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    )
    output, lse, rounded = attend(query, *of_key, starts, 200, torch.empty(3, dtype=torch.float32))
    for softmax in (None, (output, lse)):
        flash_gradients(list(rounded), softmax, output, starts, 200, attend.scaling, attend.window)


def _call_head(head: "nn.Module") -> None:
    import torch

    head.quant_method.apply(head, torch.empty(64, head.weight.shape[1]))


def _call_adapter(head: "nn.Module") -> None:
    """A product with an A of rank 32 for q, k and v, by the function that linear layers without quantization call."""
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    made = torch.nn.Module()
    made.weight = torch.nn.Parameter(torch.empty(96, head.weight.shape[1]))
    for rows in (1, 64, 4096):
        UnquantizedLinearMethod().apply(made, torch.empty(rows, head.weight.shape[1]))


def _contradictions(found: Found) -> list[str]:
    """Where the operators that were called are not what the project believes that its trainer follows."""
    wrong = []
    if found.not_followed:
        return wrong
    scaled = {call["scale_ue8m0"] for call in found.calls.get(QUANTIZE, [])}
    scaled |= {"True"} if MX_QUANTIZE in found.calls else set()
    if scaled != {str(scale == "pow2") for scale in found.scales}:
        wrong.append(f"activations are quantized with scale_ue8m0={sorted(scaled)}, numerics.py says {found.scales}")
    if (FUSED_SILU in found.calls) != found.unrounded:
        wrong.append(f"{FUSED_SILU} in the calls: {FUSED_SILU in found.calls}, DeepGEMM in use says {found.unrounded}")
    if found.choice == FOLLOWED:
        wrong += [f"{name} was not called" for name in SHARED if name not in found.calls]
        wrong += [f"{name} was called" for name in NOT_SHARED if name in found.calls]
        given = ("max_seqlen_q", "max_seqlen_k", "num_splits", "scheduler_metadata")
        kernels = {tuple(call[name] for name in given) for call in found.calls.get(FLASH, [])}
        wrong += [f"FlashAttention is called in {len(kernels)} ways: {kernels}"] if len(kernels) > 1 else []
        tiles = {}
        for call in found.calls.get(UNQUANTIZED, []):
            tiles.setdefault((call["N"], call["K"]), set()).add(tuple(call[name] for name in TILE))
        several = {shape: len(seen) for shape, seen in tiles.items() if len(seen) > 1}
        wrong += [f"unquantized weights of {shape} come in {count} tiles" for shape, count in several.items()]
        if SILU not in found.calls and FUSED_SILU not in found.calls:
            wrong.append(f"{SILU} was not called")
    return wrong


def tables(found: list[dict]) -> str:
    """The page's Markdown."""
    families = [each for each in found if each["model"] in FAMILIES]
    found = [each for each in found if each not in families]
    pinned = [each for each in found if each["choice"] != OWN]
    own = [each for each in found if each["choice"] == OWN]
    chosen = (
        "model|GPU|one forward|linears, experts|scales|attention|KV cache|compiled, graphs|norms|custom operations"
    )
    parts = (
        _table(f"{chosen}|found", [(*_asked(each), *_chosen(each), _verdict(each)) for each in pinned]),
        _table("model|GPU|linears, experts|attention|refused", [_left_to_vllm(each) for each in own]),
        _table("operator|GPU|tensors of one call", _operators(pinned)),
        _table("model|GPU|linears, experts|attention|found", [_family(each) for each in families]),
    )
    return "\n\n".join(parts if families else parts[:-1])


def _table(head: str, rows: list[tuple[str, ...]]) -> str:
    names = head.split("|")
    lines = [names, ["---"] * len(names), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _counted(numbers: dict[str, int]) -> str:
    return ", ".join(f"{number} `{name}`" for name, number in numbers.items())


def _asked(each: dict) -> tuple[str, ...]:
    return each["model"], each["capability"], "on" if each["choice"] == FOLLOWED else "off"


def _chosen(each: dict) -> tuple[str, ...]:
    if not each["kernels"]:
        return ("",) * 7
    custom = sorted(name for name, method in each["operations"].items() if method == "forward_cuda")
    return (
        _counted(each["kernels"]),
        ", ".join(each["scales"]),
        _counted(each["attention"]),
        each["kv_cache"],
        f"{each['compiled']}, {each['graphs']}",
        each["norms"],
        ", ".join(custom),
    )


def _left_to_vllm(each: dict) -> tuple[str, ...]:
    refused = _first(each["problems"]) if each["problems"] else "; ".join(map(_sentence, each["refused"])) or "no"
    return each["model"], each["capability"], _counted(each["kernels"]), _counted(each["attention"]), refused


def _family(each: dict) -> tuple[str, ...]:
    kernels = _counted(each["kernels"]) or "BF16"
    return each["model"], each["capability"], kernels, _counted(each["attention"]), _verdict(each)


def _verdict(each: dict) -> str:
    if each["problems"] or each["refused"]:
        return _first(each["problems"]) if each["problems"] else f"refused: {_sentence(each['refused'][0])}"
    triton = sum(name.startswith("triton::") for name in each["calls"])
    answered = f"{len(each['calls']) - triton} operators answer"
    compiled = f", {triton} Triton kernels compile" if triton else ""
    missing = f"; not followed: {', '.join(each['not_followed'])}" if each["not_followed"] else ""
    derived = f", {each['derived']} of them computed from others" if each["derived"] else ""
    return f"auditable; {each['held']} tensors sent and held{derived}; {answered}{compiled}{missing}"


def _first(problems: list[str]) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"**{_sentence(problems[0])}**{more}"


def _sentence(text: str) -> str:
    """Up to the first full stop or, of a list, its first line."""
    return " ".join(" ".join(text.split("\n")[:2]).split(". ")[0].split())


def _operators(pinned: list[dict]) -> list[tuple[str, str, str]]:
    capabilities, arguments = {}, {}
    for each in pinned:
        for name, calls in each["calls"].items():
            capabilities.setdefault(name, {})[each["capability"]] = None
            arguments.setdefault(name, ", ".join(f"{key} {value}" for key, value in calls[-1].items() if "[" in value))
    return [(f"`{name}`", ", ".join(capabilities[name]), arguments[name]) for name in sorted(arguments)]


def versions() -> str:
    names = ("vllm", "torch", "triton", "transformers")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return ", ".join(f"{name} {version(name)}" for name in names) + (f", commit {commit}" if commit else "")


def look_in_processes(
    capabilities: list[str], models: list[str], layers: int | None, weight_format: str
) -> list[dict]:
    """One process for each GPU: what vLLM finds out about it on import stays for good."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONWARNINGS": "ignore"}
        environment["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        environment |= driver_environment(Path(folder))
        for capability in capabilities:
            path = Path(folder) / f"{capability}.json"
            command = [sys.executable, "-m", "gpu.dry_run", "--look", capability, "--json", str(path)]
            command += ["--models", *models, *(["--layers", str(layers)] if layers else [])]
            command += ["--weight-format", weight_format]
            subprocess.run(command, cwd=ROOT, env=environment, check=True)
            found += json.loads(path.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known = [f"{major}.{minor}" for major, minor in GPUS]
    parser.add_argument(
        "--capabilities", nargs="+", choices=known, default=known, help="compute capabilities to pretend"
    )
    shapes = list(SHAPES | FAMILIES)
    parser.add_argument("--models", nargs="+", choices=shapes, default=list(SHAPES), help="of " + ", ".join(shapes))
    parser.add_argument("--layers", type=int, help="fewer layers than published (at least 2), for a quick look")
    parser.add_argument(
        "--weight-format", choices=list(FORMATS), default=BLOCKS.name, help="value of the flag fp8_weight_format"
    )
    parser.add_argument("--json", type=Path, help="file for everything that was found")
    parser.add_argument("--look", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    options = arguments.models, arguments.layers, arguments.weight_format
    if arguments.look:
        found = look(arguments.look, *options)
    else:
        found = look_in_processes(arguments.capabilities, *options)
        print(f"{versions()}\n\n{tables(found)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return int(not arguments.look and any(each["problems"] for each in found if each["choice"] != OWN))


if __name__ == "__main__":
    sys.exit(main())
