"""A GPU without torch: the driver's calls by ctypes, memory that comes from the host or from nowhere, random inputs.

Under a sanitizer a process with torch takes a quarter of a minute to start, and torch's kernels and caching allocator
hide what is asked for: here every buffer is an allocation of its own, nothing but the operators' kernels runs, and what
nobody has written is unwritten.
"""

import ctypes
import glob
import importlib.util
from types import ModuleType

import numpy as np


def extension(site: str, package: str) -> ModuleType:
    """``package``'s module _C from the folder ``site``, without the package, which needs torch."""
    (path,) = glob.glob(f"{site}/{package}/_C*.so")
    spec = importlib.util.spec_from_file_location(f"{package}._C", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Gpu:
    """Device 0's primary context, which the extensions use too. ``seed`` begins the random numbers anew."""

    def __init__(self) -> None:
        self._live: list[int] = []
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._check(self._driver.cuInit(0))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self._driver.cuDeviceGet(ctypes.byref(device), 0))
        self._check(self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self._check(self._driver.cuCtxSetCurrent(context))
        self.seed(0)

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA driver error {code}")

    def seed(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def empty(self, size: int) -> int:
        """Address of ``size`` bytes that nobody has written."""
        address = ctypes.c_uint64()
        self._check(self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(max(int(size), 16))))
        self._live.append(address.value)
        return address.value

    def put(self, array: np.ndarray) -> int:
        """Address of a copy of ``array``."""
        array = np.ascontiguousarray(array)
        address = self.empty(array.nbytes)
        if array.nbytes:
            source, size = array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.nbytes)
            self._check(self._driver.cuMemcpyHtoD_v2(ctypes.c_uint64(address), source, size))
        return address

    def get(self, address: int, size: int) -> np.ndarray:
        """``size`` bytes from ``address``, after all that was launched."""
        self._check(self._driver.cuCtxSynchronize())
        array = np.empty(size, np.uint8)
        target = array.ctypes.data_as(ctypes.c_void_p)
        self._check(self._driver.cuMemcpyDtoH_v2(target, ctypes.c_uint64(address), ctypes.c_size_t(size)))
        return array

    def free(self) -> None:
        """Give everything back."""
        while self._live:
            self._check(self._driver.cuMemFree_v2(ctypes.c_uint64(self._live.pop())))

    # ---- Values ----

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape, dtype=np.float32)

    def uniform(self, *shape: int) -> np.ndarray:
        return self.random.random(shape, dtype=np.float32)

    def e4m3(self, *shape: int) -> np.ndarray:
        """Finite codes, 2^-3 to 1.9 in size."""
        codes = np.frombuffer(self.random.bytes(int(np.prod(shape))), np.uint8)
        return ((codes & 0x9F) | 0x20).reshape(shape)


def bf16(values: np.ndarray) -> np.ndarray:
    """Bits of fp32 values rounded to bf16 (ties away from zero)."""
    return ((np.ascontiguousarray(values, np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
