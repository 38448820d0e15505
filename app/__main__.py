"""The `headrace` command before anything else is imported: Ctrl-C ends it without a traceback, and a server without a
terminal outlives SIGHUP from its first moment on."""

import os
import signal
import sys


def main() -> int:
    """Run the command line. Returns the exit code."""
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take a second, and nothing has to be cleaned up
    if sys.argv[1:2] == ["serve"] and not os.isatty(0):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until `app.reloading` takes it
    from app.cli import main as run

    if interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
