"""Make SIGTERM, and the end of the terminal, interrupt a command as Ctrl-C does."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupt_by_any_signal() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM and SIGHUP too, so that child processes end as well."""
    signals = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = {each: signal.signal(each, signal.default_int_handler) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
