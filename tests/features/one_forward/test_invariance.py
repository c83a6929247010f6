"""vLLM takes the settings for a trainer that shares kernels, and they are in force; what undoes them is named."""

import os
import shutil
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from vllm import envs
from vllm.config import AttentionConfig, CompilationConfig, KernelConfig
from vllm.config.compilation import CompilationMode
from vllm.model_executor.determinism import batch_invariant
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from testing import engines
from trl_fp8.engine.vllm.platform import CPU_KERNELS, platform_of
from trl_fp8.features.one_forward import engine_invariance as invariance
from trl_fp8.features.one_forward.engine_invariance import (
    CUDA,
    ROUTER_KERNELS,
    SWITCH,
    Invariance,
    invariant_on_cuda,
    require_invariant_routers,
)
from trl_fp8.features.one_forward.engine_kernels import SharedKernelsPart, invariance_of
from trl_fp8.upstream import vllm as upstream
from trl_fp8.upstream.vllm import engine_config, forget_choices


def config(points, mode=CompilationMode.VLLM_COMPILE, **changes):
    """Return vLLM's config for `points.arguments()`, without an engine;
    `changes` as `name__in=value` of the inner configs.
    """
    arguments = points.arguments()
    compilation = CompilationConfig(**arguments["compilation_config"], mode=mode)
    kernel = KernelConfig(**arguments["kernel_config"])
    for name, value in changes.items():
        holder = kernel.ir_op_priority if hasattr(kernel.ir_op_priority, name) else compilation
        holder = compilation.pass_config if hasattr(compilation.pass_config, name) else holder
        setattr(holder, name, value)
    return SimpleNamespace(compilation_config=compilation, kernel_config=kernel, attention_config=AttentionConfig())


@pytest.fixture
def switched_on(monkeypatch):
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("points", [Invariance(CPU_KERNELS), CUDA], ids=["cpu", "cuda"])
def test_vllm_takes_what_is_pinned(points):
    points.require(config(points))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fuse_norm_quant": True}, "pass_config.fuse_norm_quant=True"),
        ({"enable_qk_norm_rope_fusion": True}, "pass_config.enable_qk_norm_rope_fusion=True"),
        ({"fused_add_rms_norm": ["native"]}, r"ir_op_priority.fused_add_rms_norm=\['native'\]"),
        ({"custom_ops": ["none", "+quant_fp8"]}, "without rotary_embedding.*without silu_and_mul"),
        ({"custom_ops": ["all", "-silu_and_mul"]}, "without silu_and_mul"),
        ({"custom_ops": ["all"]}, "with rms_norm"),
        ({"inductor_compile_config": {}}, "inductor_compile_config without emulate_precision_casts"),
    ],
)
@pytest.mark.usefixtures("switched_on")
def test_settings_that_run_other_kernels_are_named(changes, named):
    with pytest.raises(ValueError, match=f"fp8_forward='one_forward'.*vllm_engine_kwargs.*{named}.*fp8_forward='off'"):
        CUDA.require(config(CUDA, **changes))


def test_another_attention_kernel_and_a_switch_that_is_off_are_named():
    settings = config(CUDA)
    settings.attention_config.backend = AttentionBackendEnum.TRITON_ATTN
    with pytest.raises(ValueError, match="attention_backend='TRITON_ATTN'; VLLM_BATCH_INVARIANT=0"):
        CUDA.require(settings)


def test_a_router_that_changes_kernels_with_the_batch_is_refused():
    gate = GateLinear.__new__(GateLinear)
    torch.nn.Module.__init__(gate)
    for kernel in ROUTER_KERNELS:
        setattr(gate, kernel, False)
    model = torch.nn.ModuleDict({"gate": gate})
    require_invariant_routers(model)
    gate.allow_ll_bf16_gemm = True
    with pytest.raises(ValueError, match=r"fp8_forward='one_forward'.*gate \(ll_bf16_gemm\)"):
        require_invariant_routers(model)


@pytest.mark.usefixtures("switched_on")
def test_passes_of_a_compiler_that_does_not_run_do_not_matter():
    CUDA.require(config(CUDA, mode=CompilationMode.NONE, fuse_norm_quant=True))


@pytest.mark.engine
def test_an_engine_that_is_shared_runs_what_it_was_told(checkpoint):
    generation = engines.start(checkpoint("qwen3"), engines.some_scales(2, 1), parts=[SharedKernelsPart()])
    invariance_of(platform_of()).require(engine_config(generation.llm))
    assert not engine_config(generation.llm).compilation_config.pass_config.fuse_norm_quant
    engines.shutdown(generation.llm)


@pytest.mark.engine
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler")
def test_a_compiled_engine_computes_what_an_eager_one_does(checkpoint, tmp_path, monkeypatch):
    """Bit for bit. Without the pinned settings their log-probs were 0.06 apart, as far as FP8 itself moves them."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"):
        monkeypatch.setenv(name, str(tmp_path / name))
    folder, scales = checkpoint("qwen3", num_hidden_layers=1), engines.some_scales(1, 1)  # others compile to the same
    found = []
    for eager in (True, False):
        kwargs = {"enforce_eager": eager}
        generation = engines.start(folder, scales, engine_kwargs=kwargs, parts=[SharedKernelsPart()])
        generation.sync_weights()
        assert bool(engine_config(generation.llm).compilation_config.mode) is not eager
        # vLLM's compiler moves this to a folder of its own; a trainer that compiles has to keep to what it had
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "TORCHINDUCTOR_CACHE_DIR")
        found.append(engines.log_probs(generation.llm))
        engines.shutdown(generation.llm)
    assert found[0] == found[1]


@pytest.mark.engine
def test_a_user_who_moves_a_rounding_point_is_told(checkpoint, monkeypatch):
    kwargs = {"compilation_config": {"custom_ops": ["none", "+rotary_embedding"]}}
    started = []
    monkeypatch.setattr(upstream, "engine_config", lambda llm: started.append(llm) or engine_config(llm))
    with pytest.raises(ValueError, match="with rotary_embedding"):
        engines.start(
            checkpoint("qwen3"), engines.some_scales(2, 1), engine_kwargs=kwargs, parts=[SharedKernelsPart()]
        )
    engines.shutdown(started.pop())
    monkeypatch.undo()
    # where nobody follows, it is the user's choice
    engines.shutdown(engines.start(checkpoint("qwen3"), engines.some_scales(2, 1), engine_kwargs=kwargs).llm)


@pytest.fixture
def hopper(monkeypatch):
    """Leave out what a CPU build of vLLM lacks: FlashAttention, kernels in Triton."""
    attention = SimpleNamespace(invariant_attention=nullcontext)
    monkeypatch.setitem(sys.modules, "trl_fp8.features.one_forward.engine_flash_attention", attention)
    monkeypatch.setattr(invariance, "pin_tiles", lambda: None)
    monkeypatch.setattr(invariance, "register_cuda_norms", lambda: None)
    yield invariant_on_cuda()
    forget_choices()


def test_settings_of_an_invariant_engine_are_vllms_and_not_the_environments(hopper, monkeypatch):
    """They last as long as the engine, and the next one does not inherit them."""
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "1")
    monkeypatch.delenv(SWITCH, raising=False)
    envs.enable_envs_cache()  # of an engine before this one
    with hopper:
        assert envs.VLLM_BATCH_INVARIANT and not envs.VLLM_USE_AOT_COMPILE
        batch_invariant.init_batch_invariance()  # of which nothing is left
        assert "NCCL_PROTO" not in os.environ
        envs.enable_envs_cache()  # as vLLM does at the end of a start
    assert SWITCH not in os.environ and os.environ["VLLM_USE_AOT_COMPILE"] == "1"
    assert envs.VLLM_BATCH_INVARIANT and not envs.VLLM_USE_AOT_COMPILE
    forget_choices()
    assert envs.VLLM_USE_AOT_COMPILE and not envs.VLLM_BATCH_INVARIANT


def test_a_switch_that_the_user_turned_off_stays_off_and_is_named(hopper, monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    with hopper, pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT=0 in the environment"):
        CUDA.require(config(CUDA))
    assert os.environ[SWITCH] == "0"
