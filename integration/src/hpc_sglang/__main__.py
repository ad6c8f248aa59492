"""``python -m hpc_sglang``: one line for each operator, on whether SGLang uses it here and why not."""

from . import __version__, plugin
from .record import record

if __name__ == "__main__":
    print(f"hpc-sglang {__version__}")
    plugin.register()
    for line in record.lines():
        print(line)
