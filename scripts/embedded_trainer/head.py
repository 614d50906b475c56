"""The MTP head: one more layer that predicts, from a hidden state of the model and the next token, the token after it.

Always true:
  * `MtpHead` computes what transformers' `MtpLayer` computes from the same weights; exporting checks it;
  * the weights have the names of transformers' `MtpModel` with one layer, behind `mtp.`; the embedding and the output
    head are the model's, and no gradient reaches the model.

Entry p joins the embedding of token p+1 with hidden state p, and its output predicts token p+2. The same layer drafts
further: the output of entry p stands in for hidden state p+1, joined with token p+2, and so on. Such a chain sees the
entries [0,p], which were made from the model's own hidden states, and its own.

Shapes: as in network.py; S chained steps, N entries.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .network import Network, Rotation, Shape, Weights, layer_shapes

AT = "mtp.layers.0"
BLOCK = f"{AT}.mtp_block"


def head_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name -> size of every weight of the head."""
    e = shape.width
    sizes: dict[str, tuple[int, ...]] = {f"{AT}.{norm}.weight": (e,) for norm in ("enorm", "hnorm", "post_norm")}
    sizes[f"{AT}.eh_proj.weight"] = (e, 2 * e)
    return sizes | {f"{BLOCK}.{name}": size for name, size in layer_shapes(shape, "F").items()}


def head_config() -> dict[str, Any]:
    """What config.json has in addition where a head is exported."""
    return {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}


def initial_head(shape: Shape, model: Weights, seed: int) -> Weights:
    """Float32 weights to begin with: the layer and the last norm are the model's last ones, where its last layer has
    full attention; the hidden state is passed on, and a little of the embedding."""
    generator = torch.Generator().manual_seed(seed)
    dialect, e, weights = shape.dialect, shape.width, {}
    last = f"model.layers.{len(shape.layers) - 1}"
    for name, size in head_shapes(shape).items():
        theirs = name.replace(BLOCK, last)
        if theirs in model and shape.layers[-1] == "F":
            weights[name] = model[theirs].float()
        elif len(size) == 1:
            weights[name] = torch.zeros(size) if dialect.norm_adds_one else torch.ones(size)
        else:
            weights[name] = 0.02 * torch.randn(size, generator=generator)
    weights[f"{AT}.eh_proj.weight"][:, e:] = torch.eye(e)
    weights[f"{AT}.post_norm.weight"] = model[f"{dialect.last_norm}.weight"].float()
    return weights


class SoftSurprise(torch.autograd.Function):
    """Mean of -sum(wanted * log softmax): logits [N,V], wanted [N,V] -> []. Its gradient has the logits' dtype."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor) -> Tensor:
        logs = logits.float().log_softmax(-1)
        loss = -(wanted * logs).sum(-1).mean()
        ctx.save_for_backward(logs.exp_().sub_(wanted))
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (excess,) = ctx.saved_tensors
        return (excess * (grads[0] / len(excess))).to(ctx.dtype), None


class MtpHead:
    """The forward pass of a chain of `steps` over windows of one length, in one dtype."""

    def __init__(self, shape: Shape, length: int, steps: int, dtype: torch.dtype) -> None:
        self.network, self.steps = Network(shape, length, dtype), steps
        self.entries = length - steps  # the last whose whole chain ends in the window is the last entry
        whole = self.network.rotations["F"]
        self.rotations = [
            Rotation(whole.cos[step : step + self.entries], whole.sin[step : step + self.entries])
            for step in range(steps)
        ]
        n = self.entries
        self.barrier = torch.full((n, n), -torch.inf, dtype=dtype).triu(1)  # [N,N]

    def chain(self, weights: Weights, model: Weights, ids: Tensor, hidden: Tensor) -> list[Tensor]:
        """ids [B,T], hidden [B,T,E] -> of each step the outputs [B,N,E]; step s of entry p predicts token p+2+s."""
        embedded = self.network.embed(model, ids)
        n = self.entries
        before, seen, outputs = hidden[:, :n], [], []
        for step in range(self.steps):
            before = self._step(weights, step, embedded[:, step + 1 : step + 1 + n], before, seen)
            outputs.append(before)
        return outputs

    def _step(
        self, weights: Weights, step: int, token: Tensor, before: Tensor, seen: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """token and before [B,N,E] -> [B,N,E]; adds the keys and values of this step to `seen`."""
        norm = self.network.norm
        joined = [norm(token, weights[f"{AT}.enorm.weight"]), norm(before, weights[f"{AT}.hnorm.weight"])]
        x = F.linear(torch.cat(joined, -1), weights[f"{AT}.eh_proj.weight"])

        def mix(y: Tensor) -> Tensor:
            at = f"{BLOCK}.self_attn"
            q, k, v = self.network.projected(weights, at, y, self.rotations[step])
            seen.append((k, v))
            return self.network.merged(weights, at, y, self._attend(q, seen))

        return norm(self.network.block(weights, BLOCK, x, mix), weights[f"{AT}.post_norm.weight"])

    def _attend(self, q: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """q [B,G,R,N,D] -> [B,G,R,N,D]: each entry sees the first step's entries up to its own, and of each later step
        its own alone."""
        b, g, r, n, d = q.shape
        (first_k, first_v), *later = seen
        scores = (q.reshape(b, g, r * n, d) @ first_k.transpose(-1, -2)).view(b, g, r, n, n) + self.barrier
        own = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in later]  # [B,G,R,N,1]
        weights = torch.cat([scores, *own], -1).softmax(-1)
        out = (weights[..., :n].reshape(b, g, r * n, n) @ first_v).view(b, g, r, n, d)
        for i, (_, v) in enumerate(later):
            out = out + weights[..., n + i, None] * v[:, :, None]
        return out

    def losses(self, weights: Weights, model: Weights, ids: Tensor) -> list[Tensor]:
        """ids [B,T] -> of each step the mean nats between the model's distribution and the head's, plus the model's
        own entropy."""
        embedding, n = model["model.embed_tokens.weight"], self.entries
        with torch.no_grad():
            hidden = self.network.hidden(model, ids)
            wanted = F.linear(hidden[:, 1:], embedding).float().softmax(-1)  # [B,T-1,V]: of token p+2 at p
        outputs = self.chain(weights, model, ids, hidden)
        return [
            SoftSurprise.apply(F.linear(out, embedding).flatten(0, 1), wanted[:, step : step + n].flatten(0, 1))
            for step, out in enumerate(outputs)
        ]
