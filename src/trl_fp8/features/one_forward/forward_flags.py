"""Flags of one forward (the trainer computes with the engine's kernels), and the memory that it adds to a plan.

The backward computes act(gate) * up of each MLP once more, in FP32 (policy/swapped.py). Then seven tensors
`[tokens, intermediate]` are alive at once, or eight if gate and up are one linear layer. For experts in FP32, the
backward needs a BF16 copy of one layer's weights, and their gradients in BF16 and then FP32. With beta > 0 the
reference's weights are stored a second time, as the engine stores the policy's: FP8 codes with scales, or BF16.
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
KNOWN = {  # values of each flag, the default first
    "fp8_forward": ("off", "one_forward"),
    "fp8_forward_check": ("error", "warn"),
    "fp8_backward": ("bf16", "fp8"),
    "fp8_gemm_backend": ("fake_quant", "scaled_mm"),
}
# Name of an MLP's first linear layer -> bytes of intermediates that are alive at once in the MLP's backward, per token
# and element of the MLP's width: 7 FP32 tensors, or 8 if gate and up are one linear layer
RECOMPUTED = {"gate_proj": 28, "gate_up_proj": 32}


@dataclass
class ForwardFlags(FlagGroup):
    """Flags that let the trainer compute as the engine does, and decide its gradients."""

    fp8_forward: str = flag(
        "off",
        "Whether the trainer's forward is its own ('off') or the engine's ('one_forward'). With 'one_forward' each "
        "module of the policy calls the engine's kernel on the engine's tensors, KV cache included, so trainer and "
        "rollouts have equal log-probs. On CPU they were equal at every measured depth; on a GPU nothing has been "
        "measured (docs/how_it_works.md). Master weights and checkpoints stay as they are.",
    )
    fp8_forward_check: str = flag(
        "error",
        "What happens with fp8_forward='one_forward' if the engine computes another model than the policy, or if the "
        "mismatch of the first rollouts exceeds what the platform guarantees: 'error', or 'warn' to go on. Both name "
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
        "scores the rollouts twice more without gradients, by itself and with the engine's kernels. This splits the "
        "mismatch into `mismatch/scoring_k3` (dropout, for example), `mismatch/explained_k3` (the FP8 formats) and "
        "`mismatch/unexplained_k3` (a fault). With fp8_forward='one_forward' no pass is needed: all mismatch is "
        "unexplained. With fp8_forward='off' this works only on a CPU.",
    )

    @property
    def policy_calls_engine(self) -> bool:
        return self.fp8_forward != "off"

    def rules_out_tensor_parallelism(self) -> bool:
        return self.policy_calls_engine

    def memory_changes(self, setup: Setup, outline: Outline, recipe: FP8Recipe) -> dict[str, float]:
        if not self.policy_calls_engine:
            return {}
        reference = reference_bytes(outline, setup, recipe) if self.beta else 0
        return {"reference": reference, "uncounted": recomputed_bytes(outline, setup)}

    def check_model(self, outline: Outline) -> None:
        if self.policy_calls_engine:
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
                "explanation, or the number of steps between two of them."
            )
        if not self.policy_calls_engine:
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
                f"fp8_forward={self.fp8_forward!r} with fp8_weights=False: the engine's linear layers are BF16, so "
                "there is no FP8 forward to share. Set fp8_weights=True or fp8_forward='off'."
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
        # getattr, because this feature also works in a package without the feature kv_cache, which has this flag
        if getattr(self, "simulate_kv_cache", None) is False and self.kv_cache_dtype != "auto":
            raise ValueError(
                f"simulate_kv_cache=False with fp8_forward={self.fp8_forward!r}: the trainer runs the engine's "
                "forward, which reads k and v from its KV cache. Remove simulate_kv_cache, or set fp8_forward='off'."
            )
        replacing = forward_replacing_flags(self)
        if replacing:
            flags = ", ".join(replacing)
            raise ValueError(
                f"{flags} with fp8_forward={self.fp8_forward!r}: both replace the policy's forward. Remove {flags}, "
                "or set fp8_forward='off'."
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


def forward_replacing_flags(args: FlagGroup) -> list[str]:
    """Return the flags that replace parts of the policy's forward, each as `name=value`."""
    # torch.compile would compile the loss's forward into other kernels, and the check of the first rollouts would not
    # notice, because rollouts are scored uncompiled. torch_compile_backend or torch_compile_mode alone switches
    # compilation on, but transformers sets torch_compile only after these flags were read
    names = "use_liger_kernel", "cast_lm_head_to_fp32", "torch_compile_backend", "torch_compile_mode", "torch_compile"
    values = {name: getattr(args, name, None) for name in names}  # not every trainer has the first two
    return [f"{name}={value!r}" for name, value in values.items() if value]


def require_followed(outline: Outline) -> None:
    """Raise `ValueError` if a trainer cannot compute the layers of this type of model as an engine does."""
    policy = f"fp8_forward='one_forward' with a policy of type {outline.config_type!r}"
    if any(cache.is_latent for cache in outline.caches):
        raise ValueError(
            f"{policy}: its attention is latent (MLA), and an engine expands the latents of a prompt with kv_b_proj, "
            "but multiplies by parts of that weight when it decodes. A trainer's forward cannot have the bits of "
            "both. Set fp8_forward='off'."
        )
    if not family_of(outline.model_type).followed:
        raise ValueError(
            f"{policy}: only the layers of {', '.join(types_with('followed'))} are known to compute the engine's "
            "operations. Set fp8_forward='off'."
        )
    is_wrapped = outline.config_type != outline.model_type  # a text model inside a vision-language model
    if is_wrapped:
        raise ValueError(
            f"fp8_forward='one_forward' with a {outline.class_name}: masks and positions of images are not known, "
            "only those of text models. Set fp8_forward='off'."
        )


def recomputed_bytes(outline: Outline, setup: Setup) -> float:
    """Return the bytes that a backward needs for one MLP, or for the experts of one layer, whichever needs more."""
    per_token = 0
    for name, (rows, _) in outline.linears.items():
        kind = name.rpartition(".")[2]
        if kind in RECOMPUTED:
            width = rows // 2 if kind == "gate_up_proj" else rows  # a fused linear has the rows of gate and up
            per_token = max(per_token, RECOMPUTED[kind] * width)
    elements = defaultdict(int)  # module of a layer's experts -> elements of their weights
    for name, shape in outline.parameters.items():
        for module in outline.experts:
            if name.startswith(f"{module}."):
                elements[module] += prod(shape)
    # Bytes per element of the experts
    copy = 0
    gradients = 2  # in BF16
    if BYTES[setup.dtype] == 4 and not setup.args.base_in_engine:  # FP32 weights
        copy = 2  # a copy of the weights in BF16
        gradients += 4  # in FP32, while the gradients in BF16 still exist
    if setup.lora_rank:
        gradients = 0  # only adapters are trained
    tokens = setup.args.per_device_train_batch_size * setup.tokens
    return max(tokens * per_token, (copy + gradients) * max(elements.values(), default=0))


def reference_bytes(outline: Outline, setup: Setup, recipe: FP8Recipe) -> int:
    """Return the bytes of the reference's weights that the engine's kernels read, in the engine's formats."""
    if setup.args.base_in_engine:
        return 2 * engine_adapters(outline, setup.lora_rank)  # in BF16; the reference uses the policy's base
    shapes = dict(outline.parameters)
    if "lm_head.weight" in shapes:
        # No kernel of the engine reads the embedding. Without `lm_head.weight` the output head reads the embedding
        embedding = next(name for name in shapes if name.endswith("embed_tokens.weight"))
        del shapes[embedding]
    total = 0
    for name, shape in shapes.items():
        total += recipe.format.weight_bytes(shape) if name in recipe.fp8_tensors else 2 * prod(shape)
    return total
