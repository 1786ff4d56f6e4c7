"""The table: what the fleet should hold and what may be served, in one document.

The coordinator alone writes it, whole, with every decision; its generation grows by one each time. Agents take from it
what their engine should have loaded, routers what may be asked for, trainers what is current. It holds only what is
alive: the fate of versions that are gone stands in their own records.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from adaptersync_core.errors import ControlError
from adaptersync_core.ranks import Ranks

LiveState = Literal["staging", "ready", "current", "retained", "retiring"]
Fate = Literal["retired", "voided", "rolled_back", "superseded"]
MemberState = Literal["joining", "ready", "draining", "ejected"]
ROUTABLE: frozenset[LiveState] = frozenset({"current", "retained"})


class LiveVersion(Struct, frozen=True, kw_only=True):
    """One version the fleet deals with. Times are the control server's wall clock in seconds.

    `drained` is set on a retiring version once no router sends to it: agents then unload it. `changed_in` is the
    generation in which `state` was entered. `fate` is what its record says once it is gone. `admitted` is set on a
    ready version that was let through the gate; `held` says why the gate's function left it to an operator. `exposed`
    marks one that some router may have been told to serve although this table never said so: a promotion of it may
    have been lost.
    """

    run: str
    seq: int
    epoch: int
    digest: str
    state: LiveState
    published_at: float
    since: float
    changed_in: int
    drained: bool = False
    admitted: bool = False
    held: str = ""
    exposed: bool = False
    fate: Fate = "retired"

    @property
    def waits_at_gate(self) -> bool:
        """Where there is a gate: every replica has proved it, and nobody has let it through."""
        return self.state == "ready" and not self.admitted

    @property
    def unanswered(self) -> bool:
        """The same, and the gate's function, if there is one, may still answer."""
        return self.waits_at_gate and not self.held


class Member(Struct, frozen=True, kw_only=True):
    """One replica as the coordinator sees it; `reason` says why it is in that state.

    `silent` is set on one of which nothing was heard, ejected or kept for the floor: what is in flight there may never
    be answered. `ranks` are the engines behind its address (`ranks.py`).
    """

    state: MemberState
    url: str
    engine_epoch: str
    since: float
    block_size: int
    reason: str = ""
    silent: bool = False
    ranks: Ranks = 1


class RunEntry(Struct, frozen=True, kw_only=True):
    """One run. `considered` is the highest sequence number that has been taken up or passed over.

    `ended_at` is when its trainer, or an operator, said that nothing more comes, once all that came before is
    considered; 0 while more may come.
    """

    epoch: int
    max_staleness: int
    considered: int = 0
    current: str | None = None
    ended_at: float = 0.0


class Table(Struct, frozen=True, kw_only=True):
    """`versions` by adapter id, `members` by replica, `runs` by name.

    `incarnation` is the term of the coordinator that wrote it, `restored_at` when the control state was last rebuilt.
    """

    incarnation: str = ""
    generation: int = 0
    written_at: float = 0.0
    restored_at: float = 0.0
    min_ready: int = 1
    runs: dict[str, RunEntry] = {}
    versions: dict[str, LiveVersion] = {}
    members: dict[str, Member] = {}

    def wanted(self) -> list[str]:
        """What every engine should hold: what is served first, then what is on its way in."""
        order: dict[LiveState, int] = {"current": 0, "retained": 1, "retiring": 2, "ready": 3, "staging": 4}
        live = [(order[entry.state], -entry.seq, name) for name, entry in self.versions.items() if not entry.drained]
        return [name for _, _, name in sorted(live)]

    def routable(self, adapter_id: str) -> bool:
        entry = self.versions.get(adapter_id)
        return entry is not None and entry.state in ROUTABLE

    def voided(self, adapter_id: str) -> bool:
        entry = self.versions.get(adapter_id)
        return entry is not None and entry.fate == "voided"

    def window(self, run: str) -> list[str]:
        """Routable versions of a run, newest first; the first is not always current (a rollback moves it back)."""
        mine = [
            (entry.seq, name) for name, entry in self.versions.items() if entry.run == run and entry.state in ROUTABLE
        ]
        return [name for _, name in sorted(mine, reverse=True)]

    def candidate(self, run: str) -> str | None:
        """The one version of a run that is on its way in."""
        for name, entry in self.versions.items():
            if entry.run == run and entry.state in ("staging", "ready"):
                return name
        return None

    def ready(self) -> list[str]:
        """Replicas that may be sent requests."""
        return sorted(name for name, member in self.members.items() if member.state == "ready")

    def silent(self) -> frozenset[str]:
        """Of those, who is to be asked only when nobody else is left."""
        return frozenset(name for name, member in self.members.items() if member.state == "ready" and member.silent)


def read_table(text: str | bytes | None) -> Table:
    """As Redis has it. Without one nobody can go on: unlike other records it is not left out."""
    try:
        return Table() if text is None else msgspec.json.decode(text, type=Table)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ControlError(f"table cannot be read: {error}", next_step="see what wrote it") from error
