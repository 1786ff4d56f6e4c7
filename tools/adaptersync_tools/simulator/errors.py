"""How a simulated vLLM refuses: status, error type and message as the real server words them.

Knows vLLM's error body and which parts of a message it hides. Does not know routes or engines.

    SimulatedError
    ├── Refused      an answer with a status; the engine lives on
    └── EngineDead   the engine core is gone; everything in flight fails
"""

import re
from http import HTTPStatus
from typing import Any

_HIDDEN_PATHS = re.compile(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+" r"|(?:/[\w\-]+)+/[\w\-]+\.\w+")


class SimulatedError(Exception):
    """Any failure the simulated server answers with."""


class Refused(SimulatedError):
    def __init__(self, status: int, kind: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON body vLLM sends: paths hidden, `code` equal to the status."""
        message = _HIDDEN_PATHS.sub("<path>", str(self)).strip()
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.status}}


class EngineDead(SimulatedError):
    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


def user_error(message: str) -> Refused:
    return Refused(HTTPStatus.BAD_REQUEST, "InvalidUserInput", message)


def bad_request(message: str, param: str | None = None, value: object = None) -> Refused:
    """A request the engine's own checks refuse; `param` and `value` are appended the way vLLM does."""
    if param is not None:
        message += f" (parameter={param})" if value is None else f" (parameter={param}, value={value})"
    return Refused(HTTPStatus.BAD_REQUEST, "BadRequestError", message, param=param)


def invalid_body(detail: str, param: str | None = None) -> Refused:
    """A body that does not fit the schema. vLLM answers 400, never 422 or 415."""
    return Refused(HTTPStatus.BAD_REQUEST, "Bad Request", f"1 validation error:\n  {detail}", param=param)


def not_found(message: str, param: str | None = None) -> Refused:
    return Refused(HTTPStatus.NOT_FOUND, "NotFoundError", message, param=param)


def worker_failure(call: str, cause: str) -> Refused:
    """An exception inside a worker, as the API process reports it."""
    return Refused(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "InternalServerError",
        f"Call to {call} method failed: Worker failed with error '{cause}', "
        "please check the stack trace above for the root cause",
    )
