"""The model's own tokenizer: text and chat to the ids that vLLM makes of them. No network, no clock.

Only the beginning of a long text is tokenized. A cut changes the tokens next to it and no others that matter, so these
are left out; equal beginnings stay equal, since they are cut at the same place.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

import msgspec

from adaptersync.router.asked import Asked
from adaptersync.router.chat import ChatTemplates
from adaptersync.router.handover import Handover
from adaptersync_core.errors import ConfigError

REMEMBERED = 256  # texts whose ids are kept, 80 kB each at most: a group asks for the same one again and again
CHARS = 6  # of text for each token that is wanted: more than most have
EDGE = 32  # tokens before a cut that it may have changed
LOAD_S = 120.0  # transformers needs seconds, on a busy host half a minute
SETTING = "router.tokenizer"


class Tokenizer:
    def __init__(self, handover: Handover) -> None:
        from tokenizers import Tokenizer as Core

        self._core = Core.from_str(handover.core)
        self._core.no_truncation()
        self._core.no_padding()
        self._templates = ChatTemplates(handover.templates, handover.special)
        self._remembered = lru_cache(REMEMBERED)(self._ids)

    def text(self, text: str, limit: int, *, special: bool) -> Sequence[int]:
        """The first ids, at most `limit`; `special`: with what the tokenizer puts around a text."""
        most = (limit + EDGE) * CHARS
        return self._remembered(text[:most], len(text) > most, limit, special)

    def _ids(self, text: str, cut: bool, limit: int, special: bool) -> Sequence[int]:
        ids = array("I", self._core.encode_batch_fast([text], add_special_tokens=special)[0].ids)
        if cut:
            del ids[-EDGE:]
        return ids[:limit]

    def chat(self, asked: Asked) -> str:
        """The text of a conversation, whole: a template may look at its end first. Inexact, or what templates raise."""
        return self._templates.render(asked)


async def load(source: str) -> Tokenizer:
    """The tokenizer of a model's directory, or of a model by name. ConfigError says why there is none."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "adaptersync.router.handover",
        source,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LOAD_S):
            handed, complaint = await process.communicate()
    except TimeoutError as error:
        raise ConfigError("tokenizer was not loaded in time", key=SETTING, value=source, timeout_s=LOAD_S) from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = (line.strip() for line in reversed(complaint.decode(errors="replace").splitlines()))
        said = next(islice(filter(None, lines), 1), f"exit code {process.returncode}")
        raise ConfigError(
            f"tokenizer cannot be loaded: {said[:300]}",
            next_step="name the directory of the model that vLLM serves, and install the extra `tokenize`",
            key=SETTING,
            value=source,
        )
    try:
        return Tokenizer(msgspec.json.decode(handed, type=Handover))
    except ImportError as error:
        raise ConfigError(
            f"tokenizer cannot be used: {error}", next_step="install the extra `tokenize`", key=SETTING
        ) from error
