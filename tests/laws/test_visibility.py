"""What a row may see, pair by pair, against the rule written out, whatever was done to the sequences before."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import settings

from kvcellar.memory.cells.layouts import Chunked, Input, Sliding
from kvcellar.memory.layout import Layout
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.laws.dumb import Kind, Member, causal, chunked, encoder, member, shifting, sliding
from tests.laws.lives import LIMITS, Life
from tests.laws.player import Player

BEFORE = ["some_tokens", "one_prompt", "one_prompt", "one_token_each", "fork", "fork_to_many", "remove_the_end"]
BEFORE += ["remove_from_the_middle", "remove_from_the_middle", "compact", "write_input", "share_input"]


def sees(layout: Layout, q: int, k: int, ahead: Sequence[Span] = ()) -> bool:
    """May the query at q look at k? All of an input; else itself and what came before it, or the rest of its span.

    Of these a window leaves W - 1 before it, and a chunk what is not of an earlier one.
    """
    if isinstance(layout, Input):
        return True
    if isinstance(layout, Sliding) and k <= q - layout.window:
        return False
    if isinstance(layout, Chunked) and k < q - q % layout.size:
        return False
    return k <= q or any(span.start <= q < span.end and k < span.end for span in ahead)


def drawn_kind(draw: Random) -> Kind:
    window = draw.randint(1, 9)
    return draw.choice([causal(), chunked(draw.randint(1, 9)), sliding(window, window + draw.choice([0, 0, 3]))])


def drawn_members(draw: Random) -> list[Member]:
    kinds = [drawn_kind(draw) for _ in range(draw.randint(1, 3))]
    found = [
        shifting(member(f"group {i}", kind, [i], (2, 2), 16, 16), turns=draw.random() < 0.5)
        for i, kind in enumerate(kinds)
    ]
    return [*found, member("input", encoder(9), [9], (2, 2), 16, 16)]


def drawn_batch(draw: Random, player: Player) -> Batch:
    feeds = {seq: draw.randint(1, 9) for seq in draw.sample(range(7), draw.randint(1, 3))}
    borders = {seq: {draw.randint(0, n) for _ in range(4)} for seq, n in feeds.items()}
    asks: list[Feed] = []
    for seq in player.dumb.lines:
        start = max(0, player.dumb.length(seq) + draw.randint(-3, 1))
        asks.append(Feed(seq, Span(start, start + draw.randint(1, 3)), stores=False))
    allowed = [feed for feed in asks if not player.dumb.refuses(feed)]
    return player.batch(feeds, borders, draw.sample(allowed, min(2, len(allowed))))


def fits(batch: Batch) -> bool:
    return all(feed.pos.end <= LIMITS.get(feed.seq, feed.pos.end) for feed in batch.feeds if feed.stores)


def owners(player: Player, index: int) -> dict[int, set[tuple[int, int]]]:
    """Whose each cell is in the open step, by cell: (sequence, pos). New tokens have theirs behind the others."""
    memory, found = player.memory, {}
    step = memory.step
    assert step is not None
    for seq, tables in ((seq, record.tables) for seq, record in memory._sequences.records.items()):
        runs, pos = list(tables[index].runs), tables[index].first
        for feed, taken in zip(step.batch.feeds, step.taken[index], strict=True):
            runs += taken if feed.seq == seq else []
        for cell in (cell for run in runs for cell in range(run.cell, run.end)):
            found.setdefault(cell, set()).add((seq, pos))
            pos += 1
    return found


def look(player: Player, batch: Batch) -> int:
    """How many pairs of a row and a cell were looked at."""
    pairs, step = 0, player.memory.step
    assert step is not None
    rows = [(feed, q) for feed in batch.feeds for q in range(feed.pos.start, feed.pos.end)]
    for index, m in enumerate(player.members):
        whose, layout = owners(player, index), m.group.layout
        visible = player.memory.get(m.group.layers[0]).dense()[2]
        cells = player.memory.storage.stores[index].step.columns.cells.tolist()
        assert visible.shape == (len(rows), len(cells))
        for (feed, q), row in zip(rows, visible.tolist(), strict=True):
            ahead = batch.ahead(feed.seq)
            for cell, seen in zip(cells, row, strict=True):
                mine = [k for seq, k in whose[cell] if seq == feed.seq]
                assert seen == any(sees(layout, q, k, ahead) for k in mine), f"{layout}: {feed}, {q} on {mine}"
            last = player.memory.length(feed.seq) + (len(feed.pos) if feed.stores else 0)
            last = player.memory.inputs.length(feed.seq) if m.kind.of_input else last
            wanted = [k for k in range(last) if sees(layout, q, k, ahead)]
            assert len(wanted) == sum(row), f"{layout}: {feed}, {q} lacks something of {wanted}"
            pairs += len(cells)
    return pairs


def test_every_row_sees_what_the_rule_says_pair_by_pair() -> None:
    pairs = ahead = asking = 0
    lives = settings.default.max_examples
    for seed in range(lives):
        draw = Random(seed)
        life = Life(drawn_members(draw), seed)
        for name in draw.choices(BEFORE, k=10):
            getattr(life, name)()
        room = min(n for name, n in life.player.memory.free().items() if name != "input")
        batches = (drawn_batch(draw, life.player) for _ in range(20))
        batch = next((batch for batch in batches if batch.stored <= room and fits(batch)), None)
        if batch is None:
            continue
        life.player.memory.begin(batch)
        pairs += look(life.player, batch)
        ahead += bool(batch.look_ahead)
        asking += batch.stored < batch.tokens
    assert min(ahead, asking) > lives // 3, "most had no room"
    assert pairs > 100 * lives


@pytest.mark.parametrize(
    ("layout", "q", "seen"),
    [
        (causal(), 5, [0, 1, 2, 3, 4, 5]),
        (sliding(3, 3), 5, [3, 4, 5]),
        (sliding(3, 8), 5, [3, 4, 5]),
        (sliding(1, 1), 5, [5]),
        (chunked(4), 5, [4, 5]),
        (chunked(4), 4, [4]),
        (encoder(8), 5, list(range(8))),
    ],
)
def test_the_rule_is_what_we_mean(layout: Kind, q: int, seen: list[int]) -> None:
    assert [k for k in range(8) if sees(layout.layout, q, k)] == seen


def test_looking_ahead_lifts_the_order_within_the_span_and_nothing_else() -> None:
    span = [Span(3, 6)]
    assert [k for k in range(9) if sees(chunked(4).layout, 5, k, span)] == [4, 5]
    assert [k for k in range(9) if sees(chunked(4).layout, 3, k, span)] == [0, 1, 2, 3, 4, 5]
    assert [k for k in range(9) if sees(sliding(2, 2).layout, 4, k, span)] == [3, 4, 5]
    assert [k for k in range(9) if sees(causal().layout, 2, k, span)] == [0, 1, 2]
