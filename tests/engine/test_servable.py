"""What `trl_fp8.recipe.servable` says of a model type is what vLLM's class does with its tensors; no engine starts."""

import socket
from math import prod

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from testing import other_models
from trl_fp8.engine.vllm.environment import configs_restored, policy_class_unchanged
from trl_fp8.engine.vllm.layout import _dealt, _joined, engine_layout
from trl_fp8.engine.vllm.platform import Cpu
from trl_fp8.export.export import published
from trl_fp8.recipe import names, servable
from trl_fp8.recipe.families import FAMILIES, family_of, types_with
from trl_fp8.recipe.from_model import outline_of, persistent_buffers
from trl_fp8.recipe.outline import layer_caches
from trl_fp8.recipe.recipe import FP8Recipe, recipe_for_model
from trl_fp8.sync.audit import audit
from trl_fp8.sync.pieces import Piece
from trl_fp8.sync.policy_checks import require_same_tensors
from trl_fp8.sync.weight_stream import weight_stream
from trl_fp8.sync.writer import Writer
from trl_fp8.upstream.versions import installed_vllm
from trl_fp8.upstream.vllm import engine_class


# Mixtures of experts whose class of vLLM asks no config for an activation: it computes SiLU
ROUTED = ("mixtral", "olmoe", "qwen3_moe")
# model type -> what goes wrong without the refusal
REFUSED = {
    "axk1": "under names",
    "bloom": "other bytes",
    "falcon": "other bytes",
    "falcon_h1": "packed_modules_mapping",
    "gemma3n_text": "under names",
    "glm_moe_dsa": "Sparse Attention",
    "gpt2": "under names",
    "gpt_neox": "under names",
    "hy_v4": "sparse attention",
    "hrm_text": "packed_modules_mapping",
    "jamba": "under names",
    "laguna": "under names",
    "lfm2": "block_dim",
    "lfm2_moe": "packed_modules_mapping",
    "llama4_text": "in another form",
    "minicpm3": "under names",
    "nemotron_h": "packed_modules_mapping",
    "olmo_hybrid": "set_allocator",
} | dict.fromkeys(installed_vllm().refused, "under names")
WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
# model type, what its config says, what goes wrong without the refusal
SETTINGS = [
    *[
        (kind, {"hidden_act": "relu"}, "Unsupported activation")
        for kind, family in FAMILIES.items()
        if family.activations == ("silu",) and kind not in ROUTED
    ],
    ("apertus", {"hidden_act": "silu"}, "Unsupported activation"),
    ("arcee", {"hidden_act": "silu"}, "Unsupported activation"),
    ("gemma", {"hidden_activation": "silu"}, "is not supported for Gemma"),
    ("gemma2", {"hidden_activation": "gelu"}, "Gemma2 uses `gelu_pytorch_tanh`"),
    ("gemma3_text", {"hidden_activation": "relu"}, "'relu' is not supported"),
    *[(kind, WINDOWS, "Sliding window for some but all layers") for kind in types_with("one_window")],
]
SETTINGS = [setting for setting in SETTINGS if not family_of(setting[0]).by_transformers]


@pytest.fixture(scope="module", autouse=True)
def parallel_state():
    """What vLLM's modules ask for while they are built. Its registry would start a process for each class."""
    with (
        Cpu().ready(FP8Recipe((), kv_cache_dtype="auto")),
        configs_restored(),
        pytest.MonkeyPatch.context() as patch,
        set_current_vllm_config(VllmConfig()),
        socket.socket() as free,
    ):
        free.bind(("127.0.0.1", 0))
        AttentionBackendEnum.CPU_ATTN.clear_override()  # classes as on a GPU: the reference knows fewer attentions
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        free.close()
        patch.setattr(registry, "_run_in_subprocess", lambda fn: fn())
        init_distributed_environment(1, 0, address, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        yield
    destroy_model_parallel()
    destroy_distributed_environment()


def built(policy, folder):
    """(recipe, vLLM's class for `policy` as an engine would build it, its config), nothing loaded yet."""
    policy.config.save_pretrained(folder)
    some = any(name.endswith("self_attn.o_proj") for name in outline_of(policy).linears)
    some &= not family_of(policy.config.model_type).scales_renamed
    recipe = recipe_for_model(policy, kv_cache_dtype="auto", expert_kernels=False, fp8_weights=some)
    sizes = {"max_num_seqs": 8, "max_model_len": 64}
    arguments = Cpu().arguments(recipe, policy.config, **sizes)
    arguments = {"model": str(folder), "skip_tokenizer_init": True, "model_impl": "vllm"} | sizes | arguments
    with configs_restored():
        config = EngineArgs(**arguments).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), policy_class_unchanged(recipe):
        return recipe, initialize_model(vllm_config=config, model_config=config.model_config), config


@torch.no_grad()
def deliver(policy, folder) -> None:
    """Send the policy to vLLM's class, through the checks of an engine that is built. Raises whatever goes wrong."""
    recipe, engine, config = built(policy, folder)
    for name, _ in list(engine.named_parameters()):  # vLLM takes KV scales away again after it has loaded a checkpoint
        module, _, attribute = name.rpartition(".")
        if attribute in ("q_scale", "k_scale", "v_scale", "prob_scale"):
            delattr(engine.get_submodule(module), attribute)
    finish(engine)  # as after dummy weights
    buffers = dict(persistent_buffers(policy))
    layout = engine_layout(engine, recipe.linears, {recipe.engine_name(name) for name in buffers})
    require_same_tensors(policy, recipe, layout)
    sent = dict(weight_stream(policy.named_parameters(), recipe, buffers=buffers.items()))
    with set_current_vllm_config(config):
        engine.load_weights(published(sent.items(), recipe))
    finish(engine)
    loaded = layout.sums()
    writer = Writer(layout, recipe)
    writer.write(policy.named_parameters(), buffers.items())
    audit(layout, writer, None)
    assert torch.equal(layout.sums(), loaded), "other bytes than vLLM's loader put there"
    held = {names.held_name(name, recipe.model_type, recipe.decoder): tensor for name, tensor in sent.items()}
    for name, piece in layout.pieces.items():
        if piece.derived is not None:  # its sum is compared above
            continue
        assert piece.dtype != torch.float32 or held[name].dtype == torch.float32, f"a checkpoint rounds {name}"
        ours, theirs = (part.contiguous().view(-1).view(torch.uint8) for part in _both(piece, held[name]))
        assert torch.equal(ours, theirs), "other bytes"


def finish(engine) -> None:
    """What vLLM derives once a checkpoint is loaded."""
    for module in engine.modules():
        if isinstance(module, MLAAttention):
            module.process_weights_after_loading(torch.bfloat16)


@pytest.mark.parametrize("sizes, ranks", [((128, 128, 256), 2), ((64, 64, 192), 4), ((6, 6, 6), 3), ((5, 5, 7), 1)])
def test_shards_of_fused_parts_are_those_of_vllms_loader(sizes, ranks):
    sent = torch.randn(sum(sizes), 1, 4)
    for rank in range(ranks):
        own = [size // ranks for size in sizes]
        expected = torch.zeros(sum(own), 1, 4)
        mamba_v2_sharded_weight_loader([(size, 0, False) for size in sizes], ranks, rank)(expected, sent)
        span = _joined(_dealt(own, rank, ranks))
        piece = Piece("conv1d", None, "weight", torch.float32, sent=(span,))
        assert torch.equal(piece.of_sent(sent), expected) and span.size == len(expected)
        with pytest.raises(ValueError, match="conv1d has"):
            piece.of_sent(sent[1:])


def _both(piece, sent):
    return piece.of_sent(sent).to(piece.dtype), piece.of_engine()


@pytest.mark.parametrize("model_type", types_with("tested"))
def test_tensors_of_accepted_models_arrive_under_their_names(model_type, tmp_path):
    if model_type.startswith("qwen3_5") or model_type in other_models.VISION:  # as vLLM's files of these classes do
        pytest.importorskip("torchvision")
    policy = other_models.policy(model_type)
    outline = outline_of(policy)  # a plan does not ask vLLM, which takes seconds to import
    assert servable.why_not_servable(outline) is servable.why_not_servable(outline, engine_class) is None
    deliver(policy, tmp_path)


@pytest.mark.parametrize("model_type", REFUSED)
def test_tensors_of_refused_models_would_not_arrive(model_type, tmp_path):
    policy = other_models.policy(model_type)
    with pytest.raises(ValueError, match=f"type '{model_type}' cannot be served") as error:
        servable.require_servable(outline_of(policy), engine_class)
    assert servable.REMEDY in str(error.value) and "under names" not in str(error.value)
    with pytest.raises(Exception) as later:
        deliver(policy, tmp_path)
    assert REFUSED[model_type] in f"{type(later.value).__name__}: {later.value}"


@pytest.mark.parametrize(
    "model_type, said, wrong", SETTINGS, ids=[f"{kind}-{' '.join(said)}" for kind, said, _ in SETTINGS]
)
def test_configs_are_refused_that_vllms_class_refuses(model_type, said, wrong, tmp_path):
    policy = other_models.policy(model_type, **said)
    with pytest.raises(ValueError, match="its config (has the activation|gives some layers)"):
        servable.require_servable(outline_of(policy), engine_class)
    with pytest.raises(Exception) as later:
        built(policy, tmp_path)
    assert wrong in str(later.value)


@pytest.mark.parametrize("model_type", ROUTED)
def test_experts_that_would_compute_another_activation_are_refused(model_type, tmp_path):
    policy = other_models.policy(model_type, hidden_act="relu")
    with pytest.raises(ValueError, match="activation 'relu', and vLLM's class computes silu"):
        servable.require_servable(outline_of(policy), engine_class)
    _, engine, _ = built(policy, tmp_path)
    assert {module.activation.value for module in engine.modules() if isinstance(module, RoutedExperts)} == {"silu"}


def test_the_state_of_a_gated_delta_net_is_as_large_as_vllm_makes_it():
    config = Qwen3NextConfig(num_hidden_layers=1, layer_types=["linear_attention"])
    sizes = [config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim]
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        1, *sizes, config.linear_value_head_dim, config.linear_conv_kernel_dim
    )
    dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype(torch.bfloat16, "auto", "auto")
    held = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    assert [cache.state_bytes for cache in layer_caches(config.to_dict(), 1, 2, 256)] == [held]


@pytest.mark.parametrize("family", [names.TRANSFORMERS, names.MIXTRAL], ids=["transformers", "mixtral"])
def test_experts_are_called_what_vllms_loader_calls_them(family):
    (gate, up), (down,) = family.published
    mapping = RoutedExperts.build_expert_params_mapping(
        gate, down, up, 2, include_fused=True, routed_experts_prefix=""
    )
    holds = {loaded: parameter for parameter, loaded, *_ in mapping}
    for held, sent in zip(names.HELD, family.fused, strict=True):
        assert holds[f"experts.{sent}"] == f"experts.{held}_weight" and names.sent_expert_name(held, gate) == sent
        for name in names.published_names(f"model.experts.{sent}", "_scale_inv"):
            assert holds[name.format(1).removeprefix("model.").removesuffix("weight")] == f"experts.{held}_"


def test_every_listed_model_type_is_tried():
    # vLLM cannot read the config that transformers writes; it renames transformers' class of DeepSeek-V3
    untested = {"deepseek_v4", "deepseek_v32"}
    assert set(types_with("refused")) - untested <= set(REFUSED)


def test_the_fallback_is_known_by_model_type_and_by_class():
    backed = {
        model_type
        for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if isinstance(name, str) and (engine_class((name,)) or "").startswith("Transformers")
    }
    assert set(types_with("by_transformers")) == backed
    assert engine_class(("NanbeigeForCausalLM",)) == "TransformersForCausalLM"  # brings its own code


def test_the_fallback_leaves_the_policys_class_as_it_is(tmp_path):
    policy, twin = other_models.policy("olmo2"), other_models.policy("olmo2")
    expected = policy(input_ids=torch.arange(9)[None]).logits
    _, engine, _ = built(policy, tmp_path)
    theirs = type(engine.model)
    assert issubclass(theirs, TorchCompileWithNoGuardsWrapper) and issubclass(theirs, type(policy.model))
    assert not isinstance(policy.model, TorchCompileWithNoGuardsWrapper)
    for model in (policy, twin, other_models.policy("olmo2")):
        assert torch.equal(model(input_ids=torch.arange(9)[None]).logits, expected)


def test_a_class_is_found_as_vllm_finds_it():
    assert engine_class(("Qwen3ForCausalLM",)) == "Qwen3ForCausalLM"
    assert engine_class(("Nonsense", "InternLM3ForCausalLM")) == "LlamaForCausalLM"
    assert engine_class(("Nonsense",)) is None
