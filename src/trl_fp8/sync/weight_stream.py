"""The policy's parameters as the checkpoint tensors that an FP8 engine loads, one at a time.

    policy parameter ("...q_proj.weight", "...experts.gate_up_proj", fp32 or bf16)
        -> rounded to bf16                            what a BF16 engine would compute with
        -> Q(W), all experts of a layer at once       "...q_proj.weight" e4m3, "...q_proj.weight_scale_inv" fp32
    any other parameter -> rounded to bf16, or as it is, for a loader that rounds on copying
    buffers of the checkpoint -> as they are
    last: "model.layers.<i>.self_attn.{q,k,v}_scale"  from KVScales

At most the copies of one parameter, or of the two or three that share a scale, exist besides what the consumer holds.
With `copy` none aliases the policy, which could change under the consumer (merged adapters are unmerged again).
"""

import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torchao.quantization import Float8Tensor

from trl_fp8.quantization.blockwise import dequantize_weight, first_rows
from trl_fp8.quantization.kv_scales import QKV, KVScales
from trl_fp8.recipe.names import listed
from trl_fp8.recipe.recipe import FP8Recipe


Named = tuple[str, torch.Tensor]
Share = Callable[[str, Float8Tensor], None]
SAMPLED_ROWS = 128  # of each weight, or expert, whose quantization error is measured: 1/N of the cost


class WeightStream:
    """Every checkpoint tensor of the engine as `(name, tensor)`, once; `RuntimeError` if FP8 weights are missing."""

    def __init__(
        self,
        parameters: Iterable[Named],  # the policy's checkpoint names and full tensors, in model order
        recipe: FP8Recipe,
        kv_scales: KVScales | None = None,  # of every attention layer; None if the KV cache is not FP8
        *,
        buffers: Iterable[Named] = (),  # the policy's persistent ones, which keep their dtype in the engine
        copy: bool = False,  # also what is in BF16 already, if parameters change before the consumer has read them
        round_here: bool = True,  # cast unquantized tensors; False if the loader does: saves a second embedding
        share: Share | None = None,  # called with the name of each FP8 weight and Q(W), to compute with it too
    ):
        self.parameters, self.recipe, self.kv_scales, self.buffers = parameters, recipe, kv_scales, buffers
        self.copy, self.round_here, self.share = copy, round_here, share
        # What was done, complete when the stream is exhausted
        self.seconds = 0.0  # that `timed` took to produce what the consumer asked for
        self.fp8_weights = 0
        self.bytes_sent = 0  # of all weights as the engine holds them, scales included (not the KV cache scales)
        self._error_sums: torch.Tensor | None = None  # of squares (error, weight), `[2]`, on the device
        self._dead: dict[str, torch.Tensor] = {}  # FP8 weight -> number of its dead blocks, on the device

    def timed(self, items: Iterable[Named]) -> Iterator[Named]:
        """Pass `items`, which are made from this stream, through, and note how long they took."""
        items, start = iter(items), time.perf_counter()
        for item in items:
            self.seconds += time.perf_counter() - start
            yield item
            start = time.perf_counter()
        self.seconds += time.perf_counter() - start

    def error_and_dead_blocks(self) -> tuple[float, dict[str, int]]:
        """`SyncReport.weight_relative_error` and `.dead_blocks`. Waits for the device once."""
        if self._error_sums is None:
            return 0.0, {}
        error, weight, *dead = torch.stack([*self._error_sums, *self._dead.values()]).tolist()
        counts = {name: int(count) for name, count in zip(self._dead, dead, strict=True) if count}
        return (error / weight) ** 0.5 if weight else 0.0, counts

    def __iter__(self) -> Iterator[Named]:
        recipe = self.recipe
        pending: dict[str, torch.Tensor] = {}  # whose scale is also that of a weight to come
        missing = set(recipe.fp8_tensors)
        for name, parameter in self.parameters:
            if name in recipe.fp8_tensors:
                missing.discard(name)
                group = recipe.sharing_scale(name)
                pending[name] = parameter.detach().to(torch.bfloat16, copy=self.copy and len(group) > 1)
                if all(peer in pending for peer in group):
                    yield from self._quantized({peer: pending.pop(peer) for peer in group})
            else:
                self.bytes_sent += parameter.numel() * torch.bfloat16.itemsize
                rounded = self.copy or self.round_here
                tensor = parameter.detach()
                yield recipe.engine_name(name), tensor.to(torch.bfloat16, copy=self.copy) if rounded else tensor
        if missing:
            raise RuntimeError(
                f"the policy lacks {len(missing)} weights that the engine expects in FP8: {listed(sorted(missing))}. "
                "Were modules renamed or replaced after the trainer was made?"
            )
        for name, buffer in self.buffers:
            self.bytes_sent += buffer.nbytes
            yield recipe.engine_name(name), buffer.detach()
        for layer, values in enumerate(self.kv_scales.values if self.kv_scales is not None else ()):
            if layer not in recipe.kv_cache_skip_layers:
                for which, value in zip(QKV, values, strict=True):
                    yield f"model.layers.{layer}.self_attn.{which}_scale", value.clone()

    def _quantized(self, weights: dict[str, torch.Tensor]) -> Iterator[Named]:
        """FP8 weights with their scales; waits for no device."""
        recipe = self.recipe
        quantized = recipe.format.quantize_weights(list(weights.values()), recipe.scale_format)
        for (name, weight), codes in zip(weights.items(), quantized, strict=True):
            if self.share is not None:
                self.share(name, codes)
            rows = weight[..., :SAMPLED_ROWS, :].float()
            error = rows - dequantize_weight(first_rows(codes, SAMPLED_ROWS), torch.float32)
            sums = torch.stack([error.square().sum(), rows.square().sum()])
            self._error_sums = sums if self._error_sums is None else self._error_sums + sums
            self._dead[name] = recipe.format.dead_blocks(codes, recipe.scale_format).float()
            self.fp8_weights += 1
            self.bytes_sent += codes.qdata.nbytes + codes.scale.nbytes
            yield recipe.engine_name(name), codes.qdata
            yield recipe.scale_name(name), recipe.format.sent_scale(codes)
