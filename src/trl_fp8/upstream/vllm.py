"""Access to private parts of vLLM. Functions import vLLM when they are called, so that planning works without vLLM.

`llm` is a `vllm.LLM` whose worker runs in this process (executor `external_launcher`). Functions that look into the
model runner (`scheduled_tokens`, `sampler`) need vLLM's V1 model runner.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from difflib import get_close_matches
from inspect import signature
from itertools import pairwise

import torch
from torch import Tensor, nn

from .patches import patch


def engine_model(llm) -> nn.Module:
    """Return this rank's model inside the engine."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def engine_config(llm):
    """Return the engine's `VllmConfig`, with vLLM's defaults filled in."""
    return llm.llm_engine.vllm_config


def engine_class(architectures: tuple[str, ...]) -> str | None:
    """Return the name of vLLM's class for a config with these architectures; None if there is none."""
    from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    # With `model_impl` "vllm" or "auto", vLLM takes the first architecture that it knows
    for name in architectures:
        if name in ModelRegistry.models:
            entry = ModelRegistry.models[name]
            if isinstance(entry, _LazyRegisteredModel):  # has the name of its class without importing the class
                return entry.class_name
            return entry.model_cls.__name__
    return None


def import_engine_class(architectures: tuple[str, ...]) -> None:
    """Import the class that `engine_class` names, and register its properties in vLLM.

    vLLM would find the properties by inspecting the class in a subprocess, so that this process does not initialize
    CUDA. A trainer may initialize CUDA, and the subprocess would take ten seconds to import torch and vLLM again.

    Raises `ValueError` if the class needs a package that is not installed: vision-language models and Qwen3.5 need
    torchvision.
    """
    from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel, _RegisteredModel

    known = [name for name in architectures if name in ModelRegistry.models]
    if not known:
        return
    name = known[0]
    entry = ModelRegistry.models[name]
    if isinstance(entry, _LazyRegisteredModel):
        try:
            ModelRegistry.models[name] = _RegisteredModel.from_model_cls(entry.load_model_cls())
        except ImportError as error:
            raise ValueError(
                f"vLLM's class for {name} cannot be imported: {error}. Install what it needs, for this version of "
                "torch (torchvision: from the index that torch came from)."
            ) from error


def can_sleep() -> bool:
    """Return whether engines on this platform have a sleep mode."""
    from vllm.platforms import current_platform

    return current_platform.is_sleep_mode_available() and current_platform.is_cumem_allocator_available()


def scheduled_tokens(llm) -> Iterator[tuple[str, int, int, int]]:
    """Yield (request id, tokens already computed, start, end) of each request in the running forward.

    The request's tokens are the rows [start, end) of this forward.
    """
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    batch = runner.input_batch
    bounds = runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
    for index, (start, end) in enumerate(pairwise(bounds)):
        request_id, _, _ = batch.req_ids[index].rpartition("-")  # vLLM appends "-" and a random suffix to the id
        computed = int(batch.num_computed_tokens_cpu[index])
        yield request_id, computed, start, end


def sampler(llm) -> nn.Module:
    """Return the module that samples: (logits, generators, k, p) -> tokens `[R]`, log-probs `[R, V]`.

    R is the number of requests in `scheduled_tokens`. If vLLM's `logprobs_mode` is `processed_logprobs`, the log-probs
    are of the distribution from which the module samples.
    """
    return llm.llm_engine.model_executor.driver_worker.model_runner.sampler.topk_topp_sampler


def finish(llm) -> None:
    """Run the engine until its scheduler has no requests. While it has requests, vLLM does not free the KV cache.

    `generate` returns with the last token. The scheduler removes finished requests only in its next step, and with
    asynchronous scheduling one more batch is still running.
    """
    core = llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests() or core.batch_queue:
        llm.llm_engine.step()


def choose_experts(moe_runner, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate weights `[T, K]` and the experts `[T, K]` that a router chooses by logits `[T, E]`.

    `moe_runner` is the layer's `MoERunner`. The choice is not recorded as a route: the router's hook is not called.
    """
    indices_type = moe_runner.routed_experts.quant_method.topk_indices_dtype
    return moe_runner.router._compute_routing(x, logits, indices_type)


def forget_choices() -> None:
    """Clear vLLM's caches of settings, rotary embeddings, attention backends and tile sizes for experts.

    Call this before another engine starts. Otherwise that engine would silently get choices made for an earlier one.
    """
    from vllm.envs import disable_envs_cache
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.layers.fused_moe.fused_moe import get_moe_configs
    from vllm.v1.attention import selector

    disable_envs_cache()
    get_moe_configs.cache_clear()
    rotary_embedding._ROPE_DICT.clear()
    selector._cached_get_attn_backend.cache_clear()


def make_group_of_experts() -> None:
    """Add vLLM's process group for experts if an engine without experts was the first in this process. Collective.

    vLLM creates its process groups once in a process, with the first engine. If the first model has no experts, vLLM
    leaves out the group for experts.
    """
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return  # vLLM will create the group for experts with its other groups
    if parallel_state._EP is not None:
        return
    world = parallel_state.get_world_group()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    # vLLM's group for experts has all ranks of an engine. TRL's engines have only tensor parallelism
    groups = [list(range(first, first + ranks)) for first in range(0, world.world_size, ranks)]
    backend = torch.distributed.get_backend(world.device_group)
    group = parallel_state.init_model_parallel_group(groups, world.local_rank, backend, group_name="ep")
    patch(parallel_state, "_EP", group)


def require_engine_arguments(names: Iterable[str]) -> None:
    """Raise `ValueError` if `vllm.LLM` does not take one of these names of `vllm_engine_kwargs`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.llm import LLM

    known = {*signature(LLM).parameters, *(field.name for field in fields(EngineArgs))}
    unknown = [name for name in names if name not in known]
    if unknown:
        named = []
        for name in unknown:
            similar = get_close_matches(name, sorted(known), n=1)
            named.append(f"{name} (did you mean {similar[0]}?)" if similar else name)
        raise ValueError(
            f"vllm_engine_kwargs sets {', '.join(named)}, but vllm.LLM takes no such argument. Correct or remove it."
        )
