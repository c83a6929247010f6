"""Top-k, top-p and min-p on a real engine: the trainer's log-probs are of what the engine sampled from."""

import pytest
import torch
import trl.trainer.utils as trl_utils
from trl import GRPOTrainer
from vllm import SamplingParams

from testing import engines
from testing.runs import arguments, recorded, rows, training
from trl_fp8.features.truncated_sampling.truncated_head import truncated_head
from trl_fp8.features.truncated_sampling.truncation import BatchSurvivors, Truncation
from trl_fp8.policy.swapped import scored_by
from trl_fp8.sync.records import Occasion


pytestmark = pytest.mark.engine

SAMPLING = {"top_p": 0.6, "min_p": 0.005, "temperature": 0.8}
VOCABULARY = 64
# Prompts in chunks of 16 tokens, and a cache too small for all requests, so that some are computed twice
ENGINE = {"max_logprobs": -1, "max_num_batched_tokens": 16, "block_size": 32}
ENGINE["kv_cache_memory_bytes"] = 4 * 2 * 2 * 2 * 64 * 1 * 32  # blocks; layers, k and v, heads, head size, FP8, tokens


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory):
    """A trainer after two generations with two updates each, and the batches that it made of them."""
    flags = {
        "num_iterations": 2,
        "max_steps": 4,
        "beta": 0.04,
        "fp8_forward": "one_forward",
        "vllm_engine_kwargs": ENGINE,
    }
    folder = tmp_path_factory.mktemp("truncated")
    with training(checkpoint("qwen3"), arguments(folder, **SAMPLING | flags)) as trainer:
        batches = recorded(trainer, "_generate_and_score_completions", lambda output, *_: output)
        trainer.train()
        yield trainer, batches


def test_with_one_forward_nothing_is_left_of_the_mismatch(run):
    trainer, batches = run
    measured = [row for row in rows(trainer) if "mismatch/k3_kl" in row]
    assert len(measured) == len(batches) == 2 and len(rows(trainer)) == 4
    assert all(row["mismatch/logp_difference_max"] == 0 and row["correction/ratio_mean"] == 1 for row in measured)
    assert all(1 < row["sampling/survivors_mean"] < 30 for row in measured)
    first, second = rows(trainer)[:2]
    assert first["clip_ratio/region_mean"] == 0 < second["clip_ratio/region_mean"]  # of updates on one batch
    assert first["kl"] == 0.0 < second["kl"]  # the reference is of the survivors, too, and computed alike


def test_the_engine_tells_which_tokens_were_left(run):
    """Against the log-probs of the whole vocabulary, which are -inf for what was dropped."""
    trainer, _ = run
    assert trainer.vllm_generation.generation_kwargs["top_k"] == VOCABULARY  # vLLM wants a bound; this is none
    parameters = SamplingParams(**SAMPLING, top_k=9, max_tokens=24, logprobs=-1, ignore_eos=True)
    llm, steps = trainer.vllm_generation.llm, []
    llm.begin(Occasion(9, 1, 1), keep_weights=True)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule
    scheduler.schedule = lambda *args, **kwargs: steps.append(schedule(*args, **kwargs)) or steps[-1]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in engines.PROMPTS], parameters, use_tqdm=False)
    scheduler.schedule = schedule
    assert any(step.scheduled_cached_reqs.resumed_req_ids for step in steps)  # a request that began again
    found = trainer.feature(Truncation).log.notes_on(
        [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    )
    for output, survivors in zip(outputs, found, strict=True):
        prompt, completion = len(output.prompt_token_ids), output.outputs[0]
        assert (survivors.counts_T[:prompt] == 0).all() and (survivors.counts_T[prompt:] > 0).all()
        ends = survivors.counts_T[prompt:].cumsum()
        for end, count, row in zip(ends, survivors.counts_T[prompt:], completion.logprobs, strict=True):
            left = {token for token, value in row.items() if value.logprob > float("-inf")}
            assert set(survivors.ids_E[end - count : end].tolist()) == left and len(row) >= VOCABULARY


def scored(trainer, batch, *, truncated):
    """Log-probs of a batch's completions, outside of a step."""
    ids, mask = (
        torch.cat([batch[f"{part}_{name}"] for part in ("prompt", "completion")], 1) for name in ("ids", "mask")
    )
    columns = batch["completion_ids"].shape[1]
    survivors = BatchSurvivors(batch["survivor_counts"], batch["survivor_ids"]).rows(mask, columns)
    head = truncated_head(survivors) if truncated else trl_utils._ChunkedLogProbFunction
    with torch.no_grad(), scored_by(head):
        return GRPOTrainer._get_per_token_logps_and_entropies(trainer, trainer.model, ids, mask, columns, 4)[0]


def test_with_kernels_of_its_own_the_trainer_is_off_by_rounding_and_not_by_what_was_dropped(run):
    trainer, batches = run
    batch = batches[-1]  # of the policy before the last two updates
    trainer.vllm_generation.sync_weights()
    fresh = trainer._generate_and_score_completions([{"prompt": "10+20="}] * 8)
    real = fresh["completion_mask"].bool()
    theirs = fresh["sampling_per_token_logps"][real]
    ours, full = (scored(trainer, fresh, truncated=truncated)[real] for truncated in (True, False))
    assert torch.equal(fresh["old_per_token_logps"][real], theirs)
    assert (ours - theirs).abs().mean() < 0.3 < (full - theirs).abs().mean()
    assert (full - theirs).mean() < -0.3  # -log 0.6 is 0.5, and all of it has one sign
    assert batch["survivor_ids"].max() < VOCABULARY


def test_the_rows_that_trl_scores_on_a_gpu_give_the_same(run, monkeypatch):
    trainer, batches = run
    batch = batches[0]
    everywhere = scored(trainer, batch, truncated=True)
    monkeypatch.setattr(trl_utils, "_use_triton", lambda device: True)
    assert torch.equal(scored(trainer, batch, truncated=True), everywhere)


def test_tokens_without_survivors_are_not_trained_on(run):
    trainer, _ = run
    feature = trainer.feature(Truncation)
    log = feature.log
    note = log.generated
    log.generated = lambda outputs: note(outputs) or [record[1].counts_T.fill(0) for record in log.records[:1]]
    with pytest.raises(RuntimeError, match=r"log-probs of \d+ tokens, but for \d+ of them it did not return"):
        trainer._generate_and_score_completions([{"prompt": "10+20="}] * 8)
    assert feature._current is not None
