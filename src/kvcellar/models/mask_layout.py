"""mask_layout: the layout (causal, sliding, chunked) that a mask rule of transformers implements.

A rule is evaluated at the positions where a wrong candidate would differ, never as a whole mask.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvcellar.cache.layouts import Causal, Chunked, Sliding
from kvcellar.errors import ModelRefused
from kvcellar.layout import Layout

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # transformers' mask_function(batch, head, query, key)


def recognise(rule: Rule, local_size: int | None, context: int, device: torch.device) -> Layout:
    """The layout that equals `rule` at every tested position. Raises `ModelRefused` if there is none."""
    candidates: list[Layout] = [Causal()]
    if local_size:
        candidates += [Sliding(local_size), Chunked(local_size)]
    left = candidates
    zero = torch.zeros((), dtype=torch.long, device=device)
    for pos in _positions(local_size, context):
        keys = _keys(pos, candidates)
        visible = rule(zero, zero, torch.tensor(pos, device=device), torch.tensor(keys, device=device))
        seen = torch.as_tensor(visible, device=device).expand(len(keys)).tolist()
        left = [layout for layout in left if seen == [layout.lowest(pos) <= key <= pos for key in keys]]
        if not left:
            shown = [key for key, yes in zip(keys, seen, strict=True) if yes]
            raise ModelRefused(
                "one of its attention masks is neither causal, nor sliding, nor chunked: "
                f"with a local size of {local_size}, position {pos} sees {shown[:8]}{' ...' if len(shown) > 8 else ''}"
            )
    return left[0]


def _positions(local_size: int | None, context: int) -> list[int]:
    """Where candidates differ: the first positions, around multiples of the local size, powers of two, the last."""
    tested = set(range(16)) | {2**i for i in range(4, 24)} | {context - 1}
    if local_size:
        tested |= {m * local_size + d for m in (1, 2, 3) for d in (-2, -1, 0, 1)}
    return sorted(pos for pos in tested if 0 <= pos < context)


def _keys(pos: int, candidates: list[Layout]) -> list[int]:
    """Every key if there are few; else the first, the last, those around each candidate's limit, and some between."""
    if pos < 1024:
        return list(range(pos + 3))
    tested = {*range(64), *range(pos - 256, pos + 3), *(pos * i // 64 for i in range(64))}
    for layout in candidates:
        tested |= {layout.lowest(pos) + d for d in (-2, -1, 0, 1)}
    return sorted(key for key in tested if key >= 0)
