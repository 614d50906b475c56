"""peers: models of the rules by which other systems keep what prompts resume from, for `replay-peers`.

What their sources, named in the docstrings, do for one request after the other, default settings. Nothing of their code
is here. Where a system itself was counted on the traces of `replay`, its model computes as many tokens (docs/log.md).
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, inf
from typing import NamedTuple

from benchmarks.replay import WINDOW, Turn
from kvcellar.memory.prefix.node import TOKEN, common, key_of

STATES = ("hybrid", "recurrent")  # kinds with recurrent layers


class Room(NamedTuple):
    """What a cache may keep: cells of each group, and states of all recurrent layers."""

    cells: int
    states: int


def text_of(turn: Turn) -> list[int]:
    """The tokens that are computed: the last one that is drawn is not."""
    return [*turn.prompt, *turn.answer[:-1]]


def _chain(tokens: Sequence[int], size: int) -> list[int]:
    """A number for each full block of tokens, which depends on those before."""
    keys, before = list[int](), 0
    for end in range(size, len(tokens) + 1, size):
        before = hash((before, *tokens[end - size : end]))
        keys.append(before)
    return keys


# -- vLLM and LMCache --------------------------------------------------------------------------------------------------


class _Pool:
    """Blocks. Always true: `free` has those without a user, in the order in which they are used again, and a block
    keeps its key until then."""

    def __init__(self, blocks: int) -> None:
        self.free = OrderedDict[int, None].fromkeys(range(blocks))
        self._keys: dict[int, Hashable] = {}
        self._blocks: dict[Hashable, dict[int, None]] = {}

    def find(self, key: Hashable) -> int | None:
        return next(iter(self._blocks.get(key, ())), None)

    def take(self, key: Hashable) -> int:
        """A block that has this key."""
        block = next(iter(self._blocks[key]))
        del self.free[block]
        return block

    def new(self, key: Hashable | None) -> int:
        """The block that was free for the longest time; what it had is lost."""
        block, _ = self.free.popitem(last=False)
        if block in self._keys:
            old = self._keys.pop(block)
            del self._blocks[old][block]
        if key is not None:
            self._keys[block] = key
            self._blocks.setdefault(key, {})[block] = None
        return block

    def give(self, blocks: Iterable[int]) -> None:
        """Blocks without a key are used again first, the others last."""
        for block in blocks:
            self.free[block] = None
            self.free.move_to_end(block, last=block in self._keys)


class VLLM:
    """vLLM with automatic prefix caching, default settings.

    Blocks of 16 tokens, found by a hash that chains them; only full ones are found, and the last token of a prompt is
    always computed. All groups use one pool. Free blocks wait in a queue and are reused from its head; a request's are
    freed from its last one on, those without a hash to the head (vllm/v1/core/block_pool.py `free_blocks`;
    single_type_kv_cache_manager.py `free`). A window needs the blocks that cover it. Hybrids have blocks of 528 tokens
    (Qwen3.5-4B: vllm issue 40696), each with one state at its end (`mamba_cache_mode` align). Windows and states are
    kept for two places alone: the block border before a prompt's last token, and the one where attention found more of
    the prompt than they did (kv_cache_coordinator.py at 00b08dc4, `find_longest_cache_hit`;
    `prefix_cache_retention_interval` is 0 since vllm pull request 52216), so answers keep none.
    """

    STEP = 2048  # tokens

    def __init__(self, kind: str, room: Room, *, block: int | None = None) -> None:
        self._kind, self._attention = kind, kind != "recurrent"
        self._block = block or (528 if kind in STATES else 16)
        blocks = room.cells // self._block
        states = min(room.states, max(4, blocks))  # beside attention: no more than it has blocks
        sizes = {"full": blocks, "sliding": 2 * blocks, "hybrid": blocks + states, "recurrent": room.states}
        self._pool = _Pool(sizes[kind])
        self._reach = 1 if kind in STATES else ceil((WINDOW - 1) / self._block)  # blocks that a place needs

    def serve(self, turn: Turn) -> int:
        text = text_of(turn)
        keys, most = _chain(text, self._block), (len(turn.prompt) - 1) // self._block
        attention = self._found(keys[:most]) if self._attention else most
        hit = attention if self._kind == "full" else self._resume(keys, attention)
        held = [self._pool.take(("full", key)) for key in keys[:hit]] if self._attention else []
        other = {at: self._pool.take(("other", keys[at])) for at in self._needed(hit)} if self._kind != "full" else {}
        new = range(hit, ceil(len(text) / self._block))
        if self._attention:
            held += [self._pool.new(("full", keys[at]) if at < len(keys) else None) for at in new]
        if self._kind != "full":
            self._write(other, keys, new, {most, attention} if self._attention else {most})
        self._pool.give(reversed(held))
        self._pool.give(reversed(other.values()))
        return len(turn.prompt) - hit * self._block

    def _found(self, keys: Sequence[int]) -> int:
        return next((n for n, key in enumerate(keys) if self._pool.find(("full", key)) is None), len(keys))

    def _needed(self, place: int) -> range:
        return range(max(0, place - self._reach), place)

    def _resume(self, keys: Sequence[int], most: int) -> int:
        """The last place up to `most` whose windows or state are there."""
        for place in range(most, 0, -1):
            if all(self._pool.find(("other", keys[at])) is not None for at in reversed(self._needed(place))):
                return place
        return 0

    def _write(self, held: dict[int, int], keys: Sequence[int], new: range, places: set[int]) -> None:
        """Windows, or states, behind those that are `held`: with keys at these places, and the running ones without.
        Step by step, what leaves a window is freed before the next step."""
        kept = {at for place in places for at in self._needed(place)} - held.keys()
        if self._kind in STATES:
            held |= {at: self._pool.new(("other", keys[at])) for at in sorted(kept)}
            held[new.stop] = self._pool.new(None)
            return
        for start in new[:: self.STEP // self._block]:
            passed = [at for at in held if at < start - self._reach]
            self._pool.give([held.pop(at) for at in reversed(passed)])
            for at in range(start, min(start + self.STEP // self._block, new.stop)):
                held[at] = self._pool.new(("other", keys[at]) if at in kept else None)


class LMCache:
    """LMCache beside vLLM, with host memory for as many cells again.

    Prompts are stored in full chunks of 256 tokens, found by a chained hash, the least recently used one goes first
    (lmcache/v1/config.py: `chunk_size`, `save_unfull_chunk`, `save_decode_cache`; storage_backend/local_cpu_backend.py
    `touch_cache`: what a request found is used from its last chunk to its first; cache_policy/lru.py). vLLM's manager
    of hybrid caches is off beside this connector (vllm/config/vllm.py, `SupportsHMA`): windows are kept in full, and a
    model with states does not start.
    """

    CHUNK = 256

    def __init__(self, room: Room) -> None:
        self._device = VLLM("full", room)
        self._chunks = OrderedDict[int, None]()
        self._most = room.cells // self.CHUNK

    def serve(self, turn: Turn) -> int:
        keys, length = _chain(turn.prompt, self.CHUNK), len(turn.prompt)
        found = next((n for n, key in enumerate(keys) if key not in self._chunks), len(keys))
        for key in reversed(keys[:found]):
            self._chunks.move_to_end(key)
        self._chunks.update(dict.fromkeys(keys[found:]))
        while len(self._chunks) > self._most:
            self._chunks.popitem(last=False)
        return min(self._device.serve(turn), length - min(length - 1, found * self.CHUNK))


# -- SGLang ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Node:
    key: bytes
    parent: "_Node | None" = None
    children: dict[bytes, "_Node"] = field(default_factory=dict[bytes, "_Node"])
    used: int = 0
    state: bool = True  # one at its end is there

    @property
    def tokens(self) -> int:
        return len(self.key) // TOKEN


class SGLang:
    """SGLang's radix trees, pages of one token, default settings.

    A prompt is matched but for its last token; a node is split where a prompt leaves it. Its tokens are inserted behind
    its prefill, and with the answer at its end. The leaf that was used last longest ago is evicted as a whole
    (python/sglang/srt/mem_cache/radix_cache.py). Windows have a pool of their own, and lose cells there before the
    tokens go (swa_radix_cache.py at 019cfc0f), but not where it has as many cells as that of full attention, as here
    (`swa_full_tokens_ratio` is 0.8 by default). With states (mamba_radix_cache.py at 00df707e, `extra_buffer`, which
    `auto` means where tasks overlap): a node has at most a state at its end; a match ends at the last node that has
    one. A prefill keeps one, at its last multiple of 64 tokens, or at the one where the tree parted from the prompt
    behind the match (managers/schedule_batch.py, `mamba_branching_seqlen`); in decode, one at each multiple of 256
    (`mamba_track_interval`). What is behind the last state is not inserted. Where states are too many, the one that was
    used last longest ago goes, and with it its node if that is a leaf.
    """

    CHUNK, INTERVAL = 64, 256

    def __init__(self, kind: str, room: Room) -> None:
        self._states, self._root, self._clock = kind in STATES, _Node(b""), 0
        self._most, self._most_states = inf if kind == "recurrent" else room.cells, room.states
        self.tokens = self.states = 0

    def serve(self, turn: Turn) -> int:
        prompt, text = key_of(turn.prompt), key_of(text_of(turn))
        found = self._walk(prompt[:-TOKEN])
        path = found[: max((n for n, node in enumerate(found, 1) if node.state), default=0)]
        self._use(path)
        hit, length = sum(node.tokens for node in path), len(turn.prompt)
        if self._states:
            inserted = self._track(hit, length, sum(node.tokens for node in found)), self._answered(text, length)
        else:
            inserted = length, len(text) // TOKEN
        computed = hit
        for end, tokens in zip(inserted, (length, len(text) // TOKEN), strict=True):
            self._make_room(tokens - computed, 1 if end > hit else 0, path)
            computed = max(computed, end)
            if end > hit:
                path = self._insert(text[: end * TOKEN])
        return length - hit

    def _track(self, hit: int, length: int, matched: int) -> int:
        """Where a prefill keeps its state; `hit` if nowhere."""
        end, branch = hit + (length - hit) // self.CHUNK * self.CHUNK, matched // self.CHUNK * self.CHUNK
        return branch if hit < branch < end else end

    def _answered(self, text: bytes, length: int) -> int:
        """The last position in an answer with a state; 0 without one."""
        end = len(text) // TOKEN // self.INTERVAL * self.INTERVAL
        return end if end > length else 0

    def _walk(self, key: bytes) -> list[_Node]:
        """The nodes of what a key begins with; the last one is split where the key leaves it."""
        node, path = self._root, list[_Node]()
        while key and (child := node.children.get(key[:TOKEN])):
            same = common(child.key, key)
            node = child if same == child.tokens else self._split(child, same)
            path.append(node)
            key = key[same * TOKEN :]
        return path

    def _split(self, node: _Node, at: int) -> _Node:
        above = _Node(node.key[: at * TOKEN], node.parent, state=not self._states)
        assert node.parent is not None
        node.parent.children[above.key[:TOKEN]] = above
        node.key, node.parent = node.key[at * TOKEN :], above
        above.children[node.key[:TOKEN]] = node
        self._use([above, node])
        return above

    def _use(self, path: Iterable[_Node]) -> None:
        for node in path:
            self._clock += 1
            node.used = self._clock

    def _insert(self, key: bytes) -> list[_Node]:
        """Tokens, with a state at their end."""
        path = self._walk(key)
        above, rest = path[-1] if path else self._root, key[sum(len(node.key) for node in path) :]
        if rest:
            path.append(_Node(rest, above, state=False))
            above.children[rest[:TOKEN]] = path[-1]
            self.tokens += path[-1].tokens
        if not path[-1].state:
            path[-1].state = True
            self.states += 1
        self._use(path)
        return path

    def _make_room(self, tokens: int, states: int, path: Sequence[_Node]) -> None:
        """For so many new ones, of a request that goes on behind this path."""
        while self.tokens + tokens > self._most:
            self._remove(min((n for n in self._nodes() if not n.children and n not in path), key=_last_use), path)
        while self._states and self.states + states > self._most_states:
            node = min((n for n in self._nodes() if n.state and n not in path[-1:]), key=_last_use)
            if node.children:
                node.state = False
                self.states -= 1
            else:
                self._remove(node, path)

    def _remove(self, leaf: _Node, path: Sequence[_Node]) -> None:
        """And what is above it that has no state and now is a leaf."""
        above = leaf.parent
        assert above is not None
        del above.children[leaf.key[:TOKEN]]
        self.tokens -= leaf.tokens
        self.states -= leaf.state
        if above is not self._root and not above.state and not above.children and above not in path:
            self._remove(above, path)

    def _nodes(self) -> list[_Node]:
        found = [*self._root.children.values()]
        for node in found:
            found.extend(node.children.values())
        return found


def _last_use(node: _Node) -> int:
    return node.used


# -- llama.cpp ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Prompt:
    """Tokens in a slot or in host memory, and the positions of its checkpoints."""

    text: bytes = b""
    checkpoints: list[int] = field(default_factory=list[int])
    used: int = 0


class LlamaCpp:
    """llama.cpp's server, default settings: four slots, and host memory (`--cache-ram`) for the cells that they leave.

    A request takes the slot with the longest common prefix if that is more than a tenth of its prompt, else the one
    that was used last longest ago. The slot's text is saved to host memory if less than half of it is kept; the text
    there is loaded of which more is kept (at least a quarter) and that has more of the prompt; the oldest one goes
    first (tools/server/server-context.cpp `get_available_slot` at fb402660, server-task.cpp `server_prompt_cache`).
    Windows and states cannot go back, but to a checkpoint: at the start of a batch 4 tokens, or 4 and a batch of 512,
    before the end of a prompt, at the first batch of a slot without any, and where 8192 tokens were computed behind the
    last one; at most 32 a slot, none before 64 tokens (`--ctx-checkpoints`, `--checkpoint-min-step`; pull request
    20288, as quoted from 7e4c0a96). A slot has a window, and what was computed in its last batch.
    """

    SLOTS, BATCH, UBATCH, CHECKPOINTS, STEP = 4, 2048, 512, 32, 8192

    def __init__(self, kind: str, room: Room) -> None:
        self._kind, self._cells = kind, inf if kind == "recurrent" else room.cells
        self._states = room.cells // WINDOW if kind == "sliding" else room.states
        self._slots, self._host, self._clock = [_Prompt() for _ in range(self.SLOTS)], list[_Prompt](), 0

    def serve(self, turn: Turn) -> int:
        prompt, length = key_of(turn.prompt), len(turn.prompt)
        slot = self._choose(prompt)
        past = min(length - 1, common(slot.text, prompt))
        if self._kind != "full":
            past = self._back(slot, past)
            slot.checkpoints = self._new_checkpoints([pos for pos in slot.checkpoints if pos <= past], past, length)
        slot.text, self._clock = key_of(text_of(turn)), self._clock + 1
        slot.used = self._clock
        self._make_room(slot)
        return length - past

    def _choose(self, prompt: bytes) -> _Prompt:
        slot = max(self._slots, key=lambda one: common(one.text, prompt))
        known = common(slot.text, prompt)
        if known <= 0.1 * len(prompt) / TOKEN:
            slot = min(self._slots, key=lambda one: one.used)
        elif known >= 0.5 * len(slot.text) / TOKEN:
            return slot
        if slot.text:
            self._save(slot)
        self._load(slot, prompt)
        return slot

    def _save(self, slot: _Prompt) -> None:
        if not any(one.text.startswith(slot.text) for one in self._host):
            self._host = [one for one in self._host if not slot.text.startswith(one.text)]
            self._host.append(_Prompt(slot.text, [*slot.checkpoints]))

    def _load(self, slot: _Prompt, prompt: bytes) -> None:
        same = common(slot.text, prompt)
        best, kept, found = None, same * TOKEN / len(slot.text) if slot.text else -1.0, same
        for one in self._host:
            same = common(one.text, prompt)
            keeps = same * TOKEN / len(one.text)
            if keeps >= 0.25 and keeps > kept and same > found:
                best, kept, found = one, keeps, same
        if best is not None:
            self._host.remove(best)
            slot.text, slot.checkpoints = best.text, best.checkpoints

    def _back(self, slot: _Prompt, past: int) -> int:
        """The last position up to `past` that the slot can go on behind."""
        held = len(slot.text) // TOKEN
        if past == held or (self._kind == "sliding" and max(0, held - WINDOW - self.UBATCH) <= max(0, past - WINDOW)):
            return past
        return max((pos for pos in slot.checkpoints if pos <= past), default=0)

    def _new_checkpoints(self, found: list[int], past: int, length: int) -> list[int]:
        late = {length - 4 - self.UBATCH, length - 4}
        starts = sorted({past, *range(past, length, self.BATCH), *(pos for pos in late if pos > past)})
        for start, end in pairwise([*starts, length]):
            near = end > length - self.UBATCH
            if start >= 64 and (not found or near or start > found[-1] + self.STEP):
                found = [*found, start][-self.CHECKPOINTS :]
        return found

    def _make_room(self, running: _Prompt) -> None:
        """Other slots are saved and cleared while the cells do not suffice; then the oldest text in host memory goes,
        while texts or checkpoints are too many."""
        for slot in self._slots:
            if slot is not running and slot.text and self._tokens(self._slots) > self._cells:
                self._save(slot)
                slot.text, slot.checkpoints = b"", []
        left = self._cells - self._tokens(self._slots)
        while self._host and (self._tokens(self._host) > left or self._kept() > self._states):
            self._host.pop(0)
        running.checkpoints = running.checkpoints[max(0, self._kept() - self._states) :]

    def _tokens(self, some: Iterable[_Prompt]) -> int:
        return sum(len(one.text) // TOKEN for one in some)

    def _kept(self) -> int:
        return sum(len(one.checkpoints) for one in (*self._slots, *self._host))
