"""What a look came to: findings, each with its fix, and how much was looked at."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

Role = Literal["trainer", "agent", "coordinator", "router", "worker"]
ROLES: tuple[Role, ...] = get_args(Role)
Level = Literal["error", "warning"]


class Finding(Struct, frozen=True, kw_only=True):
    """`about` is the part of the host. An error keeps something from working, a warning will under load or attack."""

    level: Level
    about: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.level}: {self.about}: {self.what}; {self.fix}"


class Verdict:
    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.looked: list[str] = []

    def check(self, about: str, fine: bool, what: str, fix: str, *, level: Level = "error") -> bool:
        """Note one look; `what` is wrong, and `fix` is to be done, unless it is fine."""
        self.looked.append(about)
        if not fine:
            self.findings.append(Finding(level=level, about=about, what=what, fix=fix))
        return fine

    @property
    def well(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)
