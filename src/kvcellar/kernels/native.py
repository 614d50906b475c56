"""native: how a compiled function of ours is called with arguments that stay in place.

Every kernel that a recorded step may call has one form, `int function(const void* call)`, which returns 0, or 1 if
there is not enough memory. `call` is a structure of the kernel's own, filled in once: it has the addresses of tensors
and of the step's tables, whose content changes from step to step. So a recorded step knows nothing of its kernels.
"""

import ctypes
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Native:
    """A call: the address of a compiled function, its structure, and what must live as long as the call may be made."""

    function: int
    call: ctypes.Structure
    alive: tuple[Any, ...] = ()

    @property
    def address(self) -> int:
        """Where the structure is."""
        return ctypes.addressof(self.call)


def address_of(function: Any) -> int:
    """The address of a function of a compiled library."""
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found
