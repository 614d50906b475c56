"""On a CUDA device: engines generate what transformers does, and use no more memory than reported.

In float32 without TF32, so that what is compared is the memory and not the rounding. A token counts as the one that
transformers would take if its score is the best or as good as that: ties of random networks fall either way.
"""

import gc
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcellar import Engine
from kvcellar.engine.load import settings
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.stats import EngineStats
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.shapes import StoredAs
from tests.engine.mixes import assert_at_rest
from tests.models.timeline import BOUND, read, relative, small_memory
from tests.zoo import ARCHS

pytestmark = pytest.mark.gpu

FLAT = ["llama", "gemma3", "gpt-oss", "llama4", "deepseek-v3"]
SOLO = ["bloom", "deepseek-v3.2"]
HYBRID = ["lfm2", "qwen3-next", "jamba", "mamba2"]
SMALL: dict[str, Any] = {"cache_bytes": 64_000_000, "context": 128, "max_sequences": 8, "step_tokens": 64}
WORKSPACE = 64 << 20  # bytes that cuBLAS keeps for itself, out of torch's sight or in it
PROMPTS = [[3 + (seed * 31 + i * 17) % 90 for i in range(n)] for seed, n in enumerate((5, 40, 17))]


@pytest.fixture(autouse=True)
def plain_float32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
    torch.set_float32_matmul_precision(before)


def on_cuda(name: str) -> PreTrainedModel:
    return ARCHS[name].build().cuda()


@torch.inference_mode()
def own_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """[L,V], of a forward without a cache."""
    return model(input_ids=torch.tensor([list(tokens)], device="cuda"), use_cache=False).logits[0].float()


def assert_greedy(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> None:
    logits = own_logits(model, [*prompt, *completion])[len(prompt) - 1 : -1]
    behind = (
        logits.amax(-1) - logits[torch.arange(len(completion), device="cuda"), torch.tensor(completion, device="cuda")]
    )
    assert float(behind.max()) <= 2 * BOUND * max(1.0, float(logits.abs().max()))


@pytest.mark.parametrize("name", [*FLAT, *SOLO, *HYBRID])
def test_an_engine_generates_what_transformers_does(name: str) -> None:
    reference = on_cuda(name)
    with Engine(on_cuda(name), **SMALL) as engine:
        assert engine.model.device.startswith("cuda")
        assert engine.model.mode == ("solo" if name in SOLO else "flat")
        for prompt, result in zip(
            PROMPTS, engine.generate(PROMPTS, max_tokens=20, temperature=0, ignore_eos=True, n=2), strict=True
        ):
            for choice in result.choices:
                assert len(choice.token_ids) == 20
                assert_greedy(reference, prompt, choice.token_ids)
        assert_at_rest(engine)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_draw_depends_on_its_seed_and_not_on_its_company(name: str) -> None:
    sampling: dict[str, Any] = {"max_tokens": 12, "seed": 5, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    with Engine(on_cuda(name), **SMALL) as engine:
        alone = engine.generate(PROMPTS[0], **sampling)
        assert engine.generate([PROMPTS[1], PROMPTS[0]], **sampling)[1].token_ids == alone.token_ids


@pytest.mark.parametrize("name", ["gemma3", "bloom", "lfm2"])
def test_a_session_goes_on_and_shifts(name: str) -> None:
    reference = on_cuda(name)
    with Engine(on_cuda(name), **SMALL | {"context": 48}) as engine, engine.session(chat=False) as session:
        first = session.send(PROMPTS[2], max_tokens=10, temperature=0, ignore_eos=True)
        assert_greedy(reference, PROMPTS[2], first.token_ids)
        before = list(session.tokens)
        second = session.send([9, 8, 7], max_tokens=4, temperature=0, ignore_eos=True)
        assert_greedy(reference, [*before, 9, 8, 7], second.token_ids)
        longer = session.send([5], max_tokens=60, temperature=0, ignore_eos=True, shift=True, num_keep=4)
        assert len(longer.token_ids) == 60
        engine.check()


def adopted(name: str, way: str, device: str) -> Guest:
    return build_guest(ARCHS[name].build().to(device), backends()).storing(StoredAs.parse(way), backends())


@pytest.mark.parametrize("way", ["bfloat16", "fp8", "int8", "int4", "k=int8+hadamard,v=int4"])
@pytest.mark.parametrize("name", ["gemma3", "bloom"])
def test_what_is_stored_in_fewer_bits_is_read_as_on_a_cpu(name: str, way: str) -> None:
    """A code may be the next one where a rounding falls the other way."""
    seen: list[Tensor] = []
    for device in ("cpu", "cuda"):
        guest = adopted(name, way, device)
        memory = guest.memory({group.name: 120 for group in guest.shape.groups})
        parts = [(1, PROMPTS[1][:20]), (2, PROMPTS[2])], [(1, PROMPTS[1][20:]), (2, [7])]
        logits = [
            rows.float().cpu()
            for part in parts
            for some in ([part] if guest.mode == "flat" else [[one] for one in part])
            for rows in read(guest, memory, *some)
        ]
        seen.append(torch.cat(logits))
    assert relative(seen[1], seen[0]) <= 5e-2


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_compaction_changes_no_tokens(name: str) -> None:
    guest, reference = build_guest(on_cuda(name), backends()), on_cuda(name)
    memory = small_memory(guest, 60)
    for at in range(0, 16, 4):
        read(guest, memory, *((seq, PROMPTS[1][at : at + 4]) for seq in (1, 2)))
    memory.drop(1)
    moved = 0
    while n := memory.storage.compact(5):
        moved += n
    assert moved
    memory.check()
    (rows,) = read(guest, memory, (2, PROMPTS[1][16:]))
    assert relative(rows, own_logits(reference, PROMPTS[1])[16:]) <= BOUND


@pytest.mark.parametrize("name", ["llama", "bloom", "lfm2"])
def test_an_engine_takes_no_more_of_the_device_than_was_granted(name: str) -> None:
    model = on_cuda(name)
    gc.collect()  # of earlier tests
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with Engine(model, **SMALL | {"cache_bytes": 512_000_000}) as engine:
        stats = engine.stats()
        assert stats.cache_bytes + stats.scratch_bytes + stats.staging_bytes <= stats.limit_bytes == 512_000_000
        assert torch.cuda.memory_allocated() - before >= stats.cache_bytes
        torch.cuda.reset_peak_memory_stats()
        engine.generate(PROMPTS * 4, max_tokens=30, temperature=0.7, top_p=0.9, seed=1, ignore_eos=True)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= stats.limit_bytes + WORKSPACE


def generated(name: str, record: str) -> tuple[list[list[int]], EngineStats]:
    """Greedy completions in float32."""
    with Engine(on_cuda(name), **SMALL, record=record) as engine:
        results = engine.generate(PROMPTS, max_tokens=40, temperature=0, ignore_eos=True)
        return [list(one.token_ids) for one in results], engine.stats()


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite"])
def test_graphs_change_no_text(name: str) -> None:
    graphs, stats = generated(name, "auto")
    plain, _ = generated(name, "off")
    assert graphs == plain
    assert {group.backend for group in stats.groups} == {"triton"}
    assert stats.recording.executor == "CUDA graphs"
    assert stats.recording.steps > 30
    assert set(stats.recording.by_modules) == {"prompts"}


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe"])
def test_experts_are_in_graphs_in_bfloat16(name: str) -> None:
    """torch multiplies grouped experts of float32 in a loop over sizes that it reads back from the device."""
    for dtype, recorded in ((torch.bfloat16, True), (torch.float32, False)):
        with Engine(on_cuda(name).to(dtype), **SMALL, record="auto") as engine:
            engine.generate(PROMPTS, max_tokens=40, temperature=0, ignore_eos=True)
            recording = engine.stats().recording
        reasons = [reason for reason in recording.by_modules if reason != "prompts"]
        assert (recording.steps > 30, len(reasons)) == (recorded, not recorded)
        assert all("could not be captured" in reason for reason in reasons)


@pytest.mark.parametrize("record", ["auto", "off"])
def test_a_decoding_step_waits_for_the_device_once(record: str) -> None:
    """Greedy and sampled: for the tokens that it has drawn. Without host memory: what goes there is read between steps,
    and waited for."""
    with Engine(on_cuda("llama"), **SMALL, record=record, host_bytes=0) as engine:
        for sampling in ({"temperature": 0}, {"seed": 3, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}):
            waits: list[int] = []
            for tokens in (60, 20, 60):  # the first one captures what the others replay
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    torch.cuda.set_sync_debug_mode("warn")
                    engine.generate(PROMPTS[0], max_tokens=tokens, ignore_eos=True, **sampling)
                    torch.cuda.set_sync_debug_mode("default")
                waits.append(sum("synchronizing CUDA operation" in str(one.message) for one in caught))
            assert waits[2] - waits[1] == 40


def test_without_a_number_it_is_a_share_of_what_the_device_has_free() -> None:
    model = on_cuda("llama")
    with mock.patch.dict(settings.SHARE_OF_FREE, {"cuda": 0.01}):
        free, _ = torch.cuda.mem_get_info()
        with Engine(model, context=128, max_sequences=4, step_tokens=64) as engine:
            assert 0.005 * free < engine.stats().limit_bytes <= 0.01 * free
