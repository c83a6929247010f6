"""The choice of the kernel of vLLM that multiplies with FP8 weights: the fastest that passes a check on this device.

    check    a weight is quantized as for a sync and written to a layer as a started engine holds it; the kernel's
             product is compared with that of the same codes in FP64; if a trainer shares the kernel, rows
             of a batch are also compared, bit for bit, with the same rows of a larger one
    timing   the model's own shapes, as vLLM fuses and shards them: with 8 and 64 rows, as decoding has at the end of
             a rollout, and with max_num_seqs, as at its start

All ranks of a job take the same kernel: one that fails on any rank is dropped, and the slowest rank's time counts.
"""

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from torchao.quantization import Float8Tensor
from transformers import PretrainedConfig
from vllm.config import CompilationConfig, CompilationMode, set_current_vllm_config
from vllm.model_executor.kernels.linear import init_fp8_linear_kernel, init_mxfp8_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledDynamicMMLinearKernel
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    create_fp8_quant_key,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
)

from trl_fp8.quantization.codec.blockwise import dequantize_weight
from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.quantization.codec.weights import quantize_as_engine, quantize_fused, scale_dtype, stored_scale
from trl_fp8.quantization.formats import BLOCK, MXFP8, FormatSpec, ScaleFormat
from trl_fp8.recipe.from_model import outline_of
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.recipe import FP8Recipe

from .numerics import (
    SMALL_BATCH,
    UNTILED_SCALE,
    keep_untiled_scale,
    kernel_scaling,
    tiled_scale,
    why_linear_unverifiable,
)


logger = get_logger(__name__)

Shape = tuple[int, int]  # of a weight, [N, K]
DECODED = 8, 64  # rows of the timed calls, beside max_num_seqs
REPETITIONS = 5  # of which the median counts
CHECKED, CHECKED_ROWS = (256, 512), (3, 130)  # shape of the weight and rows in the check
INVARIANT_ROWS = (1, 7, 64, 130)  # of a batch of 300; around these numbers kernels change their tiles
WITHOUT_NVCC = (
    ". This host has no nvcc, so it loses DeepGEMM, often the fastest kernel on Hopper; another one runs FP8 linears. "
    "Run: pip install 'nvidia-cuda-nvcc==13.*' nvidia-cuda-cccl, or set CUDA_HOME to a toolkit with nvcc 13, or go on."
)
TOOLKIT = "/usr/local/cuda"  # where DeepGEMM looks last
# pip's nvcc can be newer than the CUDA headers that torch pins beside it. CCCL refuses such a pair unless this is set;
# DeepGEMM's kernels do compile with such a pair
ANY_PAIR = "-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK"
Agree = Callable[[list[float]], list[float]]  # each number's maximum over all ranks of the job; a collective


@dataclass(frozen=True)
class Gemm:
    """A kernel of vLLM's to choose, without an engine around it."""

    name: str  # value of vLLM's `linear_backend`
    spec: FormatSpec
    scale_format: ScaleFormat  # of the weights' scales
    device: torch.device
    config: PretrainedConfig  # the policy's; vLLM refuses DeepGEMM for some
    batch_invariant: bool = False  # no batch may change a row's bits

    @torch.no_grad()
    def check(self) -> None:
        """Raise if it cannot be used: `ValueError` if it is not meant for this device, any other error if it fails."""
        generator = torch.Generator().manual_seed(0)
        weight = self._uneven(*CHECKED, generator)
        x = self._uneven(CHECKED_ROWS[-1], CHECKED[1], generator)
        kernel, layer = self.kernel_and_layer(CHECKED)
        if self.batch_invariant and isinstance(kernel, Fp8BlockScaledDynamicMMLinearKernel):
            raise ValueError(
                f"it takes another kernel below {SMALL_BATCH} rows, and a trainer that shares it needs the same bits "
                "in every batch. 'deep_gemm' gives them."
            )
        kernel.process_weights_after_loading(layer)
        keep_untiled_scale(kernel, layer)
        if reason := why_linear_unverifiable(kernel, layer):
            raise ValueError(reason)
        [codes] = quantize_fused([weight], self.spec, self.scale_format)
        layer.write(codes)
        w = dequantize_weight(codes, torch.float32).double()
        # Values next to those of codes: dividing by a scale and multiplying by its reciprocal give the same code there
        x = dequantize_weight(quantize_as_engine(x, self.spec, kernel_scaling(kernel, 1)), torch.bfloat16)
        for rows in CHECKED_ROWS:
            found = kernel.apply_weights(layer, x[:rows]).double()
            quantized = quantize_as_engine(x[:rows], self.spec, kernel_scaling(kernel, rows))
            a = dequantize_weight(quantized, torch.float32).double()
            expected, magnitudes = a @ w.T, a.abs() @ w.abs().T
            # Rounding to BF16 is off by 2^-8 at most. Tensor cores truncate 32 products, and the accumulator that they
            # are added to, to 14 bits: four times in 128 elements, after which kernels add in FP32
            wrong = ~((found - expected).abs() <= 2.0**-8 * expected.abs() + 4 * 2.0**-13 * magnitudes)  # so is NaN
            if wrong.any():
                row, column = wrong.nonzero()[0].tolist()
                raise RuntimeError(
                    f"{int(wrong.sum())} of {wrong.numel()} outputs are wrong, first at {[row, column]}: "
                    f"{found[row, column]:g}, expected {expected[row, column]:g}, in a product with {rows} rows"
                )
        if self.batch_invariant:
            self._require_batch_invariant(kernel, layer)

    def _require_batch_invariant(self, kernel: Any, layer: "_Layer") -> None:
        x = self._uneven(300, CHECKED[1], torch.Generator().manual_seed(1))
        whole = kernel.apply_weights(layer, x)
        for rows in INVARIANT_ROWS:
            if differ := int((kernel.apply_weights(layer, x[:rows]) != whole[:rows]).sum()):
                raise RuntimeError(
                    f"{differ} of {rows * CHECKED[0]} outputs of {rows} rows differ in a batch of {len(x)}; "
                    "a trainer that shares the kernel needs the same bits"
                )

    def _uneven(self, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
        """Return BF16 numbers whose magnitude differs between blocks, so that an exchange of scales shows."""
        height, width = self.spec.weight_block or (BLOCK, BLOCK)
        factors = torch.exp2(torch.randint(4, (-(-rows // height), columns // width), generator=generator).float())
        spread = factors.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)
        return (torch.randn(rows, columns, generator=generator) * spread).bfloat16().to(self.device)

    @torch.no_grad()
    def seconds(self, shape: Shape, rows: int) -> float:
        """Return the time of one call with a weight of `shape`."""
        kernel, layer = self.kernel_and_layer(shape)  # processing it after loading changes nothing: `check` saw it
        x = torch.randn(rows, shape[1], dtype=torch.bfloat16, device=self.device)
        return replayed_seconds(partial(kernel.apply_weights, layer, x))

    def kernel_and_layer(self, shape: Shape) -> tuple[Any, "_Layer"]:
        """Return vLLM's kernel and a layer as loaded; `ValueError` if there is no such kernel."""
        if self.name in ("deep_gemm", "flashinfer_cutlass"):
            find_nvcc()
        # The part of an engine's configuration that kernels read; custom_ops: vLLM's own operator quantizes, as there
        config = SimpleNamespace(
            compilation_config=CompilationConfig(mode=CompilationMode.NONE, custom_ops=["all"]),
            kernel_config=SimpleNamespace(linear_backend=self.name, linear_backend_per_quant=None),
            model_config=SimpleNamespace(hf_text_config=self.config),
        )
        with set_current_vllm_config(config):
            kernel = _started(self.spec, shape)
        return kernel, _Layer(shape, self.spec, self.device)


def _started(spec: FormatSpec, shape: Shape) -> Any:
    """Return the kernel that vLLM chooses under the current configuration; `ValueError` if it has none."""
    if spec is MXFP8:
        return init_mxfp8_linear_kernel(weight_shape=shape)
    if spec.weight_block:
        weights = create_fp8_quant_key(static=True, group_shape=GroupShape(*spec.weight_block))
        activations = create_fp8_quant_key(static=False, group_shape=GroupShape(1, spec.activation_group))
    else:
        weights, activations = kFp8StaticTensorSym, kFp8DynamicTokenSym
    dtypes = {"input_dtype": torch.bfloat16, "out_dtype": torch.bfloat16}
    return init_fp8_linear_kernel(activations, weights, weight_shape=shape, **dtypes)


class _Layer(nn.Module):
    """A linear layer of random codes, as vLLM's kernels see it."""

    def __init__(self, shape: Shape, spec: FormatSpec, device: torch.device):
        super().__init__()
        self.spec = spec
        self.output_size_per_partition, self.input_size_per_partition = shape
        self.weight_block_size = spec.weight_block and list(spec.weight_block)
        self.input_scale = None
        codes = torch.randint(0x7F, shape, dtype=torch.uint8, device=device).view(E4M3)  # all are finite
        self.weight = nn.Parameter(codes.t() if spec.weight_transposed else codes, requires_grad=False)
        scale = torch.ones(spec.held_scale_shape(shape), dtype=scale_dtype(spec), device=device)
        self.register_parameter(spec.scale_attribute, nn.Parameter(scale, requires_grad=False))

    def write(self, codes: Float8Tensor) -> None:
        """Write codes and scales as a sync does."""
        self.weight.copy_(codes.qdata.t() if self.spec.weight_transposed else codes.qdata)
        sent, scale = stored_scale(codes, self.spec), getattr(self, self.spec.scale_attribute)
        if hasattr(self, UNTILED_SCALE):
            getattr(self, UNTILED_SCALE).copy_(sent)
            sent = tiled_scale(self)
        scale.copy_(sent.view(scale.shape))


def replayed_seconds(call: Callable[[], object]) -> float:
    """Return the time of a call on the current GPU: from a CUDA graph and with an empty cache, as in a decode step.

    Not by `torch.cuda.graph`, which returns all unused memory to the driver before each capture: there are dozens.
    """
    call()  # compiles
    graph, times = torch.cuda.CUDAGraph(), []
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        graph.capture_begin(capture_error_mode="thread_local")  # other threads may watch collectives
        try:
            call()
        finally:
            graph.capture_end()
    flush = torch.empty(2 * torch.cuda.get_device_properties().L2_cache_size, dtype=torch.int8, device="cuda")
    for _ in range(REPETITIONS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return median(times)


def pinned_gemm(
    backends: Sequence[str],
    recipe: FP8Recipe,
    policy: nn.Module,
    device: torch.device,
    user: dict | None,
    agree: Agree,
    max_num_seqs: int,
    batch_invariant: bool = False,
) -> dict[str, str]:
    """Return `linear_backend` for `LLM(...)`: the best of `backends`; one that the user asks for is only checked.

    `{}` if no linear is FP8, or if the user asks for one that is not in `backends`: what its layers hold is checked
    when the engine has started.
    """
    user_backend = (user or {}).get("linear_backend")
    names = [name for name in backends if user_backend in (None, name)]
    if not (recipe.fp8_modules and names):
        return {}
    config = policy.config.get_text_config()
    candidates = [Gemm(name, recipe.format, recipe.scale_format, device, config, batch_invariant) for name in names]
    most = (user or {}).get("max_num_seqs", max_num_seqs)
    decides = [*(rows for rows in DECODED if rows < most), most]
    chosen = fastest(candidates, recipe.gemms(outline_of(policy)), decides, agree)
    if device.type == "cuda":  # vLLM measures the free memory when it starts
        torch.cuda.empty_cache()
    return {"linear_backend": chosen.name}


def fastest(
    candidates: Sequence[Gemm],
    gemms: Mapping[Shape, int],
    decides: Sequence[int],
    agree: Agree = list,
) -> Gemm:
    """Return the candidate that is fastest over all layers, among those that pass their check; `RuntimeError` with the
    reason of each if none does.

    All numbers of rows in `decides` have the same weight: each time is divided by that of the fastest candidate for
    as many rows. `candidates` are the same on all ranks; `gemms`: shape of a weight -> number of layers.
    """
    reasons = {each.name: _tried(each, each.check)[1] for each in candidates}
    passed = _agreed(candidates, reasons, agree)
    if len(passed) == 1:
        return passed[0]
    times = {}
    for rows in decides:
        for shape in gemms:
            for each in passed:
                if reasons[each.name] is None:
                    measured = _tried(each, partial(each.seconds, shape, rows))
                    times[each.name, rows, shape], reasons[each.name] = measured
    passed = _agreed(passed, reasons, agree)
    sums = [
        sum(n * times[each.name, rows, shape] for shape, n in gemms.items()) for rows in decides for each in passed
    ]
    slowest = torch.tensor(agree(sums), dtype=torch.float64).view(len(decides), len(passed))
    relative = slowest / slowest.amin(1, keepdim=True)  # to the fastest, for each number of rows
    chosen = passed[int(relative.sum(0).argmin())]
    logger.info(f"FP8 linears run on {chosen.name!r}, microseconds of a call:\n{_table(passed, gemms, times)}")
    return chosen


def _agreed(candidates: Sequence[Gemm], reasons: Mapping[str, str | None], agree: Agree) -> list[Gemm]:
    """Return the kernels that no rank rejected."""
    failed = agree([float(reasons[each.name] is not None) for each in candidates])
    if all(failed):
        between = "\n  "
        against = (f"{each.name}: {reasons[each.name] or 'failed on another rank'}" for each in candidates)
        raise RuntimeError(
            f"none of vLLM's kernels can be used for FP8 linears on this device:\n  {listed(against, 8, between)}\n"
            "Check that vLLM was built for the installed torch and for this GPU, or set fp8_weights=False."
        )
    return [each for each, bad in zip(candidates, failed, strict=True) if not bad]


def _tried(candidate: Gemm, use: Callable[[], float | None]) -> tuple[float | None, str | None]:
    """Return the result of `use` and None, or None and the reason why it failed."""
    try:
        return use(), None
    except ValueError as reason:
        logger.info(f"linear_backend={candidate.name!r} is left out: {reason}")
        return None, str(reason)
    except Exception as error:  # kernels fail in any way
        reason = f"{type(error).__name__}: {error}"
        lost = WITHOUT_NVCC if candidate.name == "deep_gemm" and not find_nvcc() else ""
        logger.warning(f"linear_backend={candidate.name!r} is not used: {reason}{lost}", main_process_only=False)
        return None, reason


def _table(candidates: Sequence[Gemm], gemms: Mapping[Shape, int], times: Mapping) -> str:
    """Return a line for each shape and number of rows."""
    lines = [["layers", "N", "K", "rows", *(each.name for each in candidates)]]
    for (n, k), layers in gemms.items():
        for rows in sorted({rows for _, rows, _ in times}):
            lines.append([layers, n, k, rows, *(f"{1e6 * times[each.name, rows, (n, k)]:.1f}" for each in candidates)])
    return "\n".join("".join(f"{cell:>12}" for cell in line) for line in lines)


def find_nvcc() -> bool:
    """Return whether DeepGEMM finds nvcc, the CUDA compiler. If pip's is the only one, set CUDA_HOME for good.

    Call it before DeepGEMM is imported, which looks for nvcc only then. It reads the flags at each compilation.
    """
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), TOOLKIT)
    if any(shutil.which("nvcc", path=folder) for folder in (None, *(f"{home}/bin" for home in homes if home))):
        return True
    pips = [f"{folder}/nvidia/cu13" for folder in sys.path if shutil.which("nvcc", path=f"{folder}/nvidia/cu13/bin")]
    if pips:
        flags = f"{os.environ.get('NVCC_APPEND_FLAGS', '')} {ANY_PAIR}".strip()
        os.environ.update(CUDA_HOME=pips[0], NVCC_APPEND_FLAGS=flags)
        logger.info(f"DeepGEMM compiles with pip's nvcc: CUDA_HOME={pips[0]}, NVCC_APPEND_FLAGS={flags!r}")
    return bool(pips)
