"""own_paths: messages for clients without the paths of the server."""

import re

# Not those of routes, of URLs, or of names like owner/name.
_PATH = re.compile(r"(?<![\w./:~-])(?:~|(?=/(?!v1/|api/)))/(?:[^\s/:;,'\"]+/)+(?=[^\s/:;,'\"])")


def without_paths(message: str) -> str:
    """The message with the last name of each absolute path only: the reason why a model is refused may name a file."""
    return _PATH.sub("", message)
