"""``python -m hpc_tools``: the command ``hpc``."""

from .cli import main

if __name__ == "__main__":
    main()
