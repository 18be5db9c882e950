"""The commands `tunegen export` and `tunegen import`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .cli_options import db_option, filter_options, path_of


@click.command("export")
@click.argument("file", callback=path_of)
@filter_options
@db_option
def export_command(file: Path, db: Path, **filters: Any) -> None:
    """Write what the database holds to FILE as JSON Lines, for `tunegen import`.

    With options only the trials that match, with their GPUs and sweeps.

    Example: tunegen export h200.jsonl --hidden 4096
    """
    from .exporting import export
    from .store import Store

    with Store.read(db) as store:
        counts = export(store, file, filters)
    click.echo(f"{file}: {counts['trial']} trials of {counts['sweep']} sweeps on {counts['silicon']} GPUs, from {db}")


@click.command("import")
@click.argument("file", callback=path_of)
@db_option
def import_command(file: Path, db: Path) -> None:
    """Add what FILE by `tunegen export` holds to the database, all of it or nothing.

    What is in the database stays: trials that it has already are left out, and those that disagree with it are named.

    Example: tunegen import h200.jsonl --db h200.db
    """
    from .importing import import_file

    found = import_file(file, db)
    for line in found.skipped_lines():
        click.echo(line)
    click.echo(f"{db}: {found.sentence()}")
