"""Methods in which ``self.gate(x.to(torch.float32))`` becomes ``self.gate(x.to(torch.bfloat16))``.

For a bf16 x the cast is then none, and the gate gets x as it is. Without this, a kernel would widen x for a gate that
does not want it. Only the name of the dtype differs, and only in methods where the cast in front of the gate is the one
place with that name.
"""

import dis
import types
from functools import cache

WIDE, NARROW = "float32", "bfloat16"
# What the interpreter loads for the cast, one after the other: the gate, x, its method, torch, the dtype.
_BEFORE = ("gate", None, "to", "torch", WIDE)


@cache
def keep_bf16(owner: type) -> dict[str, types.FunctionType]:
    """Rewritten methods of ``owner`` (a module's class), by name; none where its code is not as expected.

    Every method that names the gate and fp32 must be as expected, else none is rewritten.
    """
    methods: dict[str, types.FunctionType] = {}
    for base in reversed(owner.__mro__):
        for name, function in vars(base).items():
            if not isinstance(function, types.FunctionType) or name == "__init__":
                continue
            methods.pop(name, None)
            if {"gate", WIDE} <= set(function.__code__.co_names):
                if not _only_before_gate(function.__code__):
                    return {}
                methods[name] = _renamed(function)
    return methods


def _only_before_gate(code: types.CodeType) -> bool:
    """Whether each use of the name fp32 is a cast in front of the gate, and each gate has one."""
    loads = [item.argval for item in dis.get_instructions(code) if item.opname.startswith("LOAD_")]
    casts = 0
    for position, name in enumerate(loads):
        if name == WIDE:
            window = loads[max(position - len(_BEFORE) + 1, 0) : position + 1]
            if len(window) != len(_BEFORE):
                return False
            if any(want is not None and want != have for want, have in zip(_BEFORE, window, strict=True)):
                return False
            casts += 1
    return casts == loads.count("gate") and casts > 0


def _renamed(function: types.FunctionType) -> types.FunctionType:
    code = function.__code__
    code = code.replace(co_names=tuple(NARROW if name == WIDE else name for name in code.co_names))
    copy = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
