"""adapter_test: compare a step in which some sequences have an adapter with the model's own eager forward, in which all
tokens of a sequence have it. On the real weights, before any request has the adapter."""

from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from kvcellar.errors import ModelRefused
from kvcellar.models.guest import Guest
from kvcellar.models.hf_logging import silence_transformers
from kvcellar.models.input_limits import random_tokens
from kvcellar.models.seam import our_attention, own_attention
from kvcellar.models.selftest import TOLERANCE, judged_as, worst
from kvcellar.plan import Batch, Feed
from kvcellar.spans import Span

LONG, SHORT = 6, 4  # tokens of a sequence with the adapter, and of one without


def check_adapted(guest: Guest, number: int) -> Iterator[None]:
    """Raise `ModelRefused` unless the guest computes an adapter as the network does. Its K/V are stored as computed.

    Yields after each forward, which has at most `LONG` + `SHORT` tokens; then, the guest can run other steps.
    """
    bound = TOLERANCE[judged_as(guest.model)]
    found = yield from _difference(guest, number, 0)
    if not found <= bound:  # a near tie of a router's experts can fall either way
        found = yield from _difference(guest, number, 1)
    if not found <= bound:
        raise ModelRefused(f"with it, logits of a batch differ by {found:.1e} from those of the network's own forward")


@contextmanager
def _forward(guest: Guest) -> Iterator[None]:
    """Around one forward: afterwards, the guest is as it was."""
    with silence_transformers(), torch.inference_mode():
        try:
            yield
        finally:
            guest.adapted.whole = 0
            guest.adapted.restore()
            (our_attention if guest.mode == "flat" else own_attention)(guest.model)


def _difference(guest: Guest, number: int, seed: int) -> Generator[None, None, float]:
    ids = random_tokens(guest.model, LONG + SHORT, torch.Generator().manual_seed(seed))
    texts = {0: ids[:LONG], 1: ids[LONG:]}
    expected = yield from _own(guest, texts, {0: number, 1: 0})
    if not all(bool(rows.isfinite().all()) for rows in expected.values()):
        raise ModelRefused(f"with it, logits are not finite: it is damaged, or {guest.dtype} is too narrow for it")
    scale = max(1.0, max(float(rows.abs().max()) for rows in expected.values()))
    found = yield from _in_steps(guest, texts, number)
    return worst([(found[seq] - rows).abs().amax(-1) / scale for seq, rows in expected.items()], judged_as(guest.model))


def _own(
    guest: Guest, texts: dict[int, list[int]], adapters: dict[int, int]
) -> Generator[None, None, dict[int, Tensor]]:
    """Logits [L,V] of each text by the network's own attention."""
    found: dict[int, Tensor] = {}
    for seq, text in texts.items():
        with _forward(guest):
            own_attention(guest.model)
            guest.adapted.replace()
            guest.adapted.whole = adapters[seq]
            ids = torch.tensor([text], device=guest.model.device)
            found[seq] = guest.model(input_ids=ids, use_cache=False).logits[0].float()
        yield
    return found


def _in_steps(guest: Guest, texts: dict[int, list[int]], number: int) -> Generator[None, None, dict[int, Tensor]]:
    """Logits [L,V] of each text, in two steps of both, of which the second has them in the other order."""
    memory = guest.memory({group.name: 2 * (LONG + SHORT) for group in guest.shape.groups}, rows=4)
    found: dict[int, list[Tensor]] = {seq: [] for seq in texts}
    first, second = Feed(0, Span(0, LONG - 1), adapter=number), Feed(1, Span(0, SHORT - 2))
    for feeds in ((first, second), (Feed(1, Span(SHORT - 2, SHORT)), Feed(0, Span(LONG - 1, LONG), adapter=number))):
        for part in [feeds] if guest.mode == "flat" else [(feed,) for feed in feeds]:
            with _forward(guest), ExitStack() as hooks:
                plan = memory.begin(Batch(part))
                ids = [token for feed in part for token in texts[feed.seq][feed.pos.start : feed.pos.end]]
                called = _counted(guest, number, hooks)
                logits = guest.forward(memory, plan, ids, range(len(ids))[::-1]).float().flip(0)
                if any(feed.adapter for feed in part):
                    _check_called(guest, number, called)
                memory.commit({feed.seq: len(feed.pos) for feed in part})
            for feed, rows in zip(part, logits.split([len(feed.pos) for feed in part]), strict=True):
                found[feed.seq].append(rows)
            yield
    return {seq: torch.cat(rows) for seq, rows in found.items()}


def _counted(guest: Guest, number: int, hooks: ExitStack) -> Counter[str]:
    """How often each layer is called that the adapter changes."""
    called: Counter[str] = Counter()

    def count(name: str) -> Any:
        return lambda *_: called.update((name,))

    for name, module in guest.adapted.modules(number).items():
        hooks.callback(module.register_forward_pre_hook(count(name)).remove)
    return called


def _check_called(guest: Guest, number: int, called: Counter[str]) -> None:
    """Raise `ModelRefused` for a layer that is not called for all tokens: code that reads its weights would leave out
    what the adapter adds."""
    if silent := [name for name in guest.adapted.modules(number) if not called[name]]:
        raise ModelRefused(
            f"the layer {silent[0]} is not called as a module in every forward, so that what is added to its output is "
            f"left out ({len(silent)} layers)"
        )
