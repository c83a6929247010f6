"""What a model consists of, without the model: names and shapes, enough to decide what is FP8 and to count bytes.

It comes from a model (`from_model.py`) or from a config alone (`from_config.py`). Whatever works on an outline imports
neither torch nor transformers, which take three and seven seconds on two slow cores.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outline:
    """Names are those of the checkpoint, in the order of the model; adapters are left out.

    Attributes:
        name: Name of the checkpoint, or of the class where there is none.
        class_name: Class of the model.
        architectures: What vLLM looks up: the config's architectures, or the class where it has none.
        model_type: Model type of the language model.
        layers, kv_heads, head_dim: Sizes of the language model; heads are 0 where layers differ in them or have none.
        parameters: Name -> shape of every parameter, and of buffers that a checkpoint holds.
        linears: Name -> (out-features N, in-features K) of every linear layer.
        experts: Name -> True if they are gate_up_proj [E, 2I, K] and down_proj [E, K, I], of every module of experts.
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
