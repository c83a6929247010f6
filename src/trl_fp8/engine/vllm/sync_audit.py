"""`SyncAuditCallback`: compares the policy with the engine after each weight sync. Works with TRL's own trainers, too.

TRL hands each tensor to vLLM's loader and does not check that the tensor arrives. The audit rounds or quantizes each
tensor of the policy once more, cuts it as the engine fuses and shards it, and compares the result with the tensor that
the engine computes with (`_differences`).

    when      after each `sync_weights`, and before a generation if there was no audit in this step yet
    adapters  TRL merges adapters into the policy for a sync, and subtracts them afterwards. The subtraction rounds the
              weight, and merging again for the audit rounds the weight once more. So a merged weight may differ from
              the engine's by these two roundings (`MERGE_TOLERANCE`). This package's own sync restores weights exactly

Tensors are compared one at a time, so without adapters the audit needs memory for two copies of the largest tensor. A
merged weight takes some more, two of them in FP32.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from trl_fp8.quantization.codec.digest import digest
from trl_fp8.quantization.codec.weights import quantize_fused, stored_scale
from trl_fp8.recipe.from_model import of_adapter, persistent_buffers
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.names import checkpoint_name
from trl_fp8.recipe.recipe import recipe_for_model
from trl_fp8.sync.audit import all_reduce_max
from trl_fp8.sync.pieces import Layout, Piece
from trl_fp8.sync.weight_stream import by_scale
from trl_fp8.upstream import vllm as upstream

from .generation import FP8VLLMGeneration
from .layout import engine_layout
from .policy_weights import PolicyWeights, adapters_of_parameters, merged, reshard


logger = get_logger(__name__)

ON_DIFFERENCE = "raise", "warn"
# Allowed difference of a merged weight: this many eps of (|base| + |merged|). Unmerging rounds the base and merging
# rounds the result, each by at most eps / 2. So 2 is four times the largest rounding error
MERGE_TOLERANCE = 2


class SyncAuditCallback(TrainerCallback):
    """Callback that compares a colocated engine with the policy after each sync, and names the tensors that differ.

        trainer = GRPOTrainer(model, reward, args, dataset)
        trainer.add_callback(SyncAuditCallback(trainer))

    It wraps the trainer's `sync_weights` and `generate` when constructed; `on_train_end` only logs a summary.

    Args:
        trainer: A trainer of TRL or of this package, with `use_vllm=True, vllm_mode="colocate"`.
        on_difference: What to do if tensors differ. "raise": raise a `RuntimeError` on every rank, before anything is
            sampled. "warn": log a warning.

    Attributes:
        audits: The number of audits.
        failures: The number of audits that found a difference.
    """

    def __init__(self, trainer: Any, on_difference: Literal["raise", "warn"] = "raise"):
        if on_difference not in ON_DIFFERENCE:
            raise ValueError(f"on_difference={on_difference!r}: give one of {', '.join(ON_DIFFERENCE)}.")
        if not trainer.args.use_vllm or trainer.args.vllm_mode != "colocate":
            raise ValueError(
                f"SyncAuditCallback with use_vllm={trainer.args.use_vllm}, vllm_mode={trainer.args.vllm_mode!r}: it "
                "reads the tensors of an engine in this process. Set use_vllm=True and vllm_mode='colocate', or leave "
                "the callback out."
            )
        self._trainer = trainer
        self._generation = trainer.vllm_generation
        self._raises = on_difference == "raise"
        has_fp8_engine = isinstance(self._generation, FP8VLLMGeneration)
        if has_fp8_engine and type(self._generation.weights) is not PolicyWeights:
            raise ValueError(
                "SyncAuditCallback with fp8_base=True: the policy computes with the engine's own base weights, so "
                "there is no second copy to compare. Leave the callback out; each sync audits the adapters already."
            )
        if has_fp8_engine:
            self._recipe = self._generation.recipe
        else:
            self._recipe = recipe_for_model(
                self._generation.model,
                fp8_weights=False,
                kv_cache_dtype="auto",
                tensor_parallel_size=self._generation.tensor_parallel_size,
            )
        self._layout: Layout | None = None
        self._audited_step: int | None = None
        self._digests: dict[str, Tensor] = {}  # engine name -> checksum of the policy's tensor at the last audit
        self.audits = 0
        self.failures = 0
        for name, audited in (("sync_weights", self._sync), ("generate", self._generate)):
            original = getattr(self._generation, name)
            setattr(self._generation, name, partial(audited, original))

    def on_train_end(self, args, state, control, **kwargs) -> None:
        found = f"{self.failures} found tensors that differ" if self.failures else "none found a difference"
        logger.info(f"weight syncs: {self.audits} audits of {len(self._digests)} tensors; {found}.")

    def _sync(self, sync_weights: Callable[[], None]) -> None:
        sync_weights()
        self.audit()

    def _generate(self, generate: Callable[..., tuple], *args: Any, **kwargs: Any) -> tuple:
        # A sleeping engine has no weights to compare. TRL syncs when it wakes the engine, and `_sync` audits that sync
        asleep = self._generation.enable_sleep_mode and self._generation._llm_weights_sleeping
        if not asleep and self._audited_step != self._trainer.state.global_step:
            self.audit()
        return generate(*args, **kwargs)

    @torch.no_grad()
    def audit(self) -> list[str]:
        """Compare all tensors now. Return one line for each tensor that differs; it begins with the name. Collective.

        Raises:
            RuntimeError: Tensors differ on any rank, and `on_difference` is "raise".
        """
        self._audited_step = self._trainer.state.global_step
        differences = self._differences()
        self.audits += 1
        failed = torch.tensor(len(differences), device=self._generation.accelerator.device)
        if self._generation.accelerator.num_processes > 1:
            all_reduce_max(failed)
        if not failed.item():
            return []
        self.failures += 1
        reason = f"{len(differences)} tensors of the engine are not the policy's: {listed(differences, 12, '; ')}"
        if not differences:
            reason = "tensors of another rank's engine are not the policy's; its log names them"
        text = (
            f"step {self._audited_step}: {reason}. The engine samples from another policy than the one that is "
            "trained. Look at what wraps or replaces sync_weights, at modules that were replaced or untied after the "
            "trainer was made, and at adapters that are not merged. To go on regardless: on_difference='warn'."
        )
        if self._raises:
            raise RuntimeError(text)
        logger.warning(text, main_process_only=False)
        return differences

    def _differences(self) -> list[str]:
        """Return one line for each tensor of this rank's engine that differs. Collective."""
        model = self._generation.model
        recipe = self._recipe
        if self._layout is None:
            buffers = {recipe.engine_name(name) for name, _ in persistent_buffers(model)}
            self._layout = engine_layout(upstream.engine_model(self._generation.llm), recipe.linears, buffers)
        pieces = self._layout.pieces
        digests: dict[str, Tensor] = {}
        lines: list[str] = []

        # 1. Tensors of the policy
        for name, tensor, base in self._policy_tensors():
            if name not in pieces:
                tied = " (it is tied to the embeddings there)" if name.endswith("lm_head.weight") else ""
                lines.append(f"{name} is not in the engine{tied}")
                continue
            piece = pieces[name]
            in_engine = piece.of_engine()
            expected = piece.of_sent(tensor).to(in_engine.device).reshape(in_engine.shape)
            digests[name] = digest(expected.to(in_engine.dtype))
            tolerance = None
            if base is not None:
                rounding = MERGE_TOLERANCE * torch.finfo(base.dtype).eps
                full_tolerance = rounding * (base.float().abs() + tensor.float().abs())
                tolerance = piece.of_sent(full_tolerance).to(in_engine.device).reshape(in_engine.shape)
            difference = _difference(expected, in_engine, tolerance)
            if difference is None:
                continue
            line = f"{name} {difference}"
            # If the engine still has the tensor of the last audit, this sync did not write the tensor
            if name in self._digests and bool(digest(in_engine) == self._digests[name]):
                line += ", and still has the values of the sync before"
            lines.append(line)

        # 2. Tensors that the engine derives from its weights, and tensors that the policy does not have
        for name, piece in pieces.items():
            if piece.derived is not None:
                difference = _difference(piece.derived(), piece.of_engine())
                if difference is not None:
                    lines.append(f"{name}, which vLLM derives from other weights, {difference}")
            elif name not in digests and not self._is_tied(piece):
                lines.append(f"{name} is not in the policy")
        self._digests = digests
        return lines

    def _is_tied(self, piece: Piece) -> bool:
        """Return whether `piece` is an output head that has the values of the embeddings, to which the policy ties the
        head. Collective.
        """
        head = self._generation.model.get_output_embeddings()
        embeddings = self._generation.model.get_input_embeddings()
        if not piece.name.endswith("lm_head.weight") or head is None or head.weight is not embeddings.weight:
            return False
        in_engine = piece.of_engine()
        with self._generation._dist.gather_params([head.weight]):
            expected = piece.of_sent(self._whole(head.weight)).to(in_engine.device)
            return _difference(expected, in_engine) is None

    def _policy_tensors(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yield `(engine name, tensor as a sync sends it, base weight)` for each tensor of the policy. Collective.

        The base weight is the weight without adapters; None if no adapter is merged into this tensor. A tensor is
        valid only until the next one is requested.
        """
        recipe = self._recipe
        # `by_scale` pulls weights from `_merged`, which puts their bases here. `by_scale` yields a weight that is not
        # FP8 before it pulls the next weight, so the base of the yielded weight is still here
        bases: dict[str, Tensor] = {}
        for weights in by_scale(self._merged(bases), recipe, recipe.fp8_tensors, copy=True):
            if recipe.fp8_tensors.issuperset(weights):
                # These tensors need no tolerance, and so no base: only this package's sync sends FP8, and this sync
                # restores base weights bit for bit
                rounded = [weight.to(torch.bfloat16) for weight in weights.values()]
                quantized = quantize_fused(rounded, recipe.format, recipe.scale_format)
                for name, codes in zip(weights, quantized, strict=True):
                    yield recipe.engine_name(name), codes.qdata, None
                    yield recipe.scale_name(name), stored_scale(codes, recipe.format), None
            else:
                for name, weight in weights.items():
                    yield recipe.engine_name(name), weight, bases.pop(name, None)
            bases.clear()
        for name, buffer in persistent_buffers(self._generation.model):
            yield recipe.engine_name(name), buffer.detach(), None

    def _merged(self, bases: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield `(checkpoint name, full tensor)` of the policy, with its adapters merged.

        For each weight that has an adapter, put a copy of the weight without the adapter into `bases`.
        """
        model, dist = self._generation.model, self._generation._dist
        is_adapted = is_peft_model(model)
        reshard(model, dist)
        # Gather all parameters of a PEFT model at once, because merging needs the adapters, too. Otherwise gather them
        # one at a time
        with dist.gather_params(list(model.parameters()) if is_adapted else []):
            adapters = adapters_of_parameters(model) if is_adapted else {}
            for name, parameter in model.named_parameters():
                if of_adapter(name, model):
                    continue
                layers = adapters.get(id(parameter), ())
                if layers:
                    bases[checkpoint_name(name)] = self._whole(parameter).clone()
                with dist.gather_params([] if is_adapted else [parameter]), merged(layers):
                    yield checkpoint_name(name), self._whole(parameter)

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole of a parameter, gathered if FSDP2 shards it. Collective."""
        tensor = parameter.detach()
        if isinstance(tensor, DTensor):
            return tensor.to(self._generation.accelerator.device).full_tensor()
        return tensor


def _difference(expected: Tensor, in_engine: Tensor, tolerance: Tensor | None = None) -> str | None:
    """Describe how `in_engine` differs from `expected`, rounded to the engine's dtype. Return None if they are equal.

    With a `tolerance` (same shape) the engine's number passes if it lies between `expected - tolerance` and
    `expected + tolerance`, both rounded to the engine's dtype. Rounding is monotonic.
    """
    dtype = in_engine.dtype
    if tolerance is not None:
        lowest = (expected.float() - tolerance).to(dtype)
        highest = (expected.float() + tolerance).to(dtype)
        wrong = ~((lowest <= in_engine) & (in_engine <= highest))  # negated, so that NaN counts as wrong
    elif dtype.itemsize == 1:  # FP8 codes and exponents are compared byte by byte: NaN equals NaN
        wrong = expected.to(dtype).view(torch.uint8) != in_engine.view(torch.uint8)
    else:
        wrong = expected.to(dtype) != in_engine
    count = int(wrong.sum())
    if not count:
        return None
    largest = (expected.to(dtype).float() - in_engine.float()).abs().max().item()
    return f"differs in {count} of {in_engine.numel()} elements, by up to {largest:.2g}"
