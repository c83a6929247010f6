"""A look at the policy's attention on the first prompts of the dataset, before there is an engine."""

from collections.abc import Callable
from itertools import islice

import torch
from trl import GRPOTrainer
from trl.distributed import DistributedBackend

from .calibration import layers_with_outliers
from .tap import AttentionTap


PROMPTS = 16


def outliers_on_first_prompts(
    trainer: GRPOTrainer, tap: AttentionTap, reduce_max: Callable[[torch.Tensor], None] | None
) -> dict[int, float]:
    """Layers whose k has outliers: number -> expected error of the attention logits. Of every rank or of none.

    Raises:
        ValueError: None of the rows has a prompt, as with environments that make their own.
    """
    rows = list(islice(trainer.train_dataset, PROMPTS))
    prompts = [row["prompt"] for row in rows if row.get("prompt")]
    if not prompts:
        raise ValueError(
            f"kv_cache_skip_layers='auto' looks at the first {PROMPTS} rows of train_dataset, and none of them has a "
            "prompt. Name the layers instead, or set kv_cache_skip_layers=None."
        )
    # TRL 1.16 sets this for each batch; its tokenization picks the tools of a row's environment by it
    trainer._batch_environments = [row.get("environment") for row in rows if row.get("prompt")]
    tokens = trainer._tokenize_prompts(prompts)[0]
    with DistributedBackend(trainer.accelerator).gather_params(list(trainer.model.parameters())):
        return layers_with_outliers(trainer.model, tap, tokens, reduce_max, fused_lm_head=True)
