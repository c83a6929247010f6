"""The policy's parameters as the checkpoint tensors that an FP8 engine loads, one at a time.

    policy parameter ("...q_proj.weight", fp32 or bf16)
        -> rounded to bf16                            what a BF16 engine would compute with
        -> quantize_weight                            "...q_proj.weight" e4m3, "...q_proj.weight_scale_inv" fp32
    any other parameter -> rounded to bf16, or as it is, for a loader that rounds on copying
    last: "model.layers.<i>.self_attn.{q,k,v}_scale"  from KVScales

Nothing here loads, and nothing is kept: at most one parameter's copies exist besides what the consumer holds on to.
Yielded tensors never alias the policy where it could change under the consumer (merged adapters are unmerged again).
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torchao.quantization import Float8Tensor

from ..numerics.blockwise import BLOCK, quantize_weight
from ..numerics.kv_scales import QKV, KVScales
from ..recipe import FP8Recipe, checkpoint_name


Named = tuple[str, torch.Tensor]
Quantized = Callable[[str], Float8Tensor]
SCALE_SUFFIX = "_scale_inv"


@dataclass
class StreamReport:
    """What one pass of `weight_stream` did. Complete when the stream is exhausted.

    Attributes:
        fp8_weights: Number of weights that went out in FP8.
        bytes_sent: Bytes of all weights as the engine holds them, scales included (not the KV cache scales).
        error_sums: Sums of squares `[2]` (error, weight) over the first block row of each FP8 weight, on the device.
        stale: Name of each weight that came quantized -> whether the first block row of the weight gives other codes
            or scales, on the device.
    """

    fp8_weights: int = 0
    bytes_sent: int = 0
    error_sums: torch.Tensor | None = None
    stale: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def weight_relative_error(self) -> float:
        """Root of the sampled squared quantization error over the squared weight. Waits for the device."""
        if self.error_sums is None:
            return 0.0
        error, weight = self.error_sums.tolist()
        return (error / weight) ** 0.5 if weight else 0.0

    def require_current(self) -> None:
        """Raise `RuntimeError` naming the weights that came quantized from an earlier state. Waits for the device."""
        stale = torch.stack(list(self.stale.values())).tolist() if self.stale else []
        names = [name for name, is_stale in zip(self.stale, stale, strict=True) if is_stale]
        if names:
            raise RuntimeError(
                f"the trainer's quantized weights are not those of its current weights: {', '.join(names[:6])}"
                f"{f' and {len(names) - 6} more' if len(names) > 6 else ''}. Trainer and engine would agree on a policy "
                "that no longer learns. Whatever changes weights besides the optimizer has to call "
                "PrecisionFlow.weights_changed()."
            )


def weight_stream(
    parameters: Iterable[Named],
    recipe: FP8Recipe,
    kv_scales: KVScales | None,
    report: StreamReport,
    *,
    dtype: torch.dtype = torch.bfloat16,
    copy: bool = False,
    round_here: bool = True,
    quantized: Quantized | None = None,
) -> Iterator[Named]:
    """Yield `(name, tensor)` for every checkpoint tensor of the engine.

    Args:
        parameters: The policy's `(checkpoint name, full tensor)`, in model order.
        recipe: Which weights are FP8.
        kv_scales: Scales for every attention layer; None if the KV cache is not FP8.
        report: Filled on the way.
        dtype: The engine's high-precision dtype; FP8 weights are quantized from values rounded to it.
        copy: Copy also what is in `dtype` already, for parameters that change before the consumer has read them.
        round_here: Whether what is not FP8 is brought to `dtype`. A loader in the same process does that by itself, and
            an embedding is not held twice.
        quantized: Module name -> its weight as quantized by whoever needs it too; None: quantized here.

    Raises:
        RuntimeError: Modules of the recipe had no weight in `parameters`; the message lists them.
    """
    pending = set(recipe.fp8_modules)
    for name, parameter in parameters:
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in recipe.fp8_modules_set:
            pending.discard(module)
            rows = parameter.detach()[:BLOCK].to(dtype)
            if quantized is None:
                weight = parameter.detach().to(dtype)
                codes = quantize_weight(weight, recipe.scale_format, name=name, check_finite=False)
            else:
                codes = quantized(module)
                report.stale[name] = _differ(quantize_weight(rows, recipe.scale_format, check_finite=False), codes)
            for item in _fp8_weight(name, rows, codes, report):
                report.bytes_sent += item[1].nbytes
                yield item
        else:
            report.bytes_sent += parameter.numel() * dtype.itemsize
            yield name, parameter.detach().to(dtype, copy=copy) if copy or round_here else parameter.detach()
    if pending:
        raise RuntimeError(
            f"the policy has no weight for {len(pending)} modules that the engine expects in FP8: "
            f"{sorted(pending)[:6]}. Were modules renamed or replaced after the trainer was made?"
        )
    if kv_scales is not None:
        yield from kv_scale_stream(kv_scales, recipe.kv_cache_skip_layers)


def _fp8_weight(name: str, rows: torch.Tensor, codes: Float8Tensor, report: StreamReport) -> Iterator[Named]:
    report.fp8_weights += 1
    sums = _block_row_error(rows.float(), codes.qdata[:BLOCK], codes.scale)
    report.error_sums = sums if report.error_sums is None else report.error_sums + sums
    yield name, codes.qdata
    yield name + SCALE_SUFFIX, codes.scale


def _differ(fresh: Float8Tensor, codes: Float8Tensor) -> torch.Tensor:
    """Whether the first block row of `codes` is not `fresh`. A weight that doubled keeps its codes: scales count too."""
    held = codes.qdata[:BLOCK].view(torch.uint8)
    return (fresh.qdata.view(torch.uint8) != held).any() | (fresh.scale != codes.scale[:1]).any()


def _block_row_error(rows: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Sums of squares (error, weight) over the first 128 rows: a sample of each weight for 1/N of the cost."""
    restored = qdata.float().unflatten(-1, (-1, BLOCK)) * scale[:1, :, None]
    return torch.stack([(rows - restored.flatten(-2)).square().sum(), rows.square().sum()])


def kv_scale_stream(kv_scales: KVScales, skip_layers: Collection[int] = ()) -> Iterator[Named]:
    """The KV cache scales under the names that vLLM maps onto its attention layers."""
    for layer, values in enumerate(kv_scales.values):
        if layer in skip_layers:
            continue
        for which, value in zip(QKV, values, strict=True):
            yield f"model.layers.{layer}.self_attn.{which}_scale", value.clone()


def require_finite(model: nn.Module, reduce_max: Callable[[torch.Tensor], None] | None = None) -> None:
    """Raise `ValueError` naming the parameters of `model` that hold NaN or infinite values.

    Runs before the engine is touched, so that a diverged policy leaves the engine as it was. Reads every parameter
    once and waits for the device once.

    Args:
        model: The policy. Under FSDP2 and ZeRO-3 this rank's shards are read.
        reduce_max: Replaces a small tensor by its maximum over ranks, so that all of them raise, or none: a rank that
            went on alone would wait for the others in the next gather.
    """
    named = [(name, _local(p)) for name, p in model.named_parameters() if p.is_floating_point()]
    held = [index for index, (_, tensor) in enumerate(named) if tensor.numel()]
    bad = torch.zeros(len(named), device=named[0][1].device)
    if held:  # a norm would need 15 times as long on CPU
        extremes = torch.stack([torch.stack(torch.aminmax(named[index][1])).float() for index in held])
        bad[held] = (~torch.isfinite(extremes)).any(1).float()
    if reduce_max is not None:
        reduce_max(bad)
    names = [checkpoint_name(named[index][0]) for index in bad.nonzero().flatten().tolist()]
    if names:
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise ValueError(
            f"the policy holds NaN or infinite values in {len(names)} of {len(named)} parameters: {listed}. Nothing was "
            "sent; the engine still serves the previous weights. Look at the last optimizer step (learning_rate, "
            "max_grad_norm, loss), and resume from the last good checkpoint."
        )


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """What of `parameter` is on this rank. ZeRO-3 (DeepSpeed 0.19) keeps its shard beside an empty tensor."""
    tensor = getattr(parameter, "ds_tensor", parameter).detach()
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
