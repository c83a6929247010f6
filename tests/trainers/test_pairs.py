"""TRL's other trainers with adapters, evaluation, checkpoints and a resume in one run."""

import pytest
from peft import LoraConfig

from testing.other_trainers import KINDS, config_of, options_of
from testing.runs import training, trajectory


pytestmark = pytest.mark.engine

RESUMED = {"rloo": {}, "gmpo": {}, "distillation": {}, "gold": {}, "iw_opd": {}}
# TRL adds the adapter of its default teacher again after a resume, which PEFT refuses
RESUMED |= dict.fromkeys(("sdft", "sdpo"), {"teacher_model_kind": "live"})


@pytest.mark.parametrize("kind", RESUMED)
def test_a_resumed_run_with_adapters_and_evaluation_equals_the_uninterrupted_one(kind, checkpoint, tmp_path):
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    flags = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 3}
    flags |= {"vllm_max_model_length": 64, "explain_mismatch_steps": 0}  # a resume explains the mismatch anew
    flags |= RESUMED[kind]
    options = options_of(kind, checkpoint("qwen3"))
    options["eval_dataset"] = options["train"].select(range(4))

    def logged(resume=None):
        args = config_of(kind, tmp_path, **flags)
        kinds = {"trainer": KINDS[kind][2], "peft_config": LoraConfig(**lora)}
        with training(checkpoint("qwen3"), args, **kinds, **options) as trainer:
            trainer.train(resume_from_checkpoint=resume)
            assert trainer.vllm_generation.audit_failures == 0
            return trajectory(trainer)

    whole = logged()
    resumed = logged(str(tmp_path / "checkpoint-2"))
    assert len(whole) == 3
    assert resumed[-1] == whole[-1]


def test_a_run_that_is_resumed_within_an_epoch_trains_on_the_rest_of_its_batches(checkpoint, tmp_path):
    """An epoch has 2 steps. TRL's loader of IW-OPD repeats each batch, once for each micro-batch of a step."""
    flags = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    flags |= {"vllm_max_model_length": 64, "explain_mismatch_steps": 0}

    def logged(resume=None):
        args = config_of("iw_opd", tmp_path, **flags)
        options = options_of("iw_opd", checkpoint("qwen3"))
        with training(checkpoint("qwen3"), args, trainer=KINDS["iw_opd"][2], **options) as trainer:
            trainer.train(resume_from_checkpoint=resume)
            return trajectory(trainer)

    whole = logged()
    resumed = logged(str(tmp_path / "checkpoint-1"))
    assert len(whole) == 3 and len({row["grad_norm"] for row in whole}) == 3
    assert resumed[-2:] == whole[1:]


@pytest.mark.parametrize("kind", ["sdft", "sdpo"])
def test_the_averaged_teacher_of_a_resumed_run_is_that_of_the_uninterrupted_one(kind, checkpoint, tmp_path):
    flags = {"teacher_model_kind": "ema", "teacher_update_rate": 0.5, "vllm_max_model_length": 64}
    flags |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}

    def logged(resume=None):
        args = config_of(kind, tmp_path, **flags)
        options = options_of(kind, checkpoint("qwen3"))
        with training(checkpoint("qwen3"), args, trainer=KINDS[kind][2], **options) as trainer:
            trainer.train(resume_from_checkpoint=resume)
            return trajectory(trainer)

    whole = logged()
    assert logged(str(tmp_path / "checkpoint-2"))[-1] == whole[-1]
