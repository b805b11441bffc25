"""Where `isolate` and `python -m isolate` begin: an interrupt while the commands are still being imported ends it without a word."""

from __future__ import annotations

import signal


def main() -> None:
    """Import the commands and run them."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from isolate.cli import main as commands

    signal.signal(signal.SIGINT, before)
    commands(prog_name="isolate")


if __name__ == "__main__":
    main()
