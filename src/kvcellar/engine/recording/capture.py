"""capture: the forward of a flat guest as a program that holds for every number of rows.

The network's own code runs once, over fake tensors, with a door that writes down what it stores and reads. Where that
fails, the innermost module that was running is the cause: its class becomes one operator, and the network is traced
again.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.numbers import int_oo
from transformers.pytorch_utils import Conv1D

from kvcellar.engine.models.adapters.adapters import linear_layers
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.mixers import Forward
from kvcellar.engine.recording.doors import (
    DecodingDoor,
    Opaque,
    RecordingDoor,
    layer_operator,
    replaced,
)
from kvcellar.engine.recording.passes import simplified
from kvcellar.engine.recording.program import Program
from kvcellar.engine.recording.recording import Captured, NotRecordable, reason_of
from kvcellar.engine.recording.trace import Sizes, Trace
from kvcellar.errors import KvcellarError
from kvcellar.kernels.layers import OwnExperts, OwnHeads, OwnLinear
from kvcellar.kernels.packed import LINEARS

log = logging.getLogger("kvcellar.engine.models")

ROWS, WANTED, CELLS = 11, 5, (23, 29, 31, 37, 41, 43, 47, 53)  # sizes while tracing: all different, and none a weight's
LEAST = 2  # torch takes 0 and 1 for other cases; the test at load has steps with such sizes
BRANCHES = "its code depends on how many rows there are"
MOST_TRIES = 12
FAILURES = (  # what the code of a model may raise on fake tensors
    KvcellarError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError,
    NotImplementedError,
)  # fmt: skip


def capture(guest: Guest, *, mixers: bool = True) -> Captured:
    """Trace the forward of a guest, in prompts with the code of mixers that convolve and scan by kernels, unless
    `mixers` is False. Raises `NotRecordable`, with the reason."""
    if guest.mode != "flat":
        raise NotRecordable(f"it runs one sequence per forward: {guest.refused}")
    opaque: dict[type[nn.Module], str] = {}
    program, decoding = _prompts(guest, opaque, mixers), None
    if guest.shape.mixers:
        inside = dict(opaque)
        try:
            decoding = _program(guest, inside, decoding=True)
            opaque = inside
        except NotRecordable as error:
            opaque |= {type(module): f"as it decodes: {error}" for module in guest.shape.mixers}
    return Captured(program, {kind.__name__: why for kind, why in opaque.items()}, decoding)


def _prompts(guest: Guest, opaque: dict[type[nn.Module], str], mixers: bool) -> Program:
    """The program of any forward, with the code of mixers that convolve and scan by kernels, where that works."""
    # They call linear layers with other numbers of rows than programs do, on which the sums of those of torch depend.
    own = all(isinstance(one, OwnLinear) for mixer in guest.shape.mixers for one in linear_layers(mixer).values())
    if mixers and guest.shape.mixers and own:
        inside = dict(opaque)
        try:
            program = _program(guest, inside, decoding=False, mixers=True)
            opaque |= inside
            return program
        except NotRecordable as error:
            log.info("mixers are called in programs: %s", error)
    return _program(guest, opaque, decoding=False)


def _program(guest: Guest, opaque: dict[type[nn.Module], str], *, decoding: bool, mixers: bool = False) -> Program:
    """The program of a forward, or of one in which each sequence has one new token. Adds to `opaque` the classes of
    modules that are one operator, each with the reason."""
    for _ in range(MOST_TRIES):
        try:
            with _without_records_of_torch(), _unchanged(guest.model):
                return simplified(_Capture(guest, frozenset(opaque), decoding, mixers or decoding).program())
        except FAILURES as error:
            why = reason_of(error)
            module = _running(guest, error.__traceback__)
            if module is None or type(module) in opaque:
                raise NotRecordable(why) from error
            opaque[type(module)] = why
    raise NotRecordable(f"too many of its modules cannot be traced: {', '.join(kind.__name__ for kind in opaque)}")


@contextmanager
def _without_records_of_torch() -> Iterator[None]:
    """Within the block and on this thread, torch does not log operators that refuse fake tensors, nor each size."""
    this_thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != this_thread

    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch.__trace")]
    for logger in loggers:
        logger.addFilter(passes)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(passes)


@contextmanager
def _unchanged(network: nn.Module) -> Iterator[None]:
    """After the block, modules have the attributes from before it, and buffers their content. Code that computes
    frequencies of positions, say, keeps them in its module; while it is traced, these are fake tensors."""
    held = [(module, dict(vars(module)), dict(module._buffers)) for module in network.modules()]
    contents = [(buffer, buffer.clone()) for buffer in network.buffers()]
    try:
        yield
    finally:
        for module, attributes, buffers in held:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.inference_mode():  # some buffers were made in it
            for buffer, content in contents:
                buffer.copy_(content)


def _running(guest: Guest, traceback: TracebackType | None) -> nn.Module | None:
    """The innermost module whose code raised, if it can be one operator: one without attention, and not the whole."""
    stateful = {*guest.shape.bindings, *guest.shape.mixers}
    ours = set(guest.model.modules())
    found: nn.Module | None = None
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in ours:
            found = module
        traceback = traceback.tb_next
    return None if found is None or stateful & set(found.modules()) else found


class _Conditions(ShapeEnv):
    """Raises where code of the network compares a size that depends on symbols with another: what it does then holds
    for some numbers of rows only. Torch would go on, and write the comparison down as a guard of what was traced."""

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        result = super().evaluate_expr(*args, **kwargs)
        self.check_none()
        return result

    def check_none(self) -> None:
        if self.guards:
            raise NotRecordable(BRANCHES)


class _Capture:
    """One attempt."""

    def __init__(self, guest: Guest, opaque: frozenset[type[nn.Module]], decoding: bool, mixers: bool) -> None:
        self._guest, self._opaque, self._decoding, self._mixers = guest, opaque, decoding, mixers
        self._env = _Conditions(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self._env)
        self._groups = _expanded_groups(guest)
        numbers = {"T": ROWS, "W": WANTED, **dict(zip(self._groups, CELLS, strict=False))}
        if len(self._groups) > len(CELLS):
            raise NotRecordable(f"it computes keys from the cells of {len(self._groups)} groups of layers")
        rows = {name: self._row(name, number) for name, number in numbers.items()}
        self._symbols: dict[str, Any] = {name: row.shape[0] for name, row in rows.items()}
        self._values = numbers
        self._ids, self._wanted = rows["T"], rows["W"]
        self._sizes = Sizes({size.node.expr: name for name, size in self._symbols.items()})

    def _row(self, name: str, number: int) -> Tensor:
        row = torch.arange(number, device=self._guest.device)
        return self._fakes.from_tensor(row, static_shapes=False, source=ConstantSource(name))

    def program(self) -> Program:
        guest = self._guest
        trace = Trace(self._sizes, _tensor_paths(guest.model), self._check_free)
        read: list[Tensor] = []  # what the output head reads
        with torch.no_grad(), self._fakes:
            positions = torch.empty_like(self._ids)
            with trace, replaced(self._forwards(trace, read)):
                door = self._door(trace, positions)
                logits = guest.run(door, self._ids, positions, self._wanted)
            self._check_free()
            outputs = {"logits": trace.value(logits)}
            if (hidden := self._hidden(trace, read)) is not None:
                outputs["hidden"] = hidden
            inputs = {"ids": self._ids, "positions": positions, "wanted": self._wanted}
            return trace.program(list(self._symbols), inputs, outputs)

    def _door(self, trace: Trace, positions: Tensor) -> RecordingDoor:
        shape, past, cells = self._guest.shape, self._guest.past_length(positions), self._cells()
        return (DecodingDoor if self._decoding else RecordingDoor)(trace, shape, past, cells, self._ids)

    def _hidden(self, trace: Trace, read: Sequence[Tensor]) -> int | None:
        """The value [T,hidden] of which the output head reads the wanted rows, or all; None if it reads others."""
        if len(read) != 1 or read[0].dim() != 3:
            return None
        if str(read[0].shape[1]) == str(self._ids.shape[0]):
            return trace.value(read[0][0])
        return trace.selected_from(read[0], self._wanted)

    def _cells(self) -> dict[int, Any]:
        return {layer: self._symbols[name] for name, layers in self._groups.items() for layer in layers}

    def _forwards(self, trace: Trace, read: list[Tensor]) -> dict[nn.Module, Forward]:
        """Those of modules that are one operator. The output head adds its inputs to `read`."""
        model, made = self._guest.model, dict[nn.Module, Forward]()
        opaque = Opaque(trace, self._guest.shape, self._sizes, self._symbols, self._values)
        mixers = set[nn.Module]() if self._mixers else set(self._guest.shape.mixers)
        head = model.get_output_embeddings()
        for path, module in model.named_modules():
            if module in mixers:
                made[module] = opaque.operator("kvcellar.mix", path, module)
            elif type(module) in self._opaque:
                made[module] = opaque.operator("kvcellar.module", path, module)
            elif type(module) in (nn.Linear, Conv1D) or isinstance(module, (*LINEARS, OwnExperts, OwnHeads)):
                made[module] = layer_operator(trace, path, module)
        if isinstance(head, nn.Module):
            made[head] = _noted(made.get(head, head.forward), read)
        return made

    def _check_free(self) -> None:
        """Raise if code of the network made a symbol a number, or holds for some of its numbers only."""
        self._env.check_none()
        for name, size in self._symbols.items():
            symbol = size.node.expr
            if not symbol.is_Symbol:
                raise NotRecordable(f"its code depends on the value of {name}")
            bounds = self._env.var_to_range[symbol]
            if bounds.lower > LEAST or bounds.upper != int_oo:
                raise NotRecordable(BRANCHES)


def _noted(forward: Forward, read: list[Tensor]) -> Forward:
    """The same forward; the tensors that it reads are appended to `read`."""

    def noted(x: Tensor) -> Tensor:
        read.append(x)
        return forward(x)

    return noted


def _expanded_groups(guest: Guest) -> dict[str, frozenset[int]]:
    """By symbol, the layers of a group whose stored planes are read as a whole."""
    read = {binding.layer for binding in guest.shape.bindings.values() if binding.expands}
    groups = (read & set(group.layers) for group in guest.shape.groups)
    return {f"N{number}": frozenset(layers) for number, layers in enumerate(filter(None, groups))}


def _tensor_paths(network: nn.Module) -> dict[int, str]:
    """Paths of parameters, buffers and other tensors of modules, by identity."""
    found: dict[int, str] = {}
    for path, module in network.named_modules():
        for name, value in (vars(module) | module._parameters | module._buffers).items():
            if isinstance(value, Tensor):
                found.setdefault(id(value), f"{path}.{name}" if path else name)
    return found
