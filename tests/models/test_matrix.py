"""After any operations on sequences, each row's logits equal a reference forward over its sequence's tokens alone."""

import shutil

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvcellar.engine.load.recorded import record_steps
from kvcellar.engine.load.settings import Settings
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.errors import ModelRefused
from kvcellar.kernels.compiled import COMPILERS
from kvcellar.memory.attention.choose import backends, named
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.models.served import FLAT, SERVED, SOLO
from tests.models.timeline import (
    BOUND,
    CHUNK,
    MOST,
    Timeline,
    guest_and_reference,
    play,
    read,
    relative,
    seed_of,
    small_memory,
)
from tests.zoo import ARCHS, WINDOW, reference_logits
from tests.zoo_test_support.sweep import NO_MODEL, of_type

CLOSE = 1e-5  # tolerance for the same rows in another batch, in float32
OTHERS = (
    "llama",
    "gemma3n",
    "gpt-oss",
    "llama4",
    "deepseek-v3",
    "cohere2",
    "opt",
)  # for what need not be tested on all

# By default; of each way in which layers keep or read something, at least one.
RECORDED = (
    "llama", "gemma3n", "gemma4-26b", "gpt-oss", "llama4", "deepseek-v3", "cohere2", "opt", "phi3-longrope", "lfm2",
    "mamba2", "falcon-h1", "qwen3-next",
)  # fmt: skip

OTHER_TYPES = sorted(
    set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NO_MODEL) - {arch.model_type for arch in ARCHS.values()}
)
# Without routers: in half precision a near tie of two experts may fall either way.
NO_EXPERTS = ("llama", "gemma3n", "gemma4-e2b", "vaultgemma", "granite-swa", "cohere2", "minicpm3", "opt", "bloom")


@pytest.mark.parametrize("name", SERVED)
def test_a_timeline_gives_the_logits_of_the_reference(name: str) -> None:
    assert play(name) <= BOUND


@pytest.mark.parametrize(
    "name", [name if name in RECORDED else pytest.param(name, marks=pytest.mark.slow) for name in FLAT]
)
def test_a_timeline_of_recorded_steps_gives_the_logits_of_the_reference(name: str) -> None:
    """In the compiled loop, with steps that are abandoned, forks, cuts, and cells that are used again. Others are
    compared bit by bit with their modules (`test_recording_native.py`), which the timelines above run."""
    guest = build_guest(ARCHS[name].build(), backends())
    record_steps(guest, Settings(record="auto"))
    if guest.recording is None and not any(map(shutil.which, COMPILERS)):
        pytest.skip("there is no compiler")
    assert guest.not_recorded is None
    timeline = Timeline(guest, guest_and_reference(name)[1], seed_of(name))
    timeline.play()
    assert timeline.worst_difference() <= BOUND
    assert guest.recording is not None
    assert guest.recording.steps > 10
    assert not guest.recording.by_modules


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_many_timelines_give_the_logits_of_the_reference(name: str) -> None:
    assert max(play(name, times) for times in range(1, 9)) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OTHER_TYPES)
def test_every_other_causal_type_is_refused_or_gives_the_logits_of_the_reference(model_type: str) -> None:
    with silence_transformers():
        model, reference = of_type(model_type), of_type(model_type)
    try:
        guest = build_guest(model, named("sdpa"))
    except ModelRefused as refusal:
        pytest.skip(str(refusal))
    timeline = Timeline(guest, reference, seed_of(model_type))
    timeline.play()
    assert timeline.worst_difference() <= BOUND


@pytest.mark.parametrize("name", OTHERS)
def test_a_timeline_with_the_reference_backend(name: str) -> None:
    guest = build_guest(ARCHS[name].build(), named("reference"))
    timeline = Timeline(guest, guest_and_reference(name)[1], seed_of(name, 100))
    timeline.play()
    assert timeline.worst_difference() <= BOUND


def test_timelines_are_long_and_cover_every_operation() -> None:
    """Timelines exceed windows, share cells, cut and refill."""
    timeline = Timeline(*guest_and_reference("gemma3"), seed_of("gemma3"))
    timeline.play()
    lengths = [len(text) for text in timeline.seen]
    rows = sum(len(seen) for seen in timeline.seen.values())
    assert max(lengths) > 3 * WINDOW
    assert len(timeline.seen) > 30
    assert rows > sum(lengths) / 10
    cells = {group.name: group.layout.most_cells(MOST, CHUNK) for group in timeline.memory.storage.groups}
    assert all(3 * cells[name] == free for name, free in timeline.memory.free().items())


@pytest.mark.parametrize("name", FLAT)
def test_logits_do_not_depend_on_other_sequences_of_the_step(name: str) -> None:
    guest, _ = guest_and_reference(name)
    draw = torch.Generator().manual_seed(1)
    first, second, other = (torch.randint(3, 101, (n,), generator=draw).tolist() for n in (11, 1, 15))
    alone = small_memory(guest, 64)
    apart = [read(guest, alone, (1, text))[0] for text in (first, second)]
    batched = small_memory(guest, 64)
    read(guest, batched, (7, other[:9]))
    beside = [
        read(guest, batched, (3, other[:5]), (1, first), (7, [other[9]]))[1],
        read(guest, batched, (7, other[10:]), (1, second))[1],
    ]
    assert all(relative(a, b) <= CLOSE for a, b in zip(apart, beside, strict=True))


@pytest.mark.parametrize("name", [*OTHERS, "mistral", "gemma4-e2b", "bloom", "doge"])
def test_token_by_token_prefill_gives_the_logits_of_the_reference(name: str) -> None:
    guest, reference = guest_and_reference(name)
    tokens = torch.randint(3, 101, (MOST,), generator=torch.Generator().manual_seed(2)).tolist()
    memory = small_memory(guest, MOST, sequences=1)
    logits = torch.cat([read(guest, memory, (1, [token]))[0] for token in tokens])
    assert relative(logits, reference_logits(reference, tokens)) <= BOUND


@pytest.mark.parametrize("name", [*OTHERS, *SOLO])
def test_only_wanted_rows_are_returned_in_their_order(name: str) -> None:
    guest, _ = guest_and_reference(name)
    tokens = torch.randint(3, 101, (9,), generator=torch.Generator().manual_seed(3)).tolist()
    memory = small_memory(guest, 64)
    (everything,) = read(guest, memory, (1, tokens))
    for wanted in ([], [8], [5, 0, 7]):
        memory.clear()
        rows = torch.tensor(wanted, dtype=torch.long)
        plan = memory.begin(Batch((Feed(1, Span(0, 9)),)))
        some = guest.forward(memory, plan, torch.tensor(tokens), rows)
        memory.commit()
        assert some.shape == (len(wanted), 101)
        assert torch.allclose(some, everything[rows], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NO_EXPERTS)
def test_half_precision_is_as_close_to_float32_as_the_models_own_forward(name: str, dtype: torch.dtype) -> None:
    truth, own = ARCHS[name].build(), ARCHS[name].build().to(dtype)
    guest = build_guest(ARCHS[name].build().to(dtype), named("sdpa"))
    assert guest.memory({group.name: 1 for group in guest.shape.groups}).dtype == dtype
    tokens = torch.randint(3, 101, (MOST,), generator=torch.Generator().manual_seed(4)).tolist()
    memory = guest.memory({group.name: 3 * MOST for group in guest.shape.groups})
    ours = torch.cat([read(guest, memory, (1, tokens[a:b]), (2, [3, 4]))[0] for a, b in ((0, 25), (25, 26), (26, 40))])
    wanted = reference_logits(truth, tokens)
    theirs = reference_logits(own, tokens)
    middle = [(logits - wanted).square().mean(-1).sqrt().median() for logits in (ours, theirs)]
    assert middle[0] <= 2 * middle[1]
