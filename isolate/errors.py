"""What a user can mend: one sentence, exit code 2, no traceback."""

from __future__ import annotations

import click


class IsolateError(click.ClickException):
    """The command, a file, a build or a device is not usable; the message is one sentence that says what to do."""

    exit_code = 2


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
