"""Contract with the private names of vLLM and TRL: an upgrade must fail here, by name."""

import dataclasses
import importlib
import inspect
import re
import sys
from importlib.metadata import version

import pytest
import trl.generation.vllm_generation as trl_generation
import trl.trainer.grpo_trainer as trl_grpo
from accelerate import Accelerator
from transformers import CONFIG_MAPPING, AutoConfig
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels import linear as linear_kernels
from vllm.model_executor.layers.fused_moe.router import cpu_router
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.outputs import CompletionOutput
from vllm.platforms import PlatformEnum
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils import config as vllm_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from trl_fp8.engine.vllm.cpu import reference_attention as cpu_attention
from trl_fp8.engine.vllm.cpu import reference_linear as cpu_kernel
from trl_fp8.engine.vllm.environment import configs_restored
from trl_fp8.engine.vllm.generation import FP8VLLMGeneration
from trl_fp8.engine.vllm.rollout_llm import RolloutLLM
from trl_fp8.features.correction.correction_flags import CHANGING_ENGINE_KWARGS, LOWEST_TEMPERATURE
from trl_fp8.run.engine_flags import REFUSED_ENGINE_KWARGS, RESERVED_ENGINE_KWARGS, VLLM_NAMES
from trl_fp8.trainer import FP8GRPOTrainer
from trl_fp8.upstream import patches
from trl_fp8.upstream.patches import substituted
from trl_fp8.upstream.private_names import PRIVATE_NAMES
from trl_fp8.upstream.vllm import forget_choices, require_engine_arguments


def test_an_engine_leaves_the_configs_of_transformers_alone():
    config_class = CONFIG_MAPPING["kimi_linear"]
    with configs_restored():
        vllm_config._register_config_class("kimi_linear", vllm_config._CONFIG_REGISTRY["kimi_linear"])
        assert not isinstance(AutoConfig.for_model("kimi_linear"), config_class)
    assert CONFIG_MAPPING["kimi_linear"] is config_class
    assert isinstance(AutoConfig.for_model("kimi_linear"), config_class)


def resolved(target):
    """What a dotted name stands for in what is installed."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(target)


def has(owner, name):
    """Whether a module or class has a name, or the code of its module, or of a base class, gives it to objects."""
    modules = {cls.__module__ for cls in getattr(owner, "__mro__", ())} - {"builtins", "pybind11_builtins"}
    modules = [sys.modules[name] for name in modules] or [owner]
    modules = [module for module in modules if module.__spec__]  # a namespace of operators, or of C++, has no code
    given = re.compile(rf"\.{name}\b|[\"']{name}[\"']")
    return hasattr(owner, name) or any(given.search(inspect.getsource(module)) for module in modules)


@pytest.mark.parametrize("owner", sorted(PRIVATE_NAMES))
def test_private_names_exist(owner):
    assert [name for name in PRIVATE_NAMES[owner] if not has(resolved(owner), name)] == []
    assert owner == "torch.ops" or not has(resolved(owner), "_no_such_name")  # which has any namespace


@pytest.mark.parametrize("ours", [FP8GRPOTrainer, FP8VLLMGeneration, RolloutLLM], ids=lambda cls: cls.__name__)
def test_private_names_that_subclasses_share_with_their_bases_are_listed(ours):
    """Overridden, or used on `self`, and known to a class above: a clash of names would be found, too."""

    def mentioned(classes):
        found = (re.findall(r"\bself\.(_[a-z]\w*)|def (_[a-z]\w*)", inspect.getsource(cls)) for cls in classes)
        return {use or definition for pairs in found for use, definition in pairs}

    classes = [cls for cls in ours.__mro__ if cls is not object]
    is_ours = [cls.__module__.startswith("trl_fp8") for cls in classes]
    shared = mentioned(cls for cls, own in zip(classes, is_ours, strict=True) if own)
    shared &= mentioned(cls for cls, own in zip(classes, is_ours, strict=True) if not own)
    listed = {name for names in PRIVATE_NAMES.values() for name in names}
    assert shared <= listed and (shared or ours is RolloutLLM)


@pytest.mark.parametrize("target", sorted(patches.PATCHES))
def test_targets_of_patches_exist(target):
    owner, _, name = target.rpartition(".")
    assert has(resolved(owner), name)


def test_a_patch_that_is_not_in_the_list_or_not_in_the_library_is_refused(monkeypatch):
    with pytest.raises(RuntimeError, match="trl.trainer.grpo_trainer.RewardFunc is not in the list of patches"):
        patches.patch(trl_grpo, "RewardFunc", None)
    monkeypatch.delattr(trl_grpo, "VLLMGeneration")
    with (
        pytest.raises(RuntimeError, match=f"trl {version('trl')} has no trl.trainer.grpo_trainer.VLLMGeneration, "),
        substituted(trl_grpo, "VLLMGeneration", object()),
    ):
        pass
    assert not hasattr(trl_grpo, "VLLMGeneration")


def test_trl_constructs_its_generation_and_its_engine_by_module_global_name():
    assert trl_grpo.VLLMGeneration is VLLMGeneration
    assert "VLLMGeneration(" in inspect.getsource(GRPOTrainer.__init__)
    assert "LLM(" in inspect.getsource(VLLMGeneration._init_vllm) and trl_generation.LLM.__module__.startswith("vllm")


def test_trl_methods_that_are_overridden_or_called():
    parameters = inspect.signature(GRPOTrainer._generate_single_turn).parameters
    assert list(parameters) == [
        *("self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images")
    ]
    assert list(inspect.signature(GRPOTrainer._generate).parameters) == ["self", "prompts"]
    assert list(inspect.signature(GRPOTrainer._tokenize_prompts).parameters) == ["self", "prompts"]
    assert "return prompt_ids, completion_ids, " in inspect.getsource(GRPOTrainer._generate)
    assert list(inspect.signature(VLLMGeneration.sync_weights).parameters) == ["self"]
    assert inspect.isgeneratorfunction(VLLMGeneration._iter_named_params)
    source = inspect.getsource(VLLMGeneration.generate)
    assert "self.enable_sleep_mode and self._llm_weights_sleeping" in source
    assert callable(trl_generation.empty_cache)


def test_trl_passes_the_engine_what_we_expect_and_we_win(monkeypatch):
    """The keyword arguments that TRL gives `LLM`, and that a substituted constructor receives them all."""
    seen = {}

    def recorder(**kwargs):
        seen.update(kwargs)

    # An engine that was shut down earlier in this process leaves accelerate distributed, without a process group
    monkeypatch.setattr(Accelerator, "wait_for_everyone", lambda self: None)
    model = type("Model", (), {"name_or_path": "folder", "named_modules": lambda self: []})()
    with substituted(trl_generation, "LLM", recorder):
        VLLMGeneration(model=model, accelerator=Accelerator(cpu=True), processing_class=None)
    assert set(seen) == {
        *("model", "tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "max_num_seqs"),
        *("enable_sleep_mode", "model_impl", "distributed_executor_backend", "seed", "max_num_batched_tokens"),
        *("logprobs_mode", "quantization", "trust_remote_code"),
    }
    assert seen["logprobs_mode"] == "processed_logprobs" and seen["quantization"] is None
    free = {"gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens"}
    assert set(seen) - free <= set(RESERVED_ENGINE_KWARGS)


def test_generation_kwargs_may_have_every_name_that_vllm_samples_with():
    assert {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")} == set(VLLM_NAMES)


def test_vllm_raises_temperatures_below_the_limit_that_the_correction_names():
    above = LOWEST_TEMPERATURE * 1.001
    assert [
        SamplingParams(temperature=t).temperature for t in (LOWEST_TEMPERATURE / 2, LOWEST_TEMPERATURE, above)
    ] == [
        LOWEST_TEMPERATURE,
        LOWEST_TEMPERATURE,
        above,
    ]
    engine = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {*CHANGING_ENGINE_KWARGS, *REFUSED_ENGINE_KWARGS} <= engine


def test_substitution_ends_with_the_block_even_after_an_error():
    original = trl_grpo.VLLMGeneration
    with pytest.raises(RuntimeError), substituted(trl_grpo, "VLLMGeneration", object()):
        assert trl_grpo.VLLMGeneration is not original
        raise RuntimeError
    assert trl_grpo.VLLMGeneration is original


def test_rotary_embeddings_are_kept_for_the_process_until_they_are_forgotten():
    def implementation(custom_ops):
        config = VllmConfig(compilation_config=CompilationConfig(custom_ops=custom_ops))
        with set_current_vllm_config(config):
            return get_rope(64, 128)._forward_method.__name__

    forget_choices()
    first = implementation(["none", "+rotary_embedding"])
    assert implementation(["none"]) == first != "forward_native"
    forget_choices()
    assert implementation(["none"]) == "forward_native"
    forget_choices()


def test_cpu_overrides_are_registered_once_and_scoped():
    cpu_kernel.register_cpu_kernel()
    cpu_kernel.register_cpu_kernel()
    kernels = linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    assert kernels[0] is cpu_kernel.ReferenceFp8BlockKernel
    assert kernels.count(cpu_kernel.ReferenceFp8BlockKernel) == 1
    with cpu_attention.overridden(AttentionBackendEnum.CPU_ATTN, cpu_attention.ReferenceAttention):
        assert AttentionBackendEnum.CPU_ATTN.get_class() is cpu_attention.ReferenceAttention
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()


def test_transformers_and_vllm_agree_on_what_replay_reads():
    """Routers hand out their choice before anything else uses it; completions carry it where vLLM returns it."""
    source = inspect.getsource(BaseRouter._select_experts)
    assert (
        source.index("self._compute_routing(") < source.index("self.capture_fn(") < source.index("_apply_eplb_mapping")
    )
    assert {"routed_experts", "sampling_mask"} <= set(inspect.signature(CompletionOutput).parameters)
    arguments = set(inspect.signature(EngineArgs).parameters)
    assert {"enable_return_routed_experts", "return_sampling_mask"} <= arguments
    runner = inspect.getsource(GPUModelRunner)
    assert (
        "self.query_start_loc = self._make_buffer(" in runner and "self.input_batch.num_computed_tokens_cpu" in runner
    )
    assert callable(cpu_router._softmax_topk) and callable(Fp8MoEMethod._init_moe_kernel)


def test_requests_get_their_seeds_from_numpys_global_generator():
    """In the second model runner, which GPUs run; `RolloutLLM` gives it a seed of its own."""
    assert "seed = np.random.randint(" in inspect.getsource(SamplingStates.add_request)


def test_the_passes_that_replay_enters_take_these_arguments():
    names = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    assert names[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert "torch.cat([prompt_ids, completion_ids], dim=1)" in source
    assert "logits_to_keep = completion_ids.size(1)" in source


def test_each_unknown_engine_argument_is_named_with_its_nearest_name():
    require_engine_arguments(["max_num_seqs", "model"])
    text = "sets zzz, max_num_seq (did you mean max_num_seqs?), but vllm.LLM takes no such argument"
    with pytest.raises(ValueError, match=re.escape(text)):
        require_engine_arguments(["zzz", "max_num_seq", "dtype"])
