"""Settings of vLLM under which a trainer can share an engine's kernels: unfused and batch invariant.

`SeparateKernels` keeps the compiler from fusing kernels. Batch invariance means that a kernel gives a row the same
bits whatever other rows are in the batch. On CPU the reference kernels are batch invariant. On CUDA vLLM has a switch
(VLLM_BATCH_INVARIANT), which makes most kernels invariant (gpu/NOTES.md): unquantized linear layers, the output head,
routers and experts then run Triton kernels. The switch leaves three things to this package: attention
(engine_flash_attention.py), norms and tiles.

Norms. vLLM's CUDA kernel adds up a row in another order from 256 tokens on, and for a norm with a residual vLLM runs
another kernel. vLLM's batch-invariant Triton kernel (`kernel` below) runs one program for each row. This module uses
it for both norms:

    rms_norm(x)                     return kernel(x)
    fused_add_rms_norm(x, r)        s = x + r, rounded to BF16; return kernel(s), s

A trainer adds the residual itself, in BF16, and calls rms_norm, which gives the same bits.

Tiles. This module chooses the tiles of Triton kernels by a weight's shape, never by the number of rows. A tile with
another number of rows uses another instruction of the tensor cores, and no manual says that two instructions add up in
the same order. vLLM 0.31 chooses tiles by the number of rows for output heads and some FP8 linear layers, and its
tiles for narrow weights and FP8 experts are slow. No tile is fast both for one row and for thousands of rows, so a
comment at each tile below says for which case the tile was chosen. The functions that return the tiles replace vLLM's
functions permanently, because an engine calls them as long as it lives. Engines without batch invariance still run
with vLLM's tiles.
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

from trl_fp8.engine.vllm.environment import environment_restored
from trl_fp8.engine.vllm.platform import SeparateKernels
from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.messages import listed
from trl_fp8.upstream.patches import patch, substituted
from trl_fp8.upstream.vllm import forget_choices


SWITCH = "VLLM_BATCH_INVARIANT"
# Attributes of vLLM's router that allow kernels for few tokens, or cuBLAS, which may split a sum into parts
ROUTER_KERNELS = "allow_ll_bf16_gemm", "allow_fp32_router_gemm", "allow_bf16x3_router_gemm", "allow_cublas_router_gemm"
PROVIDER = "trl_fp8"  # name of this package's norms in vLLM's tables of implementations
OPERATOR = "trl_fp8_rms_norm"  # opaque to the compiler, which would otherwise fuse a norm with its neighbours
# A weight `[N, K]` is narrow if N is at most this: the A of an adapter, or a router. With vLLM's tiles of 128 columns
# at most four programs would compute the output of a decode, each over all of K, and 128 of 132 processors would be
# idle
NARROW = 512
# For decodes: a batch of 16 tokens is one row of tiles. A decode mostly waits for memory, so five stages keep four
# loads in flight, and `linear_tile` doubles vLLM's step along K, which halves the number of waits. The tile takes
# 49 KiB of shared memory, in BF16 and in FP32
NARROW_TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "num_warps": 4, "num_stages": 5}
# For prefills and the trainer: vLLM's own choice for FP8 experts from 65 tokens on. For BF16 `experts_tile` halves the
# step along K. A decode waits for the experts' weights with any tile, so it needs no tile of its own
EXPERTS_TILE = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "GROUP_SIZE_M": 32, "SPLIT_K": 1}
EXPERTS_TILE |= {"num_warps": 4, "num_stages": 3}


@dataclass(frozen=True)
class Invariance:
    """The settings that make the kernels of one platform unfused and batch invariant.

    Attributes:
        kernels: The operations that the compiler must not fuse.
        attention: The attention backend that has one kernel for all batches; None if the platform has one backend.
        switch: Whether vLLM's switch for batch invariance has to be on.
    """

    kernels: SeparateKernels
    attention: str | None = None
    switch: bool = False

    def arguments(self) -> dict[str, object]:
        """Return arguments of `vllm.LLM(...)`."""
        attention = {"attention_backend": self.attention} if self.attention else {}
        return self.kernels.arguments() | attention

    def require(self, config: VllmConfig) -> None:
        """Raise `ValueError`, with the settings, if a running engine's settings make the engine run other kernels."""
        found = self.kernels.violated_by(config)
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


# "rms_norm" is False, because vLLM's custom operation would not call `PROVIDER` while the switch is on
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
    # With the switch, vLLM also calls `init_batch_invariance`, which changes the trainer's process: NCCL gets one
    # channel and one thread, and softmax, mean and bmm of torch are replaced. An engine on one rank does not
    # communicate, and calls none of these functions of torch. So `init_batch_invariance` is replaced by a function
    # that does nothing. vLLM's function also switches ahead-of-time compilation off, which VLLM_USE_AOT_COMPILE does
    # here. If the user has set the switch to 0, the switch stays 0, and `Invariance.require` raises an error
    settings = {SWITCH: os.environ.get(SWITCH, "1"), "VLLM_USE_AOT_COMPILE": "0"}
    with (
        environment_restored(settings),
        invariant_attention(),
        substituted(batch_invariant, "init_batch_invariance", lambda: None),
    ):
        forget_choices()  # vLLM may have cached choices under other settings
        yield


def require_cuda_kernels(config: PretrainedConfig, capability: tuple[int, int], flash_attention: int | None) -> None:
    """Raise `ValueError` if a trainer cannot share the kernels of a model on this GPU. `config` is the text config."""
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
            "there, whose kernel keeps no log-sum-exp for the trainer's backward. "
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
    """Register both norms under the name `PROVIDER` in vLLM's tables of implementations. Idempotent."""
    if PROVIDER in ir.ops.rms_norm.impls:
        return
    direct_register_custom_op(OPERATOR, _norm_rows, fake_impl=lambda x, weight, epsilon: x.new_empty(x.shape))
    on_gpu = torch.version.cuda is not None
    ir.ops.rms_norm.register_impl(PROVIDER, supported=on_gpu)(_rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supported=on_gpu)(_add_rms_norm)


def _norm_rows(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
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


@cache  # runs once in a process
def pin_tiles() -> None:
    """Replace vLLM's functions that choose tiles, permanently."""
    patch(batch_invariant, "_get_matmul_config", linear_tile)
    patch(fused_moe, "get_default_config", _while_invariant(experts_tile, fused_moe.get_default_config))
    # Without a table of tiles by number of rows, vLLM takes one default tile for all batches
    no_table = _while_invariant(lambda *shape: None, fp8_utils.get_w8a8_block_fp8_configs)
    patch(fp8_utils, "get_w8a8_block_fp8_configs", no_table)


def linear_tile(M: int, N: int, K: int, dtype: torch.dtype, default: dict[str, int]) -> dict[str, int]:
    """Return the tile for an unquantized weight `[N, K]`. `default` is vLLM's tile. torch.compile traces this."""
    if N > NARROW:
        return default
    return default | NARROW_TILE | {"BLOCK_SIZE_K": 2 * default["BLOCK_SIZE_K"]}


def experts_tile(
    M: int, E: int, N: int, K: int, topk: int, dtype: str | None, block_shape: list[int] | None = None
) -> dict[str, int]:
    return EXPERTS_TILE | {"BLOCK_SIZE_K": 128 if dtype == "fp8_w8a8" else 64}


def _while_invariant(pinned: Callable, otherwise: Callable) -> Callable:
    """Return a function that calls `pinned` while vLLM is batch invariant, else vLLM's own function `otherwise`."""

    @wraps(otherwise)
    def choose(*args, **kwargs):
        chosen = pinned if envs.VLLM_BATCH_INVARIANT else otherwise
        return chosen(*args, **kwargs)

    return choose
