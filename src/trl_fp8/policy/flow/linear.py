"""The trained model's linear layers, computing what the engine computes: `FP8Linears.install(model, modules, flow)`.

A layer stays the object it was and only changes its class to `FP8Linear`, so parameters, names, state dict, hooks,
PEFT wrappers and sharding stay as they are. Under LoRA the frozen base layer is FP8 and the adapters stay in high
precision; the engine, which holds the merged weight, quantizes the sum.

The quantized weight is made once per optimizer step, by the sync or by the forward that comes first; whoever changes
weights calls `FP8Linears.invalidate()` (quantized_weight.py says why).
"""

from collections import defaultdict
from collections.abc import Collection

import torch
from torch import nn
from torchao.quantization import Float8Tensor

from trl_fp8.quantization.blockwise import BLOCK
from trl_fp8.recipe.from_model import linear_layers
from trl_fp8.recipe.names import FUSED, ROW_PARALLEL

from .flow import FP8Flow
from .gemm import require_backend, torchao_linear
from .matmul import compute_dtype, fp8_linear
from .quantized_weight import QuantizedWeight
from .shared_input import SharedInput


class FP8Linear(nn.Linear):
    """An `nn.Linear` under an `FP8Flow`. Not constructed: `FP8Linears.install` turns existing layers into it.

    Input `[..., K]`, output `[..., N]` in the compute dtype (autocast's, else the input's); see `fp8_linear`.
    """

    fp8_flow: FP8Flow
    partial_sums: int
    _quantized: QuantizedWeight | None = None
    _shared_input: SharedInput | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        flow, shared = self.fp8_flow, self._shared_input
        if flow.backend == "torchao":
            return self._torchao_forward(input)
        codes = shared.quantized(input, flow.quantize_tokens) if shared and flow.forward == "full" else None
        return fp8_linear(input, self.weight, self.bias, self.quantized_weight(), flow, self.partial_sums, codes)

    def quantized_weight(self) -> Float8Tensor:
        """Q(W), codes `[N, K]`: the cached one if it is current, else quantized now."""
        if not self.fp8_flow.cache_weights:
            return self.fp8_flow.quantize_weight(self.weight)
        if self.cached_weight() is None:
            self.keep(self.fp8_flow.quantize_weight(self.weight))
        return self._quantized.codes

    def keep(self, codes: Float8Tensor) -> None:
        """Compute with `codes`, Q(W) of the weight as it is now, until the weight changes."""
        self._quantized = QuantizedWeight.of(self.weight, codes)

    def cached_weight(self) -> Float8Tensor | None:
        """Q(W) if it is cached and no change of the weight since is visible, else None."""
        current = self._quantized is not None and self._quantized.is_current(self.weight)
        return self._quantized.codes if current else None

    def invalidate(self) -> None:
        """Drop the cached Q(W): the weight has changed."""
        self._quantized = None

    def _torchao_forward(self, input: torch.Tensor) -> torch.Tensor:
        compute = compute_dtype(input)
        with torch.autocast(input.device.type, enabled=False):
            y = torchao_linear(input.reshape(-1, input.shape[-1]), self.weight).view(*input.shape[:-1], -1)
            return (y if self.bias is None else y + self.bias.to(torch.bfloat16)).to(compute)

    def __getstate__(self) -> dict:
        """What copies and pickles hold: everything but what belongs to this layer's weight and to its neighbours."""
        return {key: value for key, value in self.__dict__.items() if key not in ("_quantized", "_shared_input")}


class FP8Linears:
    """The FP8 linears of one model: installed together, invalidated together, removed together.

    Attributes:
        modules: Checkpoint name -> layer, in model order.
        flow: The flow that all of them compute.
    """

    def __init__(self, modules: dict[str, FP8Linear], flow: FP8Flow):
        self.modules = modules
        self.flow = flow

    @classmethod
    def install(
        cls, model: nn.Module, modules: Collection[str], flow: FP8Flow, tensor_parallel_size: int = 1
    ) -> "FP8Linears":
        """Turn linear layers of `model` (plain or PEFT-wrapped) into `FP8Linear`, in place.

        Args:
            model: The model whose layers to turn.
            modules: Names as in the checkpoint (`FP8Recipe.fp8_modules`); each must be a plain `nn.Linear`.
            flow: What they compute.
            tensor_parallel_size: The engine's; row-parallel layers sum that many partial products.

        Raises:
            ValueError: A name is not a linear layer of the model, a layer is of another class or does not fit the
                backend, or the backend cannot run here. Nothing is turned then; the message lists all offenders.
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
            linear.fp8_flow = flow
            linear.partial_sums = tensor_parallel_size if name.rpartition(".")[2] in ROW_PARALLEL else 1
        for group in _readers_of_one_input(chosen):
            shared = SharedInput(len(group))
            for linear in group:
                linear._shared_input = shared
        return cls(chosen, flow)

    def invalidate(self) -> None:
        """Drop every cached weight. To be called after each optimizer step, checkpoint load, merge and unmerge."""
        for linear in self.modules.values():
            linear.invalidate()

    def remove(self) -> None:
        """Turn the layers back into what they were."""
        for linear in self.modules.values():
            del linear.fp8_flow, linear.partial_sums
            for name in ("_quantized", "_shared_input"):
                linear.__dict__.pop(name, None)
            linear.__class__ = nn.Linear


def _readers_of_one_input(linears: dict[str, FP8Linear]) -> list[list[FP8Linear]]:
    """Layers that the model calls one after another with the same tensor."""
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
