"""arguments: what a caller passes to an engine, checked and copied into what its thread can trust. No torch.

Always true of what is returned: plain ints, floats and strings in range, in tuples of its own. A later change of an
argument, or code of its type (an int with an `__eq__` of its own), never reaches the engine's thread. `deliver` is the
only object of the caller's that does, and what it raises is caught there.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kvcellar.errors import BadRequest, PromptTooLong, shown
from kvcellar.events import Event
from kvcellar.images.image import FIRST
from kvcellar.memory.retention import NO_OPTIONS, RetentionOptions
from kvcellar.memory.snapshot import ADAPTED, IMAGE
from kvcellar.memory.spans import whole
from kvcellar.sampling_params import SamplingParams
from kvcellar.text.tokens import check_unicode

FIELDS = frozenset(field.name for field in fields(SamplingParams))
MOST_NAMESPACE, MOST_ADAPTER = 256, 256  # characters of a name
Place = str | Path
Places = Place | Sequence[Place]  # of one adapter; several are added up


def parameters(params: Any) -> SamplingParams:
    """A copy, checked again: a frozen record can be changed (`object.__setattr__`)."""
    if not isinstance(params, SamplingParams):
        raise BadRequest(f"params is SamplingParams(...), not {shown(params)}", "params")
    return SamplingParams(**{name: getattr(params, name) for name in FIELDS})


def receiver(deliver: Callable[[Event], None]) -> Callable[[Event], None]:
    if not callable(deliver):
        raise BadRequest(f"deliver is called with every event, and {shown(deliver)} cannot be", "deliver")
    return deliver


def namespace_name(namespace: Any) -> str:
    if isinstance(namespace, str) and (own := next(filter(namespace.startswith, (ADAPTED, IMAGE)), "")):
        raise BadRequest(f"a namespace cannot begin with {own!r}: such names are for what adapters and towers compute")
    if not isinstance(namespace, str) or len(namespace) > MOST_NAMESPACE:
        raise BadRequest(f"a namespace is a text of up to {MOST_NAMESPACE} characters, not {shown(namespace)}")
    check_unicode(name := str.__str__(namespace), "namespace")
    return name


def retention_options(retention: Any) -> RetentionOptions:
    """A copy, checked again: a frozen record can be changed (`object.__setattr__`)."""
    if retention is None:
        return NO_OPTIONS
    if not isinstance(retention, RetentionOptions):
        raise BadRequest(f"retention is RetentionOptions(...), not {shown(retention)}", "retention")
    return replace(retention)


def adapter_name(name: Any) -> str:
    """Raises `BadRequest` for what is no name."""
    if not isinstance(name, str) or not 0 < len(name) <= MOST_ADAPTER or not name.isprintable():
        raise BadRequest(f"the name of an adapter has 1 to {MOST_ADAPTER} characters, not {shown(name)}", "adapter")
    return name


def adapter_directories(path: Any) -> list[Path]:
    """Raises `BadRequest` for what is no directory, and no list of some."""
    several = list(path) if isinstance(path, Sequence) and not isinstance(path, str) else [path]
    if not several or not all(isinstance(one, str | Path) and str(one) for one in several):
        raise BadRequest(
            f"an adapter is a directory, or a list of some that are added up, not {shown(path)}", "adapter"
        )
    return [Path(one).expanduser() for one in several]


def token(value: Any, vocab_size: int, param: str) -> int:
    """A token id as a plain int. Any integer is accepted, numpy's too."""
    number = _index(value)
    if not 0 <= number < vocab_size:
        ids = f"whose ids are 0 to {vocab_size - 1}"
        raise BadRequest(f"{param}: {shown(value)} is not a token id of this model, {ids}", param)
    return number


def tokens(ids: Any, vocab_size: int, param: str) -> tuple[int, ...]:
    """Token ids as plain ints, and row ids of images. Lists of plain ints are checked by few calls that run in C, as
    they may be long."""
    found = tuple(items(ids, "a list of token ids is needed", param))
    if set(map(type, found)) == {int} and min(found) >= 0 and max(found) < vocab_size:
        return found
    return tuple(
        one if type(one) is int and FIRST <= one < 2 * FIRST else token(one, vocab_size, param) for one in found
    )


def prompt_ids(prompt: Any, *, vocab_size: int, context: int) -> tuple[int, ...]:
    """A prompt of 1 to `context` tokens. A longer one is refused before it is copied."""
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
    """The elements of a sequence other than text or bytes, as many as its length says."""
    values = _sequence(values, what, param)
    return list(islice(values, len(values)))


def _sequence(values: Any, what: str, param: str) -> Sequence[Any]:
    import numpy as np  # not at the top: imported only where there are values

    if isinstance(values, np.ndarray) and values.ndim == 1:
        return values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray | memoryview):
        raise BadRequest(f"{what}, not {shown(values)}", param)
    return values


def positions(given: Any, end: int) -> tuple[int, ...]:
    """`checkpoint_positions` of a prompt that ends at `end`, in order, each once."""
    name = "checkpoint_positions"
    found = [_index(pos) for pos in items(given, f"{name} are a list of positions", name)]
    if found != sorted(found) or any(not 0 <= pos <= end for pos in found):
        raise BadRequest(f"{name} are positions 0 to {end}, in order, not {shown(given)}", name)
    return tuple(dict.fromkeys(found))


def _index(value: Any) -> int:
    """A whole number as a plain int; -1 for anything else, and for a bool."""
    if isinstance(value, bool):
        return -1
    try:
        return whole(value, "it")
    except BadRequest:
        return -1
