"""vision: how images enter a network of transformers.

A network that sees has towers, which make features of an image [n,D], and a decoder, the language model. Its own
forward puts features in place of the embeddings of placeholders, one token for each row, and calls its decoder. Here
the two parts run apart: `encode` runs the forward up to the call of the decoder, and keeps what that would get for the
placeholders; `seeing` puts it into the rows of a step, when the decoder runs on our memory.

What decoders get beside embeddings, where an image is in the text: features for early layers (DeepStack), a mask of the
image rows, and positions of several axes (temporal, height, width), which the network's `get_rope_index` computes from
ids and grids. Masks of attention are not passed: what sees both ways is said to memory (`Batch.look_ahead`).

Other decoders have layers that attend to images (`crossing`): an image is one token, which keeps its embedding, and its
forward runs to the end, through modules of attention that have the keys and values of the image.

An image is encoded in slices (`Sliced`), between which steps run the same network: the forward may stop before each
member of each list of modules of its towers. What it has set for itself, its door and modes of torch, is its thread's.

Always true: between two forwards and between two slices the network is as it was, and nothing is stored here.
"""

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from kvcellar.engine.models.crossing import SEES, Crossed, Seen
from kvcellar.engine.models.features import Features, Layers, Mask, alike
from kvcellar.engine.models.input_limits import IMAGE_MASK, embedding_rows, placeholder_of
from kvcellar.engine.models.seam import CACHES, Door, Extras, current_door, opened, scoring_of
from kvcellar.engine.models.sliced import Sliced
from kvcellar.errors import ModelRefused
from kvcellar.images.image import seen_from

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MASK = "attention_mask"
PIXELS = ("pixel_values", "flattened_patches")  # one of these is an argument of each network that sees
TYPES = ("mm_token_type_ids", "token_type_ids", IMAGE_MASK)  # 1 where a token is a placeholder
PLAIN = frozenset(  # what a decoder gets with text, too, or what our doors replace
    {
        "input_ids", "inputs_embeds", "attention_mask", "position_ids", "use_cache", "cache_position",
        "output_attentions", "output_hidden_states", "return_dict", "logits_to_keep", "per_layer_inputs", *CACHES,
    }
)  # fmt: skip


class ImageRows(NamedTuple):
    """Of one step: the rows that are of images, or see some, in order, and what they get (see `Features`)."""

    rows: Tensor  # [k]
    features: Tensor | None  # [k,D]; None: they keep the embeddings of their tokens
    layers: Mapping[str, Layers]
    mask: Mask | None
    seen: Sequence[Seen] = ()

    @classmethod
    def of(cls, parts: Sequence[tuple[int, Features, int]], device: torch.device) -> "ImageRows | None":
        """Of rows of a step, each with the features and the row of these that it is; None: there are none."""
        if not parts:
            return None
        _, first, _ = parts[0]

        def stacked(name: str) -> Callable[[int], Tensor]:
            return lambda layer: torch.stack([one.layers[name][layer][row] for _, one, row in parts])

        layers = {name: alike(several, stacked(name)) for name, several in first.layers.items()}
        features = torch.stack([one.rows[row] for _, one, row in parts])
        return cls(torch.tensor([place for place, _, _ in parts], device=device), features, layers, first.mask)

    @classmethod
    def seeing(
        cls, parts: Sequence[tuple[Sequence[int], Sequence[Features]]], device: torch.device
    ) -> "ImageRows | None":
        """Of rows of a step that see the same images by cross-attention, and these; None: there are none."""
        seen = [
            Seen(torch.tensor(rows, device=device), [one.crossed for one in images if one.crossed is not None])
            for rows, images in parts
        ]
        if not seen:
            return None
        return cls(torch.cat([rows for rows, _ in seen]), None, {}, parts[0][1][0].mask, seen)


class StepImages(NamedTuple):
    """What a step has beside its ids, where sequences have images: the positions of its rows [T], or of several axes
    [axes,T], and the rows of images, if there are any. `before`: positions of the tokens before those of a step with
    one sequence [axes,past]."""

    positions: Tensor | None = None  # None: those of the plan
    rows: ImageRows | None = None
    before: Tensor | None = None  # None: those of any text


class _TowerDoor(Door):
    """Open while features are made. Towers have their own attention, and the decoder is not run; its masks say whether
    the first token sees the last one: in all of them, or in some. Unless `crosses`: then the decoder is run, and `kv`
    are what it attends to beside its rows."""

    def __init__(self, crosses: bool = False) -> None:
        self.ahead = self.causal = False
        self.crosses = crosses
        self.arguments: dict[str, Any] | None = None  # that the decoder got
        self.kv: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def update(self, k: Tensor, v: Tensor, layer: int, kwargs: Any = None) -> tuple[Tensor, Tensor]:
        raise ModelRefused("its towers store keys and values")

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, extras: Extras) -> Tensor:
        """Of what is in front of the decoder, and has the config of its attention; or of the decoder (`crosses`)."""
        if not self.crosses:
            if mask is not None:
                raise ModelRefused("its towers have masks of the decoder's attention")
            scale = scoring_of(q, extras).scale
            return nn.functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)
        if k.shape[2] != q.shape[2]:
            last = torch.ones(k.shape[2], device=k.device) if mask is None else mask[0, 0, -1]
            sees = last if last.dtype == torch.bool else last >= 0  # not the tiles that it has not got
            self.kv[module] = k[0, :, sees], v[0, :, sees]
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    def past_length(self, layer: int) -> int:
        return 0

    def mask(self, rule: Any, local_size: int | None, q_length: int, device: torch.device) -> Tensor:
        if q_length > 1:
            ahead = _looks_ahead(rule, local_size, torch.arange(q_length, device=device))
            self.ahead, self.causal = self.ahead or ahead, self.causal or not ahead
        return torch.ones(1, 1, q_length, q_length, dtype=torch.bool, device=device)


def _looks_ahead(rule: Any, local_size: int | None, places: Tensor) -> bool:
    """Whether tokens at these places see those behind them. Raises `ModelRefused` if memory would show them others than
    the rule does: all of them or none, and of those before them no more than a window of `local_size`."""
    zero, last = torch.zeros_like(places[0]), places[-1]
    seen, first = (torch.as_tensor(rule(zero, zero, *one)) for one in ((zero, places[1:]), (last, zero)))
    if not bool(seen.any()):
        return False
    if not bool(seen.all()) or (local_size is not None and len(places) > local_size and bool(first)):
        window = f" with a window of {local_size}" if local_size is not None else ""
        raise ModelRefused(
            f"of an image, {len(places)} tokens{window} see each other in several pieces, or beyond the window: what "
            f"sees both ways has to be in one piece, and to fit in windows"
        )
    return True


class _PairDoor(_TowerDoor):
    """As `_TowerDoor`, for two images: whether the first token of one sees that of the other, behind it."""

    def __init__(self, pair: Tensor) -> None:
        super().__init__()
        self._pair = pair

    def mask(self, rule: Any, local_size: int | None, q_length: int, device: torch.device) -> Tensor:
        zero, (one, other) = torch.zeros((), dtype=torch.long, device=device), self._pair
        self.ahead = self.ahead or bool(rule(zero, zero, one, other))
        return torch.ones(1, 1, q_length, q_length, dtype=torch.bool, device=device)


class _AtDecoder(Exception):
    """The forward has come to its decoder."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__("the forward has come to its decoder")
        self.arguments = arguments


@dataclass(frozen=True, slots=True)
class Vision:
    """Of one network. `accepts`: the arguments of its forward. `blocks`: before each of these it may stop. `first`: the
    layer that gets features, where the decoder gets pixels itself; None: they replace embeddings. `in_front`: its own
    forward puts them in front of the text, so that it gets no tokens for them, and counts positions behind them.
    `sees`: the argument that says which images a token sees by cross-attention; None: it has none. `like`: features of
    an image, without numbers, known once it has been tested."""

    model: "PreTrainedModel"
    decoder: nn.Module
    placeholder: int
    accepts: frozenset[str]
    blocks: Sequence[nn.Module]
    first: nn.Module | None = None
    in_front: bool = False
    sees: str | None = None
    like: Features | None = field(default=None, compare=False)

    @property
    def axes(self) -> bool:
        """Whether positions are others than those of a text: they have several axes, or do not count images."""
        return self.in_front or _rope_index(self.model) is not None

    def of_towers(self, layers: Iterable[str]) -> list[str]:
        """Those of these layers of the network in front of its decoder, or in modules that attend to images."""
        behind = {*_behind(self.decoder), self.model.get_output_embeddings()}
        if self.like is not None and self.like.crossed is not None:
            behind -= {part for one in self.like.crossed.kv for part in one.modules()}
        return [name for name in layers if self.model.get_submodule(name) not in behind]

    def encode(self, ids: Sequence[int], inputs: Mapping[str, Tensor]) -> Features:
        """As `encoding` does, stopping wherever it can: for the self-test."""
        encoding = self.encoding(ids, inputs)
        try:
            while (made := encoding.run(0.0)) is None:
                pass
        finally:
            encoding.end()
        return made

    def encoding(self, ids: Sequence[int], inputs: Mapping[str, Tensor]) -> Sliced[Features]:
        """`ids` are the tokens of one image, from its first placeholder to its last one, and `inputs` what its
        processor made of it. Raises `ModelRefused` where the network does not treat it as one that is served."""
        threads = torch.get_num_threads()

        def work() -> Features:
            torch.set_num_threads(threads)  # of the thread that computes
            return self._features(ids, inputs)

        return Sliced(work, self._stopping, _clock_of(self.model.device))

    @torch.inference_mode()
    def _features(self, ids: Sequence[int], inputs: Mapping[str, Tensor]) -> Features:
        tokens, door = torch.tensor([ids], device=self.model.device), _TowerDoor(self.sees is not None)
        with opened(door):
            arguments = self._at_decoder(tokens, inputs)
        if self.sees is not None:
            return self._crossed(arguments, door)
        embeds, places = arguments.get("inputs_embeds"), tokens[0] == self.placeholder
        rows = None if embeds is None else embeds[0, places].clone()
        layers, mask = dict[str, Layers](), None
        for name, value in arguments.items():
            if name in PLAIN or value is None or isinstance(value, bool | int | str):
                continue
            if isinstance(value, Tensor) and _is_mask(value, places):
                mask = Mask(name, value.shape[:1], value.shape[2:], value.dtype)
            elif (several := _by_layer(value, int(places.sum()))) is None:
                raise ModelRefused(f"its decoder gets {name} with images, and what that is of a row is not known")
            elif rows is None and isinstance(value, Tensor) and len(value) == 1:
                rows = value[0].clone()  # it puts them in place of embeddings itself
            else:
                layers[name] = several
        if rows is None:
            raise ModelRefused("its decoder gets no embeddings")
        ahead = door.ahead or (self.first is not None and not door.causal and _mask_looks_ahead(arguments.get(MASK)))
        return Features(rows, layers, mask, ahead, door.ahead and door.causal)

    def _crossed(self, arguments: Mapping[str, Any], door: _TowerDoor) -> Features:
        """Of an image that is one token."""
        if not door.kv:
            raise ModelRefused("it attends to images by an attention of its own")
        given, mask = dict[str, Tensor](), None
        for name, value in arguments.items():
            if name in PLAIN or not isinstance(value, Tensor):
                continue
            if value.shape == (1, 1, 1, 1) and value.is_floating_point():
                mask = Mask(name, value.shape[:2], value.shape[3:], value.dtype)
            elif value.dim() == 3:
                given[name] = value[:1, :1].clone()
        sees = self.sees
        if mask is None and sees is not None and sees in inspect.signature(self.decoder.forward).parameters:
            mask = Mask(sees, torch.Size([1]), torch.Size([1]), torch.long)
        rows = torch.empty(0, device=self.model.device)
        return Features(rows, {}, mask, ahead=False, crossed=Crossed(door.kv, given))

    def logits(self, ids: Sequence[int], inputs: Mapping[str, Tensor], drawn: int | None = None) -> Tensor:
        """[T,V] of the network's own forward over a text with images. `drawn`: of a network whose prompts look ahead as
        a whole, how many of the last tokens are behind the prompt. With cross-attention, what is in front of the first
        image is in its cache by then: the forward of some networks lets it see all images, which a text whose beginning
        is in memory cannot do."""
        tokens = torch.tensor([ids], device=self.model.device)
        found, cached = list[Tensor](), dict[str, Any]()
        first = ids.index(self.placeholder) if self.sees is not None and self.placeholder in ids else 0
        if first:
            before = self.model(input_ids=tokens[:, :first], use_cache=True)
            found, cached = [before.logits], {"past_key_values": before.past_key_values}
        whole = {"attention_mask": torch.ones_like(tokens), **inputs}
        given = self._arguments(self.accepts, tokens[:, first:], whole) | cached
        if drawn is not None:
            types = (torch.arange(len(ids), device=tokens.device) >= len(ids) - drawn).long()[None]
            given |= {name: types for name in TYPES if name in given}
        found.append(self.model(**given, use_cache=bool(cached)).logits)
        return torch.cat(found, 1)[0].float()

    def of_two(
        self, ids: Sequence[int], inputs: Mapping[str, Tensor], drawn: int | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """What the network gets for the same image twice, and its logits [T,V]. Pixels of several images are joined
        along the first axis, or where its forward fails then, along the last one (patches in a row); with
        cross-attention, along the second one."""
        for axis in (0, -1) if self.sees is None else (1,):
            axes = {name: axis if one.is_floating_point() or axis == 1 else 0 for name, one in inputs.items()}
            twice = {name: torch.cat([one, one], axes[name]) for name, one in inputs.items() if one.dim()}
            try:
                return twice, self.logits(ids, twice, drawn)
            except (RuntimeError, ValueError, LookupError):
                if axis:  # the last way
                    raise
        raise AssertionError("unreachable")

    def _at_decoder(self, tokens: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """What the decoder would get. The network stops there: see `_stopping`."""
        try:
            self.model(**self._arguments(self.accepts, tokens, inputs), use_cache=False)
        except _AtDecoder as found:
            return found.arguments
        door = current_door()
        if not isinstance(door, _TowerDoor) or door.arguments is None:
            raise ModelRefused("its forward does not call its decoder")
        return door.arguments

    @contextmanager
    def _stopping(self, pause: Callable[[], None]) -> Iterator[None]:
        """Within the block, a forward calls `pause` where it may stop, and ends at its decoder. Steps find no hook: a
        recorded one would not call it."""

        first = self.first

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given, door = _named(module, args, kwargs), current_door()
            if module is first:
                given = {"inputs_embeds": next(iter(given.values())), MASK: given.get(MASK)}
            if not isinstance(door, _TowerDoor) or not door.crosses:
                raise _AtDecoder(given)
            door.arguments = given

        with ExitStack() as hooked:
            entry = self.decoder if first is None else first
            hooked.callback(entry.register_forward_pre_hook(stop, with_kwargs=True).remove)
            for block in self.blocks:
                hooked.callback(block.register_forward_pre_hook(lambda *_: pause()).remove)
            yield

    def _arguments(self, names: frozenset[str], tokens: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        types = (tokens == self.placeholder).long()
        given = {"input_ids": tokens, **dict.fromkeys(TYPES, types), **inputs}
        if self.sees is not None and bool(types.any()):
            given[self.sees] = self._seen(types[0], inputs.get(SEES[self.sees]))
        if self.in_front:
            given |= {"input_ids": tokens[:, types[0] == 0], MASK: None}
        return {name: value for name, value in given.items() if name in names}

    def _seen(self, types: Tensor, tiles: Tensor | None) -> Tensor:
        """Which images each of T tokens sees [1,T,n], or which tiles of these, where `tiles` [1,n,tiles] says which an
        image has."""
        places = types.nonzero()[:, 0].tolist()
        seen = torch.zeros(1, len(types), len(places), dtype=torch.long, device=types.device)
        for at in range(len(types)):
            seen[0, at, seen_from(places, at)] = 1
        return seen if tiles is None else seen[..., None] * tiles.reshape(len(places), -1)

    @torch.inference_mode()
    def whole_prompts(self, ids: Sequence[int]) -> bool:
        """Whether tokens of a prompt, `ids` without images, see those behind them, as those of a prefix do. Raises
        `ModelRefused` if they do so in some layers only."""
        door = _TowerDoor(self.sees is not None)
        with opened(door), self._stopping(lambda: None):
            self._at_decoder(torch.tensor([ids], device=self.model.device), {})
        if door.ahead and door.causal:
            raise ModelRefused("all tokens of a prompt see each other both ways in some of its layers only")
        return door.ahead

    @torch.inference_mode()
    def check_apart(self, ids: Sequence[int], inputs: Mapping[str, Tensor], starts: Sequence[int]) -> None:
        """Raise `ModelRefused` if the two images of a text, which begin at `starts`, see each other both ways."""
        door = _PairDoor(torch.tensor(starts, device=self.model.device))
        with opened(door), self._stopping(lambda: None):
            self._at_decoder(torch.tensor([ids], device=self.model.device), inputs)
        if door.ahead:
            raise ModelRefused(
                "images of a prompt see those behind them, so that what is kept of one depends on others"
            )

    @torch.inference_mode()
    def positions(self, ids: Sequence[int], inputs: Mapping[str, Tensor]) -> Tensor | None:
        """Of a text with images [axes,T], on the CPU, whose placeholders are in `ids`; None: those of any text.
        `inputs` are those of all of its images, in order."""
        if self.in_front:
            return (torch.tensor([ids]) != self.placeholder).cumsum(-1).sub(1).clamp(min=0)
        if (found := _rope_index(self.model)) is None:
            return None
        names = frozenset(inspect.signature(found).parameters)
        tokens = torch.tensor([ids])
        positions = found(**self._arguments(names, tokens, {"attention_mask": torch.ones_like(tokens), **inputs}))
        return (positions[0] if isinstance(positions, tuple) else positions)[:, 0].cpu()

    @contextmanager
    def seeing(self, step: ImageRows, *, opening: bool = False) -> Iterator[None]:
        """Within the block, the network has the features of images in the rows of a forward. `opening`: in its own mask
        of one sequence, these rows see each other."""

        def replace(_: nn.Module, __: Any, embeddings: Tensor) -> Tensor:
            assert step.features is not None
            return embeddings.index_copy(1, step.rows, step.features[None].to(embeddings.dtype))

        def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            given = _named(module, args, kwargs)
            hidden = next(iter(given))
            given[hidden] = replace(module, None, given[hidden])
            if opening and (mask := given.get(MASK)) is not None:  # [1,1,T,N], the same one for all layers
                seen = step.rows + mask.shape[-1] - mask.shape[-2]
                mask[..., step.rows[:, None], seen] = mask.dtype == torch.bool
            return (), given

        def add(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            given: dict[str, Any] = dict(step.layers)
            if step.mask is not None:
                ids: Tensor = (
                    kwargs["inputs_embeds"] if kwargs.get("inputs_embeds") is not None else kwargs["input_ids"]
                )
                given[step.mask.name] = step.mask.of(step.rows, ids.shape[1])
            return args, {**kwargs, **given, **(step.seen[0].images[0].given if step.seen else {})}

        hooks = list[Any]()
        if step.features is not None and self.first is None:
            hooks.append(self.model.get_input_embeddings().register_forward_hook(replace))
        elif step.features is not None and self.first is not None:
            hooks.append(self.first.register_forward_pre_hook(enter, with_kwargs=True))
        if step.layers or step.mask is not None or step.seen:
            hooks.append(self.decoder.register_forward_pre_hook(add, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def vision_of(model: "PreTrainedModel") -> Vision | None:
    """How images enter the network; None if it does not see. Raises `ModelRefused` if its tokens cannot be served."""
    accepts, placeholder = frozenset(inspect.signature(model.forward).parameters), placeholder_of(model)
    if accepts.isdisjoint(PIXELS):
        return None
    decoder, sees = model.get_decoder(), next((name for name in SEES if name in accepts), None)
    first = _first_layer(decoder)
    if placeholder is None and (first is None or sees is not None):
        raise ModelRefused("its config names no token that stands for a row of an image")
    token = embedding_rows(model) - 1 if placeholder is None else placeholder
    blocks = _blocks(model, _behind(decoder) if sees is None else set())
    return Vision(model, decoder, token, accepts, blocks, first, placeholder is None, sees)


def _first_layer(decoder: nn.Module) -> nn.Module | None:
    """Of a decoder that gets pixels itself, its first layer; None: it gets embeddings."""
    if "pixel_values" not in inspect.signature(decoder.forward).parameters:
        return None
    names = {name for name, _ in decoder.named_modules()}
    return next((decoder.get_submodule(one) for one in ("layers.0", "encoder.layer.0") if one in names), None)


def _behind(decoder: nn.Module) -> set[nn.Module]:
    """The modules behind the embeddings that `_at_decoder` finds."""
    first = _first_layer(decoder)
    lists = (one for one in decoder.modules() if first is None or (isinstance(one, nn.ModuleList) and first in [*one]))
    return set(next(lists).modules())


def _blocks(model: "PreTrainedModel", inside: set[nn.Module]) -> list[nn.Module]:
    """The members of all lists of modules that are not `inside`: layers of towers, and parts of these."""
    lists = (one for one in model.modules() if isinstance(one, nn.ModuleList | nn.Sequential) and one not in inside)
    return [block for one in lists for block in one]


def _clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds, when what was begun on the device is done."""
    if device.type != "cuda":
        return time.perf_counter

    def settled() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return settled


def _rope_index(model: "PreTrainedModel") -> Any:
    """The network's function from ids and grids to positions of several axes; None: it has none."""
    inner = getattr(model, "model", model)
    return getattr(model, "get_rope_index", None) or getattr(inner, "get_rope_index", None)


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a module by their names, in order."""
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs


def _mask_looks_ahead(mask: Any) -> bool:
    """Whether a mask of a network's own, [1,1,T,N] of Booleans or of what is added to scores, lets the first row see
    the last column."""
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[-1] < 2:
        return False
    seen = mask[0, 0, 0, -1]
    return bool(seen if mask.dtype == torch.bool else seen == 0)


def _is_mask(value: Tensor, places: Tensor) -> bool:
    """Whether it is of the rows of images: Booleans [1,T,*more], or ones in these `places` [T]."""
    if value.shape[:2] != (1, len(places)):
        return False
    return value.dtype == torch.bool or (value.dim() == 2 and bool((value[0] == places).all()))


def _by_layer(value: Any, rows: int) -> Layers | None:
    """Features of early layers, [rows,D] each; None: it is something else."""
    stacked = isinstance(value, Tensor) and value.dim() == 3
    several: Any = tuple(value) if stacked else value if isinstance(value, list | tuple | Mapping) else ()
    each: Any = several.values() if isinstance(several, Mapping) else several
    fits = several and all(isinstance(one, Tensor) and one.dim() == 2 and one.shape[0] == rows for one in each)
    return alike(several, lambda at: several[at].clone()) if fits else None
