"""moved: the first held position after a span was removed and the positions behind it have moved down."""

from kvcellar.spans import Span


def first_after(first: int, gone: Span) -> int:
    """The lowest held position after `gone` is removed; `first` is the one before."""
    if first < gone.start:
        return first
    return gone.start if first < gone.end else first - len(gone)
