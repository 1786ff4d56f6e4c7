"""Names: groups, runs, replicas and versions.

A version is named by its adapter id, `{run}-v{seq}-{digest12}`: the LoRA name in vLLM, the model in an OpenAI request,
the directory in the store and the field in every log, event and ledger row. The name carries the content digest, so
one name means one set of bytes. Knows nothing of where names are kept.
"""

from __future__ import annotations

import re

from msgspec import Struct

from adaptersync_core.errors import NameInvalid

NAME = r"[a-z0-9](?:[a-z0-9._-]{0,46}[a-z0-9])?"
DIGEST12 = 12  # hex digits of the digest in a name: 48 bits, beside a sequence number that is unique in its run

_NAME = re.compile(NAME)
_ADAPTER_ID = re.compile(rf"(?P<run>{NAME})-v(?P<seq>[1-9][0-9]{{0,17}})-(?P<digest>[0-9a-f]{{{DIGEST12}}})")


class VersionName(Struct, frozen=True):
    """The parts an adapter id is made of; `digest12` is the head of the content digest in hex."""

    run: str
    seq: int
    digest12: str

    def __str__(self) -> str:
        return f"{self.run}-v{self.seq}-{self.digest12}"


def adapter_id(run: str, seq: int, digest: str) -> str:
    """The adapter id of sequence number `seq` of `run` with content digest `digest` (64 hex digits)."""
    name = str(VersionName(check_name("run", run), seq, digest[:DIGEST12]))
    parse_adapter_id(name)
    return name


def parse_adapter_id(text: str) -> VersionName:
    """Take an adapter id apart; NameInvalid when it is none."""
    found = _ADAPTER_ID.fullmatch(text)
    if found is None or ".." in found["run"]:
        raise NameInvalid("not an adapter id", next_step="give it as run-v7-0123456789ab", name=text[:96])
    return VersionName(found["run"], int(found["seq"]), found["digest"])


def is_adapter_id(text: str) -> bool:
    try:
        parse_adapter_id(text)
    except NameInvalid:
        return False
    return True


def check_name(kind: str, name: str) -> str:
    """`name` itself if it may name a `kind` (run, replica, group); such names are safe in paths and Redis keys."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise NameInvalid(
            f"{kind} name must be 1 to 48 of a-z 0-9 . _ - and begin and end with a letter or digit",
            next_step=f"choose another {kind} name",
            name=name[:96],
        )
    return name


def check_run(name: str, *, base_model: str) -> str:
    """`name` itself if it may name a run that begins: as a model it must mean this run and nothing else."""
    check_name("run", name)
    taken = "the base model's" if name == base_model else "of a version's shape" if is_adapter_id(name) else ""
    if taken:
        raise NameInvalid(
            f"run name is {taken}: requests for it would go elsewhere", next_step="choose another run name", name=name
        )
    return name
