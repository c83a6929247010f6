"""The flag of an FP8 base with adapters."""

from dataclasses import dataclass

from trl_fp8.run.flag import FlagGroup, flag


@dataclass
class BaseFlags(FlagGroup):
    """Whether the frozen base of a policy with adapters is the engine's."""

    fp8_base: bool = flag(
        False,
        "Whether LoRA adapters are trained on an FP8 base that trainer and engine share: its FP8 weights live once, "
        "in the engine, and are written once; a sync sends adapters alone (docs/lora.md).",
    )

    def resolve(self) -> None:
        if self.fp8_base and not self.fp8_weights:
            raise ValueError(
                "fp8_base=True with fp8_weights=False: the base that trainer and engine share is the engine's FP8 "
                "weights. Set fp8_weights=True, or fp8_base=False."
            )
