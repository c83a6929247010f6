"""Two ranks under DDP, an engine each: equal engines, rollouts of other numbers of turns, a run that resumes, a rank
that dies, a rank that drifts.
"""

from pathlib import Path

import pytest

from .ranks import launch, run


pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(600)]

ACCELERATE = Path(__file__).parents[2] / "examples" / "accelerate_configs"
# Everything that has a state of its own: rollouts used for several optimizer steps, scales observed in the rollouts,
# quantized weights shared by forward and sync, gradients of two micro-batches
FLAGS = dict(
    fp8_forward="one_forward",
    gradient_accumulation_steps=2,
    num_iterations=2,
    max_steps=5,
    save_strategy="steps",
    save_steps=1,
)


def trajectory(report: dict) -> list[dict]:
    return [
        {name: value for name, value in row.items() if "seconds" not in name and name != "step_time"}
        for row in report["log"]
    ]


@pytest.fixture(scope="module")
def died(checkpoint, tmp_path_factory):
    """A launch whose second rank is killed, and the checkpoint from which it can go on."""
    folder = tmp_path_factory.mktemp("died")
    ended = run("killed", folder, config=ACCELERATE / "cpu_ddp.yaml", checkpoint=checkpoint("qwen3"), **FLAGS)
    # killed between the two optimizer steps of a generation: the second is made from the rollouts in the checkpoint
    return ended, str(folder / "run" / "checkpoint-1")


@pytest.fixture(scope="module")
def uninterrupted(died, checkpoint, tmp_path_factory):
    """What each rank reports of a run; under "resumed" the run that died, which its processes finished before it."""
    options = FLAGS | {"config": ACCELERATE / "cpu_ddp.yaml", "checkpoint": checkpoint("qwen3"), "resume": died[1]}
    options["mixture"] = checkpoint("qwen3_moe")
    return launch("resume_then_train_and_drift", tmp_path_factory.mktemp("ddp"), **options)


def test_both_ranks_engines_hold_the_same_policy(uninterrupted):
    first, second = uninterrupted
    assert first["distributed_type"] == second["distributed_type"] == "MULTI_CPU"
    assert first["engine"] == second["engine"]
    assert first["log_probs"] == second["log_probs"]
    assert first["kv_scales"] == second["kv_scales"]
    assert first["audit_failures"] == second["audit_failures"] == 0


def test_the_precision_flow_leaves_no_mismatch_under_ddp(uninterrupted):
    rows = trajectory(uninterrupted[0])
    assert len(rows) == 5 and len({row["grad_norm"] for row in rows}) == 5
    # without one forward, the same model on one process is at 0.1 (test_trainer)
    measured = [row["mismatch/logp_difference_mean"] for row in rows if "mismatch/logp_difference_mean" in row]
    assert len(measured) == 3 and max(measured) < 1e-5  # two optimizer steps for each generation


def test_a_killed_rank_ends_the_job_and_the_run_resumes(died, uninterrupted):
    ended, _ = died
    assert ended.status != 0 and ended.reports == []
    assert "SIGKILL" in ended.output or "Signal 9" in ended.output or "exitcode  : -9" in ended.output
    again = [report["resumed"] for report in uninterrupted]
    assert trajectory(again[0]) == trajectory(uninterrupted[0])
    assert again[0]["engine"] == again[1]["engine"] == uninterrupted[0]["engine"]


@pytest.mark.parametrize("source", ["tools", "environment", "rollout_func"])
def test_ranks_whose_rollouts_need_other_numbers_of_turns_do_not_wait_for_each_other(source, uninterrupted):
    first, second = (report["apart"][source] for report in uninterrupted)
    assert (first["calls"], second["calls"]) == ([0, 0, 0, 0, 1, 2, 2, 2, 2], [0, 0, 1, 1, 1, 2, 2])  # in which step
    assert first["engine"] == second["engine"] and first["audit_failures"] == second["audit_failures"] == 0
    rows = trajectory(first)
    assert len({row["grad_norm"] for row in rows}) == 3 and all(row["grad_norm"] > 0 for row in rows)
    # tokens of every turn were sampled from the policy that the trainer scores
    assert all(row["mismatch/logp_difference_mean"] < 1e-5 for row in rows)


def test_a_rank_refuses_its_own_changed_engine_and_the_next_sync_of_both_repairs_it(uninterrupted):
    first, second = (report["apart"]["changed"] for report in uninterrupted)
    assert first == "" and "changed since the last sync: model.embed_tokens.weight" in second


def test_a_policy_that_drifted_apart_is_named_on_every_rank(uninterrupted):
    for report in uninterrupted:
        assert "not the same on every rank" in report["drift"] and "hold different policies" in report["drift"]
        assert "model.layers.1.mlp.up_proj.weight" in report["drift"] and "layers.0" not in report["drift"]


def test_every_weight_of_a_mixture_comes_back_from_its_checkpoint(uninterrupted):
    """Into the best model and into a resumed run, whatever its name is in the file."""
    for report in (report["mixture"] for report in uninterrupted):
        assert report["best"].endswith("checkpoint-1")
        assert report["lost"] == report["not resumed"] == report["same"] == [] and report["same_log"]
