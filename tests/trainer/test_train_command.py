"""`trl-fp8 train`: a run from a YAML file, as a user starts it, with metrics in a local backend and a report of it."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import accelerate.commands.launch
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trl_fp8.trainer
from testing import engines
from trl_fp8.cli import main
from trl_fp8.commands import train
from trl_fp8.run.file import read_run


REWARD = (
    "def digits(completions, **kwargs):\n    return [sum(c.isdigit() for c in text) / 8 for text in completions]\n"
)


def config(folder, checkpoint, **changed):
    rows = [json.dumps({"prompt": f"{10 + row}+{30 - row}="}) for row in range(20)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "my_rewards.py").write_text(REWARD)
    values = {
        "model_name_or_path": checkpoint,
        "dataset_name": str(folder),
        "reward_funcs": ["my_rewards.digits"],
        "output_dir": str(folder / "run"),
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "vllm_max_model_length": 64,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "tensorboard",
        "num_processes": 1,
        "use_cpu": True,
    }
    path = folder / "x.yaml"
    path.write_text(yaml.safe_dump(values | changed))
    return path


@pytest.mark.engine
def test_a_run_from_a_file_with_tensorboard_and_a_report(checkpoint, tmp_path, monkeypatch, capfd):
    """What `accelerate launch` runs in each process; that it launches this module is tested below."""
    path, made = config(tmp_path, checkpoint("qwen3")), []
    real = trl_fp8.trainer.FP8GRPOTrainer
    monkeypatch.setattr(trl_fp8.trainer, "FP8GRPOTrainer", lambda **options: made.append(real(**options)) or made[0])
    monkeypatch.setattr(sys, "argv", ["trl-fp8", "--config", str(path), "--kv_scale_margin", "1.25"])
    monkeypatch.chdir(tmp_path)  # where my_rewards.py is
    try:
        train.main()
    finally:
        engines.shutdown(made[0].vllm_generation.llm)
    printed = capfd.readouterr().out
    assert "FP8 plan for" in printed and "Engine: " in printed and "Model saved to" in printed
    run = read_run(tmp_path / "run")
    assert run.facts["fp8_linears"] == 14 and run.facts["fp8_flags"]["kv_scale_margin"] == 1.25
    weights, kv_cache = run.facts["weight_bytes"], run.facts["kv_bytes_per_token"]
    assert weights[0] > weights[1] and kv_cache[0] == 2 * kv_cache[1]
    assert [row["step"] for row in run.rollouts] == [0, 1] and sum(run.rollouts[0]["log_ratio_counts"]) > 0
    shapes = [(len(row["kv_scales"]), len(row["kv_scales"][0]), len(row["kv_saturation"])) for row in run.rollouts]
    assert shapes == [(2, 3, 2)] * 2  # what the KV cache recorded of a batch comes before the run log writes
    (events,) = (tmp_path / "run" / "runs").glob("**/events*")
    metrics = EventAccumulator(str(events)).Reload()
    for name in ("mismatch/k3_kl", "fp8/sync_seconds", "correction/effective_sample_size", "reward"):
        shown = [event.value for event in metrics.Scalars(f"train/{name}")]
        assert shown == pytest.approx([row[name] for row in run.logs if name in row], rel=1e-5) and len(shown) == 2, (
            name
        )
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "pictures beside it" in capfd.readouterr().out


def launched(monkeypatch, *words):
    seen = {}
    monkeypatch.setattr(accelerate.commands.launch, "launch_command", lambda args: seen.update(vars(args)))
    assert main(["train", *map(str, words)]) == 0
    return SimpleNamespace(**seen)


def test_what_accelerate_knows_goes_to_accelerate_and_the_rest_to_the_script(checkpoint, tmp_path, monkeypatch):
    path = config(tmp_path, checkpoint("qwen3"), num_processes=2)
    args = launched(monkeypatch, "--config", path, "--num_machines", 1, "--learning_rate", "1e-3")
    assert args.num_processes == 2 and args.num_machines == 1
    assert args.module and args.training_script == train.__name__
    assert args.training_script_args == ["--config", str(path), "--learning_rate", "1e-3"]
    args = launched(monkeypatch, "--config", path, "--accelerate_config", "fsdp2")
    assert args.config_file.endswith("fsdp2.yaml") and Path(args.config_file).exists()


def test_an_unknown_flag_and_an_unknown_value_are_errors(checkpoint, tmp_path, capsys):
    path = config(tmp_path, checkpoint("qwen3"))
    with pytest.raises(SystemExit):
        main(["train", "--config", str(path), "--kv_cache_type", "fp8"])
    assert "kv_cache_type" in capsys.readouterr().err
    with pytest.raises(ValueError, match="kv_cache_dtype='int8' is not supported"):
        main(["train", "--config", str(path), "--kv_cache_dtype", "int8"])
