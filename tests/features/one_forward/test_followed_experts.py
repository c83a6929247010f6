"""Routers and experts that follow an engine: its values, also in a tie and under replay; gradients of their own."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from testing.tiny_models import build
from trl_fp8.features.one_forward.followed_experts import FollowedExperts, FollowedRouter
from trl_fp8.features.one_forward.one_forward import require_expert_backward
from trl_fp8.features.router_replay.replay import RouterReplay
from trl_fp8.policy.swapped import swap
from trl_fp8.recipe.names import NOWHERE
from trl_fp8.recipe.recipe import recipe_for_model


MOE = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"]
TOKENS, EXPERTS, CHOSEN = 9, 4, 2


def follow(module, mixin, engine) -> None:
    swap(module, mixin, one_forward=SimpleNamespace(on=True), engine=engine)


def random(*shape, seed=0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Router:
    """An engine's, of which nothing could be guessed: its logits, a choice by no ranking, gate weights of its own."""

    logits = random(TOKENS, EXPERTS, seed=1).bfloat16()
    chosen = torch.stack([torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(t))[:2] for t in range(9)])
    weights = random(TOKENS, CHOSEN, seed=2).sigmoid()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert x.dtype == torch.bfloat16 and x.shape == (TOKENS, 128)
        return self.logits, self.weights, self.chosen.int()


def gate_weights(logits: Tensor, chosen: Tensor, architecture: str) -> Tensor:
    """The formula: softmax over all experts, taken at the chosen ones, normalized where the model does so."""
    weights = logits.softmax(-1).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) if architecture == "mixtral" else weights


@pytest.mark.parametrize("architecture", MOE)
def test_a_router_gives_the_engines_logits_choice_and_gate_weights(architecture):
    model = build(architecture)
    router = model.model.layers[0].mlp.gate
    follow(router, FollowedRouter, Router())
    hidden = random(1, TOKENS, 128).bfloat16()
    logits, weights, chosen = router(hidden)
    assert torch.equal(chosen, Router.chosen) and torch.equal(weights, Router.weights)
    assert torch.equal(logits, Router.logits.float())
    router.one_forward.on = False
    plain = build(architecture).model.layers[0].mlp.gate(hidden.float())
    assert all(torch.equal(a, b) for a, b in zip(router(hidden.float()), plain, strict=True))


@pytest.mark.parametrize("replayed", [False, True], ids=["chosen", "replayed"])
@pytest.mark.parametrize("architecture", MOE)
def test_gradients_of_a_router_are_those_at_the_engines_logits(architecture, replayed):
    """Compare gradients of logits, which an auxiliary loss reads, and gate weights with the formula in FP64."""
    model = build(architecture)
    router = model.model.layers[0].mlp.gate
    replay = RouterReplay(model)
    follow(router, FollowedRouter, Router())
    choice = Router.chosen
    if replayed:
        choice = (choice + 1) % EXPERTS
        replay._chunk_NLK, replay._replay = choice[:, None].to(torch.int8), True
    hidden = random(TOKENS, 128).bfloat16().requires_grad_()
    logits, weights, chosen = router(hidden)
    on_logits, on_weights = random(*logits.shape, seed=3), random(*weights.shape, seed=4)
    ((logits * on_logits).sum() + (weights * on_weights).sum()).backward()
    assert torch.equal(chosen, choice)

    x, w = hidden.detach().double().requires_grad_(), router.weight.detach().double().requires_grad_()
    own = x @ w.T
    logits = own + (Router.logits.double() - own).detach()
    expected = gate_weights(logits, choice, architecture)
    ((logits * on_logits).sum() + (expected * on_weights).sum()).backward()
    if replayed:
        torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=0)  # a few FP32 operations
    assert (router.weight.grad - w.grad).norm() < 1e-6 * w.grad.norm()
    assert (hidden.grad - x.grad).norm() < 2**-8 * x.grad.norm()  # BF16, as the activation
    plain = build(architecture).model.layers[0].mlp.gate
    (plain(hidden.detach().float())[1] * on_weights).sum().backward()
    assert (plain.weight.grad - router.weight.grad).norm() > 0.1 * router.weight.grad.norm()


@pytest.mark.parametrize("first", ["replay", "forward"])
def test_replay_has_the_last_word_and_counts_the_engines_choice_as_the_policys_own(first):
    model = build("qwen3_moe", num_hidden_layers=1)
    router = model.model.layers[0].mlp.gate
    choice = (Router.chosen + 1) % EXPERTS
    choice[4:] = NOWHERE  # these choose for themselves
    choice[0] = Router.chosen[0]
    if first == "forward":
        follow(router, FollowedRouter, Router())
    replay = RouterReplay(model)
    if first == "replay":
        follow(router, FollowedRouter, Router())
    seen = []
    router.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad(), replay.during(choice.view(1, TOKENS, 1, CHOSEN), replay=True, record=True):
        model(input_ids=torch.arange(4, 4 + TOKENS)[None])
    (_, weights, used), own = seen[0], replay.recorded()
    assert torch.equal(own[0, :, 0].long(), Router.chosen)
    assert torch.equal(used[:4], choice[:4]) and torch.equal(used[4:], Router.chosen[4:])
    assert torch.equal(weights[4:], Router.weights[4:]) and torch.equal(weights[0], Router.weights[0])
    formula = gate_weights(Router.logits[1:4].float(), choice[1:4], "qwen3_moe")
    torch.testing.assert_close(weights[1:4], formula, rtol=1e-6, atol=0)


def engines_experts(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    assert x.dtype == torch.bfloat16
    return random(*x.shape, seed=5).bfloat16()


def inputs(dtype=torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, experts and gate weights; the last expert gets no token."""
    chosen = torch.stack([torch.randperm(3, generator=torch.Generator().manual_seed(t))[:2] for t in range(TOKENS)])
    weights = random(TOKENS, CHOSEN, seed=6).sigmoid()
    return random(TOKENS, 128).bfloat16().to(dtype).requires_grad_(), chosen, weights.requires_grad_()


def gradients(experts, dtype=torch.bfloat16) -> list[Tensor]:
    hidden, chosen, weights = inputs(dtype)
    output = experts(hidden, chosen, weights)
    output.backward(random(*output.shape, seed=7).bfloat16().to(output.dtype))
    return [hidden.grad, weights.grad, experts.gate_up_proj.grad, experts.down_proj.grad]


@pytest.mark.parametrize("architecture", MOE)
def test_experts_give_the_engines_values_and_the_gradients_of_unquantized_ones(architecture):
    """Bit for bit those of transformers' experts in FP32, at the engine's inputs."""
    plain, followed = (build(architecture).model.layers[0].mlp.experts for _ in range(2))
    follow(followed, FollowedExperts, engines_experts)
    assert torch.equal(followed(*inputs()), engines_experts(*inputs()))
    of_followed, theirs = gradients(followed), gradients(plain, torch.float32)
    assert of_followed[0].dtype == torch.bfloat16 and torch.equal(of_followed[0], theirs[0].bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(of_followed[1:], theirs[1:], strict=True))
    assert (
        of_followed[2][0].abs().sum() > 0 == of_followed[2][3].abs().sum()
    )  # an expert without tokens learns nothing
    followed.one_forward.on = False
    assert torch.equal(followed(*inputs(torch.float32)), plain(*inputs(torch.float32)))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_adapters_of_experts_learn_from_the_sum_that_the_engine_holds(checkpointing):
    """Against the same adapters on unquantized experts whose output is exchanged for the engine's."""
    found = []
    for followed in (True, False):
        parameters = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
        lora = LoraConfig(r=2, target_modules=[], target_parameters=parameters, init_lora_weights=False)
        torch.manual_seed(0)
        model = get_peft_model(build("qwen3_moe", num_hidden_layers=1), lora).train()
        layer = model.get_base_model().model.layers[0].mlp
        experts = layer.experts.get_base_layer()
        if followed:
            follow(experts, FollowedExperts, engines_experts)
        hidden, chosen, weights = inputs() if followed else inputs(torch.float32)

        def run(layer=layer, hidden=hidden, chosen=chosen, weights=weights):
            return layer.experts(hidden, chosen, weights)

        output = torch.utils.checkpoint.checkpoint(run, use_reentrant=False) if checkpointing else run()
        if followed:
            assert torch.equal(output, engines_experts(hidden, chosen, weights))
        output.backward(random(*output.shape, seed=7).bfloat16().to(output.dtype))
        found.append([p.grad for name, p in model.named_parameters() if "experts" in name and p.requires_grad])
    assert len(found[0]) == 4 and all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(gradient.abs().sum() > 0 for gradient in found[0])


def test_experts_that_nobody_can_follow_are_refused():
    model = build("qwen3_moe")
    with pytest.raises(ValueError, match=r"fp8_backward='fp8' with FP8 experts \(model.layers.0.mlp.experts"):
        require_expert_backward(recipe_for_model(model), "fp8")
    require_expert_backward(recipe_for_model(model), "bf16")
    require_expert_backward(recipe_for_model(model, expert_kernels=False), "fp8")
