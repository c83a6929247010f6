"""Settings of vLLM that let a trainer share an engine's kernels: no compiler fuses them, no batch changes a row.

`SeparateKernels` keep the compiler from fusing kernels. Batch invariance means that a kernel gives a row
the same bits whatever rows are beside it. On CPU the reference kernels do so. On CUDA vLLM's switch does for most
kernels (gpu/NOTES.md): unquantized linears, the output head, routers and experts then run Triton kernels. It
leaves three things to this file and engine_flash_attention.py:

Norms. vLLM's CUDA kernel adds up a row in another order from 256 tokens on, and with a residual vLLM runs yet another
kernel. Its Triton kernel for batch invariance runs one program for each row. It computes both operations here:

    rms_norm(x)                     the kernel
    fused_add_rms_norm(x, r)        s = x + r, rounded to BF16; the kernel on s          returns both

A trainer adds the residual itself, in BF16, and calls the norm alone, which gives the same bits.

Tiles of Triton kernels are chosen by a weight's shape, never by the number of rows: a tile with another number of rows
uses another instruction of the tensor cores, and no manual says that two of these add up in the same order. vLLM 0.31
chooses otherwise for output heads and for FP8 linears of some shapes, and slowly for narrow weights and FP8 experts.
No tile is fast both for one row and for thousands; each tile below says which it is for. The functions replace vLLM's
for good: an engine calls them for as long as it lives. Without batch invariance they return what vLLM's return.

Attention: engine_flash_attention.py.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from vllm import envs, ir
from vllm.config import VllmConfig
from vllm.model_executor.determinism import batch_invariant
from vllm.model_executor.determinism.batch_invariant import rms_norm_batch_invariant
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.utils.torch_utils import direct_register_custom_op

from trl_fp8.engine.vllm.environment import environment_kept
from trl_fp8.engine.vllm.platform import SeparateKernels
from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.messages import listed
from trl_fp8.upstream.patches import patch, substituted
from trl_fp8.upstream.vllm import forget_choices


SWITCH = "VLLM_BATCH_INVARIANT"
# A router's kernels for few tokens, and cuBLAS, which may split the sum
ROUTER_KERNELS = "allow_ll_bf16_gemm", "allow_fp32_router_gemm", "allow_bf16x3_router_gemm", "allow_cublas_router_gemm"
PROVIDER = "trl_fp8"
OPERATOR = "trl_fp8_rms_norm"  # opaque to the compiler, which would otherwise fuse a norm with its neighbours
# A weight `[N, K]` with at most so many rows is narrow: the A of an adapter, a router. In tiles of 128 columns at most
# four programs would compute it, each over all of K, and 128 of 132 processors would wait
NARROW = 512
# One row of tiles for a batch of 16. A program that decodes waits for memory: five stages keep four loads under way,
# and twice vLLM's step of K halves the number of waits. This takes 49 KiB of shared memory, in BF16 and in FP32
NARROW_TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "num_warps": 4, "num_stages": 5}
# vLLM's own choice for FP8 experts from 65 tokens on, with half of K's step for BF16. It is fast for prefills and the
# trainer. A decode reads all weights of an expert for a few tokens, in any tiles
EXPERTS_TILE = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "GROUP_SIZE_M": 32, "SPLIT_K": 1}
EXPERTS_TILE |= {"num_warps": 4, "num_stages": 3}


@dataclass(frozen=True)
class Invariance:
    """The settings of one platform.

    Attributes:
        kernels: The operations that are kernels of their own.
        attention: The backend with one kernel for all batches; None: the only one of the platform.
        switch: vLLM's switch for batch invariance has to be on.
    """

    kernels: SeparateKernels
    attention: str | None = None
    switch: bool = False

    def arguments(self) -> dict[str, object]:
        """Return arguments of `vllm.LLM(...)`."""
        attention = {"attention_backend": self.attention} if self.attention else {}
        return self.kernels.arguments() | attention

    def require(self, config: VllmConfig) -> None:
        """Raise `ValueError` naming the settings of a running engine that run other kernels."""
        found = self.kernels.undone(config)
        backend = config.attention_config.backend
        if self.attention and backend and backend.name != self.attention:
            found.append(f"attention_backend={backend.name!r}")
        if self.switch and not envs.VLLM_BATCH_INVARIANT:
            found.append(f"{SWITCH}=0 in the environment")
        if found:
            raise ValueError(
                "fp8_forward='one_forward' computes with the engine's kernels, bit for bit, but vllm_engine_kwargs "
                f"chooses others for the engine: {'; '.join(found)}. Nearly all of the mismatch would stay. Remove "
                "these from vllm_engine_kwargs, or set fp8_forward='off'."
            )


# With its custom operation of RMS norms, vLLM's switch would go around the providers
CUDA = Invariance(
    SeparateKernels(
        norms=PROVIDER,
        custom_ops={"rms_norm": False, "rotary_embedding": True, "silu_and_mul": True, "quant_fp8": True},
    ),
    attention="FLASH_ATTN",
    switch=True,
)


@contextmanager
def invariant_on_cuda() -> Iterator[None]:
    """Let engines that start inside the block run kernels that a trainer can share."""
    from .engine_flash_attention import invariant_attention  # vLLM's CPU build has no FlashAttention

    register_cuda_norms()
    pin_tiles()
    # vLLM's switch also calls `init_batch_invariance`. It is left out here, because it changes the whole
    # process, the trainer too: NCCL gets one channel and one thread, and softmax, mean and bmm of torch are replaced.
    # An engine on one rank does not communicate, and calls none of these functions. One part of it is done here: it
    # switches ahead-of-time compilation off. A user's own setting of the switch stays; `Invariance.require` names it
    settings = {SWITCH: os.environ.get(SWITCH, "1"), "VLLM_USE_AOT_COMPILE": "0"}
    with (
        environment_kept(settings),
        invariant_attention(),
        substituted(batch_invariant, "init_batch_invariance", lambda: None),
    ):
        forget_choices()  # vLLM may have cached choices under other settings
        yield


def require_cuda_kernels(config: PretrainedConfig, capability: tuple[int, int], flash_attention: int | None) -> None:
    """Raise `ValueError` for a model (by its text config) or a GPU whose kernels a trainer cannot share."""
    compiled = family_of(config.model_type).compiled_on_cuda
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        compiled = "rotary embedding (longrope) with what is around it"
    if compiled:
        raise ValueError(
            f"fp8_forward='one_forward' with a policy of type {config.model_type!r} on cuda: vLLM compiles its "
            f"{compiled}, so the trainer cannot get the same bits. Set fp8_forward='off'."
        )
    if flash_attention != 3:
        major, minor = capability
        raise ValueError(
            f"fp8_forward='one_forward' on a GPU of compute capability {major}.{minor}: vLLM attends with TRITON_ATTN "
            "there, whose kernel keeps no log-sum-exp for the trainer's backward; GEMMs were not read. "
            "On Hopper (9.0) FlashAttention 3 can be shared. Set fp8_forward='off'."
        )


def require_invariant_routers(model: nn.Module) -> None:
    """Raise `ValueError` if a router of the engine chooses its kernel by the number of tokens, despite the switch."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, GateLinear):
            allowed = [kernel.removeprefix("allow_") for kernel in ROUTER_KERNELS if getattr(module, kernel)]
            if allowed:
                found.append(f"{name} ({', '.join(allowed)})")
    if found:
        raise ValueError(
            "fp8_forward='one_forward': routers of the engine choose a kernel by the number of tokens: "
            f"{listed(found, 4)}. A token could go to other experts in another batch. Set fp8_forward='off'."
        )


def register_cuda_norms() -> None:
    """Register both norms with vLLM's tables of implementations. Idempotent."""
    if PROVIDER in ir.ops.rms_norm.impls:
        return
    direct_register_custom_op(OPERATOR, _whole_rows, fake_impl=lambda x, weight, epsilon: x.new_empty(x.shape))
    on_gpu = torch.version.cuda is not None
    ir.ops.rms_norm.register_impl(PROVIDER, supported=on_gpu)(_rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supported=on_gpu)(_add_rms_norm)


def _whole_rows(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return rms_norm_batch_invariant(x, weight, epsilon)


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    if variance_size is not None:
        raise ValueError(
            f"fp8_forward='one_forward': the engine normalizes by the variance of {variance_size} columns in this "
            "model, and no kernel for that gives a row the same bits in every batch. Set fp8_forward='off'."
        )
    return getattr(torch.ops.vllm, OPERATOR)(x, weight, epsilon)


def _add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    x_residual = x + x_residual
    return _rms_norm(x_residual, weight, epsilon, variance_size), x_residual


@cache  # once for a process
def pin_tiles() -> None:
    """Replace vLLM's choices of tiles, for good."""
    patch(batch_invariant, "_get_matmul_config", linear_tile)
    patch(fused_moe, "get_default_config", _while_invariant(experts_tile, fused_moe.get_default_config))
    no_table = _while_invariant(lambda *shape: None, fp8_utils.get_w8a8_block_fp8_configs)
    patch(fp8_utils, "get_w8a8_block_fp8_configs", no_table)


def linear_tile(M: int, N: int, K: int, dtype: torch.dtype, default: dict[str, int]) -> dict[str, int]:
    """Return the tile for an unquantized weight `[N, K]`; `default` is vLLM's tile. The compiler traces this."""
    if N > NARROW:
        return default
    return default | NARROW_TILE | {"BLOCK_SIZE_K": 2 * default["BLOCK_SIZE_K"]}


def experts_tile(
    M: int, E: int, N: int, K: int, topk: int, dtype: str | None, block_shape: list[int] | None = None
) -> dict[str, int]:
    return EXPERTS_TILE | {"BLOCK_SIZE_K": 128 if dtype == "fp8_w8a8" else 64}


def _while_invariant(pinned: Callable, otherwise: Callable) -> Callable:
    """Return a function that calls `pinned` while vLLM is batch invariant, else vLLM's own."""

    @wraps(otherwise)
    def choose(*args, **kwargs):
        return (pinned if envs.VLLM_BATCH_INVARIANT else otherwise)(*args, **kwargs)

    return choose
