"""spans: half-open stretches of positions, printed the way we talk about them."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """Positions from `start` up to, not including, `end`. Raises ValueError unless 0 <= start <= end."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"not a span: [{self.start},{self.end})")

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"[{self.start},{self.end})"
