"""Patches: the elements of staged tensors that changed since the last sync, with their new values.

    finding   the trainer compares the staged buffer (staging.py) with a copy of what it sent last, a part at a time,
              on the policy's device
    encoding  a patch has two lists for each size of an element: the gaps between positions as LEB128 (7 bits a byte;
              the highest bit is set in all but the last byte of a number), then the values
    applying  a value replaces the element, so a patch that arrives twice changes nothing the second time. A patch
              names the version of the policy that it changes and the version that results

A worker checks a whole patch before it changes anything. If it refuses the patch, its policy is unchanged.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from trl_fp8.sync.pieces import Piece

from .staging import Table


# The largest patch, as a share of the buffer. A worker decodes each position to 8 bytes, so that a patch of this size
# takes about as much memory as the whole buffer
MOST_SHARE = 0.25
LONGEST_GAP = 6  # bytes of an encoded gap, enough for 2**42 elements
COMPARED_BYTES = 2**24  # compared at a time: so much of the copy on the host is moved to the policy's device
AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # element size -> dtype for comparison


@dataclass(frozen=True)
class Changes:
    """New values of elements that all have one size in bytes."""

    positions: torch.Tensor  # int64 `[n]`, ascending; counted in elements from the start of the buffer or tensor
    values: torch.Tensor  # `[n]`, the elements' bits as integers of their size (`AS_INTEGERS`)


@dataclass(frozen=True)
class Patch:
    """An encoded patch."""

    body: bytes = field(repr=False)
    # For each size of an element: (this size in bytes, number of changed elements, bytes of their gaps)
    counts: list[tuple[int, int, int]]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.body).hexdigest()


def bring_up_to_date(sent: torch.Tensor, staged: torch.Tensor, table: Table) -> Patch | None:
    """Make `sent` (bytes, on the host) equal to `staged` (bytes, on any device). Return the patch that makes the same
    changes, or None if it would exceed `MOST_SHARE`. Synchronizes with the device.
    """
    # 1. Find the changes, and copy them to `sent`
    most_bytes = int(len(sent) * MOST_SHARE)
    changes_of_sizes: dict[int, list[Changes]] = {}
    least_bytes = 0  # the encoded changes take at least so many bytes
    for itemsize, start, end in _ranges(table):
        for first in range(start, end, COMPARED_BYTES):
            span = slice(first, min(first + COMPARED_BYTES, end))
            changes = _differences(staged[span], sent[span].to(staged.device), itemsize, first)
            least_bytes += len(changes.positions) * (1 + itemsize)  # a gap takes at least one byte
            if least_bytes > most_bytes:
                sent.copy_(staged)
                return None
            sent.view(AS_INTEGERS[itemsize])[changes.positions] = changes.values
            changes_of_sizes.setdefault(itemsize, []).append(changes)
    # 2. Encode them
    parts: list[bytes] = []
    counts: list[tuple[int, int, int]] = []
    for itemsize, changes_of_spans in changes_of_sizes.items():
        gaps = _encoded_gaps(torch.cat([changes.positions for changes in changes_of_spans]))
        values = torch.cat([changes.values for changes in changes_of_spans])
        parts += [gaps.numpy().tobytes(), values.numpy().tobytes()]
        counts.append((itemsize, len(values), len(gaps)))
    body = b"".join(parts)
    return Patch(body, counts) if len(body) <= most_bytes else None


def decoded(body: bytes, sha256: str, counts: Sequence[Sequence[int]], table: Table) -> dict[str, Changes]:
    """Return the changes in a patch by tensor name, with positions counted from the start of that tensor.

    Args:
        body: The patch's bytes.
        sha256: The checksum of `body` that the trainer sent.
        counts: As in `Patch`.
        table: Tensors of the buffer that the patch changes.

    Raises:
        ValueError: `body` does not have this checksum, or does not encode a patch of this buffer.
    """
    if hashlib.sha256(body).hexdigest() != sha256:
        raise ValueError("the patch does not have the checksum that the trainer sent: its bytes were changed.")
    if len({itemsize for itemsize, _, _ in counts}) != len(counts):
        raise ValueError("the patch has two lists of elements of one size.")
    changes_of_tensors = {}
    start = 0
    for itemsize, count, gap_bytes in counts:
        if itemsize not in AS_INTEGERS or min(count, gap_bytes) < 0:
            raise ValueError(f"the patch counts {count} elements of {itemsize} bytes in {gap_bytes}.")
        middle = start + gap_bytes  # where the gaps end and the values begin
        end = middle + count * itemsize
        if end > len(body):
            raise ValueError(f"the patch has {len(body)} bytes, and its lists go on to {end}.")
        if count:
            gaps = torch.empty(0, dtype=torch.uint8)
            if gap_bytes:  # `frombuffer` takes no empty buffer
                gaps = torch.frombuffer(bytearray(body[start:middle]), dtype=torch.uint8)
            positions = _positions(gaps, count)
            values = torch.frombuffer(bytearray(body[middle:end]), dtype=AS_INTEGERS[itemsize])
            changes_of_tensors |= _by_tensor(Changes(positions, values), itemsize, table)
        elif gap_bytes:
            raise ValueError(f"the patch has {gap_bytes} bytes of positions for no element.")
        start = end
    if start != len(body):
        raise ValueError(f"the patch has {len(body)} bytes, and its lists end at {start}.")
    return changes_of_tensors


def write(piece: Piece, tensor: torch.Tensor, changes: Changes, shape: Sequence[int]) -> None:
    """Apply `changes` of a sent tensor of `shape` to `tensor`, this rank's part of the sent tensor, in place."""
    values = changes.values.to(tensor.device)
    positions = changes.positions.to(tensor.device)
    elements = tensor.view(values.dtype)
    if covers(piece, shape) and tensor.is_contiguous():
        elements.view(-1)[positions] = values
        return
    # Expand the changes to the shape of the sent tensor, because `of_sent` cuts this rank's part out of such a tensor
    changed = torch.zeros(list(shape), dtype=torch.bool, device=tensor.device)
    whole = torch.zeros(list(shape), dtype=values.dtype, device=tensor.device)
    changed.view(-1)[positions] = True
    whole.view(-1)[positions] = values
    changed_here = piece.of_sent(changed).reshape(elements.shape)
    part = piece.of_sent(whole).reshape(elements.shape)
    elements.copy_(torch.where(changed_here, part, elements))


def padded_to_whole(piece: Piece, tensor: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Return `tensor`, this rank's part, padded with zeros to the whole `shape`, and the part's number of elements.

    The padded tensor has integers of the elements' size. The checksums of all ranks' padded tensors add up to the
    checksum of the whole tensor. On a rank that holds zeros instead of its part (`Piece.zero`) the number is 0.
    """
    elements = tensor.view(AS_INTEGERS[tensor.element_size()])
    if covers(piece, shape):
        return elements.reshape(shape), elements.numel()
    if piece.zero:
        return elements, 0
    whole = torch.zeros(list(shape), dtype=elements.dtype, device=tensor.device)
    piece.place(whole, elements)
    return whole, elements.numel()


def covers(piece: Piece, shape: Sequence[int]) -> bool:
    """Return whether this rank has the whole of a sent tensor of `shape`, in the layout in which it was sent."""
    sent = torch.empty(list(shape), device="meta")
    return piece.of_sent(sent) is sent  # `of_sent` returns its argument itself if it cuts and transposes nothing


def _ranges(table: Table) -> Iterator[tuple[int, int, int]]:
    """Yield (itemsize, start, end) of each run of tensors with equal element size, in bytes, end exclusive."""
    start_of_sizes: dict[int, int] = {}  # element size -> start of its run
    end = 0
    for dtype, shape, offset in table.values():
        itemsize = getattr(torch, dtype).itemsize
        start_of_sizes.setdefault(itemsize, offset)
        end = offset + torch.Size(shape).numel() * itemsize
    # A run ends where the next run starts. The end of the last run is rounded up to words of 8 bytes. Gaps between
    # tensors are zero in both buffers, so they never differ
    starts = list(start_of_sizes.values())
    ends = [*starts[1:], -(-end // 8) * 8]
    yield from zip(start_of_sizes, starts, ends, strict=True)


def _differences(new: torch.Tensor, old: torch.Tensor, itemsize: int, offset: int) -> Changes:
    """Return, on the host, the elements of `new` that differ from `old`.

    Both tensors are bytes of the same part of a buffer, which begins at byte `offset` of the buffer.
    """
    # Compare words of 8 bytes first, then the elements of changed words. Listing the changed positions (`nonzero`)
    # takes most of the time, and few words change
    new_words = new.view(torch.int64)
    old_words = old.view(torch.int64)
    words = (new_words != old_words).nonzero().view(-1)  # indices of the changed words
    new_elements = new_words[words].view(AS_INTEGERS[itemsize])  # the elements of the changed words
    old_elements = old_words[words].view(AS_INTEGERS[itemsize])
    changed = (new_elements != old_elements).nonzero().view(-1)  # indices in `new_elements`
    per_word = 8 // itemsize
    positions = words[changed // per_word] * per_word + changed % per_word + offset // itemsize
    return Changes(positions.cpu(), new_elements[changed].cpu())


def _encoded_gaps(positions: torch.Tensor) -> torch.Tensor:
    """Return the number of unchanged elements before each position, encoded as LEB128 (uint8 `[bytes]`)."""
    before_first = positions.new_full((1,), -1)
    gaps = positions.diff(prepend=before_first) - 1
    lengths = torch.ones_like(gaps)  # encoded bytes of each gap
    for count in range(1, LONGEST_GAP):
        lengths += (gaps >> (7 * count)) > 0
    starts = lengths.cumsum(0) - lengths  # index of the first byte of each gap
    encoded = torch.empty(int(lengths.sum()), dtype=torch.uint8)
    for place in range(LONGEST_GAP):  # the first byte of all gaps, then the second byte, ...
        has_byte = lengths > place
        bits = (gaps[has_byte] >> (7 * place)) & 0x7F
        has_next_byte = (lengths[has_byte] > place + 1).long()
        encoded[starts[has_byte] + place] = (bits | (has_next_byte << 7)).to(torch.uint8)
    return encoded


def _positions(encoded: torch.Tensor, count: int) -> torch.Tensor:
    """Decode positions (inverse of `_encoded_gaps`). Raise `ValueError` unless they are `count` in ascending order."""
    is_last = encoded < 0x80
    if int(is_last.sum()) != count or not is_last[-1]:
        raise ValueError(f"the patch has {int(is_last.sum())} positions, and {count} values.")
    gap = is_last.cumsum(0) - is_last.long()  # for each byte, the index of the gap that it belongs to
    last_bytes = is_last.nonzero().view(-1)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), last_bytes[:-1] + 1])  # index of the first byte of each gap
    place = torch.arange(len(encoded)) - starts[gap]  # index of each byte in its gap
    if int(place.max()) >= LONGEST_GAP:
        raise ValueError(f"a position of the patch takes more than {LONGEST_GAP} bytes.")
    bits = (encoded & 0x7F).long() << (7 * place)
    gaps = torch.zeros(count, dtype=torch.int64)
    gaps.index_add_(0, gap, bits)
    positions = (gaps + 1).cumsum(0) - 1
    if bool((positions < 0).any()):  # a gap has fewer than 63 bits: a sum that exceeds int64 is negative at first
        raise ValueError("the positions of the patch exceed 64 bits.")
    return positions


def _by_tensor(changes: Changes, itemsize: int, table: Table) -> dict[str, Changes]:
    """Return the changes of each changed tensor. `ValueError` if a position is in no tensor of this element size."""
    changes_of_tensors = {}
    count = 0  # positions that are in a tensor
    for name, (dtype, shape, offset) in table.items():
        if getattr(torch, dtype).itemsize != itemsize:
            continue
        if offset % itemsize:
            raise ValueError(f"{name} begins at byte {offset}, inside of an element.")
        start = offset // itemsize  # the tensor's elements are `start .. end - 1` of the buffer
        end = start + torch.Size(shape).numel()
        first, behind = torch.searchsorted(changes.positions, torch.tensor([start, end])).tolist()
        if behind > first:
            changes_of_tensors[name] = Changes(changes.positions[first:behind] - start, changes.values[first:behind])
        count += behind - first
    if count != len(changes.positions):
        raise ValueError(f"{len(changes.positions) - count} positions of the patch are in no tensor.")
    return changes_of_tensors
