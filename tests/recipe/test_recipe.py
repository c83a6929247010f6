"""Which modules are FP8: alignment, fusion, tensor parallelism, names; and the plan's arithmetic."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig

from testing import other_models, published, tiny_models
from testing.tiny_models import on_meta
from trl_fp8.planning.plan import plan_for, plan_for_model
from trl_fp8.recipe.from_model import outline_of
from trl_fp8.recipe.messages import format_bytes
from trl_fp8.recipe.recipe import recipe_for, recipe_for_model


PROJECTIONS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
PROJECTIONS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
ALL = {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in PROJECTIONS}


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_every_aligned_projection_is_fp8_and_the_head_is_not(architecture):
    recipe = recipe_for_model(on_meta(architecture))
    assert set(recipe.fp8_modules) == ALL
    assert recipe.kept_modules == {"lm_head": "output head"}


@pytest.mark.parametrize("name", ["Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-35B-A3B"])
def test_hybrids_are_fp8_where_their_published_fp8_checkpoints_are(name):
    """Those keep embeddings, output head, routers, gates of shared experts, and all that is small of a delta net."""
    outline = published.outline(name)
    recipe = recipe_for(outline)
    kinds = {
        tensor.removesuffix(".weight").partition(".layers.")[2].partition(".")[2] for tensor in recipe.fp8_tensors
    }
    attention = {f"self_attn.{kind}_proj" for kind in "qkvo"}
    net = {"in_proj_qkvz"} if "Next" in name else {"in_proj_qkv", "in_proj_z"}
    mlp = {f"mlp.{kind}_proj" for kind in ("gate", "up", "down")}
    if outline.experts:
        mlp = {kind.replace("mlp", "mlp.shared_expert") for kind in mlp}
        mlp |= {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert kinds == attention | mlp | {f"linear_attn.{kind}" for kind in (*net, "out_proj")}
    gates = {kind for kind, why in recipe.kept_modules.items() if why == "gates of linear attention"}
    assert {kind.rpartition("_")[2] for kind in gates} == ({"ba"} if "Next" in name else {"a", "b"})
    assert outline.kv_layers == tuple(range(3, outline.layers, 4))
    assert recipe.sharing_scale(f"{sorted(gates)[0]}.weight") == (f"{sorted(gates)[0]}.weight",)


def test_gemms_of_a_hybrid_have_what_an_engine_fuses():
    outline = published.outline("Qwen/Qwen3.5-27B")
    net = {(2 * 2048 + 2 * 6144, 5120): 48, (5120, 6144): 48 + 16}  # q, k, v, z; out_proj, and o_proj
    attention = {(2 * 24 * 256 + 2 * 4 * 256, 5120): 16}  # q makes a gate, too
    mlp = {(2 * 17408, 5120): 64, (5120, 17408): 64}
    assert recipe_for(outline).gemms(outline) == net | attention | mlp
    halved = recipe_for(outline, tensor_parallel_size=2)
    assert {(2048 + 6144, 5120), (5120, 3072), (5120, 8704)} < halved.gemms(outline).keys()


def test_each_part_of_a_delta_nets_projection_has_to_be_aligned():
    def kept(tp_size=1, **text):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(num_hidden_layers=4, **text))
        recipe = recipe_for_model(model, tensor_parallel_size=tp_size)
        return {name.rpartition(".")[2]: why for name, why in recipe.kept_modules.items() if "layers.0." in name}

    gates = dict.fromkeys(("in_proj_b", "in_proj_a"), "gates of linear attention")
    assert kept() == kept(tp_size=16) == gates  # 2048 rows of q, as many of k, 4096 of v and of z
    assert kept(tp_size=32) == gates | {
        "in_proj_qkv": "64 x 4096 per rank at tensor parallel size 32 is not a multiple of 128 x 128",
        "in_proj_z": "vLLM fuses it with in_proj_qkv, which stays BF16",
    }
    odd = kept(linear_num_key_heads=1, linear_key_head_dim=64)  # q and k together fill a block
    assert odd["in_proj_qkv"] == "64 x 4096 is not a multiple of 128 x 128" and "out_proj" not in odd


def test_misaligned_layers_are_kept_with_their_fused_peers_and_the_reason():
    recipe = recipe_for_model(on_meta(intermediate_size=192))
    assert {name.rpartition(".")[2] for name in recipe.fp8_modules} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert recipe.kept_modules["model.layers.0.mlp.down_proj"] == "128 x 192 is not a multiple of 128 x 128"
    one_kv_head = recipe_for_model(on_meta(num_key_value_heads=1))  # k, v have 64 rows; q alone would be aligned
    assert one_kv_head.kept_modules["model.layers.1.self_attn.q_proj"] == "vLLM fuses it with k_proj, which stays BF16"
    assert "model.layers.1.self_attn.o_proj" in one_kv_head.fp8_modules


@pytest.mark.parametrize(
    "tp_size, fp8",
    [(1, {"q", "k", "v", "o", "gate", "up", "down"}), (2, {"o", "gate", "up", "down"}), (4, set())],
)
def test_tensor_parallel_shards_decide(tp_size, fp8):
    """q 256, k and v 128 rows of 2 heads; o 256 columns; gate, up 256 rows; down 256 columns."""
    model = on_meta()
    if not fp8:
        error = (
            r"^vllm_tensor_parallel_size=4: split over 4 GPUs, no layer of Qwen3ForCausalLM has shards that fill "
            r"whole 128x128 blocks. Set vllm_tensor_parallel_size=1 or 2, or fp8_weight_format='tensor'.$"
        )
        with pytest.raises(ValueError, match=error):
            recipe_for_model(model, tensor_parallel_size=tp_size)
        return
    recipe = recipe_for_model(model, tensor_parallel_size=tp_size)
    assert {name.rpartition(".")[2].removesuffix("_proj") for name in recipe.fp8_modules} == fp8


def test_a_model_without_any_fp8_layer_is_refused_with_a_reason_for_each_kind_of_layer():
    """A smaller tensor parallel size is not offered where what is ignored leaves nothing at any size."""
    error = (
        r"^fp8_weights=True, but none of the 15 linear layers of Qwen3ForCausalLM can be FP8: q_proj, k_proj, v_proj, "
        r"o_proj, gate_proj, up_proj, down_proj \(listed in fp8_ignored_modules\); lm_head \(output head\). Set "
        r".*fp8_weights=False, or take another model.$"
    )
    for tp_size in (1, 4):
        with pytest.raises(ValueError, match=error):
            recipe_for_model(on_meta(), tensor_parallel_size=tp_size, ignored_modules=tuple(sorted(ALL)))


def test_kv_heads_are_replicated_beyond_their_number():
    model = on_meta(head_dim=128, num_attention_heads=8, num_key_value_heads=2, intermediate_size=1024)
    recipe = recipe_for_model(model, tensor_parallel_size=4)  # one kv head of 128 rows on two ranks each
    assert set(recipe.fp8_modules) == ALL


@pytest.mark.parametrize("tp_size, part", [(1, 10 * 128), (2, 5 * 128), (4, None), (10, 128)])
def test_each_projection_in_a_weight_has_to_be_whole_blocks(tp_size, part):
    """phi-4 has 40 heads of q and 10 of k and v, of 128 rows each, and an MLP of 17920 = 140 * 128."""
    outline = published.outline("microsoft/phi-4")
    recipe = recipe_for(outline, tensor_parallel_size=tp_size)
    named = "model.layers.0.self_attn.qkv_proj" in recipe.fp8_modules
    assert named == (part is not None) and "model.layers.0.mlp.gate_up_proj" in recipe.fp8_modules
    if named:
        assert recipe.gemms(outline)[6 * part, 5120] == 40
        assert recipe.sharing_scale("model.layers.0.self_attn.qkv_proj.weight") == (
            "model.layers.0.self_attn.qkv_proj.weight",
        )
    else:
        assert recipe.kept_modules["model.layers.0.self_attn.qkv_proj"].startswith("320 x 5120 per rank")


def test_unannounced_fused_layers_are_ignored_by_the_fused_name_too():
    outline = outline_of(other_models.policy("stablelm"))
    ignored = ("model.layers.0.self_attn.k_proj",)
    kept = recipe_for(outline, ignored_modules=ignored).quantization_config["modules_to_not_convert"]
    assert "model.layers.0.self_attn.qkv_proj" in kept and "model.layers.0.mlp.gate_up_proj" not in kept


def test_a_model_with_nothing_to_quantize_is_an_error_that_says_why():
    small = on_meta(hidden_size=64, intermediate_size=96)
    with pytest.raises(ValueError) as error:
        recipe_for_model(small)
    message = str(error.value)
    assert "fp8_weights=True" in message and "256 x 64 is not a multiple" in message and "fp8_weights=False" in message
    assert recipe_for_model(small, fp8_weights=False).fp8_modules == ()


def test_ignored_modules_are_exact_and_take_their_fused_peers_along():
    recipe = recipe_for_model(on_meta(), ignored_modules=("model.layers.0.mlp.up_proj",))
    assert recipe.kept_modules["model.layers.0.mlp.gate_proj"] == "vLLM fuses it with up_proj, which stays BF16"
    assert "model.layers.1.mlp.gate_proj" in recipe.fp8_modules
    with pytest.raises(ValueError, match=r"\['up_proj', 'model.layers.9.mlp.up_proj'\] are not linear layers"):
        recipe_for_model(on_meta(), ignored_modules=("up_proj", "model.layers.9.mlp.up_proj"))


MOE = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe")


@pytest.mark.parametrize("architecture", MOE)
def test_experts_are_fp8_together_and_routers_never(architecture):
    recipe = recipe_for_model(on_meta(architecture))
    assert recipe.fp8_experts == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert "model.layers.1.mlp.experts.down_proj" in recipe.fp8_tensors
    assert {recipe.kept_modules[f"model.layers.{layer}.mlp.gate"] for layer in (0, 1)} == {"router"}
    # q, k, v, o of two layers, and three of each shared expert, but not the gate in front of it
    assert len(recipe.fp8_modules) == (14 if architecture == "qwen2_moe" else 8)
    assert ("model.layers.0.mlp.shared_expert_gate" in recipe.kept_modules) == (architecture == "qwen2_moe")


def test_experts_stay_in_high_precision_where_the_engine_has_no_kernel_and_the_plan_says_so():
    model = on_meta("qwen3_moe")
    recipe = recipe_for_model(model, expert_kernels=False)
    assert recipe.fp8_experts == () and len(recipe.fp8_modules) == 8 and recipe.has_experts
    assert "model.layers.0.mlp.experts" in recipe.quantization_config["modules_to_not_convert"]
    assert "vLLM has no kernel for FP8 experts on CPU" in plan_for_model(model, recipe).table()


@pytest.mark.parametrize(
    "options, flags, reason",
    [
        ({"moe_intermediate_size": 192}, {}, "192 x 128, not multiples of 128"),
        (
            {"head_dim": 128, "hidden_size": 256},
            {"tensor_parallel_size": 2},
            "64 x 256 per rank at tensor parallel size 2",
        ),
        ({}, {"fp8_weights": False}, "fp8_weights is off"),
        ({}, {"ignored_modules": ("model.layers.0.mlp.experts",)}, "listed in fp8_ignored_modules"),
    ],
)
def test_experts_that_cannot_be_fp8_are_kept_with_the_reason(options, flags, reason):
    recipe = recipe_for_model(on_meta("qwen3_moe", **options), **flags)
    assert reason in recipe.kept_modules["model.layers.0.mlp.experts"]
    assert "model.layers.0.mlp.experts" not in recipe.fp8_experts


def test_experts_of_another_layout_are_kept():
    model = on_meta("qwen3_moe")
    model.model.layers[0].mlp.experts.is_transposed = True
    recipe = recipe_for_model(model)
    assert "another layout" in recipe.kept_modules["model.layers.0.mlp.experts"]
    assert recipe.fp8_experts == ("model.layers.1.mlp.experts",)


def test_mixtral_has_the_engines_names_in_what_the_engine_reads():
    recipe = recipe_for_model(on_meta("mixtral"))
    assert "model.layers.0.block_sparse_moe.gate" in recipe.quantization_config["modules_to_not_convert"]
    assert (
        recipe.engine_name("model.layers.0.mlp.experts.gate_up_proj") == "model.layers.0.block_sparse_moe.experts.w13"
    )
    assert recipe_for_model(on_meta("olmoe")).engine_name("model.layers.0.mlp.gate") == "model.layers.0.mlp.gate"


def test_quantization_config_is_what_vllm_reads():
    recipe = recipe_for_model(on_meta(intermediate_size=192))
    config = recipe.quantization_config
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]
    assert config["modules_to_not_convert"] == list(recipe.kept_modules)
    kv_only = recipe_for_model(on_meta(), fp8_weights=False).quantization_config
    assert set(kv_only["modules_to_not_convert"]) == ALL | {"lm_head"}
    assert recipe_for_model(on_meta(), fp8_weights=False, kv_cache_dtype="auto").quantization_config is None


def test_peft_names_are_those_of_the_base_model():
    plain = tiny_models.build()
    base = recipe_for_model(plain)
    wrapped = get_peft_model(plain, LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    assert recipe_for_model(wrapped) == base
    before, after = plan_for_model(wrapped, base), plan_for_model(wrapped.unload(), base)
    assert before.rows == after.rows


def test_plan_adds_up():
    model = on_meta()
    plan = plan_for_model(model, recipe_for_model(model))
    parameters = dict(model.named_parameters())
    total = sum(p.numel() for p in parameters.values())
    fp8 = sum(p.numel() for name, p in parameters.items() if name.removesuffix(".weight") in ALL)
    assert plan.parameters == total and plan.fp8_parameters == fp8
    assert plan.bytes_before == 2 * total
    assert plan.bytes_after == 2 * total - fp8 + 4 * fp8 // 128**2
    assert plan.cache.token_bytes(fp8=False) == 2 * 2 * 2 * 2 * 64 and plan.cache.token_bytes(fp8=True) * 2 == 1024
    assert sum(row.count for row in plan.rows) == len(parameters)


def test_plan_table_shows_what_is_kept_and_why():
    model = on_meta(intermediate_size=192)
    table = plan_for_model(model, recipe_for_model(model)).table()
    assert "model.layers.*.mlp.down_proj" in table and "192 is not a multiple of 128" in table
    assert "output head" in table and "2.0x the tokens" in table and "of parameters fp8" in table
    off = plan_for_model(model, recipe_for_model(model, kv_cache_dtype="auto")).table()
    assert "KV cache: the model's dtype" in off


def test_plan_of_a_mixture_of_experts_counts_the_experts():
    model = on_meta("qwen3_moe")
    plan = plan_for_model(model, recipe_for_model(model))
    experts = [row for row in plan.rows if "experts" in row.pattern]
    elements = 2 * 4 * 3 * 128 * 128
    assert sum(row.parameters for row in experts) == elements
    assert all(row.precision == "fp8" and row.reason == "" for row in experts)
    assert sum(row.bytes_after for row in experts) == elements + 4 * elements // 128**2
    assert [row.reason for row in plan.rows if row.pattern.endswith("mlp.gate")] == ["router"]


def test_plan_of_qwen3_30b_a3b_from_its_config_alone():
    """The memory of the real shapes, against figures worked out from the published config by hand."""
    outline = published.outline("Qwen/Qwen3-30B-A3B")
    plan = plan_for(outline, recipe_for(outline))
    experts = 48 * 128 * 3 * 768 * 2048
    attention = 48 * (2 * 4096 * 2048 + 2 * 512 * 2048)
    assert plan.parameters == 30_532_122_624  # the published count
    assert plan.fp8_parameters == experts + attention
    assert plan.bytes_before - plan.bytes_after == (experts + attention) * (1 - 4 / 128**2)
    table = plan.table()
    assert "128 x 1536 x 2048" in table and "29.0 GiB" in table and "97.9% of parameters fp8" in table
    split = plan_for(outline, recipe_for(outline, tensor_parallel_size=4))
    assert "192 x 2048 per rank at tensor parallel size 4, not multiples of 128" in split.table()


@pytest.mark.parametrize(
    "count, text", [(512, "512 B"), (1536, "1.5 KiB"), (5 * 2**20, "5.0 MiB"), (2**31, "2.0 GiB")]
)
def test_bytes_read_well(count, text):
    assert format_bytes(count) == text


def test_skipped_kv_layers_are_checked_counted_and_shown():
    model = on_meta()
    recipe = recipe_for_model(model, kv_cache_skip_layers=(1,))
    plan = plan_for_model(model, recipe)
    assert recipe.kv_cache_skip_layers == (1,)
    per_layer = 2 * 2 * 64  # k and v, 2 heads of 64
    assert plan.cache.token_bytes(fp8=False) == 2 * per_layer * 2
    assert plan.cache.token_bytes(fp8=True) == per_layer + 2 * per_layer
    assert "layers [1] stay in BF16" in plan.table()
    with pytest.raises(ValueError, match=r"layers \[2, 5\], but the model's layers are 0 .. 1"):
        recipe_for_model(model, kv_cache_skip_layers=(2, 5))
    with pytest.raises(ValueError, match="all 2 layers.*kv_cache_dtype='auto'"):
        recipe_for_model(model, kv_cache_skip_layers=(0, 1))


def qwen3_next_on_meta(**options):
    with torch.device("meta"):
        return outline_of(AutoModelForCausalLM.from_config(Qwen3NextConfig(num_hidden_layers=8, **options)))


def test_layers_without_a_kv_cache_are_neither_skipped_nor_counted():
    outline = qwen3_next_on_meta()
    plan = plan_for(outline, recipe_for(outline, kv_cache_skip_layers=(3,)))
    per_layer = 2 * 2 * 256
    assert plan.cache.token_bytes(fp8=False) == 2 * per_layer * 2
    assert plan.cache.token_bytes(fp8=True) == per_layer + 2 * per_layer
    assert "layers [3] stay in BF16; 6 layers cache none" in plan.table()
    with pytest.raises(ValueError, match=r"layers \[0, 1\], which cache no keys.*The layers that do are \[3, 7\]"):
        recipe_for(outline, kv_cache_skip_layers=(0, 1, 3))
    with pytest.raises(ValueError, match="all 2 layers.*kv_cache_dtype='auto'"):
        recipe_for(outline, kv_cache_skip_layers=(3, 7))


def test_an_fp8_kv_cache_of_a_model_that_caches_no_keys_and_values_is_refused():
    outline = qwen3_next_on_meta(layer_types=["linear_attention"] * 8)
    with pytest.raises(ValueError, match="'fp8', but none of the 8 layers of .* caches keys.*kv_cache_dtype='auto'"):
        recipe_for(outline)
    plan = plan_for(outline, recipe_for(outline, kv_cache_dtype="auto"))
    assert "KV cache: the model's dtype, 0 B per token" in plan.summary()


def test_parts_of_a_vision_language_model_have_names_of_their_own_in_an_engine():
    recipe = recipe_for_model(other_models.policy("gemma3"))
    layer = "layers.0.self_attn.q_proj.weight"
    held = {
        f"model.language_model.{layer}": f"language_model.model.{layer}",
        "lm_head.weight": "language_model.lm_head.weight",
        "model.multi_modal_projector.mm_soft_emb_norm.weight": "multi_modal_projector.mm_soft_emb_norm.weight",
        "model.vision_tower.post_layernorm.bias": "vision_tower.vision_model.post_layernorm.bias",
    }
    assert {name: recipe.engine_name(name) for name in held} == held
    assert recipe_for_model(on_meta("qwen3")).engine_name(f"model.{layer}") == f"model.{layer}"
