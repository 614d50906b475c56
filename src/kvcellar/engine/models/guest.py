"""guest: a transformers model that runs on our memory. `build_guest` makes it and tests it.

Always true:
  * `mode` is how it is run: "flat" (all sequences in one row, our attention) or "solo" (one sequence per forward, its
    own attention); `refused` is why a solo guest is not run flat;
  * `recording` runs flat steps where it is set, with the logits of the modules; `not_recorded` is why it is not set;
  * `vision` is how images enter its network, which gave its own logits with them; `not_seeing` is why they do not;
  * `expands` is why attention modules of a flat guest compute keys from what is stored (MLA) in each step, if they do;
  * `no_partial_commit` is why recurrent layers cannot keep a part of a feed: its `forward` refuses feeds that are
    revertible or have a checkpoint inside.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kvcellar.engine.models.adapters.adapted import AdaptedNetwork
from kvcellar.engine.models.adapters.adapter_rows import AdapterRows
from kvcellar.engine.models.input_limits import first_position
from kvcellar.engine.models.mixers import StateView
from kvcellar.engine.models.seam import Door, FlatDoor, Scorings, SoloDoor, cache_argument, opened
from kvcellar.engine.models.vision import StepImages, Vision
from kvcellar.engine.recording.recording import RecordedStep, Recording, Results
from kvcellar.engine.sample.draw import BY_TORCH
from kvcellar.errors import KvcellarError, ModelRefused, NotSupported
from kvcellar.memory.attention.choose import Chosen, choose
from kvcellar.memory.kv.history import Backend
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Plan
from kvcellar.memory.shapes import StoredAs

if TYPE_CHECKING:  # imports transformers
    from transformers import PreTrainedModel

    from kvcellar.engine.models.shape import Shape

Mode = Literal["flat", "solo"]
ComputedKeys = Literal["", "latents", "expanded"]
MODEL_ERRORS = (  # what the code of a model may raise under our doors; it refuses one mode, and is reported
    KvcellarError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError,
    ImportError, OSError,
)  # fmt: skip
Ints = Sequence[int] | Tensor
TEXT_ONLY = "its network reads text only"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the self-test: the largest difference of logits, relative to max(1, max|logit|), and the bound."""

    difference: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.bound

    def __str__(self) -> str:
        """The reason where it did not pass."""
        return f"its logits differ by {self.difference:.1e} from its own forward ({self.bound:.0e} is allowed)"


class Guest:
    """Runs one model. Call `forward` between `Memory.begin` and `commit`."""

    def __init__(
        self,
        model: "PreTrainedModel",
        shape: "Shape",
        mode: Mode,
        chosen: Mapping[str, Chosen],
        *,
        offsets: bool = True,
        refused: str | None = None,
    ) -> None:
        self._model, self.shape, self.mode, self.chosen, self.refused = model, shape, mode, dict(chosen), refused
        self._offsets = offsets
        self.verdict: Verdict | None = None
        self.no_partial_commit: str | None = None
        self.expands: str | None = None
        self.recording: Recording | None = None
        self.not_recorded: str | None = "it was not recorded"
        self.draws = BY_TORCH
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self.cache_name = cache_argument(self._accepts)
        self._first = first_position(model)
        self._scorings: Scorings = {}
        self.vision: Vision | None = None
        self.not_seeing = TEXT_ONLY  # where `vision` is None
        self.ahead = False  # tokens of an image see each other both ways
        self.whole = False  # all tokens of a prompt do
        self.adapted = AdaptedNetwork(model)

    @property
    def model(self) -> "PreTrainedModel":
        """Its network."""
        return self._model

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def past_is_counted(self) -> bool:
        """Whether `past_length` is the real one, by row."""
        return self._offsets

    @property
    def computed_keys(self) -> ComputedKeys:
        """What modules attend to that compute keys from what is stored: that itself, or keys that they expand in each
        step; "": there are no such modules."""
        bindings = self.shape.bindings.values()
        if any(binding.expands for binding in bindings):
            return "expanded"
        return "latents" if any(binding.latent is not None for binding in bindings) else ""

    @property
    def backends(self) -> dict[str, Backend]:
        return {name: chosen.backend for name, chosen in self.chosen.items()}

    def memory(
        self, cells: Mapping[str, int], *, rows: int = 0, limits: int | None = None, max_bytes: int | None = None
    ) -> Memory:
        """A memory of this model's shape. Parameters are those of `Memory`; only recurrent layers need `rows`."""
        return Memory(
            self.shape.groups,
            cells=cells,
            dtype=self.dtype,
            device=self.device,
            backend=self.backends,
            recurrent=self.shape.recurrent,
            rows=rows,
            limits=limits,
            max_bytes=max_bytes,
        )

    def storing(self, stored: StoredAs, backends: Sequence[Backend]) -> "Guest":
        """The same model, its K/V stored as `stored` from now on. Raises `NoBackend` if no backend can read that."""
        twin = copy(self)
        twin.shape = self.shape.storing(stored)
        twin.chosen = backends_for(twin.shape, backends)
        return twin

    def past_length(self, positions: Tensor) -> int | Tensor:
        """What the cache reports as the number of earlier tokens, for rows at `positions` [T].

        Models add a range over their rows to it, which gives the real positions. Code that needs a number gets 0.
        """
        return positions - torch.arange(positions.shape[0], device=positions.device) if self._offsets else 0

    @torch.inference_mode()
    def forward(self, memory: Memory, plan: Plan, ids: Ints, want: Ints, images: StepImages | None = None) -> Tensor:
        """Run the open step of `memory`: ids [T] -> logits [len(want), V] of the rows in `want`.

        Raises `NotSupported` for a feed of which a part may be kept, if `no_partial_commit` is set.
        """
        rows = memory.tables.fill("wanted rows", want)
        if (results := self._recorded(memory, plan, ids, rows, images)) is not None:
            return results.logits
        return self._forward(memory, plan, ids, rows, want if "logits_to_keep" in self._accepts else None, images)

    def _recorded(
        self, memory: Memory, plan: Plan, ids: Ints, want: Tensor, images: StepImages | None, *, hidden: bool = False
    ) -> Results | None:
        """The results of a recorded forward; None if modules have to run the step."""
        if self.recording is None or plan.look_ahead or (images is not None and images.rows is not None):
            return None
        self._check(plan)
        head = want if "logits_to_keep" in self._accepts else None
        door, tokens, positions = self._flat(memory, plan, ids, head, images)
        adapters = self.adapted.changes if door.adapted is not None else 0
        with opened(door):
            step = RecordedStep(memory, plan, door, tokens, positions, want, adapters)
            return self.recording.run(step, hidden=hidden)

    def _check(self, plan: Plan) -> None:
        if self.no_partial_commit is not None and any(feed.in_parts for feed in plan.feeds):
            raise NotSupported(f"a part of a feed cannot be kept, nor be a checkpoint: {self.no_partial_commit}")

    def _flat(
        self, memory: Memory, plan: Plan, ids: Ints, head: Ints | None, images: StepImages | None
    ) -> tuple[FlatDoor, Tensor, Tensor]:
        """The door of a flat step, ids [T], and the positions that the network gets, [T] or [axes,T]."""
        tokens, positions = memory.tables.fill("ids", ids), memory.tables.fill("positions", plan.positions)
        door = FlatDoor(memory, plan, self.past_length(positions), self.shape.bindings, self._scorings)
        rows = images.rows if images is not None else None
        if self.shape.crossing or (rows is not None and rows.seen):
            door.seen = rows.seen if rows is not None else ()
        self._adapt(door, plan, lambda: door.mixing.view, head)
        return door, tokens, self._placed(positions, images)

    def _placed(self, positions: Tensor, images: StepImages | None) -> Tensor:
        """The positions that the network gets, where the plan has `positions`."""
        if images is None or images.positions is None:
            return positions
        return images.positions.flatten() if len(images.positions) == 1 else images.positions

    def _forward(
        self,
        memory: Memory,
        plan: Plan,
        ids: Ints,
        want: Tensor | None,
        head: Ints | None,
        images: StepImages | None,
        seeing: bool = False,
    ) -> Tensor:
        """Logits of the rows in `want`, or of all that the output head computes. `head` are the rows that it reads, if
        not all. `seeing`: the network has the features of the rows."""
        self._check(plan)
        if images is not None and images.rows is not None and not seeing:
            assert self.vision is not None
            with self.vision.seeing(images.rows, opening=self.ahead and self.mode == "solo"):
                return self._forward(memory, plan, ids, want, head, images, seeing=True)
        if self.mode == "flat":
            return self.run(*self._flat(memory, plan, ids, head, images), want)
        rows = memory.tables.fill("ids", ids), memory.tables.fill("positions", plan.positions)
        from kvcellar.engine.models.registered import fresh_layers  # imports transformers

        opened_masks = self.vision is not None and self.vision.first is not None
        before = None if images is None else images.before
        door = SoloDoor(memory, plan, fresh_layers(self.model), before, looks_ahead=opened_masks)
        self._adapt(door, plan, lambda: None, head)
        logits = self.run(door, rows[0], self._placed(rows[1], images), want)
        door.put()
        return logits

    def _adapt(self, door: Door, plan: Plan, mixer: Callable[[], StateView | None], head: Ints | None) -> None:
        """Let the rows of sequences with an adapter have it. `mixer` returns the view of the one that is running."""
        if self.adapted.adapters and self.adapted.begin(plan):
            wanted = head.tolist() if isinstance(head, Tensor) else head
            door.adapted = AdapterRows(plan, mixer, self.device, wanted)

    @torch.inference_mode()
    def forward_with_hidden(
        self, memory: Memory, plan: Plan, ids: Ints, want: Ints, images: StepImages | None = None
    ) -> tuple[Tensor, Tensor]:
        """`forward`, with the hidden states [T,hidden] of all rows that the output head would read: those after the
        last layer and the final norm. Raises `ModelRefused` if the network does not call one output head once."""
        rows = memory.tables.fill("wanted rows", want)
        if (results := self._recorded(memory, plan, ids, rows, images, hidden=True)) is not None:
            assert results.hidden is not None
            return results.logits, results.hidden
        head = self.model.get_output_embeddings()
        read: list[Tensor] = []  # [1,T,hidden]

        def only_wanted(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            read.append(args[0])
            return (args[0].index_select(1, rows),)

        with ExitStack() as hooked:
            if head is not None:
                hooked.callback(head.register_forward_pre_hook(only_wanted).remove)
            logits = self._forward(memory, plan, ids, None, want, images)
        if len(read) != 1:
            raise ModelRefused(
                f"{type(self.model).__name__} calls its output head {len(read)} times in a forward, not once, so its "
                f"hidden states are unknown"
            )
        return logits, read[0][0]

    def run(self, door: Door, ids: Tensor, positions: Tensor, want: Tensor | None) -> Tensor:
        """Call the network with an open door: logits of the rows `want`, or of all that its head computes."""
        from kvcellar.engine.models.registered import opened_cache  # imports transformers

        with opened_cache(door) as cache:
            inputs: dict[str, Any] = {"input_ids": ids[None], self.cache_name: cache, "use_cache": True}
            if "position_ids" in self._accepts:
                inputs["position_ids"] = (positions[None] if positions.dim() == 1 else positions[:, None]) + self._first
            if want is None:
                return self.model(**inputs).logits[0]
            if "logits_to_keep" in self._accepts:
                return self.model(**inputs, logits_to_keep=want).logits[0]
            return self.model(**inputs).logits[0].index_select(0, want)


def backends_for(shape: "Shape", backends: Sequence[Backend]) -> dict[str, Chosen]:
    """The chosen backend of each group. Raises `NoBackend`."""
    return {name: choose(spec, backends) for name, spec in shape.specs.items()}
