"""What is asked of a family, and what came of it.

Three steps of GRPO on a tiny policy with a real engine; its first sync, and one after the last step, against fresh
engines that vLLM's own loader fills from disk, bit for bit; the export of `save_fp8_model`, read by vLLM and by
transformers; and the same three steps with a full FP8 forward.
"""

from pathlib import Path
from statistics import pstdev
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from testing import engines, published, vision
from testing.runs import arguments, column, recorded, training
from trl_fp8.features.one_forward.same_model import SameModel
from trl_fp8.features.one_forward.values import Findings
from trl_fp8.planning.plan import plan_for
from trl_fp8.quantization.codec.blockwise import dequantize_weight, quantize_weight
from trl_fp8.quantization.codec.kv_scales import KV_SCALES
from trl_fp8.quantization.formats import BLOCKS
from trl_fp8.recipe.from_model import outline_of, persistent_buffers
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import FP8Recipe, recipe_for

from .families import Family


# What vLLM's class and transformers' compute otherwise of a family, in each layer (docs/troubleshooting.md)
KNOWN = {
    "gemma2": {"soft cap of scores"},
    "vaultgemma": {"soft cap of scores"},
    "glm4_moe_lite": {"eps"},
}
DIFFERENCE = "sampling/sampling_logp_difference/mean"
# Both sides take a log-softmax of the same logits, in FP32 and in other orders
EXACT = 1e-5


def row(family: Family, folder: Path) -> dict[str, Any]:
    """Return a family's row of docs/models.md; raise `AssertionError` if it fails a requirement."""
    logging.set_verbosity_error()  # reports of tensors that are not as the config says fail a comparison here
    model = folder / "policy"
    family.save(model)
    flags, synced = dict(family.flags), []
    task = {"reward_funcs": reward_even} | ({"train": vision.dataset()} if family.images else {})
    with training(str(model), arguments(folder / "run", **flags), **task) as trainer:
        generation = trainer.vllm_generation

        def note(result: None) -> None:
            if not synced:
                engines.write_checkpoint(folder / "first", generation, generation.last_sync.carried.get(KV_SCALES))
                synced.append(engines.log_probs(generation.llm))

        recorded(generation, "sync_weights", note)
        trainer.train()
        mismatch, steps = column(trainer, DIFFERENCE), trainer.state.global_step
        generation.sync_weights()
        synced.append(engines.log_probs(generation.llm))
        trainer.save_fp8_model(folder / "export")
    recipe = generation.recipe
    settings = generation.pinned | (generation.engine_kwargs or {})
    assert steps == 3 and len(mismatch) == 3
    assert synced[0] != synced[1], "three steps left the policy as it was"
    require_known(trainer.model.config.get_text_config().model_type, trainer.feature(SameModel).witness.findings)
    for name, expected in zip(("first", "export"), synced, strict=True):
        assert engines.loaded_log_probs(folder / name, recipe, settings) == expected, (
            f"a fresh engine of {name} differs"
        )
    # of log-probs that differ from token to token: a trainer that computed something else would be off by as much
    spread = pstdev(value for _, _, prompt in synced[1][: len(engines.PROMPTS)] for value in prompt)
    assert max(mismatch) < spread / 3, f"mismatch {mismatch} where log-probs differ by {spread} from token to token"
    if recipe.format is BLOCKS:  # transformers does not read the scales of whole tensors
        require_readable(folder / "export", trainer.model, recipe)
    outline = outline_of(trainer.model)
    return {
        "title": family.title,
        "model_type": outline.config_type,
        "share_of": family.published,
        "fp8_share": fp8_share(family, outline),
        "kv": kv_words(recipe, trainer.model),
        "mismatch": max(mismatch),
        "spread": spread,
        "full": full(model, folder / "full", flags, task),
    }


def reward_even(completion_ids: list[list[int]], **columns) -> list[float]:
    """Return the share of even tokens: whatever a random policy samples, groups have different rewards."""
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


def require_known(model_type: str, findings: Findings) -> None:
    """Require that the engine computes the policy's model, but for differences known of its type."""
    assert findings.compared > 4, "nothing was compared"
    quantities = set(findings.differences.values())
    expected = KNOWN.get(model_type, set())
    assert all(any(quantity.startswith(known) for known in expected) for quantity in quantities), findings.differences
    assert bool(quantities) == bool(expected), f"{model_type} computes alike now: take it out of KNOWN"


def require_readable(folder: Path, model: PreTrainedModel, recipe: FP8Recipe) -> None:
    """Require that transformers reads an export as `model` with its FP8 weights dequantized, tensor by tensor."""
    read = type(model).from_pretrained(folder, dtype=torch.bfloat16)
    found = dict(read.named_parameters()) | dict(persistent_buffers(read))
    sent = dict(model.named_parameters()) | dict(persistent_buffers(model))
    assert found.keys() == sent.keys(), found.keys() ^ sent.keys()
    for name, tensor in sent.items():
        expected = tensor.detach().bfloat16()
        if name in recipe.fp8_tensors:
            expected = dequantize_weight(quantize_weight(expected), torch.bfloat16)
        assert torch.equal(found[name].bfloat16(), expected), f"transformers reads another {name}"


def full(model: Path, folder: Path, flags: dict, task: dict) -> dict[str, Any]:
    """Return the mismatch with a full FP8 forward, or why there is none."""
    try:
        with training(str(model), arguments(folder, fp8_forward="one_forward", **flags), **task) as trainer:
            trainer.train()
            found = column(trainer, DIFFERENCE)
    except ValueError as error:
        assert str(error).startswith("fp8_forward='one_forward'"), error
        return {"refused": str(error)}
    return {"mismatch": max(found), "exact": max(found) < EXACT, "bound": EXACT}


def fp8_share(family: Family, tiny: Outline) -> float:
    """Return the FP8 share of parameters of the published or tiny model, as an engine on a GPU holds them."""
    outline = published.outline(family.published) if family.published else tiny
    return plan_for(outline, recipe_for(outline)).fp8_share


def kv_words(recipe: FP8Recipe, model: PreTrainedModel) -> str:
    """Say which layers have an FP8 KV cache."""
    if not recipe.fp8_kv_cache:
        return "BF16"
    caches = outline_of(model).caches
    own = [layer for layer, cache in enumerate(caches) if cache.elements]
    fp8 = [layer for layer in own if layer not in recipe.kv_cache_skip_layers]
    return "FP8" if len(fp8) == len(caches) else f"FP8 in {len(fp8)} of {len(caches)} layers"
