"""Flags of one forward: whether the trainer computes as the engine does, its gradients, and its memory in a plan.

The backward computes each MLP's act(gate) * up once more, in FP32 (policy/swapped.py): seven tensors
`[tokens, intermediate]` at once, eight where gate and up are one linear. For experts it takes the weights of a layer
in BF16, and makes their gradients in BF16 before they become FP32. A reference keeps its weights a second time, in the
form in which the engine holds the policy's: codes, scales and BF16.
"""

import logging
import os
from collections import defaultdict
from dataclasses import dataclass
from math import prod

from trl_fp8.planning.trainer_memory import BYTES, Setup, engine_adapters
from trl_fp8.quantization.formats import format_named
from trl_fp8.recipe.families import family_of, types_with
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.run.feature import FlagGroup, flag


logger = logging.getLogger(__name__)
KNOWN = {
    "fp8_forward": ("off", "one_forward"),
    "fp8_forward_check": ("error", "warn"),
    "fp8_backward": ("bf16", "fp8"),
    "fp8_gemm_backend": ("fake_quant", "scaled_mm"),
}
# Bytes that the backward has of an MLP at once, per token and element of its width: 7 and 8 FP32 tensors
RECOMPUTED = {"gate_proj": 28, "gate_up_proj": 32}


@dataclass
class ForwardFlags(FlagGroup):
    """Flags that let the trainer compute as the engine does, and decide its gradients."""

    fp8_forward: str = flag(
        "off",
        "Whether the trainer's forward is its own ('off') or the engine's ('one_forward'): each module of the policy "
        "calls the engine's kernel on the engine's tensors, KV cache included, so that trainer and rollouts do not "
        "differ. On CPU they do not, at any depth that was measured; on a GPU nothing has been measured "
        "(docs/how_it_works.md). Master weights and checkpoints stay as they are.",
    )
    fp8_forward_check: str = flag(
        "error",
        "What happens with fp8_forward='one_forward' if the engine computes another model than the policy, or if the "
        "mismatch of the first rollouts is not what the platform guarantees: 'error', or 'warn' to go on. Both name "
        "the modules that differ.",
    )
    fp8_backward: str = flag(
        "bf16",
        "Backward of the FP8 linear layers: 'bf16' (straight through: gradients of the unquantized layer) or 'fp8' "
        "(both GEMMs with quantized operands, as in Jet-RL). Only with fp8_forward='one_forward'.",
    )
    fp8_gemm_backend: str = flag(
        "fake_quant",
        "How the FP8 GEMMs of fp8_backward='fp8' are computed: 'fake_quant' (dequantized operands, any device) or "
        "'scaled_mm' (cuBLASLt block scaling, Hopper).",
    )

    explain_mismatch_steps: int = flag(
        50,
        "Steps between two explanations of the mismatch, the first one on the first rollouts; 0: none. The policy "
        "scores the rollouts by itself and with the engine's kernels, without gradients, which splits the mismatch "
        "into `mismatch/scoring_k3` (dropout, for example), `mismatch/explained_k3` (the FP8 formats) and "
        "`mismatch/unexplained_k3` (a fault). On CPU; on a GPU with fp8_forward='one_forward', which needs no pass.",
    )

    @property
    def one_forward(self) -> bool:
        """Return whether the trainer's forward is the engine's."""
        return self.fp8_forward != "off"

    @property
    def policy_calls_engine(self) -> bool:
        return self.one_forward

    def in_process(self) -> str | None:
        return f"fp8_forward={self.fp8_forward!r}" if self.one_forward else None

    def in_one_piece(self) -> bool:
        return self.one_forward

    def memory_changes(self, setup: Setup, outline: Outline, recipe: FP8Recipe) -> dict[str, float]:
        if not self.one_forward:
            return {}
        reference = reference_bytes(outline, setup, recipe) if self.beta else 0
        return {"reference": reference, "uncounted": recomputed_bytes(outline, setup)}

    def check_model(self, outline: Outline) -> None:
        if self.one_forward:
            require_followed(outline)

    def resolve(self) -> None:
        """Raise `ValueError` for settings that contradict each other. Runs before TRL's own checks."""
        if self.fp8_forward == "full":
            self.fp8_forward = "one_forward"
            # accelerate's logger, which knows the ranks, can be used only after TRL's own checks
            if os.environ.get("RANK", "0") == "0":
                logger.warning("fp8_forward='full' is now called 'one_forward', which is used.")
        for name, known in KNOWN.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}={value!r} is not known. Use one of {list(known)}.")
        if self.explain_mismatch_steps < 0:
            raise ValueError(
                f"explain_mismatch_steps={self.explain_mismatch_steps!r} is no number of steps. Use 0 for no "
                "explanation, or the steps between two of them."
            )
        if not self.one_forward:
            for name in ("fp8_backward", "fp8_forward_check", "fp8_gemm_backend"):
                value = getattr(self, name)
                if value != KNOWN[name][0]:
                    raise ValueError(
                        f"{name}={value!r} with fp8_forward='off' has no effect. Set fp8_forward='one_forward', or "
                        f"remove {name}."
                    )
            return
        if not self.fp8_weights:
            raise ValueError(
                f"fp8_forward={self.fp8_forward!r} with fp8_weights=False: the engine computes in BF16, so a trainer "
                "in FP8 would add mismatch. Set fp8_weights=True or fp8_forward='off'."
            )
        if self.vllm_tensor_parallel_size > 1:
            raise ValueError(
                f"vllm_tensor_parallel_size={self.vllm_tensor_parallel_size} with fp8_forward={self.fp8_forward!r}: "
                "the trainer computes with the engine's own tensors, and each rank of this engine holds only a part. "
                "Set vllm_tensor_parallel_size=1, or fp8_forward='off'."
            )
        if self.fp16:
            raise ValueError(
                f"fp8_forward={self.fp8_forward!r} with fp16=True: the engine's activations are BF16. Set bf16=True, "
                "or fp8_forward='off' (FP16 training with FP8 rollouts works)."
            )
        if getattr(self, "simulate_kv_cache", None) is False:
            raise ValueError(
                f"simulate_kv_cache=False with fp8_forward={self.fp8_forward!r}: the trainer runs the engine's "
                "forward, which reads k and v from its KV cache. Remove simulate_kv_cache, or set fp8_forward='off'."
            )
        # These replace parts of the policy's forward, too. transformers takes a compile backend or mode alone as
        # torch_compile=True. A compiler builds the kernels of the loss's forward anew, and the comparison with the
        # engine does not see it: rollouts are scored uncompiled
        for name in replaced_forward(self):
            raise ValueError(
                f"{name}=True with fp8_forward={self.fp8_forward!r}: both replace the policy's forward. Remove "
                f"{name}, or set fp8_forward='off'."
            )
        if self.fp8_gemm_backend == "fake_quant":
            return
        if self.fp8_backward != "fp8":
            raise ValueError(
                f"fp8_gemm_backend={self.fp8_gemm_backend!r} with fp8_backward={self.fp8_backward!r} has no effect. "
                "Set fp8_backward='fp8', or remove fp8_gemm_backend."
            )
        backends = format_named(self.fp8_weight_format).gemm_backends
        if self.fp8_gemm_backend not in backends:
            raise ValueError(
                f"fp8_gemm_backend={self.fp8_gemm_backend!r} with fp8_weight_format={self.fp8_weight_format!r}: it "
                f"cannot multiply these weights. Use one of {list(backends)}, or fp8_weight_format='blocks'."
            )


def replaced_forward(args: FlagGroup) -> list[str]:
    """Return the flags that are set and replace parts of the policy's forward."""
    flags = {
        "use_liger_kernel": getattr(args, "use_liger_kernel", False),
        "cast_lm_head_to_fp32": getattr(args, "cast_lm_head_to_fp32", False),
        "torch_compile": args.torch_compile or args.torch_compile_backend or args.torch_compile_mode,
    }
    return [name for name, is_set in flags.items() if is_set]


def require_followed(outline: Outline) -> None:
    """Raise `ValueError` for a model of a type whose layers a trainer cannot compute as an engine does."""
    policy = f"fp8_forward='one_forward' with a policy of type {outline.config_type!r}"
    if any(cache.is_latent for cache in outline.caches):
        raise ValueError(
            f"{policy}: its attention is latent (MLA), and an engine expands the latents of prompts by kv_b_proj, but "
            "multiplies by parts of that weight while it decodes: no forward of a trainer has the bits of both. Set "
            "fp8_forward='off'."
        )
    if not family_of(outline.model_type).followed:
        raise ValueError(
            f"{policy}: only the layers of {', '.join(types_with('followed'))} are known to compute the engine's "
            "operations. Set fp8_forward='off'."
        )
    if outline.config_type != outline.model_type:
        raise ValueError(
            f"fp8_forward='one_forward' with a {outline.class_name}: masks and positions of images are not known, "
            "only those of text models. Set fp8_forward='off'."
        )


def recomputed_bytes(outline: Outline, setup: Setup) -> float:
    """Return the bytes that a backward needs for an MLP, or for the experts of a layer if that is more."""
    per_token = 0
    for name, (rows, _) in outline.linears.items():
        kind = name.rpartition(".")[2]
        if kind in RECOMPUTED:
            width = rows // 2 if kind == "gate_up_proj" else rows  # a fused linear has the rows of both
            per_token = max(per_token, RECOMPUTED[kind] * width)
    experts = defaultdict(int)  # module -> elements of its weights
    for name, shape in outline.parameters.items():
        for module in outline.experts:
            if name.startswith(f"{module}."):
                experts[module] += prod(shape)
    copy = 2 if BYTES[setup.dtype] == 4 else 0
    gradients = 0 if setup.lora_rank else 2 + copy * 2  # in BF16, and in the dtype of the weights
    tokens = setup.args.per_device_train_batch_size * setup.tokens
    return max(tokens * per_token, (copy + gradients) * max(experts.values(), default=0))


def reference_bytes(outline: Outline, setup: Setup, recipe: FP8Recipe) -> int:
    """Return the bytes of a reference as an engine holds it: what its kernels read, and the policy trains."""
    if setup.args.base_in_engine:
        return 2 * engine_adapters(outline, setup.lora_rank)
    read = dict(outline.parameters)
    if "lm_head.weight" in read:  # else the head reads the embedding
        del read[next(name for name in read if name.endswith("embed_tokens.weight"))]
    total = 0
    for name, shape in read.items():
        total += recipe.format.weight_bytes(shape) if name in recipe.fp8_tensors else 2 * prod(shape)
    return total
