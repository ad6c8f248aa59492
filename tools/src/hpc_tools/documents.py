"""The status table of the README, made from the operators' capability tables.

``hpc docs`` writes it between two marker lines; ``tests/test_readme_tables.py`` checks that it is up to date.
"""

import pathlib
from collections.abc import Iterable, Mapping

from hpc_common.capability import Support
from hpc_common.generated import between

from .errors import InputError
from .operators import Installed, support_rows

BEGIN = "<!-- status: begin; written by `hpc docs` from the capability tables -->"
END = "<!-- status: end -->"


def _mark(runs: bool) -> str:
    return "yes" if runs else "no"


def _collapse(rows: Iterable[Support]) -> list[tuple[str, list[str], bool, bool, str]]:
    """Rows of one operator with the same status as one: (operator, features, cpu, cuda, note), in the table's order."""
    groups: dict[tuple[str, bool, bool, str], list[str]] = {}
    for row in rows:
        groups.setdefault((row.operator, row.cpu, row.cuda, row.note), []).append(row.feature)
    return [(operator, features, cpu, cuda, note) for (operator, cpu, cuda, note), features in groups.items()]


def status_table(tables: Mapping[str, Iterable[Support]]) -> str:
    """A Markdown table of what runs where. tables: each package's name and its capability table."""
    lines = ["| package | operator | what of it | CPU | Hopper GPU | note |", "|---|---|---|---|---|---|"]
    for package, rows in tables.items():
        for operator, features, cpu, cuda, note in _collapse(rows):
            cells = [package, f"`{operator}`", "; ".join(features), _mark(cpu), _mark(cuda), note]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def current_table(packages: Iterable[Installed]) -> str:
    """The status table of installed packages. Raises InputError naming the packages that are not usable."""
    packages = list(packages)
    missing = [entry.missing for entry in packages if not entry.usable]
    if missing:
        raise InputError(f"hpc docs needs every operator: {'; '.join(missing)}")
    return status_table({entry.package.distribution: support_rows(entry) for entry in packages})


def with_table(text: str, table: str) -> str:
    """A document with the table between its markers replaced. Raises InputError where a marker is missing."""
    try:
        return between(text, BEGIN, END, table)
    except ValueError as error:
        raise InputError(str(error)) from None


def update(path: pathlib.Path, packages: Iterable[Installed], check: bool = False) -> bool:
    """Write the status table into ``path``; True where it differed. With ``check`` nothing is written."""
    try:
        text = path.read_text()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    try:
        wanted = with_table(text, current_table(packages))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if wanted != text and not check:
        try:
            path.write_text(wanted)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from None
    return wanted != text
