"""The families of the matrix: which published models they are, and how a tiny policy of each is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from testing import other_models, tiny_models, vision
from testing.tokenizer import tokenizer
from trl_fp8.upstream.versions import installed_vllm


@dataclass(frozen=True)
class Family:
    """One row."""

    title: str  # as people call it
    save: Callable[[Path], object]  # writes a tiny checkpoint with its tokenizer into a folder
    published: str = ""  # a model whose share of FP8 parameters is told; empty: the tiny one's
    flags: Mapping[str, Any] = field(default_factory=dict)  # of `FP8GRPOConfig`, which its users need, too
    images: bool = False  # its prompts have images


def trained(architecture: str, **overrides) -> Callable[[Path], object]:
    """Return a family with a checkpoint of `testing.tiny_models`."""
    return lambda folder: tiny_models.save_checkpoint(folder, architecture, **overrides)


def other(model_type: str, **overrides) -> Callable[[Path], object]:
    """Return a family with a checkpoint of `testing.other_models`: any causal LM."""

    def save(folder: Path) -> None:
        policy = other_models.policy(model_type, **overrides)
        for name, parameter in policy.named_parameters():  # so that log-probs differ from token to token
            around = float("norm" in name and parameter.dim() == 1)
            torch.nn.init.normal_(parameter, around, 0.1)
        policy.bfloat16().save_pretrained(folder)
        tokenizer().save_pretrained(folder)

    return save


def seeing(title: str, model_type: str, published: str = "", **flags) -> Family:
    """Return a family of `testing.vision`."""
    return Family(title, lambda folder: vision.save_checkpoint(folder, model_type), published, flags, images=True)


ATTENTION = {"attention_multiplier": 0.125}  # of scores; Granite's default of 1 leaves one key of each query
UNBALANCED = {"router_aux_loss_coef": 0.0}  # TRL cannot count their experts
FAMILIES = {
    "afmoe": Family("Trinity (AFMoE)", other("afmoe")),
    "apertus": Family("Apertus", other("apertus")),
    "arcee": Family("Arcee", other("arcee")),
    "cohere": Family("Command R", trained("cohere")),
    "cohere2": Family("Command R7B, Command A", other("cohere2")),
    "cohere2_moe": Family("Command, mixtures of experts", other("cohere2_moe")),
    "cwm": Family("CWM", other("cwm")),
    "deepseek_v2": Family("DeepSeek-V2", other("deepseek_v2")),
    "deepseek_v3": Family("DeepSeek-V3, R1", other("deepseek_v3"), "deepseek-ai/DeepSeek-V3"),
    "ernie4_5": Family("ERNIE 4.5, dense", other("ernie4_5")),
    "ernie4_5_moe": Family("ERNIE 4.5, mixtures of experts", other("ernie4_5_moe")),
    "exaone4": Family("EXAONE 4", other("exaone4")),
    "flex_olmo": Family("FlexOLMo", other("flex_olmo")),
    "gemma": Family("Gemma", trained("gemma")),
    "gemma2": Family("Gemma 2", trained("gemma2"), "google/gemma-2-9b"),
    "gemma3": seeing("Gemma 3 with images", "gemma3", "google/gemma-3-12b-it"),
    "gemma3_text": Family("Gemma 3, text", trained("gemma3_text"), "google/gemma-3-1b-it"),
    "glm": Family("GLM-4 (0520), GLM-Edge", trained("glm", attention_bias=True)),
    "glm4": Family("GLM-4 (0414), GLM-Z1", trained("glm4", attention_bias=True)),
    "glm4_moe": Family("GLM 4.5 - 4.7", trained("glm4_moe")),
    "glm4_moe_lite": Family("GLM 4.7 Flash", other("glm4_moe_lite")),
    "gpt_oss": Family("GPT-OSS", trained("gpt_oss")),
    "granite": Family("Granite 3", trained("granite")),
    "granitemoe": Family("Granite 3, mixtures of experts", other("granitemoe", **ATTENTION), flags=UNBALANCED),
    "granitemoehybrid": Family(
        "Granite 4 without Mamba layers", other("granitemoehybrid", num_local_experts=0, **ATTENTION), flags=UNBALANCED
    ),
    "granitemoeshared": Family(
        "Granite, with shared experts", other("granitemoeshared", **ATTENTION), flags=UNBALANCED
    ),
    "granite_swa": Family("Granite, sliding windows", other("granite_swa", **ATTENTION)),
    "granitemoe_swa": Family(
        "Granite, sliding windows and experts", other("granitemoe_swa", **ATTENTION), flags=UNBALANCED
    ),
    "hunyuan_v1_dense": Family("Hunyuan 1, dense", other("hunyuan_v1_dense")),
    "hunyuan_v1_moe": Family("Hunyuan 1, mixtures of experts", other("hunyuan_v1_moe")),
    "hy_v3": Family("Hunyuan 3", other("hy_v3")),
    "hyperclovax": Family("HyperCLOVA X", other("hyperclovax")),
    "jais2": Family("Jais 2", other("jais2")),
    "llama": Family("Llama 2 - 3.3, SmolLM2", trained("llama"), "meta-llama/Llama-3.1-8B"),
    "mellum": Family("Mellum", other("mellum")),
    "minimax_m2": Family("MiniMax-M2", other("minimax_m2")),
    "ministral3": Family("Ministral 3", other("ministral3")),
    "mistral": Family("Mistral", trained("mistral"), "mistralai/Mistral-7B-v0.3"),
    "mistral3": seeing("Mistral Small 3 with images", "mistral3", fp8_weight_format="tensor"),
    "mixtral": Family("Mixtral", trained("mixtral"), "mistralai/Mixtral-8x7B-v0.1"),
    "nemotron": Family("Nemotron, Minitron", other("nemotron")),
    "olmo": Family("OLMo 1", other("olmo")),
    "olmo2": Family("OLMo 2", other("olmo2")),
    "olmo3": Family("OLMo 3", other("olmo3")),
    "olmoe": Family("OLMoE", trained("olmoe"), "allenai/OLMoE-1B-7B-0924"),
    "opt": Family("OPT", other("opt"), flags={"disable_dropout": True}),
    "phi": Family("Phi 1 - 2", other("phi")),
    "phi3": Family("Phi-3, Phi-3.5, Phi-4", trained("phi3"), "microsoft/phi-4"),
    "qwen2": Family("Qwen2, Qwen2.5", trained("qwen2"), "Qwen/Qwen2.5-7B"),
    "qwen2_5_vl": seeing("Qwen2.5-VL", "qwen2_5_vl"),
    "qwen2_moe": Family("Qwen1.5-MoE, Qwen2-57B-A14B", trained("qwen2_moe")),
    "qwen3": Family("Qwen3", trained("qwen3"), "Qwen/Qwen3-8B"),
    "qwen2_vl": seeing("Qwen2-VL", "qwen2_vl"),
    "qwen3_moe": Family("Qwen3, mixtures of experts", trained("qwen3_moe"), "Qwen/Qwen3-30B-A3B"),
    "qwen3_5": seeing("Qwen3.5 with images", "qwen3_5", "Qwen/Qwen3.5-27B"),
    "qwen3_5_moe": seeing("Qwen3.5-MoE with images", "qwen3_5_moe", "Qwen/Qwen3.5-35B-A3B"),
    "qwen3_5_moe_text": Family("Qwen3.5-MoE, text", other("qwen3_5_moe_text"), "Qwen/Qwen3.5-35B-A3B"),
    "qwen3_5_text": Family("Qwen3.5, text", other("qwen3_5_text"), "Qwen/Qwen3.5-27B"),
    "qwen3_next": Family("Qwen3-Next", other("qwen3_next"), "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    "qwen3_vl": seeing("Qwen3-VL", "qwen3_vl"),
    "seed_oss": Family("Seed-OSS", other("seed_oss", attention_dropout=0.0, residual_dropout=0.0)),
    "smollm3": Family("SmolLM3", other("smollm3")),
    "stablelm": Family("StableLM 2", other("stablelm")),
    "starcoder2": Family("StarCoder2", other("starcoder2")),
    "vaultgemma": Family("VaultGemma", other("vaultgemma")),
}
FAMILIES = {name: family for name, family in FAMILIES.items() if name not in installed_vllm().refused}
