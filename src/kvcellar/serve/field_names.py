"""field_names: errors about a parameter name the field of the API that it came from.

The engine knows parameters by one name each, such as `max_tokens`; an API may have another for it, such as Ollama's
`num_predict`.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvcellar.errors import BadRequest, PromptTooLong

_FIRST = re.compile(r"\w+")


@contextmanager
def naming_fields(names: Mapping[str, str]) -> Iterator[None]:
    """A `BadRequest` about a parameter in `names` is raised as one about its field. Others pass through.

    Places in `messages` are left out, or stand behind the name of the field: they count what the field became.
    """
    try:
        yield
    except BadRequest as error:
        found = _FIRST.match(error.param or "")
        if found is None or (field := names.get(found[0])) is None:
            raise
        name, message = found[0], error.message
        error.param = field if name == "messages" else field + (error.param or "")[found.end() :]
        if message.startswith(name) and name != "messages":
            error.message = field + message.removeprefix(name)
        elif not isinstance(error, PromptTooLong):  # which speaks of the prompt that every request has
            error.message = f"{field}: {message}"
        raise
