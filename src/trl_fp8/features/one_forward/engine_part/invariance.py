"""Settings of vLLM that let a trainer share an engine's kernels: no compiler fuses them, no batch changes a row.

`engine.vllm.separate_kernels` keeps the compiler from fusing kernels. Batch invariance means that a kernel gives a row
the same bits whatever rows are beside it. On CPU the reference kernels do so. On CUDA the norms of norms.py, the one
attention kernel of flash_attention.py and vLLM's switch do: with the switch unquantized linears, the output head,
routers and experts run Triton kernels, whose tiles tiles.py keeps the same for every batch (gpu/NOTES.md).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig
from vllm import envs
from vllm.config import VllmConfig
from vllm.model_executor.determinism import batch_invariant
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

from trl_fp8.engine.vllm.environment import environment_kept
from trl_fp8.engine.vllm.separate_kernels import SeparateKernels
from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.messages import listed
from trl_fp8.upstream.patches import substituted
from trl_fp8.upstream.vllm import forget_choices

from .norms import PROVIDER, register_cuda_norms
from .tiles import pin_tiles


SWITCH = "VLLM_BATCH_INVARIANT"
# A router's kernels for few tokens, and cuBLAS, which may split the sum
ROUTER_KERNELS = "allow_ll_bf16_gemm", "allow_fp32_router_gemm", "allow_bf16x3_router_gemm", "allow_cublas_router_gemm"


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
        """For `vllm.LLM(...)`."""
        return self.kernels.arguments() | ({"attention_backend": self.attention} if self.attention else {})

    def require(self, config: VllmConfig) -> None:
        """Raise `ValueError` naming the settings of a running engine that run other kernels."""
        found = self.kernels.undone(config)
        if self.attention and (backend := config.attention_config.backend) and backend.name != self.attention:
            found.append(f"attention_backend={backend.name!r}")
        if self.switch and not envs.VLLM_BATCH_INVARIANT:
            found.append(f"{SWITCH}=0 in the environment")
        if found:
            raise ValueError(
                "fp8_forward='one_forward' computes with the engine's kernels, bit for bit, but vllm_engine_kwargs "
                f"lets the engine run others: {'; '.join(found)}. Nearly all of the mismatch would stay. Remove these "
                "from vllm_engine_kwargs, or set fp8_forward='off'."
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
    """Engines that are started inside the block run kernels that a trainer can share."""
    from .flash_attention import invariant_attention  # vLLM's CPU build has no FlashAttention

    register_cuda_norms()
    pin_tiles()
    # The rest of vLLM's switch changes the whole process, the trainer too: NCCL gets one channel and one thread, and
    # softmax, mean and bmm of torch are replaced. An engine on one rank communicates with nobody and calls none of
    # these functions
    # A user's own setting of the switch stays, and `Invariance.require` names it. vLLM switches ahead-of-time
    # compilation off in the part of `init_batch_invariance` that is left out here
    settings = {SWITCH: os.environ.get(SWITCH, "1"), "VLLM_USE_AOT_COMPILE": "0"}
    with (
        environment_kept(settings),
        invariant_attention(),
        substituted(batch_invariant, "init_batch_invariance", lambda: None),
    ):
        forget_choices()  # vLLM may have kept what the settings were
        yield


def require_cuda_kernels(config: PretrainedConfig, capability: tuple[int, int], flash_attention: int | None) -> None:
    """Raise `ValueError` for a model, or a GPU, of which a trainer cannot share the kernels. `config`: of the text."""
    compiled = family_of(config.model_type).compiled_on_cuda
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        compiled = "rotary embedding (longrope) with what is around it"
    if compiled:
        raise ValueError(
            f"fp8_forward='one_forward' with a policy of type {config.model_type!r} on cuda: vLLM compiles its "
            f"{compiled}, so that the trainer cannot have the engine's bits. Set fp8_forward='off'."
        )
    if flash_attention != 3:
        major, minor = capability
        raise ValueError(
            f"fp8_forward='one_forward' on a GPU of compute capability {major}.{minor}: vLLM attends with TRITON_ATTN "
            "there, whose kernel keeps no log-sum-exp for the trainer's backward; GEMMs were not read. "
            "On Hopper (9.0) FlashAttention 3 can be shared. Set fp8_forward='off'."
        )


def require_invariant_routers(model: nn.Module) -> None:
    """Raise `ValueError` if a router of the engine takes its kernel by the number of tokens, whatever the switch."""
    found = [
        f"{name} ({', '.join(chosen)})"
        for name, module in model.named_modules()
        if isinstance(module, GateLinear)
        and (chosen := [kernel.removeprefix("allow_") for kernel in ROUTER_KERNELS if getattr(module, kernel)])
    ]
    if found:
        raise ValueError(
            "fp8_forward='one_forward': routers of the engine take a kernel by the number of tokens: "
            f"{listed(found, 4)}. A token could go to other experts in another batch. Set fp8_forward='off'."
        )
