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
    """A `BadRequest` about a parameter in `names` is raised as one about its field. Others pass through."""
    try:
        yield
    except BadRequest as error:
        found = _FIRST.match(error.param or "")
        if found is None or (field := names.get(found[0])) is None:
            raise
        inner = (error.param or "")[found.end() :]
        error.param = field if found[0] == "messages" else field + inner  # these are numbered when all are together
        if not isinstance(error, PromptTooLong):  # it speaks of the prompt, which every request has
            rest = error.message.removeprefix(found[0])
            whole = found[0] == "messages" or len(rest) == len(error.message)
            error.message = f"{field}: {error.message}" if whole else field + rest
        raise
