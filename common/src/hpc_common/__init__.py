"""What the operator packages share: schedulers, checks, references, poison, error metrics and timing.

Importing this module imports no torch: the package is also a build requirement of the operators (headers and CMake
helpers), and a build environment has no torch. The submodules import what they need.
"""

from importlib.metadata import version

__version__ = version("hpc-common")
__all__ = ["__version__"]
