"""For tests of `verify` that are about its other checks."""

import pytest

from kvcellar.verify import bits


@pytest.fixture(autouse=True)
def short_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are compared bit for bit in all ways, but those of a short text beside few others: that of a text as users
    have it takes ten times as long as all other checks, and has tests of its own (`tests/verify/test_bits.py`)."""
    monkeypatch.setattr(bits, "LENGTH", 8)
    monkeypatch.setattr(bits, "BATCHES", (2,))
