"""What test_interrupts.py runs in processes of their own: `python interrupt_scenarios.py NAME`.

Each scenario sends SIGINT to its own process during a native call and fails by an exception.
"""

import contextlib
import ctypes
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import jax
import numpy as np

import cinetile as ct
from cinetile.kernels.cpu.direct import DirectAttention, Operand
from cinetile.kernels.cpu.implementation import PATH_VARIABLE

PATH = "portable"  # the slowest, so that long calls are long on every machine
HEAD_DIM = 64


def dense_plan(frames: int) -> ct.TilePlan:
    return ct.plan_tiles(ct.dense_mask(ct.TokenGrid(frames, 50, 100)), 256, 256)


SHORT, MEDIUM, ENDLESS = dense_plan(1), dense_plan(2), dense_plan(60)
"""A fraction of a second, a second, and many minutes on two threads."""


def array_of(plan: ct.TilePlan) -> np.ndarray:
    """Query, key and value in one; numbers that cost no time to draw."""
    tokens = plan.grid.num_tokens
    return np.sin(np.arange(tokens * HEAD_DIM, dtype=np.float32)).reshape(1, tokens, 1, HEAD_DIM)


def through_xla(plan: ct.TilePlan) -> np.ndarray:
    array = array_of(plan)
    return np.asarray(ct.attention(array, array, array, plan, implementation="cpu"))


def through_jit(plan: ct.TilePlan) -> np.ndarray:
    attend = jax.jit(lambda array: ct.attention(array, array, array, plan, implementation="cpu"))
    return np.asarray(attend(array_of(plan)))


def through_pointers(plan: ct.TilePlan) -> np.ndarray:
    array = array_of(plan)
    output = np.zeros_like(array)
    tokens = plan.grid.num_tokens
    strides = (tokens * HEAD_DIM, HEAD_DIM, HEAD_DIM)
    source = Operand(array.ctypes.data, strides)
    DirectAttention((plan,), PATH)(
        source,
        source,
        source,
        Operand(output.ctypes.data, strides),
        dtype="float32",
        head_dim=HEAD_DIM,
        routes=np.zeros((1, 1), np.int32),
        scale=HEAD_DIM**-0.5,
        num_threads=2,
    )
    return output


Call = Callable[[ct.TilePlan], np.ndarray]


def c_handler() -> int | None:
    """The address of the process's handler of SIGINT, as the operating system has it."""
    get = ctypes.pythonapi.PyOS_getsig
    get.restype = ctypes.c_void_p
    return get(signal.SIGINT)


PYTHONS_HANDLER = c_handler()


@contextlib.contextmanager
def interrupted_during_a_call() -> Iterator[None]:
    """Sends SIGINT half a second after a native call put its handler in place."""

    def send() -> None:
        while c_handler() == PYTHONS_HANDLER:
            time.sleep(0.01)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    yield
    sender.join()


def expect_an_interrupt(call: Callable[[], object]) -> None:
    try:
        with interrupted_during_a_call():
            call()
    except KeyboardInterrupt:
        return
    raise AssertionError("the call was not interrupted")


def ends(call: Call) -> None:
    """KeyboardInterrupt comes, the handler is the old one, and the next calls are right."""
    expected = call(SHORT)
    for _ in range(2):
        expect_an_interrupt(lambda: call(ENDLESS))
        assert c_handler() == PYTHONS_HANDLER
        np.testing.assert_array_equal(call(SHORT), expected)


def ends_calls_of_all_threads() -> None:
    """The main thread waits for two calls of others; a short call beside them is not held up."""
    raised: queue.Queue[BaseException] = queue.Queue()

    def run(call: Call) -> None:
        try:
            call(ENDLESS)
        except BaseException as error:
            raised.put(error)

    threads = [
        threading.Thread(target=run, args=(call,)) for call in (through_xla, through_pointers)
    ]
    expected = through_xla(SHORT)

    for thread in threads:
        thread.start()
    time.sleep(5)
    for call in (through_xla, through_pointers):
        np.testing.assert_array_equal(call(SHORT), expected)
    assert all(thread.is_alive() for thread in threads), "a long call ended before a short one"

    # Python 3.11 takes a thread for ended once a `join` was interrupted, so none is used here.
    expect_an_interrupt(lambda: time.sleep(1000))
    errors = [raised.get(), raised.get()]
    for kind in (KeyboardInterrupt, jax.errors.JaxRuntimeError):
        assert sum(isinstance(error, kind) for error in errors) == 1, errors
    np.testing.assert_array_equal(through_xla(SHORT), expected)


def runs_on(handler: Callable[..., None] | signal.Handlers) -> None:
    """Whoever handles SIGINT otherwise, or not at all, gets the whole result."""
    expected = through_xla(MEDIUM)
    signal.signal(signal.SIGINT, handler)
    for call in (through_xla, through_pointers):
        sender = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        sender.start()
        found = call(MEDIUM)
        sender.join()
        np.testing.assert_array_equal(found, expected)


def runs_on_beside_another_handler() -> None:
    handled: list[int] = []
    runs_on(lambda number, _: handled.append(number))
    assert handled == [signal.SIGINT] * 2


def ends_no_later_call() -> None:
    """A signal that comes between calls, or as one ends, belongs to none that starts later."""
    expected = through_pointers(SHORT)
    for delay in np.linspace(0, 0.2, 21):
        sender = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        with contextlib.suppress(KeyboardInterrupt):
            sender.start()
            through_pointers(SHORT)
            sender.join()
            time.sleep(0.1)
            raise AssertionError("no signal came")
        np.testing.assert_array_equal(through_pointers(SHORT), expected)


def ends_in_a_forked_child() -> None:
    """A child calls the library after its parent did, and is interrupted on its own."""
    expected = through_pointers(SHORT)

    def child() -> None:
        np.testing.assert_array_equal(through_pointers(SHORT), expected)
        ends(through_pointers)

    with warnings.catch_warnings():
        # Of threads, which the child lacks; the library needs none of its parent's.
        warnings.filterwarnings("ignore", ".*fork", category=RuntimeWarning)
        warnings.filterwarnings("ignore", ".*fork", category=DeprecationWarning)
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
    process.join()
    assert process.exitcode == 0
    np.testing.assert_array_equal(through_pointers(SHORT), expected)


def ends_after_a_fork_during_a_call() -> None:
    """A fork takes the handler along; the child gives it back and calls the library too."""
    status = []

    def fork() -> None:
        while c_handler() == PYTHONS_HANDLER:
            time.sleep(0.01)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            os._exit(0 if c_handler() == PYTHONS_HANDLER else 1)
        status.append(os.waitpid(child, 0)[1])

    forker = threading.Thread(target=fork)
    forker.start()
    expect_an_interrupt(lambda: through_pointers(ENDLESS))
    forker.join()
    assert status == [0]


SCENARIOS: dict[str, Callable[[], None]] = {
    "xla": lambda: ends(through_xla),
    "jit": lambda: ends(through_jit),
    "pointers": lambda: ends(through_pointers),
    "all-threads": ends_calls_of_all_threads,
    "another-handler": runs_on_beside_another_handler,
    "ignored": lambda: runs_on(signal.SIG_IGN),
    "later-calls": ends_no_later_call,
    "forked-child": ends_in_a_forked_child,
    "fork-during-a-call": ends_after_a_fork_during_a_call,
}

if __name__ == "__main__":
    # A shell may have started this in the background, where SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    PYTHONS_HANDLER = c_handler()
    os.environ[PATH_VARIABLE] = PATH
    SCENARIOS[sys.argv[1]]()
