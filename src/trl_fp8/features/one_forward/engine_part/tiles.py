"""Tiles of vLLM's Triton kernels while it is batch invariant: chosen by a weight's shape, never by the number of rows.

vLLM 0.31 chooses three of them otherwise:

    unquantized linears    a table by shape of the weight and number of rows, for output heads such as Qwen3-1.7B's;
                           128 x 128 x 64 for all others. Of a weight with few rows one program then reads all
    experts                64 x 64 x 32 for everything, where FP8 tensor cores want steps of 128
    FP8 linears            a table by shape and number of rows, for DeepSeek's shapes

A tile with another number of rows uses another instruction of the tensor cores (m16n8k16, or a warp group's m64nNk16),
and no manual says that two of these instructions add up in the same order. So no function here reads the number of
rows. No tile is fast both for one row and for thousands; each tile below says which it is for.

These replace vLLM's functions, which engine and trainer call, for good: an engine calls them for as long as it lives.
Without batch invariance they return what vLLM's return.
"""

from collections.abc import Callable
from functools import cache, wraps

import torch
from vllm import envs
from vllm.model_executor.determinism import batch_invariant
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.quantization.utils import fp8_utils

from trl_fp8.upstream.patches import patch


# A weight `[N, K]` with at most so many rows is narrow: the A of an adapter, a router. In tiles of 128 columns at most
# four programs would compute it, each over all of K, and 128 of 132 processors would wait
NARROW = 512
# One row of tiles for a batch of 16. A program that decodes waits for memory: five stages keep four loads under way,
# and twice vLLM's step of K halves the number of waits. This takes 49 KiB of shared memory, in BF16 and in FP32
NARROW_TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "num_warps": 4, "num_stages": 5}
# vLLM's own choice for FP8 experts from 65 tokens on, with half of K's step for BF16. It is fast for prefills and the
# trainer. A decode reads all weights of an expert for a few tokens, in whatever tiles
EXPERTS_TILE = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "GROUP_SIZE_M": 32, "SPLIT_K": 1}
EXPERTS_TILE |= {"num_warps": 4, "num_stages": 3}


@cache  # once for a process
def pin_tiles() -> None:
    patch(batch_invariant, "_get_matmul_config", linear_tile)
    patch(fused_moe, "get_default_config", _while_invariant(experts_tile, fused_moe.get_default_config))
    of_fp8 = _while_invariant(lambda *shape: None, fp8_utils.get_w8a8_block_fp8_configs)
    patch(fp8_utils, "get_w8a8_block_fp8_configs", of_fp8)


def linear_tile(M: int, N: int, K: int, dtype: torch.dtype, default: dict[str, int]) -> dict[str, int]:
    """For an unquantized weight `[N, K]`; `default` is vLLM's tile for the dtype. The compiler traces this."""
    if N > NARROW:
        return default
    return default | NARROW_TILE | {"BLOCK_SIZE_K": 2 * default["BLOCK_SIZE_K"]}


def experts_tile(
    M: int, E: int, N: int, K: int, topk: int, dtype: str | None, block_shape: list[int] | None = None
) -> dict[str, int]:
    return EXPERTS_TILE | {"BLOCK_SIZE_K": 128 if dtype == "fp8_w8a8" else 64}


def _while_invariant(pinned: Callable, otherwise: Callable) -> Callable:
    @wraps(otherwise)
    def choose(*args, **kwargs):
        return (pinned if envs.VLLM_BATCH_INVARIANT else otherwise)(*args, **kwargs)

    return choose
