"""build: where the rooms are wired together. From settings to an engine that can be started."""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvcellar.attention.choose import named
from kvcellar.cache.group import Group
from kvcellar.cache.memory import Memory
from kvcellar.engine.codec import TextCodec
from kvcellar.engine.cpus import Threads, threads_of
from kvcellar.engine.depends import measures_of
from kvcellar.engine.loop import Loop
from kvcellar.engine.manager import SequenceManager
from kvcellar.engine.measures import Measures
from kvcellar.engine.prompts import Prompts
from kvcellar.engine.request import Completion, Request
from kvcellar.engine.reserve import check_room, prove, scratch
from kvcellar.engine.runner import Runner
from kvcellar.engine.scheduler import Scheduler
from kvcellar.engine.settings import (
    SHARE_OF_FREE,
    Capacity,
    Demand,
    Settings,
    free_cpu_bytes,
    resolve_capacity,
    text_bytes_of,
)
from kvcellar.errors import BadRequest, CapacityTooSmall, ModelRefused, PromptTooLong
from kvcellar.kernels.packed import Packing, pack
from kvcellar.models.build_guest import build_guest
from kvcellar.models.guest import Guest
from kvcellar.models.input_limits import context_of, context_reason, embedding_rows, padding_token
from kvcellar.models.load import Loaded, load
from kvcellar.policy import trim
from kvcellar.process import Origin
from kvcellar.progress import report
from kvcellar.sample.params import SamplingParams, check_ids
from kvcellar.sample.sampler import Sampler
from kvcellar.shapes import StoredAs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


log = logging.getLogger("kvcellar.engine")

LOADED = Origin()  # of torch, in this process


@dataclass(frozen=True, slots=True)
class Built:
    """Everything an engine consists of."""

    settings: Settings
    loaded: Loaded
    guest: Guest
    packing: Packing | None
    threads: Threads
    memory: Memory
    capacity: Capacity
    context: int
    vocab_size: int
    padding: int | None  # the token that is no text, in models that pass over it when they count positions
    codec: TextCodec
    prompts: Prompts
    loop: Loop
    runner: Runner

    def completion(self, request: Request, seed: int) -> Completion:
        """The completion of `request` that reads its prompt."""
        sampler = Sampler(
            request.params,
            seed=seed,
            index=0,
            prompt_ids=request.prompt,
            vocab_size=self.vocab_size,
            end_ids=self.loaded.end_ids,
            never_ids=frozenset() if self.padding is None else frozenset({self.padding}),
        )
        return self._completion(request, sampler, request.prompt)

    def twins(self, completion: Completion) -> list[Completion]:
        """The other completions of a request whose prompt `completion` has read; none if they are there already."""
        missing = range(len(completion.request.completions), completion.request.params.n)
        return [
            self._completion(completion.request, completion.sampler.fork(choice), completion.tokens)
            for choice in missing
        ]

    def _completion(self, request: Request, sampler: Sampler, tokens: Sequence[int]) -> Completion:
        return Completion(request, sampler, self.codec.output(request.stops, request.prompt), list(tokens))

    def check_text(self, prompt: Sequence[int]) -> None:
        """Raise `BadRequest` for a prompt with padding in it, where that is no text.

        Such a model counts positions without it as long as it reads a text at once, and with it as soon as it goes on
        from a cache: there is no numbering that would be right.
        """
        if self.padding is not None and self.padding in prompt:
            raise BadRequest(
                f"prompt has token {self.padding} at {prompt.index(self.padding)}, which is padding: this model does "
                f"not count it as a position, so it cannot be part of a text. Leave it out",
                "prompt",
            )

    def check_fits(self, tokens: int) -> None:
        """Raise `PromptTooLong` if a prompt of so many tokens could never be in memory, even alone."""
        for group in self.memory.storage.groups:
            most = self.capacity.cells[group.name]
            if group.layout.most_cells(tokens, 1) > most:
                held = f"the memory for {group.name} layers"
                raise PromptTooLong(tokens, most, held, hint="Or raise cache_bytes.")

    def check_answers(self, n: int) -> None:
        """Raise `BadRequest` if so many answers could never be written at once."""
        most, asked = self.capacity.states.sequences, self.settings.max_sequences
        if n > most:
            hint = "Or raise max_sequences."
            if most < asked:
                hint = f"Or raise cache_bytes: max_sequences is {asked}, but there are no more rows of recurrent state."
            raise BadRequest(f"n is {n}; at most {most} answers to one request are generated at once", "n", hint=hint)


def build(model: "str | Path | PreTrainedModel | None", settings: Settings) -> Built:
    """Load, prove, size, wire. Raises what `load`, `build_guest` and `resolve_capacity` raise."""
    settings = _in_a_fork(settings)
    began = time.time_ns()
    threads = threads_of(settings.threads, torch.get_num_threads())
    if threads.count != torch.get_num_threads():
        torch.set_num_threads(threads.count)
    loaded = load(model, dtype=settings.dtype, device=settings.device)
    if loaded.path is None:
        _check_as_it_is(loaded.model, settings)
    packing = _packing(loaded, settings)
    guest = build_guest(loaded.model, named(settings.attention))
    return _wired(loaded, packing, guest, settings, threads, began)


def _in_a_fork(settings: Settings) -> Settings:
    """One thread, where torch was loaded before this process was forked.

    Threads of OpenMP that torch has started do not come along into a fork, and a computation that waits for them never
    ends; whether there were any cannot be found out afterwards.
    """
    if LOADED.here:
        return settings
    if settings.threads not in (None, 1):
        raise BadRequest(
            f"threads is {settings.threads}, but torch belongs to {LOADED}, and runs in one thread here. Leave threads "
            f"out, or start the process with spawn instead of fork",
            "threads",
        )
    log.warning("torch belongs to %s; this engine runs in one thread. Start processes with spawn to use more", LOADED)
    return replace(settings, threads=1)


def _packing(loaded: Loaded, settings: Settings) -> Packing | None:
    if not settings.pack or loaded.model.device.type != "cpu":
        return None
    report("packing weights")
    return pack(loaded.model)


def _wired(
    loaded: Loaded, packing: Packing | None, guest: Guest, settings: Settings, threads: Threads, began: int
) -> Built:
    """`began`: when the load began, in nanoseconds of the clock."""
    network = loaded.model
    _check_defaults(loaded)
    if settings.kv_dtype is not None:
        if not guest.shape.groups:
            raise BadRequest("this model has no attention layers, so there are no keys and values to store", "kv_dtype")
        guest = guest.storing(StoredAs.parse(settings.kv_dtype), named(settings.attention))
    context = _context(settings, network)
    limits = {"context": context, "step_tokens": settings.step_tokens, "max_sequences": settings.max_sequences}
    measures = measures_of(guest, loaded.path, began=began, limits=limits, environment=os.environ)
    capacity = _capacity(guest, settings, context, measures)
    measures.keep()
    report("allocating memory")
    memory = _memory(guest, capacity, context)
    sequences = capacity.states.sequences
    if guest.device.type == "cuda":
        prove(guest, memory, context=context, max_sequences=sequences, step_tokens=settings.step_tokens)
    states, text_bytes = capacity.states, text_bytes_of(settings, context)
    manager = SequenceManager(
        memory, resting=states.captures if states.rows else None, checkpoint_positions=states.most_checkpoints
    )
    layouts = {group.name: group.layout for group in memory.storage.groups}
    scheduler = Scheduler(manager, layouts, context=context, max_sequences=sequences, step_tokens=settings.step_tokens)
    loop = Loop(manager, scheduler, context=context, threads=threads.count)
    runner = Runner(
        guest,
        memory,
        context=context,
        twins=lambda completion: built.twins(completion),
        split=loop.split,
        ended=loop.ended,
        trim=partial(trim, memory.rows, most=states.captures, spare=states.sequences),
    )
    built = Built(
        settings=settings,
        loaded=loaded,
        guest=guest,
        packing=packing,
        threads=threads,
        memory=memory,
        capacity=capacity,
        context=context,
        vocab_size=_vocabulary(network),
        padding=padding_token(network),
        codec=TextCodec(loaded.text, loaded.without_text, loaded.end_ids, context=context, text_bytes=text_bytes // 2),
        prompts=Prompts(text_bytes - text_bytes // 2),
        loop=loop,
        runner=runner,
    )
    return built


def _check_as_it_is(network: "PreTrainedModel", settings: Settings) -> None:
    """A network that was built elsewhere stays in the type and the place that it has."""
    dtype, device = str(network.dtype).removeprefix("torch."), str(network.device)
    if settings.dtype not in ("auto", dtype):
        raise BadRequest(f"dtype is {settings.dtype}, but the network that was given is in {dtype}", "dtype")
    if settings.device not in ("auto", device, network.device.type):
        raise BadRequest(f"device is {settings.device}, but the network that was given is on {device}", "device")


def _memory(guest: Guest, capacity: Capacity, context: int) -> Memory:
    try:
        memory = guest.memory(
            capacity.cells,
            rows=capacity.states.rows,
            limits=context,
            max_bytes=capacity.budget,
        )
    except (RuntimeError, MemoryError) as error:  # torch's allocators raise either
        raise CapacityTooSmall(
            f"{capacity.bytes} bytes for {capacity.holds} ({capacity.because}) cannot be had on "
            f"{guest.device}: {str(error).splitlines()[0]}. Lower cache_bytes."
        ) from error
    memory.storage.leave_room(capacity.scratch)
    return memory


def _context(settings: Settings, network: "PreTrainedModel") -> int:
    most = context_of(network)
    if settings.context is None:
        return most
    if settings.context > most:
        reason = context_reason(network)
        made = f"made for {most} tokens" if reason is None else f"served up to {most} tokens: {reason}"
        raise BadRequest(f"context is {settings.context}; this model is {made}", "context")
    return settings.context


def _demand(guest: Guest, group: Group) -> Demand:
    size, backend = guest.dtype.itemsize, guest.backends[group.name]
    return Demand(
        group.name,
        group.layout,
        bytes=lambda cells: group.bytes(cells, size, backend),
        staging=lambda cells: group.staging(cells, size),
        undo=group.undo(size) if group.no_shift is None else 0,
    )


def _capacity(guest: Guest, settings: Settings, context: int, measures: Measures) -> Capacity:
    kind = guest.device.type
    free = torch.cuda.mem_get_info(guest.device)[0] if kind == "cuda" else free_cpu_bytes()
    limits = {"context": context, "step_tokens": settings.step_tokens}
    if settings.cache_bytes is not None:
        budget, because = settings.cache_bytes, "cache_bytes"
    else:
        budget, because = int(free * SHARE_OF_FREE[kind]), f"{SHARE_OF_FREE[kind]:.0%} of the memory that is free"
    capacity = resolve_capacity(
        [_demand(guest, group) for group in guest.shape.groups],
        budget=budget,
        because=because,
        scratch=scratch(guest, measures=measures, **limits),
        max_sequences=settings.max_sequences,
        bytes_per_row=recurrent.bytes if (recurrent := guest.shape.recurrent) is not None else 0,
        **limits,
    )
    check_room(capacity, guest.device, free)
    return capacity


def _check_defaults(loaded: Loaded) -> None:
    """Raise `ModelRefused` if the generation config names tokens that the model does not have: each request would."""
    try:
        check_ids(SamplingParams(**loaded.defaults), _vocabulary(loaded.model))
    except BadRequest as error:
        raise ModelRefused(f"the generation config of {loaded.name} cannot be followed: {error}") from error


def _vocabulary(network: "PreTrainedModel") -> int:
    """Ids that can be read: rows of the embedding, and no more than the config's vocabulary."""
    rows = embedding_rows(network)
    named = getattr(network.config.get_text_config(decoder=True), "vocab_size", None)
    return min(rows, named) if isinstance(named, int) else rows
