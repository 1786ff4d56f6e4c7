"""Code blocks of the documents, as a reader copies them."""

from __future__ import annotations

import re
from pathlib import Path

from support.source import REPOSITORY


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a language in a document of the repository, in order."""
    text = (REPOSITORY / document).read_text()
    return re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def scripts(document: str, directory: Path) -> dict[str, Path]:
    """Python blocks that begin with a comment which names their file, each written there."""
    found = {}
    for block in blocks(document, "python"):
        name = block.partition("\n")[0].removeprefix("# ")
        found[name] = directory / name
        found[name].write_text(block)
    return found


def commands(document: str) -> list[str]:
    """What a reader types of the console blocks."""
    lines = "\n".join(blocks(document, "console")).replace("\\\n", "").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
