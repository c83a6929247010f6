"""Published models: their config.json as far as it decides shapes, caches and context, and their sizes."""

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trl_fp8.recipe.outline import Outline


def _sizes(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int, context: int) -> dict:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
    }


def _llama(*sizes: int, tied: bool = False, **more) -> dict:
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    same = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": tied}
    return kind | _sizes(*sizes, 128256, 131072) | same | more


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, tied: bool, kv_heads: int = 8, **more) -> dict:
    kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    windows = {"max_window_layers": layers, "sliding_window": None, "use_sliding_window": False}
    same = {"attention_bias": False, "head_dim": 128, "rope_theta": 1000000, "tie_word_embeddings": tied}
    return kind | _sizes(hidden, mlp, layers, heads, kv_heads, 151936, 40960) | windows | same | more


def _qwen3_moe(hidden: int, mlp: int, layers: int, heads: int, expert: int) -> dict:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    experts |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    return _qwen3(hidden, mlp, layers, heads, False, 4) | experts | kind


def _qwen2(*sizes: int) -> dict:
    kind = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False}
    windows = {"max_window_layers": sizes[2], "sliding_window": 131072, "use_sliding_window": False}
    return kind | _sizes(*sizes, 152064, 131072) | windows


def _gemma3(**text: Any) -> dict:
    text = {"model_type": "gemma3_text", "sliding_window": 1024} | text
    return {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}


def _qwen3_5(kind: str, hidden: int, layers: int, heads: int, kv_heads: int, value_heads: int, **more) -> dict:
    """Return the config of a vision-language model."""
    text = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads} | more
    text |= {"num_key_value_heads": kv_heads, "linear_num_value_heads": value_heads, "mamba_ssm_dtype": "float32"}
    text |= {"model_type": f"{kind}_text", "head_dim": 256, "vocab_size": 248320, "max_position_embeddings": 262144}
    name = "Qwen3_5Moe" if kind.endswith("moe") else "Qwen3_5"
    return {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind, "text_config": text}


CONFIGS = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, tied=False),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, tied=False),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 6144, 48, 32, 768),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 12288, 94, 64, 1536),
    "Qwen/Qwen2.5-7B": _qwen2(3584, 18944, 28, 28, 4),
    "Qwen/Qwen2.5-72B": _qwen2(8192, 29568, 80, 64, 8),
    "meta-llama/Llama-3.2-1B": _llama(2048, 8192, 16, 32, 8, tied=True, head_dim=64),
    "meta-llama/Llama-3.2-3B": _llama(3072, 8192, 28, 24, 8, tied=True, head_dim=128),
    "meta-llama/Llama-3.1-8B": _llama(4096, 14336, 32, 32, 8),
    "meta-llama/Llama-3.1-70B": _llama(8192, 28672, 80, 64, 8),
    "mistralai/Mistral-7B-v0.3": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
        "tie_word_embeddings": False,
        **_sizes(4096, 14336, 32, 32, 8, 32768, 32768),
    },
    "mistralai/Mixtral-8x7B-v0.1": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "sliding_window": None,
        "tie_word_embeddings": False,
        **_sizes(4096, 14336, 32, 32, 8, 32000, 32768),
    },
    "google/gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attention_bias": False,
        "head_dim": 256,
        "sliding_window": 4096,
        **_sizes(3584, 14336, 42, 16, 8, 256000, 8192),
    },
    "google/gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        **_sizes(1152, 6912, 26, 4, 1, 262144, 32768),
    },
    "google/gemma-3-4b-it": _gemma3(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
    "google/gemma-3-12b-it": _gemma3(
        hidden_size=3840,
        intermediate_size=15360,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=8,
    ),
    "allenai/OLMoE-1B-7B-0924": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "attention_bias": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
        **_sizes(2048, 1024, 16, 16, 16, 50304, 4096),
    },
    "HuggingFaceTB/SmolLM2-1.7B": _llama(2048, 8192, 24, 32, 32, tied=True)
    | {"vocab_size": 49152, "max_position_embeddings": 8192},
    "microsoft/phi-4": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "sliding_window": None,
        "tie_word_embeddings": False,
        **_sizes(5120, 17920, 40, 40, 10, 100352, 16384),
    },
    "deepseek-ai/DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        "tie_word_embeddings": False,
        "v_head_dim": 128,
        **_sizes(7168, 18432, 61, 128, 128, 129280, 163840),
    },
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        **_sizes(2048, 5120, 48, 16, 2, 151936, 262144),
    },
    "Qwen/Qwen3.5-27B": _qwen3_5("qwen3_5", 5120, 64, 24, 4, 48, intermediate_size=17408),
    "Qwen/Qwen3.5-35B-A3B": _qwen3_5("qwen3_5_moe", 2048, 40, 16, 2, 32),
    "openai/gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_experts_per_tok": 4,
        "num_local_experts": 32,
        "quantization_config": {"quant_method": "mxfp4"},
        "sliding_window": 128,
        "tie_word_embeddings": False,
        **_sizes(2880, 2880, 24, 64, 8, 201088, 131072),
    },
}
# Billions of parameters as stated, to the last digit given: on the model's card (Qwen, Llama 3.2, DeepSeek), its page
# on the Hub (Llama 3.1, Mistral, Gemma 2, SmolLM2, Phi), in Mixtral's blog, OLMoE's paper, gpt-oss's model card,
# and the report of Gemma 3 (embeddings and the rest, without the vision tower)
BILLIONS = {
    "Qwen/Qwen3-0.6B": "0.6",
    "Qwen/Qwen3-1.7B": "1.7",
    "Qwen/Qwen3-4B": "4.0",
    "Qwen/Qwen3-8B": "8.2",
    "Qwen/Qwen3-14B": "14.8",
    "Qwen/Qwen3-32B": "32.8",
    "Qwen/Qwen3-30B-A3B": "30.5",
    "Qwen/Qwen3-235B-A22B": "235",
    "Qwen/Qwen2.5-7B": "7.61",
    "Qwen/Qwen2.5-72B": "72.7",
    "meta-llama/Llama-3.2-1B": "1.23",
    "meta-llama/Llama-3.2-3B": "3.21",
    "meta-llama/Llama-3.1-8B": "8.03",
    "meta-llama/Llama-3.1-70B": "70.6",
    "mistralai/Mistral-7B-v0.3": "7.25",
    "mistralai/Mixtral-8x7B-v0.1": "46.7",
    "google/gemma-2-9b": "9.24",
    "google/gemma-3-1b-it": "1.000",
    "google/gemma-3-4b-it": "3.88",
    "google/gemma-3-12b-it": "11.77",
    "allenai/OLMoE-1B-7B-0924": "6.9",
    "HuggingFaceTB/SmolLM2-1.7B": "1.71",
    "microsoft/phi-4": "14.7",
    "deepseek-ai/DeepSeek-V3": "671",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "80",
    "Qwen/Qwen3.5-27B": "27",
    "Qwen/Qwen3.5-35B-A3B": "35",
    "openai/gpt-oss-20b": "20.91",
}


def config(name: str) -> "PretrainedConfig":
    """Return transformers' config of a published config.json, with special tokens of `testing.tokenizer`."""
    from transformers import CONFIG_MAPPING  # seconds, which readers of `CONFIGS` do without

    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return CONFIG_MAPPING[CONFIGS[name]["model_type"]].from_dict(json.loads(json.dumps(CONFIGS[name])) | tokens)


def write(name: str, folder: Path) -> None:
    """Write a folder with a published config.json and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))


@cache
def outline(name: str) -> "Outline":
    """Return the outline of a published model, without a vision tower: the configs here have none."""
    from trl_fp8.recipe.from_model import outline_of_pretrained  # seconds, too
    from trl_fp8.recipe.recipe import is_vision

    with tempfile.TemporaryDirectory() as folder:
        write(name, Path(folder))
        whole = outline_of_pretrained(folder)
    parameters = {each: shape for each, shape in whole.parameters.items() if not is_vision(each)}
    linears = {each: shape for each, shape in whole.linears.items() if not is_vision(each)}
    return replace(whole, name=name, parameters=parameters, linears=linears)


def qwen3_1_7b() -> "PretrainedConfig":
    return config("Qwen/Qwen3-1.7B")


def qwen3_4b() -> "PretrainedConfig":
    return config("Qwen/Qwen3-4B")


def qwen3_8b() -> "PretrainedConfig":
    return config("Qwen/Qwen3-8B")


def qwen3_30b_a3b() -> "PretrainedConfig":
    return config("Qwen/Qwen3-30B-A3B")


def llama3_1_8b() -> "PretrainedConfig":
    """Return a config without head_dim."""
    return config("meta-llama/Llama-3.1-8B")
