"""meter: counts the resources that one run of a chat template uses, and raises when they exceed its caps."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from jinja2 import TemplateRuntimeError

from kvcellar.pace import Pace


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits for rendering one conversation. Characters are Unicode code points."""

    messages: int = 10_000
    message_chars: int = 2**23  # all strings of the messages together
    depth: int = 32  # of lists and objects within a message
    marks: int = 100_000  # matches of control tokens in the messages' text
    seconds: float = 2.0  # CPU time of the rendering thread: other load on the machine does not count
    output_chars: int = 2**24
    value_chars: int = 2**25
    work_chars: int = 2**28


LEAST_MESSAGE_CHARS = 2**20
SPARE = 4  # messages may have so many times the text that fits the context: templates omit some of it (reasoning)


def caps_for(characters: int | None, context: int) -> Caps:
    """Caps on a conversation, by how much text fits the context, whose tokens have at most so many characters."""
    caps = Caps()
    if characters is None:
        return caps
    return replace(caps, message_chars=min(caps.message_chars, max(LEAST_MESSAGE_CHARS, SPARE * context * characters)))


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
        """Raise if a value of this size may not be created."""
        if size > self._caps.value_chars:
            raise OverCaps(f"asked for a value of {size} characters; {self._caps.value_chars} are allowed")

    def made(self, value: Made) -> Made:
        """Count a new value and return it. Raises if it is too large, or all values together are."""
        inside = value if isinstance(value, str) else container(value)
        self._spent += 1 if inside is None else len(inside)
        if self._spent > self._caps.work_chars:
            raise OverCaps(f"made more than {self._caps.work_chars} characters on the way")
        self.admit(self.weight(value))
        return value

    def weight(self, value: object) -> int:
        """Characters and items of `value` at every depth; repeated items count again. Visits each container once."""
        if isinstance(value, str):
            return 1 + len(value)
        if (inside := container(value)) is None:
            return 1
        if (known := self._weights.get(id(inside))) is not None:
            return known[1]
        total = 1
        for item in items_of(inside):
            total += self.weight(item)
            if total > self._caps.value_chars:
                break
        self._weights[id(inside)] = (inside, total)
        return total

    def check(self) -> None:
        """Assert the invariants that hold between two operations."""
        assert self._spent <= self._caps.work_chars
        for inside, weight in list(self._weights.values()):
            assert weight <= self._caps.value_chars
            assert weight == 1 + sum(map(self.weight, items_of(cast("Container", inside))))

    def added(self, left: object, right: object, both: object) -> object:
        """Count `both`, which is left + right, by their weights: a list that grows in a loop is not visited again."""
        if container(both) is not None:
            self._weights[id(both)] = (both, self.weight(left) + self.weight(right) - 1)
            self._weights.pop(id(left), None)
        return self.made(both)


def container(value: object) -> Container | None:
    """`value` if it is a container, else None."""
    return cast("Container", value) if isinstance(value, list | tuple | dict) else None


def items_of(value: Container) -> Iterable[object]:
    return (part for pair in value.items() for part in pair) if isinstance(value, dict) else value
