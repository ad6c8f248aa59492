"""The hpc operators in SGLang. ``python -m hpc_sglang`` says what this installation uses, and why not the rest."""

from importlib.metadata import version

from .plugin import OPERATORS, Operator, Registration, registrations

__version__ = version("hpc-sglang")
__all__ = ["OPERATORS", "Operator", "Registration", "__version__", "registrations"]
