"""Poison for the tests of every operator: memory that must not be read, or not be written, is made to show it.

NaN in page tails and spare pages (and ids far outside the pool in unused page-table entries), workspaces full of
garbage, buffers between canaries, and a builder that scatters dense keys and values over a poisoned paged cache in any
layout. Nothing here knows an operator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

LAYOUTS = ("NHD", "HND", "interleaved", "uneven")
CANARY = 0xA5
# An int32 page id that no pool reaches: a use of it shows as a wrong result, a clamped id or an error.
WILD_PAGE = 0x7FFFFFFF
_AS_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` seen as integers of the same width: torch indexes and compares those for every dtype, NaN included."""
    return tensor.view(_AS_INT[tensor.element_size()])


def fill_nan_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a floating-point tensor (any strides) with NaN in place; e4m3's is the byte 0x7F. Returns it."""
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor.view(torch.uint8).fill_(0x7F)
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        raise TypeError(f"hpc_common.poison.fill_nan_: tensor: expected a floating-point dtype, got {tensor.dtype}")
    return tensor


def dirty_(tensor: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Fill a dense workspace with what an earlier, unrelated call might have left: random bytes. Returns it.

    Seen as numbers they hold NaN, infinities, huge counts and negative indices, so an operator that trusts its
    workspace's contents goes wrong.
    """
    flat = tensor.view(-1).view(torch.uint8)
    generator = torch.Generator(flat.device).manual_seed(seed)
    torch.randint(0, 256, flat.shape, dtype=torch.uint8, device=flat.device, generator=generator, out=flat)
    return tensor


class Canary:
    """A tensor between two guards inside one allocation; ``check()`` (or leaving ``with``) finds writes outside it.

    Args:
        shape, dtype, device: of the tensor ``.tensor``, which is contiguous, 256-byte aligned and full of 0xA5 bytes.
        guard: bytes on either side, a multiple of 256.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.uint8,
        device: torch.device | str = "cpu",
        guard: int = 4096,
    ) -> None:
        if guard % 256 or guard < 256:
            raise ValueError(f"hpc_common.poison.Canary: guard: expected a positive multiple of 256, got {guard}")
        count = 1
        for size in shape:
            count *= size
        nbytes = count * torch.empty(0, dtype=dtype).element_size()
        self._all = torch.full((nbytes + 2 * guard + 256,), CANARY, dtype=torch.uint8, device=device)
        begin = guard + (-(self._all.data_ptr() + guard)) % 256
        self._before, self._after = self._all[:begin], self._all[begin + nbytes :]
        self.tensor = self._all[begin : begin + nbytes].view(dtype).view(tuple(shape))

    def check(self) -> None:
        """AssertionError if a byte outside the tensor has changed; says which side and how far away."""
        before = (self._before != CANARY).nonzero()
        after = (self._after != CANARY).nonzero()
        if len(before):
            raise AssertionError(f"a write {len(self._before) - int(before[-1])} bytes before the buffer")
        if len(after):
            raise AssertionError(f"a write {int(after[0]) + 1} bytes past the end of the buffer")

    def __enter__(self) -> torch.Tensor:
        return self.tensor

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.check()


@dataclass
class PagedCache:
    """A paged cache built from dense keys and values, everything unused poisoned.

    k_cache, v_cache: [pages, page_size, Hkv, D], any strides. page_table: [B, max_pages] int32, unused entries wild.
    seq_lens: [B] int32. All on one device.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.k_cache.shape[1]

    @property
    def num_pages(self) -> int:
        return self.k_cache.shape[0]

    def slots(self, request: int) -> torch.Tensor:
        """Slot numbers (page * page_size + offset, int64 on the CPU) of a request's tokens in order."""
        tokens = torch.arange(int(self.seq_lens[request]))
        pages = self.page_table[request].cpu().long()
        return pages[tokens // self.page_size] * self.page_size + tokens % self.page_size

    def _index_here(self) -> "PagedCache":
        """The same with page_table and seq_lens on the CPU: one wait for a GPU, not one a request."""
        return PagedCache(self.k_cache, self.v_cache, self.page_table.cpu(), self.seq_lens.cpu())

    def used(self) -> torch.Tensor:
        """[pages, page_size] bool on the CPU: the slots that hold a token of some request."""
        mask = torch.zeros(self.num_pages * self.page_size, dtype=torch.bool)
        here = self._index_here()
        for request in range(len(self.seq_lens)):
            mask[here.slots(request)] = True
        return mask.view(self.num_pages, self.page_size)

    def scatter(self, rows: Sequence[torch.Tensor], fill: float = float("nan")) -> torch.Tensor:
        """Per-token values (one [L_b, ...] tensor a request) as [pages, page_size, ...], ``fill`` in unused slots."""
        first = rows[0]
        result = torch.full((self.num_pages * self.page_size, *first.shape[1:]), fill, dtype=first.dtype)
        here = self._index_here()
        for request, values in enumerate(rows):
            result[here.slots(request)] = values.cpu()
        return result.view(self.num_pages, self.page_size, *first.shape[1:]).to(self.k_cache.device)

    def set_unused_(self, value: float = float("nan")) -> None:
        """Set every unused slot of every page, and the spare pages, to ``value`` (NaN: the poison)."""
        unused = ~self.used()
        one = torch.empty(1, dtype=self.k_cache.dtype)
        if value != value:
            fill_nan_(one)
        else:
            one = torch.tensor([value]).to(self.k_cache.dtype)
        word = int(bits(one))
        for cache in (self.k_cache, self.v_cache):
            bits(cache)[unused.to(cache.device)] = word


def _storage(
    layout: str, pages: int, page_size: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised K and V of logical shape [pages, page_size, heads, dim] in the given memory layout."""

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    if layout == "NHD":
        return new(pages, page_size, heads, dim), new(pages, page_size, heads, dim)
    if layout == "HND":
        k, v = (new(pages, heads, page_size, dim).transpose(1, 2) for _ in range(2))
        return k, v
    if layout == "interleaved":  # one buffer, K's page followed by V's
        both = new(pages, 2, page_size, heads, dim)
        return both[:, 0], both[:, 1]
    if layout == "uneven":  # K and V differ in every stride; all remain multiples of 16 bytes
        step = 16 // torch.empty(0, dtype=dtype).element_size()
        k = new(pages, page_size, heads + 1, dim + step)[:, :, :heads, :dim]
        v = new(pages, heads, page_size + 2, dim + 3 * step).transpose(1, 2)[:, :page_size, :, :dim]
        return k, v
    raise ValueError(f"hpc_common.poison: layout: expected one of {LAYOUTS}, got {layout!r}")


def paged_cache(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    page_size: int,
    layout: str = "NHD",
    spare_pages: int = 3,
    extra_columns: int = 2,
    poison: bool = True,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> PagedCache:
    """Scatter dense keys and values over a paged cache whose pages lie in random order.

    Args:
        keys, values: one [L_b, Hkv, D] tensor a request (L_b may be 0), of the cache's dtype, at least one request.
        page_size: tokens a page.
        layout: "NHD", "HND", "interleaved" (K and V pages in one buffer) or "uneven" (K and V differ in every stride).
        spare_pages: pages that no request owns, strewn among the others.
        extra_columns: page-table columns beyond the longest request's pages.
        poison: NaN in every slot no token owns and WILD_PAGE in unused page-table entries; otherwise zeros in both.
        seed: of the page order.
        device: where the result lies.

    Returns a PagedCache. Raises ValueError for an unknown layout or where keys and values differ in number or shape.
    """
    if len(keys) != len(values) or any(k.shape != v.shape for k, v in zip(keys, values, strict=True)):
        raise ValueError("hpc_common.poison.paged_cache: values: expected the shapes of keys")
    lengths = [len(k) for k in keys]
    needed = [-(-length // page_size) for length in lengths]
    pages = sum(needed) + spare_pages
    heads, dim, dtype = keys[0].shape[1], keys[0].shape[2], keys[0].dtype
    order = torch.randperm(max(pages, 1), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    table = torch.full((len(keys), max(needed) + extra_columns), WILD_PAGE if poison else 0, dtype=torch.int32)
    k_cache, v_cache = _storage(layout, pages, page_size, heads, dim, dtype, "cpu")
    cache = PagedCache(k_cache, v_cache, table, torch.tensor(lengths, dtype=torch.int32))
    taken = 0
    for request, count in enumerate(needed):
        table[request, :count] = order[taken : taken + count]
        taken += count
    cache.set_unused_(float("nan") if poison else 0.0)
    for request in range(len(keys)):
        slots = cache.slots(request)
        where = (slots // page_size, slots % page_size)
        bits(k_cache)[where] = bits(keys[request].cpu().contiguous())
        bits(v_cache)[where] = bits(values[request].cpu().contiguous())
    return cache if torch.device(device).type == "cpu" else _moved(cache, layout, device)


def _moved(cache: PagedCache, layout: str, device: torch.device | str) -> PagedCache:
    """The same cache on another device with the same memory layout (``.to`` would drop the gaps between rows)."""
    k, v = _storage(layout, *cache.k_cache.shape, cache.k_cache.dtype, device)
    bits(k).copy_(bits(cache.k_cache).to(device))
    bits(v).copy_(bits(cache.v_cache).to(device))
    return PagedCache(k, v, cache.page_table.to(device), cache.seq_lens.to(device))
