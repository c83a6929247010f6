"""The flag `fp8_base`: LoRA adapters on an FP8 base that trainer and engine share."""

from collections import Counter
from dataclasses import dataclass
from math import prod

from trl import ModelConfig

from trl_fp8.planning.trainer_memory import BYTES, Setup, engine_adapters
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.run.feature import FlagGroup, flag


# Flag that fp8_base excludes -> why
EXCLUDED = {
    "use_dora": "the engine computes Q(W) x + s B A x and nothing else",
    "lora_target_parameters": "the engine has adapters only beside linear layers",
    "load_in_4bit": "the base is quantized to FP8",
    "load_in_8bit": "the base is quantized to FP8",
}


@dataclass
class BaseFlags(FlagGroup):
    """Flag that lets a policy with adapters share the engine's frozen base."""

    SAVING = {"fp8_base": True}

    fp8_base: bool = flag(
        False,
        "Whether LoRA adapters are trained on an FP8 base that trainer and engine share. The base's FP8 weights exist "
        "once, in the engine, and are written once; each sync sends only the adapters (docs/lora.md).",
    )

    @property
    def base_in_engine(self) -> bool:
        return self.fp8_base

    def check_adapters(self, model: ModelConfig) -> None:
        if not self.fp8_base:
            return
        if not model.use_peft:
            raise ValueError(
                "fp8_base=True without use_peft: an FP8 base is frozen, so nothing would be trained. Add --use_peft "
                "for adapters, or set fp8_base=False."
            )
        reason = BaseFlags.flag_ruling_out_fp8_base(self, model)
        if reason is not None:
            raise ValueError(f"fp8_base=True with {reason}. Remove it, or set fp8_base=False.")

    def flag_ruling_out_fp8_base(self, model: ModelConfig) -> str | None:
        for name, why in EXCLUDED.items():
            if getattr(model, name):
                return f"{name}={getattr(model, name)!r}: {why}"
        return None

    def memory_changes(self, setup: Setup, outline: Outline, recipe: FP8Recipe) -> dict[str, float]:
        """Return the changes of an FP8 base: its weights leave the trainer, and the engine gets BF16 adapters."""
        if not self.fp8_base:
            return {}
        shapes = {name: outline.parameters[name] for name in recipe.fp8_tensors}
        parameters = sum(prod(shape) for shape in shapes.values())
        code_bytes = sum(recipe.format.weight_bytes(shape) for shape in shapes.values())
        # Module -> bytes of its BF16 weights. One linear layer, or all experts of a layer, is dequantized at a time
        dequantized = Counter()
        for name, shape in shapes.items():
            module = name.rpartition(".")[0]
            dequantized[module] += 2 * prod(shape)
        # Without a shared base, sharded trainers gather two decoder layers at a time, in BF16 (2 bytes)
        gathered = 0
        if setup.gpus > 1:
            gathered = 2 * 2 * parameters / outline.layers
        # No rank of a divided engine holds whole weights, so each trainer holds the codes once more
        own_codes = code_bytes if recipe.tensor_parallel_size > 1 else 0
        return {
            "weights": own_codes - BYTES[setup.dtype] * parameters / setup.gpus,
            "uncounted": max(dequantized.values(), default=0) - gathered,
            "in_engine": 2 * engine_adapters(outline, setup.lora_rank),
        }

    def resolve(self) -> None:
        if self.fp8_base and not self.fp8_weights:
            raise ValueError(
                "fp8_base=True with fp8_weights=False: the base that trainer and engine share is the engine's FP8 "
                "weights. Set fp8_weights=True, or fp8_base=False."
            )
