"""The checksum must change with any single byte and any exchange, whatever dtype, shape or stride."""

import pytest
import torch

from trl_fp8.quantization.codec.digest import Table, _holds_words, digest, digests_of_sent


def sample(dtype, shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


SHAPES = [(128, 256), (3, 64), (7,), (5, 3), (), (2, 3, 4)]


def integer_oracle(tensor):
    """The definition with Python's integers, word by word."""
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    row = tensor.shape[-1] * tensor.element_size() if tensor.dim() else tensor.element_size()
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]
    columns = row // 4 if row % 4 == 0 else len(words)
    total = sum(word * (2 * (i // columns + i % columns * 0x1E3779B97F4A7C15) + 1) for i, word in enumerate(words))
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_definition(dtype, shape):
    tensor = sample(dtype, shape)
    assert digest(tensor).item() == integer_oracle(tensor)


@pytest.mark.parametrize("words", [1, 40, 100])
@pytest.mark.parametrize("shape", [(13, 20), (4, 7, 6), (3, 5), (40,)])
def test_large_tensors_are_taken_in_parts(words, shape, monkeypatch):
    tensor = sample(torch.bfloat16, shape)
    whole = digest(tensor)
    monkeypatch.setattr("trl_fp8.quantization.codec.digest._WORDS_AT_ONCE", words)
    assert torch.equal(digest(tensor), whole)
    strided = tensor.transpose(0, -1)
    assert torch.equal(digest(strided), digest(strided.contiguous()))


def test_tables_take_any_shapes_at_once():
    """Numbers without dimensions and odd rows among them, as Apertus has them."""
    made = [
        sample(dtype, shape, seed) for seed in (0, 1) for shape in SHAPES for dtype in (torch.bfloat16, torch.float32)
    ]
    made += [sample(torch.bfloat16, (1,)), torch.tensor(7), sample(torch.float32, (0, 4))]
    expected = [digest(tensor).item() for tensor in made]
    assert Table(made).sums().tolist() == expected
    made = made[:-2]
    sums, finite = digests_of_sent(made, [torch.bfloat16] * len(made))
    assert sums.tolist() == [digest(tensor, torch.bfloat16).item() for tensor in made] and finite.all()
    made[3], made[-1] = torch.full((3, 64), torch.inf), torch.tensor([torch.nan])
    _, finite = digests_of_sent(made, [torch.bfloat16] * len(made))
    assert finite.logical_not().nonzero().flatten().tolist() == [3, len(made) - 1]


def test_large_tensors_are_cast_in_parts(monkeypatch):
    monkeypatch.setattr("trl_fp8.quantization.codec.digest._WORDS_AT_ONCE", 40)
    for shape in ((40, 3), (40, 12), (5, 8, 6)):
        master = sample(torch.float32, shape)
        assert digests_of_sent([master], [torch.bfloat16])[0] == digest(master.bfloat16())


def test_tables_of_pointers_take_rows_of_whole_words():
    odd = sample(torch.bfloat16, (4, 9))
    assert not any(map(_holds_words, (odd, odd[0], odd[0, 0], odd[0, 1:3])))
    assert all(map(_holds_words, (odd[:, :4], odd.float()[:, :3])))


def test_a_cast_is_part_of_the_checksum():
    master = sample(torch.float32, (13, 20))
    assert torch.equal(digest(master, torch.bfloat16), digest(master.bfloat16()))
    assert not torch.equal(digest(master, torch.bfloat16), digest(master))


@pytest.mark.parametrize("shape", [(8, 16), (5, 3), (9,)])
def test_every_flipped_bit_is_seen(shape):
    tensor = sample(torch.float8_e4m3fn, shape)
    before = digest(tensor).item()
    flat = tensor.view(torch.uint8).view(-1)
    for position in range(flat.numel()):
        for bit in range(8):
            flat[position] ^= 1 << bit
            assert digest(tensor).item() != before
            flat[position] ^= 1 << bit
    assert digest(tensor).item() == before


def test_exchanged_rows_columns_and_transposition_are_seen():
    tensor = sample(torch.bfloat16, (64, 64))
    before = digest(tensor).item()
    for changed in (tensor.flip(0), tensor.flip(1), tensor.T, tensor.roll(1, 0), tensor.roll(2, 1)):
        assert digest(changed).item() != before


def test_strides_do_not_matter():
    tensor = sample(torch.bfloat16, (64, 128))
    assert digest(tensor[16:48, 64:]).item() == digest(tensor[16:48, 64:].clone()).item()
