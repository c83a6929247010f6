"""Modules between linear layers have the engine's values, and gradients of the policy's own computation."""

import pytest
import torch
import transformers.models.qwen3.modeling_qwen3 as family
from torch import nn

from testing import tiny_models
from testing.fake_engine import followed
from trl_fp8.features.one_forward.between import RotaryCall, side_by_side
from trl_fp8.policy.swapped import holding, own_gradient, with_value


def randn(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def build(architecture, **options):
    """A model that follows an engine, none of whose parameters is at its initial 0 or 1."""
    model = tiny_models.build(architecture, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) * (parameter.dim() == 1))
    return model, *followed(model)


def close(found, exact, roundings=1):
    """Within so many roundings to the dtype of `found`, and FP32's errors of sums of a few hundred terms."""
    step = torch.finfo(found.dtype).eps / 2
    bound = roundings * step * exact.abs() + 2**-16 * exact.abs().max()
    return bool(((found.double() - exact).abs() <= bound).all())


class TestOwnGradient:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("autocast", [False, True])
    def test_value_of_one_and_gradient_of_the_other(self, dtype, autocast):
        x, w = randn(3, 8, dtype=dtype).requires_grad_(), randn(8, seed=1, dtype=torch.float32).requires_grad_()
        dy = randn(3, 8, seed=2)
        y = own_gradient(lambda x, w: (7 * x).bfloat16(), lambda x, w: x.square() * w, x, w)
        assert torch.equal(y, (7 * x.detach()).bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y.backward(dy)
        exact = 2 * x.detach().double() * w.detach().double() * dy.double()
        assert x.grad.dtype == dtype and close(x.grad, exact)
        assert w.grad.dtype == torch.float32 and close(w.grad, (x.detach().double().square() * dy.double()).sum(0))

    def test_frozen_operands_get_no_gradient_and_are_computed_in_fp32(self):
        x, w = randn(3, 8), randn(8, seed=1, dtype=torch.float32).requires_grad_()
        dtypes = []

        def policy(x, w):
            dtypes.append((x.dtype, x.requires_grad, w.requires_grad))
            return x * w

        own_gradient(torch.mul, policy, x, w).sum().backward()
        assert x.grad is None and dtypes == [(torch.float32, False, True)]
        with torch.no_grad():
            assert not own_gradient(torch.mul, policy, x, w).requires_grad
        assert own_gradient(torch.mul, policy, x, w.detach()).grad_fn is None and len(dtypes) == 1

    def test_two_outputs_of_which_one_is_used_or_needs_no_gradient(self):
        q, k = randn(2, 8).requires_grad_(), randn(2, 4).requires_grad_()

        def turn(q, k):
            return 2 * q, 3 * k

        own_gradient(turn, turn, q, k)[0].sum().backward()
        assert torch.equal(q.grad, torch.full_like(q, 2)) and not k.grad.any()
        q.grad = None
        sum(each.sum() for each in own_gradient(turn, turn, q, k.detach())).backward()
        assert torch.equal(q.grad, torch.full_like(q, 2))

    def test_an_input_that_was_changed_since_and_a_second_derivative_are_refused(self):
        x = randn(4, 4, dtype=torch.float32).requires_grad_()
        changed = x * 1
        y = own_gradient(torch.sin, torch.sin, changed)
        changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        (dx,) = torch.autograd.grad(own_gradient(torch.sin, torch.sin, x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()

    def test_with_value(self):
        own, value = randn(3, dtype=torch.float32).requires_grad_(), randn(3, seed=1)
        y = with_value(own * 2, value)
        assert y.dtype == torch.float32 and torch.equal(y, value.float())
        y.sum().backward()
        assert torch.equal(own.grad, torch.full_like(own, 2))


NORMS = [
    ("qwen3", "model.norm", (2, 5, 128), {}),
    ("qwen3", "model.layers.0.self_attn.q_norm", (2, 5, 4, 64), {}),
    ("gemma3_text", "model.layers.0.self_attn.k_norm", (2, 2, 5, 64), {"tied": True}),
    ("gemma", "model.norm", (7, 128), {"tied": True}),
    ("cohere", "model.norm", (2, 5, 128), {"tied": True}),
]


def normalized(architecture, x, weight):
    """In float64, as a formula."""
    if architecture == "cohere":
        x = x - x.mean(-1, keepdim=True)
    scale = 1 + weight if architecture.startswith("gemma") else weight
    return scale * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture, name, shape, options", NORMS)
def test_norms(architecture, name, shape, options, dtype, frozen):
    model, forward, engine = build(architecture, **options)
    norm = model.get_submodule(name)
    norm.weight.data = norm.weight.data.to(dtype)
    norm.weight.requires_grad_(not frozen)
    weight, dy = norm.weight, randn(*shape, seed=1)
    x = (5 * randn(*shape[:-1], 2 * shape[-1]))[..., ::2].requires_grad_()  # not contiguous
    y = norm(x)
    assert torch.equal(y, engine.norm(name)(x.detach()))
    y.backward(dy)
    exact_x, exact_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    y = normalized(architecture, exact_x, exact_weight)
    if architecture == "cohere":  # transformers' epsilon there is 1e-5
        assert model.config.layer_norm_eps == 1e-5
    y.backward(dy.double())
    assert x.grad.dtype == torch.bfloat16 and close(x.grad, exact_x.grad)
    assert norm.weight is weight and weight.dtype == dtype
    assert weight.grad is None if frozen else close(weight.grad, exact_weight.grad) and weight.grad.dtype == dtype


def test_a_norms_parameters_are_its_own_again_after_an_error():
    norm = nn.LayerNorm(4)
    parameters = dict(norm.named_parameters())
    with pytest.raises(ZeroDivisionError):
        with holding(norm, {"weight": torch.zeros(4)}):
            assert not norm.weight.any()
            raise ZeroDivisionError
    assert all(parameter is parameters[name] for name, parameter in norm.named_parameters())


@pytest.mark.parametrize("architecture, options", [("qwen3", {}), ("gemma", {"tied": True})])
def test_mlps(architecture, options):
    model, forward, engine = build(architecture, **options)
    mlp, name = model.model.layers[0].mlp, "model.layers.0.mlp"
    gate, up = (randn(2, 5, 256, seed=seed).requires_grad_() for seed in (0, 1))
    mlp.gate_proj.forward, mlp.up_proj.forward = lambda x: gate, lambda x: up
    products = []
    mlp.down_proj.forward = lambda x: products.append(x) or x
    y, dy = mlp(None), randn(2, 5, 256, seed=2)
    assert torch.equal(y.flatten(0, 1), engine.activation(name)(torch.cat([gate, up], -1).detach().flatten(0, 1)))
    y.backward(dy)
    exact = [one.detach().double().requires_grad_() for one in (gate, up)]
    tanh = architecture == "gemma"
    act = nn.functional.gelu(exact[0], approximate="tanh") if tanh else exact[0] * exact[0].sigmoid()
    (act * exact[1]).backward(dy.double())
    assert close(gate.grad, exact[0].grad) and close(up.grad, exact[1].grad)


@pytest.mark.parametrize("lead", [(6,), (2, 3)])
def test_halves_of_a_fused_output_are_joined_without_a_copy(lead):
    fused = torch.randn(6, 2 * 8 + 4)
    gate, up = (fused[:, columns].view(*lead, 8) for columns in (slice(0, 8), slice(8, 16)))
    joined = side_by_side(gate, up)
    assert joined.data_ptr() == fused.data_ptr() and torch.equal(joined, fused[:, :16])
    for left, right in (
        (up, gate),
        (gate, fused[:, 9:17].view(*lead, 8)),
        (gate.clone(), up.clone()),
        (torch.randn(*lead, 16)[..., ::2], torch.randn(*lead, 16)[..., ::2]),
        (fused[:, 0:16:2].view(*lead, 8), fused[:, 8:].repeat(1, 2)[:, :8].view(*lead, 8)),
    ):
        joined = side_by_side(left, right)
        assert torch.equal(joined, torch.cat([left, right], -1).flatten(0, -2))
        assert joined.untyped_storage().data_ptr() != fused.untyped_storage().data_ptr()
    mixed = torch.randn(3, 4, 16).transpose(0, 1)  # rows that no view has one stride for
    left, right = mixed[..., :8], mixed[..., 8:]
    assert torch.equal(side_by_side(left, right), mixed.flatten(0, -2))


@pytest.mark.parametrize("architecture, scale", [("qwen3", None), ("gemma3_text", 128**0.5)])
def test_embeddings(architecture, scale):
    model, forward, _ = build(architecture, tied=scale is not None)
    table, ids = model.model.embed_tokens.weight, torch.tensor([[5, 9, 5]])
    rows, dy = model.model.embed_tokens(ids), randn(1, 3, 128)
    scale = 1.0 if scale is None else torch.tensor(scale).bfloat16().item()
    assert torch.equal(rows, (table[ids].bfloat16() * scale).detach())
    rows.backward(dy)
    exact = torch.zeros(table.shape, dtype=torch.float64).index_add_(0, ids[0], scale * dy[0].double())
    # each row is rounded to BF16 before rows are added
    bound = 2**-8 * torch.zeros_like(exact).index_add_(0, ids[0], (scale * dy[0].double()).abs())
    assert table.grad.dtype == torch.float32 and ((table.grad - exact).abs() <= bound + 1e-6).all()
    with forward.switched(on=False):
        assert model.model.embed_tokens(ids).dtype == torch.float32


@pytest.mark.parametrize("positions", [[[0, 1, 2, 3, 4]], [[0, 0, 1, 2, 3], [0, 1, 2, 3, 90]]], ids=["one", "each"])
def test_rotary_embeddings(positions):
    """The backward of a turn is the turn back, of pairs (d, d + D / 2) by the angle position * theta**(-2d / D)."""
    model, forward, engine = build("qwen3")
    positions = torch.tensor(positions)
    hidden = randn(2, 5, 128)
    cos, sin = model.model.rotary_emb(hidden, positions)
    assert isinstance(cos, RotaryCall) and cos is sin
    q, k = (randn(2, 5, heads, 64).transpose(1, 2).requires_grad_() for heads in (4, 2))
    turned = family.apply_rotary_pos_emb(q, k, cos, sin)
    each = positions.expand(2, 5).flatten()
    rows = [states.detach().transpose(1, 2).flatten(0, 1).flatten(1) for states in (q, k)]
    for got, expected in zip(turned, engine.rotary(0)(each, *rows), strict=True):
        assert torch.equal(got.transpose(1, 2).flatten(0, 1).flatten(1), expected)
    dys = [randn(*states.shape, seed=3) for states in (q, k)]
    torch.autograd.backward(turned, dys)
    base = model.config.rope_parameters["rope_theta"]
    angle = positions.expand(2, 5).double()[:, None, :, None] * base ** (-torch.arange(0, 64, 2).double() / 64)
    for states, dy in zip((q, k), dys, strict=True):
        one, two = dy.double().chunk(2, -1)
        exact = torch.cat([angle.cos() * one + angle.sin() * two, angle.cos() * two - angle.sin() * one], -1)
        # the angle itself is FP32: 90 * 2**-24
        assert ((states.grad.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-14 * dy.abs().max()).all()
    with pytest.raises(TypeError, match=r"further arguments, \['unsqueeze_dim'\]"):
        family.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    with forward.switched(on=False):
        assert isinstance(model.model.rotary_emb(hidden, positions)[0], torch.Tensor)
