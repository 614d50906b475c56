"""A batch: which sequences get new tokens."""

import pytest

from kvcellar.errors import BadRequest
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span


def test_every_sequence_of_a_batch_has_new_tokens_and_is_there_once() -> None:
    with pytest.raises(BadRequest, match="at least one new token"):
        Batch((Feed(0, Span(3, 3)),))
    with pytest.raises(BadRequest, match="only once"):
        Batch((Feed(0, Span(0, 1)), Feed(0, Span(1, 2))))
