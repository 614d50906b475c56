"""meter: counts the resources that one run of a chat template uses, and raises when they exceed its caps."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from jinja2 import TemplateRuntimeError

from kvcellar.pace import Pace


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits for rendering one conversation. Characters are Unicode code points, bytes those of Python's values."""

    messages: int = 10_000
    message_chars: int = 2**23  # all strings of the messages together
    depth: int = 32  # of lists and objects within a message
    marks: int = 100_000  # matches of control tokens in the messages' text
    seconds: float = 2.0  # CPU time of the rendering thread: other load on the machine does not count
    output_chars: int = 2**24
    value_bytes: int = 2**26
    work_bytes: int = 2**28  # of all values together


LEAST_MESSAGE_CHARS = 2**20
SPARE = 4  # messages may have so many times the text that fits the context: templates omit some of it (reasoning)


def caps_for(characters: int | None, context: int) -> Caps:
    """Caps on a conversation, by how much text fits the context, whose tokens have at most so many characters."""
    caps = Caps()
    if characters is None:
        return caps
    return replace(caps, message_chars=min(caps.message_chars, max(LEAST_MESSAGE_CHARS, SPARE * context * characters)))


ITEM = 64  # bytes of a value, without its characters or items, and of the reference to it
PER_BIT = 2**10  # weight of a bit of a large integer: limits them to 2**16 bits, since larger ones are slow in Python
_SMALL = 2**14  # bits; JSON has integers of 4300 digits


class OverCaps(TemplateRuntimeError):
    """The template exceeded its caps."""


Made = TypeVar("Made")
Container = list[object] | tuple[object, ...] | dict[object, object]


class Meter:
    """The resources that one run of a template has used."""

    def __init__(self, caps: Caps) -> None:
        self._caps = caps
        self._pace = Pace()
        self._end = time.thread_time() + caps.seconds  # a template is rendered by one thread, from start to end
        self._spent = 0
        self._weights: dict[int, tuple[object, int]] = {}  # id -> (container, weight); the reference keeps the id valid

    def tick(self) -> None:
        """Raise if the CPU time is used up; pause if `Pace` requires it."""
        if time.thread_time() > self._end:
            raise OverCaps(f"ran for more than {self._caps.seconds:g} seconds of CPU time")
        self._pace.pause()

    def admit(self, size: int) -> None:
        """Raise if a value of so many bytes may not be created."""
        if size > self._caps.value_bytes:
            raise OverCaps(f"asked for a value of {size} bytes; {self._caps.value_bytes} are allowed")

    def made(self, value: Made, *, items: bool = False) -> Made:
        """Count a new value and return it. Raises if it is too large, or all values together are. With `items`, those
        of a container are new, too."""
        inside = container(value)
        if inside is None:
            self._spend(self.weight(value))
        else:
            self._spend(self.weight(value) if items else ITEM * (1 + len(inside)))
        self.admit(self.weight(value))
        return value

    def iterated(self, values: Iterator[object]) -> Iterator[object]:
        """`values`, each counted when it is made. Raises for more than a list may have."""
        for number, value in enumerate(values, 1):
            self.tick()
            self.admit(number * ITEM)
            self._spend(ITEM)
            yield value

    def _spend(self, size: int) -> None:
        self._spent += size
        if self._spent > self._caps.work_bytes:
            raise OverCaps(f"made more than {self._caps.work_bytes} bytes on the way")

    def weight(self, value: object) -> int:
        """An upper bound of the bytes of `value` at every depth; repeated items count again. Visits each container
        once."""
        if isinstance(value, str):
            return ITEM + text_bytes(len(value), value)
        if isinstance(value, int):
            return ITEM if value.bit_length() < _SMALL else value.bit_length() * PER_BIT
        if (inside := container(value)) is None:
            return ITEM
        if (known := self._weights.get(id(inside))) is not None:
            return known[1]
        total = ITEM
        for item in items_of(inside):
            total += self.weight(item)
            if total > self._caps.value_bytes:
                break
        self._weights[id(inside)] = (inside, total)
        return total

    def check(self) -> None:
        """Assert the invariants that hold between two operations."""
        assert self._spent <= self._caps.work_bytes
        for inside, weight in list(self._weights.values()):
            assert weight <= self._caps.value_bytes
            assert weight == ITEM + sum(map(self.weight, items_of(cast("Container", inside))))

    def added(self, left: object, right: object, both: object) -> object:
        """Count `both`, which is left + right, by their weights: a list that grows in a loop is not visited again."""
        if container(both) is not None:
            self._weights[id(both)] = (both, self.weight(left) + self.weight(right) - ITEM)
            self._weights.pop(id(left), None)
        return self.made(both)


def text_bytes(length: int, *parts: object) -> int:
    """An upper bound of the bytes of so many characters that come from `parts`."""
    return length if all(part.isascii() for part in parts if isinstance(part, str)) else 4 * length


def container(value: object) -> Container | None:
    """`value` if it is a container, else None."""
    return cast("Container", value) if isinstance(value, list | tuple | dict) else None


def items_of(value: Container) -> Iterable[object]:
    return (part for pair in value.items() for part in pair) if isinstance(value, dict) else value
