"""Trainers of TRL's beside GRPO on the tiny task, with the arguments that each takes."""

from dataclasses import fields
from pathlib import Path

from datasets import Dataset
from trl import DistillationConfig, DistillationTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from trl_fp8 import (
    FP8DistillationConfig,
    FP8DistillationTrainer,
    FP8GMPOConfig,
    FP8GMPOTrainer,
    FP8GOLDConfig,
    FP8GOLDTrainer,
    FP8IWOPDConfig,
    FP8IWOPDTrainer,
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
    "gold": (GOLDTrainer, GOLDConfig, FP8GOLDTrainer, FP8GOLDConfig),
    "iw_opd": (IWOPDTrainer, IWOPDConfig, FP8IWOPDTrainer, FP8IWOPDConfig),
    "sdft": (SDFTTrainer, SDFTConfig, FP8SDFTTrainer, FP8SDFTConfig),
    "sdpo": (SDPOTrainer, SDPOConfig, FP8SDPOTrainer, FP8SDPOConfig),
}
OF_MESSAGES = ("gold", "iw_opd")  # whose datasets have conversations
# The tiny vocabulary has less than the 100 tokens that SDFT compares, and a tiny model few positions
NEEDED = {"sdft": {"distillation_topk": 16}, "sdpo": {"success_reward_threshold": 0.1}}
NEEDED |= dict.fromkeys(OF_MESSAGES, {"lmbda": 1.0, "num_generations": 1, "max_length": 64})
NEEDED["gold"] = NEEDED["gold"] | {"use_extended_uld": False}  # the tiny tokenizer is not byte-level


def config_of(kind: str, folder: Path, trls: bool = False, **flags) -> object:
    """Return the config of a short run, of TRL's or of this package's trainer, with what it knows of `flags`."""
    config = KINDS[kind][1 if trls else 3]
    known = {item.name for item in fields(config)}
    flags = {name: value for name, value in (SHORT | flags).items() if name in known}
    return config(str(folder), **flags | NEEDED.get(kind, {}))


def conversation(prompt: str) -> list[dict]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": prompt[:2]}]


def options_of(kind: str, teacher: str) -> dict:
    """Return the other arguments of a trainer, the dataset as `train`, for `testing.runs.training`."""
    task = dataset().map(lambda row: {"privileged_context": f"it is {row['prompt'][:2]}"})
    if kind in OF_MESSAGES:
        task = Dataset.from_list([{"messages": conversation(row["prompt"])} for row in task])
    rewarded = kind in ("rloo", "gmpo", "sdpo")
    options = {"train": task, "reward_funcs": reward_digits if rewarded else None}
    if kind in ("distillation", *OF_MESSAGES):
        options["teacher_model"] = teacher
    if kind in ("sdpo", *OF_MESSAGES):
        options["processing_class"] = chat_tokenizer()
    return options
