"""The console script, as a user calls it."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from testing import published, tiny_models, vision
from testing.processes import fork
from trl_fp8 import __version__
from trl_fp8.commands.cli import main


ROOT = Path(__file__).parents[1]


def folder_of(name, path, **changes):
    """A folder with nothing but the config of a published model."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(published.CONFIGS[name] | changes))
    return str(path)


def plan_of(capsys, *words):
    """What a plan prints, as JSON."""
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_of_an_8b_model_from_its_config_alone(tmp_path, capsys):
    assert main(["plan", folder_of("Qwen/Qwen3-8B", tmp_path), "--modules"]) == 0
    out = capsys.readouterr().out
    assert "model.layers.*.mlp.down_proj" in out and "4096 x 12288" in out
    assert "144.0 KiB -> 72.0 KiB per token" in out  # 2 x 36 layers x 8 heads x 128 x 2 bytes
    assert "15.3 GiB" in out and "8.8 GiB" in out  # 8.19 B parameters in BF16; 6.95 B of them in FP8


def test_memory_figures_are_those_that_others_measured(tmp_path, capsys):
    """NeMo-RL's PR 1212, Qwen3-8B on one H100: 249,952 tokens in BF16, 299,344 with FP8 linears, 598,672 with FP8 KV
    cache too. What its engine had is not stated; 0.66 of 80 GiB is what the first figure needs, the others follow.
    """
    words = [folder_of("Qwen/Qwen3-8B", tmp_path), "--gpu-memory", "80", "--gpu-memory-utilization", "0.66"]
    figures = plan_of(capsys, *words)
    measured = {"bf16": 249_952, "fp8_linears": 299_344, "fp8_linears_kv": 598_672}
    assert figures["kv_tokens"] == pytest.approx(measured, rel=0.1)
    assert figures["risks"] == []
    assert main(["plan", *words]) == 0
    assert f"{figures['kv_tokens']['fp8_linears_kv']:,} tokens" in capsys.readouterr().out
    halves = plan_of(capsys, *words, "--tensor-parallel-size", "2")["kv_tokens"]
    assert plan_of(capsys, *words, "--kv-cache-dtype", "auto")["kv_tokens"].keys() == {"bf16", "fp8_linears"}
    assert all(halves[name] > 2 * figures["kv_tokens"][name] for name in measured)  # the weights are halved as well


def test_documents_quote_what_a_plan_says(capsys, monkeypatch, tmp_path):
    published.write("Qwen/Qwen3-8B", tmp_path / "Qwen/Qwen3-8B")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "Qwen/Qwen3-8B", "--gpus", "8"]) == 0
    out = capsys.readouterr().out
    assert f"```text\n{out}```" in (ROOT / "docs" / "quickstart.md").read_text()
    found = plan_of(capsys, "Qwen/Qwen3-8B", "--gpus", "8")
    weights, tokens = found["weights_gib"], found["kv_tokens"]
    assert (
        f"take {found['gib_per_gpu']['total']:.0f} of 80 GiB; engine weights of {weights['fp8']:.1f} GiB instead of "
        f"BF16's {weights['bf16']:.1f} leave room for {tokens['fp8_linears_kv']:,} tokens of KV cache instead of "
        f"{tokens['bf16']:,}."
    ) in " ".join((ROOT / "README.md").read_text().split())
    lora = (ROOT / "docs" / "lora.md").read_text()
    for column, words in enumerate(([], ["--lora", "32"], ["--lora", "32", "--fp8-base"]), start=1):
        made = plan_of(capsys, "Qwen/Qwen3-8B", *words)
        trainer, held = made["gib_per_gpu"]["trainer"], made["gib_per_gpu"]["engine_weights"]
        passing = trainer["copies"] + trainer["inputs"] + trainer["head"]
        stated = [
            row.split("|")[column + 1].strip() for row in lora.split("one GPU, GiB, computed")[1].splitlines()[2:8]
        ]
        figures = [*(trainer[name] for name in ("weights", "gradients", "optimizer")), passing, trainer["total"], held]
        assert stated == [f"{figure:.1f}" for figure in figures]
    held = [
        plan_of(capsys, "Qwen/Qwen3-8B", *words)["kv_tokens"]["fp8_linears_kv"]
        for words in (["--lora"], ["--fp8-base"], ["--fp8-base", "--gpu-memory", "24"])
    ]
    said = (
        "holds {:,} tokens with LoRA and {:,} on an FP8 base; on one of 24 GiB only the last fits, with {:,} tokens."
    )
    assert said.format(*held) in " ".join(lora.split())
    assert not plan_of(capsys, "Qwen/Qwen3-8B", "--lora", "--gpu-memory", "24")["fits"]


def test_a_plan_of_the_other_format(tmp_path, capsys):
    tiny_models.config("qwen3_moe").save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--weight-format", "tensor", "--modules"]) == 0
    out = capsys.readouterr().out
    assert "weights e4m3 per tensor, pow2 scales" in out and "fp8 tensor" not in out
    assert "bf16 (vLLM quantizes the input of per-tensor FP8 experts with one scale per batch)" in out
    assert "--fp8_weight_format tensor" in out.splitlines()[-1]  # the flags of this plan, not of another one


def test_what_deserves_a_look_is_named_with_its_flag(tmp_path, capsys):
    found = {}
    for architecture in ("qwen2", "qwen2_moe", "llama", "gemma2"):
        tiny_models.config(architecture, intermediate_size=192).save_pretrained(tmp_path / architecture)
        found[architecture] = " ".join(plan_of(capsys, str(tmp_path / architecture))["risks"])
    assert "kv_cache_skip_layers='auto'" in found["qwen2"] and "kv_cache_skip_layers" not in found["llama"]
    assert "router_replay='monitor'" in found["qwen2_moe"] and "router_replay" not in found["qwen2"]
    assert "model.layers.0.mlp.gate_proj" in found["llama"] and "No flag helps" in found["llama"]
    assert "not tested" not in found["gemma2"] + found["llama"]
    tiny_models.config("qwen3", attention_bias=True).save_pretrained(tmp_path / "normalized")
    assert not any("biases in q, k, v" in risk for risk in plan_of(capsys, str(tmp_path / "normalized"))["risks"])
    mxfp8 = " ".join(plan_of(capsys, str(tmp_path / "llama"), "--weight-format", "mxfp8")["risks"])
    assert "start with compute capability 10.0, where they have never run" in mxfp8
    assert "never run" not in found["llama"]
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    fp8 = folder_of("Qwen/Qwen3-8B", tmp_path / "fp8", quantization_config=stored)
    assert "the checkpoint itself is quantized (fp8)" in plan_of(capsys, fp8)["risks"][0]


def test_plan_of_experts_says_where_they_are_fp8(tmp_path, capsys):
    model = folder_of("Qwen/Qwen3-30B-A3B", tmp_path)
    assert main(["plan", model, "--modules"]) == 0
    out = capsys.readouterr().out
    assert "128 x 2048 x 768" in out and "56.9 GiB" in out and "29.0 GiB" in out and "bf16 (router)" in out
    assert main(["plan", model, "--engine", "cpu", "--modules"]) == 0
    assert "no kernel for FP8 experts on CPU" in capsys.readouterr().out


def test_errors_are_one_message_and_status_two(tmp_path, capsys):
    tiny_models.config(hidden_size=64, intermediate_size=96).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--weight-format", "blocks"]) == 2
    assert "not a multiple of 128 x 128" in capsys.readouterr().err
    found = plan_of(capsys, str(tmp_path))  # what is not asked for is left out, and why is said
    assert found["flags"]["fp8_weights"] is False
    assert any("no weights can be FP8" in risk and "not a multiple of 128 x 128" in risk for risk in found["risks"])
    assert main(["plan", str(tmp_path / "missing")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [4.0] * 64}


@pytest.mark.parametrize(
    "name, changes, words, said",
    [
        (
            "Qwen/Qwen3-8B",
            {"quantization_config": {"quant_method": "awq"}},
            [],
            "is quantized (awq). Training starts from checkpoints in high",
        ),
        ("Qwen/Qwen3-8B", {"quantization_config": {"quant_method": "fp8"}}, [], "is an FP8 checkpoint with one scale"),
        ("openai/gpt-oss-20b", {}, ["--fp8-base"], "a checkpoint in MXFP4. Set fp8_base=False"),
        ("microsoft/phi-4", {"rope_scaling": LONGROPE}, ["--context", "8192"], "vllm_max_model_length=4096 or less"),
    ],
)
def test_what_the_trainer_refuses_of_a_model_is_refused(name, changes, words, said, tmp_path, capsys):
    assert main(["plan", folder_of(name, tmp_path, **changes), *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "has no config.json. Give the folder"),
        ('{"model_type":', "is not a valid JSON file"),
        ("[1, 2]", "config.json"),  # in words of transformers' own from 5.19 on
        ("[" * 9999, "its config.json is no JSON of a model"),
        ('{"model_type": 3}', "model type `3`"),
        ("{}", "Should have a `model_type` key in its config.json"),
        ('{"model_type": "t5"}', "transformers makes no causal language model of"),
    ],
)
def test_what_is_no_model_is_said_in_a_line(content, said, tmp_path, capsys):
    (tmp_path / ("config.json" if content else "other")).write_text(content or "")
    assert main(["plan", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("trl-fp8: ")]
    assert out == "" and said in line
    assert main(["plan", str(next(tmp_path.iterdir()))]) == 2
    assert "is a file. Give its folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size 0: give a number from 1 to 1,048,576"),
        (["--gpus", "3", "--tensor-parallel-size", "2"], "--tensor-parallel-size 2 on 3 GPUs: each engine runs on"),
        (["--tensor-parallel-size", "3"], "cannot divide the attention heads"),
        (["--gpu-memory-utilization", "60"], "--gpu-memory-utilization 60.0: give a number from 0.01 to 0.99"),
        (["--gpu-memory", "-80"], "--gpu-memory -80.0: give a number from 1 to 4,096"),
        (["--gpus", "-1"], "--gpus -1: give a number from 1 to 1,048,576"),
        (["--lora", "0"], "--lora 0: give"),
        (["--context", "50000"], "max_position_embeddings=40960: engine and policy turn q and k of longer"),
        (["--config", "missing.yaml"], "--config missing.yaml: there is no such file"),
        (["--gpus", "two"], "--gpus: invalid int value: 'two'"),
        (["--gpu-memory", "much"], "--gpu-memory: invalid float value: 'much'"),
        (["--gpu-memry", "80"], "Unknown flag --gpu_memry: did you mean gpu_memory?"),
        (["--beta", "0.1"], "--beta is no flag of a plan. Put it into a run config, and give that with --config."),
        (["another/model"], "'another/model' belongs to no flag"),
        (["--modules", "--json"], "--modules with --json: the figures for scripts have no table of modules"),
    ],
)
def test_a_flag_of_no_use_is_named_with_its_value_and_a_fix(words, said, tmp_path, capsys):
    assert main(["plan", folder_of("Qwen/Qwen3-8B", tmp_path), *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err


def test_a_context_that_the_config_stretches_to_is_planned(tmp_path, capsys):
    """As vLLM takes it: YaRN serves the positions that the config itself promises, and no more."""
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40960}
    for positions, exit_code in ((163_840, 0), (40_960, 2)):
        options = {"rope_scaling": stretched, "max_position_embeddings": positions}
        model = folder_of("Qwen/Qwen3-8B", tmp_path / str(positions), **options)
        assert main(["plan", model, "--context", "100000", "--gpu-memory", "2000", "--json"]) == exit_code
        out, err = capsys.readouterr()
        if exit_code:
            assert "vllm_max_model_length=100000, but the config of" in err
        else:
            assert json.loads(out)["flags"]["vllm_max_model_length"] == 100_000


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    model = folder_of("Qwen/Qwen3-8B", tmp_path)
    reading, writing = os.pipe()
    os.close(reading)

    def plan() -> None:
        os.dup2(writing, sys.stdout.fileno())
        sys.exit(main(["plan", model]))

    _, status = os.waitpid(fork(plan, tmp_path / "stderr"), 0)
    os.close(writing)
    assert (os.waitstatus_to_exitcode(status), (tmp_path / "stderr").read_text()) == (1, "")


def test_the_usage_is_that_of_the_command(capsys):
    for words in (["verify", "m", "--nonsense"], ["verify"]):
        with pytest.raises(SystemExit):
            main(words)
        assert capsys.readouterr().err.startswith("usage: trl-fp8 verify")
    assert main(["plan", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: trl-fp8 plan")
    assert main([]) == 0
    assert "COMMAND" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"trl-fp8 {__version__}\n"
    assert main(["plan"]) == 2
    assert "no model" in capsys.readouterr().err


def test_adapters_are_named_with_what_to_do(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    for words in (["plan", str(tmp_path)], ["export", str(tmp_path), str(tmp_path / "fp8")]):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "holds adapters of 'Qwen/Qwen3-8B', and no model" in err and "merge" in err


def test_a_misspelt_folder_is_told_with_the_one_that_may_be_meant(tmp_path, capsys, monkeypatch):
    (tmp_path / "outputs" / "quickstart").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "./outputs/quickstrat"]) == 2
    assert capsys.readouterr().err == (
        f"trl-fp8: MODEL='./outputs/quickstrat': there is no such folder, seen from {tmp_path}: did you mean "
        "outputs/quickstart?\n"
    )


def test_a_model_is_exported_once_and_can_be_verified(checkpoint, tmp_path, capsys):
    source, folder = checkpoint("qwen3"), str(tmp_path / "fp8")
    assert main(["export", source, folder]) == 0
    out = capsys.readouterr().out
    assert "of parameters fp8" in out and f"written: {folder}" in out
    assert main(["verify", folder]) == 0
    assert "files are what was exported" in capsys.readouterr().out
    assert main(["export", source, folder]) == 2
    assert "is not empty" in capsys.readouterr().err
    (tmp_path / "fp8" / "config.json").write_text("{}")
    assert main(["verify", folder]) == 2
    assert "is not as it was exported: config.json (changed). Fetch" in capsys.readouterr().err


def test_an_export_has_the_vision_tower_and_the_processor(tmp_path):
    vision.save_checkpoint(tmp_path / "source", "gemma3")
    assert main(["export", str(tmp_path / "source"), str(tmp_path / "fp8")]) == 0
    (sent,), (made,) = (sorted((tmp_path / folder).glob("*.safetensors")) for folder in ("source", "fp8"))
    names = [name for name in load_file(made) if not name.endswith("_scale_inv")]
    assert len(names) == len(load_file(sent)) and any("vision_tower" in name for name in names)
    assert (tmp_path / "fp8" / "processor_config.json").exists()


def test_an_fp8_checkpoint_is_exported_to_the_same_codes(checkpoint, tmp_path):
    """As a user starts from Qwen3-8B-FP8: dequantized and quantized again, power-of-two scales lose nothing."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["export", checkpoint("qwen3"), str(first)]) == 0
    assert main(["export", str(first), str(second)]) == 0
    (one,), (two,) = (sorted(folder.glob("*.safetensors")) for folder in (first, second))
    ours, theirs = load_file(one), load_file(two)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if (
            tensor.dtype == torch.float8_e4m3fn
        ):  # the scale of a block may be halved where its largest code is below 448 / 2
            scale = f"{name}_scale_inv"
            assert torch.equal(dequantized(tensor, ours[scale]), dequantized(theirs[name], theirs[scale])), name
        elif not name.endswith("_scale_inv"):
            assert torch.equal(tensor, theirs[name]), name


def dequantized(codes, scale):
    return codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
