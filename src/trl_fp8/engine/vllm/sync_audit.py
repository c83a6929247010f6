"""`SyncAuditCallback`: compares the policy with the engine after each weight sync, also of TRL's own trainers.

TRL hands each tensor to vLLM's loader and trusts that it arrives. The audit rounds or quantizes the policy once more,
cuts each tensor as the engine fuses and shards it, and compares values with the tensor that the engine computes with.

    when      after `sync_weights`; before a generation at a step that no sync preceded
    adapters  TRL merges them for a sync and subtracts them afterwards, which rounds the policy. A merged weight may
              therefore differ from the engine's by these two roundings, and by no more

Tensors are compared one at a time, so that the audit needs memory for two copies of the largest one.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch import Tensor
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


class SyncAuditCallback(TrainerCallback):
    """Compares every tensor of a colocated engine with the policy after each sync, and names those that differ.

        trainer = GRPOTrainer(model, reward, args, dataset)
        trainer.add_callback(SyncAuditCallback(trainer))

    It works from its construction on; as a callback it says at the end of training what it has seen.

    Args:
        trainer: A trainer of TRL's, or of this package, with `use_vllm=True, vllm_mode="colocate"`.
        on_difference: "raise": a `RuntimeError` on every rank, before anything is sampled. "warn": a warning.

    Attributes: audits and failures: the number of comparisons, and of those that found a difference.
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
        has_own_engine = isinstance(self._generation, FP8VLLMGeneration)
        if has_own_engine and type(self._generation.weights) is not PolicyWeights:
            raise ValueError(
                "SyncAuditCallback with fp8_base=True: the policy computes with the engine's own base weights, so "
                "there is no second copy to compare. Leave the callback out; each sync audits the adapters already."
            )
        if has_own_engine:
            self._recipe = self._generation.recipe
        else:
            size = self._generation.tensor_parallel_size
            flags = {"fp8_weights": False, "kv_cache_dtype": "auto", "tensor_parallel_size": size}
            self._recipe = recipe_for_model(self._generation.model, **flags)
        self._layout: Layout | None = None
        self._audited_step: int | None = None
        self._digests: dict[str, Tensor] = {}  # of the policy's tensors at the last audit
        self.audits = 0
        self.failures = 0
        for name, method in (("sync_weights", self._sync), ("generate", self._generate)):
            setattr(self._generation, name, partial(method, getattr(self._generation, name)))

    def on_train_end(self, args, state, control, **kwargs) -> None:
        found = f"{self.failures} found tensors that differ" if self.failures else "none found a difference"
        logger.info(f"weight syncs: {self.audits} audits of {len(self._digests)} tensors; {found}.")

    def _sync(self, sync_weights: Callable[[], None]) -> None:
        sync_weights()
        self.audit()

    def _generate(self, generate: Callable[..., tuple], *args: Any, **kwargs: Any) -> tuple:
        # An engine that sleeps has no weights to compare; TRL syncs when it wakes it
        asleep = self._generation.enable_sleep_mode and self._generation._llm_weights_sleeping
        if not asleep and self._audited_step != self._trainer.state.global_step:
            self.audit()
        return generate(*args, **kwargs)

    @torch.no_grad()
    def audit(self) -> list[str]:
        """Compare now. Return a line for each tensor that differs, with its name first. Collective.

        Raises:
            RuntimeError: Tensors differ, on this rank or another one, unless `on_difference` is "warn".
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
        model, recipe = self._generation.model, self._recipe
        if self._layout is None:
            buffers = {recipe.engine_name(name) for name, _ in persistent_buffers(model)}
            self._layout = engine_layout(upstream.engine_model(self._generation.llm), recipe.linears, buffers)
        pieces = self._layout.pieces
        digests: dict[str, Tensor] = {}
        found: list[str] = []

        # 1. What the policy has
        for name, tensor, base in self._policy_tensors():
            if name not in pieces:
                tied = " (it is tied to the embeddings there)" if name.endswith("lm_head.weight") else ""
                found.append(f"{name} is not in the engine{tied}")
                continue
            piece = pieces[name]
            in_engine = piece.of_engine()
            part = piece.of_sent(tensor).to(in_engine.device).reshape(in_engine.shape)
            slack = None
            if base is not None:
                rounding = 2 * torch.finfo(base.dtype).eps
                whole = rounding * (base.float().abs() + tensor.float().abs())
                slack = piece.of_sent(whole).to(in_engine.device).reshape(in_engine.shape)
            digests[name] = digest(part.to(in_engine.dtype))
            if difference := _difference(part, in_engine, slack):
                stale = name in self._digests and bool(digest(in_engine) == self._digests[name])
                found.append(f"{name} {difference}{', and is what the sync before sent' if stale else ''}")

        # 2. What only the engine has, and what it computes from its weights
        for name, piece in pieces.items():
            if piece.derived is not None:
                if difference := _difference(piece.derived(), piece.of_engine()):
                    found.append(f"{name}, which vLLM derives from other weights, {difference}")
            elif name not in digests and not self._is_tied(piece):
                found.append(f"{name} is not in the policy")
        self._digests = digests
        return found

    def _is_tied(self, piece: Piece) -> bool:
        """Return whether the policy has a tensor under another name, as an output head tied to the embeddings has."""
        head = self._generation.model.get_output_embeddings()
        embeddings = self._generation.model.get_input_embeddings()
        if not piece.name.endswith("lm_head.weight") or head is None or head.weight is not embeddings.weight:
            return False
        in_engine = piece.of_engine()
        return _difference(piece.of_sent(head.weight.detach()).to(in_engine.device), in_engine) is None

    def _policy_tensors(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yield the engine's name of each tensor, the tensor as a sync sends it, and, where adapters are merged into
        it, the base weight. A tensor lasts until the next one is asked for. Collective.
        """
        recipe = self._recipe
        bases: dict[str, Tensor] = {}
        for weights in by_scale(self._merged(bases), recipe, recipe.fp8_tensors, copy=True):
            if recipe.fp8_tensors.issuperset(weights):
                rounded = [weight.to(torch.bfloat16) for weight in weights.values()]
                for name, codes in zip(
                    weights, quantize_fused(rounded, recipe.format, recipe.scale_format), strict=True
                ):
                    yield recipe.engine_name(name), codes.qdata, None
                    yield recipe.scale_name(name), stored_scale(codes, recipe.format), None
            else:
                for name, weight in weights.items():
                    yield recipe.engine_name(name), weight, bases.pop(name, None)
            bases.clear()
        for name, buffer in persistent_buffers(self._generation.model):
            yield recipe.engine_name(name), buffer.detach(), None

    def _merged(self, bases: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield `(checkpoint name, whole tensor)` of the policy with adapters merged. Put into `bases` what a weight
        was without them.
        """
        model, dist = self._generation.model, self._generation._dist
        adapted = is_peft_model(model)
        reshard(model, dist)
        with dist.gather_params(list(model.parameters()) if adapted else []):
            adapters = adapters_of_parameters(model) if adapted else {}
            for name, parameter in model.named_parameters():
                if of_adapter(name, model):
                    continue
                layers = adapters.get(id(parameter), ())
                if layers:
                    bases[checkpoint_name(name)] = parameter.detach().clone()
                with dist.gather_params([] if adapted else [parameter]), merged(layers):
                    tensor = parameter.detach()
                    if isinstance(tensor, DTensor):
                        tensor = tensor.to(self._generation.accelerator.device).full_tensor()
                    yield checkpoint_name(name), tensor


def _difference(expected: Tensor, in_engine: Tensor, slack: Tensor | None = None) -> str | None:
    """Return how many elements of `in_engine` are not `expected`, rounded to its dtype; None if all are equal.

    `slack`, of the same shape: how far `expected` may be from the number that was rounded. Rounding keeps the order
    of numbers, so that the result then lies between those of `expected - slack` and `expected + slack`.
    """
    if slack is None:
        rounded = expected.to(in_engine.dtype)
        one_byte = in_engine.dtype.itemsize == 1
        wrong = rounded.view(torch.uint8) != in_engine.view(torch.uint8) if one_byte else rounded != in_engine
    else:
        low, high = ((expected.float() + sign * slack).to(in_engine.dtype) for sign in (-1, 1))
        wrong = ~((low <= in_engine) & (in_engine <= high))  # NaN is wrong, too
    count = int(wrong.sum())
    if not count:
        return None
    most = (expected.to(in_engine.dtype).float() - in_engine.float()).abs().max().item()
    return f"differs in {count} of {in_engine.numel()} elements, by up to {most:.2g}"
