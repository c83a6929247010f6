"""Weights at the edges of the formats, through quantizer, stream and engine, and read back: 10,000 blocks and more."""

import pytest
import torch

from testing import engines, tiny_models
from trl_fp8.upstream.vllm import engine_model


SHAPE = dict(
    hidden_size=1024,
    intermediate_size=6144,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=128,
    num_hidden_layers=2,
)
ROUNDS = 4
KINDS = ("normal", "subnormal", "boundary", "outlier", "zero", "tiny", "huge", "mixed")
FP8_MAX = 448.0


def fuzzed(blocks: int, generator: torch.Generator) -> tuple[torch.Tensor, list[str]]:
    """`[blocks, 128, 128]` fp32 values, each block of a kind of its own, at a magnitude of its own."""
    noise = torch.randn(blocks, 128, 128, generator=generator)
    exponent = torch.randint(-20, 8, (blocks, 1, 1), generator=generator)
    kinds = [KINDS[int(number)] for number in torch.randint(len(KINDS), (blocks,), generator=generator)]
    for index, kind in enumerate(kinds):
        block = noise[index]
        if kind == "subnormal":  # far below the block's largest: e4m3 subnormals and zeros
            block.mul_(2.0 ** -torch.randint(4, 14, (128, 128), generator=generator).float())[0, 0] = 1.0
        elif kind == "boundary":  # the largest code, its neighbours, and halfway between them
            steps = torch.tensor([FP8_MAX, 432.0, 440.0, 416.0, 424.0, 240.0, 232.0, 248.0]) / FP8_MAX
            block.copy_(steps[torch.randint(8, (128, 128), generator=generator)] * block.sign())
        elif kind == "outlier":
            block[int(torch.randint(128, (1,), generator=generator)), 7] = 1e4
        elif kind == "zero":
            block.zero_()
        elif kind == "tiny":
            block.mul_(1e-30)
        elif kind == "huge":
            block.mul_(1e30)
        elif kind == "mixed":
            block[::2] = 0.0
    scale = torch.where(torch.tensor([kind in ("tiny", "huge") for kind in kinds]).view(-1, 1, 1), 0, exponent)
    return noise * 2.0**scale, kinds


def nearest_codes() -> torch.Tensor:
    """For each of the 32,640 finite BF16 magnitudes, by its bits: the nearest of the 127 finite e4m3 magnitudes,
    with ties to the even code.
    """
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # 0 .. 448
    magnitudes = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).double()
    above = torch.searchsorted(codes, magnitudes).clamp(max=126)
    low, high = codes[(above - 1).clamp(min=0)], codes[above]
    up = (magnitudes - low > high - magnitudes) | ((magnitudes - low == high - magnitudes) & (above % 2 == 0))
    return torch.where(up, high, low).float()


def predicted(weight: torch.Tensor, nearest: torch.Tensor) -> torch.Tensor:
    """What block FP8 with power-of-two scales makes of `[N, K]`, by another way than the quantizer's:
    the nearest e4m3 value is looked up for every element.
    """
    rows, columns = weight.shape[0] // 128, weight.shape[1] // 128
    blocks = weight.bfloat16().view(rows, 128, columns, 128).transpose(1, 2).float()
    amax = blocks.abs().amax((2, 3), keepdim=True).double().clamp_min(1e-12)
    # log2 of fp64 is exact enough: amax has 8 bits, so amax / 448 is a power of two or away from one by a 256th
    scale = (2.0 ** torch.ceil(torch.log2(amax / FP8_MAX))).float()
    scaled = (blocks / scale).bfloat16()
    assert torch.equal(scaled.float() * scale, blocks)  # powers of two move exponents only
    found = nearest[scaled.abs().view(torch.int16).int()] * scaled.sign().float()
    return (found * scale).transpose(1, 2).reshape(weight.shape)


def held(engine) -> dict[str, torch.Tensor]:
    """Dequantized values of every FP8 weight in the engine, under the checkpoint's names, sliced by hand."""
    found = {}
    for number, layer in enumerate(engine.model.layers):
        for path, parts in (
            ("self_attn.qkv_proj", (("q_proj", 1024), ("k_proj", 512), ("v_proj", 512))),
            ("self_attn.o_proj", (("o_proj", 1024),)),
            ("mlp.gate_up_proj", (("gate_proj", 6144), ("up_proj", 6144))),
            ("mlp.down_proj", (("down_proj", 1024),)),
        ):
            module = layer.get_submodule(path)
            scale = module.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
            values = (module.weight.float() * scale).split([rows for _, rows in parts])
            parent = path.partition(".")[0]
            found |= {
                f"model.layers.{number}.{parent}.{name}.weight": value
                for (name, _), value in zip(parts, values, strict=True)
            }
    return found


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="the values are read where the CPU reference kernel keeps them")
def test_ten_thousand_blocks_arrive_as_predicted(tmp_path):
    generator, cases, seen, nearest = torch.Generator().manual_seed(0), 0, set(), nearest_codes()
    generation = engines.start(tiny_models.save_checkpoint(tmp_path / "model", **SHAPE), kv_cache_dtype="auto")
    try:
        for _ in range(ROUNDS):
            expected = {}
            with torch.no_grad():
                for name, parameter in generation.model.named_parameters():
                    if name in generation.recipe.fp8_tensors:
                        rows, columns = (size // 128 for size in parameter.shape)
                        blocks, kinds = fuzzed(rows * columns, generator)
                        parameter.copy_(blocks.view(rows, columns, 128, 128).transpose(1, 2).reshape(parameter.shape))
                        expected[name] = predicted(parameter, nearest)
                        cases, seen = cases + len(kinds), seen | set(kinds)
            generation.sync_weights()
            arrived = held(engine_model(generation.llm))
            assert arrived.keys() == expected.keys()
            for name, values in expected.items():
                assert torch.equal(arrived[name], values), name
    finally:
        engines.shutdown(generation.llm)
    assert cases >= 10_000 and seen == set(KINDS)
