"""field_names: errors about a parameter name the field of the API that it came from.

The engine knows parameters by one name each, such as `max_tokens`; an API may have another for it, such as Ollama's
`num_predict`. It knows messages by their number; an API may make them of other parts of its body.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvcellar.errors import BadRequest, PromptTooLong

_FIRST = re.compile(r"\w+")
_IN_MESSAGE = re.compile(
    r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function(?:\.arguments)?)?|\.content\[(\d+)\]\.image(?:_url)?)?"
)


@dataclass(frozen=True, slots=True)
class Place:
    """What of a body a message was made of: the whole message, the arguments of each of its calls, and the images of
    its content, by number of the part."""

    message: str
    calls: Sequence[str] = ()
    images: Mapping[int, str] = field(default_factory=dict[int, str])


@contextmanager
def naming_fields(names: Mapping[str, str], places: Sequence[Place] = ()) -> Iterator[None]:
    """A `BadRequest` about a parameter in `names`, or about a message that has one of `places`, is raised as one about
    its field. Others pass through. Without its place, the number of a message stands behind the name of the field."""
    try:
        yield
    except BadRequest as error:
        if not _placed(error, places):
            _named(error, names)
        raise


def _placed(error: BadRequest, places: Sequence[Place]) -> bool:
    """Name the place of the message that an error is about; whether that is known."""
    found = _IN_MESSAGE.match(error.message)
    if found is None or (number := int(found[1])) >= len(places):
        return False
    place, end = places[number], found.end()
    if found[2] is not None and int(found[2]) < len(place.calls):
        error.param = place.calls[int(found[2])]
    elif found[3] is not None and int(found[3]) in place.images:
        error.param = place.images[int(found[3])]
    else:
        error.param, end = place.message, found.end(1) + 1
    error.message = error.param + error.message[end:]
    return True


def _named(error: BadRequest, names: Mapping[str, str]) -> None:
    found = _FIRST.match(error.param or "")
    if found is None or (field := names.get(found[0])) is None:
        return
    name, message = found[0], error.message
    error.param = field if name == "messages" else field + (error.param or "")[found.end() :]
    if message.startswith(name) and name != "messages":
        error.message = field + message.removeprefix(name)
    elif not isinstance(error, PromptTooLong):  # which speaks of the prompt that every request has
        error.message = f"{field}: {message}"
