"""Acceptance of the MTP head's drafts, by position, on the model's own continuations of held-out code.

A draft x is accepted with probability min(1, p(x) / q(x)), where p is the model's distribution and q the head's; over
x drawn from q that is the sum of min(p, q), and so it is over y drawn from p with min(1, q(y) / p(y)). Continuations
are drawn from p, so one forward over them gives the expected acceptance of every position of a chain: the product of
these ratios along it. At temperature 0, p and q are the most likely tokens.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .evaluation import Speaker, loops
from .head import MtpHead
from .head_training import Exported
from .network import Weights
from .tokens import EOS

CONTEXT_TOKENS = 192  # of held-out code before a continuation
CONTINUED_TOKENS = 128
PROMPTS = 96
TEMPERATURES = (0.0, 0.8)
DEPTH = 6  # drafts of a chain that are measured


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`accepted[i]` is the probability that draft i is accepted, given that those before it were."""

    temperature: float
    texts: int  # continuations that do not end in a loop and have no end of text
    drafts: int  # first drafts measured
    accepted: tuple[float, ...]
    on_files: float  # of the first draft, on held-out text as it stands in the files


def contexts(stream: Tensor, tokens: int) -> Tensor:
    """Held-out text, evenly spread. -> [PROMPTS, tokens]"""
    last = len(stream) - tokens
    return torch.stack([stream[i * last // PROMPTS :][:tokens].long() for i in range(PROMPTS)])


def agreement(logits: Tensor, wanted: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """logits of the head and of the model [...,V], tokens drawn from the model [...] -> chance of acceptance [...]"""
    if temperature == 0:
        return (logits.argmax(-1) == tokens).float()
    q, p = ((x / temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0] for x in (logits, wanted))
    return (q - p).exp().clamp_max(1.0)


@torch.no_grad()
def accepted(
    model: Exported, weights: Weights, ids: Tensor, start: int, temperature: float, depth: int = DEPTH
) -> list[float]:
    """ids [B,T], of which those from position `start` on were sampled from the model at this temperature ->
    `depth` conditional acceptances of drafts for them. In float32."""
    head = MtpHead(model.shape, ids.shape[1], depth, torch.float32)
    ours, theirs = ({name: w.float() for name, w in group.items()} for group in (weights, model.weights))
    embedding = theirs["model.embed_tokens.weight"]
    hidden = head.network.hidden(theirs, ids)
    wanted = F.linear(hidden, embedding)  # [B,T,V], at p of token p+1
    first, last = (
        start - 2,
        head.entries - 1,
    )  # chains from the first token at `start` to the last that ends in the text
    whole, rates = torch.ones(len(ids), last - first), []
    for step, output in enumerate(head.chain(ours, theirs, ids, hidden)):
        logits = F.linear(output[:, first:last], embedding)
        p, tokens = wanted[:, first + 1 + step : last + 1 + step], ids[:, first + 2 + step : last + 2 + step]
        before, whole = float(whole.mean()), whole * agreement(logits, p, tokens, temperature)
        rates.append(float(whole.mean()) / max(before, 1e-9))
    return rates


@torch.no_grad()
def first_accepted(model: Exported, weights: Weights, ids: Tensor, temperature: float) -> float:
    """ids [B,T], any text -> the probability that the draft behind each of its tokens is accepted, on average."""
    head = MtpHead(model.shape, ids.shape[1], 1, torch.float32)
    ours, theirs = ({name: w.float() for name, w in group.items()} for group in (weights, model.weights))
    embedding = theirs["model.embed_tokens.weight"]
    hidden = head.network.hidden(theirs, ids)
    (output,) = head.chain(ours, theirs, ids, hidden)
    q, p = F.linear(output, embedding), F.linear(hidden[:, 1:], embedding)
    if temperature == 0:
        return float((q.argmax(-1) == p.argmax(-1)).float().mean())
    return float(torch.minimum((q / temperature).softmax(-1), (p / temperature).softmax(-1)).sum(-1).mean())


def measure_head(model: Exported, weights: Weights, stream: Tensor) -> list[dict[str, Any]]:
    """At each temperature, on continuations of the held-out `stream`, sampled from the model."""
    speaker, prompts, found = Speaker(model.folder), contexts(stream, CONTEXT_TOKENS), []
    files = contexts(stream, CONTEXT_TOKENS + CONTINUED_TOKENS)
    for temperature in TEMPERATURES:
        out = speaker.continued(prompts, CONTINUED_TOKENS, temperature, 1.0, top_p=1.0)
        kept = [i for i, row in enumerate(out.tolist()) if EOS not in row and not loops(row)]
        ids = torch.cat([prompts, out], 1)[kept]
        rates = accepted(model, weights, ids, CONTEXT_TOKENS, temperature)
        drafts = len(kept) * (CONTINUED_TOKENS + 1 - DEPTH)
        on_files = round(first_accepted(model, weights, files, temperature), 3)
        rounded = tuple(round(rate, 3) for rate in rates)
        found.append(asdict(Acceptance(temperature, len(kept), drafts, rounded, on_files)))
    return found
