"""harm: how quantised weights predict the next tokens, compared with those that they were made of.

Both compute the same windows, one after the other, so that only one of them is in memory. Repeated on one machine, the
numbers are the same.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcellar.errors import ModelRefused
from kvcellar.models.input_limits import vocabulary_of
from kvcellar.models.load import load
from kvcellar.models.quantize.kinds import DENSE
from kvcellar.models.quantize.windows import Windows, of_text, sampled
from kvcellar.progress import Listener, listening, report

WINDOWS, LENGTH = 16, 128  # at most, and tokens of each
_STORED = 1 << 27  # logits of the source that are kept, at most
_SEED = 12  # not that of calibration
Model = str | Path | PreTrainedModel | None


@dataclass(slots=True)
class _Sums:
    kl: float = 0.0
    same: int = 0
    source_nats: float = 0.0
    nats: float = 0.0
    rows: int = 0
    predicted: int = 0  # rows whose next token is in the window


def measure_harm(
    source: Model,
    quantised: Model,
    *,
    weights: str = DENSE,
    text: str | None = None,
    progress: Listener | None = None,
    **how: Any,
) -> Mapping[str, Any]:
    """Mean KL divergence in nats of the predictions from the source's, the share of equal most likely tokens, and both
    perplexities, on the first tokens of `text`, or on samples of the source. Raises `ModelRefused`, `BadRequest`.

    `quantised` is loaded with these `weights`, so it may be the source; `how` are other arguments of `load`, for both.
    """
    with listening(progress):
        loaded = load(source, **how)
        count = max(1, min(WINDOWS, _STORED // (LENGTH * vocabulary_of(loaded.model))))
        report("measuring the source")
        windows = (
            sampled(loaded.model, count, LENGTH, seed=_SEED) if text is None else of_text(loaded, text, count, LENGTH)
        )
        expected = [_logits(loaded.model, ids) for ids in windows.ids]
        del loaded
        network = load(quantised, weights=weights, **how).model
        sums = _Sums()
        for done, (ids, own) in enumerate(zip(windows.ids, expected, strict=True)):
            report("measuring the quantised weights", done, len(expected))
            _compare(ids, own.float(), _logits(network, ids).float(), sums)
    return _summary(windows, sums)


def _summary(windows: Windows, sums: _Sums) -> dict[str, Any]:
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


def _compare(ids: Tensor, own: Tensor, other: Tensor, sums: _Sums) -> None:
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
