"""`trl-fp8 train` and its script: a run config as a user starts it, and every mistake on the way to it."""

import dataclasses
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import accelerate.commands.launch
import datasets
import pytest
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from testing.launches import launched, without_hub
from testing.processes import NOT_INHERITED, fork, free_port
from trl_fp8 import FP8GRPOTrainer
from trl_fp8.commands import train
from trl_fp8.commands.cli import main
from trl_fp8.commands.train import COMMON, SCRIPT
from trl_fp8.features.run_log.log_file import read_run
from trl_fp8.scripts import grpo, rewards
from trl_fp8.scripts.arguments import Parser


RUN_CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
GSM8K = RUN_CONFIGS / "qwen3_1_7b_gsm8k_lora_1xh100.yaml"
SLURM = Path(__file__).parents[2] / "docs" / "scaling.md"
REWARD = """
import os, signal
from pathlib import Path

calls = 0

def digits(completions, **kwargs):
    global calls
    calls += 1
    if calls == 2 and Path("interrupt").exists():
        Path("interrupt").unlink()
        os.kill(os.getpid(), signal.SIGINT)
    return [sum(character.isdigit() for character in text[0]["content"]) / 8 for text in completions]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The user's folder: eight problems like GSM8K's, and a module with a reward."""
    (tmp_path / "data").mkdir()
    rows = [{"question": f"{10 + row}+{20 + row}=", "answer": f"so\n#### {30 + 2 * row}"} for row in range(8)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.engine
def test_a_job_that_is_submitted_twice_trains_a_run_config_on_what_is_given_instead_of_its_model(
    checkpoint, here, monkeypatch, capfd
):
    """The command of docs/scaling.md on the CPU, through accelerate: Ctrl-C in its second step, then the same again.

    Metrics go to a local backend, and a report is made of them.
    """
    command = shlex.split(re.search(r"(?ms)^trl-fp8 (train .*?[^\\\\])$", SLURM.read_text())[1].replace("\\\n", " "))
    assert command[1] == "--config" and command[5] == "--accelerate_config"  # of 8 GPUs: here there is one process
    command[2] = str(GSM8K)
    small = {
        "model_name_or_path": checkpoint("qwen3"),
        "output_dir": "run",
        "dataset_name": "data",
        "dataset_config": "default",
        "chat_template_kwargs": "{}",
        "reward_funcs": "my_rewards.digits think_format_reward soft_overlong_punishment",
        "overlong_buffer": 32,  # all lengths are punished differently, so that groups have something to learn from
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 32,
        "vllm_max_model_length": 128,
        "kv_scale_margin": 1.25,
        "warmup_steps": 0,
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "report_to": "tensorboard",
    }
    words = [word for flag, value in small.items() for word in (f"--{flag}", *str(value).split())]
    for name in NOT_INHERITED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(here / "cache"))
    became = []
    monkeypatch.setattr(os, "execvpe", lambda file, words, environment: became.append((words, environment)))
    assert main([*command[:5], *words]) == 0
    ((process, environment),) = became
    environment["MASTER_PORT"] = str(free_port())
    (here / "interrupt").touch()
    first = subprocess.run(process, env=environment, capture_output=True, text=True)
    assert first.returncode == 130, first.stderr[-6000:]
    assert "no checkpoint in run yet: starting from the beginning" in first.stdout
    stopped = "stopped at step 1 of 2; go on with the same command, from run/checkpoint-1"
    assert first.stderr.splitlines()[-1] == stopped and "Traceback" not in first.stderr

    def again() -> None:
        os.environ.update(environment)
        sys.argv = [SCRIPT, *process[3:]]
        runpy.run_module(SCRIPT, run_name="__main__")

    assert process[:3] == [sys.executable, "-m", SCRIPT]
    _, status = os.waitpid(fork(again, here / "again.log"), 0)
    printed = (here / "again.log").read_text()
    assert status == 0, printed[-6000:]
    assert "FP8 plan" in printed and "Engine: " in printed and "Model saved to run" in printed
    assert "not passed to `accelerate launch`" not in capfd.readouterr().err
    saved = load_file(here / "run" / "adapter_model.safetensors")
    assert len(saved) == 28 and any(tensor.any() for name, tensor in saved.items() if "lora_B" in name)
    run = read_run(here / "run")
    assert run.facts["fp8_linears"] == 14 and run.facts["fp8_flags"]["kv_scale_margin"] == 1.25
    weights, kv_cache = run.facts["weight_bytes"], run.facts["kv_bytes_per_token"]
    assert weights[0] > weights[1] and kv_cache[0] == 2 * kv_cache[1]
    assert [row["step"] for row in run.rollouts] == [0, 1] and sum(run.rollouts[0]["log_ratio_counts"]) > 0
    shapes = [(len(row["kv_scales"]), len(row["kv_scales"][0]), len(row["kv_saturation"])) for row in run.rollouts]
    assert shapes == [(2, 3, 2)] * 2  # what the KV cache recorded of a batch comes before the run log writes
    rows = [row for row in run.logs if "reward" in row]
    assert all(row["rewards/think_format_reward/mean"] == 0.0 and row["fp8/audited_tensors"] > 0 for row in rows)
    assert all(-1.0 <= row["rewards/soft_overlong_punishment_reward/mean"] < 0.0 for row in rows)
    events = sorted((here / "run" / "runs").glob("**/events*"), key=lambda path: path.stat().st_mtime)
    metrics = [EventAccumulator(str(file)).Reload() for file in events]
    for name in ("mismatch/k3_kl", "fp8/sync_seconds", "correction/effective_sample_size", "rewards/digits/mean"):
        shown = [event.value for each in metrics for event in each.Scalars(f"train/{name}")]
        assert shown == pytest.approx([row[name] for row in rows], rel=1e-5) and len(shown) == 2, name
    assert main(["report", str(here / "run")]) == 0
    assert "report.html" in capfd.readouterr().out


# Up to the launch


def settings(**changed):
    """A file with what a run needs, and `changed`; None removes a line."""
    values = {"model_name_or_path": "a/model", "dataset_name": "data", "reward_funcs": ["my_rewards.digits"]}
    values |= {"prompt_column": "question", "use_cpu": True, "bf16": False} | changed
    text = yaml.safe_dump({name: value for name, value in values.items() if value is not None})
    Path("x.yaml").write_text(text)
    return "x.yaml"


@pytest.fixture
def no_hub(monkeypatch):
    """Every repository is there. Datasets are those of folders."""
    load_dataset = datasets.load_dataset
    without_hub(monkeypatch)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def test_flags_of_accelerate_go_to_accelerate_and_others_to_the_script(here, no_hub, monkeypatch):
    path = settings(num_processes=2, tpu=False, multi_gpu=True)
    words = ["--config", path, "--num_machines", "1", "--learning_rate", "1e-3", "--no_tpu_cluster"]
    args = launched(monkeypatch, *words)
    assert args.num_processes == 2 and args.num_machines == 1 and args.quiet and args.multi_gpu and not args.tpu
    assert args.module and args.training_script == SCRIPT
    assert args.training_script_args == words and args.tpu_use_cluster is False
    assert Parser().read(words).values.learning_rate == 1e-3  # as each process does, and leaves the others
    args = launched(monkeypatch, f"--config={path}", "--accelerate_config", "fsdp2")
    assert args.config_file.endswith("fsdp2.yaml") and Path(args.config_file).exists()


@pytest.mark.parametrize(
    "words", [["--accelerate_config", "zero3"], ["--accelerate_config=zero3"], ["--accelerate-config", "zero3"]]
)
def test_the_command_line_overrides_the_accelerate_config_of_a_run_config(words, here, no_hub, monkeypatch):
    path = settings(accelerate_config="fsdp2")
    assert launched(monkeypatch, "--config", path).config_file.endswith("fsdp2.yaml")
    args = launched(monkeypatch, "--config", path, *words)
    assert args.config_file.endswith("zero3.yaml") and args.training_script == SCRIPT


def test_what_the_hub_has_is_left_to_the_processes_if_the_run_config_moves_its_cache(here, monkeypatch):
    """This process has read HF_HOME before the file set it; the processes of the run begin with the file's value."""
    monkeypatch.setattr(train, "require_task", Mock(side_effect=OSError("the Hub cannot be asked")))
    for name in ("HF_HOME", "WANDB_PROJECT"):
        monkeypatch.setenv(name, "before")
    args = launched(monkeypatch, "--config", settings(env={"HF_HOME": "/data/hf", "WANDB_PROJECT": "x"}))
    assert args.training_script == SCRIPT and os.environ["HF_HOME"] == "/data/hf"
    assert main(["train", "--config", settings(env={"WANDB_PROJECT": "x"})]) == 2


def test_accelerate_receives_true_and_false_of_a_run_config_as_it_parses_them(here, no_hub, monkeypatch):
    values = {"fsdp_reshard_after_forward": False, "zero3_init_flag": True, "fp8_pad_inner_dim": False}
    values |= {"parallelism_config_sp_seq_length_is_variable": False}  # accelerate's type is `bool`
    args = launched(monkeypatch, "--config", settings(**values, multi_gpu=False))
    assert (args.fsdp_reshard_after_forward, args.zero3_init_flag) == ("false", "true")
    assert not args.fp8_pad_inner_dim and args.parallelism_config_sp_seq_length_is_variable is False
    Path("x.yaml").write_text(Path("x.yaml").read_text() + "main_process_port: null\n")
    assert launched(monkeypatch, "--config", "x.yaml").main_process_port is None


def test_null_in_a_run_config_is_none_where_a_flag_may_be_none(here, no_hub):
    path = Path(settings())
    path.write_text(path.read_text() + "vllm_max_model_length: null\nmax_completion_length: null\n")
    values = Parser().read(["--config", str(path)]).values
    assert values.vllm_max_model_length is values.max_completion_length is None
    path.write_text(path.read_text() + "max_steps: null\n")
    with pytest.raises(ValueError, match="--max_steps: invalid int value: 'None'"):
        Parser().read(["--config", str(path)])


@pytest.mark.parametrize(("words", "starts_several"), [([], False), (["--num_processes", "2"], True)])
def test_as_many_processes_start_as_the_command_line_says_where_accelerate_sees_no_gpu(
    words, starts_several, here, no_hub, monkeypatch
):
    args = launched(monkeypatch, "--config", settings(), *words)
    validated, _, _ = accelerate.commands.launch._validate_launch_command(args)
    assert (validated.multi_gpu, validated.num_processes) == (starts_several, 1 + starts_several)


def test_batches_are_checked_for_the_processes_that_will_be(here, no_hub, monkeypatch, capsys):
    """8 processes have a whole group together, one has part of it."""
    words = ["--config", settings(per_device_train_batch_size=1, num_generations=8, gradient_accumulation_steps=1)]
    assert launched(monkeypatch, *words, "--num_processes", 8).num_processes == 8
    assert launched(monkeypatch, *words, "--accelerate_config", "zero3").config_file.endswith("zero3.yaml")
    assert main(["train", *words, "--num_processes", "4"]) == 2
    assert "generation_batch_size (4) must be divisible by num_generations (8)" in capsys.readouterr().err


def trainer_arguments(monkeypatch, path):
    """What the script gives the trainer for a run config, and what it parsed."""
    monkeypatch.setattr(FP8GRPOTrainer, "__init__", lambda self, **given: vars(self).update(given))
    parsed = Parser().read(["--config", path]).configs()
    grpo.require_task(parsed[0], *parsed[2:])
    return vars(grpo.make_trainer(*parsed)), parsed


def test_mixtures_of_datasets_and_one_value_for_a_list_are_taken(here, no_hub, monkeypatch):
    mixture = [{"path": "json", "data_files": "data/train.jsonl"}] * 2
    path = settings(dataset_name=None, datasets=mixture, reward_funcs="my_rewards.digits")
    assert launched(monkeypatch, "--config", path).training_script_args == ["--config", path]
    given, parsed = trainer_arguments(monkeypatch, path)
    assert parsed[0].reward_funcs == ["my_rewards.digits"] and len(given["train_dataset"]) == 16


@pytest.mark.parametrize("file", ["data.csv", "more/data.tsv", "data.parquet", "more/data.jsonl", "data.json"])
def test_a_file_is_trained_on_as_the_refusal_of_its_name_says(file, here, no_hub, monkeypatch):
    file = Path(file)
    file.parent.mkdir(exist_ok=True)
    rows = datasets.Dataset.from_list([{"question": f"{row}+1=", "answer": str(row + 1)} for row in range(8)])
    write = {".tsv": partial(rows.to_csv, sep="\t"), ".parquet": rows.to_parquet, ".csv": rows.to_csv}
    write.get(file.suffix, rows.to_json)(file)
    with pytest.raises(ValueError, match="is a file. Give its folder; or, in") as refusal:
        trainer_arguments(monkeypatch, settings(dataset_name=str(file)))
    advice = yaml.safe_load(re.search(r"datasets: .*\]", str(refusal.value))[0])
    arguments, _ = trainer_arguments(monkeypatch, settings(dataset_name=None, **advice))
    assert len(arguments["train_dataset"]) == 8


@pytest.mark.parametrize(
    "flags, dtype", [({}, "float32"), ({"fp8_base": True}, None), ({"fp8_base": True, "dtype": "float32"}, "float32")]
)
def test_beside_an_fp8_base_only_who_says_so_loads_fp32(flags, dtype, here, no_hub, monkeypatch):
    given, _ = trainer_arguments(monkeypatch, settings(use_peft=True, **flags))
    assert given["args"].model_init_kwargs.get("dtype") == dtype and given["peft_config"].r == 16


def test_flags_that_were_set_are_distinguished_from_defaults(here, monkeypatch):
    monkeypatch.setenv("OF_A_RUN_CONFIG", "before")
    path = settings(lora_r=16, num_machines=1, env={"OF_A_RUN_CONFIG": 7})
    read = Parser().read([f"--config={path}", "--no-fp8-weights", "--num-processes", "2", "--beta=0.1"])
    named = [name for name in ("lora_r", "fp8_weights", "beta", "lora_alpha", "kv_cache_dtype") if read.sets(name)]
    assert named == ["lora_r", "fp8_weights", "beta"]
    assert (read.values.fp8_weights, read.values.beta, read.values.lora_alpha) == (False, 0.1, 32)
    assert read.run_config["num_machines"] == 1 and read.other_words == ["--num-processes", "2"]
    assert os.environ["OF_A_RUN_CONFIG"] == "7"


MISTAKES = {  # what is said -> what changes the file, and the words after it
    "Unknown key 'fp8_wieghts' in x.yaml: did you mean fp8_weights?": ({"fp8_wieghts": True}, ""),
    "Unknown key 'num_proceses' in x.yaml: did you mean num_processes?": ({"num_proceses": 8}, ""),
    "env='x' in x.yaml: it has to be a dictionary": ({"env": "x"}, ""),
    "Unknown flag --kv_cache_typ: did you mean kv_cache_dtype?": ({}, "--kv-cache-typ fp8"),
    "'x.yaml' is not the value of any flag. Pass a run config as --config FILE": ({}, "x.yaml"),
    "multi_gpu='no' in the run config: it is a switch. Use true, or remove it.": ({"multi_gpu": "no"}, ""),
    "--config takes one YAML file": ({}, "--config x.yaml"),
    "model_name_or_path is not set. Give a model": ({"model_name_or_path": None}, ""),
    "dataset_name is not set. Give one of them": ({"dataset_name": None}, ""),
    "dataset_name='data' and datasets are both set": ({"datasets": [{"path": "data"}]}, ""),
    "reward_funcs is not set. Use some of accuracy_reward": ({"reward_funcs": None}, ""),
    "there is no 'acuracy_reward': did you mean accuracy_reward?": ({}, "--reward_funcs acuracy_reward"),
    "there is no module 'my_reward', neither installed nor in": ({}, "--reward_funcs my_reward.digits"),
    "there is no module 'no.such', neither installed nor in": ({}, "--reward_funcs no.such.digits"),
    "TRL's are fsdp2, multi_gpu, single_gpu, zero1, zero2, zero3.": ({}, "--accelerate_config fsdp3"),
    "--accelerate_config wrong.yaml: A `distributed_type` must be specified": ({}, "--accelerate_config wrong.yaml"),
    "--accelerate_config broken.yaml: while parsing": ({}, "--accelerate_config broken.yaml --num_processes 2"),
    "--accelerate_config alone.yaml has no num_processes. Add it": ({}, "--accelerate_config alone.yaml"),
    "Expected a value after `--accelerate_config`.": ({}, "--accelerate_config"),
    "accelerate launch: You need to use at least 2 processes": ({"multi_gpu": True}, "--num_processes 1"),
    "--max_steps: invalid int value: 'many'": ({"max_steps": "many"}, ""),
    "--max_steps: invalid int value: '[1, 2]'": ({"max_steps": [1, 2]}, ""),
    "--max_steps: invalid int value: ''": ({"max_steps": ""}, ""),
    "--fp8_weights: Truthy value expected: got maybe": ({"fp8_weights": "maybe"}, ""),
    "False is not a valid SaveStrategy, please select one of ['no', ": ({"save_strategy": False}, ""),
    "--save_steps: invalid float value: 'many'": ({}, "--save_steps many"),
    "'{enable_thinking:' begins like JSON and is none": ({}, "--chat_template_kwargs {enable_thinking: false}"),
    "--max_steps: expected one argument": ({}, "--max_steps"),
    "accelerate launch: argument --num_processes/--num-processes: invalid int value: 'two'": (
        {},
        "--num_processes two",
    ),
    "a value of a wrong type: DatasetConfig.__init__() got an unexpected keyword argument 'pth'": (
        {"dataset_name": None, "datasets": [{"pth": "data"}]},
        "",
    ),
    "fp8_base=True without use_peft: an FP8 base is frozen, so nothing would be trained. Add --use_peft": (
        {},
        "--fp8_base true",
    ),
    "fp8_base=True with use_dora=True: the engine computes Q(W) x + s B A x and nothing else. Remove it": (
        {"use_peft": True, "use_dora": True},
        "--fp8_base true",
    ),
    "vllm_gpu_memory_utilization=30.0: it is the share of a GPU's memory": ({"vllm_gpu_memory_utilization": 30}, ""),
    "vllm_max_model_length=256 with max_completion_length=512: the engine's context": (
        {"vllm_max_model_length": 256},
        "",
    ),
    "kv_cache_dtype='int8': the trainer can calibrate": ({}, "--kv_cache_dtype int8"),
    "model_name_or_path='./model': there is no such folder, seen from": ({"model_name_or_path": "./model"}, ""),
    "there is no such folder, seen from {here}: did you mean data?": ({"model_name_or_path": "./dta"}, ""),
    "model_name_or_path='data' has no config.json": ({"model_name_or_path": "data"}, ""),
    "dataset_name='/no/data': there is no such folder": ({"dataset_name": "/no/data"}, ""),
    "datasets: [{path: '{here}/data', data_files: 'train.jsonl'}]": ({"dataset_name": "data/train.jsonl"}, ""),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_launched(said, here, no_hub, capfd):
    changed, words = MISTAKES[said]
    (here / "wrong.yaml").write_text("num_proceses: 8")
    (here / "broken.yaml").write_text("num_processes: [")
    (here / "alone.yaml").write_text("distributed_type: MULTI_GPU")
    assert main(["train", "--config", settings(**changed), *words.split()]) == 2
    assert_only(said.replace("{here}", str(here)), capfd.readouterr().err)


OF_A_PROCESS = {  # what is said -> what changes the file
    "load_in_4bit=True: QLoRA is not supported. Set fp8_base=True instead": {"load_in_4bit": True, "use_peft": True},
    "reward_funcs: my_rewards has no 'digit': did you mean digits?": {"reward_funcs": "my_rewards.digit"},
    "Available: ['default']": {"dataset_config": "main"},
    "dataset_train_split='trian': dataset_name='data' has 'train'. Set": {"dataset_train_split": "trian"},
    "dataset_test_split='test': dataset_name='data' has 'train'.": {"eval_strategy": "steps"},
    "prompt_column='problem': dataset_name='data' has 'question', 'answer'.": {"prompt_column": "problem"},
    "solution_column='solution': dataset_name='data' has": {"solution_marker": "####"},
    "prompt_column='prompt': dataset_name='data' has 'question'": {
        "prompt_column": None,
        "dataset_streaming": True,
        "system_prompt": "Add.",
    },
}


def in_a_process(monkeypatch, *words):
    """The script's `main` with the words of a command line; the status that it exits with."""
    monkeypatch.setattr(sys, "argv", ["grpo.py", *words])
    with pytest.raises(SystemExit) as ended:
        grpo.main()
    return ended.value.code


@pytest.mark.parametrize("said", OF_A_PROCESS)
def test_a_mistake_that_a_process_finds_is_one_line_too(said, here, no_hub, monkeypatch, capfd):
    assert in_a_process(monkeypatch, "--config", settings(**OF_A_PROCESS[said])) == 2
    assert_only(said, capfd.readouterr().err)


def assert_only(said, printed):
    """It is said in one line, with nothing but progress above it, which ends its lines by itself."""
    *progress, line = printed.splitlines()
    assert line.startswith("trl-fp8: ") and said in line
    assert all(re.match(r"|Generating train split: |Map: ", line) for line in progress)


FILES = {  # text -> what is said of it
    "": "--config x.yaml is empty. It takes lines such as",
    "- fp8_weights": "--config x.yaml is a list",
    "fp8_weights: [": "--config x.yaml is no YAML",
}


@pytest.mark.parametrize("text", FILES)
def test_a_file_that_cannot_be_meant_is_refused(text, here, capsys):
    Path("x.yaml").write_text(text)
    assert main(["train", "--config", "x.yaml"]) == 2
    assert FILES[text] in capsys.readouterr().err
    assert main(["train", "--config", "y.yaml"]) == 2
    assert "--config y.yaml: there is no such file: did you mean x.yaml?" in capsys.readouterr().err


def test_a_dataset_that_cannot_be_read_is_named(here, no_hub, monkeypatch, capsys):
    Path("data/train.jsonl").write_text('{"question": ')
    assert in_a_process(monkeypatch, "--config", settings()) == 2
    assert "trl-fp8: dataset_name='data': " in (said := capsys.readouterr().err) and "JSON parse error" in said


def test_math_verify_is_asked_for_only_where_answers_are_compared(monkeypatch):
    monkeypatch.setattr(rewards, "find_spec", lambda name: None)
    script = Parser().parse_args_and_config([])[0]
    rewards.require_rewards(dataclasses.replace(script, reward_funcs=["think_format_reward"]))
    with pytest.raises(ValueError, match=r"accuracy_reward compares .*pip install 'trl-fp8\[recipes\]'"):
        rewards.require_rewards(dataclasses.replace(script, reward_funcs=["accuracy_reward"]))


def test_a_refusal_of_the_trainer_is_one_line_of_one_process(here, no_hub, monkeypatch, capsys):
    refusal = "router_replay='rollout' : Qwen3ForCausalLM is not a mixture of experts."
    monkeypatch.setattr(FP8GRPOTrainer, "__init__", Mock(side_effect=ValueError(refusal)))
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert in_a_process(monkeypatch, "--config", settings()) == 2
        assert capsys.readouterr().err.endswith(f"trl-fp8: {refusal}\n") == (rank == "0")


def test_the_command_ends_with_the_status_of_a_process(here, no_hub, monkeypatch):
    """One process takes its place. Of several a 2 is a mistake that one of them has told; others keep their report."""
    became = []
    monkeypatch.setattr(os, "execvpe", lambda file, words, environment: became.append([file, *words[1:]]))
    assert main(["train", "--config", settings()]) == 0
    assert became == [[sys.executable, "-m", SCRIPT, "--config", "x.yaml"]]
    for status in (2, 1):
        failed = ChildFailedError("train", {1: ProcessFailure(1, 9, status, "no file")})
        monkeypatch.setattr(accelerate.commands.launch, "launch_command", Mock(side_effect=failed))
        if status == 2:
            assert main(["train", "--config", settings()]) == 2
        else:
            with pytest.raises(ChildFailedError):
                main(["train", "--config", settings()])


def test_an_error_in_a_rewards_module_is_shown(here, monkeypatch):
    monkeypatch.syspath_prepend(str(here))
    Path("broken_rewards.py").write_text("int('many')")
    script = dataclasses.replace(Parser().parse_args_and_config([])[0], reward_funcs=["broken_rewards.digits"])
    with pytest.raises(RuntimeError, match="broken_rewards cannot be imported") as raised:
        rewards.reward_functions(script, 16)
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_library_that_a_rewards_package_lacks_is_named_instead_of_the_package(here, monkeypatch):
    monkeypatch.syspath_prepend(str(here))
    Path("lacking").mkdir()
    Path("lacking/__init__.py").write_text("import no_such_library")
    Path("lacking/rewards.py").touch()
    script = dataclasses.replace(Parser().parse_args_and_config([])[0], reward_funcs=["lacking.rewards.digits"])
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_library'"):
        rewards.require_rewards(script)
    Path("lacking/__init__.py").write_text("")
    for path in ("lacking.no_such_module.digits", "lacking.rewards.inner.digits"):
        with pytest.raises(ValueError, match="no module 'lacking"):
            rewards.require_rewards(dataclasses.replace(script, reward_funcs=[path]))


def test_an_error_in_a_rewards_package_is_shown(here, monkeypatch):
    monkeypatch.syspath_prepend(str(here))
    Path("failing").mkdir()
    Path("failing/__init__.py").write_text("float('')")
    Path("failing/rewards.py").touch()
    script = dataclasses.replace(Parser().parse_args_and_config([])[0], reward_funcs=["failing.rewards.digits"])
    with pytest.raises(RuntimeError, match="a package of failing.rewards cannot be imported") as raised:
        rewards.require_rewards(script)
    assert isinstance(raised.value.__cause__, ValueError)


def test_other_errors_keep_their_traceback(here, no_hub, monkeypatch):
    monkeypatch.setattr(train, "require_task", lambda *configs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", "--config", settings()])


# What it learns from


def test_rewards_are_those_asked_for():
    names = ["accuracy_reward", "soft_overlong_punishment", "get_soft_overlong_punishment"]
    script = Parser().parse_args_and_config([])[0]
    script = dataclasses.replace(script, reward_funcs=names, overlong_buffer=4, reward_model_name_or_path="a/model")
    model, accuracy, overlong, as_trl = rewards.reward_functions(script, 16)
    assert model == "a/model" and accuracy.__name__ == "accuracy_reward"
    assert overlong(completion_ids=[[0] * 12, [0] * 14, [0] * 16]) == [0.0, -0.5, -1.0]
    assert as_trl(completion_ids=[[0] * 1024, [0] * 1280]) == [0.0, -1.0]


def problem(row, script):
    """What the script makes of a row."""
    return grpo.as_problems(datasets.Dataset.from_list([row]), script)[0]


def test_rows_stay_as_they_are_unless_a_flag_or_a_reward_says_otherwise():
    script, user = Parser().parse_args_and_config([])[0], {"role": "user", "content": "1+1="}
    row = {"prompt": "1+1=", "solution": "2"}
    assert problem(row, script) == row
    judged = dataclasses.replace(script, reward_funcs=["think_format_reward"])  # reads a completion's message
    assert problem(row, judged) == row | {"prompt": [user]}
    columns = dataclasses.replace(script, prompt_column="problem", solution_column="answer")
    row = {"problem": "1+1=", "answer": "2"}
    assert problem(row, columns) == row | {"prompt": [user], "solution": "2"}
    told = problem({"prompt": [user]}, dataclasses.replace(script, system_prompt="Add."))
    assert told == {"prompt": [{"role": "system", "content": "Add."}, user]}


def test_answers_of_gsm8k_are_verified():
    script, args, _, _ = Parser().parse_args_and_config(["--config", str(GSM8K)])
    row = {"question": "Natalia sold 48 clips, and then half of it. How many?", "answer": "48/2=24, 48+24=72\n#### 72"}
    solution = problem(row, script)["solution"]
    (reward,) = rewards.reward_functions(script, args.max_completion_length)
    completions = [[{"content": text}] for text in ("It is \\boxed{72}.", "It is \\boxed{24}.", "\\boxed{72.0}")]
    assert reward(completions, solution=[solution] * 3) == [1.0, 0.0, 1.0]


# Help


def test_help_shows_what_most_runs_set_and_all_of_it_if_asked(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # workers of the tests have a terminal of 80 columns
    assert main(["train", "--help"]) == 0
    short = capsys.readouterr().out
    assert all(f"--{name}" in short.split() for names in COMMON.values() for name in names.split())
    assert len(short.splitlines()) <= 120 and max(map(len, short.splitlines())) <= 120
    assert main(["train", "--help", "kv-scale-margin", "--loss_type"]) == 0
    several = " ".join(capsys.readouterr().out.split())
    assert several.startswith("--kv_scale_margin VALUE ") and "(default: 1.05)" in several
    assert "[VESPO" in several and "--beta" not in several
    assert main(["train", "--help", "resume_from_checkpoint"]) == 0
    assert "'auto' for the last one in output_dir" in " ".join(capsys.readouterr().out.split())
    assert main(["train", "--help", "kv_scale_margins"]) == 2
    assert "no flag has this name: did you mean kv_scale_margin?" in capsys.readouterr().err
    assert main(["train", "--config", "x.yaml", "--help"]) == 0, "words before --help belong to a run"
    assert capsys.readouterr().out == short
    assert main(["train", "--help-all"]) == 0
    assert {"--dataloader_num_workers", "--kv_scale_margin"} <= {*capsys.readouterr().out.split()}
