"""A CUDA GPU that is not there: enough of one for vLLM's CUDA build to be configured, built and called.

    driver    a libcuda.so.1 that loads and finds no device, compiled here, where there is no real one
    platform  vLLM's own CUDA platform, told the compute capability
    tensors   fake ones: dtype, shape and strides, no memory. In `calls_recorded` an operator of vLLM's libraries is
              compared with its schema, and with its fake implementation if it has one that does more than nothing; one
              that vLLM wrote in Python over others is entered; a Triton kernel is compiled to machine code of that
              capability, has to fit into its shared memory, and is not launched

Nothing executes: values, speed and memory stay unknown, and so do checks inside of CUDA code. It knows nothing of this
project. Written for vLLM 0.31, torch 2.13 and Triton 3.7, whose private names it uses.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class GPU:
    """By its name vLLM looks for the tiles that its Triton kernels were tuned to.

    Attributes:
        name: As the driver gives it.
        memory: GiB.
        processors: Streaming multiprocessors.
        shared: KiB of shared memory that a block may have (CUDA C++ Programming Guide, compute capabilities).
    """

    name: str
    memory: int
    processors: int
    shared: int


GPUS = {  # compute capability -> one that has it
    (8, 9): GPU("NVIDIA L40S", 48, 142, 99),
    (9, 0): GPU("NVIDIA H100 80GB HBM3", 80, 132, 227),
    (10, 0): GPU("NVIDIA B200", 180, 148, 227),
    (12, 0): GPU("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, 188, 99),
}
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
OVER_FLASHINFER = "mxfp8_quantize", "mm_mxfp8"  # vLLM's operators over functions of FlashInfer that are no operators
# What torch's and vLLM's libraries want to find when they are loaded; the rest they look up when a device is used
SYMBOLS = (
    *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuGetErrorString"),
    *("cuGetProcAddress_v2", "cuMemAddressFree", "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemUnmap"),
    *("cuMemGetAllocationGranularity", "cuMemRelease", "cuMemSetAccess", "cuPointerGetAttribute"),
    *("cuTensorMapEncodeTiled",),
)


def driver_environment(folder: Path) -> dict[str, str]:
    """Environment in which `libcuda.so.1` is found; compiles a stub into `folder` if there is no driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
        return {}
    except OSError:
        source = folder / "stub.c"
        source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in SYMBOLS))
        library = folder / "libcuda.so.1"
        command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        found = os.environ.get("LD_LIBRARY_PATH")
        return {"LD_LIBRARY_PATH": f"{folder}:{found}" if found else str(folder)}


def pretend(capability: tuple[int, int]) -> None:
    """From now on this process has one of `GPUS`. Before vLLM is imported: much of it decides on import."""
    gpu = GPUS[capability]
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what vLLM compiles by itself runs on fake tensors as it is
    os.environ["VLLM_DISABLE_SHARED_EXPERTS_STREAM"] = "1"  # there are no streams
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # vLLM then keeps Triton although no driver is active (triton_utils)
    import torch
    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class PretendedGPU(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return gpu.name

        @classmethod
        def get_device_uuid(cls, device_id: int = 0) -> str:
            return "GPU-pretended"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return gpu.memory * 2**30

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return gpu.processors

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return False

    platforms._current_platform = PretendedGPU()
    properties = SimpleNamespace(
        name=gpu.name, major=capability[0], minor=capability[1], multi_processor_count=gpu.processors
    )
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.current_device = lambda: 0
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = lambda device: device
    _pretend_to_triton(capability)
    PretendedGPU.import_kernels()
    _complete_flash_attention()
    _complete_deep_gemm(capability)
    _complete_flashinfer(capability)


def _pretend_to_triton(capability: tuple[int, int]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device=0: 0,
            get_current_target=lambda: target,
        )
    )


def _complete_flash_attention() -> None:
    """FlashAttention's operators have no fake implementations; these return what its C++ code allocates."""
    import torch
    import vllm.vllm_flash_attn  # noqa: F401  registers the operators

    @torch.library.register_fake("_vllm_fa3_C::get_scheduler_metadata")
    def _(batch_size, *args, **kwargs):
        return torch.empty(1 + 4 * 4 * -(-batch_size // 4), dtype=torch.int32, device="cuda")

    @torch.library.register_fake("_vllm_fa3_C::fwd")
    def _(q, k, v, k_new, v_new, q_v, out, *args, **kwargs):
        nothing = q.new_empty(0, dtype=torch.float32)
        return [out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32), nothing, nothing]


def _complete_deep_gemm(capability: tuple[int, int]) -> None:
    """What vLLM calls in DeepGEMM, without the device that it asks for (`csrc/apis/layout.hpp` and `gemm.hpp`)."""
    import torch
    from vllm.utils import deep_gemm

    def transform(sf, mn, k, recipe, num_groups, is_sfa, disable_ue8m0_cast):
        """Scales of weights: the same tensor on Hopper, packed for each row on Blackwell."""
        if capability[0] == 9 or disable_ue8m0_cast:
            return sf
        return sf.new_empty(num_groups, -(-k // 512), mn, dtype=torch.int32).transpose(1, 2)

    def gemm(a, b, d, disable_ue8m0_cast):
        (codes, scales), (weight, weight_scales), (rows, columns) = a, b, d.shape
        assert capability[0] == 9 and d.dtype == torch.bfloat16 and codes.stride(1) == weight.stride(1) == 1
        assert codes.shape == (rows, weight.shape[1]) and weight.shape[0] == columns
        blocks = -(-codes.shape[1] // 128)
        assert scales.dtype == weight_scales.dtype == torch.float32 and scales.shape == (rows, blocks)
        assert weight_scales.shape == (-(-columns // 128), blocks)

    deep_gemm._lazy_init()
    deep_gemm._transform_sf_into_required_layout_impl, deep_gemm._fp8_gemm_nt_impl = transform, gemm


def _complete_flashinfer(capability: tuple[int, int]) -> None:
    """What FlashInfer's quantizer and GEMMs would check, without the modules that they compile first."""
    import torch
    from vllm.model_executor.kernels.linear.scaled_mm import flashinfer as vllm_flashinfer

    def gemm(input, weight, weight_scale, out_dtype):
        (rows, columns), count = input.shape, len(weight)
        assert capability == (9, 0) and rows < 32 and input.dtype == out_dtype == torch.bfloat16
        assert weight.shape == (count, columns) and weight.is_contiguous() and weight.dtype == torch.float8_e4m3fn
        assert weight_scale.shape == (-(-count // 128), columns // 128) and weight_scale.dtype == torch.float32
        return input.new_empty(rows, count)

    def mx_quantize(input, is_sf_swizzled_layout, alignment, backend):
        """Codes and scales as `mxfp8_quantize_cute_dsl` allocates them."""
        (rows, columns), tiled = input.shape, is_sf_swizzled_layout
        assert backend == "cute-dsl" and input.dtype == torch.bfloat16 and columns % alignment == 0
        count = -(-rows // 128) * 128 * (-(-columns // 128) * 4) if tiled else rows * (columns // 32)
        return torch.empty_like(input, dtype=torch.float8_e4m3fn), input.new_empty(count, dtype=torch.uint8)

    def mx_gemm(a, b, a_scale, b_scale, out, out_dtype, backend, use_8x4_sf_layout):
        """FlashInfer's own checks of its CUTLASS kernel."""
        tensors, options = (a, b, a_scale, b_scale), (None, out_dtype, use_8x4_sf_layout, backend)
        gemm_base._check_mm_mxfp8_problem_size(*tensors, *options)
        assert backend == "cutlass" and gemm_base._cutlass_gemm_mxfp8_requirement(*tensors, *options)
        return a.new_empty(len(a), b.shape[1], dtype=out_dtype)

    vllm_flashinfer.flashinfer_fp8_blockscale_gemm = gemm
    if find_spec("flashinfer"):  # a bundle (make_bundle.sh) has none
        import flashinfer
        from flashinfer.gemm import gemm_base

        flashinfer.mxfp8_quantize, flashinfer.mm_mxfp8 = mx_quantize, mx_gemm


def become_a_rank(folder: Path) -> None:
    """This process is the only one of its process groups; they meet in `folder`. Once, after `pretend`."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")  # what vLLM's external launcher reads
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.v1.worker.workspace import init_workspace_manager

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    init_workspace_manager(torch.device("cuda"))


def process_weights(engine: "nn.Module") -> list[str]:
    """As vLLM does after a load; returns the parameters that are then stored otherwise than they were loaded."""
    import torch
    from vllm.model_executor.layers.attention import Attention, MLAAttention, is_deferred_attention_layer

    changed = []
    for name, module in engine.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        if isinstance(
            module, (Attention, MLAAttention)
        ):  # vLLM looks at the values of its scales, and drops what they came in
            for scale in ("q_scale", "k_scale", "v_scale", "prob_scale"):
                delattr(module, scale)
            continue
        loaded = _stored(module)
        method.process_weights_after_loading(module)
        changed += [f"{name}.{key}" for key, stored in _stored(module).items() if stored != loaded.get(key)]
    for module in filter(is_deferred_attention_layer, engine.modules()):
        module.process_weights_after_loading(torch.bfloat16)
    return changed


def _stored(module: "nn.Module") -> dict[str, tuple]:
    named = module.named_parameters(recurse=False)
    return {name: (each.dtype, tuple(each.shape), each.stride()) for name, each in named}


def give_caches(config: "VllmConfig") -> None:
    """KV caches in the blocks and strides that vLLM would give them."""
    import torch
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.worker.utils import allocate_kv_cache

    current_platform.update_block_size_for_backend(config)
    context = config.compilation_config.static_forward_context
    layers = {name: layer for name, layer in context.items() if isinstance(layer, AttentionLayerBase)}
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
    layouts = get_supported_kv_cache_layouts({layer.get_attn_backend() for layer in layers.values()})
    layout = resolve_kv_cache_layout(config, [[each.name for each in layouts]], specs.values())
    [caches] = get_kv_cache_configs(config, [specs], [20 * 2**30])
    for name, cache in allocate_kv_cache(caches, torch.device("cuda"), layout).items():
        layers[name].bind_kv_cache(cache)


def call_layer(layer: "nn.Module", config: "VllmConfig", sequences: int, length: int) -> None:
    """One decoder layer that attends, on `length` new tokens of each of `sequences`."""
    import torch
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backend import CommonAttentionMetadata

    [attention] = [module for module in layer.modules() if isinstance(module, AttentionLayerBase)]
    tokens = sequences * length
    spec, longest = attention.get_kv_cache_spec(config), config.model_config.max_model_len
    slots = torch.empty(tokens, dtype=torch.int64)
    batch = CommonAttentionMetadata(
        query_start_loc=torch.empty(sequences + 1, dtype=torch.int32),
        query_start_loc_cpu=torch.empty(sequences + 1, dtype=torch.int32, device="cpu"),
        seq_lens=torch.empty(sequences, dtype=torch.int32),
        num_reqs=sequences,
        num_actual_tokens=tokens,
        max_query_len=length,
        max_seq_len=longest,
        block_table_tensor=torch.empty(sequences, longest // spec.block_size, dtype=torch.int32),
        slot_mapping=slots,
    )
    name = attention.layer_name
    builder = attention.get_attn_backend().get_builder_cls()(spec, [name], config, torch.device("cuda"))
    hidden, residual = (
        torch.empty(tokens, config.model_config.get_hidden_size(), dtype=torch.bfloat16) for _ in range(2)
    )
    with set_forward_context({name: builder.build(0, batch)}, config, num_tokens=tokens, slot_mapping={name: slots}):
        layer(positions=torch.empty(tokens, dtype=torch.int64), hidden_states=hidden, residual=residual)


@contextmanager
def calls_recorded() -> Iterator[list[tuple[str, dict[str, str]]]]:
    """A list that grows by (name, argument -> value) with every operator and Triton kernel that answers."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from triton.runtime.jit import JITFunction, MockTensor

    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            cuda = torch._C.DispatchKey.CUDA
            if operator.namespace == "vllm" and operator.has_kernel_for_dispatch_key(cuda):
                if operator._opname in OVER_FLASHINFER:
                    calls.append(described(operator, args, kwargs))
                with self:
                    return operator._op_dk(cuda, *args, **kwargs)
            result = operator(*args, **kwargs)
            if operator.namespace not in ("aten", "prim", "prims"):
                calls.append(described(operator, args, kwargs))
            return result

    def described(operator, args, kwargs):
        names = [argument.name for argument in operator._schema.arguments]
        return f"{operator.namespace}::{operator._opname}", _described(names, args, kwargs)

    run = JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **kwargs):
        def mock(value):
            return MockTensor(value.dtype, list(value.shape)) if isinstance(value, torch.Tensor) else value

        named = {name: mock(value) for name, value in kwargs.items()}
        compiled = run(kernel, *map(mock, args), grid=grid, warmup=True, **named)
        name, shared = kernel._fn_name.rpartition(".")[2], compiled.metadata.shared
        limit = GPUS[torch.cuda.get_device_capability()].shared * 1024
        if "cubin" not in compiled.asm or shared > limit:
            raise RuntimeError(f"{name} needs {shared} bytes of shared memory, and a block may have {limit}")
        described = _described(kernel.arg_names, args, kwargs)
        calls.append((f"triton::{name}", described | {"shared memory": f"{shared} bytes"}))

    JITFunction.run = compile_only
    try:
        with Recorder():
            yield calls
    finally:
        JITFunction.run = run


def _described(names: list[str], args: tuple, kwargs: dict) -> dict[str, str]:
    return {name: _value(value) for name, value in (dict(zip(names, args, strict=False)) | kwargs).items()}


def _value(value: object) -> str:
    """Of a tensor: dtype, shape and, unless rows lie one after another, strides."""
    import torch

    if not isinstance(value, torch.Tensor):
        return str(value)
    strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strides}"
