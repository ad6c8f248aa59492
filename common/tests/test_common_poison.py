"""The poison helpers find what they are made to find, and the paged-cache builder loses no token."""

import pytest
import torch
from hpc_common.capability import Support
from hpc_common.poison import LAYOUTS, WILD_PAGE, Canary, bits, dirty_, fill_nan_, paged_cache
from hpc_common.reference.attention import gather
from hpc_common.testing import device_params

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fill_nan_fills_every_element_of_any_view(dtype: torch.dtype) -> None:
    whole = torch.zeros(4, 6).to(dtype)
    fill_nan_(whole.t()[1:4])
    seen = whole.to(torch.float32).isnan()
    assert bool(seen[:, 1:4].all()) and not bool(seen[:, [0, 4, 5]].any())
    if dtype == torch.float8_e4m3fn:
        assert bool((bits(whole)[:, 1:4] == 0x7F).all())
    with pytest.raises(TypeError, match="floating-point dtype"):
        fill_nan_(torch.zeros(2, dtype=torch.int32))


def test_dirty_workspaces_differ_by_seed_and_hold_nan() -> None:
    first, second = dirty_(torch.zeros(4096)), dirty_(torch.zeros(4096), seed=1)
    assert not torch.equal(bits(first), bits(second)) and bool(first.isnan().any())
    assert torch.equal(bits(first), bits(dirty_(torch.zeros(4096))))


@pytest.mark.parametrize(("offset", "side"), [(-1, "1 bytes before"), (-300, "300 bytes before"), (60, "1 bytes past")])
def test_canary_finds_a_write_on_either_side(offset: int, side: str) -> None:
    buffer = Canary((3, 5), torch.float32)
    assert buffer.tensor.shape == (3, 5) and buffer.tensor.data_ptr() % 256 == 0
    buffer.tensor.fill_(7)
    buffer.check()
    at = buffer.tensor.data_ptr() - buffer._all.data_ptr() + offset
    buffer._all[at] ^= 1
    with pytest.raises(AssertionError, match=side):
        buffer.check()
    with pytest.raises(AssertionError, match=side), buffer:
        pass
    with pytest.raises(ValueError, match="multiple of 256"):
        Canary((1,), guard=100)


def test_canary_fixture_gives_a_guarded_tensor(canary, dirty) -> None:
    tensor = dirty(canary((7,), torch.int64))
    assert tensor.shape == (7,) and tensor.dtype == torch.int64


@pytest.mark.parametrize("dtype", FLOATS[:3] + FLOATS[4:])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_token_is_where_the_page_table_says(dtype: torch.dtype, layout: str, page_size: int) -> None:
    lengths = [0, 1, 64, 130]
    generator = torch.Generator().manual_seed(0)
    keys = [torch.randn(n, 2, 64, generator=generator).to(dtype) for n in lengths]
    values = [torch.randn(n, 2, 64, generator=generator).to(dtype) for n in lengths]
    cache = paged_cache(keys, values, page_size, layout)
    for request, length in enumerate(lengths):
        for dense, paged in ((keys, cache.k_cache), (values, cache.v_cache)):
            have = gather(paged, cache.page_table[request], length)
            assert torch.equal(have, dense[request].to(torch.float64))
    assert cache.seq_lens.tolist() == lengths and int(cache.used().sum()) == sum(lengths)
    for paged in (cache.k_cache, cache.v_cache):
        nan = paged.to(torch.float32).isnan()
        assert torch.equal(nan.all(-1).all(-1), ~cache.used()) and torch.equal(nan.any(-1).any(-1), ~cache.used())
        assert all(s * paged.element_size() % 16 == 0 for s in paged.stride()[:-1]) and paged.stride(-1) == 1
    pages = [-(-n // page_size) for n in lengths]
    used = torch.cat([cache.page_table[r, :n] for r, n in enumerate(pages)])
    assert len(used.unique()) == sum(pages) and bool((cache.page_table[0] == WILD_PAGE).all())
    cache.set_unused_(0.0)
    assert not bool(cache.k_cache.to(torch.float32).isnan().any())
    for request, length in enumerate(lengths):
        assert torch.equal(gather(cache.k_cache, cache.page_table[request], length), keys[request].to(torch.float64))


def test_layouts_differ_in_their_strides() -> None:
    dense = [torch.zeros(100, 3, 64, dtype=torch.bfloat16)]
    caches = {layout: paged_cache(dense, dense, 16, layout) for layout in LAYOUTS}
    assert len({cache.k_cache.stride() for cache in caches.values()}) == 4
    both = caches["interleaved"]
    step = both.v_cache.data_ptr() - both.k_cache.data_ptr()
    assert step == 16 * 3 * 64 * 2  # V's page follows K's in one buffer
    assert caches["uneven"].k_cache.stride() != caches["uneven"].v_cache.stride()


def test_page_order_is_random_and_seeded() -> None:
    dense = [torch.zeros(640, 1, 64)]
    tables = [paged_cache(dense, dense, 16, seed=seed).page_table[0, :40].tolist() for seed in (0, 0, 1)]
    assert tables[0] == tables[1] != tables[2] and tables[0] != sorted(tables[0])


def test_scatter_puts_per_token_values_beside_the_tokens() -> None:
    dense = [torch.zeros(20, 2, 64), torch.zeros(3, 2, 64)]
    cache = paged_cache(dense, dense, 16)
    rows = [torch.arange(40.0).view(20, 2), torch.arange(6.0).view(3, 2) + 100]
    spread = cache.scatter(rows)
    assert spread.shape == (cache.num_pages, 16, 2) and bool(spread[~cache.used()].isnan().all())
    for request, values in enumerate(rows):
        assert torch.equal(spread.view(-1, 2)[cache.slots(request)], values)


def test_bad_arguments() -> None:
    dense = [torch.zeros(4, 1, 64)]
    with pytest.raises(ValueError, match="layout: expected one of"):
        paged_cache(dense, dense, 16, "DHN")
    with pytest.raises(ValueError, match="values: expected the shapes of keys"):
        paged_cache(dense, [torch.zeros(5, 1, 64)], 16)


def test_device_params_follow_the_table() -> None:
    """A gpu-marked "cuda" appears when every feature a test uses has its kernel, and not before."""
    table = [Support("op", "a", cuda=True), Support("op", "b"), Support("op", "c", cpu=False, cuda=True)]
    assert device_params(table, "op", "b") == device_params(table, "op", "a", "b") == ["cpu"]
    cpu, cuda = device_params(table, "op", "a")
    assert cpu == "cpu" and cuda.values == ("cuda",) and [mark.name for mark in cuda.marks] == ["gpu"]
    (only,) = device_params(table, "op", "c")
    assert only.values == ("cuda",)
    with pytest.raises(KeyError):
        device_params(table, "op", "d")
