"""The commands `tunegen export` and `tunegen import`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .cli_options import check_family, db_option, filter_options, new_folder, path_of
from .model import RMS_NORM

if TYPE_CHECKING:
    from .store import Store


@click.command("export")
@click.argument("file", callback=path_of, required=False)
@filter_options
@click.option("--defaults", is_flag=True, help="Print the defaults of a search space instead, made from the finals.")
@click.option("--arch", help="With --defaults: of this target, such as sm_90. [default: the only one there is]")
@db_option
def export_command(file: Path | None, defaults: bool, arch: str | None, db: Path, **filters: Any) -> None:
    """Write what the database holds to FILE as JSON Lines, for `tunegen import`.

    A name that ends in .xz, such as h200.jsonl.xz, makes it small. With options only the trials that match, with
    their GPUs and sweeps. With --defaults no file is written: what is printed belongs into search_spaces/, and says
    what it loses against the fastest kernels that were measured.

    Example: tunegen export h200.jsonl --hidden 4096
    """
    if (file is None) is not defaults:
        raise click.UsageError("give either FILE, such as results.jsonl, or --defaults")
    if arch is not None and not defaults:
        raise click.UsageError("--arch is for --defaults only; leave it out")
    from .exporting import export
    from .store import Store

    with Store.read(db) as store:
        if file is None:
            click.echo(_defaults(store, arch, filters), nl=False)
            return
        check_family(store, filters)
        told = new_folder(file, "the file")
        counts = export(store, file, filters)
    if told:
        click.echo(told, err=True)
    click.echo(f"{file}: trials: {counts['trial']}, sweeps: {counts['sweep']}, kinds of GPU: {counts['silicon']}")


def _defaults(store: Store, arch: str | None, filters: dict[str, Any]) -> str:
    from .defaults import defaults_yaml
    from .space import load_space

    for name in ("family", "state", "kind", "policy"):
        if name in filters:
            raise click.UsageError(f"--defaults compares all measured finals; leave --{name} out")
    measured = {f"sm_{row['capability']}" for row in store.rows("SELECT DISTINCT capability FROM silicon", {})}
    if arch is not None and arch not in measured:
        from .commands import target_of

        target_of(arch)  # refuses a name that nobody knows
    space, dtype = load_space(filters.pop("op", RMS_NORM)), filters.pop("x_dtype", "bf16")
    return defaults_yaml(store, space, arch, dtype, filters)


@click.command("import")
@click.argument("file", callback=path_of)
@db_option
def import_command(file: Path, db: Path) -> None:
    """Add what FILE by `tunegen export` holds to the database, all of it or nothing.

    What is in the database stays: trials that it has already are left out, and those that disagree with it are named.

    Example: tunegen import h200.jsonl.xz --db h200.db
    """
    from .importing import import_file

    told = new_folder(db)
    found = import_file(file, db)
    if told:
        click.echo(told, err=True)
    for line in found.skipped_lines():
        click.echo(line)
    click.echo(f"{db}: {found.sentence()}")
