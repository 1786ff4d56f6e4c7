"""What the documents say is so: their links, commands, settings, messages, keys and fields."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaptersync_core.config import Config, load_config, names
from adaptersync_core.events import AnyEvent
from adaptersync_core.keys import PREFIX, SPECS
from support.documents import blocks, commands, typed
from support.source import REPOSITORY, modules

DOCUMENTS = [
    "README.md",
    *(str(path.relative_to(REPOSITORY)) for path in sorted((REPOSITORY / "deploy").rglob("*.md"))),
]
SECTIONS = Config.__struct_fields__


def text(document: str) -> str:
    return (REPOSITORY / document).read_text()


def anchors(document: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text(document)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = (REPOSITORY / document).parent / path if path else REPOSITORY / document
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


def test_every_document_of_a_matter_is_in_the_index() -> None:
    index = text("deploy/README.md")
    missing = [path.name for path in (REPOSITORY / "deploy").glob("*.md") if f"({path.name})" not in index]
    assert missing == ["README.md"]


def ours(line: str) -> Iterator[list[str]]:
    """Each call of ours in a line that is typed into a shell."""
    ended = line + "'" * (line.count("'") % 2)  # where it goes on in the next line
    lexer = shlex.shlex(ended, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    calls: list[list[str]] = [[]]
    for token in lexer:
        if set(token) <= set("|&;<>()"):
            calls.append([])
        elif calls[-1] or not (token == "sudo" or re.fullmatch(r"[A-Z_]+=.*", token)):
            calls[-1].append(token)
    for name, *arguments in filter(None, calls):
        if name.rpartition("/")[2] == "adaptersync":
            yield ["adaptersync", *arguments]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_are_such(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in commands(document):
        for words in ours(line):
            typed(words, monkeypatch)
        for path in re.findall(r"(?<![\w/.])(?:deploy|tools)/[\w./-]+", line):
            assert (REPOSITORY / path).exists(), line


@pytest.mark.parametrize("document", DOCUMENTS)
def test_settings_are_such(document: str, tmp_path: Path) -> None:
    """Words in code that look like one: `router.hold_s`, ADAPTERSYNC_ROUTER__HOLD_S."""
    known = set(names())
    written = text(document)
    others = {kind.__struct_config__.tag for kind in AnyEvent.__args__}
    for name in re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_]+)`", written):
        assert name in known or name in others, name
    for section, key in re.findall(r"ADAPTERSYNC_([A-Z]+)__([A-Z_]+)", written):
        assert f"{section}.{key}".lower() in known
    for block in blocks(document, "toml"):
        (tmp_path / "adaptersync.toml").write_text(block)
        load_config(tmp_path / "adaptersync.toml", environment={})


def said() -> str:
    """Every text that the product may say; what is filled in is an ellipsis."""
    found = []
    for module in modules():
        for node in ast.walk(ast.parse(module.path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_symptoms_are_what_the_product_says() -> None:
    """The first column of the tables: whoever searches for what was said finds it."""
    everything = said()
    rows = [row.split(" | ")[0] for row in text("deploy/TROUBLESHOOTING.md").splitlines() if row.startswith("| ")]
    symptoms = [symptom for row in rows for symptom in re.findall(r"`([^`]+)`", row)]
    assert len(symptoms) > 20
    assert [symptom for symptom in symptoms if symptom not in everything] == []


def test_keys_and_fields_of_events_are_such() -> None:
    patterns = [re.sub(r"\\{\w+\\}", "[^:]+", re.escape(spec.pattern)) for spec in SPECS]
    written = text("deploy/EVENTS.md")
    keys = set(re.findall(rf"{PREFIX}:\{{default\}}:([\w:@.-]+)", written))
    assert keys
    for key in keys:
        assert any(re.fullmatch(pattern, key) for pattern in patterns), key
    kinds = {kind.__struct_config__.tag: kind for kind in AnyEvent.__args__}
    table = dict(re.findall(r"^\| `([a-z._]+)` \| (.*?) \|", written, re.MULTILINE))
    assert table.keys() == kinds.keys()
    for name, fields in table.items():
        assert re.findall(r"`(\w+)`", fields) == list(kinds[name].__struct_fields__), name
