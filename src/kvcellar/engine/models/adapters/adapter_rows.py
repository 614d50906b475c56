"""adapter_rows: which rows of a step have which adapter.

A layer gets the rows of a step in one of three forms: all of them in order, those of some sequences that a mixer runs
together, or those whose logits are wanted.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from kvcellar.engine.models.mixers import StateView
from kvcellar.errors import ModelRefused
from kvcellar.memory.plan import Plan

Rows = slice | Tensor  # rows of a layer's inputs
Part = tuple[int, Rows]  # the number of an adapter, and its rows
EVERY = slice(None)


class AdapterRows:
    """Of one step."""

    def __init__(
        self,
        plan: Plan,
        view: Callable[[], StateView | None],
        device: torch.device,
        wanted: Sequence[int] | None,
    ) -> None:
        """`view` returns that of the mixer that is running, if one is; `wanted` are the rows that the output head
        reads, in order; None: all."""
        self._adapters = {feed.seq: feed.adapter for feed in plan.feeds}
        self._feeds = [(feed.adapter, len(feed.pos)) for feed in plan.feeds]
        self._view, self._device, self._wanted = view, device, wanted
        numbers = set(self._adapters.values())
        self._all: list[Part] | None = [(numbers.pop(), EVERY)] if len(numbers) == 1 else None
        self._known: dict[object, tuple[int, list[Part]]] = {}  # by what a layer's inputs are

    def parts(self, rows: int, *, head: bool = False) -> Sequence[Part]:
        """The rows of each adapter in a layer's inputs, which are so many rows. `head`: it is the output head. Raises
        `ModelRefused` if these are other rows than those of the step."""
        if self._all is not None:
            return self._all
        head = head and self._wanted is not None
        count, parts = self._of(None if head else self._view(), head=head)
        if rows != count:
            raise ModelRefused(f"it reads {rows} rows in a step of {count}, and which sequences these are is unknown")
        return parts

    def _of(self, view: StateView | None, *, head: bool) -> tuple[int, list[Part]]:
        """Of the inputs of the output head, or of a layer of the mixer with this view."""
        key = head, view and (tuple(segment.seq for segment in view.segments), view.length)
        if key not in self._known:
            self._known[key] = self._divided(self._runs(view, head=head))
        return self._known[key]

    def _runs(self, view: StateView | None, *, head: bool) -> Iterable[tuple[int, int]]:
        if head:
            each = [adapter for adapter, length in self._feeds for _ in range(length)]
            return ((each[row], 1) for row in self._wanted or ())
        return self._feeds if view is None else ((self._adapters[one.seq], view.length) for one in view.segments)

    def _divided(self, runs: Iterable[tuple[int, int]]) -> tuple[int, list[Part]]:
        """The number of rows in runs of one adapter each, and the rows of each adapter."""
        found: dict[int, list[int]] = {}
        row = 0
        for adapter, length in runs:
            if adapter:
                found.setdefault(adapter, []).extend(range(row, row + length))
            row += length
        return row, [(adapter, self._rows(rows)) for adapter, rows in found.items()]

    def _rows(self, rows: list[int]) -> Rows:
        if rows[-1] - rows[0] == len(rows) - 1:
            return slice(rows[0], rows[-1] + 1)
        return torch.tensor(rows, device=self._device)
