"""One tree of errors.

    AdapterSyncError
    ├── ConfigError          a setting is wrong; names the key
    ├── NameInvalid          a run, replica, group or adapter id is not of the form we accept
    ├── AdapterInvalid       a directory is not an adapter the fleet can serve
    ├── StoreError           the artifact store could not be written or read
    │   ├── NameTaken        the name exists with other bytes; a name is never rewritten
    │   ├── ArtifactCorrupt  bytes differ from what the manifest says
    │   ├── StagingFailed    this host's own disk failed, which says nothing of the version
    │   └── StoreGone        what is there is not the group's store; its mount may come back
    ├── ControlError         Redis said no, or could not be asked
    │   ├── ControlUnavailable
    │   ├── Forgotten        Redis stands at an older state than the caller's
    │   ├── Fenced           a newer trainer, agent or coordinator has taken over
    │   └── Conflict         the fleet moved on between reading and writing
    ├── EngineError          one vLLM server
    │   ├── EngineUnavailable
    │   └── EngineRefused    it answered, and the answer was no
    ├── PublicationFailed    a version did not become current
    └── Unroutable           the router cannot serve the name that was asked for

Every error is one line: what happened, the ids it concerns, and what to do next. `retryable` says whether the same
call may succeed later, `own_fault` that this host is to blame and nothing it was given; `http_status` and `exit_code`
are what a server and a command answer with.
"""

from __future__ import annotations

from typing import ClassVar

NO_MORE_IDS = "exhausted the last possible ID"  # Redis' words: somebody gave a stream the highest id that there is
MEND = "as Redis' admin, mend the stream: deploy/TROUBLESHOOTING.md, A stream that is ahead of the clock"


class AdapterSyncError(Exception):
    """Base of every error raised on purpose."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    own_fault: ClassVar[bool] = False
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(self, reason: str, *, next_step: str = "", **ids: str | int | float | None) -> None:
        self.reason = reason
        self.next_step = next_step
        self.ids = {name: value for name, value in ids.items() if value is not None}
        super().__init__(reason)

    def __str__(self) -> str:
        about = "".join(f" {name}={value}" for name, value in self.ids.items())
        line = f"{self.reason.removesuffix('.')}{' (' + about.strip() + ')' if about else ''}"
        if self.next_step:
            line = f"{line}; {self.next_step}"
        return " ".join(line.split())


class ConfigError(AdapterSyncError):
    code = "config"
    http_status = 400
    exit_code = 78  # EX_CONFIG


class NameInvalid(AdapterSyncError):
    code = "name-invalid"
    http_status = 400
    exit_code = 64  # EX_USAGE


class AdapterInvalid(AdapterSyncError):
    code = "adapter-invalid"
    http_status = 422
    exit_code = 65  # EX_DATAERR


class StoreError(AdapterSyncError):
    code = "store"
    exit_code = 74  # EX_IOERR


class NameTaken(StoreError):
    code = "name-taken"
    http_status = 409


class ArtifactCorrupt(StoreError):
    """`short`: bytes are missing, and may be on their way yet."""

    code = "artifact-corrupt"
    exit_code = 65

    def __init__(
        self, reason: str, *, short: bool = False, next_step: str = "", **ids: str | int | float | None
    ) -> None:
        super().__init__(reason, next_step=next_step, **ids)
        self.short = short


class StagingFailed(StoreError):
    code = "staging-failed"
    own_fault = True


class StoreGone(StoreError):
    code = "store-gone"
    retryable = True


class ControlError(AdapterSyncError):
    code = "control"
    http_status = 503

    @classmethod
    def refused(cls, said: str, **ids: str) -> ControlError:
        """What Redis said when it refused; with what is to be done, where that is known."""
        return cls(f"Redis refused: {said}", next_step=MEND if NO_MORE_IDS in said else "", **ids)


class ControlUnavailable(ControlError):
    code = "control-unavailable"
    retryable = True
    exit_code = 69  # EX_UNAVAILABLE


class Forgotten(ControlError):
    code = "forgotten"


class Fenced(ControlError):
    code = "fenced"
    http_status = 409
    exit_code = 77  # EX_NOPERM


class Conflict(ControlError):
    code = "conflict"
    retryable = True
    http_status = 409
    exit_code = 75  # EX_TEMPFAIL


class EngineError(AdapterSyncError):
    code = "engine"
    http_status = 502


class EngineUnavailable(EngineError):
    code = "engine-unavailable"
    retryable = True
    exit_code = 69


class EngineRefused(EngineError):
    """`status` is the HTTP status of the engine, `kind` its error type."""

    code = "engine-refused"

    def __init__(
        self,
        reason: str,
        *,
        status: int,
        kind: str = "",
        next_step: str = "",
        **ids: str | int | float | None,
    ) -> None:
        super().__init__(reason, next_step=next_step, status=status, **ids)
        self.status = status
        self.kind = kind


class PublicationFailed(AdapterSyncError):
    code = "publication-failed"


class Unroutable(AdapterSyncError):
    """`status` is what the client is told; `retry_after_s` asks it to come back."""

    code = "unroutable"

    def __init__(
        self,
        reason: str,
        *,
        status: int,
        retry_after_s: float | None = None,
        next_step: str = "",
        **ids: str | int | float | None,
    ) -> None:
        super().__init__(reason, next_step=next_step, **ids)
        self.status = status
        self.retry_after_s = retry_after_s
