"""Names of vLLM 0.31 that are no interface, and that this project relies on; as in `upstream.trl`.

What can be done by a function stands here, too. vllm is imported where it is used: planning works without.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import nn


if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig


_LAYERS = "vllm.model_executor.layers"
PRIVATE_NAMES = {  # owner -> name -> layers that use it
    "vllm.model_executor.models.registry": {"_LazyRegisteredModel": "upstream"},
    "vllm.model_executor.model_loader.reload.layerwise": {
        "LOADING_LAYERS": "upstream",
        "_place_kernel_tensors": "upstream",
        "get_layerwise_info": "upstream",
    },
    "vllm": {"_custom_ops": "engine"},
    "vllm.model_executor.kernels.linear": {"_POSSIBLE_FP8_BLOCK_KERNELS": "engine", "_POSSIBLE_FP8_KERNELS": "engine"},
    "vllm.model_executor.custom_op.CustomOp": {"_forward_method": "engine"},
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": {"input_batch": "upstream", "query_start_loc": "upstream"},
    f"{_LAYERS}.attention.Attention": {
        f"_{which}_scale{copy}": "engine"
        for which, copies in {"q": ("", "_float"), "k": ("", "_float", "_cpu"), "v": ("", "_float", "_cpu")}.items()
        for copy in copies
    },
    f"{_LAYERS}.fused_moe.experts.cpu_moe.CPUUnquantizedExperts": {"_supports_activation": "engine"},
    f"{_LAYERS}.fused_moe.router.cpu_router": {"_softmax_topk": "engine"},
    f"{_LAYERS}.quantization.fp8.Fp8MoEMethod": {"_init_moe_kernel": "upstream"},
    f"{_LAYERS}.rotary_embedding": {"_ROPE_DICT": "upstream"},
}


def engine_model(llm: "LLM") -> nn.Module:
    """This rank's model inside the engine. vLLM 0.31, in-process executors only (`external_launcher`)."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def engine_config(llm: "LLM") -> "VllmConfig":
    """The engine's configuration, with vLLM's defaults filled in."""
    return llm.llm_engine.vllm_config


def engine_class(architectures: tuple[str, ...]) -> str | None:
    """Name of the class that would hold a model with these architectures in its config; None if there is none.

    vLLM 0.31: the first one that is in `ModelRegistry.models`, plugins included (`model_impl` "vllm" and "auto").
    Nothing is imported but vLLM itself: entries are lazy.
    """
    from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    known = (ModelRegistry.models[name] for name in architectures if name in ModelRegistry.models)
    if (entry := next(known, None)) is None:
        return None
    return entry.class_name if isinstance(entry, _LazyRegisteredModel) else entry.model_cls.__name__


def scheduled_tokens(llm: "LLM") -> Iterator[tuple[str, int, int, int]]:
    """(request, position of its first token, first row, end row) for each request of the forward that is running.

    vLLM 0.31, first model runner (`v1/worker/gpu_model_runner.py`); called from a hook in the model. vLLM appends a
    suffix of its own to the id under which `LLM.generate` returns a request.
    """
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    batch = runner.input_batch
    bounds = runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
    for index, (start, end) in enumerate(pairwise(bounds)):
        yield batch.req_ids[index].rpartition("-")[0], int(batch.num_computed_tokens_cpu[index]), start, end


def reload_weights(llm: "LLM", weights: Iterator) -> None:
    """Load a whole model's checkpoint tensors into the running engine, with vLLM's own post-processing per layer.

    It copies into the existing storage, so that CUDA graphs stay valid. Must be given every tensor: a layer that got
    only some of its shards is finished with uninitialized memory in the rest.
    """
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights, "is_checkpoint_format": True})


def rebuild_expert_kernels(layers: Iterable[nn.Module]) -> None:
    """After a reload: let the kernels of `layers`, FP8 experts of the engine, read the engine's own scales.

    vLLM made them from the layer as it was during the reload, with a second copy of the scales: equal, but not what an
    audit of the parameters reads.
    """
    for layer in layers:
        layer.quant_method._init_moe_kernel(layer)


def abort_reload(llm: "LLM") -> None:
    """After a reload that raised: put each layer's tensors back and forget what was buffered.

    Without it a later reload mixes the shards of both (vLLM 0.31 has no abort). Layers that were finished before the
    failure hold new weights, so the engine must be reloaded whole before it generates.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in engine_model(llm).modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
    layerwise.LOADING_LAYERS.clear()


def forget_rotary_embeddings() -> None:
    """Before another engine starts in this process: let it make its own rotary embeddings.

    vLLM 0.31 keeps them by their shape (`_ROPE_DICT`), with the implementation that the first engine was told to use:
    a later one that is told to round elsewhere (`rounding.py`) would not, and its configuration would not show it.
    """
    from vllm.model_executor.layers import rotary_embedding

    rotary_embedding._ROPE_DICT.clear()
