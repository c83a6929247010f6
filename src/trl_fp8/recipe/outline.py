"""What a model consists of, without the model: names and shapes, enough to decide what is FP8 and to count bytes.

`from_model.py` makes outlines, of models and of checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .caches import LayerCache, kv_layers


@dataclass(frozen=True)
class Outline:
    """Names are those of the checkpoint, in the order of the model; adapters are left out."""

    name: str  # of the checkpoint, or of the class where there is none
    class_name: str
    architectures: tuple[str, ...]  # what vLLM looks up: the config's, or the class where it has none
    config_type: str  # model_type of the config as a whole
    model_type: str  # of the language model, as are layers and heads
    layers: int
    kv_heads: int  # 0 where layers differ in their heads or have none
    head_dim: int  # 0 where kv_heads is
    caches: tuple[LayerCache, ...] = field(repr=False)  # by decoder layer
    parameters: Mapping[str, tuple[int, ...]] = field(repr=False)  # shapes, also of buffers that a checkpoint holds
    linears: Mapping[str, tuple[int, int]] = field(repr=False)  # (out-features N, in-features K)
    experts: Mapping[str, bool] = field(repr=False)  # True: gate_up_proj [E, 2I, K] and down_proj [E, K, I]
    experts_per_token: int = 0  # that a router chooses; 0: dense
    top_k_routers: bool = False  # its routers choose experts by one top-k, whose choice router_replay can replace
    context: int = 0  # tokens of the longest sequence that the config promises; 0: it does not say
    turned_alike: int = 0  # tokens of a sequence beyond which other factors turn its q and k (longrope); 0: any
    is_stretched: bool = False  # rotary angles are scaled for sequences longer than `context`
    activation: str = ""  # inside an MLP; empty: the config does not say
    stored_as: str = ""  # quantization method of the checkpoint itself, e.g. "fp8"; empty: none

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Numbers of the decoder layers that cache keys and values."""
        return kv_layers(self.caches)

    @property
    def decoder(self) -> str:
        """The module that has the decoder layers; of a vision-language model it lies deeper."""
        name = next((name for name in self.parameters if name.endswith(".embed_tokens.weight")), "model.")
        return name.removesuffix("embed_tokens.weight").removesuffix(".")
