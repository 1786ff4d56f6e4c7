"""A version's name means one set of bytes, wherever it was read: events, store, ledger. Pure."""

from __future__ import annotations

from adaptersync_core.errors import NameInvalid
from adaptersync_core.identity import parse_adapter_id


class Names:
    """Every name with the digest it was first seen with, and every number with its name."""

    def __init__(self) -> None:
        self._digests: dict[str, tuple[str, str]] = {}
        self._numbers: dict[tuple[str, int], str] = {}

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, where: str, version: str, digest: str) -> list[str]:
        """What is wrong with it. Files alone give a number no name: two trainers may have stored, one announced."""
        try:
            identity = parse_adapter_id(version)
        except NameInvalid as error:
            return [f"{where} names no version: {error}"]
        found = []
        known, before = self._digests.setdefault(version, (digest, where))
        if known != digest:
            found.append(f"{version} has two digests: {known} in {before}, {digest} in {where}")
        if not digest.startswith(identity.digest12):
            found.append(f"{version} has another digest in {where}: {digest}")
        if where != "the store":
            owner = self._numbers.setdefault((identity.run, identity.seq), version)
            if owner != version:
                found.append(f"number reused: {owner} and {version}, which {where} names")
        return found
