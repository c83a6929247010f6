"""A recipe as keyword arguments of `vllm.LLM`: a pure function, so that a test can read what the engine is told.

The engine starts from dummy weights with the recipe's `quantization_config` put into the model's config: no FP8
checkpoint has to exist, and TRL syncs the whole policy before the first rollout in any case. Kernels and attention
backend are pinned, because vLLM's automatic choice depends on the batch size (FlashInfer below 32 rows, DeepGEMM
above) and takes kernels whose weights or scales could not be read back.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig

from trl_fp8.recipe.recipe import FP8Recipe

from . import rounding


CPU_BLOCK = 128  # tokens per KV cache block of vLLM's CPU backend
# Compute capability's first number -> linears and attention that keep weights as loaded and read KV scales anew each
# time. On 10 and 12 (Blackwell) vLLM itself takes DeepGEMM and FlashInfer, which do not (docs/gpu_kernels.md)
CUDA_BACKENDS = {9: ("cutlass", "FLASH_ATTN")} | dict.fromkeys((8, 10, 12), ("triton", "TRITON_ATTN"))


@dataclass(frozen=True)
class Device:
    """Where the engine runs: `"cpu"` or `"cuda"`, and there the compute capability, e.g. (9, 0)."""

    type: str
    capability: tuple[int, int] | None = None


def engine_arguments(
    recipe: FP8Recipe,
    config: PretrainedConfig,
    device: Device,
    *,
    max_num_seqs: int,
    max_model_len: int | None,
    return_routes: bool = False,
    match_rounding: bool = False,
    user: dict | None = None,
) -> dict:
    """What to pass to `LLM(...)` over what TRL passes.

    Args:
        recipe: What is FP8.
        config: The policy's config (for the size of a CPU engine's KV cache).
        device: See `Device`.
        max_num_seqs, max_model_len: As TRL sets them; None means the model's own context length.
        return_routes: Whether the experts that routers choose are wanted.
        match_rounding: The trainer reproduces the engine's numerics, so pin vLLM's BF16 rounding points (on CPU they
            always are).
        user: `vllm_engine_kwargs`; they win over the pinned backends, and setting by setting over pinned roundings.

    Raises:
        ValueError: The device cannot run what the recipe asks for; the message says what can.
    """
    arguments = {"load_format": "dummy", "dtype": "bfloat16"}
    if recipe.quantization_config is not None:
        arguments["hf_overrides"] = {"quantization_config": recipe.quantization_config}
        arguments["kv_cache_dtype"] = recipe.kv_cache_dtype
    if recipe.kv_cache_skip_layers:
        arguments["kv_cache_dtype_skip_layers"] = [str(layer) for layer in recipe.kv_cache_skip_layers]
    if device.type == "cpu":
        arguments |= _cpu_arguments(recipe, config.get_text_config(), max_num_seqs, max_model_len)
    else:
        arguments |= _cuda_arguments(recipe, device) | (rounding.CUDA.arguments() if match_rounding else {})
    if return_routes:
        arguments |= _routes_arguments(device, recipe.tensor_parallel_size, user or {})
    return _merged(arguments, user or {})


def _merged(ours: dict, users: dict) -> dict:
    """The user's settings over ours; a dictionary within does not replace ours as a whole."""
    both = {
        name for name in ours.keys() & users.keys() if isinstance(ours[name], dict) and isinstance(users[name], dict)
    }
    return ours | users | {name: _merged(ours[name], users[name]) for name in both}


def _routes_arguments(device: Device, tensor_parallel_size: int, user: dict) -> dict:
    """vLLM 0.31 keeps returned routes with its prefix cache; read from the routers, a cached token has none.

    It schedules a batch ahead by default, and that one is still in flight when a generation ends; a reset of the
    prefix cache, which each sync makes, then fails an assertion of the worker that returns routes
    (`aux_output_connector/worker.py`, `begin_step`). Scheduled one by one, every batch has been consumed by then.
    """
    cached = device.type != "cpu"
    if cached and tensor_parallel_size > 1:
        raise ValueError(
            f"router_replay with vllm_tensor_parallel_size={tensor_parallel_size} on {device.type}: only the first "
            "rank of a vLLM 0.31 engine returns the experts that it chose, and its other ranks fail without them. Set "
            "vllm_tensor_parallel_size=1, or router_replay='off'."
        )
    if cached and user.get("async_scheduling"):
        raise ValueError(
            "vllm_engine_kwargs sets async_scheduling=True with router_replay: vLLM 0.31 cannot reset its prefix "
            "cache after a weight sync while a batch whose routes it returns is in flight. Remove it, or set "
            "router_replay='off'."
        )
    if user.get("enable_prefix_caching", cached) != cached:
        raise ValueError(
            f"vllm_engine_kwargs sets enable_prefix_caching={not cached} with router_replay, which needs {cached} on "
            f"{device.type}. Remove it, or set router_replay='off'."
        )
    returned = {"enable_return_routed_experts": True, "async_scheduling": False}
    return {"enable_prefix_caching": cached} | (returned if cached else {})


def _cuda_arguments(recipe: FP8Recipe, device: Device) -> dict:
    major, minor = device.capability
    if recipe.quantization_config is not None and ((major, minor) < (8, 9) or major not in CUDA_BACKENDS):
        given = f"fp8_weights={recipe.fp8_weights}, kv_cache_dtype={recipe.kv_cache_dtype!r}"
        raise ValueError(
            f"{given} on a GPU of compute capability {major}.{minor}: supported are Ada (8.9), Hopper (9.0) and "
            "Blackwell (10.x, 12.x). Older GPUs have no FP8 units; of others it is not known which of vLLM's FP8 "
            "kernels keep weights and KV scales as they were sent, so that delivery could not be verified. Switch FP8 "
            "off: fp8_weights=False, kv_cache_dtype='auto'."
        )
    linear, attention = CUDA_BACKENDS.get(major, (None, None))
    arguments = {}
    if recipe.fp8_weights:
        arguments["linear_backend"] = recipe.format.linear_backend or linear
    if recipe.fp8_kv_cache:
        arguments["attention_backend"] = attention
    if recipe.has_experts:  # other kernels shuffle experts, which could not be read back
        arguments["moe_backend"] = "triton"
    return arguments


def _cpu_arguments(recipe: FP8Recipe, config: PretrainedConfig, max_num_seqs: int, max_model_len: int | None) -> dict:
    if recipe.fp8_kv_cache and getattr(config, "attn_logit_softcapping", None):
        raise ValueError(
            f"kv_cache_dtype={recipe.kv_cache_dtype!r} with attn_logit_softcapping={config.attn_logit_softcapping} in "
            f"the model's config ({config.model_type}): the CPU engine's reference attention does not cap logits. Set "
            "kv_cache_dtype='auto' on CPU, or run on a GPU."
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    length = max_model_len or config.max_position_embeddings
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * kv_heads * head_dim
    per_token *= 1 if recipe.fp8_kv_cache and not recipe.kv_cache_skip_layers else 2
    blocks = -(-length // CPU_BLOCK) + 1
    # All sequences at full length, but at most 2 GiB beyond the one sequence that vLLM insists on
    budget = max(per_token * CPU_BLOCK * blocks, min(per_token * CPU_BLOCK * blocks * max_num_seqs, 2 * 2**30))
    return {"enforce_eager": True, "kv_cache_memory_bytes": budget} | rounding.CPU.arguments()
