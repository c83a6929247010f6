"""`Platform`: vLLM's arguments on any device, and what CUDA and CPU add to them.

The engine starts from dummy weights with the recipe's `quantization_config` in the model's config: TRL syncs the whole
policy before the first rollout. Kernels and attention backend are pinned, because vLLM might choose some whose
weights or scales cannot be written in place. Kernels of linears are checked and timed on the device (gemms.py).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from transformers import PretrainedConfig
from vllm.config import VllmConfig

from trl_fp8.quantization.codec.kernel_check import require_exact_kernels
from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.from_model import caches_of
from trl_fp8.recipe.names import WRAPPED
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.recipe.servable import WITHOUT_ENGINE_WORDS
from trl_fp8.upstream.patches import substituted
from trl_fp8.upstream.vllm import forget_choices

from .environment import classes_derived, configs_kept, environment_kept


NAME = "trl_fp8"  # this package, as an entry of vLLM's `additional_config` and a provider of its IR operations
NORMS = "rms_norm", "fused_add_rms_norm"
# Passes of vLLM's compiler that fuse such an operation with its neighbours
FUSIONS = "fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant", "fuse_allreduce_rms", "enable_qk_norm_rope_fusion"
# The largest latent, without its rotated part, whose FP8 tiles fit into the shared memory of Ada and of 12.x
LATENT_IN_99_KIB = 256
BLOCK = 128  # tokens per KV cache block on CPU
_FOR_GOOD = ExitStack()  # never left


@dataclass(frozen=True)
class SeparateKernels:
    """Settings under which vLLM runs each operation as a kernel of its own, and rounds where that kernel does.

    By default vLLM lets Inductor or a fused kernel compute a residual sum and its norm, SiLU and product, or a rotary
    embedding at once, and a trainer has no function to call that gives those bits. A custom operation is opaque to the
    compiler, so the separate kernels run, a few more per layer. Where Inductor still fuses, as in residual sums,
    `emulate_precision_casts` keeps the roundings of BF16 arithmetic.
    """

    norms: str  # provider of vLLM's IR operations `NORMS`
    custom_ops: dict[str, bool]  # other operations -> True for vLLM's custom operation, False for its torch path

    def arguments(self) -> dict[str, object]:
        """Return arguments for `vllm.LLM(...)`."""
        priority = {name: [self.norms] for name in NORMS}
        compilation = {
            "custom_ops": ["all", *(f"-{name}" for name, custom in self.custom_ops.items() if not custom)],
            "pass_config": dict.fromkeys(FUSIONS, False),
            "inductor_compile_config": {"emulate_precision_casts": True},
        }
        return {"kernel_config": {"ir_op_priority": priority}, "compilation_config": compilation}

    def undone(self, config: VllmConfig) -> list[str]:
        """Return the settings of a running engine under which it runs other kernels."""
        found = []
        for name in NORMS:
            priority = getattr(config.kernel_config.ir_op_priority, name)
            if priority[0] != self.norms:
                found.append(f"kernel_config ir_op_priority.{name}={priority}")
        compilation = config.compilation_config
        for name, custom in self.custom_ops.items():
            if compilation.is_custom_op_enabled(name) != custom:
                difference = f"{'without' if custom else 'with'} {name}"
                found.append(f"compilation_config custom_ops={compilation.custom_ops} ({difference})")
        if compilation.mode:  # 0: nothing is compiled
            fused = [name for name in FUSIONS if getattr(compilation.pass_config, name)]
            found += [f"compilation_config pass_config.{name}=True" for name in fused]
            if not compilation.inductor_compile_config.get("emulate_precision_casts"):
                found.append("compilation_config inductor_compile_config without emulate_precision_casts")
        return found


class AddsArguments(Protocol):
    """The half of an `EnginePart` that a platform calls."""

    def arguments(self, platform: "Platform", recipe: FP8Recipe, config: PretrainedConfig, user: dict) -> dict: ...


class Platform(ABC):
    """A kind of device that an engine runs on."""

    name: ClassVar[str]  # as torch calls the device

    @abstractmethod
    def linear_backends(self, recipe: FP8Recipe) -> tuple[str, ...]:
        """Return vLLM's kernels for FP8 linears that may be taken, see `gemms.pinned_gemm`."""

    def arguments(
        self,
        recipe: FP8Recipe,
        config: PretrainedConfig,
        *,
        max_num_seqs: int,
        max_model_len: int | None,
        parts: Sequence[AddsArguments] = (),
        user: dict | None = None,
    ) -> dict:
        """Return arguments of `LLM(...)` that override TRL's; `ValueError` if the platform cannot run such a recipe.

        `recipe` and `config` are the policy's, `max_num_seqs` and `max_model_len` as TRL sets them; None is the
        model's own context length. `user`: `vllm_engine_kwargs`, which override pinned settings one by one.
        """
        user = user or {}
        arguments = {"load_format": "dummy", "dtype": "bfloat16", "additional_config": traced()}
        # vLLM would fill its image normalization with dummy weights; the trainer's processor normalizes already
        arguments["mm_device_do_normalize"] = False
        # Set also if nothing is FP8: the folder's config may say how its own weights are quantized
        text = config.get_text_config()
        fields = family_of(text.model_type).engine_fields(text.to_dict())
        arguments["hf_overrides"] = fields | {"quantization_config": recipe.quantization_config}
        if recipe.quantization_config is not None:
            arguments["kv_cache_dtype"] = recipe.kv_cache_dtype
        if recipe.kv_cache_skip_layers:
            arguments["kv_cache_dtype_skip_layers"] = [str(layer) for layer in recipe.kv_cache_skip_layers]
        arguments |= self._arguments(recipe, text, max_num_seqs, max_model_len)
        for part in parts:
            arguments = _merged(arguments, part.arguments(self, recipe, config, user))
        return _merged(arguments, user)

    @contextmanager
    def ready(self, recipe: FP8Recipe) -> Iterator[None]:
        """Prepare the process for the start of an engine inside the block."""
        forget_choices()
        with environment_kept(), configs_kept(), classes_derived(recipe), self._kernels_ready():
            yield

    def register_kernels(self) -> None:
        """Register the platform's kernels for all engines of this process, which is one of a server's."""
        _FOR_GOOD.enter_context(self._kernels_ready())

    @abstractmethod
    def _kernels_ready(self) -> AbstractContextManager[None]:
        """Register the platform's kernels for engines that start inside the block."""

    @abstractmethod
    def _arguments(self, recipe: FP8Recipe, config: PretrainedConfig, seqs: int, length: int | None) -> dict: ...


@dataclass(frozen=True)
class Cuda(Platform):
    """An NVIDIA GPU of one generation, with those of vLLM's kernels whose tensors a sync can write and read back."""

    capability: tuple[int, int]  # e.g. (9, 0)
    flash_attention: int | None = None  # the version that vLLM runs on it; None: none

    name = "cuda"

    def linear_backends(self, recipe: FP8Recipe) -> tuple[str, ...]:
        only = recipe.format.linear_backend
        swapped = ("flashinfer_cutlass",) if self.capability == (9, 0) else ()  # DeepGEMM, FlashInfer below 32 rows
        return (only,) if only else ("cutlass", "deep_gemm", *swapped, "triton")

    def _kernels_ready(self) -> AbstractContextManager[None]:
        require_exact_kernels(torch.device("cuda", torch.cuda.current_device()))
        return nullcontext()

    def _arguments(self, recipe: FP8Recipe, config: PretrainedConfig, seqs: int, length: int | None) -> dict:
        major, minor = self.capability
        if recipe.quantization_config is not None and self.capability < (8, 9):
            raise ValueError(
                f"fp8_weights={recipe.fp8_weights}, kv_cache_dtype={recipe.kv_cache_dtype!r} on a GPU of compute "
                f"capability {major}.{minor}, which has no units for e4m3: vLLM would store FP8 and compute in BF16. "
                "FP8 starts with Ada (8.9) and Hopper (9.0). Switch it off: fp8_weights=False, kv_cache_dtype='auto'."
            )
        first = recipe.format.capability
        if recipe.fp8_weights and self.capability < first:
            raise ValueError(
                f"fp8_weight_format={recipe.format.name!r} on a GPU of compute capability {major}.{minor}: vLLM would "
                f"repack the weights, or compute in BF16. The format starts with {first[0]}.{first[1]}; set "
                "fp8_weight_format='blocks'."
            )
        # FlashAttention 3 and Triton's attention read KV scales anew in each call. FlashInfer, which vLLM takes on
        # Blackwell, keeps copies; how FlashAttention 4 rounds attention weights is not known
        attention = "FLASH_ATTN" if self.flash_attention == 3 else "TRITON_ATTN"
        if recipe.decoder == WRAPPED and family_of(config.model_type).sees_images_whole:
            attention = "TRITON_ATTN"
        if latent := getattr(config, "kv_lora_rank", None):  # the MLA backend that rounds no query
            attention = "TRITON_MLA"
            if recipe.fp8_kv_cache and latent > LATENT_IN_99_KIB and major in (8, 12):
                raise ValueError(
                    f"kv_cache_dtype={recipe.kv_cache_dtype!r} with latents of {latent} elements (kv_lora_rank) on a "
                    f"GPU of compute capability {major}.{minor}: vLLM's kernel for FP8 latents (TRITON_MLA) needs 100 "
                    "KiB of shared memory for a block, the GPU has 99. BF16 latents fit: set kv_cache_dtype='auto'."
                )
        # FlashInfer also keeps a copy of attention sinks
        pinned = recipe.fp8_kv_cache or family_of(config.model_type).sinks
        arguments = {"attention_backend": attention} if pinned else {}
        # DeepGEMM's experts round act(gate) * up as no trainer here does; the others shuffle weights
        return arguments | ({"moe_backend": "triton"} if recipe.has_experts else {})


# The reference kernels are separate ones: no fused kernel of vLLM's takes their place
CPU_KERNELS = SeparateKernels(norms=NAME, custom_ops={"rotary_embedding": False})


class Cpu(Platform):
    """The engine of development, tests and demos: reference kernels in place of vLLM's, which differ between hosts."""

    name = "cpu"

    def linear_backends(self, recipe: FP8Recipe) -> tuple[str, ...]:
        return ("auto",)  # the reference kernel stands first

    @contextmanager
    def _kernels_ready(self) -> Iterator[None]:
        # These modules import what only vLLM's CPU build has
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        from .cpu.delta_net import register_cpu_delta_net
        from .cpu.latent import ReferenceLatentAttention
        from .cpu.ops import register_cpu_ops
        from .cpu.reference_attention import ReferenceAttention, overridden
        from .cpu.reference_experts import register_cpu_experts
        from .cpu.reference_linear import register_cpu_kernel

        register_cpu_kernel()
        register_cpu_experts()
        register_cpu_ops()
        register_cpu_delta_net()
        with (
            _memory_bound_quietly(),
            overridden(AttentionBackendEnum.CPU_ATTN, ReferenceAttention),
            overridden(AttentionBackendEnum.CPU_MLA, ReferenceLatentAttention),
        ):
            yield

    def _arguments(self, recipe: FP8Recipe, config: PretrainedConfig, seqs: int, length: int | None) -> dict:
        itemsize = 1 if recipe.fp8_kv_cache and not recipe.kv_cache_skip_layers else 2
        caches = caches_of(config, mamba_ssm_dtype="float32")
        token = max(cache.elements for cache in caches) * itemsize or 1  # 1: no layer caches k and v
        state = max(cache.state_bytes for cache in caches)
        block = BLOCK * max(1, -(-state // (BLOCK * token)))  # vLLM: no state is larger than a block
        blocks = -(-(length or config.max_position_embeddings) // block) + 1
        per_seq = sum(block * token * (blocks if cache.elements else 2) for cache in caches)
        # All sequences at full length, but at most 2 GiB, or the one sequence that vLLM insists on
        budget = max(per_seq, min(per_seq * seqs, 2 * 2**30))
        arguments = {"enforce_eager": True, "kv_cache_memory_bytes": budget} | CPU_KERNELS.arguments()
        # The state changes at each token (cpu/delta_net.py): BF16 would round it each time. Prefix caching would keep
        # states, each as large as a block
        hybrid = {"mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": False} if state else {}
        latent = {"attention_backend": "CPU_MLA"} if caches[0].is_latent else {}
        return arguments | hybrid | latent


def platform_of(device: torch.device | None = None) -> Platform:
    """Return the platform of `device`; None: CUDA if there is a GPU. `ValueError` for other kinds of device."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if device is not None:
        kind = device.type
    if kind == "cpu":
        return Cpu()
    if kind == "cuda":
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        return Cuda(torch.cuda.get_device_capability(), get_flash_attn_version())
    raise ValueError(
        f"the trainer runs on {kind!r}: FP8 rollouts run on NVIDIA GPUs, and on CPU (use_cpu=True) to try them. "
        f"Elsewhere train without FP8 and vLLM: {WITHOUT_ENGINE_WORDS}."
    )


def _merged(settings: dict, overrides: dict) -> dict:
    """Return `settings` with `overrides`; dictionaries within are merged likewise."""
    merged = settings | overrides
    for name in settings.keys() & overrides:
        if isinstance(settings[name], dict) and isinstance(overrides[name], dict):
            merged[name] = _merged(settings[name], overrides[name])
    return merged


def traced(**further: object) -> dict[str, dict]:
    """Return `additional_config` for `vllm.LLM(...)`; `further`: other settings that the traced code depends on.

    vLLM looks for compiled code under a hash of its environment variables, its config and the model's class. If it
    finds some, it does not trace the model again. This package's kernels and layers change what is traced, and none of
    these mentions them. `additional_config` is hashed, and vLLM does not read this entry. A part that changes what is
    traced adds to it.
    """
    return {NAME: {"source": _source(), **further}}


@cache
def _source() -> str:
    """Return a digest of this package: another version of it, or an edited one, may trace something else."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[2]
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _memory_bound_quietly() -> AbstractContextManager[None]:
    """Keep vLLM from binding memory on a host with one NUMA node: it would warn of that in C++, past logging."""
    if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) > 1:
        return nullcontext()
    torch.ops._C.init_cpu_memory_env  # looked up once, so that it stands in the namespace  # noqa: B018
    return substituted(torch.ops._C, "init_cpu_memory_env", lambda nodes: None)
