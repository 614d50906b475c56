"""memory_picture: what of a prompt came from memory, and why it was not more, as lines of text."""

from collections.abc import Iterator
from itertools import accumulate

from kvcellar.events import Recall

WIDTH = 48  # characters of a picture
RESTORED, FOUND, COMPUTED = "█", "▒", "·"


def picture(prompt: int, restored: int, matched: int, width: int = WIDTH) -> str:
    """A prompt as a line: tokens that came from memory, those that were found and not used, and those computed. A part
    that is not empty has one character at least."""
    parts = {RESTORED: restored, FOUND: max(0, matched - restored), COMPUTED: max(0, prompt - max(restored, matched))}
    least = {mark: int(tokens > 0) for mark, tokens in parts.items()}
    free, total = width - sum(least.values()), sum(parts.values()) or 1
    ends = [round(free * end / total) for end in accumulate(parts.values())]
    sizes = [end - before for before, end in zip([0, *ends], ends, strict=False)]
    return "".join(mark * (least[mark] + size) for mark, size in zip(parts, sizes, strict=True))


def counted(number: int, what: str) -> str:
    """1 turn, 2 turns."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def share(restored: int, prompt: int) -> str:
    """What of a prompt came from memory: `Recall` says of what shares are."""
    return f"{restored} of {prompt}"


def why_lines(prompt: int, recall: Recall | None) -> Iterator[str]:
    """What the last turn found in memory. `prompt`: its tokens."""
    if recall is None:
        yield "the turn ended before it began to run"
        return
    yield picture(prompt, recall.restored, recall.matched)
    sources = ", ".join(f"{tokens} from {tier}" for tier, tokens in recall.sources)
    yield f"{RESTORED} {share(recall.restored, prompt)} tokens came from memory" + (f": {sources}" if sources else "")
    if recall.matched > recall.restored:
        yield f"{FOUND} {recall.matched - recall.restored} more were found, and not used"
    yield f"{COMPUTED} {prompt - max(recall.restored, recall.matched)} were computed"
    if recall.seconds:
        yield f"it waited {1e3 * recall.seconds:.1f} ms for tokens to be read back"
    yield f"{recall.reason}: {recall.detail}"
