"""Each way to compute another model is found, and named; a policy and an engine that agree are left alone."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from testing import tiny_models
from testing.fake_engine import followed
from trl_fp8.features.one_forward import values
from trl_fp8.features.one_forward.same_model import Witness, compare_angles, compare_window
from trl_fp8.features.one_forward.values import Findings
from trl_fp8.quantization.codec.blockwise import dequantize_weight, quantize_activation, quantize_weight


LAYER = "model.layers.1"
LONGEST = 64
IDS = torch.tensor([[4 + 7 * p % 50 for p in range(24)]])


def gelu_for_silu(engine_model):
    engine_model.get_submodule(f"{LAYER}.mlp").act_fn = nn.GELU()


def gate_for_up(engine_model):
    engine_model.get_submodule(f"{LAYER}.mlp").act_fn = ActsOnUp()


class ActsOnUp(nn.Module):
    """`self(gate) * up` is silu(up) * gate."""

    def forward(self, gate):
        return Product(gate)


class Product:
    def __init__(self, gate):
        self.gate = gate

    def __mul__(self, up):
        return nn.functional.silu(up) * self.gate


def another_eps(engine_model):
    engine_model.get_submodule(f"{LAYER}.input_layernorm").variance_epsilon = 1e-5


def half_of_the_channels(engine_model):
    rotary = engine_model.model.rotary_emb
    rotary.inv_freq[len(rotary.inv_freq) // 2 :] = 0


def another_base(engine_model):
    engine_model.model.rotary_emb.inv_freq.pow_(1.01)


def another_window(engine_model):
    engine_model.get_submodule(f"{LAYER}.self_attn").sliding_window = 16


def window_beyond_the_text(engine_model):
    engine_model.get_submodule(f"{LAYER}.self_attn").sliding_window = 40


def another_scaling(engine_model):
    engine_model.get_submodule(f"{LAYER}.self_attn").scaling = 0.1


def scaled_logits(engine_model):
    engine_model.config.logit_scale = 1.1


ATTENTION = f"{LAYER}.self_attn"
BOTH = ["model.layers.0.self_attn", ATTENTION]
BROKEN = [
    (None, [], ""),
    (gelu_for_silu, [f"{LAYER}.mlp"], "activation, act(gate) * up (error "),
    (gate_for_up, [f"{LAYER}.mlp"], "activation, act(gate) * up (error "),
    (another_eps, [f"{LAYER}.input_layernorm"], "eps ("),
    (half_of_the_channels, BOTH, "rotary angles (from position 1 on)"),
    (another_base, BOTH, "rotary angles (from position "),
    (another_window, [ATTENTION], "window of attention (a query at position 16 sees 17 keys, the engine's 16)"),
    (
        window_beyond_the_text,
        [ATTENTION],
        "window of attention (a query at position 40 sees 41 keys, the engine's 40)",
    ),
    (another_scaling, [ATTENTION], "scaling of scores (the policy's 0.125, the engine's 0.1)"),
    (scaled_logits, ["lm_head"], "logits, scaled and capped (error 0.1 of its size"),
]
VALUES = (scaled_logits,)  # which a policy that does not follow is not asked for


def compared(model, engine, forward, hook):
    """The differences that one short sequence shows, with a policy that follows (`forward`) or not."""
    witness = Witness(model, engine, hook, LONGEST, forward)
    model.train()
    with torch.no_grad(), forward.switched(on=True) if forward else nullcontext(), witness.watching():
        hidden = model.model(IDS, attention_mask=torch.ones_like(IDS)).last_hidden_state[0]
        if forward:
            head = model.lm_head.weight
            witness.values.head(hidden, head, None, 1.0, None, engine.logits(hidden.to(torch.bfloat16)))
    assert model.training and all(module.training for module in model.modules())
    return witness.findings


@pytest.mark.parametrize("follows", [True, False], ids=["follows", "off"])
@pytest.mark.parametrize("broken, modules, quantity", BROKEN, ids=lambda v: getattr(v, "__name__", ""))
def test_modules_that_the_engine_computes_differently_are_named(broken, modules, quantity, follows):
    model = tiny_models.build("qwen3", num_attention_heads=2)
    forward, engine = followed(model)
    if broken is not None:
        broken(engine.held)
    if not follows:
        forward.remove()
    classes = [type(module) for module in model.modules()]
    found = compared(model, engine, forward if follows else None, forward.hook)
    if broken in VALUES and not follows:
        modules = []
    assert list(found.differences) == modules
    assert all(one.startswith(quantity) for one in found.differences.values()), found.differences
    assert found.compared > 10 and [type(module) for module in model.modules()] == classes


def test_a_soft_cap_that_only_one_side_has(monkeypatch):
    model = tiny_models.build("qwen3")
    forward, engine = followed(model)
    engine.softcap = 30.0
    found = compared(model, engine, forward, forward.hook).lines()
    assert found == [f"{name}: soft cap of scores (the policy's none, the engine's 30)" for name in BOTH]


def test_another_weight():
    model = tiny_models.build("qwen3")
    forward, engine = followed(model)
    weight = model.get_submodule(f"{LAYER}.self_attn.v_proj").weight
    weight.data = weight.data.roll(1, 0)
    [found] = compared(model, engine, forward, forward.hook).lines()
    assert found.startswith(f"{LAYER}.self_attn.v_proj: output (error 1.4 of its size")


def test_other_pairs_of_channels():
    """The angles are the same on both sides."""
    model = tiny_models.build("qwen3")
    forward, engine = followed(model)
    rotary = model.model.rotary_emb
    turn = rotary.engine[None]
    rotary.engine = {None: lambda positions, *rows: tuple(states.roll(1, -1) for states in turn(positions, *rows))}
    [found] = compared(model, engine, forward, forward.hook).lines()
    assert found.startswith("model.rotary_emb: q, turned by its rotary embedding (error 1.")


def test_windows_by_layer_types():
    """transformers masks the layers that `layer_types` names; the engine here windows none."""
    model = tiny_models.build(
        "qwen3", layer_types=["full_attention", "sliding_attention"], sliding_window=16, use_sliding_window=True
    )
    forward, engine = followed(model)
    engine.held.get_submodule(ATTENTION).sliding_window = None
    found = compared(model, engine, forward, forward.hook).differences
    assert list(found) == [ATTENTION] and "position 31 sees 16 keys, the engine's 32" in found[ATTENTION]


def test_beyond_the_longest_sequence_a_window_is_none():
    found = Findings()
    for window, last in (None, 63), (64, 63), (65, 63), (10**6, 63):
        compare_window(found, "a", lambda b, h, q, k: k <= q, window, last, "cpu")
    assert not found.differences
    compare_window(found, "a", lambda b, h, q, k: k <= q, 63, 63, "cpu")
    assert found.differences["a"].endswith("(a query at position 63 sees 64 keys, the engine's 63)")


@pytest.mark.parametrize("form", ["halves", "turns", "once"])
def test_angles_are_compared_in_any_order_of_channels(form):
    positions = torch.arange(0, 4096, 64)
    angle = positions[:, None] * 10000.0 ** (-torch.arange(16) / 16)
    engine = angle.cos().bfloat16(), angle.sin().bfloat16()
    whole = {
        "halves": lambda t: torch.cat([t, t], -1),
        "turns": lambda t: t.repeat_interleave(2, -1),
        "once": lambda t: t,
    }
    found = Findings()
    compare_angles(found, "same", positions, tuple(map(whole[form], (angle.cos(), angle.sin()))), engine)
    scaled = tuple(map(whole[form], (1.02 * angle.cos(), 1.02 * angle.sin())))
    compare_angles(found, "scaled", positions, scaled, engine)
    compare_angles(found, "narrow", positions, (angle[:, :5].cos(), angle[:, :5].sin()), engine)
    assert found.lines() == [
        "scaled: rotary angles (from position 0 on)",
        "narrow: turned channels (the policy turns 5 of a head, the engine 32)",
    ]


class TestBounds:
    """Against rounding itself, and two-sided: what a bound explains is not far below it, nor above."""

    @pytest.mark.parametrize("shape", [(32, 128, 64), (7, 300, 129), (3, 1024, 2100)])
    @pytest.mark.parametrize("outlier", [1, 1e3])
    def test_the_bound_of_linears_holds(self, shape, outlier):
        tokens, columns, rows = shape
        generator = torch.Generator().manual_seed(0)
        x, weight = torch.randn(tokens, columns, generator=generator), torch.randn(rows, columns, generator=generator)
        x[0, 0] *= outlier
        x, weight = x.bfloat16(), weight.bfloat16()
        codes = [
            dequantize_weight(q, torch.float64) for q in (quantize_activation(x, "pow2"), quantize_weight(weight))
        ]
        found, own = codes[0] @ codes[1].T, x.double() @ weight.double().T
        ratio = values.excess_of(found.bfloat16(), own, values.linear_bound(x, weight, own, values.U8))
        assert 0.1 < ratio < 0.5
        other = x.double() @ weight.double().roll(1, 0).T
        assert values.excess_of(other, own, values.linear_bound(x, weight, own, values.U8)) > 2

    def test_an_output_that_is_no_number_is_beyond_any(self):
        own = torch.ones(2, 3)
        assert values.excess_of(own * torch.nan, own, own) == float("inf")
        assert values.excess_of(own * torch.nan, own, own[:, 0]) == float("inf")


def test_findings_keep_what_differs_first_and_the_worst_agreement():
    found, one = Findings(), torch.ones(2)
    assert found.compare_outputs("norm", "a", one, 1.5 * one, one) and found.compare_outputs(
        "norm", "b", one, 1.25 * one, one
    )
    assert not found.compare_numbers("a", "eps", 1e-6, 1e-5) and found.excesses == {"norm": 0.5}
    assert not found.compare_outputs("norm", "a", 4 * one, one, one) and found.excesses == {"norm": 3.0}
    assert found.compare_numbers("a", "cap", None, 0) and found.compared == 5
    assert found.lines() == ["a: eps (the policy's 1e-06, the engine's 1e-05)"]
