"""TRL's other trainers with adapters, evaluation, checkpoints and a resume in one run."""

import pytest
from peft import LoraConfig

from testing.other_trainers import KINDS, config_of, options_of
from testing.runs import training, trajectory


pytestmark = pytest.mark.engine

RESUMED = {"rloo": {}, "gmpo": {}, "gold": {}, "iw_opd": {}}
# TRL adds the adapter of its default teacher again after a resume, which PEFT refuses
RESUMED["sdpo"] = {"teacher_model_kind": "live"}


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
