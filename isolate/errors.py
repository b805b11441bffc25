"""What a user can mend: one sentence, exit code 2, no traceback."""

from __future__ import annotations

import click

from isolate.terminal import plain


class IsolateError(click.ClickException):
    """The command, a file, a build or a device is not usable; the message is one sentence that says what to do."""

    exit_code = 2

    def format_message(self) -> str:
        """The message as it is shown at a terminal."""
        return plain(self.message)


class CaseError(IsolateError):
    """A case file is not valid: names the file, the step and the field, and what is allowed there."""


class BuildError(IsolateError):
    """A build cannot be driven: says what was found, what was expected and what to pass."""


class ModelError(IsolateError):
    """A model cannot be made or loaded."""


class DeviceError(IsolateError):
    """A target (a GPU, a driver, the hooks in front of them) is not usable here."""


class TraceError(IsolateError):
    """A trace cannot be read, or not be written: names the file and what is wrong with it."""
