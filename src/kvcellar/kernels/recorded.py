"""recorded: a recorded forward, bound to memory for the sizes that steps have, and run by a compiled loop.

A binding holds for one number of rows and one of wanted rows. Those used last are kept, `KEPT` of them, since decoding
comes back to few numbers, and chunks of prompts have one usual length; binding takes milliseconds, and costs a step
that is rare less than padding would. All share one arena, as large as the largest of them needs; when it has to grow,
earlier bindings are freed with it.

Always true (`check`):
  * there are at most `kept` bindings, all in the one arena;
  * no caller has a tensor of an arena: inputs are copied in, outputs are copied out.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor

from kvcellar.kernels.program import Sizes
from kvcellar.kernels.recorded_binding import Binder, Binding
from kvcellar.kernels.recorded_calls import Handler
from kvcellar.kernels.recorded_kernel import StepKernel
from kvcellar.kernels.recorded_memory import ALIGNED
from kvcellar.kernels.recorded_outline import Outline

FIXED = ("T", "W")  # symbols that a binding has numbers for
KEPT = 96  # bindings


class Recorded:
    """A program of a network, ready to run. One run at a time."""

    def __init__(
        self,
        outline: Outline,
        handlers: Mapping[str, Handler],
        kernel: StepKernel,
        kept: int = KEPT,
    ) -> None:
        """`outline`: of the program, for the symbols `FIXED`. Its constants must stay where they are."""
        self._outline, self._handlers, self._kernel, self._kept = outline, handlers, kernel, kept
        self._bindings: OrderedDict[tuple[int, ...], Binding] = OrderedDict()
        self._arena = torch.empty(0, dtype=torch.uint8, device="cpu")

    def run(self, sizes: Sizes, inputs: Mapping[str, Tensor], variant: int = 0) -> dict[str, Tensor]:
        """The outputs of a step. `sizes` has a number for each symbol; bindings of another `variant` are others, where
        handlers bind otherwise. Raises what an operator raises."""
        with torch.inference_mode():
            binding = self._binding(sizes, variant)
            for name, tensor in inputs.items():
                binding.inputs[name].copy_(tensor)
            binding.run(sizes)
            return {name: tensor.clone() for name, tensor in binding.outputs.items()}

    def clear(self) -> None:
        """Free all bindings: after a change of what handlers bind to, cells that moved, say."""
        self._bindings.clear()
        self._arena = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def bytes(self) -> int:
        """Memory of all kept bindings, without constants that are computed for each."""
        return self._arena.nbytes + sum(binding.bytes for binding in self._bindings.values())

    def check(self) -> None:
        """Assert what is always true."""
        assert len(self._bindings) <= self._kept
        arena = self._arena.untyped_storage().data_ptr()
        for binding in self._bindings.values():
            assert binding.arena is self._arena
            assert all(one.untyped_storage().data_ptr() == arena for one in binding.inputs.values())

    def _binding(self, sizes: Sizes, variant: int) -> Binding:
        key = variant, *(sizes[name] for name in FIXED if name in sizes)
        found = self._bindings.get(key)
        if found is None:
            began = time.thread_time()
            fixed = {name: size for name, size in sizes.items() if name in FIXED}
            found = Binder(self._outline, fixed, self._kernel, self._handlers, self._place).bound()
            while len(self._bindings) >= self._kept:
                self._bindings.popitem(last=False)
            self._bindings[key] = found
            self._kernel.seconds += time.thread_time() - began
        self._bindings.move_to_end(key)
        return found

    def _place(self, size: int) -> Tensor:
        """The arena, at least so large. To grow, it is freed before, with all bindings."""
        if self._arena.nbytes < size:
            self.clear()
            whole = torch.empty(size + ALIGNED, dtype=torch.uint8, device="cpu")
            start = -whole.data_ptr() % ALIGNED
            self._arena = whole[start : start + size]
        return self._arena
