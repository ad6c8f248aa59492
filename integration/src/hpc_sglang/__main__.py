"""``python -m hpc_sglang``: one line for each operator, on whether SGLang uses it here and why not."""

from . import __version__, registrations

if __name__ == "__main__":
    print(f"hpc-sglang {__version__}")
    for registration in registrations():
        print(registration.line())
