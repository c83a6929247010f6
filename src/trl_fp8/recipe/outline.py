"""What a model consists of, without the model: names and shapes, enough to decide what is FP8 and to count bytes.

It comes from a model (`model_outline`) or from a config alone (`config_outline`). Whatever works on an outline imports
neither torch nor transformers, which take three and seven seconds on two slow cores.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outline:
    """Names are those of the checkpoint, in the order of the model; adapters are left out.

    Attributes:
        name: Of the checkpoint, or of the class where there is none.
        class_name: Of the model.
        architectures: As in its config, which is what vLLM looks up; the class where the config has none.
        model_type: As in its config, of the language model where there are several.
        layers, kv_heads, head_dim: Of the language model; the last two are 0 where layers differ in them or have none.
        parameters: Name -> shape of every parameter, and of buffers that a checkpoint holds.
        linears: Name -> (out-features N, in-features K) of every linear layer.
        experts: Name -> whether the layout is gate_up_proj [E, 2I, K], down_proj [E, K, I], of every
            module of experts.
    """

    name: str
    class_name: str
    architectures: tuple[str, ...]
    model_type: str
    layers: int
    kv_heads: int
    head_dim: int
    parameters: Mapping[str, tuple[int, ...]] = field(repr=False)
    linears: Mapping[str, tuple[int, int]] = field(repr=False)
    experts: Mapping[str, bool] = field(repr=False)
