"""CPU and CUDA: what vLLM is told on each, what is put in place before it starts, and where it rounds.

The engine starts from dummy weights with the recipe's `quantization_config` in the model's config: TRL syncs the whole
policy before the first rollout. Kernels and attention backend are pinned, because vLLM's own choice depends on the
batch size (FlashInfer below 32 rows, DeepGEMM above) and takes some whose weights or scales could not be written in
place. Those of linears are chosen by what they do on the device (gemms.py).
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from transformers import PretrainedConfig
from vllm.model_executor.determinism import batch_invariant
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

from trl_fp8.engine.vllm.cpu.delta_net import register_cpu_delta_net
from trl_fp8.engine.vllm.cpu.latent import reference_latent_attention
from trl_fp8.engine.vllm.cpu.ops import PROVIDER, register_cpu_ops
from trl_fp8.engine.vllm.cpu.reference_attention import reference_attention
from trl_fp8.engine.vllm.cpu.reference_experts import register_cpu_experts
from trl_fp8.engine.vllm.cpu.reference_linear import register_cpu_kernel
from trl_fp8.features.one_forward.engine_part.cpu_packed import PackedAttention
from trl_fp8.features.one_forward.engine_part.invariance import SWITCH, Invariance
from trl_fp8.features.one_forward.engine_part.norms import register_cuda_norms
from trl_fp8.features.one_forward.engine_part.tiles import pin_tiles
from trl_fp8.quantization.codec.kernel_check import require_exact_kernels
from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.from_model import caches_of
from trl_fp8.recipe.names import WRAPPED
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.recipe.servable import WITHOUT_ENGINE_WORDS
from trl_fp8.upstream.patches import substituted
from trl_fp8.upstream.vllm import forget_choices

from .compiled import traced
from .environment import environment_kept
from .fallback import classes_derived


# Elements of a latent without its rotated rest: of as many, FP8 tiles fit into the smaller blocks of Ada and of 12.x
LATENT_IN_99_KIB = 256


class Platform(ABC):
    """Where an engine runs."""

    name: ClassVar[str]  # as torch calls the device
    invariance: ClassVar[Invariance]  # vLLM's settings for a trainer that calls the engine's kernels
    mismatch_bound: ClassVar[float]  # see `EngineNumerics`
    routes_from: ClassVar[Literal["vllm", "routers"]]  # where `RolloutLLM` gets the experts that routers choose
    survivors_from: ClassVar[Literal["vllm", "sampler"]]  # and the tokens that are left to be sampled from

    @abstractmethod
    def linear_backends(self, recipe: FP8Recipe) -> tuple[str, ...]:
        """vLLM's kernels for FP8 linears that may be taken, see `gemms.pinned_gemm`."""

    def arguments(
        self,
        recipe: FP8Recipe,
        config: PretrainedConfig,
        *,
        max_num_seqs: int,
        max_model_len: int | None,
        return_routes: bool = False,
        return_survivors: bool = False,
        share_kernels: bool = False,
        adapters: Mapping[str, int] = MappingProxyType({}),
        user: dict | None = None,
    ) -> dict:
        """What to pass to `LLM(...)` over what TRL passes; `ValueError` if the platform cannot run such a recipe.

        Args:
            recipe, config: The policy's.
            max_num_seqs, max_model_len: As TRL sets them; None means the model's own context length.
            return_routes, return_survivors, share_kernels: See `FP8VLLMGeneration`; on CPU kernels always are those
                that can be shared.
            adapters: Layer -> rank of the adapters that the engine has room for beside its weights.
            user: `vllm_engine_kwargs`; they win over what is pinned, setting by setting.
        """
        user, arguments = user or {}, {"load_format": "dummy", "dtype": "bfloat16"}
        arguments["additional_config"] = traced(adapters)
        # Of what vLLM would normalize images with, dummy weights are made; the trainer's processor normalizes, too
        arguments["mm_device_do_normalize"] = False
        # also where nothing is FP8: the folder's config may say how its own weights are quantized
        text = config.get_text_config()
        fields = family_of(text.model_type).engine_fields(text.to_dict())
        arguments["hf_overrides"] = fields | {"quantization_config": recipe.quantization_config}
        if recipe.quantization_config is not None:
            arguments["kv_cache_dtype"] = recipe.kv_cache_dtype
        if recipe.kv_cache_skip_layers:
            arguments["kv_cache_dtype_skip_layers"] = [str(layer) for layer in recipe.kv_cache_skip_layers]
        arguments |= self._arguments(recipe, config.get_text_config(), max_num_seqs, max_model_len)
        if share_kernels:
            arguments |= self._invariant_arguments(config.get_text_config())
        if return_survivors and self.survivors_from == "vllm":
            arguments["return_sampling_mask"] = True
        if return_routes:
            arguments |= self._routes_arguments(recipe, user)
            cached = arguments["enable_prefix_caching"]
            if user.get("enable_prefix_caching", cached) != cached:
                raise ValueError(
                    f"vllm_engine_kwargs sets enable_prefix_caching={not cached} with router_replay, which needs "
                    f"{cached} on {self.name}. Remove it, or set router_replay='off'."
                )
        return _merged(arguments, user)

    @abstractmethod
    def ready(self, recipe: FP8Recipe) -> AbstractContextManager[None]:
        """Engines that are started inside the block find what they need."""

    def invariant(self, recipe: FP8Recipe) -> AbstractContextManager[None]:
        """Engines that are started inside the block, too, run kernels that a trainer can share."""
        return nullcontext()

    def _invariant_arguments(self, config: PretrainedConfig) -> dict:
        return self.invariance.arguments()

    @abstractmethod
    def attention(self, layer: Attention) -> object:
        """`engine.kernels.Attention` of a layer of the engine."""

    @abstractmethod
    def _arguments(self, recipe: FP8Recipe, config: PretrainedConfig, seqs: int, length: int | None) -> dict: ...

    @abstractmethod
    def _routes_arguments(self, recipe: FP8Recipe, user: dict) -> dict: ...


class Cpu(Platform):
    """For development, tests and demos: reference kernels in place of vLLM's, which differ between hosts."""

    name = "cpu"
    invariance = Invariance(
        norms={"rms_norm": PROVIDER, "fused_add_rms_norm": PROVIDER}, custom_ops={"rotary_embedding": False}
    )
    # Reductions in FP64 have one result, whatever the batch. The room is for log-softmax, in FP32 on both sides
    mismatch_bound = 1e-5
    routes_from = "routers"
    survivors_from = "sampler"
    block = 128  # tokens per KV cache block

    def linear_backends(self, recipe: FP8Recipe) -> tuple[str, ...]:
        return ("auto",)  # the reference kernel stands first

    @contextmanager
    def ready(self, recipe: FP8Recipe) -> Iterator[None]:
        forget_choices()
        for register in register_cpu_kernel, register_cpu_experts, register_cpu_ops, register_cpu_delta_net:
            register()
        attentions = reference_attention(), reference_latent_attention()
        with environment_kept(), attentions[0], attentions[1], classes_derived(recipe), _memory_bound_quietly():
            yield

    def attention(self, layer: Attention) -> PackedAttention:
        return PackedAttention(layer)

    def _arguments(self, recipe: FP8Recipe, config: PretrainedConfig, seqs: int, length: int | None) -> dict:
        itemsize = 1 if recipe.fp8_kv_cache and not recipe.kv_cache_skip_layers else 2
        caches = caches_of(config, mamba_ssm_dtype="float32")
        token = max(cache.elements for cache in caches) * itemsize or 1  # 1: no layer caches k and v
        state = max(cache.state_bytes for cache in caches)
        block = self.block * max(1, -(-state // (self.block * token)))  # vLLM: no state is larger than a block
        blocks = -(-(length or config.max_position_embeddings) // block) + 1
        per_seq = sum(block * token * (blocks if cache.elements else 2) for cache in caches)
        # All sequences at full length, but at most 2 GiB beyond the one sequence that vLLM insists on
        budget = max(per_seq, min(per_seq * seqs, 2 * 2**30))
        arguments = {"enforce_eager": True, "kv_cache_memory_bytes": budget} | self.invariance.arguments()
        # States are those of single tokens (cpu/delta_net.py): BF16 would round each. vLLM keeps some between prompts,
        # each as large as a block
        hybrid = {"mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": False} if state else {}
        latent = {"attention_backend": "CPU_MLA"} if caches[0].is_latent else {}
        return arguments | hybrid | latent

    def _routes_arguments(self, recipe: FP8Recipe, user: dict) -> dict:
        return {"enable_prefix_caching": False}  # routers are read as they route: a cached token bypasses them


def _memory_bound_quietly() -> AbstractContextManager[None]:
    """On a host with one NUMA node vLLM binds memory to where it is already, and warns of it in C++, past logging."""
    if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) > 1:
        return nullcontext()
    torch.ops._C.init_cpu_memory_env  # looked up once, so that it stands in the namespace  # noqa: B018
    return substituted(torch.ops._C, "init_cpu_memory_env", lambda nodes: None)


@dataclass(frozen=True)
class Cuda(Platform):
    """An NVIDIA GPU."""

    capability: tuple[int, int]  # e.g. (9, 0)
    flash_attention: int | None = None  # the version that vLLM runs on it; None: none

    name = "cuda"
    # With its custom operation of RMS norms, vLLM's switch would go around the providers
    invariance = Invariance(
        norms={"rms_norm": PROVIDER, "fused_add_rms_norm": PROVIDER},
        custom_ops={"rms_norm": False, "rotary_embedding": True, "silu_and_mul": True, "quant_fp8": True},
        attention="FLASH_ATTN",
        switch=True,
    )
    mismatch_bound = 1e-3  # a third of what BF16 rollouts leave at 2 layers; has not been measured
    routes_from = "vllm"
    survivors_from = "vllm"

    def linear_backends(self, recipe: FP8Recipe) -> tuple[str, ...]:
        only = recipe.format.linear_backend
        return (only,) if only else ("cutlass", "deep_gemm", "triton")

    @contextmanager
    def ready(self, recipe: FP8Recipe) -> Iterator[None]:
        require_exact_kernels(torch.device("cuda", torch.cuda.current_device()))
        forget_choices()
        with environment_kept(), classes_derived(recipe):
            yield

    def attention(self, layer: Attention) -> object:
        from trl_fp8.features.one_forward.engine_part.flash_attention import (
            PackedAttention as Paged,  # vLLM's CPU build has no FlashAttention
        )

        return Paged(layer)

    @contextmanager
    def invariant(self, recipe: FP8Recipe) -> Iterator[None]:
        from trl_fp8.features.one_forward.engine_part.flash_attention import (
            invariant_attention,  # vLLM's CPU build has no FlashAttention
        )

        register_cuda_norms()
        pin_tiles()
        # The rest of vLLM's switch concerns the whole process, the trainer too: NCCL is cut to one channel and one
        # thread, softmax, mean and bmm of torch are replaced. On one rank the engine communicates with nobody, and
        # its kernels need none of the others; ranks that add up need an order that no message's size changes
        for_ranks = batch_invariant.override_envs_for_invariance
        rest = for_ranks if recipe.tensor_parallel_size > 1 else lambda: None
        # A user's own setting of the switch stays, and `Invariance.require` names it. Ahead-of-time compilation is off
        # where vLLM switches it off, in the part of `init_batch_invariance` that is left out
        settings = {SWITCH: os.environ.get(SWITCH, "1"), "VLLM_USE_AOT_COMPILE": "0"}
        with (
            environment_kept(settings),
            invariant_attention(),
            substituted(batch_invariant, "init_batch_invariance", rest),
        ):
            forget_choices()  # vLLM may have kept what the settings were
            yield

    def _invariant_arguments(self, config: PretrainedConfig) -> dict:
        compiled = family_of(config.model_type).compiled_on_cuda
        if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
            compiled = "rotary embedding (longrope) with what is around it"
        if compiled:
            raise ValueError(
                f"fp8_forward='one_forward' with a policy of type {config.model_type!r} on cuda: vLLM compiles its "
                f"{compiled}, so that the trainer cannot have the engine's bits. Set fp8_forward='off'."
            )
        if self.flash_attention != 3:
            major, minor = self.capability
            raise ValueError(
                f"fp8_forward='one_forward' on a GPU of compute capability {major}.{minor}: vLLM attends with "
                "TRITON_ATTN there, whose kernel keeps no log-sum-exp for the trainer's backward; GEMMs were not "
                "read. On Hopper (9.0) FlashAttention 3 can be shared. Set fp8_forward='off'."
            )
        return super()._invariant_arguments(config)

    def _arguments(self, recipe: FP8Recipe, config: PretrainedConfig, seqs: int, length: int | None) -> dict:
        major, minor = self.capability
        if recipe.quantization_config is not None and self.capability < (8, 9):
            raise ValueError(
                f"fp8_weights={recipe.fp8_weights}, kv_cache_dtype={recipe.kv_cache_dtype!r} on a GPU of compute "
                f"capability {major}.{minor}, which has no units for e4m3: vLLM would store FP8 and compute in BF16. "
                "FP8 starts with Ada (8.9) and Hopper (9.0). Switch it off: fp8_weights=False, kv_cache_dtype='auto'."
            )
        # FlashAttention 3 and Triton's attention read KV scales anew in each call. FlashInfer, which vLLM takes on
        # Blackwell, keeps copies; how FlashAttention 4 rounds attention weights is not known
        attention = "FLASH_ATTN" if self.flash_attention == 3 else "TRITON_ATTN"
        if recipe.decoder == WRAPPED and family_of(config.model_type).sees_images_whole:
            attention = "TRITON_ATTN"
        if latent := getattr(config, "kv_lora_rank", None):  # of MLA's, the one that rounds no query
            attention = "TRITON_MLA"
            if recipe.fp8_kv_cache and latent > LATENT_IN_99_KIB and major in (8, 12):
                raise ValueError(
                    f"kv_cache_dtype={recipe.kv_cache_dtype!r} with latents of {latent} elements (kv_lora_rank) on a "
                    f"GPU of compute capability {major}.{minor}: vLLM's kernel for FP8 latents (TRITON_MLA) needs 100 "
                    "KiB of shared memory for a block, the GPU has 99. BF16 latents fit: set kv_cache_dtype='auto'."
                )
        # FlashInfer, again, keeps a copy of attention sinks
        pinned = recipe.fp8_kv_cache or family_of(config.model_type).sinks
        arguments = {"attention_backend": attention} if pinned else {}
        # DeepGEMM's experts round act(gate) * up as no trainer here does; the others shuffle weights
        return arguments | ({"moe_backend": "triton"} if recipe.has_experts else {})

    def _routes_arguments(self, recipe: FP8Recipe, user: dict) -> dict:
        if recipe.tensor_parallel_size > 1:
            raise ValueError(
                f"router_replay with vllm_tensor_parallel_size={recipe.tensor_parallel_size} on cuda: only the first "
                "rank of a vLLM 0.31 engine returns the experts that it chose, and its other ranks fail without them. "
                "Set vllm_tensor_parallel_size=1, or router_replay='off'."
            )
        if user.get("async_scheduling"):
            raise ValueError(
                "vllm_engine_kwargs sets async_scheduling=True with router_replay: vLLM 0.31 cannot reset its prefix "
                "cache after a weight sync while a batch whose routes it returns is in flight. Remove it, or set "
                "router_replay='off'."
            )
        # vLLM stores routes with its prefix cache, so keep that on. A batch that is scheduled ahead would be in flight
        # when a sync resets that cache: `begin_step` (`aux_output_connector/worker.py`) then fails an assertion
        return {"enable_prefix_caching": True, "enable_return_routed_experts": True, "async_scheduling": False}


def platform_of(device: torch.device | None = None) -> Platform:
    """The platform of `device`; None: CUDA if there is a GPU. `ValueError` for other kinds of device."""
    kind = device.type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if kind not in (Cpu.name, Cuda.name):
        raise ValueError(
            f"the trainer runs on {kind!r}: FP8 rollouts run on NVIDIA GPUs, and on CPU (use_cpu=True) to try them. "
            f"Elsewhere train without FP8 and vLLM: {WITHOUT_ENGINE_WORDS}."
        )
    return Cuda(torch.cuda.get_device_capability(), get_flash_attn_version()) if kind == Cuda.name else Cpu()


def _merged(ours: dict, users: dict) -> dict:
    """The user's settings over ours; a dictionary within does not replace ours as a whole."""
    both = [name for name in ours.keys() & users if isinstance(ours[name], dict) and isinstance(users[name], dict)]
    return ours | users | {name: _merged(ours[name], users[name]) for name in both}
