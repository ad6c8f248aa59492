"""``python -m hpc_sglang [--model-path PATH] [SGLang's flags]``: what SGLang would use here, and why not the rest.

PATH is a folder with config.json, or that file; no weights are read. SGLang is imported and every hook placed, as a
server would. Exit status: 0; 1 where a flag asks for what can't be had; 2 for a model or flag that cannot be used.
"""

import sys

from .examine import examine
from .model import BadInput


def main() -> int:
    """Prints the report; returns the exit status."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    try:
        report = examine(sys.argv[1:], with_sglang=True)
    except BadInput as error:
        print(f"hpc_sglang: {error}", file=sys.stderr)
        return 2
    print("\n".join(report.lines()))
    if report.refused:
        print("A server with these flags would not start.")
    return int(report.refused)


if __name__ == "__main__":
    sys.exit(main())
