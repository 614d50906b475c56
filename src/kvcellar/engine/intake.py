"""intake: what a caller passes, as values that the engine's thread can trust. No torch.

Always true of what is returned: plain ints, floats and strings in range, in tuples of its own. A later change of an
argument, or code of its type (an int with an `__eq__` of its own), never reaches the engine's thread. `deliver` is the
one thing of the caller's that does, and what it raises is caught there.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any

from kvcellar.errors import BadRequest, PromptTooLong, shown
from kvcellar.events import Event
from kvcellar.sample.params import SamplingParams
from kvcellar.spans import whole

FIELDS = frozenset(field.name for field in fields(SamplingParams))


def parameters(params: Any) -> SamplingParams:
    """A copy that was checked just now: a frozen record can be changed, too (`object.__setattr__`)."""
    if not isinstance(params, SamplingParams):
        raise BadRequest(f"params is SamplingParams(...), not {shown(params)}", "params")
    return SamplingParams(**{name: getattr(params, name) for name in FIELDS})


def receiver(deliver: Callable[[Event], None]) -> Callable[[Event], None]:
    if not callable(deliver):
        raise BadRequest(f"deliver is called with every event, and {shown(deliver)} cannot be", "deliver")
    return deliver


def session_number(session: Any) -> int | None:
    if session is None:
        return None
    if isinstance(session, bool):
        raise BadRequest(f"a session is named by its number, not by {session}", "session")
    return whole(session, "a session", "session")


def token(value: Any, vocab_size: int, param: str) -> int:
    """A token id; anything that Python can use as an index may be one, numpy's integers too."""
    number = _index(value)
    if not 0 <= number < vocab_size:
        ids = f"whose ids are 0 to {vocab_size - 1}"
        raise BadRequest(f"{param}: {shown(value)} is not a token id of this model, {ids}", param)
    return number


def tokens(ids: Any, vocab_size: int, param: str) -> tuple[int, ...]:
    """Token ids: plain ones in a few passes in C, as they may be many."""
    found = tuple(items(ids, "a list of token ids is needed", param))
    if set(map(type, found)) == {int} and min(found) >= 0 and max(found) < vocab_size:
        return found
    return tuple(token(one, vocab_size, param) for one in found)


def prompt_ids(prompt: Any, *, vocab_size: int, context: int) -> tuple[int, ...]:
    """A prompt of at least one token and no more than the context has: a longer one is not even copied."""
    length = len(_sequence(prompt, "a prompt is text or a list of token ids", "prompt"))
    if not length:
        raise BadRequest("the prompt is empty; at least one token is needed", "prompt")
    if length > context:
        raise PromptTooLong(length, context, "the model's context")
    ids = tokens(prompt, vocab_size, "prompt")
    if len(ids) != length:
        raise BadRequest(f"the prompt has a length of {length}, and {len(ids)} tokens", "prompt")
    return ids


def items(values: Any, what: str, param: str) -> list[Any]:
    """What a sequence other than a text or bytes has, as many as it says."""
    values = _sequence(values, what, param)
    return list(islice(values, len(values)))


def _sequence(values: Any, what: str, param: str) -> Sequence[Any]:
    import numpy as np  # not before there are values: the command's help is shown without it

    if isinstance(values, np.ndarray) and values.ndim == 1:
        return values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray | memoryview):
        raise BadRequest(f"{what}, not {shown(values)}", param)
    return values


def places(checkpoint_positions: Any, end: int) -> tuple[int, ...]:
    """Borders as positions of a prompt that ends at `end`, in order, each once."""
    found = [
        _index(border)
        for border in items(
            checkpoint_positions, "checkpoint_positions are a list of positions", "checkpoint_positions"
        )
    ]
    if found != sorted(found) or any(not 0 <= place <= end for place in found):
        raise BadRequest(
            f"checkpoint_positions are positions 0 to {end}, in order, not {shown(checkpoint_positions)}",
            "checkpoint_positions",
        )
    return tuple(dict.fromkeys(found))


def _index(value: Any) -> int:
    """A whole number as a plain int; -1 for what is none, a bool for one."""
    if isinstance(value, bool):
        return -1
    try:
        return whole(value, "it")
    except BadRequest:
        return -1
