"""What a request asks to be computed: the prompts that routing looks up, and how many sequences it will be.

A request goes to one replica as a whole. Its first prompt decides which: batches of one kind differ in their ends, and
those that come again come in the same order. The others are only noted as owned where it went, so that a request for
one of them alone finds it; as many as `PROMPTS`, and together as many blocks as one prompt may have. Of anything else
no objects are made, whatever its shape: it would hold up all that the router does, in another thread as well.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Literal

import msgspec
import orjson
from msgspec import Raw, Struct
from msgspec.structs import astuple

from adaptersync.router.asked import NO, NOTHING, NULL, YES, Asked, manifold
from adaptersync.router.chat import Inexact
from adaptersync.router.tokenizer import Tokenizer
from adaptersync.router.tokens import chat_bytes, text_bytes, token_ids

PROMPTS = 16  # of one request that are looked at
WEIGHT = 1024  # sequences that one request counts for: more do not run at once in one engine, whatever is asked for
INLINE = 4096  # bytes of JSON that are tokenized where they arrive, within a millisecond: a thousand tokens
THREADS = 2  # for what is longer: up to 30 ms for as much of a prompt as is looked up; Rust lets go of the GIL
QUEUED = 64  # requests that wait for them or have them: two seconds; what comes on top goes by its bytes
FAR = 256 << 10  # bytes of JSON that are read where they arrive, within two milliseconds, where nothing is tokenized
WHOLE = 1 << 20  # bytes of a conversation that is rendered

_FLAT = re.compile(rb"\s*\[\s*-?\d")  # begins like token ids
_BATCH = re.compile(rb'\s*\[\s*["\[]')  # or like several prompts

log = logging.getLogger(__name__)


class Looked(Struct, frozen=True, kw_only=True):
    """One prompt: the numbers to hash, how it was read, and one word why not as the tokens that they will be."""

    tokens: Sequence[int] = ()
    read: Literal["ids", "tokenizer", "bytes", "nothing"] = "nothing"
    reason: str = ""


NOTHING_READ = Looked()


class Prompts(Struct, frozen=True, kw_only=True):
    """Those `looked` at, the first one first. `alike` of the `weight` sequences are of that one."""

    looked: tuple[Looked, ...] = ()
    weight: int = 1
    alike: int = 1

    @property
    def first(self) -> Looked:
        return self.looked[0] if self.looked else NOTHING_READ


class Reader:
    """With a tokenizer, or by bytes."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._prompt = msgspec.json.Decoder(str | list[int])
        self._queued = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, asked: Asked, *, chat: bool, limit: int) -> Prompts:
        """At most `limit` numbers of all prompts together. What is malformed is left to the replica, as no prompt."""
        size = _template_bytes(asked) if chat else len(asked.prompt)
        tokenizes = self._tokenizer is not None and not _is_ids(asked, chat=chat)
        if size <= (INLINE if tokenizes else FAR):
            return self.read_now(asked, chat=chat, limit=limit)
        busy = self._queued >= QUEUED
        self._queued += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: self.read_now(asked, chat=chat, limit=limit, busy=busy)
            )
        finally:
            self._queued -= 1

    def read_now(self, asked: Asked, *, chat: bool, limit: int, busy: bool = False) -> Prompts:
        """`busy`: there is no time for a tokenizer."""
        each = max(_number(asked.n), _number(asked.best_of))
        try:
            prompts = _prompts(asked.messages if chat else asked.prompt, chat=chat)
        except (msgspec.DecodeError, RecursionError):  # depths without end
            prompts = []
        looked: list[Looked] = []
        seen: list[Raw] = []
        for prompt in prompts[:PROMPTS]:
            if prompt in seen or limit <= 0:
                continue
            seen.append(prompt)
            looked.append(self._look(prompt, asked, chat=chat, limit=limit, busy=busy))
            limit -= len(looked[-1].tokens)
        alike = each * prompts.count(prompts[0]) if prompts else each
        weight = min(each * max(len(prompts), 1), WEIGHT)
        return Prompts(looked=tuple(looked), weight=weight, alike=min(alike, weight))

    def _look(self, raw: Raw, asked: Asked, *, chat: bool, limit: int, busy: bool) -> Looked:
        if chat and manifold(raw):
            return Looked(reason="large")
        try:
            prompt = msgspec.json.decode(raw) if chat else self._decoded(raw, limit)
        except (msgspec.DecodeError, RecursionError):  # numbers without bounds, and what is no prompt
            return NOTHING_READ
        if isinstance(prompt, list) and not chat:
            ids = token_ids(prompt, limit)
            return Looked(tokens=ids, read="ids") if len(ids) else NOTHING_READ
        reason = "off" if self._tokenizer is None else "busy"
        if self._tokenizer is not None and not busy:
            try:
                ids = self._exactly(self._tokenizer, prompt, asked, chat=chat, limit=limit)
                return Looked(tokens=ids, read="tokenizer")
            except Inexact as error:
                reason = error.reason
            except Exception as error:  # a template is a program, and tokenizers raises just this
                log.debug("not tokenized: %r", error)
                reason = "failed"
        try:
            numbers = text_bytes(prompt, limit) if isinstance(prompt, str) else chat_bytes(prompt, limit)
        except (orjson.JSONEncodeError, RecursionError):
            return NOTHING_READ
        return Looked(tokens=numbers, read="bytes", reason=reason)

    def _decoded(self, raw: Raw, limit: int) -> str | list[int]:
        """A text, or token ids; of many only the first. DecodeError at the first thing that is neither."""
        if len(raw) > FAR and _FLAT.match(raw):
            first = bytes(raw).split(b",", limit)[:limit]  # the rest is not looked at
            return self._prompt.decode(b",".join(first).rstrip(b"] \n\r\t") + b"]")
        return self._prompt.decode(raw)

    @staticmethod
    def _exactly(tokenizer: Tokenizer, prompt: object, asked: Asked, *, chat: bool, limit: int) -> Sequence[int]:
        if asked.truncate_prompt_tokens not in NULL:
            raise Inexact("truncated")
        if asked.add_special_tokens not in (NOTHING, YES, NO):
            raise Inexact("fields")
        if chat:
            if _template_bytes(asked) > WHOLE or any(map(manifold, _template_parts(asked))):
                raise Inexact("large")
            return tokenizer.text(tokenizer.chat(asked), limit, special=asked.add_special_tokens == YES)
        if asked.suffix not in NULL:
            raise Inexact("suffix")
        return tokenizer.text(str(prompt), limit, special=asked.add_special_tokens != NO)


def _prompts(raw: Raw, *, chat: bool) -> list[Raw]:
    """Each as it was written, and no more than a request can count for."""
    if raw in NULL:
        return []
    if chat or not _BATCH.match(raw):
        return [raw]
    return [prompt for prompt in astuple(_batches().decode(raw)) if len(prompt)]


@cache
def _batches() -> msgspec.json.Decoder[Struct]:
    """A list as a struct, since what follows a struct's last field is passed over."""
    fields = [(f"prompt_{number}", Raw, NOTHING) for number in range(WEIGHT)]
    return msgspec.json.Decoder(msgspec.defstruct("Batch", fields, array_like=True))


def _template_bytes(asked: Asked) -> int:
    return sum(map(len, _template_parts(asked)))


def _template_parts(asked: Asked) -> tuple[Raw, ...]:
    """All that a template may print."""
    return asked.messages, asked.tools, asked.documents, asked.chat_template_kwargs


def _is_ids(asked: Asked, *, chat: bool) -> bool:
    """Whether it looks like token ids, which need no thread."""
    return not chat and b'"' not in bytes(memoryview(asked.prompt)[:256])


def _number(raw: Raw) -> int:
    if raw in NULL:
        return 1
    try:
        return max(msgspec.json.decode(raw, type=int, strict=False), 1)
    except msgspec.DecodeError:  # the replica will say so
        return 1
