"""Ctrl-C: a command ends at once, with exit code 130, and leaves no incomplete file.

Python would raise KeyboardInterrupt in its main thread, between two of its instructions. A long compilation or
computation delays that, and some callbacks ignore it. While a process unwinds, its other threads still compute. So a
separate thread receives the signal and ends the process.
"""

import contextlib
import os
import signal
import socket
import sys
import threading

from jaxcal import _files

# The exit code that shells give to a process that Ctrl-C ended.
_CODE = 130
# The largest number of seconds to print the last line.
_PATIENCE = 0.5
# A bar on a terminal hides the cursor.
_SHOW_CURSOR = "\x1b[?25h"


def watch() -> None:
    """End this process at Ctrl-C from now on, unless it was started to ignore Ctrl-C.

    Call it in the main thread of a command.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    told, tell = socket.socketpair()
    tell.setblocking(False)
    signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)  # the thread receives the signal by the socket
    threading.Thread(target=_end_when_told, args=(told, tell), daemon=True).start()


def _end_when_told(told: socket.socket, tell: socket.socket) -> None:
    """Wait for Ctrl-C, and end the process. The arguments keep both ends of the socket open."""
    while tell and signal.SIGINT not in told.recv(64):
        pass
    _end()


def _end() -> None:
    """Remove incomplete files and end the process, without waiting for computations."""
    _files.remove_unfinished()
    # Another thread writes the last line: a pipe without a reader must not block this thread.
    saying = threading.Thread(target=_say_goodbye, daemon=True)
    saying.start()
    saying.join(_PATIENCE)
    os._exit(_CODE)


def _say_goodbye() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the stream may be closed, or None
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{_SHOW_CURSOR if sys.stderr.isatty() else ''}\nInterrupted.\n")
        sys.stderr.flush()
