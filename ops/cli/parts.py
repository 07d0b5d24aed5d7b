"""Whether the packages of a part of Headrace are installed, and the import of the one that takes long."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import threading
from types import FrameType

from shared.errors import DependencyError

_AGAIN_S = 0.2


def require(extra: str, *packages: str) -> None:
    """Check that the packages of an extra are there, and import PyTorch if it is one of them.

    Raises:
        DependencyError: Some are missing; the message says how to install them.
        KeyboardInterrupt: Ctrl-C was pressed meanwhile.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise DependencyError(f"{', '.join(missing)} not installed: `pip install 'headrace[{extra}]'`.")
    if "torch" in packages:
        import_interruptibly("torch")


def import_interruptibly(name: str) -> None:
    """Import a package during which a Ctrl-C may get lost, and let it end the import all the same.

    While PyTorch's compiled code imports NumPy, it drops whatever is raised there: one of ten interrupts within the
    seconds that its import takes changed nothing, and a job of minutes went on.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed meanwhile.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        importlib.import_module(name)
        return
    interrupts = _ImportInterrupts()
    signal.signal(signal.SIGINT, interrupts.note)
    try:
        importlib.import_module(name)
    finally:
        interrupts.end()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupts.were_noted:
            # Also in the place of an error that the interrupt was made into.
            raise KeyboardInterrupt


class _ImportInterrupts:
    """Raises interrupts, again and again until they end the import.

    Attributes:
        were_noted: Whether there was one.
    """

    def __init__(self) -> None:
        self.were_noted = False
        self._is_over = False
        self._lock = threading.Lock()

    def note(self, _number: int, _frame: FrameType | None) -> None:
        self.were_noted = True
        if not self._is_over:
            again = threading.Timer(_AGAIN_S, self._raise_again)
            again.daemon = True
            again.start()
            raise KeyboardInterrupt

    def end(self) -> None:
        """Let no further one be raised; one that is under way is only noted."""
        self._is_over = True
        with self._lock:
            return

    def _raise_again(self) -> None:
        with self._lock:
            if not self._is_over:
                # To the main thread itself, which may be waiting in a call of the system.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
