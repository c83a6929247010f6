"""From observed magnitudes to the next scales: which tokens, whose weights, how wide a margin,
and what survives a resume.
"""

import json
import logging
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from transformers.models.qwen3 import modeling_qwen3

from testing.tiny_models import build
from trl_fp8.features.kv_cache.calibration import (
    PROMPTS_ONLY_MARGIN,
    SATURATION_LIMIT,
    STATE_FILE,
    WIDEST_MARGIN_FACTOR,
    Calibration,
    KVState,
    next_scales,
    outlier_message,
)
from trl_fp8.features.kv_cache.kv_cache import KVCache
from trl_fp8.features.kv_cache.observation import observe_sequences
from trl_fp8.policy.hook import AttentionHook
from trl_fp8.quantization.codec.kv_scales import (
    KV_SCALES,
    LOGIT_ERROR_LIMIT,
    KVScales,
    kv_scales_from_amax,
    outlier_layers,
)
from trl_fp8.run.batch import Rollouts


PROMPTS = [[5, 6, 7], [11, 12, 13, 14]]
ROLLOUTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15], [11, 12, 13, 14, 20, 21, 22]]
MARGIN = 1.05


@pytest.fixture(autouse=True)
def main_process():
    """Warnings are of the main process alone, which accelerate has to know."""
    PartialState(cpu=True)


class Calibrating:
    """Holds the one current state, as the feature does."""

    def __init__(self, model, mode="rollout", **options):
        hook = options.pop("hook", None) or AttentionHook(model)
        self.how = Calibration(hook, **(dict(mode=mode, margin=MARGIN, max_tokens=1000) | options))
        self.state = KVState(margin_in_use=MARGIN).expecting(PROMPTS)  # the tests' own scales are the first ones

    @property
    def hook(self) -> AttentionHook:
        return self.how.hook

    def expecting(self, prompts) -> None:
        self.state = self.state.expecting(prompts)

    def next_scales(self, model) -> KVScales:
        scales, self.state = next_scales(self.state, self.how, model)
        return scales

    def after_rollouts(
        self, sequences, scales: KVScales, step: int | None, margin_factor: float | None = None
    ) -> None:
        self.state = self.state.after_rollouts(self.how, sequences, scales, step, margin_factor)

    def watching(self):
        return self.state.watching(self.hook)

    def saturation(self) -> torch.Tensor | None:
        saturated_L2, self.state = self.state.saturation(self.how)
        return saturated_L2

    def saved(self, folder) -> dict:
        """What a checkpoint holds now."""
        _, self.state = self.state.observed(self.how)
        self.state.save(folder, rank=0)
        return json.loads((folder / STATE_FILE.format(0)).read_text())


def padded(sequences=ROLLOUTS) -> dict[str, torch.Tensor]:
    """As TRL's old-log-prob pass gets them."""
    length = max(map(len, sequences))
    return {
        "input_ids": torch.tensor([[0] * (length - len(ids)) + ids for ids in sequences]),
        "attention_mask": torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in sequences]),
    }


def arrive(calibrating: Calibrating, sequences, scales: KVScales) -> None:
    """Rollouts of the next step of training."""
    calibrating.after_rollouts(sequences, scales, calibrating.state.step + 1)


def watch(calibrating: Calibrating, model, sequences=ROLLOUTS) -> None:
    with torch.no_grad(), calibrating.watching():
        model(**padded(sequences))


@contextmanager
def forwards_of(model):
    """The `input_ids` of every forward inside the block."""
    seen = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    yield seen
    handle.remove()


def states_by_hand(model, sequences=ROLLOUTS) -> list[list[torch.Tensor]]:
    """Magnitudes of q, k, v of the real tokens of `padded(sequences)`, by layer, from eager attention's arguments, at
    the positions that an engine gives them.
    """
    states, original, inputs = {}, modeling_qwen3.eager_attention_forward, padded(sequences)
    real, implementation = inputs["attention_mask"].bool(), model.config._attn_implementation
    inputs["position_ids"] = (real.long().cumsum(-1) - 1).clamp_min(0)

    def attention(module, *qkv, **kwargs):
        states[module.layer_idx] = [x.transpose(1, 2)[real].abs() for x in qkv[:3]]
        return original(module, *qkv, **kwargs)

    modeling_qwen3.eager_attention_forward = attention
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        modeling_qwen3.eager_attention_forward = original
        model.set_attn_implementation(implementation)
    return [states[layer] for layer in range(len(states))]


def amax_by_hand(model, sequences=ROLLOUTS) -> torch.Tensor:
    return torch.tensor([[x.max().item() for x in layer] for layer in states_by_hand(model, sequences)])


def scale_up(model, layer: int, projection: str, factor: float) -> None:
    with torch.no_grad():
        getattr(model.model.layers[layer].self_attn, projection).weight.mul_(factor)


def roomy(model) -> KVScales:
    """Scales that hold everything."""
    return KVScales(torch.ones(model.config.num_hidden_layers, 3))


# --- which tokens ----------------------------------------------------------------------------------------------------


def test_tokens_are_bounded_and_repetitions_run_once():
    model = build()
    hook, sequences = AttentionHook(model), [[5, 6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17]]
    with forwards_of(model) as seen:
        observation = observe_sequences(model, hook, sequences * 3)
        assert seen[-1].shape == (3, 6) and observation.elements_L3[0, 1] == 13 * 2 * 64
        observation = observe_sequences(model, hook, sequences, max_tokens=12)
        assert seen[-1].tolist() == [[5, 6, 7, 8, 9, 10], [11, 12, 13, 0, 0, 0]]  # the third would pass the bound
        assert observation.elements_L3[0, 1] == 9 * 2 * 64
        observe_sequences(model, hook, [[], *sequences], max_tokens=12, pad_token_id=3)
        assert seen[-1].tolist() == [[5, 6, 7, 8, 9, 10], [11, 12, 13, 3, 3, 3]]
        observe_sequences(model, hook, sequences, max_tokens=4)
        assert seen[-1].tolist() == [[5, 6, 7, 8]]  # the first is cut, and nothing is left for the others
        assert len(seen) == 4


def test_padding_counts_in_a_forward_and_no_row_is_lost_to_it():
    """A long row among many short ones would be 33 times as many positions, if they were padded to it."""
    model, generator = build(), torch.Generator().manual_seed(0)
    hook = AttentionHook(model)
    lengths = [[3] * 16 + [300] + [3] * 16, [5] * 7 + [40, 39, 11, 90, 2, 2, 64], [399, 1], [100] * 4]
    rows = [[torch.randint(4, 60, (n,), generator=generator).tolist() for n in case] for case in lengths]
    for case, forwards in zip(rows, (2, 2, 2, 1), strict=True):
        case = list(map(list, dict.fromkeys(map(tuple, case))))
        with forwards_of(model) as seen:
            observation = observe_sequences(model, hook, case, max_tokens=400)
        assert len(seen) == forwards
        assert all(ids.numel() <= 400 for ids in seen)
        assert sorted([token for token in row if token] for ids in seen for row in ids.tolist()) == sorted(case)
        assert observation.elements_L3[0, 1] == sum(map(len, case)) * 2 * 64
        alone = [observe_sequences(model, hook, [row]).amax_L3 for row in case]
        # another shape, another order of sums: of at most 256 fp32 terms in six GEMMs, each off by 256 * 2**-24
        torch.testing.assert_close(observation.amax_L3, torch.stack(alone).amax(0), rtol=1e-4, atol=0)


def test_mean_squares_are_taken_only_where_they_are_asked_for():
    model = build()
    hook = AttentionHook(model)
    with_moments, without = (observe_sequences(model, hook, PROMPTS, moments=moments) for moments in (True, False))
    assert with_moments.logit_error_L.gt(0).all() and without.logit_error_L.eq(0).all()
    assert torch.equal(with_moments.amax_L3, without.amax_L3)


def test_no_token_is_an_error_and_not_a_default():
    model = build()
    made = Calibrating(model)
    made.expecting([])
    with pytest.raises(ValueError, match="no prompt with at least one token"):
        made.next_scales(model)
    with pytest.raises(ValueError, match="no prompt with at least one token"):
        observe_sequences(model, made.hook, [[]])


def test_observing_leaves_the_model_alone():
    model = build()
    with torch.no_grad():
        before = model(**padded()).logits
    hook = AttentionHook(model)
    observation = observe_sequences(model, hook, PROMPTS)
    assert observation.logit_error_L is not None and hook.observer is None
    with torch.no_grad():
        assert torch.equal(model(**padded()).logits, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_prompts_and_rollouts_take_turns_in_bounded_forwards():
    model = build()
    made = Calibrating(model, "policy", max_tokens=14)
    arrive(made, ROLLOUTS, roomy(model))
    with forwards_of(model) as seen:
        made.next_scales(model)
    rows = [[[token for token in row if token] for row in ids.tolist()] for ids in seen]
    assert rows == [[ROLLOUTS[0], PROMPTS[1]], [PROMPTS[0]]]  # 6 + 4 + 3 of 14 tokens; 3 x 6 positions would be 18


# --- whose weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["rollout", "policy"])
def test_before_the_first_rollouts_the_prompts_get_a_doubled_margin(mode):
    model = build()
    made = Calibrating(model, mode)
    amax = observe_sequences(model, made.hook, PROMPTS).amax_L3
    scales = made.next_scales(model).values
    assert torch.equal(scales, kv_scales_from_amax(amax, MARGIN * PROMPTS_ONLY_MARGIN).values)
    assert torch.equal(scales, 2 * kv_scales_from_amax(amax, MARGIN).values)


def test_rollout_mode_takes_what_was_watched_and_runs_nothing():
    model = build()
    made = Calibrating(model, "rollout")
    expected = amax_by_hand(model)
    arrive(made, ROLLOUTS, made.next_scales(model))
    with forwards_of(model) as seen:
        watch(made, model)
        assert len(seen) == 1
        scale_up(model, 1, "v_proj", 64.0)  # an optimizer step that rollout mode does not see yet
        scales = made.next_scales(model).values
        again = made.next_scales(model).values
        assert len(seen) == 1
    # eager against sdpa upstream of layer 1: a few fp32 roundings, which a power of two above the margin swallows
    assert torch.equal(scales, kv_scales_from_amax(expected, MARGIN).values)
    assert torch.equal(again, scales)
    prompts = observe_sequences(model, made.hook, PROMPTS).amax_L3
    assert not torch.equal(scales, kv_scales_from_amax(prompts, MARGIN).values)


@pytest.mark.parametrize("watched", [True, False])
def test_policy_mode_runs_the_weights_of_now_each_time(watched):
    model = build()
    made = Calibrating(model, "policy")
    arrive(made, ROLLOUTS, made.next_scales(model))
    if watched:
        watch(made, model)
    with forwards_of(model) as seen:
        before = made.next_scales(model).values
        assert len(seen) == 1
        scale_up(model, 1, "v_proj", 64.0)
        after = made.next_scales(model).values
        assert len(seen) == 2
    assert {tuple(token for token in row if token) for row in seen[0].tolist()} == {
        tuple(ids) for ids in PROMPTS + ROLLOUTS
    }
    amax = observe_sequences(model, made.hook, PROMPTS + ROLLOUTS).amax_L3
    assert torch.equal(after, kv_scales_from_amax(amax, MARGIN).values)  # no longer doubled
    factors = after / before
    assert factors[1, 2] == 64 and factors.flatten()[:5].eq(1).all()


def test_later_rollouts_replace_earlier_ones():
    model, loud = build(), [[30, 31, 32, 33]]
    for mode in ("rollout", "policy"):
        made = Calibrating(model, mode)
        made.expecting(loud[:1])
        for sequences in (ROLLOUTS, loud):
            arrive(made, sequences, roomy(model))
            watch(made, model, sequences)
            made.saturation()
        amax = amax_by_hand(model, loud)
        assert torch.equal(made.next_scales(model).values, kv_scales_from_amax(amax, MARGIN).values)
        assert not torch.equal(amax, torch.maximum(amax, amax_by_hand(model)))
        made.hook.remove()


def test_all_rollouts_of_a_step_count():
    """With more generations than optimizer steps; the next step starts anew, whatever was synced in between."""
    model, loud = build(), [[30, 31, 32, 33]]
    amax = {"loud": amax_by_hand(model, loud), "all": amax_by_hand(model, ROLLOUTS + loud)}
    assert not torch.equal(*(kv_scales_from_amax(one, MARGIN).values for one in amax.values()))
    made = Calibrating(model)
    for step, sequences, expected in ((4, ROLLOUTS, None), (4, loud, "all"), (4, loud, "all"), (6, loud, "loud")):
        made.after_rollouts(sequences, roomy(model), step)
        watch(made, model, sequences)
        if expected:
            assert torch.equal(made.next_scales(model).values, kv_scales_from_amax(amax[expected], MARGIN).values)
    made.hook.remove()
    made = Calibrating(model, "policy", max_tokens=9)
    for step, sequences, kept in ((4, ROLLOUTS[:1], ROLLOUTS[:1]), (4, loud, [loud[0]]), (5, loud, loud)):
        made.after_rollouts(sequences, roomy(model), step)
        assert made.state.rollouts == kept  # 4 + 6 tokens pass the bound: the newest first
    made = Calibrating(model, "policy")
    for sequences in (ROLLOUTS, loud):
        made.after_rollouts(sequences, roomy(model), 4)
    assert made.state.rollouts == loud + ROLLOUTS


@pytest.mark.parametrize("mode", ["rollout", "policy"])
@pytest.mark.parametrize("asked", ["saturation asked", "not asked"])
def test_an_evaluation_leaves_no_trace(mode, asked, caplog):
    """Also where it comes before what training's latest loss has shown was asked for."""
    model, loud, small = build(), [[30, 31, 32, 33]], KVScales(torch.full((2, 3), 2.0**-9))
    made = Calibrating(model, mode)
    arrive(made, ROLLOUTS, made.next_scales(model))
    watch(made, model)
    without = made.saturation() if asked == "saturation asked" else torch.zeros(2, 2)
    for _ in range(3):
        made.after_rollouts(loud, small, step=None)
        watch(made, model, loud)
        assert made.saturation().min() > SATURATION_LIMIT
        watch(made, model, loud)  # its loss
    made.after_rollouts(loud, small, step=None)  # without an old-log-prob pass
    assert made.saturation() is None
    watch(made, model, loud)
    assert torch.equal(made.saturation(), without)
    assert made.state.step == 0 and made.state.margin_factor == 1.0
    sequences = ROLLOUTS if mode == "rollout" else PROMPTS + ROLLOUTS
    amax = observe_sequences(model, made.hook, sequences).amax_L3
    assert torch.equal(made.next_scales(model).values, kv_scales_from_amax(amax, MARGIN).values)
    [record] = caplog.records
    assert (
        "clipped in the KV cache (and a smaller share of another layer) in an evaluation, which widens no margin"
        in record.message
    )


def test_only_the_first_forward_over_new_rollouts_is_watched():
    model = build()
    made = Calibrating(model)
    watch(made, model)
    assert made.saturation() is None  # no rollouts yet
    arrive(made, ROLLOUTS, roomy(model))
    watch(made, model)
    expected = made.next_scales(model).values
    scale_up(model, 0, "v_proj", 64.0)
    watch(made, model)
    assert torch.equal(made.next_scales(model).values, expected)
    arrive(made, ROLLOUTS, roomy(model))
    watch(made, model)
    changed = made.next_scales(model).values
    assert changed[0, 2] == 64 * expected[0, 2]


def test_a_watched_forward_may_run_in_several_pieces():
    model = build()
    made = Calibrating(model)
    arrive(made, ROLLOUTS, roomy(model))
    with torch.no_grad(), made.watching():
        for ids in ROLLOUTS:
            model(input_ids=torch.tensor([ids]))
    pieces = torch.stack([amax_by_hand(model, [ids]) for ids in ROLLOUTS]).amax(0)
    assert torch.equal(made.next_scales(model).values, kv_scales_from_amax(pieces, MARGIN).values)


@pytest.mark.parametrize("mode", ["rollout", "policy"])
def test_without_an_old_log_prob_pass_the_loss_forward_is_watched(mode):
    """TRL skips the pass when one optimizer step follows each generation: then `saturation` comes first."""
    model = build().train()
    made = Calibrating(model, mode)
    arrive(made, ROLLOUTS, KVScales(torch.full((2, 3), 2.0**-9)))
    assert made.saturation() is None
    for part in (ROLLOUTS[1:], ROLLOUTS[:1]):  # of one optimizer step
        with made.watching():
            loss = model(**padded(part)).logits.float().log_softmax(-1).square().mean()
        loss.backward()
    with forwards_of(model) as seen:
        scales = made.next_scales(model).values
    assert made.state.margin_factor == 2.0
    assert len(seen) == (0 if mode == "rollout" else 1)
    if mode == "rollout":
        first, second = (amax_by_hand(model, part) for part in (ROLLOUTS[1:], ROLLOUTS[:1]))
        assert (first > 1.01 * second).any() and (second > 1.01 * first).any()
        assert torch.equal(scales, kv_scales_from_amax(torch.maximum(first, second), 2 * MARGIN).values)
        # eager against sdpa upstream of layer 1: a few fp32 roundings
        torch.testing.assert_close(made.state.amax_L3, torch.maximum(first, second), rtol=1e-5, atol=0)
    assert made.saturation().mean() > 0.1


def test_a_watched_forward_that_fails_is_forgotten():
    model = build()
    made = Calibrating(model)
    arrive(made, ROLLOUTS, roomy(model))
    with pytest.raises(RuntimeError, match="out of memory"), made.watching():
        raise RuntimeError("out of memory")
    assert made.hook.observer is None and made.saturation() is None


# --- how wide a margin -----------------------------------------------------------------------------------------------


def test_saturation_is_the_share_of_k_and_v_beyond_their_scales():
    model = build()
    made = Calibrating(model)
    states = states_by_hand(model)
    limits = torch.tensor([[1.0, 2.5, 1.5], [1.0, 2.0, 2.0]])
    expected = [
        (states[layer][column] > limits[layer, column]).float().mean().item() for layer in (0, 1) for column in (1, 2)
    ]
    arrive(made, ROLLOUTS, KVScales(limits / 448))
    watch(made, model)
    # of 18 * 128 elements each; an element within rounding of its limit would be worth 1 / 2304
    assert made.saturation().flatten().tolist() == pytest.approx(expected, abs=1e-6)
    assert 0.01 < sum(expected) / 4 < 0.5


@pytest.mark.parametrize(("layer", "column", "name"), [(1, 1, "layer 1's k"), (0, 2, "layer 0's v")])
def test_saturation_doubles_the_margin_and_names_the_layer(layer, column, name, caplog):
    model = build()
    made = Calibrating(model)
    scales = roomy(model).values.clone()
    scales[layer, column] = 2.0**-9
    before = kv_scales_from_amax(amax_by_hand(model), MARGIN).values
    arrive(made, ROLLOUTS, KVScales(scales))
    watch(made, model)
    with caplog.at_level(logging.WARNING, logger="trl_fp8"):
        assert made.saturation()[layer, column - 1] > SATURATION_LIMIT
    [record] = caplog.records
    share = 100 * made.state.saturated_L2[layer, column - 1].item()
    assert record.message.endswith(
        f"{share:.2g} % of {name} values were clipped in the KV cache; the next sync doubles the margin. "
        "Nothing to do unless it repeats."
    )
    assert made.state.margin_factor == 2.0
    assert torch.equal(made.next_scales(model).values, 2 * before)


def test_generations_between_two_syncs_double_the_margin_once(caplog):
    model = build()
    made, tight = Calibrating(model), KVScales(torch.full((2, 3), 2.0**-9))
    for expected in (2.0, 4.0, 8.0, WIDEST_MARGIN_FACTOR):
        made.next_scales(model)
        for _ in range(3):  # of one step, all under the scales of one sync
            made.after_rollouts(ROLLOUTS, tight, step=int(expected))
            watch(made, model)
            assert made.saturation().max() > SATURATION_LIMIT
            assert made.state.margin_factor == expected
    # The last ones, too: the margin is at its limit then, but their own scales had only half of it
    assert len(caplog.records) == 4 and "at its limit" not in caplog.text
    assert "cache (and a smaller share of another layer); the next" in caplog.text


def test_rollouts_of_earlier_syncs_double_the_margin_of_their_own_scales(caplog):
    model = build()
    made, tight = Calibrating(model), KVScales(torch.full((2, 3), 2.0**-9))
    for step in range(4):  # of an asynchronous trainer, under scales that were sent before the margin was doubled
        made.next_scales(model)
        made.after_rollouts(ROLLOUTS, tight, step, margin_factor=1.0)
        watch(made, model)
        assert made.saturation().max() > SATURATION_LIMIT
        assert made.state.margin_factor == 2.0
    assert len(caplog.records) == 1


def test_a_saturated_q_or_a_share_below_the_limit_changes_nothing(caplog):
    model = build()
    made = Calibrating(model)
    scales = roomy(model).values.clone()
    scales[:, 0] = 2.0**-9  # q is not cached
    arrive(made, ROLLOUTS, KVScales(scales))
    watch(made, model)
    assert made.saturation().max() == 0.0
    assert made.state.margin_factor == 1.0 and not caplog.records


def test_a_layer_whose_cache_is_bf16_clips_nothing(caplog):
    model = build()
    made = Calibrating(model, hook=AttentionHook(model, skip_layers={1}))
    scales = roomy(model).values.clone()
    scales[1] = 2.0**-9
    arrive(made, ROLLOUTS, KVScales(scales))
    watch(made, model)
    assert made.saturation().max() == 0.0
    assert made.state.margin_factor == 1.0 and not caplog.records


def test_the_margin_ends_at_its_limit_with_another_text(caplog):
    model = build()
    made, factors = Calibrating(model), []
    for _ in range(6):
        caplog.clear()
        made.next_scales(model)
        arrive(made, ROLLOUTS, KVScales(torch.full((2, 3), 2.0**-9)))
        watch(made, model)
        made.saturation()
        factors.append(made.state.margin_factor)
        [record] = caplog.records
        at_limit = "at its limit" in record.message
        assert at_limit != ("the next sync doubles the margin" in record.message)
        assert at_limit == (len(factors) > 4)
    assert f"limit of {MARGIN * 16:g} already. Set kv_calibration='policy'" in record.message
    assert factors == [2.0, 4.0, 8.0, 16.0, 16.0, 16.0] and WIDEST_MARGIN_FACTOR == 16.0
    arrive(made, ROLLOUTS, roomy(model))
    watch(made, model)
    made.saturation()
    assert made.state.margin_factor == 16.0  # it stays wide


def test_a_wider_margin_holds_for_a_policy_forward_too():
    model = build()
    made = Calibrating(model, "policy")
    arrive(made, ROLLOUTS, roomy(model))
    plain = made.next_scales(model).values
    made.state = replace(made.state, margin_factor=4.0)
    assert torch.equal(made.next_scales(model).values, 4 * plain)


# --- several ranks ---------------------------------------------------------------------------------------------------


class Ranks:
    """Two ranks in one process: run first to note what each contributes, then again with the maximum."""

    def __init__(self):
        self.contributed: list[list[torch.Tensor]] = [[], []]
        self.replay = False
        self.calls = 0

    def reduce_max(self, rank: int) -> Callable[[torch.Tensor], None]:
        turn = iter(range(100))

        def reduce(tensor: torch.Tensor) -> None:
            self.calls += 1
            if not self.replay:
                self.contributed[rank].append(tensor.clone())
                return
            number = next(turn)
            assert torch.equal(tensor, self.contributed[rank][number])
            tensor.copy_(torch.maximum(self.contributed[0][number], self.contributed[1][number]))

        return reduce

    def run(self, session: Callable[[int, Callable], object]) -> tuple[list, list]:
        """Results of both ranks: each on its own, and together."""
        alone = [session(rank, self.reduce_max(rank)) for rank in (0, 1)]
        self.replay = True
        return alone, [session(rank, self.reduce_max(rank)) for rank in (0, 1)]


def test_ranks_agree_on_scales_from_a_forward():
    """Each rank has its own prompts, and a policy of its own here, so that each is the larger one somewhere."""

    def session(rank, reduce_max):
        model = build()
        scale_up(model, rank, "v_proj", 16.0)
        made = Calibrating(model, "policy", reduce_max=reduce_max)
        made.expecting([PROMPTS[rank]])
        return made.next_scales(model).values

    ranks = Ranks()
    alone, together = ranks.run(session)
    assert ranks.calls == 8  # how many forwards; one collective for both tensors
    assert ranks.contributed[0][1].shape == (2, 4)  # amax of q, k, v, and the expected error of the logits
    assert torch.equal(together[0], together[1])
    assert torch.equal(together[0], torch.maximum(*alone))
    assert not torch.equal(together[0], alone[0]) and not torch.equal(together[0], alone[1])


def test_all_ranks_raise_if_one_has_nothing_to_run():
    def session(rank, reduce_max):
        model = build()
        made = Calibrating(model, "policy", reduce_max=reduce_max)
        made.expecting([PROMPTS[0]] if rank == 0 else [[]])
        try:
            made.next_scales(model)
        except ValueError as error:
            return str(error)

    alone, together = Ranks().run(session)
    assert alone[0] is None and alone[1] == together[0] == together[1]
    assert "no prompt with at least one token" in alone[1]


def test_ranks_run_the_same_number_of_forwards():
    """Each gathers the weights of a sharded policy, and a rank that ran one less would wait for the others forever."""

    def session(rank, reduce_max):
        model = build()
        made = Calibrating(model, "policy", max_tokens=20, reduce_max=reduce_max)
        made.expecting([[list(range(5, 20)), [4]], [[5, 6, 7], [11, 12, 13]]][rank])
        with forwards_of(model) as seen:
            made.next_scales(model)
        return [tuple(ids.shape) for ids in seen]

    alone, together = Ranks().run(session)
    assert alone == [[(1, 15), (1, 1)], [(2, 3)]]
    assert together == [[(1, 15), (1, 1)], [(2, 3), (2, 3)]]


def test_ranks_agree_on_scales_and_margin_from_what_was_watched():
    def session(rank, reduce_max):
        model = build()
        scale_up(model, rank, "v_proj", 16.0)
        made = Calibrating(model, "rollout", reduce_max=reduce_max)
        scales = roomy(model).values.clone()
        scales[1, 2] = 2.0**-6  # holds 7: rank 0's v fits, rank 1's does not
        arrive(made, ROLLOUTS, KVScales(scales))
        watch(made, model)
        return made.saturation().mean().item(), made.state.margin_factor, made.next_scales(model).values

    ranks = Ranks()
    alone, together = ranks.run(session)
    assert ranks.calls == 4 and ranks.contributed[0][0].shape == (2, 6)
    assert [factor for _, factor, _ in alone] == [1.0, 2.0]
    assert alone[0][0] == 0.0 < alone[1][0]
    assert [result[:2] for result in together] == [alone[1][:2]] * 2
    assert torch.equal(together[0][2], together[1][2])
    assert torch.equal(together[0][2], torch.maximum(2 * alone[0][2], alone[1][2]))


def test_ranks_agree_on_outliers():
    def session(rank, reduce_max):
        model = with_k_bias(100.0, layers=[rank])
        return outlier_layers(
            observe_sequences(model, AttentionHook(model), PROMPTS, reduce_max=reduce_max).logit_error_L
        )

    alone, together = Ranks().run(session)
    assert [list(found) for found in alone] == [[0], [1]]
    assert together[0] == together[1] == alone[0] | alone[1]


# --- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["saturation asked", "not asked"])
@pytest.mark.parametrize("mode", ["rollout", "policy"])
def test_a_resumed_run_calibrates_as_the_uninterrupted_one(mode, asked, tmp_path):
    """TRL saves after an optimizer step. Without an old-log-prob pass, nobody asked about what was watched by then."""
    model = build()
    made = Calibrating(model, mode)
    arrive(made, ROLLOUTS, KVScales(torch.full((2, 3), 2.0**-9)))
    watch(made, model)
    if asked == "saturation asked":
        made.saturation()
    saved = made.saved(tmp_path)
    expected, factor = made.next_scales(model).values, made.state.margin_factor
    made.hook.remove()
    assert factor == 2.0

    resumed = Calibrating(model, mode)
    fresh = resumed.next_scales(model).values
    resumed.state = resumed.state.loaded(tmp_path, rank=0)
    assert torch.equal(resumed.next_scales(model).values, expected)
    assert resumed.state.margin_factor == factor
    assert not torch.equal(fresh, expected)
    assert resumed.saved(tmp_path) == saved == made.saved(tmp_path)


def test_magnitudes_survive_a_checkpoint_bit_for_bit(tmp_path):
    model = build()
    made = Calibrating(model, "rollout")
    arrive(made, ROLLOUTS, roomy(model))
    watch(made, model)
    made.saved(tmp_path)
    amax, loaded = made.state.amax_L3, KVState().loaded(tmp_path, rank=0).amax_L3
    assert not torch.equal(amax, amax.bfloat16().float())
    assert torch.equal(loaded, amax) and loaded.dtype == torch.float32


def test_a_state_from_before_the_first_rollouts_changes_nothing(tmp_path):
    model = build()
    made = Calibrating(model)
    expected = made.next_scales(model).values
    made.saved(tmp_path)
    made.state = made.state.loaded(tmp_path, rank=0)
    assert torch.equal(made.next_scales(model).values, expected)


def test_a_checkpoint_holds_what_it_always_held(tmp_path):
    """Also with prompts, scales and an observation pending, which are of the running engine."""
    text = (
        '{"step": 3, "rollouts": [[5, 6, 7]], "amax_L3": [[1.5, 2.0, 3.0], [0.5, 1.0, 2.5]], '
        '"saturated_L2": [[0.0, 0.25], [0.0, 0.0]], "margin_factor": 4.0}'
    )
    (tmp_path / "kv_calibration_0.json").write_text(text)
    model = build()
    made = Calibrating(model, "policy")
    arrive(made, ROLLOUTS, roomy(model))
    made.state = made.state.loaded(tmp_path, rank=0)
    assert made.state.step == 3 and made.state.rollouts == [[5, 6, 7]] and made.state.margin_factor == 4.0
    assert made.state.amax_L3.tolist() == [[1.5, 2.0, 3.0], [0.5, 1.0, 2.5]]
    assert made.state.coming_prompts == PROMPTS and made.state.margin_in_use == MARGIN and made.state.new is not None
    made.state.save(tmp_path, rank=1)
    assert (tmp_path / "kv_calibration_1.json").read_text() == text


# --- the order of calls ----------------------------------------------------------------------------------------------


def test_a_state_never_changes():
    """So that scales which could not be made or sent leave nothing behind."""
    model = build()
    made = Calibrating(model)
    arrive(made, ROLLOUTS, KVScales(torch.full((2, 3), 2.0**-9)))
    before = vars(made.state).copy()
    state = made.state
    watch(made, model)
    scales = [next_scales(state, made.how, model)[0].values for _ in range(2)]
    state.expecting([]), state.saturation(made.how), state.after_rollouts(made.how, [[5]], roomy(model), 7)
    assert torch.equal(*scales) and vars(state) == before
    with pytest.raises(FrozenInstanceError):
        state.margin_factor = 2.0


def test_prompts_come_before_the_first_scales():
    model = build()
    how = Calibrating(model).how
    with pytest.raises(RuntimeError, match=r"needs the coming prompts, but expecting\(\) was not called"):
        next_scales(KVState(), how, model)
    scales, state = next_scales(KVState().expecting(PROMPTS), how, model)
    assert len(scales) == 2 and state.margin_in_use == MARGIN * PROMPTS_ONLY_MARGIN


def test_scales_come_before_rollouts():
    model = build()
    how = Calibrating(model).how
    state = KVState().expecting(PROMPTS)
    with pytest.raises(RuntimeError, match="rollouts arrived before next_scales"):
        state.after_rollouts(how, ROLLOUTS, roomy(model), 0)
    scales, state = next_scales(state, how, model)
    assert state.after_rollouts(how, ROLLOUTS, scales, 0).step == 0


@pytest.mark.parametrize("call", ["next_scales", "after_rollouts", "saturation", "observed", "watching"])
def test_nothing_is_asked_for_while_a_forward_is_observed(call):
    model = build()
    made = Calibrating(model)
    arrive(made, ROLLOUTS, roomy(model))
    calls = {
        "next_scales": lambda: made.next_scales(model),
        "after_rollouts": lambda: arrive(made, ROLLOUTS, roomy(model)),
        "saturation": made.saturation,
        "observed": lambda: made.state.observed(made.how),
        "watching": lambda: watch(made, model),
    }
    with pytest.raises(RuntimeError, match="under way|already watches a forward"), made.watching():
        calls[call]()
    assert made.saturation() is None  # the block failed
    watch(made, model)
    calls[call]()
    assert made.saturation() is not None or call == "after_rollouts"


def test_a_forward_is_accounted_for_before_the_state_is_saved(tmp_path):
    model = build()
    made = Calibrating(model)
    arrive(made, ROLLOUTS, roomy(model))
    made.state.save(tmp_path, rank=0)  # nothing was shown yet
    watch(made, model)
    with pytest.raises(RuntimeError, match=r"call observed\(\) before save\(\)"):
        made.state.save(tmp_path, rank=0)
    assert made.saved(tmp_path)["amax_L3"] is not None


# --- layers that no scale serves -------------------------------------------------------------------------------------


def with_k_bias(size: float, layers=(0, 1)):
    """A Qwen2 with `size` on two of its 128 channels of k."""
    model = build("qwen2")
    for layer in layers:
        with torch.no_grad():
            model.model.layers[layer].self_attn.k_proj.bias[[3, 90]] = size
    return model


@pytest.mark.parametrize("mode", ["rollout", "policy"])
def test_outliers_of_k_are_named_once(mode, caplog):
    model = with_k_bias(100.0, layers=[1])
    made = Calibrating(model, mode)
    with caplog.at_level(logging.INFO, logger="trl_fp8"):
        scales = made.next_scales(model)
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert "kv_cache_skip_layers=[1]" in record.message
        error = observe_sequences(model, made.hook, PROMPTS).logit_error_L
        assert f": 1 ({error[1]:.2g})." in record.message and error[1] > LOGIT_ERROR_LIMIT
        for _ in range(2):
            arrive(made, ROLLOUTS, scales)
            watch(made, model)
            scales = made.next_scales(model)
    assert len([r for r in caplog.records if "outliers" in r.message]) == 1


@pytest.mark.parametrize("mode", ["rollout", "policy"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_an_ordinary_model_is_not_warned_of(architecture, mode, caplog):
    model = build(architecture)
    made = Calibrating(model, mode)
    made.next_scales(model)
    assert not caplog.records
    assert outlier_layers(observe_sequences(model, made.hook, PROMPTS).logit_error_L) == {}


def test_layers_in_high_precision_are_not_warned_of(caplog):
    model = with_k_bias(100.0)
    hook = AttentionHook(model, skip_layers={0})
    Calibrating(model, hook=hook).next_scales(model)
    [record] = caplog.records
    assert "kv_cache_skip_layers=[1]" in record.message
    caplog.clear()
    hook.skip({0, 1})
    Calibrating(model, hook=hook).next_scales(model)
    assert not caplog.records
    found = outlier_layers(observe_sequences(model, hook, PROMPTS).logit_error_L)
    assert list(found) == [0, 1]  # which is how they are found in the first place


def test_the_message_says_what_to_set():
    message = outlier_message({0: 0.3, 7: 1.25})
    assert "0 (0.3), 7 (1.2)" in message and "kv_cache_skip_layers=[0, 7]" in message


# --- a policy that diverged ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["rollout", "policy"])
@pytest.mark.parametrize("stage", ["prompts", "rollouts"])
def test_nan_is_an_error_that_names_the_layer(mode, stage):
    model = build()
    made = Calibrating(model, mode)
    if stage == "rollouts":
        made.next_scales(model)
    scale_up(model, 1, "v_proj", float("nan"))
    if stage == "rollouts":
        arrive(made, ROLLOUTS, roomy(model))
        watch(made, model)
    with pytest.raises(ValueError, match=r"cannot be calibrated: layer 1 v \(amax nan\)\."):
        made.next_scales(model)


def test_a_layer_of_zeros_is_an_error_that_names_the_layer():
    model = build()
    scale_up(model, 0, "k_proj", 0.0)
    with pytest.raises(ValueError, match=r"cannot be calibrated: layer 0 k \(amax 0\)\."):
        Calibrating(model).next_scales(model)


def test_a_rank_that_is_new_after_a_resume_calibrates_as_the_others(tmp_path):
    """One rank that ran a calibration forward while the others had scales would wait for them in its reduction."""
    made = Calibrating(build())
    made.state = KVState(amax_L3=torch.tensor([[1.0, 2.0, 3.0]] * 2), margin_factor=2.0)
    first, added = tmp_path / "first", Calibrating(build())
    first.mkdir()
    saved = made.saved(first)
    added.state = added.state.loaded(first, rank=3)
    assert added.saved(tmp_path) == saved


@pytest.mark.parametrize(
    "age, smallest, factor", [(0, 8.0, 8.0), (1, 2.0, 4.0), (2, 1.0, 2.0), (100, 1.0, 1.0), (101, 0.5, 1.0)]
)
def test_rollouts_are_judged_by_the_smallest_scales_that_they_may_have_seen(age, smallest, factor):
    cache, judged = object.__new__(KVCache), []
    cache._sent, cache._factors, cache.calibration = [], [], None
    generation = SimpleNamespace()
    cache.trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), state=SimpleNamespace(global_step=3), vllm_generation=generation
    )
    for scale, own_factor in ((0.5, 1.0), *[(4.0, 1.0)] * 98, (1.0, 2.0), (2.0, 4.0), (8.0, 8.0)):
        cache.kv_state = SimpleNamespace(factor_in_use=own_factor)
        generation.last_sync = SimpleNamespace(carried={KV_SCALES: KVScales(torch.full((2, 3), scale))})
        cache.after_sync()
    cache._logged = {True: cache.latest_scales}
    cache.kv_state = SimpleNamespace(after_rollouts=lambda _, sequences, *rest: judged.append(rest))
    cache.after_generation(Rollouts([[1]], [[2]], age=age))
    [(scales, step, found_factor)] = judged
    assert (scales.values.unique().tolist(), step, found_factor) == ([smallest], 3, factor)
    assert len({id(scales) for scales in cache._sent}) == 5
    with pytest.raises(RuntimeError, match="rollouts are 102 syncs old, but this process has made only 102"):
        cache.after_generation(Rollouts([[1]], [[2]], age=102))
