"""`Platform`: arguments for vLLM on any device. `Cuda` and `Cpu` add their own.

The engine starts from dummy weights with the recipe's `quantization_config` in the model's config, because TRL syncs
the whole policy before the first rollout. vLLM might choose kernels whose weights or scales a sync cannot write in
place. So on CUDA the kernel for experts is pinned. The attention backend is pinned, too, if the KV cache is FP8 or
the model has attention sinks. The kernel of FP8 linears is chosen by checks and times on the device (gemms.py).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

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

from .environment import configs_restored, environment_restored, policy_class_unchanged


NAME = "trl_fp8"  # this package, as an entry of vLLM's `additional_config` and a provider of its IR operations
NORMS = "rms_norm", "fused_add_rms_norm"
# Passes of vLLM's compiler that fuse norms, activations or attention with neighbouring operations
FUSIONS = "fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant", "fuse_allreduce_rms", "enable_qk_norm_rope_fusion"
# Largest MLA latent (kv_lora_rank) whose FP8 tiles fit into 99 KiB. A thread block has this much shared memory on GPUs
# of compute capability 8.9 (Ada) and 12.x
LATENT_IN_99_KIB = 256
BLOCK = 128  # tokens per KV cache block on CPU
BIND_MEMORY = "init_cpu_memory_env"  # vLLM's operation for CPU that binds memory to NUMA nodes
_UNTIL_PROCESS_ENDS = ExitStack()  # contexts that are never left


@dataclass(frozen=True)
class SeparateKernels:
    """Settings under which vLLM runs one kernel per operation, and rounds after each.

    By default vLLM fuses operations, by Inductor or in one kernel: a residual sum with its norm, SiLU with the
    product, the steps of a rotary embedding. A trainer has no function to call that gives the same bits. Inductor
    cannot look into a custom operation, so with these settings separate kernels run, a few more per layer. Where
    Inductor still fuses, as in residual sums, `emulate_precision_casts` keeps the roundings of BF16 arithmetic.
    """

    norms: str  # the provider that vLLM takes for its IR operations `NORMS`
    custom_ops: dict[str, bool]  # name of another operation -> True: vLLM's custom kernel; False: its torch code

    def arguments(self) -> dict[str, object]:
        """Return the arguments for `vllm.LLM(...)` that choose these kernels."""
        priority = {name: [self.norms] for name in NORMS}
        as_torch_code = [f"-{name}" for name, custom in self.custom_ops.items() if not custom]
        compilation = {
            "custom_ops": ["all", *as_torch_code],
            "pass_config": dict.fromkeys(FUSIONS, False),
            "inductor_compile_config": {"emulate_precision_casts": True},
        }
        return {"kernel_config": {"ir_op_priority": priority}, "compilation_config": compilation}

    def violated_by(self, config: VllmConfig) -> list[str]:
        """Return the settings of a started engine that make the engine run other kernels than these."""
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


class Platform(ABC):
    """A kind of device that an engine runs on."""

    name: ClassVar[str]  # torch's name of the device type

    @abstractmethod
    def linear_backends(self, recipe: FP8Recipe) -> tuple[str, ...]:
        """Return the names of vLLM's kernels that `gemms.pinned_gemm` may choose from for FP8 linears."""

    def arguments(
        self,
        recipe: FP8Recipe,
        config: PretrainedConfig,
        *,
        max_num_seqs: int,
        max_model_len: int | None,
        parts: Sequence[Any] = (),
        user: dict | None = None,
    ) -> dict:
        """Return arguments of `vllm.LLM(...)` that override TRL's.

        Args:
            recipe: What is FP8 in the policy.
            config: The policy's config.
            max_num_seqs: The value that TRL sets.
            max_model_len: The value that TRL sets, in tokens. None: the model's own context length.
            parts: `EnginePart`s, which add arguments (typed `Any`, because part.py imports this module).
            user: `vllm_engine_kwargs`, which override these arguments one by one.

        Raises:
            ValueError: The platform cannot run the recipe.
        """
        user = user or {}
        arguments = {"load_format": "dummy", "dtype": "bfloat16", "additional_config": compile_cache_key()}
        # The trainer's processor has normalized images. vLLM would normalize them again, and by random numbers: vLLM
        # keeps mean and standard deviation as buffers of the model, which start as dummy weights
        arguments["mm_device_do_normalize"] = False
        # The model may come from the Hub at a `revision`, which TRL does not pass on. The config has no commit if the
        # model is in a folder, or if this version of transformers keeps none. In the second case vLLM reads the main
        # branch, and `require_known_commit` (run/launch.py) has refused any other revision
        commit = getattr(config, "_commit_hash", None)
        if commit is not None:
            arguments["revision"] = commit
        text = config.get_text_config()
        fields = family_of(text.model_type).engine_fields(text.to_dict())
        # Override `quantization_config` even if nothing is FP8 (with None): the checkpoint's own weights may be
        # quantized, and vLLM would read that from the checkpoint's config
        arguments["hf_overrides"] = fields | {"quantization_config": recipe.quantization_config}
        if recipe.quantization_config is not None:
            arguments["kv_cache_dtype"] = recipe.kv_cache_dtype
        if recipe.kv_cache_skip_layers:
            arguments["kv_cache_dtype_skip_layers"] = [str(layer) for layer in recipe.kv_cache_skip_layers]
        max_num_seqs = user.get("max_num_seqs") or max_num_seqs
        arguments |= self._arguments(recipe, text, max_num_seqs, max_model_len)
        for part in parts:
            arguments = _merged(arguments, part.arguments(self, recipe, config, user))
        # If the user chooses the kernel for experts, remove the pinned argument: vLLM would prefer this argument to an
        # entry of the user's `kernel_config`. If the user chooses by argument, `_merged` adds that argument
        if chosen_backend(user, "moe_backend"):
            arguments.pop("moe_backend", None)
        return _merged(arguments, user)

    @contextmanager
    def ready(self, recipe: FP8Recipe) -> Iterator[None]:
        """Prepare the process for the start of an engine inside the block."""
        forget_choices()
        with environment_restored(), configs_restored(), policy_class_unchanged(recipe), self._kernels_ready():
            yield

    def register_kernels(self) -> None:
        """Register the platform's kernels until the process ends. Meant for processes of a vLLM server."""
        _UNTIL_PROCESS_ENDS.enter_context(self._kernels_ready())

    @abstractmethod
    def _kernels_ready(self) -> AbstractContextManager[None]:
        """Register the platform's kernels for engines that start inside the block."""

    @abstractmethod
    def _arguments(
        self, recipe: FP8Recipe, config: PretrainedConfig, max_num_seqs: int, max_model_len: int | None
    ) -> dict: ...


@dataclass(frozen=True)
class Cuda(Platform):
    """An NVIDIA GPU, with the kernels of vLLM whose weights and scales a sync can write in place and read back."""

    capability: tuple[int, int]  # compute capability, e.g. (9, 0) on Hopper
    flash_attention: int | None = None  # version of FlashAttention that vLLM runs on this GPU; None: vLLM runs none

    name = "cuda"

    def linear_backends(self, recipe: FP8Recipe) -> tuple[str, ...]:
        if recipe.format.linear_backend is not None:
            return (recipe.format.linear_backend,)
        backends = ["cutlass", "deep_gemm"]
        if self.capability == (9, 0):
            # On Hopper this backend runs FlashInfer's own kernel for fewer than 32 rows, and DeepGEMM for more
            backends.append("flashinfer_cutlass")
        return (*backends, "triton")

    def _kernels_ready(self) -> AbstractContextManager[None]:
        require_exact_kernels(torch.device("cuda", torch.cuda.current_device()))
        return nullcontext()

    def _arguments(
        self, recipe: FP8Recipe, config: PretrainedConfig, max_num_seqs: int, max_model_len: int | None
    ) -> dict:
        major, minor = self.capability
        if recipe.quantization_config is not None and self.capability < (8, 9):
            raise ValueError(
                f"fp8_weights={recipe.fp8_weights}, kv_cache_dtype={recipe.kv_cache_dtype!r} on a GPU of compute "
                f"capability {major}.{minor}, which has no units for e4m3: vLLM would store FP8 and compute in BF16. "
                "FP8 starts with Ada (8.9) and Hopper (9.0). Switch it off: fp8_weights=False, kv_cache_dtype='auto'."
            )
        required = recipe.format.capability
        if recipe.fp8_weights and self.capability < required:
            raise ValueError(
                f"fp8_weight_format={recipe.format.name!r} on a GPU of compute capability {major}.{minor}: vLLM would "
                f"repack the weights, or compute in BF16. The format starts with {required[0]}.{required[1]}; set "
                "fp8_weight_format='blocks'."
            )
        # FlashAttention 3 and Triton's attention read KV scales anew in each call. FlashInfer, which vLLM takes on
        # Blackwell, keeps copies of the scales, which a sync cannot write. How FlashAttention 4 rounds attention
        # weights is not known
        attention = "FLASH_ATTN" if self.flash_attention == 3 else "TRITON_ATTN"
        is_vision = recipe.decoder == WRAPPED
        if is_vision and family_of(config.model_type).sees_images_whole:
            attention = "TRITON_ATTN"  # FlashAttention 3 cannot mask bidirectional image tokens
        latent = getattr(config, "kv_lora_rank", None)
        if latent:
            attention = "TRITON_MLA"  # the only MLA backend that does not round queries
            if recipe.fp8_kv_cache and latent > LATENT_IN_99_KIB and major in (8, 12):
                raise ValueError(
                    f"kv_cache_dtype={recipe.kv_cache_dtype!r} with latents of {latent} elements (kv_lora_rank) on a "
                    f"GPU of compute capability {major}.{minor}: vLLM's kernel for FP8 latents (TRITON_MLA) needs 100 "
                    "KiB of shared memory for a block, the GPU has 99. BF16 latents fit: set kv_cache_dtype='auto'."
                )
        arguments = {}
        # Pin the backend if there is an FP8 cache or there are sinks, because FlashInfer keeps copies of KV scales and
        # of sinks. Otherwise vLLM chooses the backend
        if recipe.fp8_kv_cache or family_of(config.model_type).sinks:
            arguments["attention_backend"] = attention
        # vLLM's other kernels for experts cannot be used: DeepGEMM's kernel rounds act(gate) * up, and the trainer has
        # no such rounding; the others reorder the weights
        if recipe.has_experts:
            arguments["moe_backend"] = "triton"
        return arguments


# The CPU engine's reference kernels compute one operation each, and vLLM must not replace them by fused kernels. There
# is no reference kernel for rotary embeddings: vLLM's torch code computes them, see cpu/ops.py
CPU_KERNELS = SeparateKernels(norms=NAME, custom_ops={"rotary_embedding": False})


class Cpu(Platform):
    """The CPU, for development, tests and demos.

    Reference kernels replace vLLM's, whose results differ between hosts.
    """

    name = "cpu"

    def linear_backends(self, recipe: FP8Recipe) -> tuple[str, ...]:
        return ("auto",)  # vLLM takes the first kernel of its list; `register_cpu_kernel` puts the reference first

    @contextmanager
    def _kernels_ready(self) -> Iterator[None]:
        # Imported here, because these modules need vLLM's CPU build
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
            _without_memory_binding(),
            overridden(AttentionBackendEnum.CPU_ATTN, ReferenceAttention),
            overridden(AttentionBackendEnum.CPU_MLA, ReferenceLatentAttention),
        ):
            yield

    def _arguments(
        self, recipe: FP8Recipe, config: PretrainedConfig, max_num_seqs: int, max_model_len: int | None
    ) -> dict:
        # 1. Size of a cache block, which is the same in all layers. `token_bytes` is what the layer with the largest k
        #    and v needs for a token. A layer with a state (linear attention) keeps its whole state in one block, so
        #    vLLM makes a block a multiple of `BLOCK` tokens that is large enough for the largest state
        itemsize = 1 if recipe.fp8_kv_cache and not recipe.kv_cache_skip_layers else 2
        caches = caches_of(config, mamba_ssm_dtype="float32")
        most_elements = max(cache.elements for cache in caches)  # 0 if no layer caches k and v
        token_bytes = max(1, itemsize * most_elements)  # not 0, because it divides below
        state_bytes = max(cache.state_bytes for cache in caches)
        blocks_of_state = -(-state_bytes // (BLOCK * token_bytes))  # -(-a // b) rounds up
        block_tokens = BLOCK * max(1, blocks_of_state)
        # 2. Blocks that one sequence needs: in each layer as many as its tokens fill, or one for a state. Plus one in
        #    each layer, because vLLM reserves a block of its pool
        token_blocks = -(-(max_model_len or config.max_position_embeddings) // block_tokens)
        seq_blocks = sum(1 + (token_blocks if cache.elements else 1) for cache in caches)
        seq_bytes = seq_blocks * block_tokens * token_bytes
        # 3. Enough for all sequences at full length, but at most 2 GiB. At least one sequence, or vLLM does not start
        cache_bytes = max(seq_bytes, min(seq_bytes * max_num_seqs, 2 * 2**30))
        arguments = {"enforce_eager": True, "kv_cache_memory_bytes": cache_bytes} | CPU_KERNELS.arguments()
        if state_bytes:
            # The state of a gated delta net changes at each token (cpu/delta_net.py). BF16 would round it each time
            arguments["mamba_ssm_cache_dtype"] = "float32"
            arguments["enable_prefix_caching"] = False  # would keep further states, each as large as a block
        if caches[0].is_latent:
            arguments["attention_backend"] = "CPU_MLA"
        return arguments


def platform_of(device: torch.device | None = None) -> Platform:
    """Return the platform of `device`. None: `Cuda` if this host has a GPU, else `Cpu`.

    Raises `ValueError` for other kinds of device.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if device is not None:
        kind = device.type
    if kind == "cuda" and torch.version.hip:  # torch calls AMD's GPUs "cuda", too
        kind = "rocm"
    if kind == "cpu":
        return Cpu()
    if kind == "cuda":
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        return Cuda(torch.cuda.get_device_capability(device), get_flash_attn_version())
    raise ValueError(
        f"the trainer runs on {kind!r}: FP8 rollouts run on NVIDIA GPUs, and on CPU (use_cpu=True) to try them. "
        f"Elsewhere train without FP8 and vLLM: {WITHOUT_ENGINE_WORDS}."
    )


def chosen_backend(user: dict, name: str) -> str | None:
    """Return the user's choice of `name` (`linear_backend` or `moe_backend`); None if the user made none.

    `user` are the `vllm_engine_kwargs`. vLLM reads a backend from an argument and from an entry of `kernel_config`. If
    a user sets both, the argument counts, unless it is "auto".
    """
    kernel_config = user.get("kernel_config")
    entry = kernel_config.get(name) if isinstance(kernel_config, dict) else None
    argument = user.get(name)
    is_open = argument is None or argument == "auto"
    return entry if is_open and entry is not None else argument


def _merged(settings: dict, overrides: dict) -> dict:
    """Return `settings` updated with `overrides`, recursively where both have a dictionary."""
    merged = settings | overrides
    for name in settings.keys() & overrides:
        if isinstance(settings[name], dict) and isinstance(overrides[name], dict):
            merged[name] = _merged(settings[name], overrides[name])
    return merged


def compile_cache_key(**settings: object) -> dict[str, dict]:
    """Return an `additional_config` for `vllm.LLM(...)` that separates this package's compiled code from other code.

    vLLM caches compiled code under a hash of its environment variables, its config and the model's class. If it finds
    code there, it does not trace the model again. This package's kernels and layers change what is traced, but would
    not change the hash. vLLM hashes `additional_config`, and reads nothing from this entry of it.

    `settings`: an `EnginePart` that changes the traced code passes the values on which its changes depend.
    """
    return {NAME: {"source": _source_digest(), **settings}}


@cache
def _source_digest() -> str:
    """Return a digest of this package's source. Each edit or version of the package may change the traced code."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[2]
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _without_memory_binding() -> AbstractContextManager[None]:
    """Keep vLLM from binding memory inside the `with` block, if the host has a single NUMA node.

    There the binding changes nothing, but vLLM's C++ code warns about it, which Python's logging cannot silence.
    """
    if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) > 1:
        return nullcontext()
    getattr(torch.ops._C, BIND_MEMORY)  # torch adds an operation to the namespace at its first use
    return substituted(torch.ops._C, BIND_MEMORY, lambda nodes: None)
