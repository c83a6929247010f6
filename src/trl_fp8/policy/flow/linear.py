"""The trained model's linear layers, computing what the engine computes: `FP8Linears.install(model, modules, flow)`.

Under LoRA the frozen base layer is FP8 and the adapters stay in high precision; the engine, which holds the merged
weight, quantizes the sum.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from weakref import ref

import torch
from torch import Tensor, nn
from torchao.quantization import Float8Tensor

from trl_fp8.quantization.formats.blocks import BLOCK
from trl_fp8.recipe.from_model import linear_layers
from trl_fp8.recipe.names import FUSED, ROW_PARALLEL

from .flow import FP8Flow
from .gemm import require_backend, torchao_linear
from .matmul import compute_dtype, fp8_linear
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
        flow, shared = self.fp8_flow, self._shared_input
        if flow.backend == "torchao":
            return self._torchao_forward(input)
        codes = shared.quantized(input, flow.quantize_tokens) if shared and flow.forward == "full" else None
        return fp8_linear(input, self.weight, self.bias, self.quantized_weight(), flow, self.partial_sums, codes)

    def _torchao_forward(self, input: Tensor) -> Tensor:
        compute = compute_dtype(input)
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
        for name, linear in chosen.items():
            linear.__class__ = FP8Linear
            linear.fp8_flow, linear._quantized = flow, {}
            linear.partial_sums = tensor_parallel_size if name.rpartition(".")[2] in ROW_PARALLEL else 1
        for group in _fused_layers(chosen):
            shared = SharedInput(len(group))
            for linear in group:
                linear._shared_input = shared
                if flow.format.fused_share_scale:
                    linear._peers = tuple(group)
        return cls(chosen)


def _fused_layers(linears: dict[str, FP8Linear]) -> list[list[FP8Linear]]:
    """Layers that the engine fuses, and that the model calls one after another with the same tensor."""
    groups = defaultdict(list)
    for name, linear in linears.items():
        parent, _, kind = name.rpartition(".")
        for number, kinds in enumerate(FUSED):
            if kind in kinds:
                groups[parent, number].append(linear)
    return [group for group in groups.values() if len(group) > 1]


def _why_not(linear: nn.Linear, flow: FP8Flow) -> str | None:
    if isinstance(linear, FP8Linear):
        return "is an FP8 linear already (remove the first installation before a second one)"
    if type(linear) is not nn.Linear:
        return f"is a {type(linear).__name__}, whose own forward would be lost"
    if flow.backend == "torchao" and (linear.out_features % BLOCK or linear.in_features % BLOCK):
        size = f"{linear.out_features} x {linear.in_features}"
        return f"is {size}, and fp8_gemm_backend='torchao' needs multiples of {BLOCK}; use 'fake_quant'"
    return None
