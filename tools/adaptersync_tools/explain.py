"""The settings as people read them: what each key means, its default, where its value comes from; and as TOML.

The meaning is the text under the field in `adaptersync_core.config`, read from the source: a docstring under a field
is not kept at run time.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from adaptersync_core import config as settings
from adaptersync_core.config import Config, shown, variable


class Key(Struct, frozen=True, kw_only=True):
    """One setting; `variable` is its name in the environment. A secret, or one in an address, is hidden."""

    name: str
    default: str | int | float | bool
    value: str | int | float | bool
    meaning: str
    variable: str


def keys(config: Config) -> Iterator[Key]:
    """Every setting in the order of the source, with its value in `config`."""
    defaults, values = msgspec.to_builtins(Config()), msgspec.to_builtins(config)
    meanings = _meanings()
    for section, fields in values.items():
        kind = type(getattr(config, section)).__name__
        for field, value in fields.items():
            yield Key(
                name=f"{section}.{field}",
                default=defaults[section][field],
                value=shown(f"{section}.{field}", value),
                meaning=meanings.get((kind, field), ""),
                variable=variable(f"{section}.{field}"),
            )


def _meanings() -> dict[tuple[str, str], str]:
    """(class, field) to the text under the field."""
    found = {}
    for node in ast.parse(inspect.getsource(settings)).body:
        if isinstance(node, ast.ClassDef):
            for field, after in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                    and isinstance(after.value.value, str)
                ):
                    found[node.name, field.target.id] = inspect.cleandoc(after.value.value)
    return found


def to_toml(dotted: Mapping[str, Any]) -> str:
    """{"router.port": 8080} as a settings file."""
    sections: dict[str, list[str]] = {}
    for name, value in dotted.items():
        section, _, key = name.partition(".")
        # a JSON string, number or boolean is also a TOML one
        sections.setdefault(section, []).append(f"{key} = {json.dumps(value, ensure_ascii=False)}\n")
    return "\n".join(f"[{section}]\n{''.join(lines)}" for section, lines in sections.items())


def document() -> str:
    """`deploy/CONFIG.md`: every setting, by section."""
    lines = [INTRODUCTION]
    section = ""
    for key in keys(Config()):
        at, _, name = key.name.partition(".")
        if at != section:
            section = at
            about = inspect.getdoc(type(getattr(Config(), at))) or ""
            # a section without words of its own shows those of all sections
            own = "" if about == inspect.getdoc(settings.Section) else f"{about}\n\n"
            lines.append(f"\n## {at}\n\n{own}| key | default | meaning |\n| --- | --- | --- |\n")
        meaning = " ".join(key.meaning.split()).replace("|", "\\|")
        default = json.dumps(key.default, ensure_ascii=False)
        lines.append(f"| `{name}` | `{default}` | {meaning} |\n")
    return "".join(lines)


INTRODUCTION = """\
# Settings

Made by `python -m adaptersync_tools.observing` from `adaptersync_core/config.py`: change that.

Defaults, then a TOML file (`--config`, else `ADAPTERSYNC_CONFIG`), then the environment; the last one wins. `port` of
the section `[router]` is `ADAPTERSYNC_ROUTER__PORT` there, and a list is written with commas. A wrong or unknown key is
an error that names it. All are read when a service starts; files of secrets that they name, as SECURITY.md says.

```console
$ adaptersync config             # what is in force here, as a settings file
$ adaptersync config --explain   # the same with meanings, and what differs from the default
```

Durations end in `_s` and are seconds, sizes in `_bytes`. Services of one group must agree on `[group]`, on
the addresses of `[redis]`, and on the store; coordinators that stand in for each other, on `[coordinator]`, too.
"""
