"""Progress of long work: the interface that the work calls, silent or as a bar on a terminal."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Progress:
    """Shows nothing; what work calls as it goes."""

    def phase(self, name: str, total: int) -> None:
        """The next phase begins; ``total`` in any unit."""

    def advance(self, amount: int = 1) -> None:
        """So much more of the phase is done."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class BarProgress(Progress):
    """One bar, on standard error, gone when the work is done; nothing where that is no terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description:24}"), BarColumn(), TimeElapsedColumn())
        self._bars = Bars(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bars.add_task("starting", total=None)

    def phase(self, name: str, total: int) -> None:
        self._bars.reset(self._task, description=name, total=max(total, 1))

    def advance(self, amount: int = 1) -> None:
        self._bars.advance(self._task, amount)

    def __enter__(self) -> "BarProgress":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
