"""Random engines, each from a seed: requests of all kinds arrive at once, memory is scarce, and engines begin again on
their store. Whatever happens, each answer is that of plain transformers.

What a game asserts:
  * each output ends, with a reason that its request explains: its stop token, its length, its own cancellation;
  * each output is what plain forwards of transformers over the whole text give (`judge`);
  * tokens that are counted as cached are those of an earlier text of the same namespace;
  * the engine logs no warning;
  * the engine's own invariants hold after each part, and in the end all of its memory is free.
"""

import copy
import logging
import math
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from kvcellar import Engine
from kvcellar.engine.sample.draw import draw
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.frontend.session import Session
from kvcellar.memory.prefix.node import common_prefix
from kvcellar.sampling_params import SamplingParams
from tests.engine.mixes import Ask, Clock, Ear, assert_at_rest, bytes_for, judge, made, mix, tokens
from tests.engine.speculating import Oracle, speculates
from tests.engine.tiered import settled
from tests.zoo import ARCHS

NAMES = (
    "llama", "mistral", "gemma3", "llama4", "lfm2", "falcon-h1", "qwen3-next", "mixtral", "deepseek-v3.2",
)  # fmt: skip
EXACT = ("llama", "mixtral", "mistral")  # whose keys are turned in a context shift, and encode what was dropped
ANEW = ("llama4", "lfm2", "falcon-h1", "qwen3-next")  # whose text is computed again after one
TIE = 2e-5  # of the largest logit, and of a router's scores: closer ones are decided by rounding

Text = tuple[int, ...]


@dataclass(frozen=True)
class Game:
    """What a seed says of an engine. `draft`: what proposes drafts; "" nothing."""

    seed: int
    name: str
    tight: bool
    stored: bool
    shifts: bool
    draft: str
    settings: dict[str, Any]

    @classmethod
    def of(cls, seed: int) -> "Game":
        """Architectures, scarce memory, stores and context shifts take turns; the rest is drawn."""
        draw = random.Random(f"game {seed}")
        name, tight, stored = NAMES[seed % len(NAMES)], seed % 2 == 0, seed % 4 in (0, 3)
        shifts = name in EXACT + ANEW and draw.random() < 0.3
        settings = {
            "context": 40 if shifts else 96 if tight else draw.choice([96, 160]),
            "step_tokens": draw.choice([24, 48]) if tight else draw.choice([16, 512]),
            "max_sequences": draw.choice([2, 4, 8]),
            "record": draw.choice(["auto", "off"]),
        }
        draft = draw.choice(["", "", "ngram", "oracle", *(["model"] if name != "deepseek-v3.2" else [])])
        if stored and draw.random() < 0.3:
            settings["host_bytes"] = 200_000
        return cls(seed, name, tight, stored, shifts, draft, settings)

    def __str__(self) -> str:
        kinds = [kind for kind in ("tight", "stored", "shifts") if getattr(self, kind)]
        return " ".join(map(str, [self.name, *kinds, self.draft and f"draft={self.draft}", self.settings]))

    def options(self, where: Path) -> dict[str, Any]:
        """The settings of its engines, whose files are in a directory of its own."""
        options = dict(self.settings)
        if self.draft == "ngram":
            options["draft"] = "ngram"
        if self.draft == "model":
            options |= {"draft": ARCHS["llama"].build(num_hidden_layers=1), "draft_bytes": 400_000}
        cells = self.settings["context"] + random.Random(self.seed).randrange(1, 60)
        options["cache_bytes"] = bytes_for(self.name, cells, **options) if self.tight else 40_000_000
        options["cache_bytes"] += options.get("host_bytes", 0) + options.get("draft_bytes", 0)
        if self.stored:
            options["store"] = str(where / "store")
        return options


# -- one game ---------------------------------------------------------------------------------------------------------


@dataclass
class Play:
    """The course of a game. `seen`: texts of each namespace, as far as any engine has computed them."""

    game: Game
    network: PreTrainedModel | Path
    options: dict[str, Any]
    texts: list[Text] = field(default_factory=list)  # that were judged to be right
    seen: dict[str, list[Text]] = field(default_factory=dict)
    repeated: list[Ask] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)  # what happened, by what it is called

    def __post_init__(self) -> None:
        self.draw = random.Random(f"play {self.game.seed}")
        self.heads = [tokens(self.draw, self._length(0.45)) for _ in range(3)]
        self.sessions: list[tuple[Session, list[Text]]] = []

    def _length(self, most: float, least: float = 0.0) -> int:
        """So many tokens as parts of the context."""
        context = self.game.settings["context"]
        return self.draw.randint(max(1, int(least * context)), int(most * context))

    def run(self) -> None:
        parts = 3 if self.game.stored else 2
        engine = self._opened()
        try:
            for part in range(parts):
                self._part(engine, part)
                engine.check()
                if self.draw.random() < 0.5:
                    engine.clear_cache()
                elif part + 1 < parts and self.game.stored:
                    self._rest(engine)
                    engine = self._opened()
            self._rest(engine)
        finally:
            engine.close()

    def _opened(self) -> Engine:
        engine = made(self.network, **self.options)  # type: ignore[arg-type]
        self.sessions = [(engine.session(chat=False), [()])]
        self.done["engines"] += 1
        return engine

    def _rest(self, engine: Engine) -> None:
        """The end of an engine."""
        for session, _ in self.sessions:
            session.close()
        stats = engine.stats()
        self.done["preemptions"] += stats.preemptions
        self.done["shifts"] += stats.shifts + sum(stats.recomputes.values())
        self.done["recorded"] += stats.recording.steps
        if stats.store is not None:
            self.done["restored"] += stats.store.restored
            settled(engine)
        speculates(engine, None)
        assert_at_rest(engine)
        engine.close()
        assert not engine.healthy

    def _part(self, engine: Engine, part: int) -> None:
        """Many requests at once, and then the turns of a few sessions."""
        if self.game.draft == "oracle":
            speculates(engine, Oracle(self.texts, draw=self.game.seed))
        asks = self._asks(part)
        clock = Clock(engine, asks)
        for ask in asks:
            self.seen.setdefault(ask.namespace, []).append(ask.prompt)
        ears = clock.run()
        for ask, ear in [*zip(asks, ears, strict=True), *clock.followed]:
            self._hear(ask, ear)
        self.done["drafts"] += sum(done.accepted for ear in ears if (done := ear.done.speculation) is not None)
        if not self.game.shifts:
            for _ in range(self.draw.randint(0, 2)):
                self._turn(engine)

    # -- requests ---------------------------------------------------------------------------------------------------

    def _asks(self, part: int) -> list[Ask]:
        asks = [
            self._ask(ask) for ask in mix((self.game.seed, part), longest=self._length(0.3, 0.1), count=self._count())
        ]
        again = [replace(ask, at=self.draw.randint(1, 15), cancel=None, turns=()) for ask in self.repeated]
        asks += self.draw.sample(again, min(2, len(again)))
        self.repeated += asks
        return asks

    def _count(self) -> int:
        return 3 if self.game.shifts else self.draw.randint(4, 5)

    def _ask(self, ask: Ask) -> Ask:
        """One of a mix, with more of what a request may have."""
        draw, kind = self.draw, self.draw.random()
        sampling = dict(ask.sampling)
        prompt = (*draw.choice(self.heads)[: self._length(0.45)], *ask.prompt) if kind < 0.6 else ask.prompt
        if sampling["n"] > 1:
            n = min(draw.randint(2, 4), self.game.settings["max_sequences"])
            sampling |= {"temperature": 0.8, "seed": draw.randrange(1000), "n": n}
        if draw.random() < 0.3:
            sampling |= {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.3}
        if self.game.shifts and draw.random() < 0.7:
            keep = draw.choice([0, 2, 5, 12]) if self.game.name in ANEW else 0
            sampling |= {"shift": True, "num_keep": keep, "n": 1, "max_tokens": 45, "ignore_eos": True}
        elif self.game.tight and draw.random() < 0.6:
            sampling |= {"max_tokens": draw.randint(15, 30), "ignore_eos": True}
        turns = [tokens(draw, draw.randint(1, 5)) for _ in range(draw.choice([0, 0, 1]))]
        return replace(
            ask,
            prompt=prompt,
            sampling=sampling,
            namespace=draw.choice(["", "", "", "other"]),
            cancel=draw.randint(ask.at, 22) if draw.random() < 0.15 else None,
            turns=() if self.game.shifts or sampling["n"] > 1 else tuple(turns),
        )

    def _hear(self, ask: Ask, ear: Ear) -> None:
        assert ear.error is None, f"{ask}: {ear.error!r}"
        params, context = SamplingParams(**ask.sampling), self.game.settings["context"]
        assert sorted(ear.reasons) == list(range(len(ear.reasons)))
        begun = len(ear.reasons) == params.n  # all outputs, unless the request was cancelled before
        assert begun or (ask.cancel is not None and "cancelled" in ear.reasons.values()), f"{ask}: {ear.reasons}"
        for choice, (ids, reason) in enumerate(ear.answers()):
            text = (*ask.prompt, *ids)
            assert reason != "cancelled" or ask.cancel is not None, f"{ask} was cancelled"
            full = not params.shift and len(text) > context
            assert reason != "length" or len(ids) == params.max_tokens or full, f"{ask} ended after {len(ids)} tokens"
            self._right(ask.prompt, ids, params, choice, ended=reason == "stop")
            self.done[reason] += 1
        self._cached(ask.namespace, ask.prompt, ear.done.usage.cached_tokens)
        self.seen.setdefault(ask.namespace, []).extend((*ask.prompt, *ids) for ids, _ in ear.answers())

    def _right(self, prompt: Text, ids: Text, params: SamplingParams, choice: int, *, ended: bool) -> None:
        told = (*ids, ARCHS[self.game.name].config().eos_token_id) if ended else ids
        verdict = Verdict(self.game.name, prompt, told, params, choice, self.game.settings["context"])
        self.done["tokens"] += len(told)
        self.done["near ties"] += verdict.near_ties()
        self.texts.append((*prompt, *ids))

    def _cached(self, namespace: str, prompt: Text, cached: int) -> None:
        """No more came from memory than there can be: another text that begins alike."""
        most = max((common_prefix(text, prompt) for text in self.seen.get(namespace, ())), default=0)
        assert cached <= min(most, len(prompt) - 1), f"{cached} tokens of {prompt} are from another namespace"

    # -- sessions ---------------------------------------------------------------------------------------------------

    def _turn(self, engine: Engine) -> None:
        """A session is sent to, or forked, rewound or left, and another one is sent to."""
        session, turns = self.draw.choice(self.sessions)
        act = self.draw.choice(["send", "fork", "rewind", "leave"])
        if act == "fork":
            self.sessions.append((session.fork(), list(turns)))
        elif act == "rewind":
            count = self.draw.randint(0, len(turns) - 1)
            session.rewind(count)
            del turns[len(turns) - count :]
        elif act == "leave" and turns[-1]:
            pieces = session.stream(tokens(self.draw, 3), max_tokens=9, temperature=0.0, ignore_eos=True)
            next(pieces)
            pieces.close()
        new = tokens(self.draw, self.draw.randint(1, 9) if turns[-1] else self._length(0.5))
        if len(turns[-1]) + len(new) + 6 > self.game.settings["context"]:
            return
        result = session.send(new, max_tokens=6, temperature=0.0)
        prompt = (*turns[-1], *new)
        params = SamplingParams(max_tokens=6, temperature=0.0)
        assert result.finish_reason == "stop" or len(result.token_ids) == 6
        self._right(prompt, result.token_ids, params, 0, ended=result.finish_reason == "stop")
        turns.append((*prompt, *result.token_ids))
        self.seen.setdefault("", []).append(turns[-1])
        assert tuple(session.tokens) == turns[-1]
        self.done["turns"] += 1


@contextmanager
def without_warnings() -> Iterator[None]:
    """Assert that nothing is logged from warnings on."""
    said: list[str] = []

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            cause = record.exc_info[1] if record.exc_info else None
            said.append(f"{record.levelname} {record.getMessage()}{f' ({cause!r})' if cause else ''}")

    heard, logger = Hears(logging.WARNING), logging.getLogger("kvcellar")
    logger.addHandler(heard)
    try:
        yield
    finally:
        logger.removeHandler(heard)
    assert not said, f"logged: {said}"


def play(seed: int, where: Path, saved: Callable[[str], Path]) -> Counter[str]:
    """Play the game of a seed, with files in the directory `where`; `saved` gives the directory of a model. Returns
    what happened. Raises `AssertionError` with the line that plays it again."""
    game = Game.of(seed)
    try:
        network = saved(game.name) if game.stored else ARCHS[game.name].build()
        one = Play(game, network, game.options(where))
        with without_warnings():
            one.run()
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where_to = f"{Path(at.filename).name}:{at.lineno} {at.line}"
        raise AssertionError(f"again by `{again(seed)}` ({game}): {where_to}: {error!r}") from error
    return one.done


def again(seed: int) -> str:
    return f"KVCELLAR_GAMES={seed}:{seed + 1} python -m pytest --long -n0 tests/engine/test_games.py -k plain"


# -- what plain transformers answer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Compares the tokens that were drawn after a prompt with those of plain forwards over the text."""

    name: str
    prompt: Text
    told: Text
    params: SamplingParams
    choice: int
    context: int

    def near_ties(self) -> int:
        """How many of the tokens are not those of plain forwards in float32, but were as likely. Raises
        `AssertionError` for any other."""
        if not self.told:
            return 0
        scores = self._logits(judge(self.name))
        wrong = [place for place, token in enumerate(self.told) if self._drawn(scores, place) != token]
        if wrong:
            with Margins() as margins:
                finer = self._logits(in_float64(self.name))
            for place in wrong:
                at = f"token {place} of {self.told} after {self.prompt}: plain transformers draw"
                assert self._is_near_tie(finer, place, margins.least), f"{at} {self._drawn(scores, place)}"
        return len(wrong)

    def _logits(self, network: PreTrainedModel) -> Tensor:
        """Of the rows in which the tokens are drawn -> [L,V]."""
        if not self.params.shift:
            return forward(network, (*self.prompt, *self.told[:-1]))[len(self.prompt) - 1 :]
        rows = shifted_in_place if self.name in EXACT else shifted_anew
        return rows(network, self.prompt, self.told, self.context, self.params.num_keep)

    def _drawn(self, logits: Tensor, place: int) -> int:
        if self.params.temperature:
            return self._sampled(logits[place], place)
        return int(self._penalised(logits[place], place).argmax())

    def _penalised(self, logits: Tensor, place: int) -> Tensor:
        """As the documentation of each API defines the penalties."""
        scores, params = logits.clone(), self.params
        counts = Counter(self.told[:place])
        for token in {*self.prompt, *counts} if params.repetition_penalty != 1.0 else ():
            better = scores[token] > 0
            scores[token] *= 1 / params.repetition_penalty if better else params.repetition_penalty
        for token, count in counts.items():
            scores[token] -= params.presence_penalty + count * params.frequency_penalty
        return scores

    def _sampled(self, logits: Tensor, place: int) -> int:
        """The token that the seed of the request draws from these logits."""
        ends = frozenset({ARCHS[self.name].config().eos_token_id})
        seed = self.params.seed
        assert seed is not None
        sampler = Sampler(
            self.params, seed=seed, index=self.choice, prompt_ids=self.prompt, vocab_size=len(logits), end_ids=ends
        )
        for token in self.told[:place]:
            sampler.accept(token)
        return draw(logits.float()[None], [sampler], [len(self.prompt) + place])[0].token_id

    def _is_near_tie(self, logits: Tensor, place: int, margin: float) -> bool:
        """By logits in float64, in which the closest choice of a router or an indexer was `margin` wide."""
        token, bound = self.told[place], TIE * float(logits[place].abs().max().clamp(min=1))
        if margin < TIE or self._drawn(logits, place) == token:
            return True
        if not self.params.temperature:
            scores = self._penalised(logits[place], place)
            return float(scores.max() - scores[token]) < bound
        noise = torch.Generator().manual_seed(0)
        moved = (logits[place] + bound * torch.randn(logits.shape[1], generator=noise) for _ in range(40))
        return token in {self._sampled(one, place) for one in moved}


class Margins(TorchFunctionMode):
    """By how much, relative to it, the last one that a `topk` takes is larger than the first one that it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.least = math.inf

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.topk, Tensor.topk):
            scores, count = args[0], kwargs.get("k", args[1] if len(args) > 1 else None)
            if count is not None and 0 < count < scores.shape[-1] and kwargs.get("dim", -1) == -1:
                best = scores.detach().sort(-1, descending=True).values
                gaps = (best[..., count - 1] - best[..., count]) / best[..., count - 1].abs().clamp(min=1e-9)
                gaps = gaps[gaps > 0]  # equal ones are masked, or the same in any type
                self.least = min(self.least, float(gaps.min()) if len(gaps) else math.inf)
        return function(*args, **kwargs)


@cache
def in_float64(name: str) -> PreTrainedModel:
    network = copy.deepcopy(judge(name)).double()
    network.set_experts_implementation("eager")  # the others have no float64
    return network


@torch.no_grad()
def forward(network: PreTrainedModel, text: Sequence[int], **how: Any) -> Tensor:
    return network(input_ids=torch.tensor([text]), use_cache=False, **how).logits[0]


def dropped(prompt: Text, told: Text, context: int, keep: int) -> list[tuple[int, Text]]:
    """The parts of a text between context shifts: how many of the tokens are drawn up to its end, and the text there
    that is left of it."""
    parts: list[tuple[int, Text]] = []
    text = list(prompt)
    for count, token in enumerate(told):
        if len(text) > context:
            parts.append((count, tuple(text[:-1])))
            del text[keep : keep + max(1, (context - keep) // 2)]
        text.append(token)
    return [*parts, (len(told), tuple(text[:-1]))]


def shifted_anew(network: PreTrainedModel, prompt: Text, told: Text, context: int, keep: int) -> Tensor:
    """What is left of the text is computed again after each shift -> [L,V]."""
    rows = []
    for (start, _), (end, text) in pairwise([(0, ()), *dropped(prompt, told, context, keep)]):
        rows.append(forward(network, text)[len(text) - (end - start) :])
    return torch.cat(rows)


def shifted_in_place(network: PreTrainedModel, prompt: Text, told: Text, context: int, keep: int) -> Tensor:
    """Tokens see those that are left, and what these saw: with relative positions as if nothing had moved -> [L,V]."""
    assert keep == 0, "kept tokens come closer to those after them"
    text, gone = (*prompt, *told[:-1]), 0
    seen = torch.zeros(len(text), len(text), dtype=torch.bool)
    for place in range(len(text)):
        if place - gone == context:
            gone += max(1, context // 2)
        seen[place, gone : place + 1] = True
    if getattr(network.config, "sliding_window", None):  # no window reaches what is gone
        return forward(network, text)[len(prompt) - 1 :]
    kind = next(network.parameters()).dtype
    bias = torch.zeros(1, 1, *seen.shape, dtype=kind).masked_fill(~seen, torch.finfo(kind).min)
    return forward(network, text, attention_mask=bias)[len(prompt) - 1 :]
