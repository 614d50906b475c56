"""mtp_head: the multi-token prediction (MTP) layers of a model on a memory of their own, run flat like the model.

Layer i computes a row for position p of the target from a token, that at p + 1 + i, and a hidden state: the target's
last one at p for layer 0, else that of layer i - 1 at p. It stores keys and values of the row in slot p of its memory,
and its output predicts the token at p + 2 + i.

Their tensors are in the model's own files, under the names that transformers knows for its family or as layers behind
the last one, or in a file `mtp.safetensors` beside them. What the MTP layers share with the model (the embedding, the
output head, rotary frequencies) is the model's, and copies of it in the files are not read.

Always true:
  * every tensor that belongs to the layers is copied into them, or the head is refused; the model's own weights are not
    written to;
  * the self-test compared the rows of an `MtpHead` with those of transformers' own forward of the same layers, on the
    real weights, and its output head gives the target's logits for the target's hidden states.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig

from kvcellar.engine.models.build_guest import reason_of
from kvcellar.engine.models.guest import MODEL_ERRORS, Guest, Ints, backends_for
from kvcellar.engine.models.hf_globals import building, silence_transformers
from kvcellar.engine.models.input_limits import context_of, random_tokens
from kvcellar.engine.models.load import check_memory, refusing
from kvcellar.engine.models.quantize.reading import decoded
from kvcellar.engine.models.registered import opened_cache, our_attention, own_attention
from kvcellar.engine.models.seam import FlatDoor, Scorings
from kvcellar.engine.models.selftest import TOLERANCE, check_rows, judged_as, relative_gaps, worst
from kvcellar.engine.models.shape import PROBE_TOKENS, ProbeDoor, Shape, differing, recording, shape_of
from kvcellar.engine.models.weights.weights_files import WeightsFiles, opened_file
from kvcellar.engine.models.weights.weights_files import opened as opened_weights
from kvcellar.engine.models.weights.weights_loading import (
    Source,
    check_type,
    is_finite,
    renamed,
    sequential_reads,
    stored_layers,
)
from kvcellar.errors import ModelRefused, first_few
from kvcellar.memory.attention.choose import Chosen
from kvcellar.memory.kv.history import Backend
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed, Plan
from kvcellar.memory.spans import Span
from kvcellar.repository import MTP

_SHARED = re.compile(r"(^|\.)(embed_tokens|shared_head\.head|lm_head)\.weight$")  # copies of the model's own
_HEAD_NAMES = re.compile(r"(^|[._])(mtp|nextn|eagle|medusa)([._]|\d|$)|\.(eh_proj|enorm|hnorm)\.")


def load_mtp(model: PreTrainedModel, path: Path) -> MtpModel:
    """The MTP layers of `model`, which was loaded from `path`, on its device and in its dtype. Raises `ModelRefused`.

    They call the embedding and the output head of `model`.
    """
    with silence_transformers(), _weights(path) as weights:
        names = _names(model, weights)
        _check_described(model, weights, names)
        with refusing(f"the MTP layers of {path.name} cannot be built", weights), described(model):
            return _filled(model, weights, names)


@contextmanager
def described(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, the config of `model` has the types of all MTP layers: those that it lacks are as in its last
    layer, of which transformers takes the class, too."""
    config: Any = model.config.get_text_config(decoder=True)
    with ExitStack() as restored:
        for name in ("layer_types", "mlp_layer_types"):
            types = getattr(config, name, None)
            if types and not getattr(config, f"mtp_{name}", None):
                setattr(config, f"mtp_{name}", [types[-1]] * config.num_mtp_layers)
                restored.callback(delattr, config, f"mtp_{name}")
        yield


@contextmanager
def _weights(path: Path) -> Iterator[WeightsFiles]:
    with opened_file(path, MTP) if (path / MTP).is_file() else opened_weights(path) as weights:
        yield decoded(weights)


def _names(model: PreTrainedModel, weights: WeightsFiles) -> list[str]:
    """The stored tensors that belong to MTP layers."""
    if MTP in weights.stats:
        return list(weights.tensors)
    config = model.config.get_text_config(decoder=True)
    behind = stored_layers(config)
    known = [
        pattern
        for pattern in model._keys_to_ignore_on_load_unexpected or ()
        if (layer := re.search(r"\.(\d+)", pattern)) is None or int(layer[1]) >= config.num_hidden_layers
    ]
    return [
        name
        for name in weights.tensors
        if behind.search(name) or (_HEAD_NAMES.search(name) and any(re.search(pattern, name) for pattern in known))
    ]


def _check_described(model: PreTrainedModel, weights: WeightsFiles, names: Sequence[str]) -> None:
    """Raise `ModelRefused` if the config describes no MTP layers, or the files hold none."""
    config = model.config.get_text_config(decoder=True)
    count, kind = getattr(config, "num_mtp_layers", None), type(config).__name__
    found = sorted({*names, *filter(_HEAD_NAMES.search, weights.tensors), *_behind(config, weights)})
    if not count:
        held = f"{weights.files} holds {len(found)} tensors of a head ({first_few(found)}), " if found else ""
        raise ModelRefused(
            f"{weights.path.name} has no MTP head that can be used: {held or 'no weights of one were found, '}and "
            f"{kind} has num_mtp_layers {count}: transformers builds no MTP layers for it"
        )
    if not names:
        raise ModelRefused(
            f"{weights.path.name} has no MTP head: config.json names {count} MTP layers, and neither {weights.files} "
            f"nor a file {MTP} holds their weights"
        )


def _behind(config: Any, weights: WeightsFiles) -> Iterator[str]:
    """Names of tensors of any layers behind the model's last one."""
    for name in weights.tensors:
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if layer is not None and int(layer[1]) >= config.num_hidden_layers:
            yield name


def _filled(model: PreTrainedModel, weights: WeightsFiles, names: Sequence[str]) -> MtpModel:
    count = model.config.get_text_config(decoder=True).num_mtp_layers
    if count > len(names):
        raise ModelRefused(
            f"config.json: num_mtp_layers is {count}; {weights.files} holds {len(names)} of their tensors"
        )
    with building(), ExitStack() as contexts:
        for context in MtpModel.get_init_context(model.dtype, False, False, None):
            contexts.enter_context(context)
        network = MtpModel(model, count)
    own = _own(network)
    elements = sum(value.numel() for value in own.values())
    if elements > weights.elements:
        raise ModelRefused(
            f"its config describes {elements} values of MTP layers; {weights.files} holds {weights.elements}"
        )
    check_memory(elements * model.dtype.itemsize)
    sources = {name: Source(weights.slices, name, model.dtype) for name in _chosen(network, model, weights, names)}
    mapping: list[Any] = network.get_weight_conversions(model)
    with sequential_reads():
        found, _ = convert_and_load_state_dict_in_model(
            model=network,
            state_dict=sources,
            load_config=LoadStateDictConfig(
                weight_mapping=mapping, device_map={"": model.device}, dtype=model.dtype, use_safetensors=True
            ),
        )
    weights.check_unchanged()
    _check_complete(network, weights, found)
    return network


def _own(network: MtpModel) -> dict[str, torch.Tensor]:
    """What the MTP layers do not share with the model, before it is loaded."""
    return {name: value for name, value in network.state_dict().items() if value.device.type == "meta"}


def _chosen(network: MtpModel, model: PreTrainedModel, weights: WeightsFiles, names: Sequence[str]) -> list[str]:
    """The tensors to read: all, except copies of what the model has itself. Raises `ModelRefused` for others that the
    layers have no place for, and for integers."""
    own, chosen, astray = _own(network), list[str](), list[str]()
    for name, target, _ in renamed(network, network.get_weight_conversions(model), names):
        if target in own:
            chosen.append(name)
            check_type(name, weights.tensors[name], own[target])
        elif not _SHARED.search(name):
            astray.append(name)
    if astray:
        raise ModelRefused(
            f"{weights.files} holds {len(astray)} tensors of MTP layers that transformers' MTP model has no place for "
            f"({first_few(astray)})"
        )
    return chosen


def _check_complete(network: MtpModel, weights: WeightsFiles, found: Any) -> None:
    """Raise `ModelRefused` unless every tensor of the layers was read, in its shape, with finite values."""
    absent = sorted(name for name, value in network.state_dict().items() if value.device.type == "meta")
    faults = [f"nothing for {len(absent)} of its parameters ({first_few(absent)})"] if absent else []
    if mismatched := sorted(map(str, found.mismatched_keys)):
        faults.append(f"another shape for {len(mismatched)} of its parameters ({first_few(mismatched)})")
    bad = [] if absent else [name for name, value in network.layers.named_parameters() if not is_finite(value)]
    if bad:
        faults.append(f"NaN or infinity in {len(bad)} tensors ({first_few(bad)})")
    if faults:
        raise ModelRefused(f"{weights.files} holds {' and '.join(faults)}, so its MTP head cannot be used")


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
        with opened_cache(FlatDoor(memory, plan, past, self.shape.bindings, self._scorings)) as cache:
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
        _self_test(head, target)
    except MODEL_ERRORS as error:
        raise ModelRefused(f"the MTP layers of {_name(target)} cannot be run: {reason_of(error)}") from error
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
    gap = relative_gaps(head.logits(hidden), theirs)
    if not worst([gap], judged_as(target.model)) <= TOLERANCE[judged_as(target.model)]:
        raise ModelRefused(
            f"{_name(target)} scales or bounds its hidden states or logits, and transformers' MTP model does not: for "
            f"the same hidden states, logits differ by {float(gap.max()):.1e}"
        )


def _self_test(head: MtpHead, target: Guest) -> None:
    """Two texts through a memory, in parts, side by side, and one step abandoned, against the layers' own forward.
    Raises `ModelRefused`."""
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
            gaps.append(relative_gaps(rows[start : start + len(span)], expected[seq][span.start : span.end]))
            start += len(span)
    check_rows(worst(gaps, judged_as(target.model)), target)


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
