"""build: makes the parts of an engine from its settings, and connects them."""

import logging
import os
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvcellar.engine.card import EngineCard, ModelCard, TextCard, VisionCard, default_sampling
from kvcellar.engine.core.device import DeviceThread, Inbox
from kvcellar.engine.core.drafting import Drafting
from kvcellar.engine.core.intake import ImageRules, Intake, PromptMemory
from kvcellar.engine.core.loop import Loop
from kvcellar.engine.core.runner import Runner
from kvcellar.engine.core.scheduler import SCORED, Chunks, Scheduler
from kvcellar.engine.core.seeing import Seeing
from kvcellar.engine.core.sequence_manager import SequenceManager
from kvcellar.engine.load.adapters import Adapters, open_adapters
from kvcellar.engine.load.allocate import Needs, allocated, divided, image_bytes
from kvcellar.engine.load.capacity import Capacity
from kvcellar.engine.load.machine import Threads, threads_of
from kvcellar.engine.load.open_model import Model, chosen
from kvcellar.engine.load.open_store import Source, open_events, open_store
from kvcellar.engine.load.recorded import record_steps, without_preparing
from kvcellar.engine.load.reserve import prove, scratch
from kvcellar.engine.load.restart import Restart, Restarts
from kvcellar.engine.load.settings import Settings, step_tokens_of, text_bytes_of
from kvcellar.engine.load.step_bytes import measures_of
from kvcellar.engine.models.described import Described
from kvcellar.engine.models.guest import TEXT_ONLY, Guest
from kvcellar.engine.models.input_limits import Limits
from kvcellar.engine.models.weights.config_file import NONE, pooling_of
from kvcellar.engine.models.weights.packing import Packed, pack_model
from kvcellar.engine.sample.draw import BY_TORCH, Draws
from kvcellar.engine.sample.grammars import Grammars
from kvcellar.engine.sample.native_draws import NativeDraws
from kvcellar.engine.speculate.chain import Key
from kvcellar.engine.speculate.cost import step_clock
from kvcellar.engine.speculate.draft_memory import DraftMemory
from kvcellar.engine.speculate.speculator import Speculator
from kvcellar.errors import BadRequest, forked_from
from kvcellar.kernels.arena import trim_heap
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.sampling import SampleKernel
from kvcellar.memory.attention.choose import named
from kvcellar.memory.memory import Memory
from kvcellar.memory.policy import distance
from kvcellar.memory.prefix.kv_events import KvEvents
from kvcellar.memory.prefixes import Shares
from kvcellar.memory.shapes import StoredAs
from kvcellar.progress import report
from kvcellar.text.conversation import Preamble

if TYPE_CHECKING:  # imports transformers
    from transformers import PreTrainedModel

    from kvcellar.engine.load.open_drafts import Drafts
    from kvcellar.engine.models.load import Loaded

log = logging.getLogger("kvcellar.engine")

LEAST_SCORED = 8  # rows
SCORES_BESIDE = 1 << 20  # scores of prompts that a step computes in which others decode: about 10 ms of a CPU
TORCH = os.getpid()  # the process that imported torch


@dataclass(frozen=True, slots=True)
class Built:
    """All parts of an engine."""

    settings: Settings
    base: Described  # without what a model of the library was created with
    loaded: Described
    guest: Guest
    packing: Packed | None
    threads: Threads
    memory: Memory
    capacity: Capacity
    intake: Intake
    loop: Loop
    runner: Runner
    adapters: Adapters
    preamble: Preamble
    drafts: "Drafts | None" = None
    draft_capacity: Capacity | None = None  # of the memory that drafts have, if they have one


def build(
    model: "str | Path | PreTrainedModel | None",
    settings: Settings,
    opened: ExitStack,
    thread: DeviceThread | None = None,
    *,
    torch_of: int = TORCH,
    restarts: bool = True,
    watched: bool = False,
) -> Built:
    """Load and test the model, size its memory, make the parts. Raises what `load`, `build_guest` and
    `resolve_capacity` raise. What has to be closed is entered into `opened` as soon as it is open; from the start of
    the loop on, the loop closes it. `torch_of`: the process that may have run torch before. `restarts`: a model that
    was loaded before may start from what its load has found. `watched`: it makes KV events, as others in this process
    listen to them."""
    settings = _in_a_fork(settings, torch_of)
    began = time.time_ns()
    threads = threads_of(settings.threads, torch.get_num_threads())
    if threads.count != torch.get_num_threads():
        torch.set_num_threads(threads.count)
    choice = chosen(model, settings)
    settings = choice.settings
    kept = Restarts(choice.model, settings, began, lambda: _tested(_loaded(choice.model, settings), settings).guest)
    base = (kept.read() if restarts else None) or _loaded(choice.model, settings)
    loaded, preamble = choice.created(base)
    made = _Made(base.guest, base.guest, base.packing) if isinstance(base, Restart) else _tested(base, settings)
    parts = base, loaded, preamble, made
    events = open_events(settings, watched=watched)
    if events is not None:
        opened.enter_context(closing(events))
    built = _assembled(settings, parts, kept, threads, thread or DeviceThread(), began, opened, events)
    trim_heap()
    return built


class _Made(NamedTuple):
    """A guest, the same with K/V stored as computed, and what was packed."""

    guest: Guest
    plain: Guest
    packing: Packed | None


def _loaded(model: Model, settings: Settings) -> "Loaded":
    if "transformers" not in sys.modules:
        report("importing transformers")
    from kvcellar.engine.models.load import load

    loaded = load(model, dtype=settings.dtype, device=settings.device, weights=settings.weights)
    if loaded.path is None:
        _check_as_it_is(loaded.model, settings)
    return loaded


def _tested(loaded: "Loaded", settings: Settings) -> _Made:
    """Pack a network, test it, and record its steps."""
    from kvcellar.engine.load.open_vision import open_vision  # imports transformers
    from kvcellar.engine.models.build_guest import build_guest

    packing = None
    if settings.pack and loaded.model.device.type == "cpu":
        report("packing weights")
        packing = pack_model(loaded.model)
    plain = build_guest(loaded.model, named(settings.attention))
    open_vision(plain, loaded)
    guest = _storing(plain, settings)
    record_steps(guest, settings)
    return _Made(guest, plain, packing)


def _in_a_fork(settings: Settings, torch_of: int) -> Settings:
    """Settings with one thread, if this process was forked after torch was imported.

    OpenMP threads that torch has started do not exist in a fork, and a computation that waits for them never ends;
    whether there were any cannot be determined afterwards.
    """
    if torch_of == os.getpid():
        return settings
    owner = forked_from(torch_of)
    if settings.threads not in (None, 1):
        raise BadRequest(
            f"threads is {settings.threads}, but torch belongs to {owner}, and runs in one thread here. Leave threads "
            f"out, or start the process with spawn instead of fork",
            "threads",
        )
    log.warning("torch belongs to %s; this engine runs in one thread. Start processes with spawn to use more", owner)
    return replace(settings, threads=1)


def _assembled(
    settings: Settings,
    parts: "tuple[Loaded | Restart, Described, Preamble, _Made]",
    kept: Restarts,
    threads: Threads,
    device: DeviceThread,
    began: int,
    opened: ExitStack,
    events: KvEvents | None,
) -> Built:
    """`began`: when the load began, in nanoseconds of the clock."""
    base, loaded, preamble, (guest, plain, packing) = parts
    default_sampling(loaded.defaults, vocab_size=loaded.limits.vocab_size, model=loaded.name)
    guest.draws = draws_on(guest.device)
    inbox, of_adapters = Inbox(device), {"most_bytes": settings.adapter_bytes, "default": settings.adapter}
    adapters = open_adapters(guest, plain, settings.adapters or {}, post=inbox.post, **of_adapters)
    context = _context(settings, loaded.limits)
    step_tokens = step_tokens_of(settings, guest.device.type)
    limits = {"context": context, "step_tokens": step_tokens, "max_sequences": settings.max_sequences}
    if isinstance(base, Restart):
        measures, drafts = base.measures, None
    else:
        measures = measures_of(guest, loaded.path, began=began, limits=limits, environment=os.environ)
        drafts = _drafts(base, guest, settings, context)
    deepest = drafts.deepest if drafts is not None else 0
    steps = {"context": context, "step_tokens": step_tokens, "deepest": deepest}
    needs = Needs.of(guest, context, scratch(guest, measures=measures, **steps), shifts=True)
    crossed = guest.vision is not None and guest.vision.sees is not None
    images = image_bytes(settings, guest.device, crossed=crossed) if guest.vision is not None else 0
    capacity, own = divided(needs, drafts.needs if drafts is not None else None, settings, guest.device, images)
    measures.keep()
    if not isinstance(base, Restart) and guest.not_seeing == TEXT_ONLY:  # others need their network to see, or say why
        kept.keep(base, guest, packing, measures)
    report("allocating memory")
    memory = allocated(guest.memory, capacity, context, guest.device)
    if guest.device.type == "cuda":
        prove(guest, memory, max_sequences=capacity.states.sequences, **steps)
    intake = replace(_intake(loaded, settings, context, adapters), images=_image_rules(guest, loaded, step_tokens))
    tiers = partial(open_store, settings=settings, post=inbox.post, opened=opened)
    part = own.bytes / (capacity.bytes + own.bytes) if own is not None else 0.0
    shares = Shares(settings.pin_share, settings.tenant_share)
    sequences: dict[Key, int | None] = {}
    open_own = partial(tiers, share=part)
    speculator, cache = _speculator(drafts, guest, (memory, sequences.get, own, shares, open_own))
    drafting = Drafting(speculator, context=context, memory=cache, sequences=sequences, draws=guest.draws)
    manager = SequenceManager(
        memory,
        drafting,
        in_parts=guest.no_partial_commit is None,
        spare=distance(needs.bytes_per_row),
        shares=shares,
        events=events,
        open_store=partial(tiers, source=source_of(loaded, guest), share=1 - part, events=events),
        seeing=None
        if guest.vision is None
        else Seeing(guest.vision, device=guest.device, most=images, solo=guest.mode == "solo"),
    )
    loop, runner = _running(guest, manager, settings, intake, threads, inbox, capacity)
    found = (settings, base, loaded, guest, packing, threads, memory, capacity, intake, loop, runner, adapters)
    return Built(*found, preamble=preamble, drafts=drafts, draft_capacity=own)


def _drafts(loaded: "Loaded", guest: Guest, settings: Settings, context: int) -> "Drafts | None":
    if settings.draft is None:
        return None
    from kvcellar.engine.load.open_drafts import open_drafts  # imports transformers

    return open_drafts(settings.draft, loaded, guest, settings, context)


def draws_on(device: torch.device) -> Draws:
    """How tokens are drawn from logits there."""
    if device.type != "cpu":
        return BY_TORCH
    try:
        return NativeDraws(SampleKernel(os.environ))
    except NotCompiled as error:
        log.warning("tokens are drawn by torch, which takes several times longer: %s", error)
        return BY_TORCH


def source_of(loaded: Described, guest: Guest) -> Source:
    """Of the bytes of the model's memory."""
    attends = "latents" if guest.computed_keys == "latents" else ""
    return Source(loaded.directories, weights=loaded.multiplied, attends=attends)


def _storing(guest: Guest, settings: Settings) -> Guest:
    """The guest with K/V stored as `kv_dtype` says."""
    if settings.kv_dtype is None:
        return guest
    if not guest.shape.groups:
        raise BadRequest("this model has no attention layers, so there are no keys and values to store", "kv_dtype")
    return guest.storing(StoredAs.parse(settings.kv_dtype), named(settings.attention))


def _intake(loaded: Described, settings: Settings, context: int, adapters: Adapters) -> Intake:
    vocab_size, tokenizer = loaded.limits.vocab_size, loaded.text.tokenizer if loaded.text is not None else None
    grammars = Grammars(tokenizer, loaded.without_text, vocab_size=vocab_size, end_ids=loaded.end_ids)
    grammars.prepare()
    text_bytes = text_bytes_of(settings, context)
    return Intake(
        prompts=PromptMemory(text_bytes - text_bytes // 2),
        context=context,
        vocab_size=vocab_size,
        end_ids=loaded.end_ids,
        padding=loaded.limits.padding,
        adapters=adapters,
        grammars=grammars,
    )


def _running(
    guest: Guest,
    manager: SequenceManager,
    settings: Settings,
    intake: Intake,
    threads: Threads,
    inbox: Inbox,
    capacity: Capacity,
) -> tuple[Loop, Runner]:
    """The parts that run on the device's thread."""
    memory, drafting, context = manager.memory, manager.drafting, intake.context
    layouts = {group.name: group.layout for group in memory.storage.groups}
    scheduler = Scheduler(
        manager,
        layouts,
        context=context,
        max_sequences=capacity.states.sequences,
        step_tokens=step_tokens_of(settings, guest.device.type),
        draft=drafting.propose,
        scored=_scored(capacity, intake),
        scored_beside=max(LEAST_SCORED, SCORES_BESIDE // intake.vocab_size),
        chunks=Chunks(settings.stream_gap),
    )
    loop = Loop(manager, scheduler, siblings=intake.siblings, context=context, threads=threads.count, inbox=inbox)
    runner = Runner(
        guest,
        memory,
        drafting,
        context=context,
        siblings=loop.siblings,
        fork=loop.fork,
        end=loop.end,
        feeds=manager.feeds,
        keep=manager.keep,
        seeing=manager.seeing,
    )
    return loop, runner


def _image_rules(guest: Guest, loaded: Described, step_tokens: int) -> ImageRules:
    if guest.vision is None:
        return ImageRules(f"{loaded.name} takes no images: {guest.not_seeing}")
    whole = 0
    if guest.whole:  # no prompt is longer than a window, beyond which tokens may see each other or not
        whole = min(group.layout.most_cells(step_tokens, 0) for group in guest.shape.groups)
    vision, how = guest.vision, {"ahead": guest.ahead, "step_tokens": step_tokens, "whole": whole}
    return ImageRules(in_front=vision.in_front, crossed=vision.sees is not None, **how)


def _scored(capacity: Capacity, intake: Intake) -> int:
    """How many rows of prompts a step has logits of, in float32 within half of the bytes of a step."""
    return max(LEAST_SCORED, min(SCORED, capacity.scratch // (2 * 4 * intake.vocab_size)))


def _speculator(
    drafts: "Drafts | None", guest: Guest, uses: tuple[Any, ...]
) -> tuple[Speculator | None, DraftMemory | None]:
    """With the memory of what drafts, if it has one. `uses`: see `Uses`."""
    if drafts is None:
        return None, None
    from kvcellar.engine.load.open_drafts import Uses

    drafter, cache = drafts.make(Uses(*uses))
    guests = [guest] if drafts.guest is None else [guest, drafts.guest]
    clock = without_preparing(step_clock(guest.device.type), guests)
    return Speculator(drafter, deepest=drafts.deepest, clock=clock), cache


def _check_as_it_is(network: "PreTrainedModel", settings: Settings) -> None:
    """Raise `BadRequest` if the settings contradict the dtype or device of a network that was given."""
    dtype, device = str(network.dtype).removeprefix("torch."), str(network.device)
    if settings.dtype not in ("auto", dtype):
        raise BadRequest(f"dtype is {settings.dtype}, but the network that was given is in {dtype}", "dtype")
    if settings.device not in ("auto", device, network.device.type):
        raise BadRequest(f"device is {settings.device}, but the network that was given is on {device}", "device")


def _context(settings: Settings, limits: Limits) -> int:
    most = limits.context
    if settings.context is None:
        return most
    if settings.context > most:
        reason = limits.context_reason
        made = f"made for {most} tokens" if reason is None else f"served up to {most} tokens: {reason}"
        raise BadRequest(f"context is {settings.context}; this model is {made}", "context")
    return settings.context


def card_of(built: Built) -> EngineCard:
    """Before the engine runs. Raises `ModelRefused` if the model has default sampling parameters that it cannot
    follow."""
    loaded, settings, memory = built.loaded, built.settings, built.memory
    context, cells = built.intake.context, built.capacity.cells
    return EngineCard(
        model=_model_card(built),
        text=TextCard(
            assets=loaded.text,
            why_not=loaded.without_text,
            context=context,
            text_bytes=text_bytes_of(settings, context) // 2,
            end_ids=loaded.end_ids,
            preamble=built.preamble,
            borders=memory.rows.capacity is not None or any(group.bounded for group in memory.storage.groups),
            replay_bytes=settings.replay_bytes,
        ),
        padding=built.intake.padding,
        cells={
            group.name: cells[group.name]
            for group in memory.storage.groups
            if group.layout.most_cells(context, 1) > cells[group.name]
        },
        vision=_vision_card(built),
        pooling=NONE if loaded.path is None else pooling_of(loaded.path),
        cache_bytes=_cache_bytes(built),
        max_waiting=settings.max_waiting,
    )


def _model_card(built: Built) -> ModelCard:
    guest, loaded, text, vocab_size = built.guest, built.loaded, built.loaded.text, built.intake.vocab_size
    return ModelCard(
        name=loaded.name,
        path=loaded.path,
        architecture=loaded.limits.architecture,
        context=built.intake.context,
        vocab_size=vocab_size,
        dtype=str(guest.dtype).removeprefix("torch."),
        device=str(guest.device),
        mode=guest.mode,
        has_text=text is not None,
        has_chat=text is not None and text.chat_template is not None,
        default_sampling=default_sampling(loaded.defaults, vocab_size=vocab_size, model=loaded.name),
        special_tokens=text.special if text is not None else {},
        chat_template=text.chat_template if text is not None else None,
    )


def _vision_card(built: Built) -> VisionCard:
    vision, loaded = built.guest.vision, built.base
    if vision is None or loaded.path is None:
        return VisionCard(why_not=built.intake.images.why_not)
    return VisionCard(placeholder=vision.placeholder, path=loaded.path)


def _cache_bytes(built: Built) -> int:
    """Cells, states, and the largest step, those of drafts included, and on a CPU what evicted prefixes may take."""
    drafts = built.draft_capacity.total if built.draft_capacity is not None else 0
    host = (built.settings.host_bytes or 0) if built.guest.device.type == "cpu" else 0
    return built.capacity.total + drafts + host
