"""Drafts beside everything else: requests that join, chunks of prompts, full memory, restores, quantised K/V; what a
drafter is passed of the target; and that sampled texts have the distribution of plain sampling."""

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcellar import Engine
from kvcellar.engine.speculate.chain import Chain, Key, extend
from kvcellar.engine.speculate.drafter import Committed
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Plan
from tests.engine.mixes import Clock, assert_at_rest, bytes_for, judge, made, mix, same_numbers, small_engine
from tests.engine.speculating import Oracle, Silent, Text, ask, report, speculates, told, watched
from tests.engine.test_breaking import reads_what_it_sees
from tests.engine.tiered import settled
from tests.zoo import ARCHS, layers

PROMPTS = [[*range(5, 16)], [33, 34, 33]]


def exact(settings: dict[str, Any], **more: Any) -> Engine:
    """An engine whose network is a function of what it sees, in whole numbers."""
    network = ARCHS["ministral"].build(num_hidden_layers=2, layer_types=layers("SF"))
    engine = made(network, **settings, **more)
    engine._built.guest.forward = reads_what_it_sees  # type: ignore[method-assign]
    return engine


class Random(Silent):
    """Knows nothing; some of the drafts are right by chance, and most are not."""

    name = "random"

    def __init__(self) -> None:
        self.draw, self.drafted = random.Random(1), 0

    def propose(self, chains: Sequence[Chain]) -> None:
        for chain in chains:
            for _ in range(self.draw.randrange(5)):
                if chain.left:
                    chain.add(self.draw.choice(chain.text))
            self.drafted += len(chain.drafts)


SCARCE: dict[str, Any] = {"context": 64, "step_tokens": 7, "max_sequences": 5}
WAYS: dict[str, dict[str, Any]] = {
    "chunks of prompts": {},
    "full": {"scarce": 50},
    "full, with a tier below": {"scarce": 50, "host_bytes": 200_000},
}


def at_rest(engine: Engine) -> None:
    if engine._loop.manager.store is not None:
        settled(engine)  # what is being stored holds memory
    assert_at_rest(engine)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("right", [True, False])
def test_requests_that_join_give_what_they_give_without_drafts(way: str, right: bool) -> None:
    """Also where completions are preempted, and what they need is evicted and restored."""
    how = dict(WAYS[way])
    network = ARCHS["ministral"].build(num_hidden_layers=2, layer_types=layers("SF"))
    scarce = how.pop("scarce", None)
    most = bytes_for(network, scarce, **SCARCE) + how.get("host_bytes", 0) if scarce else 4_000_000
    asks = mix(way, longest=24, count=9, seed=3, temperature=0.8)
    with exact(SCARCE, cache_bytes=most, **how) as engine:
        plain = [ear.answers() for ear in Clock(engine, asks).run()]
        at_rest(engine)
        texts = [(*one.prompt, *tokens) for one, answers in zip(asks, plain, strict=True) for tokens, _ in answers]
        drafter = Oracle(texts) if right else Random()
        speculates(engine, drafter)
        ears = Clock(engine, asks).run()
        assert [ear.answers() for ear in ears] == plain
        reports = [done for ear in ears if (done := ear.done.speculation) is not None]
        assert sum(one.drafted for one in reports) > 0
        assert sum(one.accepted for one in reports) > 0 or not right
        assert engine.stats().preemptions > 0 or way != "full"
        speculates(engine, None)
        at_rest(engine)


@pytest.mark.parametrize("stored", ["int8", "k=int8+hadamard,v=int4", "float16"])
def test_quantised_cells_are_those_of_plain_decoding(stored: str) -> None:
    """Codes and scales, bit for bit: a cell depends on its own token only."""
    how = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    with exact({"cache_bytes": 4_000_000, "kv_dtype": stored}) as engine:
        with watched(engine) as plain:
            ears = ask(engine, PROMPTS, **how)
        for right in (4, None):
            speculates(engine, Oracle(told(PROMPTS, ears), right))
            with watched(engine) as rounds:
                again = ask(engine, PROMPTS, **how)
            assert [ear.answers() for ear in again] == [ear.answers() for ear in ears]
            rounds.assert_as_in(plain)
            assert sum(report(ear).accepted for ear in again) > 10


class Reader(Oracle):
    """Records what the drafter is passed of each completion, since it was last closed."""

    reads_hidden = True

    def __init__(self, texts: Sequence[Text]) -> None:
        super().__init__(texts)
        self.open: dict[Key, list[Committed]] = {}
        self.ended: list[list[Committed]] = []

    def committed(self, news: Sequence[Committed]) -> None:
        for new in news:
            assert tuple(new.text[new.start : new.start + len(new.tokens)]) == tuple(new.tokens)
            self.open.setdefault(new.key, []).append(new)

    def fork(self, key: Key, other: Key) -> None:
        self.open[other] = list(self.open[key])

    def close(self, key: Key, *, keep: bool) -> None:
        self.ended.append(self.open.pop(key, []))


@pytest.mark.parametrize("name", ["lfm2", "llama4-untempered", "bloom"])
def test_a_drafter_reads_the_hidden_state_of_every_token_that_is_kept_and_of_no_other(name: str) -> None:
    """In order and without a gap, through chunks of a prompt, forks, and rounds with any number of right drafts."""
    how = {"max_tokens": 14, "temperature": 0.7, "seed": 1, "n": 2, "ignore_eos": True}
    with small_engine(name, step_tokens=6) as engine:
        texts = told(PROMPTS, ask(engine, PROMPTS, **how))
        speculates(engine, reader := Reader(texts))
        assert told(PROMPTS, ask(engine, PROMPTS, **how)) == texts
    assert not reader.open
    ended = sorted(tuple(token for new in news for token in new.tokens) for news in reader.ended)
    assert ended == sorted(text[:-1] for text in texts)
    for news in reader.ended:
        tokens = [token for new in news for token in new.tokens]
        assert [new.start for new in news] == [sum(len(new.tokens) for new in news[:i]) for i in range(len(news))]
        read = torch.cat([new.hidden for new in news])
        assert same_numbers(read, own_states(name, tokens))


@torch.inference_mode()
def own_states(name: str, tokens: list[int]) -> Tensor:
    """What the output head of the network reads in a forward of its own over the text. -> [T,H]"""
    network, read = judge(name), list[Tensor]()
    head = network.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    try:
        network(input_ids=torch.tensor([tokens]), use_cache=False)
    finally:
        hook.remove()
    return read[0][0]


# -- sampled texts without a seed -------------------------------------------------------------------------------------

LENGTH, COMPLETIONS, KNOWN = 4, 64, 5  # tokens of a text; completions of a request; tokens that can be drawn
TABLE = torch.randn(101, 101, generator=torch.Generator().manual_seed(2)) * 1.2
TABLE[:, KNOWN:] = -1e4
OTHER = TABLE + 1.2 * torch.randn(TABLE.shape, generator=torch.Generator().manual_seed(3))
OTHER[:, KNOWN:] = -1e4


class Drawn(Silent):
    """Drafts drawn from another table, each by what comes before it."""

    name = "drawn"

    def propose(self, chains: Sequence[Chain]) -> None:
        while going := [chain for chain in chains if chain.left]:
            extend(going, OTHER[[chain.tokens[-1] if chain.drafts else chain.text[-1] for chain in going]])


def of_a_table(memory: Memory, plan: Plan, ids: list[int], want: list[int]) -> Tensor:
    """In place of a guest's forward: the next token depends on the last one."""
    reads_what_it_sees(memory, plan, ids, want)
    return TABLE[[ids[row] for row in want]]


def chi_square(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of the texts of 15 requests, in standard deviations above its mean. Rare texts count as one."""
    seeds, seen = count(1), Counter[tuple[int, ...]]()
    monkeypatch.setattr("kvcellar.frontend.request_builder.fresh_seed", lambda: next(seeds))
    for _ in range(15):
        (ear,) = ask(engine, [[1]], max_tokens=LENGTH, temperature=0.9, top_k=4, n=COMPLETIONS, ignore_eos=True)
        seen.update(ear.ids(choice) for choice in range(COMPLETIONS))
    best = (TABLE / 0.9).topk(4)
    shares = torch.full_like(TABLE, -torch.inf).scatter(1, best.indices, best.values).double().softmax(1).tolist()
    wanted = {
        text: seen.total() * math.prod(shares[last][token] for last, token in pairwise((1, *text)))
        for text in product(range(KNOWN), repeat=LENGTH)
    }
    common = [text for text in wanted if wanted[text] >= 5]
    cells = [(seen[text], wanted[text]) for text in common]
    cells.append((seen.total() - sum(got for got, _ in cells), seen.total() - sum(want for _, want in cells)))
    degrees = len(cells) - 1
    assert degrees >= 10
    return (sum((got - want) ** 2 / want for got, want in cells) - degrees) / (2 * degrees) ** 0.5


@pytest.fixture(scope="module")
def sampling() -> Iterator[Engine]:
    with exact({"cache_bytes": 8_000_000, "max_sequences": COMPLETIONS}) as engine:
        engine._built.guest.forward = of_a_table  # type: ignore[method-assign]
        yield engine


@pytest.mark.parametrize("drafter", [None, Drawn(), Random()], ids=lambda one: one.name if one else "plain")
def test_sampled_texts_have_the_distribution_of_plain_sampling(sampling, drafter, monkeypatch) -> None:
    speculates(sampling, drafter)
    assert abs(chi_square(sampling, monkeypatch)) < 4


def test_a_wrong_residual_is_found_in_the_texts_of_an_engine(sampling, monkeypatch) -> None:
    speculates(sampling, Drawn())
    monkeypatch.setattr("kvcellar.engine.sample.draw.residual", lambda weights, drawn_from: weights)
    assert chi_square(sampling, monkeypatch) > 8
