"""Small tensors that are alike are looked at together: on CPU a call of an operation costs more than its work."""

from collections.abc import Callable, Hashable, Sequence

import torch


def in_batches(
    kinds: Sequence[Hashable], together: Callable[[int], int], look: Callable[[list[int]], torch.Tensor]
) -> torch.Tensor:
    """Return `look` of each of n things, `[n, ...]`, in their order.

    Args:
        kinds: Of each thing; those of one kind can be looked at together.
        together: How many, at most, of the kind of thing number i.
        look: Gets the numbers of some things of one kind, and returns a row for each.
    """
    alike: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(number)
    order, found = [], []
    for members in alike.values():
        count = max(1, together(members[0]))
        for start in range(0, len(members), count):
            batch = members[start : start + count]
            order += batch
            found.append(look(batch))
    return torch.cat(found)[places(order)] if found else torch.zeros(0, dtype=torch.int64)


def places(order: Sequence[int]) -> list[int]:
    """Return the inverse permutation: the place of each number in `order`."""
    return sorted(range(len(order)), key=order.__getitem__)
