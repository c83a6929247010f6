"""Policies that are loaded without the weights that will be FP8, and those weights, read from the checkpoint."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
import transformers.core_model_loading as loading
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl.trainer.utils import create_model_from_path

from testing import other_models, tiny_models
from testing.held import layout_for
from testing.hub_cache import COMMITS, NAME, write_repository
from trl_fp8.export.export import export_fp8
from trl_fp8.features.shared_base import stored_base as stored
from trl_fp8.features.shared_base.stored_base import load_without_base
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.recipe.recipe import recipe_for_model
from trl_fp8.sync.weight_stream import weight_stream
from trl_fp8.sync.writer import Writer


MODELS = {
    "tied": ("qwen3", {"tied": True}),
    "biases": ("qwen2", {}),
    "partly aligned": ("qwen3", {"intermediate_size": 192}),
    "experts": ("qwen3_moe", {}),
    "other names": ("mixtral", {}),
    "buffers": ("glm4_moe", {}),
}
UP = "model.layers.1.mlp.up_proj"


def from_pretrained(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def loaded(folder, recipe_for=recipe_for_model, **kwargs):
    return load_without_base(create_model_from_path, str(folder), recipe_for, **kwargs)


def same(a, b) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def settings(obj):
    """What an object remembers: the names of all, and what can be compared."""
    return {name: value if isinstance(value, str | int | set) else type(value) for name, value in vars(obj).items()}


@pytest.fixture
def in_fp8(checkpoint, tmp_path):
    """`in_fp8("qwen3", scale_format="fp32")` -> folder of an FP8 checkpoint with several files, and what it holds."""

    def make(architecture="qwen3", options=None, **flags):
        folder = checkpoint(architecture, **(options or {}))
        model = from_pretrained(folder)
        recipe = recipe_for_model(model, kv_cache_dtype="auto", **flags)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        made = export_fp8(model, tokenizer, tmp_path / "fp8", recipe=recipe, shard_bytes=200_000)
        return made, dict(weight_stream(model.named_parameters(), recipe)), model

    return make


def rewritten(folder, target, change):
    """A copy of a checkpoint of one file, with other tensors."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("model", MODELS)
def test_the_rest_of_a_model_is_as_usual_and_what_lacks_can_be_read(model, checkpoint, monkeypatch, caplog):
    architecture, options = MODELS[model]
    folder, read = checkpoint(architecture, **options), []
    materialize = loading.spawn_materialize
    monkeypatch.setattr(
        loading, "spawn_materialize", lambda *args, **kw: read.append(args[1]) or materialize(*args, **kw)
    )
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    policy, base = loaded(folder)
    assert not caplog.records
    elements = sum(torch.Size(tensor.get_shape()).numel() for tensor in read)
    usual = from_pretrained(folder)
    assert settings(policy) == settings(usual) and policy.name_or_path == folder
    assert settings(policy.config) == settings(usual.config)

    own, expected = policy.state_dict(), usual.state_dict()
    assert expected.keys() - own.keys() == base.recipe.fp8_tensors and own.keys() <= expected.keys()
    assert all(same(tensor, expected[name]) for name, tensor in own.items())
    assert elements == sum(
        tensor.numel() for tensor in {id(t): t for t in policy.state_dict(keep_vars=True).values()}.values()
    )
    buffers = dict(usual.named_buffers())
    assert all(same(buffer, buffers.pop(name)) for name, buffer in policy.named_buffers()) and not buffers
    assert not any(parameter.is_meta for parameter in policy.parameters())
    for name in base.recipe.fp8_tensors:
        module, _, parameter = name.rpartition(".")
        placeholder = getattr(policy.get_submodule(module), parameter)
        assert placeholder.isnan().all() and placeholder.shape == expected[name].shape
        assert placeholder.dtype == torch.bfloat16

    tensors = dict(base.tensors())
    assert tensors.keys() == base.recipe.fp8_tensors == recipe_for_model(usual).fp8_tensors
    assert all(same(tensor, expected[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("model", other_models.VISION)
def test_a_vision_language_model_is_read_under_whatever_names_it_is_published(model, tmp_path):
    usual = other_models.policy(model).bfloat16()
    usual.save_pretrained(tmp_path)
    policy, base = loaded(tmp_path)
    expected, own = usual.state_dict(), policy.state_dict()
    tensors = dict(base.tensors())
    assert tensors.keys() == base.recipe.fp8_tensors == expected.keys() - own.keys()
    assert all(same(tensor, expected[name]) for name, tensor in (own | tensors).items())


def test_a_dtype_that_is_asked_for_is_that_of_what_is_loaded_and_not_of_what_is_stored(checkpoint):
    policy, base = loaded(checkpoint("qwen3"), dtype="float32")
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    assert policy.get_submodule(UP).weight.dtype == torch.float32
    assert {tensor.dtype for _, tensor in base.tensors()} == {torch.bfloat16}


def test_a_snapshot_of_the_hub_is_read_at_its_revision(checkpoint, tmp_path, monkeypatch):
    """transformers resolves the files, and those are read."""
    write_repository([checkpoint("qwen3", seed=1), checkpoint("qwen3", seed=2)], tmp_path, monkeypatch)
    load = AutoModelForCausalLM.from_pretrained
    policy, base = load_without_base(load, NAME, recipe_for_model, revision=COMMITS[0])
    usual = from_pretrained(checkpoint("qwen3", seed=1))
    assert same(policy.lm_head.weight, usual.lm_head.weight) and policy.name_or_path == NAME
    assert same(dict(base.tensors())[f"{UP}.weight"], usual.get_submodule(UP).weight)


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("model", ["tied", "partly aligned", "experts", "other names"])
def test_codes_of_a_checkpoint_reach_an_engine_bit_for_bit(model, scales, in_fp8, monkeypatch):
    folder, expected, usual = in_fp8(*MODELS[model], scale_format=scales)
    assert len(list(folder.glob("*.safetensors"))) > 2
    policy, base = loaded(folder)
    recipe = base.recipe
    assert recipe.scale_format == scales and recipe.fp8_tensors == recipe_for_model(usual).fp8_tensors
    assert not hasattr(policy.config, "quantization_config")
    whole = usual.state_dict()
    assert all(same(tensor, whole[name]) for name, tensor in policy.state_dict().items())
    layout, opened = layout_for(usual, recipe), []
    monkeypatch.setattr(stored, "safe_open", lambda file, kind: opened.append(file) or safe_open(file, kind))
    writer = Writer(layout, recipe, one_by_one=True)
    writer.write([*base.tensors(), *policy.named_parameters()])
    assert writer.sums.keys() == layout.held.keys() == expected.keys() and not writer.unknown
    for name, held in layout.held.items():
        assert torch.equal(digest(held), digest(expected[name])), name
        assert torch.equal(writer.sums[name], digest(held)), name
    assert writer.fp8_weights == len(recipe.fp8_tensors)
    assert writer.inspect() == (0.0, {})
    assert opened == sorted(opened) and (recipe.has_experts or len(opened) == len(set(opened)))  # file by file


def test_scales_in_bf16_are_taken_exactly_and_what_is_no_code_is_kept_with_its_peers(in_fp8, tmp_path):
    folder, expected, usual = in_fp8()

    def change(tensors):
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name] = tensors[name].bfloat16()
        for peer in ("up", "gate"):
            del tensors[f"model.layers.1.mlp.{peer}_proj.weight_scale_inv"]
            tensors[f"model.layers.1.mlp.{peer}_proj.weight"] = torch.full((256, 128), 0.5, dtype=torch.bfloat16)

    policy, base = loaded(rewritten(folder, tmp_path / "changed", change))
    assert base.recipe.scale_format == "pow2"
    assert base.recipe.kept_modules[UP] == "in high precision in the checkpoint" and len(base.recipe.fp8_modules) == 12
    assert UP in base.recipe.quantization_config["modules_to_not_convert"]
    assert (policy.get_submodule(UP).weight == 0.5).all()
    tensors = dict(base.tensors())
    assert tensors.keys() == base.recipe.fp8_tensors
    for name, codes in tensors.items():
        assert same(codes.scale, expected[f"{name}_scale_inv"]) and codes.qdata.dtype == torch.float8_e4m3fn


def mixed(tensors):
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].bfloat16()


def head_as_noise(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)


def without_a_scale(tensors):
    del tensors[f"{UP}.weight_scale_inv"]


def scaled_in_rows(tensors):
    tensors[f"{UP}.weight_scale_inv"] = torch.ones(256, 1)


def ignoring(name):
    return lambda model: recipe_for_model(model, ignored_modules=(name,))


@pytest.mark.parametrize(
    "change, recipe_for, message",
    [
        (
            mixed,
            None,
            r"1 weights are FP8 .*mlp\.gate_proj\.weight \(vLLM fuses it with up_proj, which.*Set fp8_base=False",
        ),
        (head_as_noise, None, r"1 weights are FP8 .*lm_head\.weight \(output head\)"),
        (without_a_scale, None, r"1 of its tensors .*up_proj\.weight \(F8_E4M3, without weight_scale_inv\)\. Start"),
        (scaled_in_rows, None, r"1 of its tensors .*up_proj\.weight_scale_inv \(F32 \[256, 1\]\)\. Start"),
        (None, ignoring(UP), r"2 weights are FP8 .*up_proj\.weight \(listed in fp8_ignored_modules\).*name none"),
        (None, lambda model: recipe_for_model(model, weight_format="tensor"), "fp8_weight_format='tensor'.*Remove"),
    ],
)
def test_codes_that_cannot_be_taken_are_refused_by_name(change, recipe_for, message, in_fp8, tmp_path):
    folder, _, _ = in_fp8()
    folder = rewritten(folder, tmp_path / "changed", change) if change else folder
    with pytest.raises(ValueError, match=rf"fp8_base=True with model=.*{message}"):
        loaded(folder, recipe_for or recipe_for_model)


def test_scales_of_whole_weights_are_refused(in_fp8):
    folder, _, _ = in_fp8(weight_format="tensor")
    with pytest.raises(ValueError, match=r"14 of its tensors .*F8_E4M3, without weight_scale_inv\).*128x128 blocks"):
        loaded(folder)


def test_experts_in_fp8_where_an_engine_has_no_kernel_for_them_are_refused(in_fp8):
    folder, _, _ = in_fp8("qwen3_moe")
    with pytest.raises(ValueError, match=r"4 weights are FP8 .*experts\.down_proj \(vLLM has no kernel"):
        loaded(folder, lambda model: recipe_for_model(model, expert_kernels=False))


def renamed(tensors):
    tensors[f"{UP}.w"] = tensors.pop(f"{UP}.weight")


def integers(tensors):
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].to(torch.int8)


@pytest.mark.parametrize(
    "change, message",
    [
        (renamed, r"lacks 1 weights .*such as model\.layers\.1\.mlp\.up_proj\.weight; .*Load the model yourself"),
        (integers, r"up_proj\.weight \(I8 \[256, 128\]\).*Start from the high-precision checkpoint"),
    ],
)
def test_checkpoints_of_other_forms_are_refused_by_name(change, message, checkpoint, tmp_path):
    folder = rewritten(checkpoint("qwen3"), tmp_path / "changed", change)
    with pytest.raises(ValueError, match=message):
        loaded(folder)


def test_checkpoints_that_cannot_be_a_base_are_refused(checkpoint, tmp_path):
    folder = checkpoint("qwen3")
    with pytest.raises(ValueError, match="nothing of it is FP8.*Set fp8_base=False"):
        loaded(folder, lambda model: recipe_for_model(model, fp8_weights=False))
    with pytest.raises(ValueError, match="fp8_base=True with quantization_config=BitsAndBytesConfig"):
        loaded(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(ValueError, match="fp8_base=True with gguf_file='a.gguf'"):
        loaded(folder, gguf_file="a.gguf", config=tiny_models.config())
    pickled = tmp_path / "pickled"
    shutil.copytree(folder, pickled, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(from_pretrained(folder).state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"and not from pytorch_model\.bin\. Write the model anew"):
        loaded(pickled)
    model = tiny_models.on_meta()
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    model.config.save_pretrained(pickled)
    with pytest.raises(ValueError, match="quant_method is 'gptq'.*Start from the high-precision"):
        loaded(pickled)
    assert len(from_pretrained(folder).state_dict()) == 25  # transformers is what it was
