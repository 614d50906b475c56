"""prompts: the memory that the token ids of requests under way may take, in bytes.

A request's prompt is there as often as it has answers, from its submission to its end: most of that time it may wait.

Always true:
  * the prompts of all requests that are not over take at most `most` bytes.
"""

import threading

from kvcellar.errors import BadRequest, Overloaded

TOKEN_BYTES = 44  # of a token id in a tuple, and of the id itself
COPY_BYTES = 8  # of a token id in the list of one answer


class Prompts:
    """Safe to use from several threads."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0
        self._lock = threading.Lock()

    def take(self, tokens: int, answers: int) -> int:
        """Bytes for a prompt of so many tokens, to be given back. Raises `Overloaded`, or `BadRequest` for too much."""
        size = tokens * (TOKEN_BYTES + COPY_BYTES * answers)
        if size > self.most:
            raise BadRequest(
                f"a prompt of {tokens} tokens with n {answers} takes {size} bytes; {self.most} are for prompts, half "
                f"of text_bytes. Shorten the prompt, ask for fewer answers, or raise that limit.",
                "n",
            )
        with self._lock:
            if self.taken + size > self.most:
                raise Overloaded(
                    f"prompts of {self.taken} bytes are under way; {self.most} are for prompts. Try again later."
                )
            self.taken += size
        return size

    def give(self, size: int) -> None:
        with self._lock:
            self.taken -= size
            assert self.taken >= 0, "a prompt was given back twice"
