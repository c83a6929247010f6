"""The attention modules of a vLLM engine, by decoder layer."""

from torch import nn
from vllm.model_executor.layers.attention import Attention, MLAAttention


def attention_layers(model: nn.Module) -> dict[int, Attention | MLAAttention]:
    """Number of each decoder layer -> its attention; `RuntimeError` if names do not tell the layer."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, (Attention, MLAAttention)):
            numbers = [int(part) for part in name.split(".") if part.isdigit()]
            if len(numbers) != 1 or numbers[0] in layers:
                raise RuntimeError(f"cannot tell the decoder layer of the engine's attention module {name!r}.")
            layers[numbers[0]] = module
    return dict(sorted(layers.items()))


def quantizes_query(model: nn.Module) -> bool:
    """`EngineNumerics.query_rounded`: FlashAttention 3 and Triton do, MLA's and the CPU references do not."""
    layers = attention_layers(model).values()
    return any(module.query_quant is not None for module in layers if isinstance(module, Attention))
