"""measuring: token sequences that networks compute, for sums to calibrate on, and for the harm of quantised weights.

Sequences are samples of the model itself, or a given text. The same model gives the same ones on one machine: the seed
is fixed, and the caller's random state is restored.

To calibrate is to sum x xᵀ over what linear layers read, in forwards of the unquantised network. All sums at once may
need more memory than the weights, so they are computed in rounds of a limited size. Layers that read the same tensor
(q, k and v; gate and up) share one sum.

The harm is how quantised weights predict the next tokens, compared with those that they were made of. Both compute the
same sequences, one after the other, so that only one of them is in memory. Repeated on one machine, the numbers are the
same.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from kvcellar.engine.models.guest import MODEL_ERRORS
from kvcellar.engine.models.input_limits import context_of, random_tokens, vocabulary_of
from kvcellar.engine.models.load import Loaded, load
from kvcellar.engine.models.quantize.kinds import DENSE
from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.progress import report

SHORTEST = 16  # tokens of a window


@dataclass(frozen=True, slots=True)
class Windows:
    """Token ids [n,L], and where they are from."""

    ids: Tensor
    source: str


def sampled(model: PreTrainedModel, count: int, length: int, *, seed: int) -> Windows:
    """Windows that the model samples at temperature 1, each after a random token. Where transformers cannot generate
    with it, all tokens are random."""
    length = min(length, context_of(model))
    draw = torch.Generator().manual_seed(seed)
    first = torch.tensor([random_tokens(model, 1, draw) for _ in range(count)])
    if length > 1:
        before = model.generation_config
        model.generation_config = GenerationConfig()  # that of the directory may limit what is sampled
        try:
            with torch.random.fork_rng(devices=[]), torch.inference_mode():
                torch.manual_seed(seed)
                own = GenerationConfig(
                    do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length - 1, pad_token_id=0
                )
                generate: Any = model.generate
                ids = generate(
                    first.to(model.device),
                    generation_config=own,
                    attention_mask=torch.ones_like(first).to(model.device),
                )
            if isinstance(ids, Tensor) and ids.shape == (count, length):
                return Windows(ids.cpu(), "sampled from the model")
        except MODEL_ERRORS:  # reported by the source of the windows
            pass
        finally:
            model.generation_config = before
    ids = torch.tensor([random_tokens(model, length, draw) for _ in range(count)])
    return Windows(ids, "random tokens, since transformers cannot sample from the model")


def of_text(loaded: Loaded, text: str, count: int, length: int) -> Windows:
    """The first tokens of a text, as at most so many windows of at most so many tokens. Raises `BadRequest`."""
    if loaded.text is None:
        raise BadRequest(f"a text cannot be used: {loaded.without_text}. Leave it out to sample from the model")
    ids = loaded.text.tokenizer.encode(text, add_special_tokens=False).ids[: count * length]
    length = min(length, context_of(loaded.model), len(ids))
    if length < SHORTEST:
        raise BadRequest(f"the text has {len(ids)} tokens; at least {SHORTEST} are needed")
    whole = len(ids) // length * length
    return Windows(torch.tensor(ids[:whole]).view(-1, length), "the given text")


CALIBRATED, CALIBRATED_LENGTH = 24, 256  # about 6 thousand tokens
FEWEST = 128  # rows that a sum needs: layers that read fewer have none
_BYTES = 4 << 30  # of the sums of one round
_CALIBRATION_SEED = 11


@dataclass(slots=True)
class _InputSum:
    """Of the layers that read the same tensors. `hessian` is float32 [i,i]."""

    modules: list[str]
    inputs: int
    hessian: Tensor = field(default_factory=lambda: torch.empty(0))
    rows: int = 0

    def add(self, read: Tensor) -> None:
        rows = read.detach().reshape(-1, self.inputs).float()
        self.hessian += (rows.T @ rows).cpu()
        self.rows += len(rows)


class Calibration:
    """A network and the windows that it reads."""

    def __init__(self, source: Path, text: str | None) -> None:
        loaded = load(source)
        self._model = loaded.model
        report("sampling from the model")
        self.windows: Windows = (
            sampled(loaded.model, CALIBRATED, CALIBRATED_LENGTH, seed=_CALIBRATION_SEED)
            if text is None
            else of_text(loaded, text, CALIBRATED, CALIBRATED_LENGTH)
        )

    def hessians(self, modules: Sequence[str]) -> Iterator[Mapping[str, Tensor | None]]:
        """Sums for these modules, in rounds; None for a module that is no linear layer, or read too little. Each is
        valid until the next round."""
        known = dict(self._model.named_modules())
        linear = [name for name in modules if isinstance(known.get(name), nn.Linear)]
        yield dict.fromkeys(name for name in modules if name not in set(linear))
        for number, sums in enumerate(_rounds(self._shared(linear))):
            for one in sums:
                one.hessian = torch.zeros(one.inputs, one.inputs)
            with self._hooks({one.modules[0]: one.add for one in sums}):
                for done, ids in enumerate(self.windows.ids):
                    report(f"calibrating, round {number + 1}", done, len(self.windows.ids))
                    _forward(self._model, ids)
            yield {name: one.hessian if one.rows >= FEWEST else None for one in sums for name in one.modules}
            for one in sums:
                one.hessian = torch.empty(0)

    def _shared(self, names: Sequence[str]) -> list[_InputSum]:
        """The layers in the order of their first use, those that read one tensor together."""
        modules: Any = dict(self._model.named_modules())
        read: dict[int, tuple[Tensor, list[str]]] = {}  # holds the tensors, so that ids stay different
        ready: set[str] = set()

        def note(name: str) -> Callable[[Tensor], None]:
            def act(tensor: Tensor) -> None:
                if name not in ready:
                    ready.add(name)
                    read.setdefault(id(tensor), (tensor, []))[1].append(name)

            return act

        with self._hooks({name: note(name) for name in names}):
            _forward(self._model, self.windows.ids[0])
        sums = [_InputSum(found, modules[found[0]].in_features) for _, found in read.values()]
        return sums + [_InputSum([name], modules[name].in_features) for name in names if name not in ready]

    @contextmanager
    def _hooks(self, acts: Mapping[str, Callable[[Tensor], None]]) -> Iterator[None]:
        """Within the block, these are called with what the modules read."""
        modules = dict(self._model.named_modules())

        def calling(act: Callable[[Tensor], None]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            return lambda _, read: act(read[0]) if read else None

        with ExitStack() as hooks:
            for name, act in acts.items():
                hooks.callback(modules[name].register_forward_pre_hook(calling(act)).remove)
            yield


def _rounds(sums: Sequence[_InputSum]) -> Iterator[list[_InputSum]]:
    """In order, so many at once as `_BYTES` allow, and at least one."""
    some: list[_InputSum] = []
    size = 0
    for one in sums:
        more = 4 * one.inputs**2
        if some and size + more > _BYTES:
            yield some
            some, size = [], 0
        some.append(one)
        size += more
    if some:
        yield some


def _forward(model: PreTrainedModel, ids: Tensor) -> None:
    with torch.inference_mode():
        model(input_ids=ids[None].to(model.device), use_cache=False)


WINDOWS, LENGTH = 16, 128  # at most, and tokens of each
_STORED = 1 << 27  # logits of the source that are kept, at most
_SEED = 12  # not that of calibration
Model = str | Path | PreTrainedModel | None


@dataclass(slots=True)
class _Differences:
    kl: float = 0.0
    same: int = 0
    source_nats: float = 0.0
    nats: float = 0.0
    rows: int = 0
    predicted: int = 0  # rows whose next token is in the window


def measure_harm(
    source: Model, quantised: Model, *, weights: str = DENSE, text: str | None = None, **how: Any
) -> Mapping[str, Any]:
    """Mean KL divergence in nats of the predictions from the source's, the share of equal most likely tokens, and both
    perplexities, on the first tokens of `text`, or on samples of the source. Raises `ModelRefused`, `BadRequest`.

    `quantised` is loaded with these `weights`, so it may be the source; `how` are other arguments of `load`, for both.
    """
    loaded = load(source, **how)
    count = max(1, min(WINDOWS, _STORED // (LENGTH * vocabulary_of(loaded.model))))
    report("measuring the source")
    windows = sampled(loaded.model, count, LENGTH, seed=_SEED) if text is None else of_text(loaded, text, count, LENGTH)
    expected = [_logits(loaded.model, ids) for ids in windows.ids]
    del loaded
    network = load(quantised, weights=weights, **how).model
    sums = _Differences()
    for done, (ids, own) in enumerate(zip(windows.ids, expected, strict=True)):
        report("measuring the quantised weights", done, len(expected))
        _compare(ids, own.float(), _logits(network, ids).float(), sums)
    return _summary(windows, sums)


def _summary(windows: Windows, sums: _Differences) -> dict[str, Any]:
    return {
        "text": windows.source,
        "windows": len(windows.ids),
        "tokens": windows.ids.numel(),
        "kl": _rounded(sums.kl / sums.rows),
        "top1": _rounded(sums.same / sums.rows),
        "source_perplexity": _perplexity(sums.source_nats, sums.predicted),
        "perplexity": _perplexity(sums.nats, sums.predicted),
    }


def _logits(network: PreTrainedModel, ids: Tensor) -> Tensor:
    """[L] -> [L,V], as the network computes them without memory."""
    with torch.inference_mode():
        return network(input_ids=ids[None].to(network.device), use_cache=False).logits[0].cpu()


def _compare(ids: Tensor, own: Tensor, other: Tensor, sums: _Differences) -> None:
    """Add what one window shows; logits [L,V]. Raises `ModelRefused` if they are not those of probabilities."""
    expected, found = own.log_softmax(-1), other.log_softmax(-1)
    for logits, which in ((expected, "the source computes NaN"), (found, "with the new weights it computes NaN")):
        if logits.isnan().any():
            raise ModelRefused(f"{which}, so what the new weights change cannot be measured; use another type")
    shares = expected.exp()
    kl = float(torch.where(shares == 0, 0.0, shares * (expected - found)).sum())  # a share of 0 gives 0 * inf
    if math.isinf(kl):
        raise ModelRefused("the new weights cannot predict tokens that the source predicts; use another type")
    sums.kl += max(0.0, kl)
    sums.same += int((expected.argmax(-1) == found.argmax(-1)).sum())
    sums.rows += len(ids)
    nexts = ids[1:, None].cpu()
    sums.source_nats -= float(expected[:-1].gather(1, nexts).sum())
    sums.nats -= float(found[:-1].gather(1, nexts).sum())
    sums.predicted += len(nexts)


def _perplexity(nats: float, tokens: int) -> float | None:
    """None if no token was predicted, or the number has no end."""
    value = math.exp(min(nats / tokens, 700.0)) if tokens else math.inf
    return _rounded(value) if math.isfinite(value) else None


def _rounded(value: float) -> float:
    """Four digits: later ones depend on the order of sums."""
    return float(f"{value:.4g}")
