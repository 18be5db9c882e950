"""The command in this process, as tests call it."""

from __future__ import annotations

from click.testing import CliRunner

from tunegen import cli


def run(*arguments):
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments], prog_name="tunegen")


def output(*arguments):
    """What it prints; it must succeed."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout
