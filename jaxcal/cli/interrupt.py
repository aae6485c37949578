"""Ctrl-C: a command ends at once, with exit code 130, and leaves no half file.

Python would raise KeyboardInterrupt in its main thread, between two of its instructions. What compiles or computes for
long keeps that waiting, some callbacks swallow it, and while a process unwinds its other threads still compute. So a
thread of its own is told of the press, and ends the process.
"""

import contextlib
import os
import signal
import socket
import sys
import threading

from jaxcal import _files

# Exit code of a process that Ctrl-C ended, as shells have it.
_CODE = 130
# A bar on a terminal hides the cursor.
_SHOW_CURSOR = "\x1b[?25h"


def watch() -> None:
    """From now on end this process at Ctrl-C; for the main thread of a command."""
    told, tell = socket.socketpair()
    tell.setblocking(False)
    signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)  # the thread has been told
    threading.Thread(target=_end_when_told, args=(told, tell), daemon=True).start()


def _end_when_told(told: socket.socket, tell: socket.socket) -> None:
    """Wait for a press; both ends are held, so that they stay open."""
    while tell and signal.SIGINT not in told.recv(64):
        pass
    _end()


def _end() -> None:
    """End the process, without waiting for what computes; what was being written is removed."""
    for leave in (_files.remove_unfinished, sys.stdout.flush, _say_goodbye):
        with contextlib.suppress(OSError, ValueError):
            leave()
    os._exit(_CODE)


def _say_goodbye() -> None:
    sys.stderr.write(f"{_SHOW_CURSOR if sys.stderr.isatty() else ''}\nInterrupted.\n")
    sys.stderr.flush()
