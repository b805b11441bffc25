"""What is said at a terminal: text of a case, a model or a library reaches it as text, never as a command to it."""

from __future__ import annotations

import click

#: Control characters (C0 but tab and newline, DEL, C1) and those that turn the direction of text, each as its escape.
_ESCAPES = {
    code: chr(code).encode("unicode_escape").decode()
    for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(code) not in "\t\n"
}


def plain(text: str) -> str:
    """The text with what would move a cursor, colour or clear a terminal written out: `\\x1b[2J`."""
    return text.translate(_ESCAPES)


def say(text: object, err: bool = False) -> None:
    """Print a line, or lines, to standard output or standard error."""
    click.echo(plain(str(text)), err=err)
