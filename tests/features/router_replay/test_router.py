"""Replay in the policy's routers: other experts, the model's own gate weights, and gradients as ever."""

import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model

from testing.tiny_models import build
from trl_fp8.features.router_replay.replay import RouterReplay, RouteTally
from trl_fp8.recipe.names import NOWHERE


MOE = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"]
TOKENS = torch.arange(4, 64)[torch.randint(60, (4, 11), generator=torch.Generator().manual_seed(1))]


def other_experts(recorded, count=4):
    """Each token's neighbours of the experts that were chosen: valid routes, never the same set (K=2 of 4)."""
    shifted = (recorded.long() + 1) % count
    keep = recorded.long().sort(-1).values == shifted.sort(-1).values
    assert not keep.all(-1).any()
    return shifted.to(recorded.dtype)


def own_routes(model, replay, tokens=TOKENS):
    with torch.no_grad(), replay.during(None, replay=False, record=True):
        model(input_ids=tokens)
    return replay.recorded()


@pytest.mark.parametrize("architecture", MOE)
def test_replaying_a_models_own_choice_changes_no_bit(architecture):
    model = build(architecture)
    plain = model(input_ids=TOKENS).logits
    plain.square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    replay = RouterReplay(model)
    routes = own_routes(model, replay)
    assert routes.shape == (4, 11, 2, 2) and routes.dtype == torch.int8
    replay.begin(routes, replay=True)
    replayed = model(input_ids=TOKENS).logits
    replayed.square().mean().backward()
    assert torch.equal(plain, replayed)
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    replay.end()
    assert torch.equal(model(input_ids=TOKENS).logits, plain)


@pytest.mark.parametrize("architecture", MOE)
def test_given_experts_get_the_models_own_gate_weights(architecture):
    """Against the formula: softmax over all experts, taken at the given ones, normalized where the model does so."""
    model = build(architecture)
    replay = RouterReplay(model)
    routes = other_experts(own_routes(model, replay))
    seen = {}
    for layer in (0, 1):
        router = model.model.layers[layer].mlp.gate
        router.register_forward_hook(lambda module, args, output, layer=layer: seen.update({layer: (args[0], output)}))
    replay.begin(routes, replay=True)
    changed = model(input_ids=TOKENS).logits
    for layer in (0, 1):
        hidden, (_, weights, experts) = seen[layer]
        given = routes[:, :, layer].flatten(0, 1).long()
        probabilities = (hidden @ model.model.layers[layer].mlp.gate.weight.T).softmax(-1).gather(-1, given)
        if getattr(model.config, "norm_topk_prob", architecture == "mixtral"):
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        assert torch.equal(experts, given)
        torch.testing.assert_close(weights, probabilities)
    changed.square().mean().backward()
    gate = model.model.layers[0].mlp.gate.weight
    assert gate.grad.abs().sum() > 0  # the router learns from what it was made to choose


def test_tokens_without_known_experts_choose_for_themselves():
    model = build("qwen3_moe")
    replay = RouterReplay(model)
    own = own_routes(model, replay)
    routes = other_experts(own)
    routes[:, 5:] = NOWHERE
    chosen = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[-1]))
    with replay.during(routes, replay=True):
        model(input_ids=TOKENS)
    used = chosen[-1].view(4, 11, 2)
    assert torch.equal(used[:, :5], routes[:, :5, 0].long())
    assert torch.equal(used[:, 5:], own[:, 5:, 0].long())  # of layer 0, which no earlier router has changed


def test_chunks_of_a_batch_get_their_own_rows():
    model = build("qwen3_moe")
    replay = RouterReplay(model)
    routes = other_experts(own_routes(model, replay))
    with torch.no_grad(), replay.during(routes, replay=True, record=True):
        whole = model(input_ids=TOKENS).logits
    recorded = replay.recorded()
    with torch.no_grad(), replay.during(routes, replay=True, record=True):
        parts = [model(input_ids=TOKENS[start:end]).logits for start, end in ((0, 1), (1, 3), (3, 4))]
    # other batch sizes, other orders of summation
    torch.testing.assert_close(torch.cat(parts), whole)
    assert torch.equal(replay.recorded(), recorded)
    with torch.no_grad(), replay.during(routes[[1, 0, 2, 3]], replay=True):
        assert not torch.allclose(model(input_ids=TOKENS).logits, whole)


def test_recording_ends_with_its_block():
    model = build("qwen3_moe")
    replay = RouterReplay(model)
    recorded = own_routes(model, replay)
    model(input_ids=TOKENS[:2])  # another forward, such as the reference's
    assert torch.equal(replay.recorded(), recorded)


def test_rows_that_do_not_fit_are_refused():
    model = build("qwen3_moe")
    replay = RouterReplay(model)
    routes = own_routes(model, replay)
    with (
        replay.during(routes[:, :10], replay=True),
        pytest.raises(RuntimeError, match="4 sequences of 10 tokens, but"),
    ):
        model(input_ids=TOKENS)
    with replay.during(routes[:2], replay=True):
        model(input_ids=TOKENS[:2])
        with pytest.raises(RuntimeError, match="after 2 of them the policy was run on 2 sequences of 11"):
            model(input_ids=TOKENS[2:])


def test_gradient_checkpointing_replays_again():
    gradients = []
    for checkpointing in (False, True):
        model = build("qwen3_moe")
        replay = RouterReplay(model)
        routes = other_experts(own_routes(model, replay))
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        replay.begin(routes, replay=True)
        loss = model(input_ids=TOKENS, use_cache=False).logits.square().mean()
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_agreement_is_counted_over_real_known_tokens_as_sets():
    tally = RouteTally(torch.device("cpu"))
    rollout = torch.tensor([[0, 1], [2, 3], [1, 2], [NOWHERE, NOWHERE], [0, 3]])
    used = torch.tensor([[1, 0], [2, 3], [1, 3], [0, 1], [0, 3]])
    own = torch.tensor([[1, 0], [2, 1], [1, 3], [0, 1], [0, 3]])
    tally.add(rollout, used, own, torch.tensor([True, True, True, True, False]))
    assert tally.counts.tolist() == [3, 2, 1]  # order does not matter; unknown and padded tokens do not count


@pytest.mark.parametrize("replays", [True, False])
def test_disagreement_is_that_of_the_experts_that_were_used(replays):
    model = build("qwen3_moe")
    replay = RouterReplay(model)
    routes, tally = other_experts(own_routes(model, replay)), RouteTally(torch.device("cpu"))
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    with torch.no_grad(), replay.during(routes, replay=replays, tally=tally):
        model(input_ids=TOKENS, attention_mask=mask)
    known, used, own = tally.counts.tolist()
    assert known == 2 * (TOKENS.numel() - 4)
    assert used == (known if replays else own)
    assert own < known / 2


def test_a_second_replay_takes_the_place_of_the_first():
    """A model that an earlier trainer had: each route counts once, and the own choice is the router's."""
    model = build("qwen3_moe")
    routes = other_experts(own_routes(model, RouterReplay(model)))
    replay, tally = RouterReplay(model), RouteTally(torch.device("cpu"))
    with torch.no_grad(), replay.during(routes, replay=True, tally=tally):
        model(input_ids=TOKENS)
    known, used, own = tally.counts.tolist()
    assert known == used == 2 * TOKENS.numel() and own < known / 2


def test_a_replay_that_was_replaced_is_freed():
    model = build("qwen3_moe")
    first = weakref.ref(RouterReplay(model))
    second = RouterReplay(model)
    assert first() is None
    assert [hook.__self__ for hook in model.model._forward_pre_hooks.values()] == [second]


def test_adapters_do_not_matter():
    model = build("qwen3_moe")
    plain = own_routes(model, RouterReplay(model))
    wrapped = get_peft_model(build("qwen3_moe"), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    replay = RouterReplay(wrapped)
    assert replay.layers == (0, 1)
    assert torch.equal(own_routes(wrapped, replay), plain)


def test_layers_without_a_router_have_no_column():
    model = build("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1])
    assert RouterReplay(model).layers == (0, 2)


def test_models_that_cannot_replay_are_refused():
    with pytest.raises(ValueError, match=r"router_replay='rollout': Qwen3ForCausalLM is not a mixture of experts"):
        RouterReplay(build("qwen3"), "router_replay='rollout'")
    odd = build("qwen3_moe")
    odd.model.layers[1].mlp.gate.__class__ = torch.nn.Linear
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.gate is a Linear, but replay needs routers"):
        RouterReplay(odd)


def test_a_router_with_two_choices_is_refused_when_it_routes():
    model = build("qwen3_moe")
    router = model.model.layers[1].mlp.gate
    once = type(router).forward

    def group_limited(self, hidden_states):
        torch.topk(hidden_states, 2)
        return once(self, hidden_states)

    router.__class__ = type("GroupTopKRouter", (type(router),), {"forward": group_limited})
    replay = RouterReplay(model)
    with pytest.raises(RuntimeError, match="router of layer 1 calls topk 2 times"):
        own_routes(model, replay)
