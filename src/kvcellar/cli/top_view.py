"""top_view: the state of a server, as the inspector describes it, in lines of text."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvcellar.cli.memory_picture import picture, share

Snapshot = Mapping[str, Any]

BAR = 24  # characters
STEPS = 60  # the last ones
# Cells of a request, of several requests, of the prefix tree, and those held by something else.
KINDS: Mapping[str, str] = MappingProxyType({"request": "█", "shared": "█", "kept": "▓", "other": "▒"})
FREE = "·"
LEVELS = " ▁▂▃▄▅▆▇█"


def view(found: Snapshot, width: int, height: int) -> list[str]:
    """At most `height` lines of at most `width` characters. What does not fit is left out from the end of each list of
    requests first."""
    fixed = [*_head(found), *_groups(found["groups"], width), *_tiers(found["tiers"]), *_steps(found["steps"])]
    live, ended = _live(found["requests"]), _ended(found["requests"])
    free = max(0, height - len(fixed) - 2)  # a line that says what the columns are, for each list
    lives = live[: max(1, free // 2)]
    shown = [*fixed, LIVE, *lives, ENDED, *ended[: max(0, free - len(lives))]]
    return [line[:width] for line in shown[:height]]


LIVE = "REQUEST  STATUS      PROMPT COMPUTED  WRITTEN  TOKENS/S  FROM MEMORY"
ENDED = f"ENDED    OUTCOME     PROMPT  WRITTEN  TOKENS/S  {'FROM MEMORY':<{BAR}}  WHY NOT MORE"


def _head(found: Snapshot) -> Iterator[str]:
    engine, rates, model = found["engine"], found["rates"], found["model"]
    yield f"{model['name']}: {engine['running']} running, {engine['waiting']} waiting, {engine['steps']} steps"
    recording = engine["recording"]
    steps = recording["steps"]
    by = f"recorded {steps}" if recording["refused"] is None else f"by modules: {recording['refused']}"
    yield f"{rates['decode']:.1f} tokens/s written, {rates['prefill']:.0f} tokens/s read; {by}"


def _groups(groups: Sequence[Snapshot], width: int) -> Iterator[str]:
    for one in groups:
        used = sum(cells for kind, cells in one["counts"].items() if kind != "free")
        head = f"{one['name'][:20]:<20} {_share(used, one['cells'])} of {one['cells']} cells  "
        yield head + _map(one["runs"], max(8, width - len(head)))


def _map(runs: Sequence[Sequence[Any]], width: int) -> str:
    """A map of cells: a character stands for the kind that most of its cells have which are not free."""
    total = sum(run[0] for run in runs) or 1
    cells: list[dict[str, float]] = [{} for _ in range(width)]
    start = 0
    for length, kind, _ in runs:
        first, last = start * width / total, (start + length) * width / total
        for at in range(int(first), min(width, int(last) + 1)):
            covered = min(last, at + 1) - max(first, at)
            cells[at][kind] = cells[at].get(kind, 0.0) + covered
        start += length
    used = ({kind: covered for kind, covered in one.items() if kind in KINDS and covered} for one in cells)
    return "".join(KINDS[max(one, key=one.__getitem__)] if one else FREE for one in used)


def _tiers(tiers: Snapshot) -> Iterator[str]:
    for one in tiers["all"]:
        down = ", not available" if one["down"] else ""
        limit = f" of {_bytes(one['limit_bytes'])}" if one["limit_bytes"] else ""
        traffic = ""
        if one["read_bytes"] is not None:
            traffic = f", {_bytes(one['read_bytes'])} read, {_bytes(one['written_bytes'])} written"
        yield f"{one['name']:<20} {_bytes(one['bytes'])}{limit}{traffic}{down}"


def _steps(steps: Snapshot) -> Iterator[str]:
    if not steps["seconds"]:
        yield f"{'steps':<20} none yet"
        return
    seconds = steps["seconds"][-STEPS:]
    most = max(seconds) or 1.0
    bars = "".join(LEVELS[round((len(LEVELS) - 1) * one / most)] for one in seconds)
    last = f"{1e3 * seconds[-1]:.1f} ms: " + ", ".join(
        f"{steps[kind][-1]} {word}"
        for kind, word in (("prefill", "of prompts"), ("decode", "written"), ("drafts", "drafts"))
        if steps[kind][-1]
    )
    yield f"{'last step':<20} {last}"
    yield f"{'steps':<20} {bars} up to {1e3 * most:.1f} ms"


def _live(requests: Snapshot) -> list[str]:
    lines = [
        f"{one['number']:<8} {one['status'][:10]:<10} {one['prompt']:>7} {one['computed']:>8} {one['produced']:>8} "
        f"{one['tokens_per_second']:>9.1f}  {_restored(one)}"
        for one in requests["live"]
    ]
    if more := requests["more_live"]:
        lines.append(f"{more} more")
    return lines or ["none"]


def _restored(one: Snapshot) -> str:
    if one["restored"] is None:
        return "-"
    return f"{picture(one['prompt'], one['restored'], one['restored'], BAR)} {one['restored']}"


def _ended(requests: Snapshot) -> list[str]:
    return [_ended_line(one) for one in requests["ended"]] or ["none"]


def _ended_line(one: Snapshot) -> str:
    recall, why, line = one["recall"], "it ended before it began to run", "-" * BAR
    if recall is not None:
        line = picture(one["prompt"], recall["restored"], recall["matched"], BAR)
        why = f"{share(recall['restored'], one['prompt'])}; {recall['reason']}"
    numbers = f"{one['prompt']:>7} {one['produced']:>8} {one['tokens_per_second']:>9.1f}"
    return f"{one['number']:<8} {one['outcome'][:10]:<10} {numbers}  {line}  {why}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:5.1f} %" if whole else "    - %"


def _bytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
