"""Write docs/configuration.md from the flags' own help texts, or with --check compare it with them.

python docs/generate_configuration.py [--check]
"""

import dataclasses
import re
import sys
from pathlib import Path

from trl import GRPOConfig

from trl_fp8 import FP8GRPOConfig
from trl_fp8.features.correction.correction_flags import CorrectionFlags
from trl_fp8.features.kv_cache.kv_cache_flags import KVCacheFlags
from trl_fp8.features.one_forward.forward_flags import ForwardFlags
from trl_fp8.features.router_replay.router_flags import RouterFlags
from trl_fp8.features.run_log import RunLogFlags
from trl_fp8.features.shared_base.base_flags import BaseFlags
from trl_fp8.run.engine_flags import EngineFlags, WeightFlags


PAGE = Path(__file__).with_name("configuration.md")
GROUPS = {
    "Weights": WeightFlags,
    "LoRA on an FP8 base": BaseFlags,
    "KV cache": KVCacheFlags,
    "Rollout correction": CorrectionFlags,
    "Mixture of experts": RouterFlags,
    "One forward": ForwardFlags,
    "Engine": EngineFlags,
    "Run log": RunLogFlags,
}
HEAD = """# Configuration and API

`FP8GRPOConfig` takes every field of [`trl.GRPOConfig`](https://huggingface.co/docs/trl/v1.16.0/grpo_trainer) and the flags below. All of them work
from Python, from the command line (`--kv_cache_dtype auto`) and from a YAML file (`trl-fp8 train --config run.yaml`). A wrong value raises a
`ValueError` that names the flag, its value, the reason and the fix. `make docs` generates this page from the flags' declarations.

## The common ones

The defaults are FP8 linears, an FP8 KV cache and token truncation at 2.

| if | set |
|---|---|
| the trainer runs out of memory | a lower `vllm_gpu_memory_utilization`; `vllm_enable_sleep_mode=True` |
| the model is new to you | `rollout_correction="monitor"` for a few steps |
| memory is short, and adapters are enough | `fp8_base=True`: trainer and engine share an FP8 base ([LoRA](lora.md)) |
| the model is Qwen2 or Qwen2.5, or a warning names outliers in k | `kv_cache_skip_layers="auto"` ([why](kv_cache.md#outliers-in-k)) |
| it is a mixture of experts | `router_replay="rollout"` ([mixtures of experts](models.md#mixtures-of-experts)) |
| one layer is sensitive | `fp8_ignored_modules=["model.layers.0.mlp.down_proj"]` |
| you want no mismatch, on a CPU or (not run) on Hopper | `fp8_forward="one_forward"` ([one forward](how_it_works.md#one-forward)) |
| you look for the part that causes it | `kv_cache_dtype="auto"`, `fp8_weights=False`, one at a time |
| you need BF16 rollouts to compare with | `kv_cache_dtype="auto", fp8_weights=False, use_vllm=True, rollout_correction="fp8_token_tis"` |
| you want TRL's trainer, bit for bit ([test](../tests/trainer/test_trainer.py)) | `kv_cache_dtype="auto", fp8_weights=False` |
"""  # noqa: E501
API = """
## API

What a script imports, from the docstrings. The command line is in the [quickstart](quickstart.md#the-command-line).

| | |
|---|---|
| `from trl_fp8 import ...` | [`FP8GRPOTrainer`][trl_fp8.trainer.FP8GRPOTrainer], [`FP8GRPOConfig`][trl_fp8.config.FP8GRPOConfig], [`FP8AsyncGRPOTrainer`][trl_fp8.trainers.async_grpo_trainer.FP8AsyncGRPOTrainer], [`FP8AsyncGRPOConfig`][trl_fp8.trainers.async_grpo_trainer.FP8AsyncGRPOConfig], [`FP8DistillationTrainer`][trl_fp8.trainers.distillation_trainer.FP8DistillationTrainer], [`FP8DistillationConfig`][trl_fp8.trainers.distillation_trainer.FP8DistillationConfig], [`FP8SDFTTrainer`][trl_fp8.trainers.sdft_trainer.FP8SDFTTrainer], [`FP8SDFTConfig`][trl_fp8.trainers.sdft_trainer.FP8SDFTConfig], [`FP8SDPOTrainer`][trl_fp8.trainers.sdpo_trainer.FP8SDPOTrainer], [`FP8SDPOConfig`][trl_fp8.trainers.sdpo_trainer.FP8SDPOConfig], [`FP8GMPOTrainer`][trl_fp8.trainers.gmpo_trainer.FP8GMPOTrainer], [`FP8GMPOConfig`][trl_fp8.trainers.gmpo_trainer.FP8GMPOConfig], [`FP8GOLDTrainer`][trl_fp8.trainers.gold_trainer.FP8GOLDTrainer], [`FP8GOLDConfig`][trl_fp8.trainers.gold_trainer.FP8GOLDConfig], [`FP8IWOPDTrainer`][trl_fp8.trainers.iw_opd_trainer.FP8IWOPDTrainer], [`FP8IWOPDConfig`][trl_fp8.trainers.iw_opd_trainer.FP8IWOPDConfig], [`FP8RLOOTrainer`][trl_fp8.trainers.rloo_trainer.FP8RLOOTrainer], [`FP8RLOOConfig`][trl_fp8.trainers.rloo_trainer.FP8RLOOConfig], [`FP8ProgressCallback`][trl_fp8.run.progress.FP8ProgressCallback], [`FP8Recipe`][trl_fp8.recipe.recipe.FP8Recipe], [`FP8Rollouts`][trl_fp8.rollouts.FP8Rollouts], [`SyncAuditCallback`][trl_fp8.engine.vllm.sync_audit.SyncAuditCallback] |
| `from trl_fp8.export.export import ...` | [`export_fp8`][trl_fp8.export.export.export_fp8] |
| `from trl_fp8.export.file_checksums import ...` | [`verify_export`][trl_fp8.export.file_checksums.verify_export] |
| `from trl_fp8.export.push import ...` | [`push_export`][trl_fp8.export.push.push_export] |

The names of the first row are the package's public ones. The others stand where they are defined, and may move between minor versions.

### Training

::: trl_fp8.trainer.FP8GRPOTrainer
    options:
      inherited_members: true
      members: [train, save_fp8_model, merge_and_export, push_fp8_to_hub]

::: trl_fp8.config.FP8GRPOConfig
    options:
      inherited_members: true
      members: [recipe_for]

::: trl_fp8.trainers.async_grpo_trainer.FP8AsyncGRPOTrainer
    options:
      members: false

::: trl_fp8.trainers.async_grpo_trainer.FP8AsyncGRPOConfig
    options:
      members: false

::: trl_fp8.trainers.distillation_trainer.FP8DistillationTrainer
    options:
      members: false

::: trl_fp8.trainers.distillation_trainer.FP8DistillationConfig
    options:
      members: false

::: trl_fp8.trainers.sdft_trainer.FP8SDFTTrainer
    options:
      members: false

::: trl_fp8.trainers.sdft_trainer.FP8SDFTConfig
    options:
      members: false

::: trl_fp8.trainers.sdpo_trainer.FP8SDPOTrainer
    options:
      members: false

::: trl_fp8.trainers.sdpo_trainer.FP8SDPOConfig
    options:
      members: false

::: trl_fp8.trainers.gold_trainer.FP8GOLDTrainer
    options:
      members: false

::: trl_fp8.trainers.gold_trainer.FP8GOLDConfig
    options:
      members: false

::: trl_fp8.trainers.iw_opd_trainer.FP8IWOPDTrainer
    options:
      members: false

::: trl_fp8.trainers.iw_opd_trainer.FP8IWOPDConfig
    options:
      members: false

::: trl_fp8.trainers.gmpo_trainer.FP8GMPOTrainer
    options:
      members: false

::: trl_fp8.trainers.gmpo_trainer.FP8GMPOConfig
    options:
      members: false

::: trl_fp8.trainers.rloo_trainer.FP8RLOOTrainer
    options:
      members: false

::: trl_fp8.trainers.rloo_trainer.FP8RLOOConfig
    options:
      members: false

::: trl_fp8.run.progress.FP8ProgressCallback

::: trl_fp8.engine.vllm.sync_audit.SyncAuditCallback
    options:
      members: false

::: trl_fp8.rollouts.FP8Rollouts
    options:
      members: [feature, logged]

### Correction

`trainer.args.correction` is the run's `RolloutCorrection`, None if nothing is corrected.

::: trl_fp8.features.correction.importance.RolloutCorrection
    options:
      members: [from_trl_mode]

::: trl_fp8.features.correction.rejection.Rejection

::: trl_fp8.features.correction.importance.correct

::: trl_fp8.features.correction.presets.correction_from

### Recipe

::: trl_fp8.recipe.recipe.FP8Recipe

::: trl_fp8.recipe.recipe.recipe_for_model

### FP8 checkpoints

::: trl_fp8.export.export.export_fp8

::: trl_fp8.export.file_checksums.verify_export

::: trl_fp8.export.push.push_export
"""  # noqa: E501


def page() -> str:
    """The flags that TRL does not have, and those with another default, by group; each of them once."""
    theirs = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    fields = {
        field.name: field
        for field in dataclasses.fields(FP8GRPOConfig)
        if field.name not in theirs or field.default != theirs[field.name]
    }
    sections = [HEAD, "\n<!-- flags, by docs/generate_configuration.py -->\n"]
    for title, group in GROUPS.items():
        sections.append(f"\n## {title}\n")
        sections += [described(fields.pop(name)) for name in group.__annotations__ if name in fields]
    assert not fields, f"no group has {list(fields)}"
    return "".join(sections) + "\n<!-- end of flags -->\n" + API


def described(field: dataclasses.Field) -> str:
    kind = field.type if isinstance(field.type, str) else str(getattr(field.type, "__name__", field.type))
    text = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", field.metadata["help"])
    return f"\n### `{field.name}`\n\n`{kind}`, default `{field.default!r}`. {text}\n"


def main() -> int:
    if "--check" not in sys.argv:
        PAGE.write_text(page())
        return 0
    if PAGE.exists() and PAGE.read_text() == page():
        return 0
    sys.stderr.write("docs/configuration.md differs from the flags' help texts: run `make docs`.\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
