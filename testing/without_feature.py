"""The package without one of its features: imported, asked for a plan and for help, and trained with real engines,
once with default flags and once with all other features switched on.

    python -m testing.without_feature MODEL MIXTURE FOLDER FEATURE [FEATURE ...]

copies the package to FOLDER/FEATURE for each feature, deletes the feature's folder and its line of registration, and
prints a line of JSON on each. MODEL is trained with default flags, MIXTURE (which has experts) with LoRA and the other
features. The libraries are imported once; each copy has a process of its own, forked after that.
"""

import gc
import importlib
import json
import os
import pkgutil
import shutil
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from testing.processes import settle_heap


PACKAGE = Path(__file__).parents[1] / "src" / "trl_fp8"
STEPS = 2
SWITCHED_ON = {  # feature -> flags of a run that uses it
    "shared_base": {"fp8_base": True},
    "kv_cache": {"kv_cache_dtype": "fp8"},
    "router_replay": {"router_replay": "rollout"},
    "run_log": {"fp8_run_log": True},
    "correction": {"rollout_correction": "monitor"},
    "one_forward": {"fp8_forward": "one_forward"},
    "truncated_sampling": {"top_p": 0.9},
}


def copy_without(feature: str, folder: Path) -> None:
    """Copy the package to `folder` without the feature; "nothing" copies all of it."""
    shutil.copytree(PACKAGE, folder / "trl_fp8", ignore=shutil.ignore_patterns("__pycache__"))
    if feature == "nothing":
        return
    shutil.rmtree(folder / "trl_fp8" / "features" / feature)
    registry = folder / "trl_fp8" / "features" / "__init__.py"
    lines = registry.read_text().splitlines(keepends=True)
    remaining = [line for line in lines if line.strip() != f'"{feature}",']
    if len(remaining) != len(lines) - 1:
        raise ValueError(f"{feature} has {len(lines) - len(remaining)} lines of registration, where one is expected.")
    registry.write_text("".join(remaining))


def import_all() -> list[str]:
    """Return the modules that cannot be imported, apart from parts that vLLM's CPU build lacks."""
    import trl_fp8

    failed = []
    for module in pkgutil.walk_packages(trl_fp8.__path__, "trl_fp8."):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            if "flash_attn_varlen_func" not in str(error):
                failed.append(f"{module.name}: {error}")
    return failed


def train(model: str, output: Path, peft_config: object = None, **flags) -> dict:
    """Train a few steps of the addition and return their figures. The engine is shut down afterwards."""
    from datasets import Dataset
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer

    sums = Dataset.from_list([{"prompt": f"{10 + row}+{99 - row}="} for row in range(32)])
    args = FP8GRPOConfig(
        str(output),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        vllm_max_model_length=64,
        max_steps=STEPS,
        save_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        seed=3,
        **flags,
    )
    trainer = FP8GRPOTrainer(model, _share_of_digits, args, sums, peft_config=peft_config)
    trainer.train()
    trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
    destroy_model_parallel()
    destroy_distributed_environment()
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "fp8_modules": len(trainer.recipe.fp8_modules),
        "audit_failures": trainer.vllm_generation.audit_failures,
        "features": [type(feature).__name__ for feature in trainer.features],
    }


def _share_of_digits(completions: list[str], **columns) -> list[float]:
    return [sum(character.isdigit() for character in text) / 8 for text in completions]


def tried(feature: str, model: str, mixture: str, folder: Path) -> dict:
    """Return what happens to a copy without the feature, in this process."""
    copy_without(feature, folder)
    where = [str(folder / "trl_fp8")]
    spec = spec_from_file_location("trl_fp8", folder / "trl_fp8" / "__init__.py", submodule_search_locations=where)
    sys.modules["trl_fp8"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["trl_fp8"])
    from peft import LoraConfig

    from trl_fp8.commands import cli
    from trl_fp8.features import FOLDERS

    flags = {name: value for other in FOLDERS for name, value in SWITCHED_ON[other].items()}
    lora = LoraConfig(target_modules=["q_proj", "v_proj"])
    # 1 GiB holds no engine: other ways are tried, and fit nowhere
    plan = cli.main(["plan", model]) or cli.main(["plan", model, "--lora", "--gpu-memory", "1"])
    return {
        "failed": import_all(),
        "plan": plan,
        "help": cli.main(["train", "--help"]),
        "default": train(model, folder / "default"),
        "switched_on": train(mixture, folder / "switched_on", lora, **flags),
    }


def main(model: str, mixture: str, folder: str, *features: str) -> None:
    import torch
    import trl.generation.vllm_generation
    import trl.trainer.grpo_trainer  # noqa: F401
    import vllm.v1.worker.cpu_worker  # noqa: F401

    torch.set_num_threads(1)
    settle_heap()
    gc.collect = lambda *args: 0  # vLLM's calls take a third of the time of these processes, which end soon
    for feature in features:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            try:
                result = tried(feature, model, mixture, Path(folder, feature))
            except BaseException:
                result = {"error": traceback.format_exc()}
            sys.stdout.write(json.dumps({"feature": feature} | result) + "\n")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
