"""Features of images in the tiers: a tower runs once for an image, whatever becomes of memory."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from kvcellar import Engine
from kvcellar.engine.core import seeing
from kvcellar.engine.models import features
from kvcellar.engine.models.crossing import Crossed
from kvcellar.engine.models.features import Features, from_bytes, to_bytes
from kvcellar.memory import restore_plan
from kvcellar.memory.restore_plan import AGAIN
from kvcellar.memory.retention import RetentionOptions
from kvcellar.memory.snapshot import IMAGE
from kvcellar.memory.store import Store
from kvcellar.memory.tiers.admission import Rate
from kvcellar.memory.tiers.disk import DiskTier
from tests.engine.test_slow_tiers import Hanging
from tests.engine.tiered import settled

from .seeing import LENGTH, Pictures, asked, engine_of, pictures_of

AFTER = [30, 31, 32]
PATIENCE = 60.0  # seconds
KINDS = ("llava", "qwen3_vl", "mllama", "gemma3")  # rows; features of early layers; cross-attention; both ways


def counts(engine: Engine) -> tuple[int, int]:
    """Images that were encoded, and that were read from tiers."""
    stats = engine.stats()
    return stats.images_encoded, stats.images_restored


def store_of(engine: Engine) -> Store:
    store = engine._built.loop.manager.store
    assert store is not None
    return store


def disk_of(engine: Engine) -> DiskTier:
    disk = store_of(engine).disk
    assert disk is not None
    return disk


def features_in(engine: Engine) -> list[bytes]:
    """The keys of what tiers have of images."""
    return [one.key for one in store_of(engine).catalogue if one.namespace.startswith(IMAGE)]


def written(engine: Engine, images: int) -> None:
    eventually(lambda: len(features_in(engine)) == images and not store_of(engine).features.on_way)


def eventually(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


@contextmanager
def stored(pictures: Pictures, folder: Path, patch: pytest.MonkeyPatch, **settings: Any) -> Iterator[Engine]:
    """An engine with a disk, that keeps features of one image."""
    how: dict[str, Any] = {"image_bytes": 1, "store": str(folder / "store"), "host_bytes": 0}
    with engine_of(pictures, folder / "model", patch, **how | settings) as engine:
        yield engine
        engine.check()


@pytest.mark.parametrize("model_type", KINDS)
def test_after_a_restart_an_image_in_another_place_has_its_features_from_the_store(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = pictures_of(model_type)
    first, other = [[20, 21], pictures.one, AFTER], [[22] * 5, pictures.one, [40, 41]]
    with stored(pictures, tmp_path, monkeypatch) as engine:
        cold = asked(engine, pictures, *other).result().token_ids
        engine.clear_cache()
        asked(engine, pictures, *first).result()
        written(engine, 1)
    with stored(pictures, tmp_path, monkeypatch) as engine:
        assert asked(engine, pictures, *other).result().token_ids == cold
        assert counts(engine) == (0, 1)


def test_an_engine_has_the_features_that_another_one_has_stored_in_a_place_that_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = pictures_of("llava")
    how: dict[str, Any] = {"store": None, "store_remote": f"file://{tmp_path}/shared"}
    with stored(pictures, tmp_path, monkeypatch, **how) as one, stored(pictures, tmp_path, monkeypatch, **how) as two:
        asked(two, pictures, [20], [21]).result()  # it has looked into the store
        cold = asked(one, pictures, [20], pictures.one, AFTER).result().token_ids
        written(one, 1)
        assert not features_in(two)
        assert asked(two, pictures, [20], pictures.one, AFTER).result().token_ids == cold
        assert counts(two) == (0, 1)


def test_images_that_memory_has_no_room_for_are_read_from_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = pictures_of("llava")
    places = [[[50 + n], one, AFTER] for n, one in enumerate((pictures.one, pictures.two) * 2)]
    how: dict[str, Any] = {"image_bytes": 1, "host_bytes": 10_000_000}
    with engine_of(pictures, tmp_path, monkeypatch, **how) as engine:
        for parts in places:
            asked(engine, pictures, *parts).result()
            written(engine, min(2, places.index(parts) + 1))
        assert counts(engine) == (2, 2)


def test_requests_of_another_namespace_have_features_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = pictures_of("llava")
    with stored(pictures, tmp_path, monkeypatch, image_bytes=None) as engine:
        for namespace, images in (("a", 1), ("a", 1), ("b", 2), ("b", 2)):
            engine.clear_cache()
            asked(engine, pictures, [20], pictures.one, AFTER, namespace=namespace).result()
            written(engine, images)
        assert counts(engine) == (2, 2)
        engine.cache.remove(namespace="a")
        assert len(features_in(engine)) == 1
        engine.clear_cache()
        asked(engine, pictures, [20], pictures.one, AFTER, namespace="b").result()
        assert counts(engine) == (2, 3)
        asked(engine, pictures, [20], pictures.one, AFTER, namespace="a").result()
        assert counts(engine) == (3, 3)


def test_what_may_not_be_stored_is_not_until_a_request_comes_that_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = pictures_of("llava")
    with stored(pictures, tmp_path, monkeypatch, image_bytes=None) as engine:
        asked(engine, pictures, [20], pictures.one, AFTER, retention=RetentionOptions(stored=False)).result()
        assert not features_in(engine)
        asked(engine, pictures, [21], pictures.one, AFTER).result()
        written(engine, 1)
        assert counts(engine) == (1, 0)


def test_features_expire_with_the_requests_that_use_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = pictures_of("llava")
    with stored(pictures, tmp_path, monkeypatch) as engine:
        asked(engine, pictures, [20], pictures.one, AFTER, retention=RetentionOptions(ttl=1000.0)).result()
        written(engine, 1)
        ((row,),) = [[one for one in disk_of(engine).rows() if one.key == key] for key in features_in(engine)]
        assert row.retention.expires is not None
        asked(engine, pictures, [21], pictures.one, AFTER).result()
        eventually(lambda: all(one.retention.expires is None for one in disk_of(engine).rows() if one.key == row.key))


@pytest.mark.parametrize("fault", ["damaged", "of another kind", "gone"])
def test_what_cannot_be_read_is_encoded_and_stored_again(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = pictures_of("llava")
    first, other = [[20, 21], pictures.one, AFTER], [[22] * 5, pictures.one, [40, 41]]
    with stored(pictures, tmp_path, monkeypatch, image_bytes=None) as engine:
        asked(engine, pictures, *first).result()
        cold = asked(engine, pictures, *other).result().token_ids
        written(engine, 1)
        engine.clear_cache()
        (key,) = features_in(engine)
        disk = disk_of(engine)
        before, name = next((row.id, row.name) for row in disk.rows() if row.key == key)
        (file,) = (tmp_path / "store").rglob(f"{name}*")
        if fault == "gone":
            file.unlink()
        elif fault == "damaged":
            content = bytearray(file.read_bytes())
            content[-100] ^= 1
            file.write_bytes(content)
        else:
            monkeypatch.setattr(seeing, "from_bytes", lambda *_: None)
        assert asked(engine, pictures, *other).result().token_ids == cold
        written(engine, 1)
        assert counts(engine) == (2, 0)
        assert before not in [row.id for row in disk.rows()], "it was not removed"
        monkeypatch.undo()
        engine.clear_cache()
        assert asked(engine, pictures, *first, [1]).result().token_ids
        assert counts(engine) == (2, 1)


def hung(engine: Engine, patch: pytest.MonkeyPatch) -> Hanging:
    """The next reads from its disk wait for `go`."""
    hanging = Hanging(disk_of(engine).get)
    patch.setattr(disk_of(engine), "get", hanging)
    return hanging


def test_while_a_tier_hangs_streams_go_on_and_the_image_is_encoded_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = pictures_of("llava")
    with stored(pictures, tmp_path, monkeypatch, image_bytes=None) as engine:
        cold = asked(engine, pictures, [20], pictures.one, AFTER).result().token_ids
        written(engine, 1)
        engine.clear_cache()
        monkeypatch.setattr(restore_plan, "SHORTEST", 0.3)
        monkeypatch.setattr(Rate, "seconds", lambda *_: 0.0)
        hanging = hung(engine, monkeypatch)
        waiting = asked(engine, pictures, [20], pictures.one, AFTER)
        assert len(asked(engine, pictures, [33] * 9).result().token_ids) == LENGTH  # while it waits
        assert waiting.result().token_ids == cold
        assert counts(engine) == (2, 0)
        hanging.go.set()
        settled(engine)


def test_the_engine_sleeps_while_all_prompts_wait_for_reads_and_wakes_at_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = pictures_of("llava")
    with stored(pictures, tmp_path, monkeypatch, image_bytes=None) as engine:
        asked(engine, pictures, [20], pictures.one, AFTER).result()
        written(engine, 1)
        settled(engine)
        engine.clear_cache()
        hanging, turns, turn = hung(engine, monkeypatch), list[float](), engine._built.loop._turn
        monkeypatch.setattr(engine._built.loop, "_turn", lambda: (turns.append(0.0), turn())[1])
        waiting = asked(engine, pictures, [20], pictures.one, AFTER)
        assert hanging.inside.acquire(timeout=PATIENCE)
        before, began = len(turns), time.monotonic()
        time.sleep(0.5)
        hanging.go.set()
        waiting.result()
        assert len(turns) - before <= 30 * (time.monotonic() - began) + 20  # an engine that does not: thousands
        assert counts(engine) == (1, 1)


def test_a_request_that_is_cancelled_while_its_image_is_read_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = pictures_of("llava")
    with stored(pictures, tmp_path, monkeypatch, image_bytes=None) as engine:
        asked(engine, pictures, [20], pictures.one, AFTER).result()
        written(engine, 1)
        engine.clear_cache()
        hanging = hung(engine, monkeypatch)
        stream = asked(engine, pictures, [33] * 9, max_tokens=200)
        asked(engine, pictures, [20], pictures.one, AFTER)
        assert hanging.inside.acquire(timeout=PATIENCE)
        engine._built.loop.cancel(max(engine._built.loop._requests))
        eventually(lambda: not store_of(engine).features.readings)
        hanging.go.set()
        stream.result()
        settled(engine)
        assert counts(engine) == (1, 0)


@pytest.mark.parametrize("model_type", ["llava", "mllama"])
def test_images_of_a_prompt_are_read_one_by_one_where_memory_has_not_room_for_all(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = pictures_of(model_type)
    both = [[20], pictures.one, [21] * 30, pictures.two, AFTER]
    with stored(pictures, tmp_path, monkeypatch, image_bytes=None) as engine:
        cold = asked(engine, pictures, *both).result().token_ids
        written(engine, 2)
        room = engine.stats().image_bytes * 3 // 4
    with stored(pictures, tmp_path, monkeypatch, image_bytes=room) as engine:
        monkeypatch.setattr(disk_of(engine), "get", later(disk_of(engine).get))
        stream = asked(engine, pictures, [33] * 9, max_tokens=100)
        engine._built.loop.call(engine._built.loop.manager.clear_some)
        assert asked(engine, pictures, [22], *both).result().token_ids
        stream.result()
        assert counts(engine) == (0, 2)
        engine.clear_cache()
        assert asked(engine, pictures, *both).result().token_ids == cold


def later(get: Any) -> Any:
    def slow(*given: Any) -> Any:
        time.sleep(0.05)
        return get(*given)

    return slow


def test_what_is_slower_than_the_tower_is_read_once_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = pictures_of("llava")
    with stored(pictures, tmp_path, monkeypatch, image_bytes=None) as engine:
        asked(engine, pictures, [20], pictures.one, AFTER).result()
        written(engine, 1)
        monkeypatch.setattr(store_of(engine).transfers.reads["disk"], "seconds", lambda _: 1e9)
        for _ in range(2 * AGAIN):
            engine.clear_cache()
            asked(engine, pictures, [20], pictures.one, AFTER).result()
        assert counts(engine) == (1 + 2 * (AGAIN - 1), 2)


@pytest.mark.parametrize("what", ["from_bytes", "to_bytes"])
def test_too_little_memory_for_a_copy_ends_no_request_and_holds_nothing(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("none is left")

    pictures = pictures_of("llava")
    with stored(pictures, tmp_path, monkeypatch, image_bytes=None) as engine:
        if what == "to_bytes":
            monkeypatch.setattr(features, "_chunk", fails)
        for at in range(3):
            engine.clear_cache()
            asked(engine, pictures, [20 + at], pictures.one, AFTER).result()
            if what == "from_bytes":
                written(engine, 1)
                monkeypatch.setattr(seeing, what, fails)
        settled(engine)
        assert len(features_in(engine)) == (what == "from_bytes")
        assert counts(engine) == (3, 0)


def test_what_staging_memory_is_too_small_for_is_counted_and_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = pictures_of("llava", torch.float32)
    with stored(pictures, tmp_path, monkeypatch, image_bytes=None) as engine:
        store = store_of(engine)
        monkeypatch.setattr(store.transfers, "staging", 1 << 10)
        asked(engine, pictures, [20], pictures.one, AFTER).result()
        asked(engine, pictures, [21], pictures.one, AFTER).result()
        assert [(why.split()[:5], count) for why, count in store.failures.items()] == [
            (["the", "features", "of", "an", "image"], 1)
        ]
        settled(engine)


@pytest.mark.parametrize("how", ["entry", "namespace", "all"])
def test_what_is_removed_is_in_memory_no_more_and_not_stored_again(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = pictures_of("llava")
    with stored(pictures, tmp_path, monkeypatch, image_bytes=None) as engine:
        asked(engine, pictures, [20], pictures.one, AFTER, namespace="a").result()
        written(engine, 1)
        (listed,) = [one for one in engine.cache.listed("disk") if one["image"]]
        assert (listed["namespace"], listed["end"]) == ("a", pictures.one.rows)
        if how == "all":
            engine.cache.clear()
        else:
            engine.cache.remove(**{how: listed["name"] if how == "entry" else "a"})
        assert engine.stats().image_bytes == 0
        asked(engine, pictures, [20], [21], namespace="a").result()
        settled(engine)
        assert not features_in(engine)
        asked(engine, pictures, [22], pictures.one, AFTER, namespace="a").result()
        assert counts(engine) == (2, 0)


# -- bytes --------------------------------------------------------------------------------------------------------

ROWS, WIDTH = 4, 3
MODULE = nn.Identity()


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def of_rows(rows: int = ROWS) -> Features:
    layers: Any = {"deep": [numbers(rows, WIDTH), numbers(rows, WIDTH)], "other": {3: numbers(rows, 2)}}
    return Features(numbers(rows, WIDTH, dtype=torch.float32), layers, None, ahead=True)


def of_states(states: int = 5) -> Features:
    crossed = Crossed({MODULE: (numbers(2, states, 3), numbers(2, states, 4))}, {"given": numbers(1, 1, 6)})
    return Features(torch.empty(0), {}, None, ahead=False, crossed=crossed)


def like(features: Features) -> Features:
    return features.holding([one.to("meta") for one in features.tensors(features)])


def read(record: bytes, chunks: Any, known: Features, rows: int) -> Features | None:
    return from_bytes(record, chunks, rows, known, torch.device("cpu"))


@pytest.mark.parametrize(
    ("made", "other", "rows"), [(of_rows(), of_rows(9), ROWS), (of_states(), of_states(8), 1)], ids=["rows", "states"]
)
def test_features_are_the_same_bits_from_bytes(made: Features, other: Features, rows: int) -> None:
    known = like(other)
    record, sizes, chunks = to_bytes(made, known)
    found = read(record, chunks(), known, rows)
    assert found is not None
    assert list(map(len, chunks())) == sizes
    pairs = zip(found.tensors(made), made.tensors(made), strict=True)
    assert all(one.dtype == two.dtype and torch.equal(one, two) for one, two in pairs)
    assert {name: type(one) for name, one in found.layers.items()} == {n: type(one) for n, one in made.layers.items()}
    assert (found.ahead, found.mask, found.bytes) == (made.ahead, made.mask, made.bytes)


SHAPES = {
    "of rows": [[ROWS, WIDTH], [ROWS, WIDTH], [ROWS, WIDTH], [ROWS, 2]],
    "of states": [[2, 5, 3], [2, 5, 4], [1, 1, 6]],
}


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"{}",
        b"[[" * 5000,
        b"[1,2,3,4]",
        [[ROWS, WIDTH]],
        [[ROWS + 1, WIDTH], *SHAPES["of rows"][1:]],
        [[-ROWS, -WIDTH], *SHAPES["of rows"][1:]],
        [[ROWS, WIDTH, 1], *SHAPES["of rows"][1:]],
        [[WIDTH, ROWS], *SHAPES["of rows"][1:]],
        [*SHAPES["of rows"], [1]],
        [[2, 5, 3], [2, 4, 4], [1, 1, 6]],
        [[2, 1 << 60, 3], [2, 1 << 60, 4], [1, 1, 6]],
        [[2, 0, 3], [2, 0, 4], [1, 1, 6]],
        [[2, -5, 3], [2, -5, 4], [1, 1, 6]],
        [[2, 5, 3], [2, 5, 4], [1, 2, 3]],
    ],
)
def test_a_record_that_is_not_of_such_features_is_refused(record: Any) -> None:
    content = record if isinstance(record, bytes) else msgspec.json.encode(record)
    for made, rows in ((of_rows(), ROWS), (of_states(), 1)):
        _, _, chunks = to_bytes(made, made)
        assert read(content, chunks(), like(made), rows) is None


def test_chunks_of_other_sizes_are_refused() -> None:
    for made, rows in ((of_rows(), ROWS), (of_states(), 1)):
        record, _, chunks = to_bytes(made, made)
        for number in range(len(chunks())):
            other = [one[1:] if at == number else one for at, one in enumerate(chunks())]
            assert read(record, other, like(made), rows) is None
        assert read(record, chunks()[1:], like(made), rows) is None
        assert read(record, chunks(), like(made), rows) is not None
