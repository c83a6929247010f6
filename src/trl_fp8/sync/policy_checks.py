"""Checks of a policy before an engine gets it. vLLM must be able to serve the model at the policy's path, with the
same tied embeddings and the same tensors. All values must be finite.
"""

from collections.abc import Callable

import torch
from accelerate.utils import is_peft_model
from torch import nn

from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.quantization.codec.weights import scale_dtype
from trl_fp8.recipe import servable
from trl_fp8.recipe.from_model import outline_of, persistent_buffers
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.names import checkpoint_name
from trl_fp8.recipe.recipe import FP8Recipe

from .pieces import Layout, Piece
from .shards import local_part


def require_servable(model: nn.Module, resolve: servable.Resolve) -> None:
    """Raise `ValueError` for a policy that no engine can serve, before one is started.

    For `resolve` see recipe/servable.py.
    """
    peft_configs = model.peft_config.values() if is_peft_model(model) else ()
    for config in peft_configs:
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise ValueError(
                f"peft_config={type(config).__name__}(...), which is peft_type={config.peft_type.value!r}: it trains "
                "vectors that attention reads beside the tokens. They are not weights, so a sync cannot send them, "
                "and the engine would sample without them. Use LoraConfig, or "
                f"train without FP8 and vLLM: {servable.WITHOUT_ENGINE_WORDS} (TRL alone)."
            )
    servable.require_servable(outline_of(model), resolve)
    if not model.name_or_path:
        raise ValueError(
            "the model has no name_or_path, so vLLM cannot find its config and tokenizer. Pass a model id or "
            "folder, or load the model with from_pretrained; a model made in memory needs save_pretrained first."
        )
    # vLLM builds its model from the stored config, at the policy's commit (`Platform.arguments`)
    commit = getattr(model.config, "_commit_hash", None)
    stored = type(model.config).from_pretrained(model.name_or_path, revision=commit)
    tokens, tokens_stored = (config.get_text_config().vocab_size for config in (model.config, stored))
    if tokens != tokens_stored:
        raise ValueError(
            f"the model has {tokens} tokens, {model.name_or_path} has {tokens_stored}: its embeddings were resized "
            "after it was loaded, and the engine is made from what is stored. Call save_pretrained of the resized "
            "model and of its tokenizer with a folder, and pass that folder as the model."
        )
    if getattr(model, "is_quantized", False):
        raise ValueError(
            "the model was loaded with a quantization_config of its own (QLoRA, for example): its weights cannot be "
            "quantized again for the engine. Load it in high precision, use LoRA on an FP8 base (fp8_base=True), or "
            f"train without FP8 and vLLM: {servable.WITHOUT_ENGINE_WORDS}."
        )
    head = model.get_output_embeddings()
    if model.config.tie_word_embeddings and head.weight is not model.get_input_embeddings().weight:
        raise ValueError(
            "the model's config says tie_word_embeddings=True, but its input and output embeddings are two tensors, "
            "as with modules_to_save=['embed_tokens'] or ['lm_head'] under PEFT. vLLM ties them, so the engine would "
            "sample from another policy. Use LoraConfig(modules_to_save=['embed_tokens'], ensure_weight_tying=True), "
            "or a base model whose config does not tie them."
        )


def require_same_tensors(model: nn.Module, recipe: FP8Recipe, layout: Layout) -> None:
    """Raise `ValueError` if the engine's tensors have other names than the policy's, or another shape or dtype. The
    message names some of them.
    """
    # Without this check the first sync would fail. Its error could not say whether vLLM holds this model differently
    # or whether a tensor was lost
    sent: dict[str, tuple[torch.Size, torch.dtype | None]] = {}  # name in the engine -> shape, dtype (None: any)
    for name, shape in outline_of(model).parameters.items():
        if name in recipe.fp8_tensors:
            sent[recipe.engine_name(name)] = (shape, E4M3)
            sent[recipe.scale_name(name)] = (recipe.format.scale_shape(shape), scale_dtype(recipe.format))
        else:
            sent[recipe.engine_name(name)] = (shape, None)  # a sync rounds it to the engine's dtype
    only_sent = []  # names
    differences = []  # name and difference of each tensor with another shape or dtype in the engine
    for name, (shape, dtype) in sent.items():
        if name not in layout.pieces:
            only_sent.append(name)
            continue
        difference = _difference(layout.pieces[name], shape, dtype)
        if difference is not None:
            differences.append(f"{name} {difference}")
    only_in_engine = [name for name, piece in layout.pieces.items() if name not in sent and piece.derived is None]
    if only_sent or only_in_engine:
        reason = (
            f"vLLM's class has {len(only_in_engine)} tensors under names that the policy does not have "
            f"({listed(sorted(only_in_engine), 4) or 'none'}), and the policy {len(only_sent)} that the class does "
            f"not have ({listed(sorted(only_sent), 4) or 'none'})"
        )
    elif differences:
        reason = f"the engine holds {len(differences)} tensors in another form ({listed(differences, 4)})"
    else:
        return
    raise ValueError(servable.unservable(recipe.model_type, reason))


def _difference(piece: Piece, shape: torch.Size, dtype: torch.dtype | None) -> str | None:
    """Return how the engine's tensor differs from the sent one in shape or dtype; None if it does not differ.

    Dims of size 1 are not compared. `dtype` None: any.
    """
    target = piece.of_engine()
    try:
        part = piece.of_sent(torch.empty(shape, device="meta")).shape  # this rank's part
    except (RuntimeError, ValueError, IndexError):  # the shape has no such part: compare, and report, the whole
        part = torch.Size(shape)
    if [size for size in target.shape if size != 1] != [size for size in part if size != 1]:
        return f"is {list(target.shape)} where {list(part)} is sent"
    if dtype is not None and dtype != target.dtype:
        return f"is {target.dtype} where {dtype} is sent"
    return None


def require_finite(model: nn.Module, reduce_max: Callable[[torch.Tensor], None] | None = None) -> None:
    """Raise `ValueError` naming parameters and persistent buffers that are not finite once they are rounded to BF16.

    Reads every parameter (under FSDP2 and ZeRO-3 this rank's shard) once and waits for the device once. `reduce_max`
    replaces a tensor by its maximum over ranks. With it all ranks raise or none does; a rank that continued alone
    would hang in the next collective.
    """
    tensors = [*model.named_parameters(), *persistent_buffers(model)]
    named = [(name, local_part(tensor)) for name, tensor in tensors if tensor.is_floating_point()]
    # A tensor with NaN or infinity has an extreme that is not finite; a norm would take 15 times as long on CPU. The
    # extremes are rounded to BF16 as for the engine, because a finite FP32 number may be infinite there
    extremes = [torch.stack(torch.aminmax(t)) if t.numel() else t.new_zeros(2) for _, t in named]
    bad = (~torch.isfinite(torch.stack([pair.bfloat16() for pair in extremes]))).any(1).float()
    if reduce_max is not None:
        reduce_max(bad)
    names = [checkpoint_name(named[index][0]) for index in bad.nonzero().flatten().tolist()]
    if names:
        raise ValueError(not_finite(names, len(named), "Nothing was written."))


def not_finite(names: list[str], total: int, consequence: str) -> str:
    """Return the message for tensors of a policy that hold NaN or infinities."""
    return (
        f"the policy holds NaN or infinite values (as BF16) in {len(names)} of {total} parameters: "
        f"{listed(names, 8)}. {consequence} Look at the last optimizer step (learning_rate, max_grad_norm, loss), and "
        "resume from the last good checkpoint."
    )
