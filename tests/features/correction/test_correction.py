"""Rollout correction inside the real trainer: every preset, every loss, and what must not change."""

import copy
import logging
import math

import pytest
import torch
from transformers import TrainerCallback

from testing import oracles
from testing.runs import arguments, dataset, rows, training
from trl_fp8 import FP8GRPOConfig
from trl_fp8.features.correction import health
from trl_fp8.features.correction.correction import Correction, apply_correction
from trl_fp8.features.correction.importance import RolloutCorrection
from trl_fp8.features.correction.measures import BIN_EDGES
from trl_fp8.features.correction.presets import PRESETS, correction_from
from trl_fp8.features.correction.rejection import Rejection
from trl_fp8.features.run_log.log_file import read_run
from trl_fp8.features.run_log.run_log import BINS
from trl_fp8.quantization.codec.kv_scales import KV_SCALES
from trl_fp8.run import batch as batch_module
from trl_fp8.run.batch import Batch, values_of


LOSSES = ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "vespo", "sapo", "luspo"]
LEVELS = [
    (loss, level) for loss in LOSSES for level in ("token", "sequence") if (loss, level) != ("vespo", "sequence")
]
BAND = {"reject": ["geometric_ratio:0.98:1.02:measured", "token_veto:1e-4:"]}


@pytest.mark.engine
def test_every_loss_trains_with_rejection_under_both_denominators(checkpoint, tmp_path):
    """One after another, and at the level of tokens and of sequences. Each starts from what the one before it made."""
    turns = [(loss, level, denominator) for loss, level in LEVELS for denominator in ("keep", "shrink")]

    class Next(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            trainer.loss_type, trainer.importance_sampling_level, denominator = turns[state.global_step]
            trainer.feature(Correction).correction = correction_from(BAND | {"denominator": denominator})

    args = arguments(tmp_path, rollout_correction="monitor", beta=0.01, max_steps=len(turns))
    with training(checkpoint("qwen3"), args, callbacks=[Next()]) as trainer:
        trainer.train()
        for turn, row in zip(turns, rows(trainer), strict=True):
            assert math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]), turn
            assert "sampling/importance_sampling_ratio/mean" not in row  # TRL's ratio is not what was used
            assert row["mismatch/k3_kl"] > 0 and row["correction/effective_sample_size"] > 0.9, turn
        masked = [row["correction/fraction_masked_sequences"] for row in rows(trainer)]
        assert 0 < sum(masked) < len(masked)  # some sequences rejected, some trained on


def joined(outputs):
    """Trainer's and rollout's log-probs, mask and weights of several batches as lists [B][T], padded to one length."""
    names = ("old_per_token_logps", "sampling_per_token_logps", "completion_mask", "importance_sampling_ratio")
    longest = max(output["completion_mask"].shape[1] for output in outputs)
    padded = lambda x: torch.nn.functional.pad(x.double(), (0, longest - x.shape[1]))  # noqa: E731
    return [torch.cat([padded(output[name]) for output in outputs]).tolist() for name in names]


@pytest.mark.engine
def test_a_log_merges_what_it_covers(checkpoint, tmp_path):
    """Three steps of two generations each, and evaluations of two batches, one of them between two logs: every metric
    is that of all their tokens together. Mismatch grows and lengths differ from one generation to the next, so that no
    mean over generations would be the same. Some log-probs are infinite, for which weight and metrics are those of a
    token without one.
    """
    outputs, syncs = {"train": [], "eval": []}, {"train": [], "eval": []}
    stops = {"stop_token_ids": list(range(20, 36))}
    more = dict(gradient_accumulation_steps=2, steps_per_generation=1, logging_steps=3, max_steps=3)
    evaluation = dict(eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=8)
    flags = more | evaluation | {"generation_kwargs": stops, "vllm_importance_sampling_clip_max": 1.2}
    with training(checkpoint("qwen3"), arguments(tmp_path, **flags), eval_dataset=dataset(4)) as trainer:
        generate, score = trainer.vllm_generation.generate, trainer._generate_and_score_completions

        def disturbed(*args, **kwargs):
            prompts, completions, log_probs, ids = generate(*args, **kwargs)
            calls = sum(map(len, outputs.values()))
            random = torch.Generator().manual_seed(calls)
            for row in log_probs:
                for token in row:
                    token[0] += 0.05 * calls * torch.randn((), generator=random).item()
            log_probs[1][0][0], log_probs[2][0][0] = -math.inf, math.inf
            return prompts, completions, log_probs, ids

        def note(inputs):
            output, mode = score(inputs), "train" if trainer.model.training else "eval"
            outputs[mode].append(output)
            latest = trainer.vllm_generation.last_sync
            if not syncs[mode] or syncs[mode][-1] is not latest:
                syncs[mode].append(latest)  # the last one is that of the evaluation before it
            return output

        trainer.vllm_generation.generate, trainer._generate_and_score_completions = disturbed, note
        trainer.train()
        trained = [row for row in trainer.state.log_history if "mismatch/k3_kl" in row]
        evaluated = [row for row in trainer.state.log_history if "eval_mismatch/k3_kl" in row]
    evaluated = [{key.removeprefix("eval_"): value for key, value in row.items()} for row in evaluated]
    assert [row["step"] for row in trained + evaluated] == [3, 2, 3]  # transformers evaluates at the end, too
    assert [len(outputs[mode]) for mode in ("train", "eval")] == [6, 4] and len(syncs["train"]) == 3
    assert len({output["completion_mask"].sum().item() for output in outputs["train"]}) > 1
    logs = [(*trained, outputs["train"]), (evaluated[0], outputs["eval"][:2]), (evaluated[1], outputs["eval"][2:])]
    for row, batches in logs:
        old, sampled, mask, weights = joined(batches)
        expected = oracles.mismatch(old, sampled, mask, BIN_EDGES)
        expected |= oracles.correction(old, sampled, mask, weights, mask, high=1.2)
        ours = {key for key in row if key.startswith(("mismatch/", "correction/"))}
        others = {"all_rejected", "batch_norm_factor", "fraction_clipped_low"}
        assert ours == expected.keys() | {f"correction/{name}" for name in others}
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-5, abs=1e-9), name
        assert expected["mismatch/fraction_missing"] > 0 < expected["correction/fraction_clipped_high"]
        infinite = [
            w for T, W in zip(sampled, weights, strict=True) for x, w in zip(T, W, strict=True) if math.isinf(x)
        ]
        assert infinite == [1.0] * 2 * len(batches)
    row, (scales, errors, seconds) = (
        trained[0],
        zip(
            *[(sync.carried[KV_SCALES].values, sync.weight_relative_error, sync.seconds) for sync in syncs["train"]],
            strict=True,
        ),
    )
    assert (
        row["fp8/kv_scale_min"] == torch.stack(scales).min() and row["fp8/kv_scale_max"] == torch.stack(scales).max()
    )
    assert row["fp8/weight_relative_error"] == max(errors)
    assert row["fp8/sync_seconds"] == pytest.approx(sum(seconds) / len(seconds))


@pytest.mark.engine
def test_every_preset_trains(checkpoint, tmp_path):
    """One step after another, so that each also starts from what the one before it made of the policy. Two of those
    that change more than weights: the second starts from what the preset itself has made of it.
    """
    corrections = {name: preset.correction for name, preset in PRESETS.items()}
    twice = {name for name, one in corrections.items() if one.reject or one.bypass or one.needs_all_reduce}
    assert {"fp8_geometric_token_tis", "slime_mis", "verl_bypass_geometric"} <= twice
    names = [name for name in PRESETS for _ in range(2 if name in twice else 1)]

    class Next(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            trainer.feature(Correction).correction = corrections[names[state.global_step]]

    args = arguments(tmp_path, rollout_correction="monitor", max_steps=len(names))
    with training(checkpoint("qwen3"), args, callbacks=[Next()]) as trainer:
        trainer.train()
        found = rows(trainer)
        for name, row in zip(names, found, strict=True):
            assert math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]), name
            rules = {rule.statistic for rule in corrections[name].reject}
            logged = {key.rpartition("/")[2] for key in row if key.startswith("correction/fraction_rejected/")}
            assert logged == rules


@pytest.mark.engine
def test_a_preset_that_trl_could_express_is_what_the_loss_gets(checkpoint, tmp_path):
    """TRL computes its own mode beside it (token_truncate at 2), which must not win."""
    batches = []
    narrow = '{"bound": "mask", "bound_min": 0.95, "bound_max": 1.05}'
    with training(checkpoint("qwen3"), arguments(tmp_path, rollout_correction=narrow, max_steps=1)) as trainer:
        assert (trainer.args.correction.level, trainer.args.correction.bound) == ("token", "mask")
        original = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda inputs: batches.append(original(inputs)) or batches[0]
        trainer.train()
        assert "sampling/importance_sampling_ratio/mean" not in rows(trainer)[0]
    batch = batches[0]
    raw = torch.exp((batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * batch["completion_mask"])
    outside = (raw < 0.95) | (raw > 1.05)
    assert outside.any() and torch.equal(batch["importance_sampling_ratio"], raw.masked_fill(outside, 0))


@pytest.mark.engine
def test_thresholds_are_warned_about_once(checkpoint, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(health, "MIN_EFFECTIVE_SAMPLE_SIZE", 2.0)
    with caplog.at_level(logging.WARNING), training(checkpoint("qwen3"), arguments(tmp_path)) as trainer:
        trainer.train()
    assert len(rows(trainer)) > 1
    assert sum("correction/effective_sample_size = " in record.message for record in caplog.records) == 1


@pytest.mark.engine
def test_log_ratios_are_computed_once_a_generation(checkpoint, tmp_path, monkeypatch):
    """For weights, rejection, metrics and the run's file."""
    calls, original = [], batch_module.log_ratio
    monkeypatch.setattr(batch_module, "log_ratio", lambda *batch: calls.append(1) or original(*batch))
    args = arguments(tmp_path, rollout_correction="fp8_geometric_token_tis", max_steps=2)
    with training(checkpoint("qwen3"), args) as trainer:
        trainer.train()
    assert [len(row["log_ratio_counts"]) for row in read_run(tmp_path).rollouts] == [BINS + 2] * len(calls)
    assert len(calls) == 2


@pytest.fixture(scope="module")
def scored(checkpoint, tmp_path_factory):
    """A trainer after one step, and the batch of that step as TRL scored it.
    No other engine may start while it lives.
    """
    batches = []
    args = arguments(tmp_path_factory.mktemp("scored"), max_steps=1, rollout_correction="monitor")
    with training(checkpoint("qwen3"), args) as trainer:
        original = type(trainer)._generate_and_score_completions

        def keep(inputs):
            batches.append(original(trainer, inputs))
            return dict(batches[0])

        trainer._generate_and_score_completions = keep
        trainer.train()
        yield trainer, batches[0]


def loss_of(trainer, batch):
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def corrected(trainer, batch, correction):
    batch = dict(batch)
    metrics = apply_correction(batch, Batch(batch).ratio, correction, trainer.accelerator)
    return batch, values_of(metrics)


@pytest.mark.engine
@pytest.mark.parametrize("name", [name for name, p in PRESETS.items() if not p.correction.bypass])
def test_equal_log_probs_give_trls_uncorrected_loss_bit_for_bit(name, scored):
    trainer, batch = scored
    equal = dict(batch, sampling_per_token_logps=batch["old_per_token_logps"].clone())
    equal.pop("importance_sampling_ratio")
    ours, metrics = corrected(trainer, equal, PRESETS[name].correction)
    assert torch.equal(ours["importance_sampling_ratio"], torch.ones_like(ours["importance_sampling_ratio"]))
    assert metrics["mismatch/logp_difference_max"] == 0 and metrics["correction/fraction_masked_tokens"] == 0
    with_correction = loss_of(trainer, ours)
    trainer.vllm_importance_sampling_correction = False
    without = loss_of(trainer, equal)
    trainer.vllm_importance_sampling_correction = True
    assert torch.equal(with_correction[0], without[0])
    assert all(torch.equal(with_correction[1][key], without[1][key]) for key in without[1])


@pytest.mark.engine
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_a_mode_of_trl_is_trls_but_for_log_probs_that_are_infinite(mode, scored):
    trainer, batch = scored
    sampled = batch["sampling_per_token_logps"].clone()
    sampled[0, 0], sampled[1, 1] = math.inf, -math.inf
    correction = RolloutCorrection.from_trl_mode(mode, None, 2.0)
    ours, _ = corrected(trainer, dict(batch, sampling_per_token_logps=sampled), correction)
    known = sampled.isfinite() * batch["completion_mask"]
    log_r = (batch["old_per_token_logps"] - sampled.nan_to_num(0, 0, 0)) * known
    raw = (log_r.sum(-1, keepdim=True) if mode.startswith("sequence") else log_r).exp()
    expected = raw.clamp(max=2.0) if mode.endswith("truncate") else raw.masked_fill(raw > 2.0, 0.0)
    assert torch.equal(ours["importance_sampling_ratio"], expected)
    assert ours["num_items_in_batch"] is batch["num_items_in_batch"] and "tool_mask" not in ours


CORRECTIONS = [
    RolloutCorrection(bound_max=1.2),
    RolloutCorrection("token", "mask", 0.7, 1.4),
    RolloutCorrection("sequence", bound_max=1.5),
    *(
        RolloutCorrection(reject=(Rejection("token_ratio", 0.7, 1.4), Rejection("token_veto", 0.4)), denominator=one)
        for one in ("keep", "shrink")
    ),
]


@pytest.mark.engine
@pytest.mark.parametrize("correction", CORRECTIONS, ids=range(len(CORRECTIONS)))
@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_loss_and_its_gradient_agree_with_the_oracle(loss_type, level, correction, scored):
    trainer, batch = scored
    if loss_type == "vespo" and not correction.fits_vespo:
        return
    random = torch.Generator().manual_seed(7)
    noise = lambda size: size * torch.randn(batch["old_per_token_logps"].shape, generator=random)  # noqa: E731
    old = batch["old_per_token_logps"]
    batch = dict(batch, sampling_per_token_logps=old + noise(0.3), completion_mask=batch["completion_mask"].clone())
    batch["completion_mask"][1, 5:] = batch["completion_mask"][2, 2:] = 0
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    batch["advantages"] = torch.randn(len(old), generator=random)
    ours, metrics = corrected(trainer, batch, correction)
    trainer = copy.copy(trainer)
    trainer.loss_type, trainer.importance_sampling_level, trainer.beta = loss_type, level, 0.0
    trainer.epsilon_low, trainer.epsilon_high = 0.2, 1.1 if loss_type == "cispo" else 0.3
    logps = (old + noise(0.3)).double().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logps, torch.zeros_like(logps), None)
    loss = trainer._compute_loss(trainer.model, ours)
    (gradient,) = torch.autograd.grad(loss, logps)

    mask = ours["completion_mask"] * ours.get("tool_mask", 1)
    weights = ours["importance_sampling_ratio"].expand(mask.shape)
    args, low, high = trainer.args, trainer.epsilon_low, trainer.epsilon_high
    settings = {
        "loss": loss_type,
        "level": level,
        "low": low,
        "high": high,
        "tokens": int(mask.sum()),
        "length": trainer.max_completion_length,
        "sapo": (args.sapo_temperature_pos, args.sapo_temperature_neg),
        "vespo": (args.vespo_k_pos, args.vespo_lambda_pos, args.vespo_k_neg, args.vespo_lambda_neg),
    }
    now, constant = logps.detach().numpy(), logps.detach().numpy().copy()
    given = old.tolist(), weights.tolist(), mask.tolist(), batch["advantages"].tolist(), settings, constant
    assert loss.item() == pytest.approx(oracles.policy_loss(now, *given), rel=1e-5)
    assert metrics["correction/weight_mean"] == pytest.approx(weights[mask.bool()].mean().item())
    step, scale = 1e-5, gradient.abs().max().item()
    assert scale > 0
    for where in [(0, 0), (0, 3), (1, 4), (1, 6), (2, 1), (3, 7), (6, 2)]:
        around = []
        for sign in (1, -1):
            moved = now.copy()
            moved[where] += sign * step
            around.append(oracles.policy_loss(moved, *given))
        assert gradient[where].item() == pytest.approx((around[0] - around[1]) / (2 * step), abs=1e-5 * scale), where


@pytest.mark.engine
@pytest.mark.parametrize("denominator", ["keep", "shrink"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_an_all_rejected_batch_trains_on_nothing_and_is_reported(denominator, loss_type, scored):
    trainer, batch = scored
    trainer = copy.copy(trainer)
    trainer.loss_type = loss_type
    rule = Rejection("geometric_ratio", 0.999999, 1.000001)
    ours, metrics = corrected(trainer, batch, RolloutCorrection(reject=(rule,), denominator=denominator))
    assert metrics["correction/all_rejected"] == 1 and metrics["correction/fraction_masked_sequences"] == 1
    loss, gradients = loss_of(trainer, ours)
    # VESPO floors a weight of 0 at 1e-8 and multiplies over the tokens: not zero, but nothing
    most = 1e-8 if loss_type == "vespo" else 0.0
    assert abs(loss) <= most and all(gradient.abs().max() <= most for gradient in gradients.values())


@pytest.mark.engine
def test_shrink_changes_loss_mask_and_token_count_but_not_attention(scored):
    trainer, batch = scored
    rule = Rejection("geometric_ratio", 0.98, 1.02, centre="measured")
    keep, _ = corrected(trainer, batch, RolloutCorrection(reject=(rule,)))
    shrink, metrics = corrected(trainer, batch, RolloutCorrection(reject=(rule,), denominator="shrink"))
    assert torch.equal(shrink["completion_mask"], batch["completion_mask"])
    assert shrink["num_items_in_batch"] == shrink["tool_mask"].sum() < keep["num_items_in_batch"]
    dropped = 1 - shrink["tool_mask"].sum() / batch["completion_mask"].sum()
    assert metrics["correction/fraction_masked_tokens"] == pytest.approx(dropped.item(), abs=1e-6)
    assert (keep["importance_sampling_ratio"] == 0).sum() == (batch["completion_mask"] - shrink["tool_mask"]).sum()


@pytest.mark.engine
def test_bypass_makes_the_rollout_the_old_policy(scored):
    trainer, batch = scored
    ours, _ = corrected(trainer, batch, PRESETS["verl_bypass_geometric"].correction)
    real = batch["completion_mask"].bool()
    assert torch.equal(ours["old_per_token_logps"][real], batch["sampling_per_token_logps"][real])
    assert not torch.equal(ours["old_per_token_logps"][real], batch["old_per_token_logps"][real])


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"rollout_correction": "verl"}, ["rollout_correction='verl'", "not a preset", "nemo_icepop"]),
        ({"rollout_correction": '{"levels": 1}'}, ["['levels']", "batch_normalize"]),
        ({"rollout_correction": '{"bound_max": 0.5}'}, ["bound_max=0.5", "at least 1"]),
        ({"rollout_correction": '{"reject": ["geometric_ratio"]}'}, ["'geometric_ratio' is not a rejection rule"]),
        (
            {"rollout_correction": '{"reject": "token_veto:1e-4:"}'},
            ["reject='token_veto:1e-4:' is not a list"],
        ),
        ({"rollout_correction": '{"reject": null}'}, ["reject=None is not a list of rules"]),
        *(
            (
                {"rollout_correction": "nemo_icepop", f"vllm_importance_sampling_{name}": value},
                [f"rollout_correction='nemo_icepop' and vllm_importance_sampling_{name}={value!r} both", "Remove one"],
            )
            for name, value in {"mode": "token_mask", "clip_max": 7.0, "clip_min": 0.5, "cap": 2.5}.items()
        ),
        (
            {"rollout_correction": "nemo_icepop", "vllm_importance_sampling_clip_max": None},
            ["vllm_importance_sampling_clip_max=None both choose", '"bound_max"'],
        ),
        (
            {"rollout_correction": "monitor", "vllm_importance_sampling_correction": False},
            ["rollout_correction='monitor'", "nothing to correct"],
        ),
        (
            {"rollout_correction": "verl_sequence_is_rs", "loss_type": "vespo"},
            ["loss_type='vespo'", "level='sequence'"],
        ),
        (
            {
                "rollout_correction": "nemo_icepop",
                "repetition_penalty": 1.1,
                "fp8_weights": False,
                "kv_cache_dtype": "auto",
                "use_vllm": True,
            },
            ["repetition_penalty=1.1", "another distribution"],
        ),
    ],
)
def test_impossible_combinations_are_refused(flags, words):
    with pytest.raises(ValueError) as error:
        FP8GRPOConfig("out", use_cpu=True, **flags)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_correction_can_be_used_without_fp8():
    off = {"fp8_weights": False, "kv_cache_dtype": "auto", "use_vllm": True}
    args = FP8GRPOConfig("out", use_cpu=True, rollout_correction="nemo_icepop", **off)
    assert args.correction == PRESETS["nemo_icepop"].correction
    assert FP8GRPOConfig("out", use_cpu=True, **off).correction is None
