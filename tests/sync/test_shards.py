"""Sharded policies: each rank quantizes its rows, and all of them hold what one rank alone would have written."""

import gc
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing import ProcessRaisedException, start_processes
from transformers import AutoModelForCausalLM

from testing import published
from trl_fp8.quantization.codec.blockwise import Destination, quantize_into, quantize_weight
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.quantization.formats import BLOCKS, MXFP8, TENSOR
from trl_fp8.recipe.recipe import FP8Recipe, recipe_for_model
from trl_fp8.sync import shards
from trl_fp8.sync.pieces import Layout, Piece, Span
from trl_fp8.sync.shards import GatherFailed, Rows, gathered, rows_of_codes
from trl_fp8.sync.writer import Writer


BLOCK, CPU = (128, 128), torch.device("cpu")
QUANTIZED = {
    "even.weight": (1536, 128),  # whole blocks on 2, 3 and 4 ranks
    "many.weight": (3072, 256),  # on 8, too
    "few.weight": (128, 128),  # fewer blocks than ranks: shards split them
    "torn.weight": (640, 128),
    "mlp.experts.gate_up_proj": (5, 256, 128),  # uneven, and of 8 ranks some have none
    "mlp.experts.down_proj": (12, 128, 128),
}
OTHERS = {"embed.weight": (67, 128), "norm.weight": (131,), "gate.weight": (5, 96), "proj.bias": (3,)}
ALL = QUANTIZED | OTHERS
RECIPE = FP8Recipe(
    fp8_modules=tuple(name.removesuffix(".weight") for name in QUANTIZED if name.endswith(".weight")),
    fp8_experts=("mlp.experts",),
)


def policy(seed: int) -> dict[str, torch.Tensor]:
    """FP32, of many magnitudes, and with numbers that BF16 rounds."""
    torch.manual_seed(seed)
    return {name: torch.randn(shape) * torch.randn(shape).exp() for name, shape in ALL.items()}


def engine() -> Layout:
    """Holds NaN everywhere.

    One weight is rows of a larger parameter, one has its scales column by column, the experts' gates are halves.
    """
    pieces = []

    def add(name: str, tensor: torch.Tensor, **where) -> None:
        tensor = (
            tensor.fill_(float("nan")) if tensor.dtype != E4M3 else tensor.view(torch.uint8).fill_(0x7F).view(E4M3)
        )
        pieces.append(Piece(name, SimpleNamespace(tensor=tensor), "tensor", tensor.dtype, **where))

    for name, (*lead, rows, columns) in QUANTIZED.items():
        where = {"equal": (1, 2)} if name.endswith("gate_up_proj") else {}
        scale = torch.empty(*lead, columns // 128, rows // 128).transpose(-1, -2)
        add(RECIPE.scale_name(name), scale if name == "many.weight" else scale.contiguous(), **where)
        if name == "even.weight":
            where, rows = {"in_engine": (Span(384, rows), None)}, rows + 512
        add(name, torch.empty(*lead, rows, columns, dtype=E4M3), **where)
    for name, shape in OTHERS.items():
        add(name, torch.empty(shape, dtype=torch.bfloat16))
    return Layout(pieces)


def in_rows(parameters: dict[str, torch.Tensor], mesh) -> list[tuple[str, torch.Tensor]]:
    return [(name, distribute_tensor(p, mesh, [Shard(0)], src_data_rank=None)) for name, p in parameters.items()]


def as_zero3(parameters: dict[str, torch.Tensor], mesh) -> list[tuple[str, torch.Tensor]]:
    """What DeepSpeed leaves of parameters: nothing, with a flat part beside it, of one size on all ranks."""
    named, ranks = [], mesh.size()
    for name, whole in parameters.items():
        parts = torch.nn.functional.pad(whole.flatten(), (0, -whole.numel() % ranks)).view(ranks, -1)
        named.append((name, torch.empty(0)))
        named[-1][1].ds_tensor, named[-1][1].ds_shape = parts[mesh.get_local_rank()], whole.shape
        named[-1][1].ds_process_group = mesh.get_group()
    return named


def written(layout: Layout, parameters) -> Writer:
    writer = Writer(layout, RECIPE, one_by_one=True)
    writer.write(parameters)
    return writer


def assert_holds(layout: Layout, writer: Writer, parameters: dict[str, torch.Tensor]) -> None:
    """What is held and the checksums of what was sent are those of the whole weights."""
    want = {name: parameters[name].bfloat16() for name in OTHERS}
    for name in QUANTIZED:
        codes = quantize_weight(parameters[name].bfloat16())
        want |= {name: codes.qdata, RECIPE.scale_name(name): codes.scale}
    assert not writer.unknown and set(writer.sums) == set(want) == set(layout.names)
    for name, tensor in want.items():
        assert torch.equal(layout.held[name].reshape(tensor.shape).float(), tensor.float()), name
        assert writer.sums[name].item() == digest(tensor).item(), name
    assert layout.sums().tolist() == [writer.sums[name].item() for name in layout.names]


@pytest.fixture(scope="module", autouse=True)
def no_group():
    """Forks inherit no group of this process, which an engine that a module before this one left may hold."""
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def on_ranks(function, ranks: int, folder) -> None:
    """Run `function(mesh)` on so many ranks, forks of this process; again where gloo's sockets did not meet."""
    for attempt in range(3):
        try:
            return start_processes(_rank, (function, ranks, f"{folder}/store{attempt}"), ranks, start_method="fork")
        except ProcessRaisedException as error:
            if "connectFullMesh" not in str(error) or attempt == 2:
                raise


def _rank(rank: int, function, ranks: int, store: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    function(init_device_mesh("cpu", (ranks,)))
    distributed.destroy_process_group()


def counting(monkeypatch) -> list[int]:
    """Bytes of each gather from now on."""
    gather, sizes = shards.all_gather_into_tensor, []

    def counted(whole, own, group):
        sizes.append(whole.nbytes)
        gather(whole, own, group=group)

    monkeypatch.setattr(shards, "all_gather_into_tensor", counted)
    return sizes


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_together_write_what_one_writes_alone(ranks, tmp_path, monkeypatch):
    sizes = counting(monkeypatch)

    def two_syncs(mesh):
        layout = engine()
        for seed in (1, 2):
            parameters = policy(seed)
            sizes.clear()
            writer = written(layout, gathered(in_rows(parameters, mesh), RECIPE, layout, CPU))
            assert_holds(layout, writer, parameters)
            assert writer.fp8_weights == len(QUANTIZED)
            error, dead = writer.inspect(reduce_max)
            assert dead == {} and error < 2**-4 and (error > 0 or mesh.get_local_rank() > 0)
        padded = {name: -(-shape[0] // ranks) * ranks * torch.Size(shape[1:]).numel() for name, shape in ALL.items()}
        torn = {"few.weight", "torn.weight", *OTHERS} | ({"even.weight"} if ranks == 8 else set())
        codes = [padded[name] for name in ALL if name not in torn]
        expected = [*codes, *(4 * numbers // 128**2 for numbers in codes), *(2 * padded[name] for name in torn)]
        assert sorted(sizes) == sorted(expected)

    on_ranks(two_syncs, ranks, tmp_path)


def test_other_shards_arrive_whole(tmp_path):
    """Replicas of shards, shards of columns, and what is not sharded at all."""

    def sync(mesh):
        layout, parameters, both = engine(), policy(3), init_device_mesh("cpu", (2, 1))
        placements = {"even.weight": (both, [Replicate(), Shard(0)]), "many.weight": (mesh, [Shard(1)])}
        mixed = dict(in_rows(parameters, mesh)) | {"norm.weight": parameters["norm.weight"]}
        mixed |= {name: distribute_tensor(parameters[name], *where) for name, where in placements.items()}
        for some in (mixed, {name: mixed[name] for name in [*placements, "norm.weight"]}):
            whole = [(name, some.get(name, parameters[name])) for name in ALL]
            assert_holds(layout, written(layout, gathered(whole, RECIPE, layout, CPU)), parameters)

        def full(tensor):
            raise torch.OutOfMemoryError("no memory for a whole")

        DTensor.full_tensor = full
        with pytest.raises(GatherFailed, match="broke off on this rank.*no memory for a whole"):
            written(layout, gathered([("many.weight", mixed["many.weight"])], RECIPE, layout, CPU))

        def lost(*args, **kwargs):
            raise RuntimeError("Connection closed by peer")

        shards.all_gather_into_tensor = lost
        with pytest.raises(GatherFailed, match="broke off on this rank.*closed by peer"):
            written(layout, gathered(in_rows(parameters, mesh), RECIPE, layout, CPU))

    on_ranks(sync, 2, tmp_path)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_flat_parts_are_rows_where_ranks_divide_them(ranks, tmp_path, monkeypatch):
    sizes = counting(monkeypatch)

    def sync(mesh):
        layout, parameters = engine(), policy(5)
        writer = written(layout, gathered(as_zero3(parameters, mesh), RECIPE, layout, CPU))
        assert_holds(layout, writer, parameters)
        codes = ["even.weight", "many.weight", "mlp.experts.down_proj"]  # of these dims that 2, 3 and 4 divide
        codes = [torch.Size(QUANTIZED[name]).numel() for name in codes]
        others = [-(-torch.Size(shape).numel() // ranks) * ranks for name, shape in ALL.items()]
        others = [2 * numbers for numbers in others if numbers not in codes]
        assert sorted(sizes) == sorted([*codes, *(4 * numbers // 128**2 for numbers in codes), *others])

    on_ranks(sync, ranks, tmp_path)


def test_parts_that_are_not_the_parameter_are_not_taken_for_it(tmp_path):
    """On a disk, dealt over a part of the ranks only, quantized."""

    def look(mesh):
        ((_, parameter),) = as_zero3({"torn.weight": torch.randn(640, 128)}, mesh)
        assert shards.Sharded.of(parameter).local.shape == (320, 128)
        for other in (torch.empty(1), torch.empty(640 * 128), parameter.ds_tensor.to(torch.int8)):
            parameter.ds_tensor = other
            assert shards.Sharded.of(parameter) is None
        assert shards.Sharded.of(torch.randn(640, 128)) is None

    on_ranks(look, 2, tmp_path)


@pytest.mark.parametrize("change", [{"tensor_parallel_size": 2}, {"format": TENSOR}], ids=["parts", "one scale"])
def test_weights_that_ranks_cannot_quantize_in_parts_arrive_whole_in_bf16(change, tmp_path):
    """An engine holds parts of each weight; a scale needs all of it."""

    def sync(mesh):
        parameters = policy(4)
        for name, whole in gathered(in_rows(parameters, mesh), replace(RECIPE, **change), engine(), CPU):
            assert torch.equal(whole, parameters[name].bfloat16()), name

    on_ranks(sync, 2, tmp_path)


def test_a_rank_that_fails_gathers_to_the_end_and_the_next_sync_is_whole(tmp_path, monkeypatch):
    """Out of memory at each weight that is quantized in parts, in turn."""
    sizes, quantize = counting(monkeypatch), shards.quantize_into

    def syncs(mesh):
        layout, failing, calls = engine(), mesh.get_local_rank() == 1, []
        source = lambda seed: gathered(in_rows(policy(seed), mesh), RECIPE, layout, CPU)  # noqa: E731
        written(layout, source(0))
        gathers = len(sizes)

        def full(*args, place):
            calls.append(1)
            if failing and len(calls) == place:
                raise torch.OutOfMemoryError(f"at {place}")
            return quantize(*args)

        for place in range(1, 5):
            sizes.clear(), calls.clear()
            monkeypatch.setattr(shards, "quantize_into", partial(full, place=place))
            with pytest.raises(torch.OutOfMemoryError, match=f"at {place}") if failing else nullcontext():
                written(layout, source(place))
            assert len(sizes) == gathers
            monkeypatch.setattr(shards, "quantize_into", quantize)
            assert_holds(layout, written(layout, source(place)), policy(place))

    on_ranks(syncs, 2, tmp_path)


def test_without_memory_to_gather_in_all_ranks_refuse_before_anything_is_written(tmp_path, monkeypatch):
    sizes, empty = counting(monkeypatch), torch.empty

    def sync(mesh):
        layout, failing = engine(), mesh.get_local_rank() == 1

        def full(*args, **kwargs):
            if failing and kwargs.get("dtype") == torch.uint8:
                raise torch.OutOfMemoryError("no room")
            return empty(*args, **kwargs)

        monkeypatch.setattr(torch, "empty", full)
        before = layout.sums().tolist()
        with pytest.raises(RuntimeError, match="no room" if failing else "another rank has no memory"):
            written(layout, gathered(in_rows(policy(0), mesh), RECIPE, layout, CPU))
        assert sizes == [] and layout.sums().tolist() == before

    on_ranks(sync, 2, tmp_path)


def test_numbers_that_are_not_finite_on_one_rank_are_named_on_all(tmp_path):
    def sync(mesh):
        layout, parameters = engine(), in_rows(policy(0), mesh)
        if mesh.get_local_rank() == 1:
            for name in ("many.weight", "torn.weight", "mlp.experts.down_proj", "embed.weight"):
                dict(parameters)[name].to_local().flatten()[-1] = float("inf")
        bad = "embed.weight, many.weight, mlp.experts.down_proj, torn.weight"
        with pytest.raises(ValueError, match=f"in 4 of {len(ALL)} parameters: {bad}"):
            written(layout, gathered(parameters, RECIPE, layout, CPU)).inspect(reduce_max)

    on_ranks(sync, 2, tmp_path)


def reduce_max(tensor: torch.Tensor) -> None:
    distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)


def test_a_byte_that_changes_on_its_way_is_seen(tmp_path, monkeypatch):
    gather = shards.all_gather_into_tensor

    def sync(mesh):
        layout, parameters, calls = engine(), policy(0), []

        def changing(whole, own, group):
            gather(whole, own, group=group)
            calls.append(1)
            if mesh.get_local_rank() == 1 and len(calls) in (1, 2):  # codes and scales of the first weight
                whole[0] ^= 1

        monkeypatch.setattr(shards, "all_gather_into_tensor", changing)
        writer = written(layout, gathered(in_rows(parameters, mesh), RECIPE, layout, CPU))
        sums = zip(layout.names, layout.sums().tolist(), strict=True)
        changed = {name for name, held in sums if held != writer.sums[name].item()}
        expected = {"even.weight", "even.weight_scale_inv"} if mesh.get_local_rank() == 1 else set()
        assert changed == expected

    on_ranks(sync, 2, tmp_path)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 5, 8, 128, 640, 1024])
def test_rows_are_dealt_as_fsdp2_deals_them(count, ranks):
    rows, numbers = Rows(count, ranks), torch.arange(count)
    dealt = [*numbers.chunk(ranks), *[numbers[:0]] * ranks][:ranks]
    assert all(torch.equal(numbers[rows.of(rank)], own) for rank, own in enumerate(dealt))
    assert rows.padded == rows.per_rank * ranks >= count and rows.per_rank == len(dealt[0])


@pytest.mark.parametrize(
    "shape, ranks, codes_and_scales",
    [
        ((1024, 256), 1, (1024, 8)),
        ((1024, 256), 2, (512, 4)),
        ((1024, 256), 8, (128, 1)),
        ((1024, 256), 3, None),
        ((1024, 256), 16, None),  # fewer blocks than ranks
        ((640, 256), 2, None),
        ((128, 256), 2, None),
        ((60, 256, 128), 8, (8, 8)),
        ((5, 256, 128), 8, (1, 1)),
        ((5, 256, 128), 3, (2, 2)),
    ],
)
def test_which_weights_can_be_quantized_in_parts(shape, ranks, codes_and_scales):
    found = rows_of_codes(shape, ranks, BLOCKS)
    assert (found and tuple(part.per_rank for part in found)) == codes_and_scales


def test_one_scale_for_a_weight_is_not_made_in_parts():
    assert rows_of_codes((1024, 256), 2, TENSOR) is None


def test_rows_of_exponents_that_are_no_whole_words_are_not_made_in_parts():
    """Checksums of their parts would not add up."""
    assert rows_of_codes((1024, 256), 2, MXFP8) == (Rows(1024, 2), Rows(1024, 2))
    assert rows_of_codes((1024, 224), 2, MXFP8) is None


@pytest.mark.parametrize("shape", [(4, 1024, 2048), (2048, 1024), (256, 128), (6, 256, 128)])
def test_checksums_of_parts_add_up(shape):
    """Some of them so large that the quantizer itself goes through them in parts."""
    torch.manual_seed(0)
    weight, whole = torch.randn(shape), quantize_weight(torch.zeros(shape))
    codes, scale = whole.qdata, whole.scale
    want = quantize_into([Destination(weight, codes, scale)], "pow2", BLOCK, 1e-12)[0]
    half, scales_half = shape[0] // 2, len(scale) // 2
    lead, scales_lead = torch.Size(shape[1:-1]).numel(), scale.shape[1:-1].numel()
    first = Destination(weight[:half], codes[:half], scale[:scales_half])
    second = Destination(weight[half:], codes[half:], scale[scales_half:])
    before = (half * lead, scales_half * scales_lead)
    parts = quantize_into([first, second._replace(rows_before=before)], "pow2", BLOCK, 1e-12)
    assert torch.equal(parts.sum(0), want)
    assert not torch.equal(quantize_into([first, second], "pow2", BLOCK, 1e-12).sum(0), want)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_gathered_of_qwen3_8b_are_those_of_the_page(ranks):
    config = published.qwen3_8b()
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config)
    recipe, sent, gathers, whole = recipe_for_model(policy), 0, 0, 0
    for name, parameter in policy.named_parameters():
        whole += 4 * parameter.numel()
        if name in recipe.fp8_tensors and rows_of_codes(parameter.shape, ranks, recipe.format):
            sent, gathers = sent + recipe.format.weight_bytes(parameter.shape), gathers + 2
        else:
            sent, gathers = sent + 2 * parameter.numel(), gathers + 1
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    [row] = re.findall(r"^\| Qwen3-8B .*\| (.*) GB \| (\d+) \|$", page, re.MULTILINE)
    assert row == (f"{whole / 1e9:.1f} -> {sent / 1e9:.1f}", str(gathers))
