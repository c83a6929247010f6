"""What `docs/rollout_correction.md` shows to be written works as it stands there."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from trl_fp8 import FP8GMPOConfig, FP8RLOOConfig
from trl_fp8.config import FP8GRPOConfig
from trl_fp8.features.correction.correction import apply_correction
from trl_fp8.features.correction.presets import PRESETS, correction_from
from trl_fp8.features.correction.rejection import Rejection
from trl_fp8.run.batch import log_ratio, values_of


PAGE = (Path(__file__).parents[3] / "docs" / "rollout_correction.md").read_text()


@pytest.mark.parametrize("name", PRESETS)
def test_the_loop_of_ones_own_measures_what_the_trainer_does(name):
    (loop,) = re.findall(r"(?s)```python\n(.*?)```", PAGE)
    generator = torch.Generator().manual_seed(0)
    trainer_logps = -torch.rand(4, 9, generator=generator)
    rollout_logps = trainer_logps + 0.02 * torch.randn(4, 9, generator=generator)
    mask = torch.rand(4, 9, generator=generator) > 0.2
    correction, one_rank = PRESETS[name].correction, SimpleNamespace(reduce=lambda t, reduction: t, gather=lambda t: t)
    given = {"trainer_logps": trainer_logps, "rollout_logps": rollout_logps, "mask": mask}
    names = given | {"correction": correction, "accelerator": one_rank}
    exec(loop, names)
    batch = {"completion_mask": mask.long(), "old_per_token_logps": trainer_logps}
    expected = apply_correction(batch, log_ratio(trainer_logps, rollout_logps, mask), correction, one_rank)
    torch.testing.assert_close(names["metrics"], values_of(expected), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(names["corrected"].loss_weights, batch["importance_sampling_ratio"])


def test_the_flags_are_read_as_they_are_written():
    in_python, on_the_command_line, in_yaml = re.search(r"```\n(FP8GRPOConfig.*)\n(--.*)\n(.*)\n```", PAGE).groups()
    (keyword,) = ast.parse(in_python, mode="eval").body.keywords
    assert keyword.arg in FP8GRPOConfig.__dataclass_fields__
    assert correction_from(keyword.value.value) == PRESETS[keyword.value.value].correction
    flag, value = on_the_command_line.split()
    assert flag == f"--{keyword.arg}" and value in PRESETS
    ((flag, written),) = yaml.safe_load(in_yaml).items()
    assert flag == keyword.arg and correction_from(written).reject == (Rejection("token_veto", minimum=1e-4),)


def test_the_rules_as_text_and_the_table_of_presets():
    (line,) = re.findall(r"As text .*", PAGE)
    rules = [Rejection.parse(text) for text in re.findall(r"`(.*?)`", line)]
    assert rules == [
        Rejection("geometric_ratio", 0.98, 1.02, centre="measured"),
        Rejection("token_veto", minimum=1e-4),
        Rejection("token_ratio", 0.5, 2.0),
    ]
    table = PAGE[PAGE.index("## Presets") : PAGE.index("## In a training loop")]
    assert set(re.findall(r"(?m)^\| `(\w+)` \|", table)) == PRESETS.keys()


@pytest.mark.parametrize("config", [FP8RLOOConfig, FP8GMPOConfig])
def test_the_presets_that_losses_of_sequences_take(config, tmp_path):
    def is_taken(name: str) -> bool:
        try:
            config(str(tmp_path), rollout_correction=name, use_cpu=True, bf16=False)
        except ValueError as error:
            return "takes no weight of a token" not in str(error)
        return True

    (row,) = re.findall(r"(?m)^\| RLOO, GMPO \|.*", PAGE)
    named = re.findall(r"`(\w+)`", row.partition("Of the presets they take ")[2])
    assert [name for name in PRESETS if is_taken(name)] == named
