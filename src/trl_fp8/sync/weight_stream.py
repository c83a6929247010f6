"""The policy's parameters as the checkpoint tensors that an FP8 engine loads, one at a time.

    policy parameter ("...q_proj.weight", "...experts.gate_up_proj", fp32 or bf16)
        -> rounded to bf16                            what a BF16 engine would compute with
        -> quantize_weight                            "...q_proj.weight" e4m3, "...q_proj.weight_scale_inv" fp32
                                                      (all experts of a layer in one call)
    any other parameter -> rounded to bf16, or as it is, for a loader that rounds on copying
    buffers of the checkpoint -> as they are
    last: "model.layers.<i>.self_attn.{q,k,v}_scale"  from KVScales

Nothing here loads, and nothing is kept: at most one parameter's copies exist besides what the consumer holds on to.
Yielded tensors never alias the policy where it could change under the consumer (merged adapters are unmerged again).
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torchao.quantization import Float8Tensor

from trl_fp8.listing import listed
from trl_fp8.quantization.blockwise import BLOCK, dead_blocks, quantize_weight
from trl_fp8.quantization.e4m3 import ScaleFormat
from trl_fp8.quantization.kv_scales import QKV, KVScales
from trl_fp8.recipe.recipe import FP8Recipe


Named = tuple[str, torch.Tensor]
Share = Callable[[str, Float8Tensor], None]
SCALE_SUFFIX = "_scale_inv"


@dataclass
class StreamReport:
    """What one pass of `weight_stream` did. Complete when the stream is exhausted.

    Attributes:
        fp8_weights: Number of weights that went out in FP8.
        bytes_sent: Bytes of all weights as the engine holds them, scales included (not the KV cache scales).
        error_sums: Sums of squares `[2]` (error, weight) over the first block row of each FP8 weight (of each expert
            of it), on the device.
        dead: Name of each FP8 weight -> number of its blocks that are zero or as good as zero, on the device; see
            `quantization.blockwise.dead_blocks`.
    """

    fp8_weights: int = 0
    bytes_sent: int = 0
    error_sums: torch.Tensor | None = None
    dead: dict[str, torch.Tensor] = field(default_factory=dict)

    def read(self) -> tuple[float, dict[str, int]]:
        """Root of the sampled squared quantization error over the squared weight, and the weights that have dead
        blocks with their number. Waits for the device once.
        """
        if self.error_sums is None:
            return 0.0, {}
        error, weight, *dead = torch.stack([*self.error_sums, *self.dead.values()]).tolist()
        counts = {name: int(count) for name, count in zip(self.dead, dead, strict=True) if count}
        return (error / weight) ** 0.5 if weight else 0.0, counts


def weight_stream(
    parameters: Iterable[Named],
    recipe: FP8Recipe,
    kv_scales: KVScales | None,
    report: StreamReport,
    *,
    dtype: torch.dtype = torch.bfloat16,
    copy: bool = False,
    round_here: bool = True,
    share: Share | None = None,
    buffers: Iterable[Named] = (),
) -> Iterator[Named]:
    """Yield `(name, tensor)` for every checkpoint tensor of the engine.

    Args:
        parameters: The policy's `(checkpoint name, full tensor)`, in model order.
        recipe: Which weights are FP8.
        kv_scales: Scales for every attention layer; None if the KV cache is not FP8.
        report: Filled on the way.
        dtype: The engine's high-precision dtype; FP8 weights are quantized from values rounded to it.
        copy: Copy also what is in `dtype` already, for parameters that change before the consumer has read them.
        round_here: Whether what is not FP8 is brought to `dtype`. A loader in the same process does that by itself,
            and an embedding is not held twice.
        share: Called with the name of each FP8 weight and Q(W), for whoever computes with it too.
        buffers: `(checkpoint name, tensor)` of the policy's persistent buffers, which keep their dtype in the engine.

    Raises:
        RuntimeError: Modules of the recipe had no weight in `parameters`; the message lists them.
    """
    pending = set(recipe.fp8_tensors)
    for name, parameter in parameters:
        if name in recipe.fp8_tensors:
            pending.discard(name)
            weight = parameter.detach().to(dtype)
            codes = quantize_weight(weight, recipe.scale_format, name=name, check_finite=False)
            if share is not None:
                share(name, codes)
            _note(name, weight[..., :BLOCK, :], codes, recipe.scale_format, report)
            for item in (name, codes.qdata), (name + SCALE_SUFFIX, codes.scale):
                report.bytes_sent += item[1].nbytes
                yield recipe.engine_name(item[0]), item[1]
        else:
            report.bytes_sent += parameter.numel() * dtype.itemsize
            tensor = parameter.detach().to(dtype, copy=copy) if copy or round_here else parameter.detach()
            yield recipe.engine_name(name), tensor
    if pending:
        raise RuntimeError(
            f"the policy lacks {len(pending)} weights that the engine expects in FP8: {listed(sorted(pending))}. Were "
            "modules renamed or replaced after the trainer was made?"
        )
    for name, buffer in buffers:
        report.bytes_sent += buffer.nbytes
        yield recipe.engine_name(name), buffer.detach()
    if kv_scales is not None:
        yield from kv_scale_stream(kv_scales, recipe.kv_cache_skip_layers)


def _note(name: str, rows: torch.Tensor, codes: Float8Tensor, scale_format: ScaleFormat, report: StreamReport) -> None:
    """Account for one FP8 weight; nothing here waits for the device."""
    report.fp8_weights += 1
    sums = _block_row_error(rows.float(), codes.qdata[..., :BLOCK, :], codes.scale)
    report.error_sums = sums if report.error_sums is None else report.error_sums + sums
    report.dead[name] = dead_blocks(codes.scale, scale_format).sum(dtype=torch.float32)


def _block_row_error(rows: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Sums of squares (error, weight) over the first 128 rows: a sample of each weight for 1/N of the cost."""
    restored = qdata.float().unflatten(-1, (-1, BLOCK)) * scale[..., :1, :, None]
    return torch.stack([(rows - restored.flatten(-2)).square().sum(), rows.square().sum()])


def kv_scale_stream(kv_scales: KVScales, skip_layers: Collection[int] = ()) -> Iterator[Named]:
    """The KV cache scales under the names that vLLM maps onto its attention layers."""
    for layer, values in enumerate(kv_scales.values):
        if layer in skip_layers:
            continue
        for which, value in zip(QKV, values, strict=True):
            yield f"model.layers.{layer}.self_attn.{which}_scale", value.clone()
