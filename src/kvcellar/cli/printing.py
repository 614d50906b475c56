"""printing: how subcommands print numbers and tables, and what of a prompt came from memory and why it was not more."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcellar.frontend.result import Result
    from kvcellar.verify.kv_quality import KvQuality

WIDTH = 48  # characters of a picture
TURN_WIDTH = 12  # the same, of a turn
RESTORED, FOUND, COMPUTED = "█", "▒", "·"


def date(seconds: float) -> str:
    """Local time, with its offset, as ISO 8601."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def kv_quality_lines(found: "Sequence[KvQuality]") -> Iterator[str]:
    if found:
        tokens = max(one.tokens for one in found)
        yield f"  with quantised K/V (--kv-dtype of serve and run), over {tokens} tokens sampled from it:"
        yield from (f"    {one}" for one in found)


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as their longest cell; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


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
    return f"{restored} of {prompt}"


REPLICAS = (
    *("REPLICA", "STATE", "RUNNING", "WAITING", "TO READ", "CELLS USED", "CACHED", "FREE"),
    *("READ/S", "WRITTEN/S", "BLOCKS", "ADDRESS"),
)
SCORES = ("REPLICA", "IN ALL", "WAIT", "RESTORE", "COMPUTE", "OTHERS", "TOKENS THERE", "TO RESTORE")


def replica_lines(replicas: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of the replicas of a model, and why some are not used."""
    rows: list[tuple[str, ...]] = [REPLICAS]
    for one in replicas:
        used, cached, cells = one["cells_used"], one["cells_cached"], one["cells"]
        counts = one["running"], one["waiting"], one["waiting_tokens"], used, cached, cells - used - cached
        rates = f"{one['prefill_rate']:.0f}", f"{one['decode_rate']:.1f}"
        rows.append((one["name"], one["state"], *map(str, counts), *rates, str(one["blocks"]), one["address"]))
    return [*table(rows).splitlines(), *(f"{one['name']}: {one['why']}" for one in replicas if one["why"])]


def placement_lines(placements: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """To which replicas a request was sent, and what these were compared with."""
    for one in placements:
        considered = one["considered"]
        unit = "seconds" if considered and considered[0]["measured"] else "tokens, as no speed was measured yet,"
        by = f"the best of {len(considered)} by {unit} to its first token" if considered else "by numbers of requests"
        left = f"; that replica {one['left']}, and it went on at another one" if one["left"] else ""
        yield f"sent to {one['replica']}, {by}{left}"
        if considered:
            rows: list[tuple[str, ...]] = [SCORES]
            for score in considered:
                seconds = (f"{score[name]:.4f}" for name in ("seconds", "wait", "restore", "compute", "others"))
                rows.append((score["replica"], *seconds, str(score["have"]), str(score["restored"])))
            yield from (f"  {line}" for line in table(rows).splitlines())


def recall_lines(prompt: int, recall: Mapping[str, Any] | None) -> Iterator[str]:
    """What a prompt of so many tokens found in memory, by the fields of its `Recall`."""
    if recall is None:
        yield "it ended before it began to run"
        return
    restored, matched, sources = recall["restored"], recall["matched"], dict(recall["sources"])
    yield picture(prompt, restored, matched)
    tiers = ", ".join(f"{tokens} from {tier}" for tier, tokens in sources.items())
    yield f"{RESTORED} {share(restored, prompt)} tokens came from memory" + (f": {tiers}" if tiers else "")
    if matched > restored:
        yield f"{FOUND} {matched - restored} more were found, and not used"
    yield f"{COMPUTED} {prompt - max(restored, matched)} were computed"
    if recall["seconds"]:
        yield f"it waited {1e3 * recall['seconds']:.1f} ms for tokens to be read back"
    yield reason_of(recall)


def reason_of(recall: Mapping[str, Any]) -> str:
    """Why a prompt found no more in memory, by the fields of its `Recall`."""
    return f"{recall['reason']}: {recall['detail']}" + (f"; {recall['image']}" if recall["image"] else "")


def cost_line(result: "Result") -> str:
    """A picture of the prompt, speed, time to the first token, prompt tokens that came from memory, and drafts that
    were accepted."""
    usage, timings, drafts = result.usage, result.timings, result.speculation
    speed = timings.tokens_per_second(usage.completion_tokens)
    accepted = f"; {drafts.accepted} of {drafts.drafted} drafts were accepted" if drafts and drafts.drafted else ""
    found = picture(usage.prompt_tokens, usage.cached_tokens, usage.cached_tokens, TURN_WIDTH)
    first = timings.first_token * 1e3
    return (
        f"{found} [{usage.completion_tokens} tokens, {speed:.1f} tokens/s, first after {first:.0f} ms; "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens came from memory{accepted}]"
    )
