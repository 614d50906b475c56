"""A hand-written attention model on kvcellar's memory: no engine, no transformers. Run it as it is.

It has two layers, one with full attention and one with a window of 8 tokens, and random weights. Three sequences of
different lengths run in one batch; one of them is a fork. At the end every logit is compared with that of the same
model without sharing.
"""

import torch
from torch import Tensor

from kvcellar import Batch, Causal, Feed, Group, Memory, Plan, Plane, Scoring, Sdpa, Sliding, Span

HIDDEN, HEADS, KV_HEADS, SIZE, VOCAB, WINDOW = 32, 4, 2, 8, 50, 8


class Model:
    """Embedding, two attention layers with learned positions, output."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) / shape[0] ** 0.5

        self.embed, self.places, self.out = random(VOCAB, HIDDEN), random(64, HIDDEN), random(HIDDEN, VOCAB)
        sizes = (HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE)
        self.qkv = [random(HIDDEN, sum(sizes)).split(sizes, dim=1) for _ in range(2)]
        self.back = [random(HEADS * SIZE, HIDDEN) for _ in range(2)]

    def forward(self, memory: Memory, plan: Plan, ids: list[int]) -> Tensor:
        """Logits [T,VOCAB] of the tokens of the open step."""
        x = self.embed[ids] + self.places[plan.positions]  # [T,HIDDEN]
        for layer, (wq, wk, wv) in enumerate(self.qkv):
            q, k, v = ((x @ w).unflatten(1, (-1, SIZE)) for w in (wq, wk, wv))
            memory.put(layer, k, v)
            seen = memory.attend(layer, q, Scoring(SIZE**-0.5))  # [T,HEADS,SIZE]
            x = x + seen.flatten(1) @ self.back[layer]
        return x @ self.out


def new_memory() -> Memory:
    """256 cells in each of the two groups."""
    planes = (Plane("k", KV_HEADS, SIZE), Plane("v", KV_HEADS, SIZE))
    groups = [Group("full", Causal(), planes, (0,)), Group("window", Sliding(WINDOW), planes, (1,))]
    cells = {group.name: 256 for group in groups}
    return Memory(groups, cells=cells, dtype=torch.float32, device="cpu", backend=Sdpa())


def step(model: Model, memory: Memory, texts: dict[int, list[int]], counts: dict[int, int]) -> dict[int, Tensor]:
    """Compute the next `counts[seq]` tokens of each sequence, all in one row. Returns logits by sequence."""
    feeds = tuple(Feed(seq, Span(memory.length(seq), memory.length(seq) + n)) for seq, n in counts.items())
    plan = memory.begin(Batch(feeds))
    logits = model.forward(memory, plan, [texts[f.seq][pos] for f in feeds for pos in range(f.pos.start, f.pos.end)])
    memory.commit()
    return dict(zip(counts, logits.split(list(counts.values())), strict=True))


def main() -> float:
    """The largest difference between logits computed in steps with sharing, and in one forward per sequence."""
    model, memory = Model(), new_memory()
    base = [(7 * i) % VOCAB for i in range(20)]
    texts = {1: base, 2: [*base[:12], 3, 1, 4, 1, 5], 3: [2, 7, 1, 8]}
    got = {seq: [logits] for seq, logits in step(model, memory, texts, {1: 12, 3: 2}).items()}
    shared = memory.fork(1, 2, upto=12)  # the second text begins like the first, so their cells are shared
    got[2] = [got[1][0][:shared]]
    for counts in ({1: 1, 2: 3, 3: 1}, {1: 7, 2: 1, 3: 1}, {2: 1}):
        for seq, logits in step(model, memory, texts, counts).items():
            got[seq].append(logits)
    memory.check()
    held = {name: len(span) for name, span in memory.held(1).items()}
    print(f"sequence 1 has {memory.length(1)} tokens and holds {held} cells; sequence 2 shares {shared} of them")
    alone = {seq: step(model, new_memory(), texts, {seq: len(ids)})[seq] for seq, ids in texts.items()}
    return max(float((torch.cat(got[seq]) - alone[seq]).abs().max()) for seq in texts)


if __name__ == "__main__":
    print(f"largest difference of any logit from a forward without sharing: {main():.1e}")
