"""moved: where what is held begins once a span is gone and what lay behind it has moved down."""

from kvcellar.spans import Span


def first_after(first: int, gone: Span) -> int:
    """The lowest position that is held afterwards, where `first` was it before."""
    if first < gone.start:
        return first
    return gone.start if first < gone.end else first - len(gone)
