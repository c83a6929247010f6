"""The example configurations: what accelerate and TRL make of them, and that the models they name are FP8 throughout
at those sizes. Whether they fit is in tests/planning.
"""

import importlib.util
import json
import re
import shlex
import sys
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import yaml
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from transformers import AutoModelForCausalLM, TrainingArguments
from trl import ModelConfig, TrlParser

from testing import engines, published
from testing.fake_rollout_engine import FakeEngineTrainer
from testing.launches import launched, without_hub
from testing.runs import arguments
from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer
from trl_fp8.scripts import grpo
from trl_fp8.scripts.arguments import Parser


ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
LAUNCHERS = {  # file -> type, machines, processes on all of them
    "ddp": (DistributedType.MULTI_GPU, 1, 8),
    "fsdp2": (DistributedType.FSDP, 1, 8),
    "zero3": (DistributedType.DEEPSPEED, 1, 8),
    "multi_node": (DistributedType.FSDP, 2, 16),
    "cpu_ddp": (DistributedType.MULTI_GPU, 1, 2),
}
RECIPES = {  # file -> processes, prompts a generation, updates a generation
    "grpo_addition": (1, 16, 1),
    "grpo_addition_moe": (1, 16, 1),
    "grpo_addition_lora": (1, 16, 1),
    "qwen3_8b_base_8xh100": (8, 32, 1),
    "qwen3_8b_gsm8k_8xh100": (8, 32, 1),
    "llama3_1_8b_8xh100": (8, 32, 2),
    "qwen3_4b_1xh200": (1, 32, 1),
    "qwen3_30b_a3b_base_8xh200": (8, 32, 1),
    "qwen3_1_7b_gsm8k_lora_1xh100": (1, 32, 1),
    "qwen3_8b_gsm8k_lora_fp8_base_1x24gb": (1, 16, 1),
    "qwen3_8b_gsm8k_lora_fp8_base_1xh100": (1, 32, 1),
}
OF_REAL_MODELS = [name for name in RECIPES if not name.startswith("grpo_addition")]
ARCHITECTURES = {  # the models' config.json, and the parameters that their cards state, in billions
    "Qwen/Qwen3-8B": (published.qwen3_8b(), 8.19),
    "Qwen/Qwen3-8B-Base": (published.qwen3_8b(), 8.19),
    "Qwen/Qwen3-4B": (published.qwen3_4b(), 4.02),
    "meta-llama/Llama-3.1-8B-Instruct": (published.llama3_1_8b(), 8.03),
    "Qwen/Qwen3-1.7B": (published.qwen3_1_7b(), 1.72),
    "Qwen/Qwen3-30B-A3B-Base": (published.qwen3_30b_a3b(), 30.53),  # the card rounds to 30.5
}
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def launcher(name: str) -> Path:
    return EXAMPLES / "accelerate_configs" / f"{name}.yaml"


def recipe(name: str) -> Path:
    return (EXAMPLES / "configs" if name in OF_REAL_MODELS else EXAMPLES) / f"{name}.yaml"


def example(script: str):
    """An example script as a module."""
    spec = importlib.util.spec_from_file_location(f"{script}_under_test", EXAMPLES / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with patch.object(sys, "path", [str(EXAMPLES), *sys.path]):  # as where it is run
        spec.loader.exec_module(module)
    return module


def commands(path: Path) -> list[list[str]]:
    """The commands in a file's leading comment, as words."""
    comment = [line[1:] for line in takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())]
    found = re.findall(r"(?m)^ {3}((?:accelerate launch|trl-fp8 train) (?:.*\\\n)*.*)$", "\n".join(comment))
    return [shlex.split(command.replace("\\\n", " ")) for command in found]


def launch_arguments(words: list[str], monkeypatch):
    """What `accelerate launch` makes of a command, and the environment that it starts processes with."""
    if words[0] == "accelerate":
        given = launch_command_parser().parse_args(words[2:])
    else:
        without_hub(monkeypatch)
        given = launched(monkeypatch, *words[2:])
    args, _, _ = _validate_launch_command(given)
    args.main_process_port = 0  # any free one: accelerate insists that it is free
    if not args.use_deepspeed:
        return args, prepare_multi_gpu_env(args)
    args.deepspeed_fields_from_accelerate_config = ""
    return args, prepare_deepspeed_cmd_env(args)[1]


def unknown_keys(path: Path) -> list[str]:
    """Keys of the nested sections that `accelerate launch` has no option for; it would ignore them."""
    options = vars(launch_command_parser().parse_args(["script.py"]))
    config = load_config_from_file(str(path))
    return [key for section in (config.fsdp_config, config.deepspeed_config) for key in section if key not in options]


def parse(path: Path, *words: str) -> tuple:
    """(script's own arguments, FP8GRPOConfig, ...) as the recipe's script gets them. `use_cpu` is the one difference:
    with it, TrainingArguments accepts bf16 where there is no GPU.
    """
    if path.read_text().startswith("# trl-fp8 train: "):
        parser = Parser()
    else:
        script = re.match(r"# examples/(\w+)\.py: ", path.read_text()).group(1)
        parser = TrlParser((example(script).ScriptArguments, FP8GRPOConfig))
    return parser.parse_args_and_config(["--config", str(path), "--use_cpu", "true", *words])


@pytest.fixture
def world_size(monkeypatch):
    """Let TRL check batch sizes for that many processes, without starting them."""
    return lambda size: monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: size))


def on_gpu(monkeypatch) -> None:
    """Recipes are made as on the GPUs that they are for, where experts have kernels."""
    monkeypatch.setattr(FP8GRPOConfig, "device", torch.device("cuda"))


def meta_model(name: str):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(ARCHITECTURES[name][0])


# Accelerate configurations


def test_every_file_is_tested():
    assert {path.stem for path in (EXAMPLES / "accelerate_configs").iterdir()} == set(LAUNCHERS)
    assert {path.stem for path in (EXAMPLES / "configs").iterdir()} == set(OF_REAL_MODELS)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_accelerate_reads_the_launcher(name):
    config = load_config_from_file(str(launcher(name)))
    assert (config.distributed_type, config.num_machines, config.num_processes) == LAUNCHERS[name]
    assert config.mixed_precision is None  # TRL's bf16 decides
    assert unknown_keys(launcher(name)) == []


@pytest.mark.parametrize("name, words", [(name, words) for name in LAUNCHERS for words in commands(launcher(name))])
def test_the_launchers_command_starts_its_processes(name, words, monkeypatch):
    args, environment = launch_arguments(words, monkeypatch)
    assert args.config_file == f"examples/accelerate_configs/{name}.yaml"
    kind, machines, processes = LAUNCHERS[name]
    assert int(args.nproc_per_node) * machines == processes
    assert (args.use_fsdp, args.use_deepspeed, args.multi_gpu) == (
        kind == DistributedType.FSDP,
        kind == DistributedType.DEEPSPEED,
        kind == DistributedType.MULTI_GPU,
    )
    assert args.module or (ROOT / args.training_script).is_file()
    assert args.training_script_args[0] == "--config" and (ROOT / args.training_script_args[1]).is_file()
    if machines > 1:
        assert (args.nnodes, args.node_rank, args.main_process_ip) == ("2", 0, "10.0.0.1")
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"


@pytest.mark.parametrize("name", [name for name, (kind, *_) in LAUNCHERS.items() if kind == DistributedType.FSDP])
def test_fsdp_is_version_2_and_saves_whole_models(name, monkeypatch):
    for key, value in launch_arguments(commands(launcher(name))[0], monkeypatch)[1].items():
        monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    # What the file would say without its two comments' keys
    monkeypatch.delenv("FSDP_STATE_DICT_TYPE")
    monkeypatch.delenv("FSDP_AUTO_WRAP_POLICY")
    default = FullyShardedDataParallelPlugin()
    assert default.state_dict_type.name == "SHARDED_STATE_DICT" and default.auto_wrap_policy is None


def test_deepspeed_is_stage_3_and_saves_whole_models(monkeypatch):
    for key, value in launch_arguments(commands(launcher("zero3"))[0], monkeypatch)[1].items():
        monkeypatch.setenv(key, value)
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == 3 and plugin.zero3_init_flag
    assert plugin.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


# Recipes


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_is_parsed_as_written(name, world_size):
    processes, prompts, updates = RECIPES[name]
    world_size(processes)
    parsed = parse(recipe(name))
    made = parsed[1]
    given = yaml.safe_load(recipe(name).read_text())
    for key, value in given.items():
        (owner,) = [part for part in parsed if hasattr(part, key)]
        if key != "report_to":  # 'none' becomes an empty list
            assert getattr(owner, key) == value, key
    assert made.use_vllm and made.vllm_importance_sampling_clip_max == 2.0
    assert made.generation_batch_size == prompts * made.num_generations
    assert made.steps_per_generation == updates * made.gradient_accumulation_steps
    assert made.vllm_max_model_length > made.max_completion_length
    assert processes % made.vllm_tensor_parallel_size == 0


@pytest.mark.parametrize("name", OF_REAL_MODELS)
def test_the_recipes_command_is_launched_with_it(name, monkeypatch):
    (words,) = commands(recipe(name))
    assert words[:4] == ["trl-fp8", "train", "--config", f"examples/configs/{name}.yaml"]
    args, _ = launch_arguments(words, monkeypatch)
    assert args.module and args.training_script == "trl_fp8.scripts.grpo" and args.training_script_args == words[2:]
    processes = int(args.nproc_per_node) if args.multi_gpu or args.use_fsdp else 1
    assert processes == RECIPES[name][0] == int(name.rpartition("_")[2][0])


@pytest.mark.parametrize(
    ("name", "family"),
    [("qwen3_4b_1xh200", "qwen3"), ("qwen3_8b_base_8xh100", "qwen3"), ("llama3_1_8b_8xh100", "llama")],
)
def test_a_recipe_trains_a_tiny_model_of_its_family(name, family, checkpoint, tmp_path, monkeypatch):
    """By the script. Recipes whose features need vLLM's engine are left out."""
    without_hub(monkeypatch)
    monkeypatch.setattr("trl_fp8.trainer.FP8GRPOTrainer", FakeEngineTrainer)
    small = {
        "model_name_or_path": checkpoint(family, max_position_embeddings=512),
        "output_dir": tmp_path,
        "kv_cache_dtype": "auto",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 8,
        "steps_per_generation": 1,
        "max_completion_length": 4,
        "vllm_max_model_length": 512,
        "chat_template_kwargs": "{}",
        "max_steps": 2,
        "report_to": "none",
    }
    words = [word for flag, value in small.items() for word in (f"--{flag}", str(value))]
    trainer = grpo.make_trainer(*Parser().read(["--config", str(recipe(name)), *words]).configs())
    trainer.train()
    assert trainer.state.global_step == 2 and trainer.state.log_history[0]["rewards/accuracy_reward/mean"] == 0.0


def test_more_machines_keep_the_batch(world_size, monkeypatch):
    by_us, by_accelerate = commands(launcher("multi_node"))
    config, *overrides = launch_arguments(by_accelerate, monkeypatch)[0].training_script_args[1:]
    assert {*overrides} < {*launch_arguments(by_us, monkeypatch)[0].training_script_args}
    world_size(8)
    single = parse(ROOT / config)[1]
    world_size(16)
    assert parse(ROOT / config, *overrides)[1].generation_batch_size == single.generation_batch_size == 512


@pytest.mark.parametrize("name", OF_REAL_MODELS)
def test_every_projection_of_the_model_is_fp8(name, monkeypatch):
    _, made, model_arguments, _ = parse(recipe(name))
    model = meta_model(model_arguments.model_name_or_path)
    layers, stated = model.config.num_hidden_layers, ARCHITECTURES[model_arguments.model_name_or_path][1]
    assert round(model.num_parameters() / 1e9, 2) == stated
    on_gpu(monkeypatch)
    found = made.recipe_for(model)
    dense = not hasattr(model.config, "num_experts")
    kinds = [*(f"self_attn.{p}" for p in ATTENTION), *(f"mlp.{p}" for p in MLP if dense)]
    assert set(found.fp8_modules) == {f"model.layers.{layer}.{kind}" for layer in range(layers) for kind in kinds}
    assert len(found.fp8_experts) == (0 if dense else layers)
    routers = {} if dense else {f"model.layers.{layer}.mlp.gate": "router" for layer in range(layers)}
    assert found.kept_modules == {"lm_head": "output head"} | routers
    assert found.kv_cache_dtype == made.kv_cache_dtype


# examples/grpo_addition.py


# examples/grpo_reasoning_gym.py


def test_puzzles_are_scored_by_their_own_verifiers():
    script = example("grpo_reasoning_gym")
    rows = script.puzzles(["chain_sum", "number_sorting"], size=3, seed=1)
    assert len(rows) == 6 and set(rows["task"]) == {"chain_sum", "number_sorting"}
    entries = [json.loads(entry) for entry in rows["entry"]]
    assert all(
        entry["question"] in prompt[1]["content"] for entry, prompt in zip(entries, rows["prompt"], strict=True)
    )
    reward = script.verified(["chain_sum", "number_sorting"])
    columns = {"task": rows["task"], "entry": rows["entry"]}
    right = [[{"content": f"so <answer>{entry['answer']}</answer>"}] for entry in entries]
    assert reward(right, **columns) == [1.0] * 6
    assert reward([[{"content": "<answer>no idea</answer>"}]] * 6, **columns) == [0.0] * 6
    assert reward([[{"content": entry["answer"]}] for entry in entries], **columns) == [0.0] * 6  # no tags


@pytest.mark.engine
def test_the_puzzle_script_trains(checkpoint, tmp_path, monkeypatch):
    script, made = example("grpo_reasoning_gym"), []
    monkeypatch.setattr(script, "FP8GRPOTrainer", lambda **options: made.append(FP8GRPOTrainer(**options)) or made[0])
    args = arguments(tmp_path, max_steps=1, vllm_max_model_length=512, max_completion_length=16)
    try:
        policy = checkpoint("qwen3", max_position_embeddings=512)
        script.main(script.PuzzleArguments(puzzles=16), args, ModelConfig(model_name_or_path=policy, dtype="float32"))
        rows = [row for row in made[0].state.log_history if "reward" in row]
        assert [row["rewards/puzzle_reward/mean"] for row in rows] == [0.0] and rows[0]["fp8/audited_tensors"] > 0
        assert (tmp_path / "model.safetensors").exists()
    finally:
        engines.shutdown(made[0].vllm_generation.llm)


# examples/compare_precisions.py


def test_precisions_are_run_one_after_another_and_reported_together(tmp_path, monkeypatch, capsys):
    script, started = example("compare_precisions"), []
    answers = SimpleNamespace(returncode=0)
    monkeypatch.setattr(script.subprocess, "run", lambda command: started.append(command) or answers)
    words = [str(tmp_path), "--precisions", "bf16", "fp8_linears_kv", "--", "python", "train.py", "--seed", "1"]
    assert script.main(words) == 0
    first, second, report = started
    assert first[:4] == second[:4] == ["python", "train.py", "--seed", "1"]
    assert first[4:6] == ["--output_dir", str(tmp_path / "bf16")] and "--fp8_weights" in first
    assert second[4:] == ["--output_dir", str(tmp_path / "fp8_linears_kv")]
    assert report[3:6] == ["report", str(tmp_path / "bf16"), str(tmp_path / "fp8_linears_kv")]
    parser = TrlParser(FP8GRPOConfig)
    for flags in script.PRECISIONS.values():  # all of them are flags
        parser.parse_args_and_config(["--use_cpu", "true", "--bf16", "false", *flags])
    answers.returncode, started[:] = 3, []
    assert script.main(words) == 3 and len(started) == 1
    assert "bf16 ended with status 3: nothing is compared" in capsys.readouterr().err
