"""Arrays of images that another process reads, and that are gone with the last one who has them."""

import gc
import os
import socket
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcellar.engine.messages import Ask, Submission, ToEngine
from kvcellar.errors import EngineFailed
from kvcellar.frontend.front_end import FrontEnd, Pools
from kvcellar.frontend.process_client import ProcessClient
from kvcellar.images.image import ImageArray, ImageInput
from kvcellar.images.shared import LEAST, received, shareable, to_send
from kvcellar.sampling_params import SamplingParams
from kvcellar.wire import Link, decode, encode, packed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files without a name")


def image(size: int = LEAST) -> ImageInput:
    pixels = np.random.default_rng(1).integers(0, 255, size, dtype=np.uint8)
    arrays = (
        ImageArray("pixel_values", "uint8", (size,), memoryview(pixels.tobytes())),
        ImageArray("image_grid_thw", "int64", (3,), memoryview(np.arange(3).tobytes())),
        ImageArray("none", "float32", (0, 2), memoryview(b"")),
    )
    return ImageInput(bytes(32), 4, arrays)


def files() -> list[str]:
    gc.collect()
    names = (f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd"))
    return sorted(os.readlink(one) for one in names if os.path.lexists(one) and "kvcellar-image" in os.readlink(one))


def test_an_image_is_sent_without_its_arrays_and_has_them_again() -> None:
    kept = shareable(image())
    assert kept == image()
    sent = encode(to_send(kept))
    assert len(sent) < 500
    found = received(decode(sent, ImageInput))
    assert found == image()
    assert [np.array_equal(one.array(), other.array()) for one, other in zip(found.arrays, image().arrays, strict=True)]
    del kept
    assert found == image(), "it is not needed where it came from"
    assert len(files()) == 1
    del found
    assert files() == []


def test_another_process_reads_it() -> None:
    kept = shareable(image())
    message, ours, theirs = encode(to_send(kept)), *os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(theirs, bytes([received(decode(message, ImageInput)) == image()]))
        finally:
            os._exit(0)
    os.close(theirs)
    assert os.read(ours, 1) == b"\1"
    os.waitpid(child, 0)
    os.close(ours)


@pytest.mark.parametrize("shares", [True, False])
def test_only_an_engine_that_its_front_end_has_started_opens_its_memory(shares: bool) -> None:
    ours, theirs = socket.socketpair()
    taken = list[Submission]()
    front = FrontEnd(Link(theirs, ToEngine), Pools(), shares_memory=shares)
    client: Any = SimpleNamespace(number=lambda: 7, submit=lambda submission, _: taken.append(submission))
    front.client = client
    asked = Submission(number=1, prompt=b"", params=SamplingParams(), seed=1, images=(shareable(image()),))
    sent = ProcessClient._to_send(client, asked)
    front._take(Ask(1, packed(sent)))
    front.outbox.close(5.0)
    ours.close()
    theirs.close()
    assert sent.images[0].place is not None
    assert [(one.number, one.images) for one in taken] == ([(7, (image(),))] if shares else [])


def test_small_images_are_in_messages() -> None:
    small = image(1000)
    assert shareable(small) is small
    assert to_send(small) is small
    assert received(decode(encode(small), ImageInput)) == small


def test_what_is_gone_is_not_taken_for_another_file() -> None:
    kept = shareable(image())
    sent = to_send(kept)
    del kept
    gc.collect()
    with pytest.raises(EngineFailed, match="cannot be opened"):
        received(sent)
    other = shareable(image())
    assert sent.place is not None
    assert to_send(other).place != sent.place
    with pytest.raises(EngineFailed, match="is gone"):
        received(sent)
