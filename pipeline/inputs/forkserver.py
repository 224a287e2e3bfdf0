"""Forks children from a small server process that has already imported their module.

Starting Python and importing pyarrow takes a second. A fork of a process that has done so takes
milliseconds and starts small. A process has one such server per module. The server calls the
module's `prepare` once, and each child runs its `main`. However the process ends, its servers end
too, and the kernel ends their children with them.

`multiprocessing`'s forkserver does not fit: it inherits our environment with its secrets, leaves
children alive when we die, and imports `__main__` in each of them.

    python -m specbatch.pipeline.inputs.forkserver DESCRIPTOR MODULE
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from itertools import count
from typing import NoReturn

_MOST_BYTES = 1 << 16  # of a request
_STATUS = struct.Struct("=i")
_PR_SET_PDEATHSIG = 1  # of Linux' prctl


class ForkedProcess:
    """A child of the server, with the interface of a `subprocess.Popen`."""

    def __init__(self, server: _Server, number: int, status: socket.socket) -> None:
        self.returncode: int | None = None
        self._server = server
        self._number = number
        self._status = status
        self._owner = os.getpid()

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._result(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._result(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            self._server.kill(self._number)

    def _result(self, timeout: float | None) -> int | None:
        if self.returncode is None and os.getpid() != self._owner:
            self._ended(0)  # a copy after a fork of ours: the process belongs to the original
        if self.returncode is None:
            poll = select.poll()  # unlike select, of any number of open files
            poll.register(self._status, select.POLLIN)
            if poll.poll(None if timeout is None else timeout * 1000):
                try:
                    answer = self._status.recv(_STATUS.size)
                except OSError:
                    answer = b""
                # Nothing: the server is gone, and the kernel has killed its children.
                self._ended(_STATUS.unpack(answer)[0] if answer else -signal.SIGKILL)
        return self.returncode

    def _ended(self, code: int) -> None:
        self.returncode = code
        self._status.close()


def fork(
    module: str, *arguments: str, stdin: int, stdout: int, environment: Mapping[str, str]
) -> ForkedProcess:
    """Run `main()` of `module` in a new process, with copies of these descriptors.

    A new server starts with `environment`. Raises `OSError` if no process can be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        files = [stdin, stdout, theirs.fileno()]
        with _starting:
            server = _servers.get(module)
            number = next(_numbers)
            if server is None or not server.begin(number, arguments, files):
                if server is not None:
                    server.close()
                server = _servers[module] = _Server(module, environment)
                if not server.begin(number, arguments, files):
                    ours.close()
                    raise BrokenPipeError(f"the process that forks {module} has ended")
    return ForkedProcess(server, number, ours)


class _Server:
    """Our side of the server. Thread-safe, because the kernel keeps messages apart."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), module],
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what a crash leaves there
                start_new_session=True,  # a terminal's Ctrl-C is ours alone
            )

    def begin(self, number: int, arguments: tuple[str, ...], files: list[int]) -> bool:
        """Send a request. Returns whether the server took it."""
        try:
            socket.send_fds(self._line, [json.dumps([number, *arguments]).encode()], files)
        except OSError:
            return False
        return True

    def kill(self, number: int) -> None:
        try:
            self._line.send(json.dumps([number]).encode())
        except OSError:  # the server has ended, and its children with it
            return

    def close(self) -> None:
        self._line.close()
        self._process.kill()
        self._process.wait()

    def leave(self) -> None:
        """Let go of the server in a fork of ours: it belongs to the original process."""
        self._line.close()
        self._process.returncode = 0  # else Popen would wait for it, and warn


_servers: dict[str, _Server] = {}
_starting = threading.Lock()
_numbers = count()


def _close_all() -> None:
    for server in _servers.values():
        server.close()
    _servers.clear()


def _after_fork() -> None:
    global _starting
    _starting = threading.Lock()  # another thread may have held it
    for server in _servers.values():
        server.leave()
    _servers.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)


# --- the server -----------------------------------------------------------------------------
def main(descriptor: int, module: str) -> None:
    """Fork for each request, kill children on request and report how each child ended, until the
    client is gone."""
    line = socket.socket(fileno=descriptor)
    library = import_module(module)
    library.prepare()
    run = library.main
    gc.collect()
    gc.freeze()  # so that a child's collections leave shared memory shared
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    running: dict[int, tuple[int, socket.socket]] = {}  # by number: process id, for its status
    poll = select.poll()
    for end in (line, woken):
        poll.register(end, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if woken.fileno() in ready:
            woken.recv(1 << 12)
            _report_ended(running)
        if line.fileno() in ready and not _serve(line, run, module, running):
            return


def _serve(
    line: socket.socket, run: object, module: str, running: dict[int, tuple[int, socket.socket]]
) -> bool:
    """Serve one request. Returns False when the client is gone."""
    request, files, _, _ = socket.recv_fds(line, _MOST_BYTES, 3)
    if not request:
        return False
    number, *arguments = json.loads(request)
    if not files:
        if number in running:
            os.kill(running[number][0], signal.SIGKILL)
        return True
    stdin, stdout, status = files
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError:  # closing the status reports it
        pid = -1
    if pid == 0:
        _become(run, [module, *arguments], stdin, stdout, server)
    os.close(stdin)
    os.close(stdout)
    if pid > 0:
        running[number] = (pid, socket.socket(fileno=status))
    else:
        os.close(status)
    return True


def _become(run: object, arguments: list[str], stdin: int, stdout: int, server: int) -> NoReturn:
    """Run as a child, and never return into the server's loop."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.argv = arguments
        if os.getppid() == server and callable(run):  # else the server ended before the prctl
            run()
            code = 0
    finally:
        os._exit(code)


def _report_ended(running: dict[int, tuple[int, socket.socket]]) -> None:
    for number, (pid, status) in list(running.items()):
        found, how = os.waitpid(pid, os.WNOHANG)
        if found:
            del running[number]
            with status:
                try:
                    status.send(_STATUS.pack(os.waitstatus_to_exitcode(how)))
                except OSError:  # the client closed its end
                    continue


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
