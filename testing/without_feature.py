"""The package without one of its features: imported, asked for a plan, and trained with a real engine.

    python -m testing.without_feature MODEL FOLDER FEATURE [FEATURE ...]

copies the package to FOLDER/FEATURE for each feature, deletes the feature's folder and its line of registration, and
prints a line of JSON on each. The libraries are imported once; each copy has a process of its own, forked after that.
"""

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
STEPS = 3


def copy_without(feature: str, folder: Path) -> None:
    """The package in `folder`, without the feature; "nothing": all of it."""
    shutil.copytree(PACKAGE, folder / "trl_fp8", ignore=shutil.ignore_patterns("__pycache__"))
    if feature == "nothing":
        return
    shutil.rmtree(folder / "trl_fp8" / "features" / feature)
    registry = folder / "trl_fp8" / "features" / "__init__.py"
    lines = registry.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.strip() != f'"{feature}",']
    if len(kept) != len(lines) - 1:
        raise ValueError(f"{feature} has {len(lines) - len(kept)} lines of registration, where one is expected.")
    registry.write_text("".join(kept))


def import_all() -> list[str]:
    """What cannot be imported, but for what vLLM's CPU build lacks."""
    import trl_fp8

    failed = []
    for module in pkgutil.walk_packages(trl_fp8.__path__, "trl_fp8."):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            if "flash_attn_varlen_func" not in str(error):
                failed.append(f"{module.name}: {error}")
    return failed


def train(model: str, output: Path) -> dict:
    """Figures of a few steps of the addition, with the FP8 flags' defaults."""
    from datasets import Dataset

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
    )
    trainer = FP8GRPOTrainer(model, _share_of_digits, args, sums)
    trainer.train()
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "fp8_modules": len(trainer.recipe.fp8_modules),
        "audit_failures": trainer.vllm_generation.audit_failures,
        "features": [type(feature).__name__ for feature in trainer.features],
    }


def _share_of_digits(completions: list[str], **columns) -> list[float]:
    return [sum(character.isdigit() for character in text) / 8 for text in completions]


def tried(feature: str, model: str, folder: Path) -> dict:
    """What becomes of a copy without the feature, in this process."""
    copy_without(feature, folder)
    where = [str(folder / "trl_fp8")]
    spec = spec_from_file_location("trl_fp8", folder / "trl_fp8" / "__init__.py", submodule_search_locations=where)
    sys.modules["trl_fp8"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["trl_fp8"])
    from trl_fp8.commands import cli

    return {"failed": import_all(), "plan": cli.main(["plan", model])} | train(model, folder / "run")


def main(model: str, folder: str, *features: str) -> None:
    import torch
    import trl.generation.vllm_generation
    import trl.trainer.grpo_trainer  # noqa: F401
    import vllm.v1.worker.cpu_worker  # noqa: F401

    torch.set_num_threads(1)
    settle_heap()
    for feature in features:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            try:
                result = tried(feature, model, Path(folder, feature))
            except BaseException:
                result = {"error": traceback.format_exc()}
            sys.stdout.write(json.dumps({"feature": feature} | result) + "\n")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
