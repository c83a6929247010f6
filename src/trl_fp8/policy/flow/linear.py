"""The trained model's linear layers, computing what the engine computes: `FP8Linears.install(model, modules, flow)`.

Under LoRA the frozen base layer is FP8 and the adapters stay in high precision; the engine, which holds the merged
weight, quantizes the sum.

`fp8_linear` is the differentiable function; which operand is rounded where is said in flow.py. What the backward keeps
decides its memory: straight through it keeps `x` in the compute dtype, as the plain linear does; in FP8 the forward's
codes of `x`, 1 byte per element. Neither keeps a copy of the weight.

Shape letters: T tokens (all leading dims), N out-features, K in-features.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchao.quantization import Float8Tensor

from trl_fp8.quantization.blockwise import dequantize_weight
from trl_fp8.quantization.formats.blocks import BLOCK
from trl_fp8.recipe.from_model import linear_layers
from trl_fp8.recipe.names import FUSED, ROW_PARALLEL

from .flow import FP8Flow
from .gemm import gemm_for, require_backend, torchao_linear
from .swapped_modules import KeepsQuantizedWeights, SwappedModules


class SharedInput:
    """Q(x), made once for `readers` layers that get the same tensor in a row (q, k, v, and gate, up)."""

    def __init__(self, readers: int):
        self.readers = readers
        self._codes: Float8Tensor | None = None
        self._input: ref[Tensor] | None = None
        self._version, self._to_come = 0, 0

    def quantized(self, x: Tensor, quantize: Callable[[Tensor], Float8Tensor]) -> Float8Tensor:
        """Q(x), from `quantize(x)` unless the layer before got this very tensor, unchanged since."""
        if x.is_inference():  # has no version, so that a change would not be seen
            return quantize(x)
        if self._codes is None or self._input() is not x or self._version != x._version:
            self._codes, self._input, self._version = quantize(x), ref(x), x._version
            self._to_come = self.readers
        codes, self._to_come = self._codes, self._to_come - 1
        if not self._to_come:
            self._codes = self._input = None
        return codes


class FP8Linear(KeepsQuantizedWeights, nn.Linear):
    """An `nn.Linear` under an `FP8Flow`, made by `FP8Linears.install` of an existing layer; computes `fp8_linear`."""

    before = nn.Linear
    attributes = ("fp8_flow", "partial_sums", "_quantized", "_peers", "_shared_input")

    partial_sums: int
    _shared_input: SharedInput | None = None

    def forward(self, input: Tensor) -> Tensor:
        flow, shared, compute = self.fp8_flow, self._shared_input, compute_dtype(input)
        if flow.backend != "torchao":
            codes = shared.quantized(input, flow.quantize_tokens) if shared and flow.forward == "full" else None
            return fp8_linear(input, self.weight, self.bias, self.quantized_weight(), flow, self.partial_sums, codes)
        with torch.autocast(input.device.type, enabled=False):
            y = torchao_linear(input.reshape(-1, input.shape[-1]), self.weight).view(*input.shape[:-1], -1)
            return (y if self.bias is None else y + self.bias.to(torch.bfloat16)).to(compute)

    def __getstate__(self) -> dict:
        return {key: value for key, value in super().__getstate__().items() if key != "_shared_input"}


class FP8Linears(SwappedModules):
    """The FP8 linears of one model, by checkpoint name."""

    @classmethod
    def install(
        cls, model: nn.Module, modules: Collection[str], flow: FP8Flow, tensor_parallel_size: int = 1
    ) -> "FP8Linears":
        """Turn linear layers of `model` (plain or PEFT-wrapped), by checkpoint name, into `FP8Linear`, in place.

        Row-parallel layers sum as many partial products as the engine's `tensor_parallel_size`. `ValueError` lists all
        names that cannot be turned, and why, or says why the backend cannot run here; nothing is turned then.
        """
        require_backend(flow.backend, torch.cuda.get_device_capability() if torch.cuda.is_available() else None)
        wanted, linears = set(modules), dict(linear_layers(model))
        unknown = sorted(wanted - linears.keys())
        if unknown:
            raise ValueError(
                f"No linear layers of {type(model).__name__}: {unknown}. Names are matched exactly; the model has for "
                f"example {list(linears)[:3]}."
            )
        chosen = {name: linear for name, linear in linears.items() if name in wanted}
        offenders = [f"{name}: {why}" for name, linear in chosen.items() if (why := _why_not(linear, flow))]
        if offenders:
            raise ValueError("These layers cannot become FP8 linears:\n  " + "\n  ".join(offenders))
        groups = defaultdict(list)  # what the engine fuses, and the model calls in a row with the same tensor
        for name, linear in chosen.items():
            parent, _, kind = name.rpartition(".")
            linear.__class__ = FP8Linear
            linear.fp8_flow, linear._quantized = flow, {}
            linear.partial_sums = tensor_parallel_size if kind in ROW_PARALLEL else 1
            groups[parent, next((kinds for kinds in FUSED if kind in kinds), kind)].append(linear)
        for group in (tuple(group) for group in groups.values() if len(group) > 1):
            shared = SharedInput(len(group))
            for linear in group:
                linear._shared_input = shared
                linear._peers = group if flow.format.fused_share_scale else ()
        return cls(chosen)


def _why_not(linear: nn.Linear, flow: FP8Flow) -> str | None:
    if isinstance(linear, FP8Linear):
        return "is an FP8 linear already (remove the first installation before a second one)"
    if type(linear) is not nn.Linear:
        return f"is a {type(linear).__name__}, whose own forward would be lost"
    if flow.backend == "torchao" and (linear.out_features % BLOCK or linear.in_features % BLOCK):
        size = f"{linear.out_features} x {linear.in_features}"
        return f"is {size}, and fp8_gemm_backend='torchao' needs multiples of {BLOCK}; use 'fake_quant'"
    return None


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_codes: Float8Tensor,
    flow: FP8Flow,
    partial_sums: int = 1,
    input_codes: Float8Tensor | None = None,
) -> Tensor:
    """`x @ W.T + bias` under `flow` (not of backend "torchao"), `[..., N]` in the compute dtype.

    `weight` `[N, K]` gets the gradient. `weight_codes` are Q(W), and `input_codes` Q(x), `[T, K]`, where another layer
    needed it too. `partial_sums` is the number of parts of K that the engine's tensor parallel ranks multiply by
    themselves: each product is rounded to BF16 and their sum once more, as any all-reduce of two ranks does.
    """
    tokens, compute = x.reshape(-1, x.shape[-1]), compute_dtype(x)
    y = _FP8Matmul.apply(tokens, weight, bias, weight_codes, flow, partial_sums, compute, input_codes)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def compute_dtype(x: Tensor) -> torch.dtype:
    """Dtype in which a plain linear would compute: autocast's where it is on, else that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _FP8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, weight_codes: Float8Tensor, flow: FP8Flow, partial_sums, compute, codes):
        with torch.autocast(x.device.type, enabled=False):
            if codes is None and flow.forward == "full":
                codes = flow.quantize_input(x, partial_sums)
            y = _product(x, codes, weight_codes, bias, flow, partial_sums, compute)
            ctx.flow, ctx.compute = flow, compute
            ctx.blocks = weight_codes.block_size, None if codes is None else codes.block_size
            ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
            for_dx, for_dw = (None, None), (None, None)
            if ctx.needs_input_grad[0]:
                kept = flow.backward == "fp8" and flow.cache_weights
                for_dx = (weight_codes.qdata, weight_codes.scale) if kept else (weight, None)
            if ctx.needs_input_grad[1]:
                kept = flow.backward == "fp8" and codes is not None
                for_dw = (codes.qdata, codes.scale) if kept else (x.to(compute), None)
            ctx.save_for_backward(*for_dx, *for_dw)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        dx = dw = db = None
        weight, weight_scale, x, x_scale = ctx.saved_tensors
        if weight_scale is not None:
            weight = _float8(weight, weight_scale, ctx.blocks[0])
        if x_scale is not None:
            x = _float8(x, x_scale, ctx.blocks[1])
        with torch.autocast(dy.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                dx = _input_gradient(dy, weight, ctx.flow, ctx.compute).to(ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                dw = _weight_gradient(dy, x, ctx.flow, ctx.compute).to(ctx.dtypes[1])
            if ctx.needs_input_grad[2]:
                db = dy.sum(0).to(ctx.dtypes[2])
        return dx, dw, db, None, None, None, None, None


def _product(
    x: Tensor, codes, weight_codes: Float8Tensor, bias, flow: FP8Flow, partial_sums: int, compute: torch.dtype
) -> Tensor:
    """The forward, `[T, N]` in `compute`; `codes` is Q(x), None where x stays as it is."""
    if codes is None:
        bias = bias if bias is None else bias.to(compute)
        return F.linear(x.to(compute), dequantize_weight(weight_codes, compute), bias)
    gemm, bf16 = gemm_for(flow.backend), torch.bfloat16
    parts = zip(_split(codes, partial_sums), _split(weight_codes, partial_sums), strict=True)
    products = [gemm(*part, compute) for part in parts]
    # BF16 before the bias is added and again after, as the engine does (vLLM 0.31, BlockScaledMMLinearKernel.py), or
    # only after, where its kernel adds the bias
    if bias is not None:  # the first rank's, before the sum
        first = products[0].float() if flow.format.fused_bias else products[0].to(bf16)
        products[0] = first + bias.to(bf16)
    products = [product.to(bf16) for product in products]
    y = products[0] if partial_sums == 1 else sum(product.float() for product in products).to(bf16)
    return y.to(compute)


def _input_gradient(dy: Tensor, weight: Tensor | Float8Tensor, flow: FP8Flow, compute: torch.dtype) -> Tensor:
    """dX `[T, K]`. `weight` is W, or the forward's codes of it."""
    if flow.backward == "bf16":
        dtype = gemm_dtype(compute, dy.device)
        return dy.to(dtype).mm(weight.to(compute).to(dtype))
    # Without a cache the codes are made again: kept ones would hold an unsharded weight until the backward
    codes = weight if isinstance(weight, Float8Tensor) else flow.quantize_weights([weight])[0]
    # Blocks transposed are the same blocks: no second rounding
    transposed = _float8(codes.qdata.t(), codes.scale.t(), codes.block_size[::-1])
    return gemm_for(flow.backend)(flow.quantize_for_backward(dy), transposed, compute).to(compute)


def _weight_gradient(dy: Tensor, x: Tensor | Float8Tensor, flow: FP8Flow, compute: torch.dtype) -> Tensor:
    """dW `[N, K]`. `x` is X, or the forward's codes of it."""
    if flow.backward == "bf16":
        dtype = gemm_dtype(compute, dy.device)
        return dy.to(dtype).t().mm(x.to(dtype))
    seen = dequantize_weight(x, torch.float32) if isinstance(x, Float8Tensor) else x
    along_tokens = flow.quantize_for_backward(dy.t()), flow.quantize_for_backward(seen.t())
    return gemm_for(flow.backend)(*along_tokens, compute).to(compute)


def gemm_dtype(compute: torch.dtype, device: torch.device) -> torch.dtype:
    """`compute`, but FP32 on CPU: those without 16-bit units emulate it ten times slower."""
    return torch.float32 if device.type == "cpu" else compute


def _split(operand: Float8Tensor, parts: int) -> list[Float8Tensor]:
    """`operand` `[*, K]` in equal parts of K, each of whole blocks, or all of one block."""
    if parts == 1:
        return [operand]
    rows, columns = operand.block_size
    scales = operand.scale.chunk(parts, 1) if operand.scale.shape[1] > 1 else [operand.scale] * parts
    pieces = zip(operand.qdata.chunk(parts, 1), scales, strict=True)
    return [_float8(codes, scale, [rows, min(columns, codes.shape[1])]) for codes, scale in pieces]


def _float8(codes: Tensor, scale: Tensor, block_size: list[int]) -> Float8Tensor:
    return Float8Tensor(codes, scale, block_size=list(block_size), dtype=torch.bfloat16)
