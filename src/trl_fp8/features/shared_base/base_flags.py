"""The flag of an FP8 base with adapters."""

from dataclasses import dataclass

from trl import ModelConfig

from trl_fp8.run.flag import FlagGroup, flag


# Flag that adapters on an FP8 base do not go with -> why
NOT_BESIDE = {
    "use_dora": "the engine computes Q(W) x + B A x and nothing else",
    "lora_target_parameters": "the engine has adapters beside linear layers alone",
    "load_in_4bit": "the base is quantized to FP8",
    "load_in_8bit": "the base is quantized to FP8",
}


@dataclass
class BaseFlags(FlagGroup):
    """Flag that lets a policy with adapters share the engine's frozen base."""

    fp8_base: bool = flag(
        False,
        "Whether LoRA adapters are trained on an FP8 base that trainer and engine share: its FP8 weights live once, "
        "in the engine, and are written once; a sync sends adapters alone (docs/lora.md).",
    )

    @property
    def base_in_engine(self) -> bool:
        return self.fp8_base

    def check_adapters(self, model: ModelConfig) -> None:
        if self.fp8_base and not model.use_peft:
            raise ValueError(
                "fp8_base=True without use_peft: an FP8 base is frozen, so nothing would be trained. Add --use_peft "
                "for adapters, or set fp8_base=False."
            )

    def against_base(self, model: ModelConfig) -> str | None:
        found = (f"{name}={value!r}: {why}." for name, why in NOT_BESIDE.items() if (value := getattr(model, name)))
        return next(found, None)

    def resolve(self) -> None:
        if self.fp8_base and not self.fp8_weights:
            raise ValueError(
                "fp8_base=True with fp8_weights=False: the base that trainer and engine share is the engine's FP8 "
                "weights. Set fp8_weights=True, or fp8_base=False."
            )
