"""The contract of `engine/protocol.py`: its loop is what a trainer does, with an engine that is not vLLM."""

import re

import pytest
from transformers.trainer_utils import rotate_checkpoints

from testing.fake_rollout_engine import FakeEngineTrainer, FakeRolloutEngine, SimulatedScales
from testing.runs import SMALL_K3, arguments, dataset, recorded, reward_digits, rows
from trl_fp8.engine import protocol
from trl_fp8.engine.protocol import Delivery, RolloutEngine
from trl_fp8.quantization.codec.kv_scales import KV_SCALES
from trl_fp8.run import saving
from trl_fp8.run.checkpoints import checkpoints
from trl_fp8.sync.shards import GatherFailed


# The calls of one generation and what they call, as the docstring draws them
LOOP = protocol.__doc__.partition("for each generation:\n")[2].partition("for each loss:")[0]
CALLS = re.findall(r"^ +(\w+)\(", LOOP, re.MULTILINE)


@pytest.fixture
def trainer(checkpoint, tmp_path):
    args = arguments(tmp_path, kv_cache_dtype="auto")
    return FakeEngineTrainer(checkpoint("qwen3"), reward_digits, args, dataset())


def test_a_trainer_makes_the_calls_of_the_contract_in_its_order(trainer):
    engine = trainer.vllm_generation
    assert isinstance(engine, RolloutEngine) and isinstance(engine.delivery, Delivery) and engine.last_sync is None
    trainer.train()
    assert CALLS == ["begin", "sync_weights", "deliver", "after_sync", "generate", "verify"]
    assert engine.calls == 3 * CALLS
    logged = rows(trainer)
    # the policy that is scored is the one that was delivered, but for the rounding of its weights
    assert len(logged) == 3 and all(0 < row["mismatch/k3_kl"] < SMALL_K3 for row in logged)
    assert all(row["fp8/audited_tensors"] == len(engine.delivery.held) for row in logged)
    assert engine.audit_failures == 0


def test_weights_that_are_not_delivered_again_show_as_a_mismatch(trainer, monkeypatch):
    """What the first test would see if deliveries did nothing."""
    engine, deliver = trainer.vllm_generation, trainer.vllm_generation.delivery.deliver

    def once(tensors, **options):
        return engine.last_sync or deliver(tensors, **options)

    monkeypatch.setattr(engine.delivery, "deliver", once)
    monkeypatch.setattr(trainer.args, "learning_rate", 0.1)
    trainer.train()
    assert rows(trainer)[-1]["mismatch/k3_kl"] > SMALL_K3


def test_a_generation_before_the_first_delivery_is_refused(trainer, monkeypatch):
    engine = trainer.vllm_generation
    monkeypatch.setattr(engine, "sync_weights", lambda: None)
    with pytest.raises(RuntimeError, match="no complete policy"):
        trainer.train()
    assert engine.calls == ["begin", "generate", "verify"] and trainer.state.global_step == 0


def test_two_tensors_that_are_written_to_one_place_fail_the_audit(trainer):
    engine, names = trainer.vllm_generation, [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    engine.delivery.held[names[0]] = engine.delivery.held[names[1]]
    with pytest.raises(RuntimeError, match=f"failed its audit: .'{names[0]}'.$"):
        trainer.train()
    assert engine.calls == ["begin", "sync_weights", "deliver"] and engine.audit_failures == 1


def test_weights_that_change_after_a_delivery_are_never_sampled_from(trainer, monkeypatch):
    engine, name = trainer.vllm_generation, "model.norm.weight"
    monkeypatch.setattr(engine, "_after_sync", lambda: engine.delivery.held[name].mul_(2))
    with pytest.raises(RuntimeError, match=f"changed since the last sync: .'{name}'.$"):
        trainer.train()
    assert engine.calls == CALLS and engine.audit_failures == 1 and trainer.state.global_step == 0


def test_an_fp8_kv_cache_needs_of_an_engine_only_a_store_of_scales(checkpoint, tmp_path):
    trainer = FakeEngineTrainer(
        checkpoint("qwen3"), reward_digits, arguments(tmp_path, kv_cache_dtype="fp8", learning_rate=0.05), dataset()
    )
    trainer.train()
    logged = rows(trainer)
    assert len(logged) == 3 and all(0 < row["mismatch/k3_kl"] < SMALL_K3 for row in logged)
    scales = trainer.vllm_generation.last_sync.carried[KV_SCALES]
    engine = trainer.vllm_generation.kv_scales()
    engine.verify(scales)
    assert len({row["fp8/kv_scale_max"] for row in logged}) > 1


def test_kv_scales_that_an_engine_does_not_take_are_never_sampled_under(checkpoint, tmp_path, monkeypatch):
    trainer = FakeEngineTrainer(
        checkpoint("qwen3"), reward_digits, arguments(tmp_path, kv_cache_dtype="fp8"), dataset()
    )
    monkeypatch.setattr(SimulatedScales, "write", lambda self, scales: None)
    with pytest.raises(RuntimeError, match="scales did not arrive"):
        trainer.train()
    assert "generate" not in trainer.vllm_generation.calls


def test_a_trainer_needs_no_kernels_of_its_engine(trainer):
    """As of one in another process: the engine's modules are not compared, and the run goes on."""
    assert isinstance(trainer.vllm_generation, FakeRolloutEngine)
    for feature in trainer.features:
        feature.engine_started(trainer.vllm_generation.numerics, None)
    trainer.train()
    assert len(rows(trainer)) == 3


def test_an_old_checkpoint_is_deleted_only_when_a_newer_one_is_whole(checkpoint, tmp_path, monkeypatch):
    whole = []

    def rotate(**options):
        whole.append([path.name for path in checkpoints(tmp_path)[0]])
        rotate_checkpoints(**options)

    monkeypatch.setattr(saving, "rotate_checkpoints", rotate)
    flags = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 2}
    args = arguments(tmp_path, kv_cache_dtype="auto", **flags)
    FakeEngineTrainer(checkpoint("qwen3"), reward_digits, args, dataset()).train()
    assert whole == [["checkpoint-1"], ["checkpoint-1", "checkpoint-2"]]
    assert [path.name for path in checkpoints(tmp_path)[0]] == ["checkpoint-2"]


def test_a_checkpoint_of_weights_alone_is_resumed_from_with_a_warning(checkpoint, tmp_path, caplog):
    flags = {"kv_cache_dtype": "auto", "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    for name, weights_alone in (("whole", False), ("weights", True)):
        args = arguments(tmp_path / name, save_only_model=weights_alone, **flags)
        FakeEngineTrainer(checkpoint("qwen3"), reward_digits, args, dataset()).train()
        caplog.clear()
        trainer = FakeEngineTrainer(checkpoint("qwen3"), reward_digits, args, dataset())
        trainer.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-1"))
        assert ("the learning rate schedule begin anew" in caplog.text) == weights_alone
        assert trainer.state.global_step == 2


@pytest.mark.parametrize("step", [2, 4, 5])
def test_a_run_that_is_resumed_in_a_later_epoch_takes_the_prompts_of_that_epoch(step, checkpoint, tmp_path):
    """An epoch has 4 steps of 2 prompts here. TRL draws the orders of all epochs from one generator."""
    flags = {"kv_cache_dtype": "auto", "save_strategy": "steps", "save_steps": 1, "max_steps": 8}
    args = arguments(tmp_path, **flags)

    def prompts_of(resume=None):
        trainer = FakeEngineTrainer(checkpoint("qwen3"), reward_digits, args, dataset(8))
        prompts = recorded(trainer, "_generate", lambda output, prompts: list(prompts))
        trainer.train(resume_from_checkpoint=resume)
        return prompts

    whole = prompts_of()
    assert len(whole) == 8 and whole[:4] != whole[4:]
    assert prompts_of(str(tmp_path / f"checkpoint-{step}")) == whole[step:]


def test_an_error_of_any_kind_is_raised_on_all_ranks():
    with pytest.raises(RuntimeError, match="the export: no memory"), saving.failing_together("the export"):
        raise MemoryError("no memory")


def test_a_rank_whose_gather_broke_off_enters_no_broadcast(monkeypatch):
    entered = []
    monkeypatch.setattr(saving, "broadcast_object_list", entered.append)
    with pytest.raises(GatherFailed, match="the others wait"), saving.failing_together("the export"):
        raise GatherFailed("gathering broke off, and the others wait")
    assert not entered
