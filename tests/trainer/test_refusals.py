"""What a trainer says of a model that no engine can serve, and that TRL alone trains it."""

import json

import pytest
import torch
from datasets import Dataset
from peft import AdaptionPromptConfig, PrefixTuningConfig, PromptTuningConfig
from transformers import dynamic_module_utils
from vllm.model_executor.models import registry

from testing import engines, other_models, tiny_models
from testing.fake_rollout_engine import FakeEngineTrainer
from testing.reference_experts import offered_fp8_experts
from testing.runs import arguments, dataset, reward_digits, training
from trl_fp8.engine.vllm import generation as fp8_generation
from trl_fp8.engine.vllm.cpu.reference_experts import ReferenceUnquantizedExperts
from trl_fp8.engine.vllm.generation import FP8VLLMGeneration
from trl_fp8.policy.model import dequantizing_config
from trl_fp8.recipe import families, servable


@pytest.fixture(autouse=True)
def look_at_classes_in_this_process(monkeypatch):
    """vLLM's registry would start another one for each class: seconds."""
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda fn: fn())


@pytest.fixture
def no_engine(monkeypatch):
    def start(**kwargs):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(fp8_generation, "RolloutLLM", start)


def saved(model_type, folder) -> str:
    policy = other_models.policy(model_type).to(torch.bfloat16)
    policy.save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return str(folder)


BF16 = {"fp8_weights": False, "kv_cache_dtype": "auto", "use_vllm": True}


@pytest.mark.parametrize("flags", [{}, {"kv_cache_dtype": "auto"}, BF16], ids=["fp8", "weights", "nothing"])
def test_models_that_cannot_be_read_back_are_refused_before_an_engine_starts(flags, tmp_path, no_engine):
    model = saved("gpt_neox", tmp_path / "model")
    with pytest.raises(ValueError, match="type 'gpt_neox' cannot be served.*q, k, v as one tensor"):
        training(model, arguments(tmp_path / "run", **flags)).__enter__()


@pytest.mark.parametrize(
    "model_type, flags, said",
    [
        (
            "glm4_moe",
            {},
            "fp8_forward='one_forward' with a policy of type 'glm4_moe'.* layers of cohere, .*fp8_forward='off'",
        ),
        ("qwen3_moe", {"fp8_backward": "fp8"}, "fp8_backward='fp8' with FP8 experts .*fp8_ignored_modules"),
    ],
)
def test_policies_that_cannot_follow_are_refused_before_an_engine_starts(
    model_type, flags, said, checkpoint, tmp_path, no_engine
):
    with offered_fp8_experts(), pytest.raises(ValueError, match=said):
        training(checkpoint(model_type), arguments(tmp_path, fp8_forward="one_forward", **flags)).__enter__()


PROMPT = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
PREFIX = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
LLAMA_ADAPTER = AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1)


@pytest.mark.parametrize(
    "peft_config, flags, said",
    [
        (PROMPT, {}, "PromptTuningConfig.* peft_type='PROMPT_TUNING'"),
        (PROMPT, BF16, "PromptTuningConfig"),
        (PREFIX, {"fp8_base": True}, "PrefixTuningConfig"),
        (LLAMA_ADAPTER, {"kv_cache_dtype": "auto"}, "AdaptionPromptConfig"),
    ],
    ids=["fp8", "nothing", "prefix-on-a-base", "llama-adapter"],
)
def test_learned_prompts_are_refused_by_name_before_an_engine_starts(
    peft_config, flags, said, checkpoint, tmp_path, no_engine
):
    with pytest.raises(ValueError, match=f"peft_config={said}.*Use LoraConfig, or .*use_vllm=False"):
        training(checkpoint("llama"), arguments(tmp_path, **flags), peft_config=peft_config).__enter__()


def test_the_remedy_of_a_learned_prompt_trains_it(checkpoint, tmp_path, no_engine):
    args = arguments(tmp_path, max_steps=1, **servable.WITHOUT_ENGINE)
    with training(checkpoint("llama"), args, peft_config=PROMPT) as trainer:
        [learned] = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        before = learned.detach().clone()
        trainer.train()
        assert not torch.equal(before, learned)


def test_the_remedy_of_a_refused_model_trains_it(tmp_path, no_engine):
    args = arguments(tmp_path / "run", max_steps=1, **servable.WITHOUT_ENGINE)
    with training(saved("gpt_neox", tmp_path / "model"), args) as trainer:
        before = trainer.model.gpt_neox.layers[1].mlp.dense_h_to_4h.weight.detach().clone()
        trainer.train()
        assert not torch.equal(before, trainer.model.gpt_neox.layers[1].mlp.dense_h_to_4h.weight)


OWN_CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class MyConfig(Qwen3Config):
    model_type = "mine"


class MyForCausalLM(Qwen3ForCausalLM):
    config_class = MyConfig
"""


def test_an_architecture_that_vllm_does_not_know_is_named_alone(tmp_path, monkeypatch, no_engine):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    model = tiny_models.save_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "own_code.py").write_text(OWN_CODE)
    changed = json.loads((tmp_path / "model" / "config.json").read_text()) | {"architectures": ["MyForCausalLM"]}
    mapped = {"AutoConfig": "own_code.MyConfig", "AutoModelForCausalLM": "own_code.MyForCausalLM"}
    changed |= {"model_type": "mine", "auto_map": mapped}
    (tmp_path / "model" / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="type 'mine' .*knows no class for MyForCausalLM") as error:
        training(model, arguments(tmp_path / "run", trust_remote_code=True)).__enter__()
    assert "Llama" not in str(error.value)


@pytest.fixture
def kept():
    """A class of generation that can be reached although it was refused, and what was made of it."""
    made = []

    class Kept(FP8VLLMGeneration):
        def __init__(self, **kwargs):
            made.append(self)
            super().__init__(**kwargs)

    return Kept, made


@pytest.mark.engine
def test_experts_that_vllm_packs_are_refused_on_cpu(checkpoint, kept, monkeypatch):
    """With an activation that the reference lacks vLLM takes its own kernel, which packs at the first load only."""
    monkeypatch.setattr(ReferenceUnquantizedExperts, "_supports_activation", staticmethod(lambda activation: False))
    Kept, made = kept
    with pytest.raises(ValueError, match="where a sync cannot write: experts are packed or shuffled for"):
        engines.start(checkpoint("qwen3_moe"), engines.some_scales(2, 1), generation=Kept)
    engines.shutdown(made[0].llm)


@pytest.mark.engine
def test_other_names_are_found_in_the_engine_where_no_list_has_them(kept, tmp_path, monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "laguna", families.Family(tested=False))
    Kept, made = kept
    with pytest.raises(ValueError, match="type 'laguna' cannot be served") as error:
        engines.start(saved("laguna", tmp_path), generation=Kept, kv_cache_dtype="auto")
    engines.shutdown(made[0].llm)
    assert "defect" not in str(error.value)


def test_images_are_nothing_for_a_text_model(checkpoint, tmp_path):
    rows = dataset().add_column("image", [None] * len(dataset()))
    with pytest.raises(ValueError, match="train_dataset has a column 'image'.*sees no images. Remove the column"):
        with training(checkpoint("qwen3"), arguments(tmp_path), train=rows):
            pass


def test_a_checkpoint_in_another_quantization_is_not_trained(tmp_path):
    config = tiny_models.config()
    config.quantization_config = {"quant_method": "awq", "bits": 4}
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"is quantized \(awq\). Training starts from checkpoints in high precision, block FP8"
    ):
        dequantizing_config(str(tmp_path))


def started(tmp_path, model, train=None, **flags):
    with training(model, arguments(tmp_path / "run", **flags), train=train or dataset()):
        raise AssertionError("an engine was started")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"vllm_engine_kwargs": {"enforce_eger": True}}, r"sets enforce_eger \(did you mean enforce_eager\?\)"),
        ({"vllm_engine_kwargs": {"max_model_len": 96}}, r"sets \['max_model_len'\], .* flags .*vllm_max_model_length"),
        ({"resume_from_checkpoint": "checkpoint-3"}, "resume_from_checkpoint='checkpoint-3': there is no such folder"),
    ],
)
def test_a_name_that_nothing_has_is_refused_before_the_policy_is_loaded(
    flags, text, checkpoint, tmp_path, monkeypatch
):
    model = checkpoint("qwen3")
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda *_, **__: pytest.fail("a model was made"))
    with pytest.raises(ValueError, match=text):
        started(tmp_path, model, **flags)


def test_a_folder_that_is_not_there_is_refused_by_its_name(no_engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="^model='./qwen': there is no such folder, seen from"):
        started(tmp_path, "./qwen")


def test_a_dataset_without_prompts_is_refused(no_engine, checkpoint, tmp_path):
    with pytest.raises(ValueError, match="train_dataset has no column 'prompt', but 'question'"):
        started(tmp_path, checkpoint("qwen3"), train=dataset().rename_column("prompt", "question"))


def test_a_model_that_was_made_in_memory_is_refused(no_engine, tmp_path):
    with pytest.raises(ValueError, match="is a Qwen3ForCausalLM that was loaded from nowhere .*save_pretrained"):
        started(tmp_path, tiny_models.build("qwen3"))


@pytest.mark.parametrize("flags", [{}, {"vllm_max_model_length": None}], ids=["flag", "positions"])
def test_a_prompt_that_fills_the_context_is_refused_before_the_engine_starts(flags, no_engine, checkpoint, tmp_path):
    rows = [{"prompt": "1+1="}] * 40 + [{"prompt": "1" * 129}] + [{"prompt": "2+2="}] * 40
    with pytest.raises(ValueError, match="^train_dataset has a prompt of 129 tokens, and the engine"):
        started(tmp_path, checkpoint("qwen3"), train=Dataset.from_list(rows), **flags)


def test_a_streamed_prompt_that_fills_the_context_is_named(checkpoint, tmp_path):
    rows = Dataset.from_list([{"prompt": "1" * 64}] * 8).to_iterable_dataset()
    args = arguments(tmp_path, kv_cache_dtype="auto")
    trainer = FakeEngineTrainer(checkpoint("qwen3"), reward_digits, args, rows)
    with pytest.raises(ValueError, match="^a turn begins with a prompt of 64 tokens, .* context holds 64 with the"):
        trainer.train()
    assert "generate" not in trainer.vllm_generation.calls
