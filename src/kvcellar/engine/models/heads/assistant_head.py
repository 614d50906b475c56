"""assistant_head: Gemma 4's assistants, small networks of queries only that attend to the target's keys and values.

A row is computed from a token, as the target embeds it, and a hidden state: the target's last one for the first draft,
then the assistant's own. Its layers read the cells of the target's last sliding and last full layer that store keys, in
place, in a step of rows that store nothing. All drafts of a round are made at one position, that of the target's newest
token, as transformers makes them.

Always true of an `AssistantHead`: the self-test compared a row with transformers' own forward of the network over the
same keys and values, on the real weights.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantForCausalLM
from transformers.models.gemma4_unified_assistant.modeling_gemma4_unified_assistant import (
    Gemma4UnifiedAssistantForCausalLM,
)

from kvcellar.engine.models.build_guest import reason_of
from kvcellar.engine.models.guest import MODEL_ERRORS, Guest, Ints
from kvcellar.engine.models.heads.draft_fit import Check, fit_of
from kvcellar.engine.models.hf_globals import building, silence_transformers
from kvcellar.engine.models.input_limits import random_tokens, vocabulary_of
from kvcellar.engine.models.load import check_memory, config_of, refusing
from kvcellar.engine.models.quantize.reading import decoded
from kvcellar.engine.models.registered import our_attention, own_attention
from kvcellar.engine.models.seam import Binding, FlatDoor, Scorings, opened
from kvcellar.engine.models.selftest import check_rows, relative_gaps
from kvcellar.engine.models.weights.config_file import config_fields
from kvcellar.engine.models.weights.weights_files import WeightsFiles, check_shapes
from kvcellar.engine.models.weights.weights_files import opened as opened_weights
from kvcellar.engine.models.weights.weights_loading import check_types, fill, targets_of
from kvcellar.errors import ModelRefused
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed, Plan
from kvcellar.memory.spans import Span

TESTED = 12  # tokens of the self-test's text


class _OurMasks:
    """Takes the masks of a network from the plan of the step while our attention is selected."""

    ours = True

    def create_attention_masks(self, inputs_embeds: Tensor, attention_mask: Any, shared_kv_states: Any) -> Any:
        if self.ours:
            return dict.fromkeys(shared_kv_states)
        own: Any = super()
        return own.create_attention_masks(inputs_embeds, attention_mask, shared_kv_states)


class _Assistant(_OurMasks, Gemma4AssistantForCausalLM):
    pass


class _UnifiedAssistant(_OurMasks, Gemma4UnifiedAssistantForCausalLM):
    pass


ASSISTANTS: Mapping[str, type[PreTrainedModel]] = {  # by model type
    "gemma4_assistant": _Assistant,
    "gemma4_unified_assistant": _UnifiedAssistant,
}


def queries_only(config: Any) -> None:
    """Let all layers of an assistant's config share keys and values of another model.

    transformers 5.23 reads such a config, but refuses it when the layers are built: a layer of the same network has to
    store what they share. The changed class keeps its name, by which transformers finds the network.
    """
    own = type(config.text_config)
    shared = {"kv_sharing_modes": property(lambda self: ["reuse"] * self.num_hidden_layers), "__module__": __name__}
    config.text_config.__class__ = type(own.__name__, (own,), shared)


class AssistantHead:
    """Runs `network` on the memory of its target."""

    def __init__(self, network: Any, target: Guest, read: Mapping[str, int]) -> None:
        """`read`: the target's layer whose cells are read, by kind of the assistant's layers."""
        self.network, self.read = network, dict(read)
        self._embedding: Any = target.model.get_input_embeddings()
        self._bindings: dict[nn.Module, Binding] = {
            layer.self_attn: Binding(read[layer.self_attn.layer_type], direct=True) for layer in network.model.layers
        }
        none = torch.zeros(1, 1, 1, 1, dtype=target.dtype, device=target.device)
        self._unread = dict.fromkeys(read, (none, none))  # in place of keys and values, which come from cells
        self._scorings: Scorings = {}

    @torch.inference_mode()
    def forward(self, memory: Memory, plan: Plan, ids: Ints, hidden: Tensor, positions: Ints) -> tuple[Tensor, Tensor]:
        """Run the open step of the target's memory, whose rows store nothing: ids [T], hidden [T,H] of the target's
        size -> logits [T,V], and the hidden states [T,H] for the next draft. `positions` [T] are those of the ids."""
        rows = memory.tables.fill("ids", ids)
        places = memory.tables.fill("positions", positions)
        with opened(FlatDoor(memory, plan, 0, self._bindings, self._scorings)):
            out = self.network(
                inputs_embeds=torch.cat([self._embedding(rows), hidden], -1)[None],
                position_ids=places[None],
                shared_kv_states=self._unread,
                logits_to_keep=slice(None),  # a number would let it compute some rows only
            )
        return out.logits[0], out.last_hidden_state[0]


def load_assistant(path: Path, target: Guest) -> AssistantHead:
    """The assistant of a directory, for `target`. Raises `ModelRefused`, with every reason if it does not fit."""
    with silence_transformers(), opened_weights(path) as files:
        weights = decoded(files)
        config = assistant_config(path, weights)
        _check_fits(config, path.name, target)
        skeleton = skeleton_of_assistant(config, target.dtype, weights)
        check_memory(sum(parameter.numel() for parameter in skeleton.parameters()) * target.dtype.itemsize)
        with refusing(f"transformers cannot build {path.name}", weights):
            network, _ = fill(skeleton, target.dtype, weights)
    network.to(device=target.device)  # pyright: ignore[reportCallIssue, reportArgumentType] - its stub is of a decorator
    return build_assistant(network, target)


def assistant_config(path: Path, weights: WeightsFiles) -> Any:
    """The config of an assistant. Raises `ModelRefused`."""
    config = config_of(config_fields(path), weights)
    if config.text_config is None:
        raise ModelRefused(f"config.json of {path.name} has no text_config, which describes its layers")
    return config


def check_assistant(path: Path, target: PreTrainedModel) -> None:
    """Raise `ModelRefused` if the assistant of a directory cannot be one for the target, which may have no weights."""
    with silence_transformers(), opened_weights(path) as files:
        weights = decoded(files)
        config = assistant_config(path, weights)
        fit_of(type(target).__name__, path.name, _shape_checks(config, target)).require()
        skeleton = skeleton_of_assistant(config, target.dtype, weights)
        check_types(skeleton, weights, targets_of(skeleton, weights))


def skeleton_of_assistant(config: Any, dtype: torch.dtype, weights: WeightsFiles) -> PreTrainedModel:
    """The network without weights. Raises `ModelRefused`."""
    queries_only(config)
    what = f"transformers cannot build a {config.model_type} from config.json"
    with refusing(what), building(), torch.device("meta"):
        skeleton = ASSISTANTS[config.model_type]._from_config(config, dtype=dtype)
    check_shapes(skeleton, weights)
    return skeleton


def build_assistant(network: Any, target: Guest) -> AssistantHead:
    """Connect an assistant's network to its target, and test it. Raises `ModelRefused`.

    The head owns the network, which is changed for good (eval mode, attention).
    """
    _check_order(network)
    network.eval()
    our_attention(network)
    head = AssistantHead(network, target, _read_layers(network.config, target))
    try:
        _self_test(head, target)
    except MODEL_ERRORS as error:
        raise ModelRefused(f"it cannot be run: {reason_of(error)}") from error
    return head


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_fits(config: Any, name: str, target: Guest) -> None:
    """Raise `DraftRefused` unless the assistant was made for models of the target's shape."""

    def attention() -> str:
        if target.mode != "flat":
            raise ModelRefused(f"the target is not run with our attention: {target.refused}")
        return "runs on the target's cells"

    def keys() -> str:
        return _check_keys(config, target) if target.mode == "flat" else "not compared"

    checks = {**_shape_checks(config, target.model), "attention": attention, "keys": keys}
    fit_of(type(target.model).__name__, name, checks).require()


def _shape_checks(config: Any, target: PreTrainedModel) -> dict[str, Check]:
    """The checks of an assistant's config that need no weights of the target."""
    text = target.config.get_text_config(decoder=True)

    def family() -> str:
        if not str(text.model_type).startswith("gemma4"):
            raise ModelRefused(f"it is made for Gemma 4, and the target is a {text.model_type}")
        return f"for a {text.model_type}"

    def hidden_size() -> str:
        if config.backbone_hidden_size != text.hidden_size:
            raise ModelRefused(
                f"it reads hidden states of {config.backbone_hidden_size} values, and the target has {text.hidden_size}"
            )
        return f"{text.hidden_size} values in both"

    def vocabulary() -> str:
        ours, theirs = vocabulary_of(target), config.text_config.vocab_size
        if ours != theirs:
            raise ModelRefused(f"it has {theirs} tokens, and the target has {ours}")
        return f"{ours} tokens in both"

    return {"family": family, "hidden size": hidden_size, "vocabulary": vocabulary}


def _read_layers(config: Any, target: Guest) -> dict[str, int]:
    """By kind of the assistant's layers, the target's last layer of that kind that stores keys."""
    types = target.model.config.get_text_config(decoder=True).layer_types
    stored = sorted(layer for group in target.shape.groups for layer in group.layers)
    last = {types[layer]: layer for layer in stored}
    wanted = set(config.text_config.layer_types)
    if missing := sorted(wanted - last.keys()):
        raise ModelRefused(f"it reads keys of the target's {missing} layers, which store none")
    return {kind: last[kind] for kind in sorted(wanted)}


def _check_keys(config: Any, target: Guest) -> str:
    text = config.text_config
    groups = {layer: group for group in target.shape.groups for layer in group.layers}
    found: list[str] = []
    for kind, layer in _read_layers(config, target).items():
        key = next(plane for plane in groups[layer].planes if plane.name == "k")
        own = text.per_layer_config[text.layer_types.index(kind)]
        if (own.num_key_value_heads, own.head_dim) != (key.heads, key.size):
            raise ModelRefused(
                f"its {kind} layers read keys of {own.num_key_value_heads} heads of {own.head_dim} values, and layer "
                f"{layer} of the target stores {key.heads} of {key.size}"
            )
        found.append(f"{kind} of layer {layer}")
    return ", ".join(found)


def _check_order(network: Any) -> None:
    """Raise `ModelRefused` if the order of an ordered embedding is not one of all tokens."""
    if network.config.use_ordered_embeddings:
        order, count = network.masked_embedding.token_ordering, network.vocab_size
        if count % network.config.num_centroids or network.config.num_centroids < 1:
            raise ModelRefused(f"{count} tokens cannot be divided among {network.config.num_centroids} centroids")
        if not torch.equal(order.sort().values.cpu(), torch.arange(count)):
            raise ModelRefused("masked_embedding.token_ordering does not name every token once")


def _self_test(head: AssistantHead, target: Guest) -> None:
    """Two drafts, the second from the hidden state of the first, for two sequences with the same keys, against
    transformers' own forward over these keys. Raises `ModelRefused`."""
    memory = target.memory({group.name: 3 * TESTED for group in target.shape.groups}, rows=4)
    ids = random_tokens(target.model, TESTED + 2, torch.Generator().manual_seed(0))
    plan = memory.begin(Batch((Feed(1, Span(0, TESTED)),)))
    _, hidden = target.forward_with_hidden(memory, plan, ids[:TESTED], [TESTED - 1])
    memory.commit()
    memory.fork(1, 2, TESTED)
    ours: list[Tensor] = []
    state = hidden[-1:].repeat(2, 1)
    plan = memory.begin(Batch(tuple(Feed(seq, Span(TESTED - 1, TESTED), stores=False) for seq in (1, 2))))
    for token in ids[TESTED:]:
        logits, state = head.forward(memory, plan, [token] * 2, state, [TESTED] * 2)
        ours += [logits, state]
    keys = {kind: _keys(memory, layer) for kind, layer in head.read.items()}
    memory.abandon()
    own_attention(head.network)
    head.network.ours = False
    try:
        theirs = _own_forward(head, keys, ids[TESTED:], hidden[-1:])
    finally:
        head.network.ours = True
        our_attention(head.network)
    gaps = [float(relative_gaps(a, b).max()) for a, b in zip(ours, theirs, strict=True)]
    check_rows(max(gaps), target)


def _keys(memory: Memory, layer: int) -> tuple[Tensor, Tensor]:
    """k and v [1,G,n,D] that the first sequence of the step sees."""
    k, v = memory.get(layer).each_in_order()[0]
    return k.transpose(0, 1)[None].to(memory.dtype), v.transpose(0, 1)[None].to(memory.dtype)


@torch.inference_mode()
def _own_forward(
    head: AssistantHead, keys: Mapping[str, tuple[Tensor, Tensor]], ids: Sequence[int], hidden: Tensor
) -> list[Tensor]:
    found: list[Tensor] = []
    for token in ids:
        embedded = head._embedding(torch.tensor([token], device=hidden.device))
        out = head.network(
            inputs_embeds=torch.cat([embedded, hidden], -1)[None],
            position_ids=torch.tensor([[TESTED]], device=hidden.device),
            shared_kv_states=dict(keys),
        )
        hidden = out.last_hidden_state[0]
        found += [out.logits[0], hidden]
    return found
