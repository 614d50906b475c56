"""wire: records as MessagePack, and a stream of them between two processes of one installation.

Records are frozen classes of msgspec or dataclasses, decoded through their constructors, which check values. A frame is
the length of a message, in 4 bytes, little-endian, and the message.

Always true:
  * what arrives is data: nothing of it is executed or imported, and its types are those of the class that was expected;
  * a frame has at most `MOST` bytes; a longer one is refused before memory is allocated for it;
  * messages of several threads are whole, and arrive in the order in which they were sent.
"""

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePath
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast, get_type_hints

import msgspec
from msgspec import Raw, Struct, structs
from tokenizers import Tokenizer

from kvcellar import errors
from kvcellar.errors import EngineFailed

T = TypeVar("T")

MOST = 256 << 20  # bytes of a message
STALLED = 5.0  # seconds by which a wait is too long where this process was stopped meanwhile
_HEADER = 4  # bytes of the length before it
_ERRORS: Mapping[str, type[Exception]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == errors.__name__
}


class ErrorRecord(Struct, frozen=True, array_like=True):
    """An exception of `kvcellar.errors`, without its cause and its traceback."""

    kind: str  # the name of its class
    text: str  # what its str() returns
    fields: dict[str, Any]  # the attributes that its class declares


def record_of(error: Exception) -> ErrorRecord:
    """What of an exception is sent. One of a class outside of `kvcellar.errors` is sent as an `EngineFailed`."""
    kind = type(error)
    if _ERRORS.get(kind.__name__) is not kind:
        return ErrorRecord(EngineFailed.__name__, _utf8(f"{kind.__name__}: {error}"), {})
    return ErrorRecord(
        kind.__name__, _utf8(str(error)), {name: _utf8(getattr(error, name)) for name in get_type_hints(kind)}
    )


def error_of(record: ErrorRecord) -> Exception:
    """The exception again: its class, text and attributes. Raises `ValueError` for what is none."""
    if (kind := _ERRORS.get(record.kind)) is None:
        raise ValueError(f"kvcellar.errors has no class {record.kind!r}")
    declared = msgspec.defstruct(kind.__name__, list(get_type_hints(kind).items()))
    fields = structs.asdict(msgspec.convert(record.fields, declared))
    error = kind.__new__(kind, record.text)  # without its __init__, which makes the text of other arguments
    error.__dict__.update(fields)
    return error


def _utf8(value: Any) -> Any:
    """A value whose texts can be sent: halves of surrogate pairs, as in names of files, are escaped in them."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_utf8(key): _utf8(one) for key, one in cast("dict[Any, Any]", value).items()}
    return value


def _to_plain(value: Any) -> Any:
    if isinstance(value, MappingProxyType):
        return dict(cast("MappingProxyType[Any, Any]", value))
    if isinstance(value, PurePath):
        return os.fsencode(value)
    if isinstance(value, Exception):
        return record_of(value)
    if isinstance(value, Tokenizer):
        return value.to_str()
    raise NotImplementedError


def _from_plain(kind: type, value: Any) -> Any:
    if kind is Exception:
        return error_of(msgspec.convert(value, ErrorRecord))
    if kind is Tokenizer:
        return Tokenizer.from_str(msgspec.convert(value, str))
    if kind is Path:
        return Path(os.fsdecode(msgspec.convert(value, bytes)))
    raise NotImplementedError


_FIRST = threading.Lock()  # msgspec 0.22 crashes where two threads decode a class that was never decoded before
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)


def _encode_into(frame: bytearray, value: object) -> None:
    try:
        _ENCODER.encode_into(value, frame, len(frame))
    except (TypeError, ValueError, OverflowError, NotImplementedError, RecursionError) as error:
        raise ValueError(f"a {type(value).__name__} cannot be sent: {error}") from error


def frame_of(message: object) -> bytearray:
    """The frame of a message. Raises `ValueError` for what cannot be sent or is too long."""
    frame = bytearray(_HEADER)
    _encode_into(frame, message)
    if (size := len(frame) - _HEADER) > MOST:
        raise ValueError(f"a {type(message).__name__} has {size} bytes; {MOST} can be sent")
    frame[:_HEADER] = size.to_bytes(_HEADER, "little")
    return frame


def encode(value: object) -> bytes:
    """A record as MessagePack. Raises `ValueError` for one that has what cannot be sent: an object of another kind than
    `messages` names, an int of more than 64 bits, a text with half of a surrogate pair."""
    data = bytearray()
    _encode_into(data, value)
    return bytes(data)


def packed(value: object) -> Raw:
    """As `encode`: a part of a message that its receiver decodes when it knows of which class it is."""
    return Raw(encode(value))


def decode(data: bytes | Raw, kind: Any) -> Any:
    """The record of this class, or of a union, that was encoded. Raises `ValueError` for anything else."""
    return _checked(lambda: _decoder(kind).decode(data))


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    with _FIRST:
        return msgspec.msgpack.Decoder(kind, dec_hook=_from_plain)


def prepared(kind: Any) -> Any:
    """`kind`, which msgspec may be given from now on in several threads at once."""
    _decoder(kind)
    return kind


def _checked(decoded: Callable[[], T]) -> T:
    try:
        return decoded()
    except (ValueError, RecursionError) as error:  # those of msgspec are ValueErrors
        raise ValueError(f"what arrived is not a message that was expected: {error}") from error


class Link(Generic[T]):
    """One end of a stream of messages, over a connected socket, which it owns."""

    def __init__(self, end: socket.socket, receives: Any) -> None:
        """`end`: blocking, without a timeout. `receives`: the class of what arrives, or the union of such."""
        self._end, self._sending = end, threading.RLock()
        self._decoder = _decoder(receives)

    def send(self, message: object) -> None:
        """From any thread; blocks while the other end does not read and the socket's buffer is full.

        Raises `ValueError` for what cannot be sent or is too long: then nothing was sent. Raises `ConnectionError` if
        one of both ends is closed. A call that is interrupted closes the link: part of its message may have been sent.
        """
        self.write(frame_of(message))

    def write(self, frame: "bytearray | memoryview") -> None:
        """Send what `frame_of` has made, or the rest of it, as `send` does."""
        with self._sending:
            try:
                self._end.sendall(frame)
            except ConnectionError:
                raise
            except OSError as error:
                raise ConnectionError(f"the link is closed: {error}") from error
            except BaseException:
                self.close()
                raise

    def write_some(self, frame: bytearray) -> int:
        """Send as much of a frame as the socket's buffer has room for, without waiting; returns how many bytes. The
        rest must be what is sent next. Raises `ConnectionError` if one of both ends is closed."""
        with self._sending:
            try:
                return self._end.send(frame, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return 0
            except ConnectionError:
                raise
            except OSError as error:
                raise ConnectionError(f"the link is closed: {error}") from error

    def receive(self) -> T:
        """The next message; blocks until it has arrived. By one thread at a time.

        Raises `EOFError` if one of both ends is closed, within a message too, and `ValueError` for what is no message
        of the expected class; the link has to be closed then.
        """
        size = int.from_bytes(self._exactly(_HEADER), "little")
        if size > MOST:
            raise ValueError(f"a message of {size} bytes was announced; {MOST} can be sent")
        frame = self._exactly(size)
        return _checked(lambda: self._decoder.decode(frame))

    def arrives(self, seconds: float) -> bool:
        """Wait until a message arrives, or the end of the link, for at most so long. Whether it does."""
        waiting = select.poll()  # unlike `select`, for any number of open files
        waiting.register(self._end, select.POLLIN)
        return bool(waiting.poll(1000 * seconds))

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        try:
            while rest and (count := self._end.recv_into(rest)):
                rest = rest[count:]
        except OSError as error:
            raise EOFError(f"the link is closed: {error}") from error
        if rest:
            raise EOFError(f"the link was closed {len(rest)} bytes before the end of a message or its length")
        return data

    def end_sending(self) -> None:
        """Nothing more will be sent; the other end receives `EOFError` when it has received all that was."""
        with suppress(OSError):  # the other end is closed, or this one was before
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """From any thread; may be called again. A blocked `receive` of either end raises `EOFError`."""
        with suppress(OSError):  # the other end is closed, or this one was before
            self._end.shutdown(socket.SHUT_RDWR)  # ends a `send` of another thread
        with self._sending:
            self._end.close()


class Outbox:
    """Sends messages in order: at once where the socket has room for them, else on a thread of its own. So who puts
    them in waits for nothing. Nothing else is sent over its link. Where `MOST` bytes wait, as the other end does not
    read, the link is closed."""

    def __init__(self, link: Link[Any], unsent: Callable[[object, ValueError], None]) -> None:
        """`unsent` is called with a message that cannot be sent, by `put`."""
        self._link, self._unsent = link, unsent
        self._lock = threading.Lock()  # held for what follows
        self._left = 0  # bytes that the thread has got and has not sent: what comes meanwhile is behind them
        self._frames = SimpleQueue[memoryview | None]()
        self._thread = threading.Thread(target=self._run, name="kvcellar-send", daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        """From any thread. What is put in after the end of the link is dropped. A call that is interrupted closes the
        link: part of its message may have been sent."""
        try:
            frame = frame_of(message)
        except ValueError as error:
            self._unsent(message, error)
            return
        with self._lock:
            try:
                sent = 0 if self._left else self._link.write_some(frame)
                if self._left >= MOST:
                    self._link.close()
                elif sent < len(frame):
                    self._left += len(frame) - sent
                    self._frames.put(memoryview(frame)[sent:])
            except ConnectionError:
                return  # the other end has gone: the thread that receives sees it, too
            except BaseException:
                self._link.close()
                raise

    def close(self, seconds: float) -> None:
        """Send what was put in, for at most so long."""
        self._frames.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (frame := self._frames.get()) is not None:
            try:
                self._link.write(frame)
            except ConnectionError:
                return
            with self._lock:
                self._left -= len(frame)


def ticks(ended: threading.Event, seconds: float) -> Iterator[bool]:
    """Every so many seconds until the event: whether this process was stopped meanwhile, as a debugger does, so that
    it has neither told nor read anything."""
    last = time.monotonic()
    while not ended.wait(seconds):
        now = time.monotonic()
        yield now - last > seconds + STALLED
        last = now
