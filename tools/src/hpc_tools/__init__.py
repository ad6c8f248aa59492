"""The command ``hpc``: the demo, the doctor and the generated documents of the hpc operators."""

from importlib.metadata import version

__version__ = version("hpc-tools")
__all__ = ["__version__"]
