"""Trainers of TRL's beside GRPO on the tiny task, with the arguments that each takes."""

from dataclasses import fields
from pathlib import Path

from trl import DistillationConfig, DistillationTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from trl_fp8 import (
    FP8DistillationConfig,
    FP8DistillationTrainer,
    FP8GMPOConfig,
    FP8GMPOTrainer,
    FP8RLOOConfig,
    FP8RLOOTrainer,
    FP8SDFTConfig,
    FP8SDFTTrainer,
    FP8SDPOConfig,
    FP8SDPOTrainer,
)

from .chats import chat_tokenizer
from .runs import SHORT, dataset, reward_digits


KINDS = {  # TRL's trainer and config, and those of this package
    "rloo": (RLOOTrainer, RLOOConfig, FP8RLOOTrainer, FP8RLOOConfig),
    "gmpo": (GMPOTrainer, GMPOConfig, FP8GMPOTrainer, FP8GMPOConfig),
    "distillation": (DistillationTrainer, DistillationConfig, FP8DistillationTrainer, FP8DistillationConfig),
    "sdft": (SDFTTrainer, SDFTConfig, FP8SDFTTrainer, FP8SDFTConfig),
    "sdpo": (SDPOTrainer, SDPOConfig, FP8SDPOTrainer, FP8SDPOConfig),
}
# The tiny vocabulary has less than the 100 tokens that SDFT compares
NEEDED = {"sdft": {"distillation_topk": 16}, "sdpo": {"success_reward_threshold": 0.1}}


def config_of(kind: str, folder: Path, trls: bool = False, **flags) -> object:
    """Return the config of a short run, of TRL's or of this package's trainer, with what it knows of `flags`."""
    config = KINDS[kind][1 if trls else 3]
    known = {item.name for item in fields(config)}
    flags = {name: value for name, value in (SHORT | flags).items() if name in known}
    return config(str(folder), **flags | NEEDED.get(kind, {}))


def options_of(kind: str, teacher: str) -> dict:
    """Return the other arguments of a trainer, the dataset as `train`, for `testing.runs.training`."""
    task = dataset().map(lambda row: {"privileged_context": f"it is {row['prompt'][:2]}"})
    rewarded = kind in ("rloo", "gmpo", "sdpo")
    options = {"train": task, "reward_funcs": reward_digits if rewarded else None}
    if kind == "distillation":
        options["teacher_model"] = teacher
    if kind == "sdpo":
        options["processing_class"] = chat_tokenizer()
    return options
