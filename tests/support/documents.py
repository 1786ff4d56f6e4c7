"""Code blocks of the documents, as a reader copies them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from adaptersync_tools.cli import adaptersync
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


def typed(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """AssertionError where our command line would not take them. Nothing runs, and files need not be there."""
    assert words[0] == "adaptersync"
    with monkeypatch.context() as patch:
        patch.setattr(click.Path, "convert", lambda _self, value, _parameter, _context: value)
        command: click.Command = adaptersync
        context = None
        arguments = list(words[1:])
        try:
            while isinstance(command, click.Group) and not arguments[0].startswith("-"):
                context = click.Context(command, info_name=command.name, parent=context)
                _, found, arguments = command.resolve_command(context, arguments)
                assert found is not None
                command = found
            command.make_context(command.name, arguments, parent=context)
        except click.exceptions.Exit:
            return  # it was asked for help
        except click.ClickException as error:
            raise AssertionError(f"{' '.join(words)}: {error.format_message()}") from error
