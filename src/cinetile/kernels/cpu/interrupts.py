"""Ctrl-C during a native call.

Python runs signal handlers between bytecodes of the main thread, so a call of native code would
hold up the `KeyboardInterrupt` until it ends. The library therefore tells a thread of this module
about every SIGINT that comes while a call runs (native/interrupts.h), and the thread ends the
calls early. It does so only where SIGINT has Python's own handler: a handler that someone else
installed may mean something else than "stop", and then calls run to their end.
"""

import ctypes
import os
import signal
import sys
import threading

_NUMBER_BYTES = 8


def watch_interrupts(library: ctypes.CDLL) -> None:
    """Starts the thread that ends native calls on SIGINT, here and in forked children."""

    def start() -> None:
        news = library.cinetile_watch_interrupts()
        if news >= 0:
            threading.Thread(
                target=_end_calls_on_interrupts,
                args=(library, news),
                name="cinetile-interrupts",
                daemon=True,
            ).start()

    start()
    os.register_at_fork(after_in_child=start)


def _end_calls_on_interrupts(library: ctypes.CDLL, news: int) -> None:
    while number := os.read(news, _NUMBER_BYTES):
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            library.cinetile_end_calls(ctypes.c_int64(int.from_bytes(number, sys.byteorder)))
