"""latent: attention over what layers store of a token (MLA: a latent, and a part of the key behind it), without
expanding it to the keys and values of heads.

Where these are linear in what is stored, and the same matrices for all tokens, products with them can be moved:

    key of head h    = A_h c, t          # c the latent, t the part that all heads share
    value of head h  = B_h c
    score            = q . key = (A_h^T q) . c + q' . t      # a query is multiplied once, however many tokens it sees
    result           = sum of w B_h c = B_h (sum of w c)     # so is its result

`expansion.py` finds the matrices, and proves that they are all there is.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from kvcellar.kernels.heads import OwnHeads


class Latent(nn.Module):
    """How one attention module attends to latents. It is a child of the module, so that recorded steps can name it."""

    def __init__(self, queries: OwnHeads, values: OwnHeads) -> None:
        """`queries` have a layer A_h^T for each head, and the part of a query for t as their tail; `values` B_h."""
        super().__init__()
        self.queries, self.values = queries, values

    def forward(self, q: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """q [1,T,H,D] -> [1,T,H,Dv]. `attend` is a backend's `attend_latent`."""
        return self.values(attend(self.queries(q)))


@dataclass(frozen=True, slots=True)
class Binding:
    """The layer whose cells an attention module reads. `direct`: it attends to the stored keys themselves.

    A module that is not direct (MLA) computes its keys from stored planes, so it gets all cells that its rows may see;
    unless it has `latent`, with which it attends to these planes.
    """

    layer: int
    direct: bool
    latent: Latent | None = None

    @property
    def expands(self) -> bool:
        """Whether keys are computed from stored planes in each step."""
        return not self.direct and self.latent is None
