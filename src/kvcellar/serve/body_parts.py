"""body_parts: receives a body that is too large to be held, part by part."""

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect

from kvcellar.serve.api_errors import ApiError, ClientDisconnected


async def next_part(parts: AsyncIterator[bytes], seconds: float, what: str) -> bytes | None:
    """The next part; None after the last. Raises `ApiError` 408 if none arrives in time, and `ClientDisconnected`."""
    try:
        async with asyncio.timeout(seconds):
            return await anext(parts, None)
    except TimeoutError:
        message = f"no part of the {what} arrived within {seconds:g} seconds"
        raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None
    except ClientDisconnect:
        raise ClientDisconnected from None
