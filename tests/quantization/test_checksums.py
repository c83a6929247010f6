"""Checksums over a table of pointers, in Triton's interpreter: of the views that engines and policies are made of."""

import re

import pytest
import torch
from triton import language as tl

from tests.quantization.interpreted import Launches
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.quantization.kernels import checksum_kernels as checksums
from trl_fp8.quantization.kernels.checksum_kernels import (
    AT_ONCE,
    LANES,
    STEPS,
    _sum_entries,
    sum_sent,
    sum_table,
    table_of,
)


FLOATS = torch.bfloat16, torch.float16, torch.float32


def views(device="cpu"):
    """Name -> the tensor that it is a view of, and the view."""
    generator = torch.Generator().manual_seed(0)

    def parameter(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    fused, experts = parameter(96, 256, dtype=E4M3), parameter(3, 80, 20, dtype=E4M3)
    scales, embedding = parameter(5, 12), parameter(40, 48, dtype=torch.bfloat16)
    tall, wide, norm = parameter(2 * STEPS + 3, 4 * LANES, dtype=E4M3), parameter(1, 3 * LANES + 7), parameter(128)
    narrow = parameter(LANES * STEPS + 30, 2)
    return {
        "query of a fused projection": (fused, fused[:64]),
        "value of a fused projection": (fused, fused[80:]),
        "columns of a rank": (fused, fused[:, 64:128]),
        "halves of experts": (experts, experts.unflatten(1, (2, -1))[:, :, 8:24]),
        "rows of experts": (experts, experts[:, 8:24]),
        "scales": (scales, scales[1:3, :8]),
        "scales column by column": (scales, scales.t()),
        "embedding without padding": (embedding, embedding[:37]),
        "norm": (norm, norm),
        "bias in BF16": (embedding, embedding[3]),
        "KV scale": (norm, norm[5]),
        "many rows": (tall, tall),
        "many columns": (wide, wide),
        "one word in a row": (narrow, narrow[:, :1]),
        "no rows": (norm, norm[:0]),
    }


def differences(device="cpu"):
    """The views of which the table has another checksum than torch's operations, now and after one byte changes."""
    made = views(device)
    table, found = table_of([view for _, view in made.values()]), []
    sums = sum_table(table)
    if sums.tolist() != [digest(view.cpu()).item() for _, view in made.values()]:
        found.append("before")
    for name, (_, view) in made.items():
        if view.numel():
            alone = table_of([view])
            before = sum_table(alone)
            view[tuple(-1 for _ in view.shape)][None].view(torch.uint8)[-1] ^= 1
            if (after := sum_table(alone)) == before or after.cpu() != digest(view.cpu()):
                found.append(name)
    if sum_table(table).tolist() != [digest(view.cpu()).item() for _, view in made.values()]:
        found.append("after")
    return found


def sent_differences(device="cpu"):
    """Pairs of dtypes for which what is sent has another checksum than after torch's cast, or other findings."""
    found = []
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(shape, generator=generator) for shape in [(), (7,), (1, 5), (40, 12)]]
    long = torch.randn(STEPS + 12, 600, generator=generator)  # for several programs
    views = [long, long[::2, 10:-10], long.t()[:, :8], long.view(-1, 4, 600)[:, 1:3]]
    for value in (torch.nan, torch.inf, -torch.inf, 3e38, 65519.0, 65520.0, torch.finfo(torch.float32).max, -0.0):
        sources.append(torch.zeros(3, 8))
        sources[-1][2, 5] = value
    sent, dtypes = [], []
    for dtype in FLOATS:
        for target in FLOATS:
            # The interpreter takes seconds for the long ones: each dtype is a source and a target of them once
            is_next = FLOATS.index(target) == (FLOATS.index(dtype) + 1) % len(FLOATS)
            chosen = sources + views if is_next or device != "cpu" else sources
            sent += [tensor.to(dtype) for tensor in chosen]
            dtypes += [target] * len(chosen)
    sums, bad = sum_sent([tensor.to(device) for tensor in sent], dtypes)
    for tensor, target, total, finding in zip(sent, dtypes, sums.tolist(), bad.tolist(), strict=True):
        finite = bool(tensor.to(target).isfinite().all())
        if finding != (not finite) or (finite and total != digest(tensor, target)):
            found.append((str(tensor.dtype), str(target), tuple(tensor.shape)))
    return found


def parts_add_up():
    whole = torch.randn(STEPS + 5, 8, generator=torch.Generator().manual_seed(0))
    parts = [sum_table(table_of([part], first_row=row))[0] for part, row in ((whole[:30], 0), (whole[30:], 30))]
    return bool(sum(parts) == digest(whole))


def far_apart():
    """Two rows 4 GiB apart."""
    memory = torch.empty(2**31 + 4096, dtype=torch.bfloat16)
    rows = memory.as_strided((2, 128), (2**31 + 512, 1))
    rows.copy_(torch.randn(2, 128, generator=torch.Generator().manual_seed(0)))
    return bool(sum_sent([rows], [torch.bfloat16])[0] == digest(rows))


def launches():
    """Of a table of every view, and of two tensors in each of nine pairs of dtypes."""
    counts = []
    pairs = [(torch.ones(2, 4, dtype=source), target) for source in FLOATS for target in FLOATS] * 2
    tensors, dtypes = zip(*pairs, strict=True)
    for call in (
        lambda: sum_table(table_of([view for _, view in views().values()])),
        lambda: sum_sent(tensors, dtypes),
    ):
        counted = Launches(_sum_entries)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checksums, "_sum_entries", counted)
            call()
        counts.append(counted.count)
    return counts


def interpreted():
    """See test_interpreted.py."""
    return {
        "held": differences(),
        "sent": sent_differences(),
        "parts": parts_add_up(),
        "far apart": far_apart(),
        "launches": launches(),
    }


@pytest.mark.gpu
def test_checksums_on_a_gpu_are_those_on_cpu():
    assert differences("cuda") == []
    assert sent_differences("cuda") == []
    weight = torch.randn(3000, 4000)
    for tensor in (weight, weight.bfloat16(), weight.t(), weight[:, 1:], weight[0, :3].to(E4M3)):
        assert digest(tensor.cuda()).cpu() == digest(tensor)
        assert digest(tensor.cuda(), torch.bfloat16).cpu() == digest(tensor, torch.bfloat16)


CODES = torch.zeros(4, 6, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (CODES[..., :6], "no whole number of words"),
        (CODES[..., 1:5], "does not begin at a word"),
        (CODES.view(-1)[:189].view(21, 9)[:, :8], "no whole number of words"),
        (CODES.transpose(1, 2), "no whole number of words"),
        (torch.zeros(3, dtype=torch.bfloat16), "no whole number of words"),
        (torch.zeros(4, 4, 4, 4)[:3, :3, :3], "more than two strides"),
    ],
)
def test_tensors_without_whole_words_are_refused(tensor, message):
    with pytest.raises(ValueError, match=message):
        table_of([tensor])


def test_unsupported_dtypes_and_shapes_are_refused():
    with pytest.raises(ValueError, match=r"cannot be sent as torch\.bfloat16"):
        sum_sent([torch.zeros(4, dtype=torch.int32)], [torch.bfloat16])
    with pytest.raises(ValueError, match="no whole number of words in torch.bfloat16"):
        sum_sent([torch.zeros(4, 3)], [torch.bfloat16])


def test_programs_are_few_for_small_tensors_and_many_for_an_embedding():
    small = table_of([torch.empty(128), torch.empty(32, 32), torch.empty(())])
    assert small.programs.tolist() == [0, 1, 2]
    embedding = torch.empty(150_000, 4096, dtype=torch.bfloat16)
    assert len(table_of([embedding]).programs) == -(-150_000 // STEPS) * 2048 // LANES > 9000


@pytest.mark.parametrize("kind", [(tl.int32, tl.int32), (tl.float32, tl.bfloat16), (tl.bfloat16, tl.bfloat16)])
@pytest.mark.parametrize("arch", [89, 90, 100])
def test_a_program_adds_to_a_checksum_at_once_and_keeps_its_registers(compiled, kind, arch):
    types = {"entries": "*i64", "programs": "*i32", "sums": "*i64"}
    constants = dict(zip(("SOURCE", "TARGET"), kind, strict=True))
    constants |= {"LANES": LANES, "STEPS": STEPS, "AT_ONCE": AT_ONCE}
    if kind[1] == tl.int32:
        constants["bad"] = None
    else:
        types["bad"] = "*i64"
    text, registers, spilled = compiled(_sum_entries, types, constants, LANES // 32, arch)
    added = re.findall(r"(?:atom|red)\.\S*global\S*|membar\S*|fence\S*", text)
    assert added == ["red.global.gpu.relaxed.add.u64"]
    assert spilled == 0
    assert registers <= 64  # four programs, 32 KiB under way, at once
    assert ("cvt.rn.bf16" in text) == (kind[0] == tl.float32)
