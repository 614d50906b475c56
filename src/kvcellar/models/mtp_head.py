"""mtp_head: the multi-token prediction (MTP) layers of a model on a memory of their own, run flat like the model.

Layer i computes a row for position p of the target from a token, that at p + 1 + i, and a hidden state: the target's
last one at p for layer 0, else that of layer i - 1 at p. It stores keys and values of the row in slot p of its memory,
and its output predicts the token at p + 2 + i.

Always true of an `MtpHead`: the self-test compared its rows with those of transformers' own forward of the same layers,
on the real weights, and its output head gives the target's logits for the target's hidden states.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from kvcellar.attention.choose import Chosen
from kvcellar.cache.memory import Memory
from kvcellar.contracts import Backend
from kvcellar.errors import KvcellarError, ModelRefused
from kvcellar.models.build_guest import MODEL_ERRORS
from kvcellar.models.guest import Guest, Ints, Verdict, backends_for
from kvcellar.models.input_limits import context_of, random_tokens
from kvcellar.models.probe import PROBE_TOKENS, ProbeDoor, differing, recording
from kvcellar.models.seam import FlatDoor, Scorings, opened, our_attention, own_attention
from kvcellar.models.selftest import TOLERANCE, judged_as, worst
from kvcellar.models.shape import Shape, shape_of
from kvcellar.plan import Batch, Feed, Plan
from kvcellar.spans import Span

TESTED = 16  # tokens of the self-test's texts


class MtpHead:
    """Runs the layers of `network`. Call `forward` between `Memory.begin` and `commit`, once per layer, in order."""

    def __init__(
        self, network: MtpModel, shape: Shape, chosen: Mapping[str, Chosen], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.network: Any = network  # transformers' hints name its own cache classes
        self.shape, self.chosen, self.device, self.dtype = shape, dict(chosen), device, dtype
        self.layers = len(network.layers)
        self._scorings: Scorings = {}

    @property
    def hidden_size(self) -> int:
        return int(self.network.config.hidden_size)

    def memory(self, cells: Mapping[str, int], *, limits: int | None = None, max_bytes: int | None = None) -> Memory:
        """A memory of the shape of the layers. Parameters are those of `Memory`."""
        return Memory(
            self.shape.groups,
            cells=cells,
            dtype=self.dtype,
            device=self.device,
            backend={name: chosen.backend for name, chosen in self.chosen.items()},
            limits=limits,
            max_bytes=max_bytes,
        )

    @torch.inference_mode()
    def forward(self, memory: Memory, plan: Plan, layer: int, ids: Ints, hidden: Tensor, positions: Ints) -> Tensor:
        """Run one layer over the rows of the open step: ids [T], hidden [T,H] -> [T,H].

        `positions` [T] are those of the tokens `ids` in their texts; a row's slot in memory may differ from its
        position by any number that is the same for all rows of a sequence.
        """
        rows = memory.tables.fill("ids", ids)
        places = memory.tables.fill("positions", positions)
        slots = torch.as_tensor(plan.positions, device=self.device)
        past = slots - torch.arange(plan.tokens, device=self.device)
        with opened(FlatDoor(memory, plan, past, self.shape.bindings, self._scorings)) as cache:
            return self.network.forward_layer(layer, hidden[None], places[None], cache, input_ids=rows[None])[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Output of a layer [R,H] -> [R,V]."""
        return self.network._project_to_logits(hidden[None])[0]


def build_mtp_head(network: MtpModel, target: Guest, backends: Sequence[Backend]) -> MtpHead:
    """Find the shape of the layers and test them. Raises `ModelRefused`.

    The head owns the network, which is changed for good (eval mode, attention).
    """
    network.eval()
    try:
        head = _flat(network, target, backends)
        _check_output_head(head, target)
        verdict = _self_test(head, target)
    except MODEL_ERRORS as error:
        reason = str(error) if isinstance(error, KvcellarError) else f"its code raised {type(error).__name__}: {error}"
        raise ModelRefused(f"the MTP layers of {_name(target)} cannot be run: {reason}") from error
    if not verdict.passed:
        raise ModelRefused(
            f"the MTP layers of {_name(target)} cannot be run: rows differ by {verdict.difference:.1e} from their own "
            f"forward ({verdict.bound:.0e} is allowed)"
        )
    return head


def _name(target: Guest) -> str:
    return type(target.model).__name__


def _flat(network: MtpModel, target: Guest, backends: Sequence[Backend]) -> MtpHead:
    our_attention(network)
    context = context_of(target.model)
    near, far = ProbeDoor(context), ProbeDoor(context)
    _probe(network, near, range(PROBE_TOKENS), target.device)
    if near.recurrent is not None:
        raise ModelRefused("they keep a recurrent state, of which drafts cannot be taken back")
    shape = shape_of(near, dtype=str(target.dtype).removeprefix("torch."), device=target.device.type)
    _probe(network, far, [*range(PROBE_TOKENS - 1), context - 1], target.device)
    if (why := differing(near, far, PROBE_TOKENS - 1)) is not None:
        raise ModelRefused(why)
    return MtpHead(network, shape, backends_for(shape, backends), target.device, target.dtype)


@torch.inference_mode()
def _probe(network: Any, door: ProbeDoor, positions: Sequence[int], device: torch.device) -> None:
    ids = torch.arange(PROBE_TOKENS, device=device)[None] % network.config.vocab_size
    places = torch.tensor(positions, device=device)[None]
    with recording(network, door) as cache:
        hidden = network.embed_tokens(ids)
        for layer in range(len(network.layers)):
            hidden = network.forward_layer(layer, hidden, places, cache, input_ids=ids)


def _check_output_head(head: MtpHead, target: Guest) -> None:
    """Raise `ModelRefused` if the target does more to its hidden states than the head would do to get logits."""
    memory = target.memory({group.name: 2 * TESTED for group in target.shape.groups}, rows=3)
    ids = random_tokens(target.model, TESTED, torch.Generator().manual_seed(0))
    plan = memory.begin(Batch((Feed(1, Span(0, TESTED)),)))
    theirs, hidden = target.forward_with_hidden(memory, plan, ids, range(TESTED))
    memory.abandon()
    gap = _gap(head.logits(hidden), theirs)
    if not worst([gap], judged_as(target.model)) <= TOLERANCE[judged_as(target.model)]:
        raise ModelRefused(
            f"{_name(target)} scales or bounds its hidden states or logits, and transformers' MTP model does not: for "
            f"the same hidden states, logits differ by {float(gap.max()):.1e}"
        )


def _gap(ours: Tensor, theirs: Tensor) -> Tensor:
    """The difference of each row, relative to the largest value."""
    theirs = theirs.float()
    return (ours.float() - theirs).abs().amax(-1) / max(1.0, float(theirs.abs().max()))


def _self_test(head: MtpHead, target: Guest) -> Verdict:
    """Two texts through a memory, in parts, side by side, and one step abandoned, against the layers' own forward."""
    draw = torch.Generator().manual_seed(0)
    texts = {seq: random_tokens(target.model, TESTED, draw) for seq in (1, 2)}
    hidden = {seq: torch.randn(TESTED, head.hidden_size, generator=draw).to(head.device, head.dtype) for seq in texts}
    own_attention(head.network)
    expected = {seq: _own_forward(head.network, texts[seq], hidden[seq]) for seq in texts}
    our_attention(head.network)
    memory = head.memory({group.name: 4 * TESTED for group in head.shape.groups})
    half, gaps = TESTED // 2, list[Tensor]()
    parts = [{1: Span(0, half)}, {1: Span(half, TESTED), 2: Span(0, 1)}, {2: Span(1, TESTED - 1)}]
    for part in [*parts, {2: Span(TESTED - 1, TESTED)}]:
        if part is parts[2]:
            _rows(head, memory, part, texts, hidden)
            memory.abandon()
        rows = _rows(head, memory, part, texts, hidden)
        memory.commit()
        start = 0
        for seq, span in part.items():
            gaps.append(_gap(rows[start : start + len(span)], expected[seq][span.start : span.end]))
            start += len(span)
    kind = judged_as(target.model)
    return Verdict(worst(gaps, kind), TOLERANCE[kind])


def _rows(
    head: MtpHead,
    memory: Memory,
    part: Mapping[int, Span],
    texts: Mapping[int, list[int]],
    hidden: Mapping[int, Tensor],
) -> Tensor:
    """All layers over some rows of some texts, with the same tokens in each layer; the step stays open."""
    plan = memory.begin(Batch(tuple(Feed(seq, span) for seq, span in part.items())))
    ids = [token for seq, span in part.items() for token in texts[seq][span.start : span.end]]
    out = torch.cat([hidden[seq][span.start : span.end] for seq, span in part.items()])
    for layer in range(head.layers):
        out = head.forward(memory, plan, layer, ids, out, [1 + layer + slot for slot in plan.positions])
    return out


@torch.inference_mode()
def _own_forward(network: Any, text: list[int], hidden: Tensor) -> Tensor:
    """[T,H]: transformers' own forward of all layers, with its own attention and cache."""
    cache, out = MtpCache(config=network.config), hidden[None]
    ids = torch.tensor([text], device=hidden.device)
    for layer in range(len(network.layers)):
        places = torch.arange(len(text), device=hidden.device)[None] + 1 + layer
        out = network.forward_layer(layer, out, places, cache, input_ids=ids)
    return out[0]
