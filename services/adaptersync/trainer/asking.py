"""One request of a rollout, and its answer in the terms that `answers` judges. Never raises what the network does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from adaptersync.trainer.answers import Answer
from adaptersync_core.headers import REQUEST_ID, VERSION, VOIDED


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    payload: object,
    timeout: float,
    headers: Mapping[str, str] | None = None,
) -> tuple[Answer, Any]:
    """The answer and its body; None where there is none to be trained on."""
    try:
        async with session.post(
            url, json=payload, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout)
        ) as response:
            raw = await response.read()
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        return Answer(status=0, reason=f"{type(error).__name__}: {error}"), None
    if response.status != 200:
        retry_after = response.headers.get("Retry-After", "")
        return Answer(
            status=response.status,
            retry_after_s=float(retry_after) if retry_after.isdecimal() else None,
            reason=raw[:300].decode(errors="replace"),
        ), None
    try:
        body = msgspec.json.decode(raw)
        served = response.headers.get(VERSION) or body["model"]
        aborted = body["choices"][0].get("finish_reason") == "abort"
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
        return Answer(status=0, reason=f"not a completion ({type(error).__name__}: {error})"), None
    voided = VOIDED in response.headers
    reason = "aborted by vLLM" if aborted else f"{served} was found bad meanwhile" if voided else ""
    request_id = response.headers.get(REQUEST_ID, "")
    return Answer(status=200, served=served, aborted=aborted, voided=voided, reason=reason, request_id=request_id), body
