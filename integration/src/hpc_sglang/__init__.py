"""The hpc operators in SGLang. ``python -m hpc_sglang`` says what this installation uses, and why not the rest."""

from importlib.metadata import version

from .record import Entry, Record

__version__ = version("hpc-sglang")
__all__ = ["Entry", "Record", "__version__"]
