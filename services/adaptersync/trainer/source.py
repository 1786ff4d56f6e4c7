"""Where an adapter lies that is to be published: in a directory, or wherever a model saves itself."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from adaptersync_core.errors import AdapterInvalid


class SavesAdapter(Protocol):
    """A PeftModel, as far as it matters here."""

    def save_pretrained(self, save_directory: str) -> Any: ...


@contextlib.contextmanager
def directory_of(source: str | Path | SavesAdapter, *, keep: bool = False) -> Iterator[Path]:
    """Where it lies; a model is saved, for as long as the block lasts or, to `keep`, until somebody removes it."""
    if isinstance(source, str | Path):
        yield Path(source)
        return
    if not callable(getattr(source, "save_pretrained", None)):
        raise AdapterInvalid(
            "neither a directory nor a model that saves itself",
            next_step="give a PEFT directory or a PeftModel",
            given=type(source).__name__,
        )
    scratch = Path(tempfile.mkdtemp(prefix="adaptersync-"))
    try:
        source.save_pretrained(str(scratch))
        yield scratch
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            shutil.rmtree(scratch)
