"""What a step takes is measured before cells are counted, and a memory that leaves no room for it is refused."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvcellar.engine.load import allocate, reserve
from kvcellar.engine.load.reserve import ROWS, _draw, continued, peak, prove, scratch, uncollected
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.sample.draw import draw
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.errors import BadRequest, CapacityTooSmall
from kvcellar.frontend.engine import Engine
from kvcellar.kernels.packed import pack
from kvcellar.memory.attention import buckets
from kvcellar.memory.attention.choose import named
from kvcellar.memory.attention.reference import Reference
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.kv.history import Backend
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from kvcellar.sampling_params import SamplingParams
from tests.engine.mixes import bytes_for, small_engine
from tests.laws.watch import Allocations
from tests.zoo import ARCHS

pytestmark = pytest.mark.measures

CPU = torch.device("cpu")


def network() -> PreTrainedModel:
    return ARCHS["llama"].build(max_position_embeddings=512)


def guest(attention: str = "sdpa") -> Guest:
    return build_guest(network(), named(attention))


@settings(derandomize=True, deadline=None)
@given(*[st.integers(0, 50)] * 4, st.integers(1, 900), st.integers(1, 900))
def test_bytes_that_grow_along_straight_lines_are_continued_exactly(a, b, c, d, x, y) -> None:
    def measure(rows: int, remembered: int) -> int:
        assert rows <= 160, "it was measured at full size"
        assert remembered <= 48, "it was measured at full size"
        return a + b * rows + c * remembered + d * rows * remembered

    assert continued(measure, (x, y), (ROWS, (16, 48))) == a + b * x + c * y + d * x * y


def choice() -> Sampler:
    params = SamplingParams(top_p=0.5, repetition_penalty=1.5, logprobs=20)
    return Sampler(params, seed=1, index=0, prompt_ids=range(20), vocab_size=101, end_ids=frozenset())


def test_the_meter_counts_what_is_there_at_once_and_nothing_that_was_there_before() -> None:
    before = torch.zeros(1000)
    with peak(CPU) as meter:
        for _ in range(5):
            made = before + 1  # 4 000 bytes, and the one before is still there while it is made
        made.add_(1)
        before[:10].mul_(2)
        del made
        torch.ones(500)
    assert meter.bytes == 8000


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "mamba2", "zaya"])
def test_a_reserved_step_that_could_be_kept_in_part_is_measured_with_all_that_it_holds(name: str) -> None:
    model = build_guest(ARCHS[name].build(), named("sdpa"))
    memory = model.memory({group.name: 64 for group in model.shape.groups}, rows=3)

    def tried(*, revertible: bool, reserve: bool) -> tuple[int, int]:
        """Its peak, and the bytes that are given back when it ends."""
        batch = Batch(tuple(Feed(seq, Span(0, n), revertible=revertible) for seq, n in enumerate((9, 9, 4))))
        with peak(CPU) as meter, Allocations() as made:
            plan = memory.begin(batch, reserve=reserve)
            model.forward(memory, plan, torch.zeros(batch.tokens, dtype=torch.long), torch.arange(3))
            before = made.now
            memory.abandon()
            return meter.bytes, before - made.now

    plain, held_by_plain = tried(revertible=False, reserve=True)
    reserved, held = tried(revertible=True, reserve=True)
    real, held_by_real = tried(revertible=True, reserve=False)
    assert held >= held_by_real > held_by_plain
    assert reserved >= max(plain, real, held)
    memory.check()


@pytest.mark.parametrize(
    ("backend", "gathered"),
    [(Sdpa(), None), (Reference(), None), (Sdpa(fused=True), 1 << 16), (Sdpa(fused=True), 1024)],
    ids=["sdpa", "reference", "fused", "fused in several calls"],
)
def test_a_step_of_full_size_takes_no_more_than_was_said(
    backend: Backend, gathered: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gathered is not None:
        for module in (buckets, reserve):
            monkeypatch.setattr(module, "GATHERED", gathered)
    model = build_guest(network(), [backend])
    said = scratch(model, context=480, step_tokens=200)(480, 9 * 480, 9)
    memory = model.memory({group.name: 9 * 480 for group in model.shape.groups})
    truth = []
    for feeds in ([Feed(0, Span(280, 480))], [Feed(seq, Span(479, 480)) for seq in range(9)]):
        batch = Batch(tuple(feeds))
        with peak(CPU) as meter:
            plan = memory.begin(batch, reserve=True)
            ids = torch.zeros(batch.tokens, dtype=torch.long)
            logits = model.forward(memory, plan, ids, torch.arange(len(feeds)))
            draw(logits, [choice()] * len(feeds), [0] * len(feeds))
            memory.abandon()
        truth.append(meter.bytes)
    assert max(truth) <= said <= 2 * max(truth)
    memory.check()
    assert memory.free() == memory.storage.capacity()


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2", "qwen3-next", "bloom"])
def test_a_step_with_drafts_takes_no_more_than_was_said(name: str) -> None:
    depth, context, tokens = 7, 200, 60
    model = build_guest(ARCHS[name].build(), named("sdpa"))
    sequences = 6 if model.mode == "flat" else 1
    plain, said = (
        scratch(model, context=context, step_tokens=tokens, deepest=deepest)(context, sequences * context, sequences)
        for deepest in (0, depth)
    )
    memory = model.memory({group.name: sequences * context for group in model.shape.groups}, rows=sequences)
    truth = []
    for drafts in range(1, depth + 1):
        each = Span(context - 1 - drafts, context)
        batch = Batch(tuple(Feed(seq, each, revertible=True) for seq in range(sequences)))
        if batch.tokens > tokens:
            continue
        with uncollected(), peak(CPU) as meter:
            plan = memory.begin(batch, reserve=True)
            logits = model.forward(
                memory, plan, torch.zeros(batch.tokens, dtype=torch.long), torch.arange(batch.tokens)
            )
            _draw(model.draws, logits, coupled=True)
            memory.abandon()
        truth.append(meter.bytes)
    assert max(truth) <= said
    assert plain < said


def test_rows_that_packed_layers_pad_are_in_what_a_step_takes() -> None:
    writers = 33
    config = LlamaConfig(
        vocab_size=4000, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    network = LlamaForCausalLM(config)
    assert pack(network).layers == 8
    model = build_guest(network, named("sdpa"))
    said = scratch(model, context=64, step_tokens=writers)(64, writers * 64, writers)
    memory = model.memory({group.name: writers * 64 for group in model.shape.groups})
    batch = Batch(tuple(Feed(seq, Span(63, 64)) for seq in range(writers)))
    with uncollected(), peak(CPU) as meter:
        plan = memory.begin(batch, reserve=True)
        logits = model.forward(memory, plan, torch.zeros(writers, dtype=torch.long), torch.arange(writers))
        _draw(model.draws, logits)
        memory.abandon()
    assert meter.bytes <= said


def test_what_fresh_memory_holds_does_not_change_what_a_step_is_measured_to_take() -> None:
    config = LlamaConfig(
        vocab_size=500, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = build_guest(LlamaForCausalLM(config), named("sdpa"))
    fresh, said = torch.empty, []
    for value in (0.0, torch.nan, torch.inf):
        with mock.patch("torch.empty", lambda *shape, value=value, **how: fresh(*shape, **how).fill_(value)):
            said.append(scratch(model, context=64, step_tokens=9)(64, 9 * 64, 9))
    assert said[1:] == said[:1] * 2


def test_what_a_step_takes_is_not_turned_into_cells() -> None:
    with mock.patch.object(allocate, "free_cpu_bytes", return_value=3_000_000), Engine(network(), context=64) as engine:
        said = engine.capacity()
        assert "30% of the memory that is free" in said, said
        stats = engine.stats()
        assert stats.scratch_bytes > 0
        assert stats.cache_bytes + stats.scratch_bytes + stats.staging_bytes <= 0.3 * 3_000_000


@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom", "gpt-oss", "lfm3", "mamba2"])
@pytest.mark.parametrize(
    "settings",
    [
        {"step_tokens": 9, "context": 32},
        {"step_tokens": 200, "context": 28},
        {"step_tokens": 200, "context": 28, "record": "auto"},
    ],
)
def test_planes_steps_and_edits_together_stay_within_the_bytes_that_were_granted(name, settings) -> None:
    """While prompts are read beside answers, samples are drawn with everything there is, and texts are shifted."""
    how = {"max_tokens": 12, "ignore_eos": True, "shift": True, "top_p": 0.9, "typical_p": 0.9, "logprobs": 20}
    prompts = [[5 + i] * (3 + 4 * i) for i in range(6)]  # most of them are shifted, for the context is short
    budget = bytes_for(name, 300, **settings)
    with small_engine(name, cache_bytes=budget, **settings) as engine:
        taken = metered(engine)
        engine.generate(prompts, temperature=1.0, repetition_penalty=1.2, n=2, **how)
        stats = engine.stats()
    assert stats.limit_bytes == budget
    assert stats.cache_bytes + stats.scratch_bytes + stats.staging_bytes <= budget
    assert 0 < max(taken) <= stats.scratch_bytes + stats.staging_bytes


def test_a_step_of_a_model_without_cells_stays_within_the_least_bytes_that_work() -> None:
    """No free cells make its steps smaller when bytes are few."""
    settings = {"step_tokens": 200, "context": 200, "max_sequences": 4}
    budget = bytes_for("mamba2", 1, **settings)
    with small_engine("mamba2", cache_bytes=budget, **settings) as engine:
        taken, stats = metered(engine), engine.stats()
        how = {"max_tokens": 3, "ignore_eos": True, "temperature": 1.0, "top_p": 0.9, "logprobs": 20}
        engine.generate([[5 + i] * 190 for i in range(6)], **how)
    assert stats.cache_bytes + stats.scratch_bytes <= budget
    assert 0 < max(taken) <= stats.scratch_bytes


@pytest.mark.parametrize("name", ["mamba2", "lfm2"])
def test_prompts_of_unequal_lengths_take_no_more_than_was_reserved(name: str) -> None:
    """Mixers run once for each length there is, on copies."""
    guest, rows = build_guest(ARCHS[name].build(), named("sdpa")), 200
    most = scratch(guest, context=rows, step_tokens=rows)(rows, 4000, 4)
    memory = guest.memory({group.name: 2 * rows for group in guest.shape.groups}, rows=8)
    for few in (1, 9, 60, 100):
        feeds = (Feed(0, Span(0, rows - few)), Feed(1, Span(0, few)))
        with uncollected(), peak(CPU) as meter:
            plan = memory.begin(Batch(feeds))
            guest.forward(memory, plan, torch.zeros(rows, dtype=torch.long), torch.arange(2))
            memory.abandon()
        assert meter.bytes <= most, f"{rows - few} and {few} tokens"


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "mamba2", "zaya"])
def test_checkpoints_inside_a_step_take_no_more_than_was_reserved(name: str) -> None:
    """The commit computes the states at their positions, beside what the layers have held for that."""
    guest, rows = build_guest(ARCHS[name].build(), named("sdpa")), 700
    most = scratch(guest, context=rows, step_tokens=rows)(rows, 4000, 4)
    memory = guest.memory({group.name: 2 * rows for group in guest.shape.groups}, rows=20)
    for few in (1, 9, 60, 350):
        feeds = tuple(
            Feed(seq, Span(0, n), checkpoints=tuple(sorted({1, n // 3 or 1, (n + 1) // 2, n})))
            for seq, n in enumerate((rows - few, few))
        )
        with uncollected(), peak(CPU) as meter:
            plan = memory.begin(Batch(feeds))
            logits = guest.forward(memory, plan, torch.zeros(rows, dtype=torch.long), torch.arange(2))
            _draw(guest.draws, logits)
            assert len(memory.commit()) == 2
        assert meter.bytes <= most, f"{rows - few} and {few} tokens"
        memory.clear()


def metered(engine: Engine) -> list[int]:
    """From now on, the bytes that each turn takes at most beside what is there before it."""
    taken, turn = [], engine._loop._step

    def watched() -> None:
        with peak(CPU) as meter:
            turn()
        taken.append(meter.bytes)

    engine._loop._step = watched  # type: ignore[method-assign]
    return taken


def test_a_sequence_of_the_engines_memory_ends_with_the_context() -> None:
    with small_engine("llama", context=40) as engine:
        memory = engine._built.memory
        with pytest.raises(BadRequest, match="may have 40 tokens"):
            engine._loop.call(lambda: memory.begin(Batch((Feed(1, Span(0, 41)),))))


def test_a_memory_that_leaves_no_room_for_a_step_is_refused_with_the_numbers_to_change() -> None:
    with (
        mock.patch.object(allocate, "free_cpu_bytes", return_value=200_000),
        pytest.raises(
            CapacityTooSmall, match=r"200000 are free. Lower cache_bytes; or lower step_tokens, max_sequences"
        ),
    ):
        Engine(network(), cache_bytes=3_000_000, context=64)


def test_a_device_that_cannot_run_the_worst_step_is_refused_at_the_door() -> None:
    model = guest()
    memory = model.memory({group.name: 100 for group in model.shape.groups})
    prove(model, memory, context=480, max_sequences=4, step_tokens=64)
    short = mock.patch.object(Guest, "forward", side_effect=torch.OutOfMemoryError("none left"))
    with short, pytest.raises(CapacityTooSmall, match=r"64 tokens at position 100 does not fit .* step_tokens"):
        prove(model, memory, context=480, max_sequences=4, step_tokens=64)
    memory.check()
    assert memory.free() == memory.storage.capacity()
