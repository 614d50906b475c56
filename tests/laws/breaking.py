"""Faults in the middle of an operation: the n-th allocation or tensor operation fails.

Counted are the operations of torch, and the calls in which the bookkeeping takes something: cells, tables, what a
backend prepares.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.cells import Cells
from kvcellar.memory.cells.tables import Table, Tables

TAKING = ((Cells, "take"), (Cells, "take_exact"), (Table, "share"), (Tables, "new"), (Sdpa, "prepare"))
ERRORS: tuple[type[BaseException], ...] = (torch.OutOfMemoryError, MemoryError, KeyboardInterrupt)


class Fault(TorchDispatchMode):
    """Raises `error` once, at operation number `at` while it is armed; `late`: after torch has executed it.

    Later operations, which restore the state, succeed.
    """

    def __init__(self, at: int, error: type[BaseException] = MemoryError, *, late: bool = False) -> None:
        super().__init__()
        self.left, self.late = at, late
        self.error = error(f"there is nothing left at {at}")
        self.fired = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.late:
            self._ask()
        made = func(*args, **(kwargs or {}))
        if self.late:
            self._ask()
        return made

    @contextmanager
    def armed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name in TAKING:
                stack.enter_context(mock.patch.object(owner, name, self._counting(getattr(owner, name))))
            stack.enter_context(self)
            yield

    def _counting(self, really: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            self._ask()
            return really(*args, **named)

        return counted

    def _ask(self) -> None:
        if self.fired:
            return
        if self.left == 0:
            self.fired = True
            raise self.error
        self.left -= 1


def try_with(fault: Fault, act: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether `act` succeeded before the fault, and its result."""
    try:
        with fault.armed():
            return True, act()
    except BaseException as error:
        if error is not fault.error:
            raise
    return False, None
