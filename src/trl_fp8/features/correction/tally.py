"""Named sums, minima and maxima of a batch in one small device tensor.

A metric averaged per rank and then over ranks is wrong as soon as ranks hold different numbers of tokens, and a
`.item()` per metric costs a synchronization each. With a `Tally`, every rank contributes raw sums and extremes, they
are merged exactly, and only the merged vector travels to the host, once.

    tally = mismatch_tally(...) | corrected.report      # still on the device
    sums = tally.gathered(accelerator.gather).read()    # one collective, one synchronization -> dict[str, float]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch


Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Tally:
    """A float64 vector [sums | minima | maxima] and the names of its entries."""

    names: tuple[tuple[str, ...], ...]  # of sums, minima and maxima
    values: torch.Tensor

    @classmethod
    def of(cls, sums: Named, minima: Named | None = None, maxima: Named | None = None) -> Tally:
        """Build a tally from 0-d tensors of any dtype."""
        groups = (sums, minima or {}, maxima or {})
        values = torch.stack([value.double() for group in groups for value in group.values()])
        return cls(tuple(tuple(group) for group in groups), values)

    def _parts(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return values.split([len(group) for group in self.names], dim=-1)

    def __or__(self, other: Tally) -> Tally:
        """Both tallies of the same tokens side by side; names must not repeat."""
        repeated = set(chain(*self.names)) & set(chain(*other.names))
        assert not repeated, f"both tallies hold {sorted(repeated)}"
        names = tuple(ours + theirs for ours, theirs in zip(self.names, other.names, strict=True))
        pairs = zip(self._parts(self.values), other._parts(other.values), strict=True)
        return Tally(names, torch.cat([part for pair in pairs for part in pair]))

    def gathered(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> Tally:
        """Merge over ranks with one collective, `gather`, which concatenates or stacks a 1-D tensor over ranks."""
        sums, minima, maxima = self._parts(gather(self.values).reshape(-1, self.values.numel()))
        return Tally(self.names, torch.cat([sums.sum(dim=0), minima.amin(dim=0), maxima.amax(dim=0)]))

    def read(self) -> dict[str, float]:
        """The entries by name. This is the one place that waits for the device."""
        return dict(zip(chain(*self.names), self.values.tolist(), strict=True))


def lowest_of(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Minimum of the `values` inside the mask `where`, on the device; inf if there is none."""
    # the appended inf keeps an empty batch from being an empty reduction
    return torch.nn.functional.pad(torch.where(where, values, torch.inf).flatten(), (0, 1), value=torch.inf).amin()


def highest_of(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Maximum of the `values` inside the mask `where`, on the device; -inf if there is none."""
    return -lowest_of(-values, where)
