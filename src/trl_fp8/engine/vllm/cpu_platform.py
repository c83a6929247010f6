"""The CPU engine: reference kernels in place of vLLM's, which differ between hosts."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from transformers import PretrainedConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from trl_fp8.recipe.from_model import caches_of
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.upstream.patches import substituted

from .cpu.delta_net import register_cpu_delta_net
from .cpu.latent import ReferenceLatentAttention
from .cpu.ops import PROVIDER, register_cpu_ops
from .cpu.reference_attention import ReferenceAttention, overridden
from .cpu.reference_experts import register_cpu_experts
from .cpu.reference_linear import register_cpu_kernel
from .platform import Platform
from .separate_kernels import SeparateKernels


BLOCK = 128  # tokens per KV cache block
# Always, because the reference kernels are such: no fused one takes their place
KERNELS = SeparateKernels(norms=PROVIDER, custom_ops={"rotary_embedding": False})


class Cpu(Platform):
    """For development, tests and demos."""

    name = "cpu"

    def linear_backends(self, recipe: FP8Recipe) -> tuple[str, ...]:
        return ("auto",)  # the reference kernel stands first

    @contextmanager
    def _kernels_ready(self) -> Iterator[None]:
        for register in register_cpu_kernel, register_cpu_experts, register_cpu_ops, register_cpu_delta_net:
            register()
        latent = overridden(AttentionBackendEnum.CPU_MLA, ReferenceLatentAttention)
        with _memory_bound_quietly(), overridden(AttentionBackendEnum.CPU_ATTN, ReferenceAttention), latent:
            yield

    def _arguments(self, recipe: FP8Recipe, config: PretrainedConfig, seqs: int, length: int | None) -> dict:
        itemsize = 1 if recipe.fp8_kv_cache and not recipe.kv_cache_skip_layers else 2
        caches = caches_of(config, mamba_ssm_dtype="float32")
        token = max(cache.elements for cache in caches) * itemsize or 1  # 1: no layer caches k and v
        state = max(cache.state_bytes for cache in caches)
        block = BLOCK * max(1, -(-state // (BLOCK * token)))  # vLLM: no state is larger than a block
        blocks = -(-(length or config.max_position_embeddings) // block) + 1
        per_seq = sum(block * token * (blocks if cache.elements else 2) for cache in caches)
        # All sequences at full length, but at most 2 GiB beyond the one sequence that vLLM insists on
        budget = max(per_seq, min(per_seq * seqs, 2 * 2**30))
        arguments = {"enforce_eager": True, "kv_cache_memory_bytes": budget} | KERNELS.arguments()
        # States are those of single tokens (cpu/delta_net.py): BF16 would round each. vLLM keeps some between prompts,
        # each as large as a block
        hybrid = {"mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": False} if state else {}
        latent = {"attention_backend": "CPU_MLA"} if caches[0].is_latent else {}
        return arguments | hybrid | latent


def _memory_bound_quietly() -> AbstractContextManager[None]:
    """On a host with one NUMA node vLLM binds memory to where it is already, and warns of it in C++, past logging."""
    if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) > 1:
        return nullcontext()
    torch.ops._C.init_cpu_memory_env  # looked up once, so that it stands in the namespace  # noqa: B018
    return substituted(torch.ops._C, "init_cpu_memory_env", lambda nodes: None)
