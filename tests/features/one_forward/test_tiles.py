"""Tiles of vLLM's Triton kernels under batch invariance: what vLLM's own functions launch, without a GPU."""

from types import SimpleNamespace

import pytest
import torch
from vllm import envs
from vllm.model_executor.determinism import batch_invariant, batch_invariant_configs
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.quantization.utils import fp8_utils

from trl_fp8.features.one_forward import engine_invariance as tiles


ROWS = (1, 16, 64, 65, 300, 4096)
PROCESSORS = 132  # of an H100
HEADS = [(151936, 2048), (151936, 4096), (12288, 2048), (2048, 2048)]
ADAPTERS = [(96, 4096), (32, 12288), (8, 1024)]  # the A of q, k and v at rank 32, of down_proj, and a small one
ROUTERS = [(128, 2048), (8, 4096)]
TILE = "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages"


class Recorded:
    """In the place of a Triton kernel: its launches, as (grid, options)."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((grid, options))


@pytest.fixture
def pinned(monkeypatch):
    """Pin tiles, in this test only."""
    monkeypatch.setattr(batch_invariant, "_get_matmul_config", batch_invariant._get_matmul_config)
    monkeypatch.setattr(fused_moe, "get_default_config", fused_moe.get_default_config)
    monkeypatch.setattr(fp8_utils, "get_w8a8_block_fp8_configs", lambda *shape: "measured")
    tiles.pin_tiles.__wrapped__()


def launch(monkeypatch, shape, rows, dtype=torch.bfloat16):
    """Tile, and number of programs, of vLLM's product of `rows` rows with an unquantized weight of `shape`."""
    kernel = Recorded()
    monkeypatch.setattr(batch_invariant, "matmul_kernel_persistent", kernel)
    monkeypatch.setattr(batch_invariant, "num_compute_units", lambda device: PROCESSORS)
    monkeypatch.setattr(batch_invariant, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b)))
    x, weight = (torch.empty(*size, dtype=dtype, device="meta") for size in ((rows, shape[1]), shape))
    batch_invariant.linear_batch_invariant(x, weight)
    [(grid, options)] = kernel.launches
    return tuple(options[name] for name in TILE), grid(options)[0]


@pytest.fixture
def hopper(monkeypatch):
    """vLLM's tables are those of Hopper."""
    tuned = batch_invariant_configs._BATCH_INVARIANT_MATMUL_TUNED_CONFIGS["hopper"]
    monkeypatch.setattr(batch_invariant_configs, "_TUNED_MATMUL_CONFIGS_FOR_DEVICE", tuned)
    monkeypatch.setattr(batch_invariant_configs, "_TUNED_MATMUL_CONFIGS_RESOLVED", True)


@pytest.mark.parametrize("shape", HEADS + ADAPTERS + ROUTERS, ids=str)
@pytest.mark.usefixtures("hopper", "pinned")
def test_a_tile_does_not_depend_on_the_number_of_rows(shape, monkeypatch):
    assert len({launch(monkeypatch, shape, rows)[0] for rows in ROWS}) == 1


@pytest.mark.usefixtures("hopper")
def test_without_the_pin_it_would(monkeypatch):
    assert len({launch(monkeypatch, HEADS[0], rows)[0][:2] for rows in ROWS}) > 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.usefixtures("hopper", "pinned")
def test_adapters_and_routers_keep_a_gpu_busy_where_they_were_one_program(dtype, monkeypatch):
    """64 rows, a batch that decodes."""
    for shape, least in {(96, 4096): 12, (128, 2048): 16}.items():
        tile, programs = launch(monkeypatch, shape, 64, dtype)
        assert tile[:3] == (16, 32, 128 if dtype == torch.bfloat16 else 64) and programs == least
    assert launch(monkeypatch, (6144, 96), 64, dtype)[0][:2] == (128, 128)  # an adapter's B has columns enough
    monkeypatch.undo()
    assert launch(monkeypatch, (96, 4096), 64)[1] == 1


@pytest.mark.usefixtures("pinned")
def test_experts_have_one_tile_while_vllm_is_invariant_and_vllms_otherwise(monkeypatch):
    fp8 = {"E": 128, "N": 768, "K": 2048, "topk": 8, "dtype": "fp8_w8a8", "block_shape": [128, 128]}
    free = [fused_moe.get_default_config(rows, **fp8) for rows in ROWS]
    assert len({each["BLOCK_SIZE_M"] for each in free}) > 1
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    [tile] = {tuple(fused_moe.get_default_config(rows, **fp8).items()) for rows in ROWS}
    assert dict(tile) == free[-1]  # what vLLM takes for a prefill
    bf16 = fp8 | {"dtype": None, "block_shape": None}
    [tile] = {tuple(fused_moe.get_default_config(rows, **bf16).items()) for rows in ROWS}
    assert dict(tile)["BLOCK_SIZE_K"] == 64 and dict(tile)["BLOCK_SIZE_M"] == 64


def test_measured_tiles_of_fp8_linears_are_for_engines_that_nobody_shares(pinned, monkeypatch):
    shape = (24576, 1536, 128, 128)
    assert fp8_utils.get_w8a8_block_fp8_configs(*shape) == "measured"
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    assert fp8_utils.get_w8a8_block_fp8_configs(*shape) is None
