"""What a writer leaves in an engine's tensors, and how much work it is; the engine is a dict of tensors."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from testing import tiny_models
from testing.held import layout_for
from trl_fp8.quantization.codec import blockwise
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.quantization.codec.weights import quantize_fused
from trl_fp8.quantization.formats import BLOCKS
from trl_fp8.quantization.kernels import block_kernels as kernels
from trl_fp8.recipe.from_model import persistent_buffers
from trl_fp8.recipe.recipe import FP8Recipe, recipe_for_model
from trl_fp8.sync.audit import audit
from trl_fp8.sync.pieces import Joined, Layout, Piece, Span
from trl_fp8.sync.weight_stream import by_scale, weight_stream
from trl_fp8.sync.writer import Writer


def written(model, recipe, **options):
    """(writer, layout) after a write of the whole policy."""
    layout = layout_for(model, recipe)
    writer = Writer(layout, recipe, **options)
    writer.write(model.named_parameters(), persistent_buffers(model))
    return writer, layout


CASES = {
    "blocks": ("qwen3", {}, {}),
    "fp32 scales": ("qwen3", {}, {"scale_format": "fp32"}),
    "per tensor": ("qwen3", {"intermediate_size": 208}, {"weight_format": "tensor"}),
    "MXFP8": ("qwen3", {"intermediate_size": 224}, {"weight_format": "mxfp8"}),
    "experts": ("qwen3_moe", {}, {}),
    "other names": ("mixtral", {}, {}),
    "buffers": ("glm4_moe", {}, {}),
    "ragged head": ("qwen3", {"vocab_size": 61}, {}),
}


@pytest.mark.parametrize("together", [2**20, 2**14], ids=["stacked", "in parts"])
@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_an_engine_holds_what_a_checkpoint_would(case, dtype, one_by_one, together, monkeypatch):
    """And the checksums of what was sent are those of it."""
    monkeypatch.setattr(blockwise, "_ELEMENTS_AT_ONCE", together)
    architecture, options, flags = CASES[case]
    model = tiny_models.build(architecture, **options).to(dtype)
    recipe = recipe_for_model(model, **flags)
    writer, layout = written(model, recipe, one_by_one=one_by_one)
    expected = dict(weight_stream(model.named_parameters(), recipe, buffers=persistent_buffers(model)))
    assert writer.sums.keys() == expected.keys() == layout.held.keys() and not writer.unknown
    for name, held in layout.held.items():
        assert torch.equal(digest(held), digest(expected[name])), name
        assert torch.equal(writer.sums[name], digest(held)), name
    assert writer.fp8_weights == len(recipe.fp8_tensors)
    error, dead = writer.inspect()
    assert 0.02 < error < 0.03 and not dead


def in_codes(model, recipe):
    """A policy that holds codes where `recipe` has them."""
    for weights in by_scale(model.named_parameters(), recipe, recipe.fp8_tensors, copy=False):
        if recipe.fp8_tensors.issuperset(weights):
            rounded = [weight.detach().bfloat16() for weight in weights.values()]
            yield from zip(weights, quantize_fused(rounded, recipe.format, recipe.scale_format), strict=True)
        else:
            yield from weights.items()


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("case", ["fp32 scales", "per tensor", "experts", "other names"])
def test_codes_that_a_policy_holds_are_taken_as_they_are(case, one_by_one):
    architecture, options, flags = CASES[case]
    model = tiny_models.build(architecture, **options)
    recipe = recipe_for_model(model, **flags)
    _, expected = written(model, recipe)
    layout = layout_for(model, recipe)
    for name in recipe.fp8_tensors if case == "per tensor" else ():
        piece = layout.pieces[recipe.scale_name(name)]
        piece.module.tensor = piece.module.tensor.view(())  # as vLLM holds some
    writer = Writer(layout, recipe, one_by_one=one_by_one)
    writer.write(in_codes(model, recipe))
    assert torch.equal(layout.sums(), expected.sums())
    assert torch.equal(torch.stack([writer.sums[name] for name in layout.names]), layout.sums())
    assert writer.fp8_weights == len(recipe.fp8_tensors) and not writer.unknown
    assert writer.inspect() == (0.0, {})  # nothing was rounded


def test_a_rank_takes_its_part_of_codes_and_of_their_scales():
    (codes,) = quantize_fused([torch.randn(384, 256)], BLOCKS, "pow2")
    name, rows, columns = "model.layers.0.mlp.down_proj.weight", Span(128, 256, 384), Span(128, 128, 256)
    pieces = [
        Piece(name, SimpleNamespace(tensor=torch.zeros(256, 128).to(E4M3)), "tensor", E4M3, (rows, columns)),
        Piece(
            f"{name}_scale_inv",
            SimpleNamespace(tensor=torch.zeros(2, 1)),
            "tensor",
            torch.float32,
            (rows.blocks(128), columns.blocks(128)),
        ),
    ]
    layout = Layout(pieces)
    writer = Writer(layout, FP8Recipe(("model.layers.0.mlp.down_proj",)))
    writer.write([(name, codes)])
    parts = codes.qdata[128:, 128:], codes.scale[1:, 1:]
    for held, part in zip(layout.held.values(), parts, strict=True):
        assert torch.equal(digest(held), digest(part.contiguous())) and digest(held) != 0
    assert torch.equal(torch.stack(list(writer.sums.values())), layout.sums())


# q of four heads, k and v of one, which both ranks have; gate and up; each as the second of two ranks holds it
QKV = Joined((Span(256, 256, 512), Span(0, 128, 128), Span(0, 128, 128)))
FUSED = {
    "copied": ("self_attn.qkv_proj", {"sent": (QKV, None)}, [*range(256, 768)]),
    "views": (
        "mlp.gate_up_proj",
        {"sent": (None, Span(128, 128, 256), None), "equal": (0, 2)},
        [*range(128, 256), *range(384, 512)],
    ),
}


@pytest.mark.parametrize("is_fp8", [True, False])
@pytest.mark.parametrize("form", FUSED)
def test_a_rank_takes_its_rows_of_projections_that_are_one_weight(form, is_fp8):
    layer, where, rows = FUSED[form]
    name = f"model.layers.0.{layer}"
    weight = torch.nn.Parameter(torch.randn(768 if form == "copied" else 512, 256))
    part = weight.detach()[rows].bfloat16()
    expected = {f"{name}.weight": part}
    if is_fp8:
        (codes,) = quantize_fused([part], BLOCKS, "pow2")
        expected = {f"{name}.weight": codes.qdata, f"{name}.weight_scale_inv": codes.scale}
    pieces = []
    for each, tensor in expected.items():
        spans = where | {"sent": tuple(s and s.blocks(128) if each != f"{name}.weight" else s for s in where["sent"])}
        held = SimpleNamespace(tensor=torch.zeros_like(tensor))
        pieces.append(Piece(each, held, "tensor", tensor.dtype, **spans))
    layout = Layout(pieces)
    writer = Writer(layout, FP8Recipe((name,) if is_fp8 else ()))
    writer.write([(f"{name}.weight", weight)])
    for piece in pieces:
        assert torch.equal(piece.parameter.float(), expected[piece.name].float()), piece.name
        assert piece.is_copied == (form == "copied")
        with pytest.raises(ValueError, match="has size .* in dim"):
            piece.of_sent(torch.zeros(1024, 256))
    assert torch.equal(torch.stack([writer.sums[each] for each in layout.names]), layout.sums())


@pytest.mark.parametrize("part", ["qdata", "scale"])
def test_codes_and_scales_that_are_no_number_are_named(part):
    model = tiny_models.build()
    recipe, bad = recipe_for_model(model), "model.layers.1.mlp.up_proj.weight"
    policy = dict(in_codes(model, recipe))
    getattr(policy[bad], part)[1, 0] = torch.nan
    writer = Writer(layout_for(model, recipe), recipe)
    writer.write(policy.items())
    with pytest.raises(ValueError, match=r"parameters: model\.layers\.1\.mlp\.up_proj\.weight"):
        writer.inspect()


def test_a_parameter_that_changes_once_the_next_is_asked_for_was_written(monkeypatch):
    model = tiny_models.build(intermediate_size=208).bfloat16()
    recipe = recipe_for_model(model, weight_format="tensor")  # three weights share a scale
    _, expected = written(model, recipe)

    def as_zero3_gathers_them():
        for name, parameter in model.named_parameters():
            gathered = parameter.detach().clone()
            yield name, gathered
            gathered.fill_(7)

    layout = layout_for(model, recipe)
    Writer(layout, recipe, one_by_one=True).write(as_zero3_gathers_them())
    assert torch.equal(layout.sums(), expected.sums())
    Writer(layout, recipe).write(as_zero3_gathers_them())
    assert not torch.equal(layout.sums(), expected.sums())  # as it would be otherwise


def test_missing_and_unknown_tensors_are_named():
    model = tiny_models.build()
    recipe = recipe_for_model(model)
    layout = layout_for(model, recipe)
    few = [(name, p) for name, p in model.named_parameters() if "layers.1.mlp.up_proj" not in name]
    with pytest.raises(RuntimeError, match=r"lacks 1 weights .*model\.layers\.1\.mlp\.up_proj\.weight"):
        Writer(layout, recipe).write(few)
    writer = Writer(layout, recipe)
    writer.write([*model.named_parameters(), ("model.extra.weight", torch.ones(3))])
    assert writer.unknown == ["model.extra.weight"]


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(model) -> int:
    """Operators dispatched by one write."""
    recipe = recipe_for_model(model)
    writer = Writer(layout_for(model, recipe), recipe)
    with Operations() as counter:
        writer.write(model.named_parameters())
    return counter.count


def test_the_work_of_a_sync_does_not_grow_with_the_number_of_experts():
    few, many = (operations(tiny_models.build("qwen3_moe", num_experts=experts)) for experts in (4, 8))
    assert many < few + 8  # routers of another shape are summed up in another batch


def test_the_work_of_a_sync_of_small_layers_does_not_grow_with_their_number():
    """On CPU layers of one shape are quantized and summed up together; what is left are views."""
    two, eight = (operations(tiny_models.build(num_hidden_layers=layers)) for layers in (2, 8))
    assert eight - two < 6 * 7 * 5  # 6 layers more, 7 weights each


def test_near_dead_experts_neither_turn_to_nan_nor_vanish_unseen():
    model = tiny_models.build("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj[0] = 0
        experts.gate_up_proj[1] = 1e-30
        experts.gate_up_proj[2] = 1e-9  # small, and alive
        experts.down_proj[3, :, :64] = 1e-30  # half of a block: its other half decides the scale
    writer, layout = written(model, recipe_for_model(model))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    scale = layout.held[name + "_scale_inv"]
    values = layout.held[name].float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert values.isfinite().all() and (scale > 1e-15).all()  # as the kernels need
    assert (values[:2] == 0).all()
    assert torch.allclose(values[2], torch.tensor(1e-9), rtol=1 / 16)
    error, dead = writer.inspect()
    assert dead == {name: 4}  # two experts of two blocks each
    assert 0.02 < error < 0.03


def test_a_backward_through_codes_that_a_kernel_has_replaced_is_an_error(monkeypatch):
    """torch does not see what Triton writes, and a trainer's backward may still hold the engine's tensors."""
    monkeypatch.setattr(kernels, "quantize_blocks", lambda *args, **options: None)
    codes, scale = torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.ones(1, 1)
    kept = (torch.ones(1, 1, requires_grad=True) * scale).sum()  # saves what it was multiplied with
    blockwise._quantize_by_kernel([blockwise.Destination(torch.ones(128, 128), codes, scale)], "pow2", 1e-12)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_all_ranks_refuse_what_one_of_them_wrote():
    model = tiny_models.build()
    recipe = recipe_for_model(model)
    writer, _ = written(model, recipe)

    def another_saw(flags):
        assert flags.count_nonzero() == 0
        flags[0] = 1

    first = next(iter(writer.finite))
    with pytest.raises(ValueError, match=f"1 of 25 parameters: {first}[.] The engine refuses"):
        writer.inspect(another_saw)


def test_derived_tensors_are_recomputed_and_compared():
    """Here of a weight `[4, 8]`: its transpose, in FP32."""
    engine = torch.nn.Module()
    engine.weight = torch.nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16), requires_grad=False)
    engine.turned = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=False)
    sent, derived = Piece("a.weight", engine, "weight", torch.bfloat16), lambda: engine.weight.t().float()
    layout = Layout([Piece("a.turned", engine, "turned", torch.float32, derived=derived), sent])
    recipe = FP8Recipe((), kv_cache_dtype="auto")
    for number in (1.0, 2.0):
        writer = Writer(layout, recipe)
        writer.write([("a.weight", torch.full((4, 8), number))])
        assert engine.turned.eq(number).all() and not writer.unknown
        audit(layout, writer, None)
    writer = Writer(layout.part(["a.weight"]), recipe)
    writer.write([("a.weight", torch.full((4, 8), 3.0))])  # as a sync that leaves out what follows from it
    with pytest.raises(RuntimeError, match=r"never sent: a\.turned"):
        audit(layout, writer, None)
    writer = Writer(layout, recipe)
    writer.write([("a.weight", torch.full((4, 8), 3.0))])
    engine.turned[2, 1] = 0
    with pytest.raises(RuntimeError, match=r"1 tensors hold other bytes than were sent: a\.turned"):
        audit(layout, writer, None)


def test_two_tensors_of_an_engine_do_not_share_a_name():
    pieces = [Piece("a.weight", SimpleNamespace(tensor=torch.zeros(1)), "tensor", torch.float32) for _ in range(2)]
    with pytest.raises(RuntimeError, match="several tensors of an engine have one name: a.weight"):
        Layout(pieces)
