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
# Seconds for the last line.
_PATIENCE = 0.5
# A bar on a terminal hides the cursor.
_SHOW_CURSOR = "\x1b[?25h"


def watch() -> None:
    """From now on end this process at Ctrl-C, unless it was begun to ignore it; for the main thread of a command."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
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
    _files.remove_unfinished()
    # By another thread: a pipe that nobody reads must not keep this one.
    saying = threading.Thread(target=_say_goodbye, daemon=True)
    saying.start()
    saying.join(_PATIENCE)
    os._exit(_CODE)


def _say_goodbye() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # of a stream that is closed, or None
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{_SHOW_CURSOR if sys.stderr.isatty() else ''}\nInterrupted.\n")
        sys.stderr.flush()
