"""The choice of vLLM's kernel for FP8 linears: the fastest kernel that passes a check on this device.

`pinned_gemm` makes a `Gemm` of each candidate, and `fastest` chooses one of them by two methods:

    check      A weight is quantized as for a sync and written to a layer like those of a started engine. The kernel's
               product is compared with the product of the same codes in FP64. If a trainer calls the kernel, too, rows
               of a batch are also compared, bit for bit, with the same rows of a larger batch
    seconds    The kernel is timed on the model's own shapes, as vLLM fuses and shards them: with 8 and 64 rows, as in
               decoding at the end of a rollout, and with max_num_seqs rows, as at the start of a rollout

All ranks of a job take the same kernel. A kernel that fails on any rank is dropped. Of the times that the ranks
measure for a kernel, the longest counts.
"""

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
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
from vllm.utils.flashinfer import has_flashinfer

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
from .platform import chosen_backend


logger = get_logger(__name__)

Shape = tuple[int, int]  # shape of a weight, [N, K]
DECODED = 8, 64  # batch sizes (rows) of the timed calls; max_num_seqs is a further batch size
REPETITIONS = 5  # timed repetitions of a call; their median counts
CHECKED = (256, 512)  # shape of the weight in the check
CHECKED_ROWS = (3, 130)  # batch sizes in the check
INVARIANT_ROWS = (1, 7, 64, 130)  # batch sizes compared with a batch of 300; kernels change their tiles near these
WITHOUT_NVCC = (
    ". This host has no nvcc, so it loses DeepGEMM, often the fastest kernel on Hopper; another one runs FP8 linears. "
    "Run: pip install 'nvidia-cuda-nvcc==13.*' nvidia-cuda-cccl, or set CUDA_HOME to a toolkit with nvcc 13, or go on."
)
WITHOUT_FLASHINFER = (
    "vLLM takes FlashInfer only if nvcc, with which it compiles, is on PATH before vLLM is imported; CUDA_HOME is not "
    "enough. Put its folder on PATH and start again: pip's nvcc is in site-packages/nvidia/cu13/bin"
)
TOOLKIT = "/usr/local/cuda"  # the last folder in which DeepGEMM looks for nvcc
# pip's nvcc can be newer than the CUDA headers that torch pins beside it. CCCL refuses such a pair unless this flag is
# set. DeepGEMM's kernels do compile with such a pair
ANY_PAIR = "-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK"
Agree = Callable[[list[float]], list[float]]  # returns the element-wise maximum over all ranks; a collective


@dataclass(frozen=True)
class Gemm:
    """One of vLLM's kernels, as a candidate. Its methods run it without an engine."""

    name: str  # value of vLLM's `linear_backend`
    spec: FormatSpec
    scale_format: ScaleFormat  # format of the weights' scales
    device: torch.device
    config: PretrainedConfig  # the policy's text config, because vLLM refuses DeepGEMM for some models
    batch_invariant: bool = False  # whether a row must have the same bits in every batch

    @torch.no_grad()
    def check(self) -> None:
        """Raise if the kernel cannot be used.

        Raises:
            ValueError: The kernel does not suit this device, audits, or a trainer that also calls the kernel.
            Exception: The kernel fails, or its results are wrong. vLLM's kernels raise errors of any class.
        """
        # 1. Start the kernel, as vLLM does after it has loaded a layer
        kernel, layer = self.kernel_and_layer(CHECKED)
        if self.batch_invariant and isinstance(kernel, Fp8BlockScaledDynamicMMLinearKernel):
            raise ValueError(
                f"it takes another kernel below {SMALL_BATCH} rows, and a trainer that shares it needs the same bits "
                "in every batch. 'deep_gemm' gives them."
            )
        kernel.process_weights_after_loading(layer)
        keep_untiled_scale(kernel, layer)
        reason = why_linear_unverifiable(kernel, layer)
        if reason:
            raise ValueError(reason)

        # 2. Write a weight to the layer, as a sync does
        generator = torch.Generator().manual_seed(0)
        weight = self._uneven(*CHECKED, generator)
        [codes] = quantize_fused([weight], self.spec, self.scale_format)
        layer.write(codes)
        w = dequantize_weight(codes, torch.float32).double()

        # 3. Make inputs that are a code times a scale. A kernel may divide by the scale or multiply by its reciprocal:
        #    both give the same codes. rows=1: if the kernel has other scales for small batches, these are FP32
        numbers = self._uneven(CHECKED_ROWS[-1], CHECKED[1], generator)
        input_codes = quantize_as_engine(numbers, self.spec, kernel_scaling(kernel, rows=1))
        x = dequantize_weight(input_codes, torch.bfloat16)

        # 4. Compare the kernel's products with products in FP64
        for rows in CHECKED_ROWS:
            found = kernel.apply_weights(layer, x[:rows]).double()
            quantized = quantize_as_engine(x[:rows], self.spec, kernel_scaling(kernel, rows))
            a = dequantize_weight(quantized, torch.float32).double()
            expected = a @ w.T
            magnitudes = a.abs() @ w.abs().T
            # Rounding to BF16 is off by 2^-8 at most. Tensor cores truncate 32 products and their accumulator to 14
            # bits. They do so 4 times per 128 elements, each time off by 2^-13 at most. The rest is added in FP32
            tolerance = 2.0**-8 * expected.abs() + 4 * 2.0**-13 * magnitudes
            wrong = ~((found - expected).abs() <= tolerance)  # not `>`, so that NaN counts as wrong
            if wrong.any():
                row, column = wrong.nonzero()[0].tolist()
                raise RuntimeError(
                    f"{int(wrong.sum())} of {wrong.numel()} outputs are wrong, first at {[row, column]}: "
                    f"{found[row, column]:g}, expected {expected[row, column]:g}, in a product with {rows} rows"
                )
        if self.batch_invariant:
            self._require_batch_invariant(kernel, layer)

    def _require_batch_invariant(self, kernel: Any, layer: "_Layer") -> None:
        """Raise `RuntimeError` if the rows of a small batch have other bits than the same rows of a larger batch."""
        x = self._uneven(300, CHECKED[1], torch.Generator().manual_seed(1))
        whole = kernel.apply_weights(layer, x)
        for rows in INVARIANT_ROWS:
            wrong = int((kernel.apply_weights(layer, x[:rows]) != whole[:rows]).sum())
            if wrong:
                raise RuntimeError(
                    f"{wrong} of {rows * CHECKED[0]} outputs of {rows} rows differ in a batch of {len(x)}; "
                    "a trainer that shares the kernel needs the same bits"
                )

    def _uneven(self, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
        """Return BF16 numbers whose magnitudes differ between blocks, so that swapped scales give a wrong product."""
        height, width = self.spec.weight_block or (BLOCK, BLOCK)
        blocks = -(-rows // height), columns // width  # -(-a // b) rounds up
        factors = torch.exp2(torch.randint(4, blocks, generator=generator).float())  # 1, 2, 4 or 8 for a block
        spread = factors.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)
        return (torch.randn(rows, columns, generator=generator) * spread).bfloat16().to(self.device)

    @torch.no_grad()
    def seconds(self, shape: Shape, rows: int) -> float:
        """Return the seconds of one call with a weight of `shape` and a batch of `rows`."""
        # No `process_weights_after_loading`: `check` has shown that the kernel keeps the weight as it is
        kernel, layer = self.kernel_and_layer(shape)
        x = torch.randn(rows, shape[1], dtype=torch.bfloat16, device=self.device)
        return replayed_seconds(partial(kernel.apply_weights, layer, x))

    def kernel_and_layer(self, shape: Shape) -> tuple[Any, "_Layer"]:
        """Return vLLM's kernel, and a layer such as vLLM loads. Raise `ValueError` if vLLM cannot use the kernel."""
        if self.name in ("deep_gemm", "flashinfer_cutlass"):
            find_nvcc()
        if self.name == "flashinfer_cutlass" and find_spec("flashinfer") and not has_flashinfer():
            raise ValueError(WITHOUT_FLASHINFER)
        # Stand-in for an engine's configuration, with the entries that kernels read. With custom_ops=["all"] a kernel
        # quantizes activations with vLLM's own operator
        config = SimpleNamespace(
            compilation_config=CompilationConfig(mode=CompilationMode.NONE, custom_ops=["all"]),
            kernel_config=SimpleNamespace(linear_backend=self.name, linear_backend_per_quant=None),
            model_config=SimpleNamespace(hf_text_config=self.config),
        )
        with set_current_vllm_config(config):
            kernel = _started(self.spec, shape)
        return kernel, _Layer(shape, self.spec, self.device)


def _started(spec: FormatSpec, shape: Shape) -> Any:
    """Return the kernel that vLLM chooses under the current configuration. Raise `ValueError` if it has none."""
    if spec is MXFP8:
        return init_mxfp8_linear_kernel(weight_shape=shape)
    if spec.weight_block:
        weights = create_fp8_quant_key(static=True, group_shape=GroupShape(*spec.weight_block))
        activations = create_fp8_quant_key(static=False, group_shape=GroupShape(1, spec.activation_group))
    else:  # one scale per weight, and one per token
        weights = kFp8StaticTensorSym
        activations = kFp8DynamicTokenSym
    return init_fp8_linear_kernel(
        activations, weights, weight_shape=shape, input_dtype=torch.bfloat16, out_dtype=torch.bfloat16
    )


class _Layer(nn.Module):
    """A linear layer of random codes, as vLLM's kernels see it."""

    def __init__(self, shape: Shape, spec: FormatSpec, device: torch.device):
        super().__init__()
        self.spec = spec
        self.output_size_per_partition, self.input_size_per_partition = shape
        self.weight_block_size = list(spec.weight_block) if spec.weight_block else None
        self.input_scale = None
        codes = torch.randint(0x7F, shape, dtype=torch.uint8, device=device).view(E4M3)  # all are finite
        self.weight = nn.Parameter(codes.t() if spec.weight_transposed else codes, requires_grad=False)
        scale = torch.ones(spec.held_scale_shape(shape), dtype=scale_dtype(spec), device=device)
        self.register_parameter(spec.scale_attribute, nn.Parameter(scale, requires_grad=False))

    def write(self, codes: Float8Tensor) -> None:
        """Write codes and scales as a sync does. For a kernel that reads tiles, rearrange the scales into tiles."""
        self.weight.copy_(codes.qdata.t() if self.spec.weight_transposed else codes.qdata)
        sent = stored_scale(codes, self.spec)
        scale = getattr(self, self.spec.scale_attribute)
        if hasattr(self, UNTILED_SCALE):
            getattr(self, UNTILED_SCALE).copy_(sent)
            sent = tiled_scale(self)
        scale.copy_(sent.view(scale.shape))


def replayed_seconds(call: Callable[[], object]) -> float:
    """Return the median seconds of a call on the current GPU, from a CUDA graph and with a flushed L2 cache.

    A decode step runs kernels in this way. `torch.cuda.graph` is not used, because it returns all unused memory to the
    driver before each capture, and there are dozens of captures.
    """
    call()  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        graph.capture_begin(capture_error_mode="thread_local")  # other threads may watch collectives
        try:
            call()
        finally:
            graph.capture_end()
    flush = torch.empty(2 * torch.cuda.get_device_properties().L2_cache_size, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(REPETITIONS):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
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
    """Return `{"linear_backend": name}` for `LLM(...)`. The name is the fastest of `backends`, or the user's choice.

    `user`: the engine arguments that the user set. Returns `{}` if no linear is FP8, or if the user's choice is not in
    `backends`. vLLM then starts with that choice, and `numerics.require_auditable` checks the layers of the started
    engine. Raises `RuntimeError` if no kernel passes its check. Collective.
    """
    user = user or {}
    user_backend = chosen_backend(user, "linear_backend")
    names = [name for name in backends if user_backend in (None, name)]
    if not (recipe.fp8_modules and names):
        return {}
    config = policy.config.get_text_config()
    candidates = [
        Gemm(name, recipe.format, recipe.scale_format, device=device, config=config, batch_invariant=batch_invariant)
        for name in names
    ]
    most_rows = user.get("max_num_seqs") or max_num_seqs
    row_counts = [rows for rows in DECODED if rows < most_rows] + [most_rows]
    chosen = fastest(candidates, recipe.gemms(outline_of(policy)), row_counts, agree)
    if device.type == "cuda":  # free memory, because vLLM measures how much is free when it starts
        torch.cuda.empty_cache()
    return {"linear_backend": chosen.name}


def fastest(
    candidates: Sequence[Gemm],
    gemms: Mapping[Shape, int],
    row_counts: Sequence[int],
    agree: Agree = list,
) -> Gemm:
    """Return the candidate that is fastest over all layers, among those that pass their check. Collective.

    `candidates` are the same on all ranks. `gemms` maps the shape of a weight to the number of layers that have it.
    For each of `row_counts`, the times are divided by the time of the fastest candidate. The candidate with the
    smallest sum of these ratios is chosen, so all `row_counts` have the same weight. Raises `RuntimeError` with the
    reasons of all candidates if none passes.
    """
    # 1. Drop the candidates that fail their check
    reasons: dict[str, str | None] = {}  # name of a candidate -> why it cannot be used; None if it can
    for each in candidates:
        _, reasons[each.name] = _tried(each, each.check)
    passed = _agreed(candidates, reasons, agree)
    if len(passed) == 1:
        return passed[0]

    # 2. Time the others. Drop those that fail
    times = {}  # (name, rows, shape) -> seconds
    for rows in row_counts:
        for shape in gemms:
            for each in passed:
                if reasons[each.name] is None:
                    seconds, reason = _tried(each, partial(each.seconds, shape, rows))
                    times[each.name, rows, shape] = seconds
                    reasons[each.name] = reason
    passed = _agreed(passed, reasons, agree)

    # 3. Compare the seconds of all layers together, on the slowest rank
    totals = []  # for each number of rows, one number for each candidate
    for rows in row_counts:
        for each in passed:
            totals.append(sum(layers * times[each.name, rows, shape] for shape, layers in gemms.items()))
    slowest = torch.tensor(agree(totals), dtype=torch.float64).view(len(row_counts), len(passed))
    ratios = (slowest / slowest.amin(1, keepdim=True)).sum(0)
    chosen = passed[int(ratios.argmin())]
    logger.info(f"FP8 linears run on {chosen.name!r}, microseconds of a call:\n{_table(passed, gemms, times)}")
    return chosen


def _agreed(candidates: Sequence[Gemm], reasons: Mapping[str, str | None], agree: Agree) -> list[Gemm]:
    """Return the kernels that no rank rejected. Raise `RuntimeError` if there is none. Collective."""
    failed = agree([float(reasons[each.name] is not None) for each in candidates])  # 1.0: failed on some rank
    if all(failed):
        lines = [f"{each.name}: {reasons[each.name] or 'failed on another rank'}" for each in candidates]
        all_reasons = listed(lines, 8, "\n  ")
        raise RuntimeError(
            f"none of vLLM's kernels can be used for FP8 linears on this device:\n  {all_reasons}\n"
            "Check that vLLM was built for the installed torch and for this GPU, or set fp8_weights=False."
        )
    return [each for each, is_rejected in zip(candidates, failed, strict=True) if not is_rejected]


def _tried(candidate: Gemm, use: Callable[[], float | None]) -> tuple[float | None, str | None]:
    """Call `use`. Return its result and None, or None and the reason why it failed."""
    try:
        return use(), None
    except ValueError as reason:
        logger.info(f"linear_backend={candidate.name!r} is left out: {reason}")
        return None, str(reason)
    except Exception as error:  # a kernel may fail with any error
        reason = f"{type(error).__name__}: {error}"
        lost = WITHOUT_NVCC if candidate.name == "deep_gemm" and not find_nvcc() else ""
        logger.warning(f"linear_backend={candidate.name!r} is not used: {reason}{lost}", main_process_only=False)
        return None, reason


def _table(candidates: Sequence[Gemm], gemms: Mapping[Shape, int], times: Mapping) -> str:
    """Return a table of times with a line for each shape and number of rows."""
    lines = [["layers", "N", "K", "rows", *(each.name for each in candidates)]]
    for shape, layers in gemms.items():
        for rows in sorted({rows for _, rows, _ in times}):
            microseconds = [f"{1e6 * times[each.name, rows, shape]:.1f}" for each in candidates]
            lines.append([layers, *shape, rows, *microseconds])
    texts = ["".join(f"{cell:>12}" for cell in line) for line in lines]
    return "\n".join(texts)


def find_nvcc() -> bool:
    """Return whether DeepGEMM finds nvcc, the CUDA compiler.

    If there is only the nvcc of pip's package, set CUDA_HOME and NVCC_APPEND_FLAGS for it in the environment of this
    process. Call this function before DeepGEMM is imported, because DeepGEMM looks for nvcc only then. nvcc reads the
    flags at each compilation.
    """
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), TOOLKIT)
    folders = [None, *(f"{home}/bin" for home in homes if home)]  # None: the folders on PATH
    if any(shutil.which("nvcc", path=folder) for folder in folders):
        return True
    for folder in sys.path:
        pip_home = f"{folder}/nvidia/cu13"
        if shutil.which("nvcc", path=f"{pip_home}/bin"):
            flags = f"{os.environ.get('NVCC_APPEND_FLAGS', '')} {ANY_PAIR}".strip()
            os.environ.update(CUDA_HOME=pip_home, NVCC_APPEND_FLAGS=flags)
            logger.info(f"DeepGEMM compiles with pip's nvcc: CUDA_HOME={pip_home}, NVCC_APPEND_FLAGS={flags!r}")
            return True
    return False
