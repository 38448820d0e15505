"""The entry point of the `headrace` command. It sets signal handlers before the slow imports, so that Ctrl-C ends the
command without a traceback, and SIGHUP does not end a server that has no terminal."""

import os
import signal
import sys

from app import prepare_process


def main() -> int:
    prepare_process()
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    serves = sys.argv[1:2] == ["serve"]
    if interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take a second, and nothing has to be cleaned up
    if serves and not os.isatty(0):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until `app.serving.process` handles it
    from app.commands.cli import main as run

    # A server keeps SIGINT's default until `app.serving.process` handles it: an asyncio runner that finds Python's own
    # handler cancels the main task instead, and `asyncio.wait_for` around the start of the lifespan loses that
    # cancellation (Python 3.11).
    if interrupts and not serves:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
