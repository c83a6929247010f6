"""The architectures whose names and shapes follow from a config.json: one table, after transformers' modeling files.

A row is a parameter of a decoder layer, its shape, and what it depends on: `bias=FIELD` adds a bias where that field
of the config is true (or `always`), `if=FIELD` and `unless=FIELD` keep the row or leave it out. Letters are sizes:

    H hidden_size    I intermediate_size    V vocab_size    A attention heads    D head_dim
    Q all heads of q    K all heads of k, and of v    G heads of k
    E experts    M intermediate size of one    S that of the shared expert, or of all shared ones together
    MLA: L rank of q    R rank of k and v    P rotary part of a head    U all heads of k without it, and of v
         O all heads of v
    gated delta net: X all heads of k    Y all heads of v    Z heads of v    W size of one    C kernel
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


Rows = tuple[str, ...]


def _attention(bias: str = "", out_bias: str = "", q_rows: str = "Q", q_norm: str = "", k_norm: str = "") -> Rows:
    rows = [
        f"self_attn.{name}_proj.weight {size} H {bias}" for name, size in zip("qkv", (q_rows, "K", "K"), strict=True)
    ]
    norms = [f"self_attn.{name}_norm.weight {size}" for name, size in (("q", q_norm), ("k", k_norm)) if size]
    return (*rows, f"self_attn.o_proj.weight H Q {out_bias}", *norms)


def _mlp(block: str = "mlp", size: str = "I", bias: str = "") -> Rows:
    gate_up = (f"{block}.{name}_proj.weight {size} H {bias}" for name in ("gate", "up"))
    return (*gate_up, f"{block}.down_proj.weight H {size} {bias}")


def _norms(*names: str) -> Rows:
    return tuple(f"{name}_layernorm.weight H" for name in names)


_BIAS = "bias=attention_bias"
_PLAIN, _BIASED = _attention(), _attention(_BIAS, _BIAS)
_HEAD_NORMS = _attention(_BIAS, _BIAS, q_norm="D", k_norm="D")
_ROW_NORMS = _attention(_BIAS, _BIAS, q_norm="Q", k_norm="K")
_GATED = _attention(_BIAS, _BIAS, "2Q", "D", "D")  # q_proj makes a gate, too
_QWEN2 = _attention("bias=always")
_FUSED_MLP = ("mlp.gate_up_proj.weight 2I H", "mlp.down_proj.weight H I")
_PRE = _norms("input", "post_attention")
_AROUND = _norms("input", "post_attention", "pre_feedforward", "post_feedforward")
_ROUTER = ("mlp.gate.weight E H",)
_EXPERTS = ("mlp.experts.gate_up_proj E 2M H", "mlp.experts.down_proj E H M")
_SHARED_EXPERT = (*_mlp("mlp.shared_expert", "S"), "mlp.shared_expert_gate.weight 1 H")
_MLA = (
    "self_attn.q_proj.weight Q H unless=q_lora_rank",
    f"self_attn.q_a_proj.weight L H if=q_lora_rank {_BIAS}",
    "self_attn.q_a_layernorm.weight L if=q_lora_rank",
    "self_attn.q_b_proj.weight Q L if=q_lora_rank",
    f"self_attn.kv_a_proj_with_mqa.weight R+P H {_BIAS}",
    "self_attn.kv_a_layernorm.weight R",
    "self_attn.kv_b_proj.weight U R",
    f"self_attn.o_proj.weight H O {_BIAS}",
)
_DELTA_NET = ("linear_attn.dt_bias Z", "linear_attn.A_log Z", "linear_attn.conv1d.weight 2X+Y 1 C")
_QWEN3_NEXT_NET = (
    *(*_DELTA_NET, "linear_attn.in_proj_qkvz.weight 2X+2Y H", "linear_attn.in_proj_ba.weight 2Z H"),
    *("linear_attn.norm.weight W", "linear_attn.out_proj.weight H Y"),
)
_QWEN3_5_NET = (
    *(*_DELTA_NET, "linear_attn.norm.weight W", "linear_attn.out_proj.weight H Y"),
    *("linear_attn.in_proj_qkv.weight 2X+Y H", "linear_attn.in_proj_z.weight Y H"),
    *("linear_attn.in_proj_b.weight Z H", "linear_attn.in_proj_a.weight Z H"),
)
_CORRECTION = ("mlp.gate.e_score_correction_bias E",)


@dataclass(frozen=True)
class Architecture:
    """The class that transformers builds from a config, the config's defaults there, and the rows of its layers."""

    class_name: str  # empty: only inside a `Wrapper`
    defaults: Mapping[str, Any]  # None: the field may be null
    attention: Rows
    norms: Rows = _PRE
    dense: Rows = _mlp()
    sparse: Rows = ()  # of layers with experts
    linear: Rows = ()  # instead of `attention` in layers of linear attention
    buffers: Rows = ()  # of layers with experts
    full_every: int | str = 0  # where layer_types is null: every n-th layer has full attention, a number or the field
    also_called: str = ""  # another name of the field of the number of experts


@dataclass(frozen=True)
class Wrapper:
    """A vision-language model's class, and what its config leaves to transformers."""

    class_name: str
    language_model: str  # model type
    tied: bool = False  # embeddings and output head


def _defaults(
    vocabulary: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int | None,
    context: int,
    tied: bool = False,
    **more,
) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "head_dim": None,
        "tie_word_embeddings": tied,
        "sliding_window": None,
        "layer_types": None,
    } | more


_QWEN_WINDOWS = {"sliding_window": 4096, "use_sliding_window": False}
_QWEN_LAYERS = _QWEN_WINDOWS | {"max_window_layers": 28}
_QWEN_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": None}
_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
_LATENT |= {"v_head_dim": 128, "attention_bias": False}
_LINEAR = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
_LINEAR |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4}
_QWEN3_5 = _LINEAR | {"head_dim": 256, "attention_bias": False, "mamba_ssm_dtype": None}
ARCHITECTURES = {  # model type of a language model -> what transformers makes of it
    "cohere": Architecture(
        "CohereForCausalLM",
        _defaults(256000, 8192, 22528, 40, 64, None, 8192, tied=True, attention_bias=False, use_qk_norm=None),
        (*_BIASED, "self_attn.q_norm.weight A D if=use_qk_norm", "self_attn.k_norm.weight G D if=use_qk_norm"),
        _norms("input"),
    ),
    "deepseek_v2": Architecture(
        "DeepseekV2ForCausalLM",
        _defaults(102400, 4096, 11008, 32, 32, None, 2048, **_LATENT, mlp_bias=False, n_routed_experts=64)
        | {"num_experts_per_tok": None, "moe_intermediate_size": 1407, "n_shared_experts": 2}
        | {"first_k_dense_replace": 0},
        _MLA,
        dense=_mlp(bias="bias=mlp_bias"),
        sparse=(*_EXPERTS, *_ROUTER, *_mlp("mlp.shared_experts", "S", "bias=mlp_bias")),
        also_called="num_experts",
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3ForCausalLM",
        _defaults(129280, 7168, 18432, 61, 128, 128, 4096, **_LATENT, n_routed_experts=256, num_experts_per_tok=8)
        | {"moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3},
        _MLA,
        sparse=(*_EXPERTS, *_ROUTER, *_mlp("mlp.shared_experts", "S")),
        buffers=_CORRECTION,
        also_called="num_local_experts",
    ),
    "gemma": Architecture(
        "GemmaForCausalLM",
        _defaults(256000, 3072, 24576, 28, 16, 16, 8192, head_dim=256, tied=True, attention_bias=False),
        _BIASED,
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        _defaults(256000, 2304, 9216, 26, 8, 4, 8192, head_dim=256, tied=True, attention_bias=False)
        | {"sliding_window": 4096},
        _BIASED,
        _AROUND,
        full_every=2,
    ),
    "gemma3_text": Architecture(
        "Gemma3ForCausalLM",
        _defaults(262208, 2304, 9216, 26, 8, 4, 131072, head_dim=256, tied=True, attention_bias=False)
        | {"sliding_window": 4096, "sliding_window_pattern": 6},
        _HEAD_NORMS,
        _AROUND,
        full_every="sliding_window_pattern",
    ),
    "glm": Architecture(
        "GlmForCausalLM",
        _defaults(151552, 4096, 13696, 40, 32, 2, 131072, head_dim=128, attention_bias=True),
        _attention(_BIAS),
        dense=_FUSED_MLP,
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        _defaults(151552, 4096, 13696, 40, 32, 2, 131072, head_dim=128, attention_bias=True),
        _attention(_BIAS),
        _norms("input", "post_attention", "post_self_attn", "post_mlp"),
        _FUSED_MLP,
    ),
    "glm4_moe": Architecture(
        "Glm4MoeForCausalLM",
        _defaults(151552, 4096, 10944, 46, 96, 8, 131072, attention_bias=False, use_qk_norm=False)
        | {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1},
        (*_attention(_BIAS), *(f"self_attn.{name}_norm.weight D if=use_qk_norm" for name in "qk")),
        sparse=(*_EXPERTS, *_ROUTER, *_mlp("mlp.shared_experts", "S")),
        buffers=_CORRECTION,
        also_called="num_local_experts",
    ),
    "glm4_moe_lite": Architecture(
        "Glm4MoeLiteForCausalLM",
        _defaults(154880, 2048, 10240, 47, 20, 20, 202752, **_LATENT | {"q_lora_rank": 768, "v_head_dim": 256})
        | {"qk_nope_head_dim": 192, "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536}
        | {"n_shared_experts": 1, "mlp_layer_types": None},
        _MLA,
        sparse=(*_EXPERTS, *_ROUTER, *_mlp("mlp.shared_experts", "S")),
        buffers=_CORRECTION,
        also_called="num_local_experts",
    ),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        _defaults(201088, 2880, 2880, 36, 64, 8, 131072, head_dim=64, attention_bias=True, sliding_window=128)
        | {"num_local_experts": 128, "num_experts_per_tok": 4},
        ("self_attn.sinks A", *_BIASED),
        sparse=(
            *("mlp.router.weight E H bias=always", "mlp.experts.gate_up_proj E H 2M"),
            *("mlp.experts.gate_up_proj_bias E 2M", "mlp.experts.down_proj E M H", "mlp.experts.down_proj_bias E H"),
        ),
        full_every=2,
        also_called="num_experts",
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        _defaults(32000, 4096, 11008, 32, 32, None, 2048, attention_bias=False, mlp_bias=False),
        _BIASED,
        dense=_mlp(bias="bias=mlp_bias"),
    ),
    "llama": Architecture(
        "LlamaForCausalLM",
        _defaults(32000, 4096, 11008, 32, 32, None, 2048, attention_bias=False, mlp_bias=False),
        _BIASED,
        dense=_mlp(bias="bias=mlp_bias"),
    ),
    "minimax_m2": Architecture(
        "MiniMaxM2ForCausalLM",
        _defaults(200064, 3072, 1536, 62, 48, 8, 196608, head_dim=128, num_local_experts=256, num_experts_per_tok=8),
        _attention(q_norm="Q", k_norm="K"),
        sparse=(*_ROUTER, *_EXPERTS),
        buffers=("mlp.e_score_correction_bias E",),
        also_called="num_experts",
    ),
    "ministral3": Architecture(
        "Ministral3ForCausalLM", _defaults(131072, 4096, 14336, 34, 32, 8, 262144, head_dim=128), _PLAIN
    ),
    "mistral": Architecture(
        "MistralForCausalLM", _defaults(32000, 4096, 14336, 32, 32, 8, 131072, sliding_window=4096), _PLAIN
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        _defaults(32000, 4096, 14336, 32, 32, 8, 131072, num_local_experts=8, num_experts_per_tok=2),
        _PLAIN,
        sparse=(*_ROUTER, *_EXPERTS),
        also_called="num_experts",
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        _defaults(50304, 4096, 11008, 32, 32, None, 2048, attention_bias=False),
        _ROW_NORMS,
        _norms("post_attention", "post_feedforward"),
    ),
    "olmo3": Architecture(
        "Olmo3ForCausalLM",
        _defaults(50304, 4096, 11008, 32, 32, None, 2048, attention_bias=False, sliding_window=4096),
        _ROW_NORMS,
        _norms("post_attention", "post_feedforward"),
        full_every=4,
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        _defaults(50304, 2048, 2048, 16, 16, None, 4096, attention_bias=False, num_experts=64, num_experts_per_tok=8),
        _ROW_NORMS,
        sparse=(*_ROUTER, *_EXPERTS),
        also_called="num_local_experts",
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        _defaults(32064, 3072, 8192, 32, 32, None, 4096),
        ("self_attn.o_proj.weight H Q", "self_attn.qkv_proj.weight Q+2K H"),
        dense=_FUSED_MLP,
    ),
    "qwen2": Architecture(
        "Qwen2ForCausalLM", _defaults(151936, 4096, 22016, 32, 32, 32, 32768, **_QWEN_LAYERS), _QWEN2
    ),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM",
        _defaults(151936, 2048, 5632, 24, 16, 16, 32768, **_QWEN_LAYERS, **_QWEN_SPARSE, qkv_bias=True)
        | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
        | {"shared_expert_intermediate_size": 5632},
        _attention("bias=qkv_bias"),
        sparse=(*_ROUTER, *_EXPERTS, *_SHARED_EXPERT),
        full_every=2,
    ),
    "qwen2_5_vl_text": Architecture(
        "", _defaults(152064, 8192, 29568, 80, 64, 8, 32768, **_QWEN_WINDOWS, max_window_layers=80), _QWEN2
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        _defaults(151936, 4096, 22016, 32, 32, 32, 32768, **_QWEN_LAYERS, head_dim=128, attention_bias=False),
        _HEAD_NORMS,
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        _defaults(151936, 2048, 6144, 24, 32, 4, 32768, **_QWEN_WINDOWS, **_QWEN_SPARSE, attention_bias=False)
        | {"num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        _HEAD_NORMS,
        sparse=(*_EXPERTS, *_ROUTER),
        also_called="num_experts",
    ),
    "qwen3_next": Architecture(
        "Qwen3NextForCausalLM",
        _defaults(151936, 2048, 5632, 48, 16, 2, 32768, **_QWEN_SPARSE, head_dim=256, attention_bias=False)
        | {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512, **_LINEAR},
        _GATED,
        sparse=(*_ROUTER, *_EXPERTS, *_SHARED_EXPERT),
        linear=_QWEN3_NEXT_NET,
        full_every="full_attention_interval",
    ),
    "qwen3_5_text": Architecture(
        "Qwen3_5ForCausalLM",
        _defaults(248320, 4096, 12288, 32, 16, 4, 32768, **_QWEN3_5),
        _GATED,
        linear=_QWEN3_5_NET,
        full_every="full_attention_interval",
    ),
    "qwen3_5_moe_text": Architecture(
        "Qwen3_5MoeForCausalLM",
        _defaults(248320, 2048, 0, 40, 16, 2, 32768, **_QWEN3_5, num_experts=256, num_experts_per_tok=8)
        | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
        _GATED,
        sparse=(*_ROUTER, *_EXPERTS, *_SHARED_EXPERT),
        linear=_QWEN3_5_NET,
        full_every="full_attention_interval",
    ),
    "qwen3_vl_text": Architecture(
        "", _defaults(151936, 4096, 22016, 32, 32, 32, 128000, head_dim=128, attention_bias=False), _HEAD_NORMS
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM",
        _defaults(128256, 2048, 11008, 36, 16, 4, 32768, tied=True, attention_bias=False, mlp_bias=False)
        | {"use_sliding_window": False},
        _BIASED,
        dense=_mlp(bias="bias=mlp_bias"),
    ),
}
WRAPPERS = {  # model type of a vision-language model, whose class holds one of the above as `model.language_model`
    "gemma3": Wrapper("Gemma3ForConditionalGeneration", "gemma3_text", tied=True),
    "mistral3": Wrapper("Mistral3ForConditionalGeneration", "mistral", tied=True),
    "qwen2_5_vl": Wrapper("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text"),
    "qwen3_5": Wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "qwen3_5_moe": Wrapper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
    "qwen3_vl": Wrapper("Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
}
