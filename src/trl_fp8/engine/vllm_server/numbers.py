"""Fields of a model's config that no tensor shows, such as rope_theta. Trainer and server compare them."""

import json
from typing import Any

from transformers import PretrainedConfig


# Parts of the names of such fields
WORDS = (
    *("eps", "rope", "rotary", "theta", "act", "window", "layer_types", "heads", "scal", "multiplier", "softcap"),
    *("norm_topk", "experts_per_tok"),
)


def numbers_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a text config whose names contain one of `WORDS`, as JSON values.

    0 and False become None, because vLLM writes None for a window of 0.
    """
    fields = json.loads(json.dumps(config.to_dict(), default=str))
    return {name: value or None for name, value in fields.items() if any(word in name for word in WORDS)}
