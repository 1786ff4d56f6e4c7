"""A host of its own that runs our units: a real systemd in namespaces, with a Redis and an installation of this tree.

Needs root and a kernel that gives us namespaces, overlays and cgroups; `objection` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from support.source import PACKAGES
from support.wait import wait_until_sync

SYSTEMD = Path("/lib/systemd/systemd")
SCRIPT = Path(__file__).with_name("booted.sh")
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--cgroup", "--ipc", "--uts", "--net")
PREFIX = Path("/opt/adaptersync")
CLI = (f"{PREFIX}/bin/python", "-I", "-m", "adaptersync_tools.cli")
SETTINGS = "/etc/adaptersync/adaptersync.toml"
BOOT_S = 60.0
REDIS = """\
[Service]
ExecStart={binary} --port 6379 --bind 127.0.0.1 --save "" --dir /tmp
PrivateTmp=yes
"""


def objection() -> str:
    """Why no host can be booted here; empty when one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "not root on Linux"
    if not SYSTEMD.exists():
        return f"no {SYSTEMD}: apt-get install systemd"
    missing = [tool for tool in ("unshare", "nsenter", "ip", "redis-server") if shutil.which(tool) is None]
    if missing:
        return f"no {' '.join(missing)}"
    tried = (
        "t=$(mktemp -d) && mount -t tmpfs tmpfs $t && mkdir $t/u $t/w $t/m $t/c && mount -t cgroup2 cgroup2 $t/c && "
    )
    tried += "mkdir $t/c/x && rmdir $t/c/x && mount -t overlay overlay -o lowerdir=/,upperdir=$t/u,workdir=$t/w $t/m"
    run = subprocess.run([*NAMESPACES, "sh", "-c", tried], capture_output=True, text=True, timeout=20)
    return f"no namespaces, overlays or cgroups for us: {run.stderr.strip()}" if run.returncode else ""


class Host:
    """What is run with `run` runs inside it, as its root."""

    def __init__(self, leader: int, log: Path) -> None:
        self._leader = leader
        self._log = log

    def run(self, *command: str, check: bool = True, timeout_s: float = 90.0) -> subprocess.CompletedProcess[str]:
        inside = ["nsenter", "--target", str(self._leader), "--all", "--", *command]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LD_LIBRARY_PATH": "/opt/python/lib"}
        run = subprocess.run(inside, capture_output=True, text=True, timeout=timeout_s, env=environment)
        assert not check or run.returncode == 0, f"{command}: {run.stderr}\n{run.stdout}\n{self.journal()}"
        return run

    def adaptersync(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("env", f"ADAPTERSYNC_CONFIG={SETTINGS}", *CLI, *arguments, check=check)

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        return self.run("systemctl", "--no-pager", *arguments, check=check).stdout.strip()

    def shown(self, unit: str, key: str) -> str:
        return self.systemctl("show", unit, "--property", key, "--value")

    def wait(self, unit: str, key: str, value: str, timeout_s: float = 60.0) -> None:
        wait_until_sync(lambda: self.shown(unit, key) == value, timeout_s=timeout_s, what=f"{key} of {unit} is {value}")

    def journal(self) -> str:
        read = [
            "nsenter",
            "--target",
            str(self._leader),
            "--all",
            "journalctl",
            "--no-pager",
            "-n",
            "40",
            "-t",
            "python",
        ]
        return subprocess.run(read, capture_output=True, text=True, timeout=30).stdout


@contextlib.contextmanager
def booted(directory: Path, settings: str) -> Iterator[Host]:
    """A host with these settings, this tree installed and Redis started; our units are rendered by its own command."""
    files = directory / "files"
    units, site = files / "etc/systemd/system", files / f"opt/adaptersync/lib/python{_python()}/site-packages"
    for place in (units, files / "etc/adaptersync", files / "etc/systemd/system.conf.d", site):
        place.mkdir(parents=True)
    (files / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    (files / "etc/systemd/system.conf.d/rehearsal.conf").write_text(
        "[Manager]\nDefaultEnvironment=LD_LIBRARY_PATH=/opt/python/lib\n"
    )
    (units / "rehearsal.target").write_text("[Unit]\nRequires=basic.target\nAfter=basic.target\nAllowIsolate=yes\n")
    (units / "redis-server.service").write_text(REDIS.format(binary=shutil.which("redis-server")))
    file = files / SETTINGS.removeprefix("/")
    file.write_text(settings)
    file.chmod(0o600)
    for package, root in PACKAGES.items():
        shutil.copytree(root, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "borrowed.pth").write_text("/opt/borrowed\n")
    _environment(files / PREFIX.relative_to("/"))
    trees = (f"{sys.base_prefix}:/opt/python", f"{sysconfig.get_path('purelib')}:/opt/borrowed")
    log = directory / "log"
    with log.open("wb") as output:
        boot = subprocess.Popen(
            [*NAMESPACES, "bash", str(SCRIPT), str(directory), str(files), *trees], stdout=output, stderr=output
        )
    try:
        host = Host(_leader(boot, log), log)
        wait_until_sync(
            lambda: host.systemctl("is-system-running", check=False) in ("running", "degraded"),
            timeout_s=BOOT_S,
            what=f"systemd runs: {log.read_text()[-2000:]}",
        )
        yield host
    finally:
        with contextlib.suppress(ProcessLookupError):
            boot.send_signal(signal.SIGKILL)  # its child goes with it, and all else with that
        boot.wait()


def _leader(boot: subprocess.Popen[bytes], log: Path) -> int:
    """The first process inside, once it is systemd."""
    children = Path(f"/proc/{boot.pid}/task/{boot.pid}/children")
    deadline = time.monotonic() + BOOT_S
    while time.monotonic() < deadline:
        assert boot.poll() is None, log.read_text()
        for child in children.read_text().split():
            if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                return int(child)
        time.sleep(0.05)
    raise AssertionError(f"systemd did not begin: {log.read_text()}")


def _environment(place: Path) -> None:
    """A virtual environment on the interpreter as it is seen inside."""
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").symlink_to(f"/opt/python/bin/python{_python()}")
    (place / "pyvenv.cfg").write_text("home = /opt/python/bin\ninclude-system-site-packages = false\n")


def _python() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"
