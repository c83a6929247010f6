"""The console script, as a user calls it."""

import tiny_models

from trl_fp8.cli import main


def test_plan_of_an_8b_model_from_its_config_alone(tmp_path, capsys):
    tiny_models.config(
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151936,
    ).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "model.layers.*.mlp.down_proj" in out and "4096 x 12288" in out
    assert "144.0 KiB -> 72.0 KiB per token" in out  # 2 x 36 layers x 8 heads x 128 x 2 bytes
    assert "15.3 GiB" in out and "8.8 GiB" in out  # 8.19 B parameters in BF16; 6.95 B of them in FP8


def test_plan_of_experts_says_where_they_are_fp8(tmp_path, capsys):
    tiny_models.qwen3_30b_a3b().save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "128 x 2048 x 768" in out and "56.9 GiB" in out and "29.0 GiB" in out and "bf16 (router)" in out
    assert main(["plan", str(tmp_path), "--engine", "cpu"]) == 0
    assert "no kernel for FP8 experts on CPU" in capsys.readouterr().out


def test_errors_are_one_message_and_status_two(tmp_path, capsys):
    tiny_models.config(hidden_size=64, intermediate_size=96).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path)]) == 2
    assert "not a multiple of 128 x 128" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "missing")]) == 2
    assert "trl-fp8:" in capsys.readouterr().err
