"""The attention backend against float64 on SGLang's own KV pools: tables, plans, windows, verification, FP8, graphs.

The reference reads each request token by token through ``req_to_token`` (a page table of pages of one token), so it
shares no table, plan or window with the backend.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hpc_common.metrics import relative_rms_rows
from hpc_common.reference.attention import paged_attention
from hpc_sglang import counters

FP8 = torch.float8_e4m3fn
CONTEXT = 320


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    counters.reset()
    yield
    torch.set_num_threads(threads)


class Scene:
    """A runner's pools with requests in them, its layers, and the backend over both.

    windows: sliding_window_size of each layer as SGLang has it (-1: none). hybrid: layers with a window have a pool of
    their own, in which only the slots inside the window exist.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        page_size: int = 16,
        heads: tuple[int, int] = (4, 2),
        dim: int = 64,
        windows: Sequence[int] = (-1,),
        dtype: torch.dtype = torch.bfloat16,
        hybrid: bool = False,
        **server: Any,
    ) -> None:
        from hpc_sglang.attention.backend import HpcAttentionBackend
        from hpc_sglang.attention.limits import Server
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        self.random = torch.Generator().manual_seed(sum(lengths) + page_size)
        self.lengths, self.page_size, self.heads, self.dim = list(lengths), page_size, heads, dim
        pages = sum(-(-length // page_size) for length in lengths)
        slots = (pages + 4) * page_size
        common = dict(
            page_size=page_size, dtype=dtype, head_num=heads[1], head_dim=dim, device="cpu", enable_memory_saver=False
        )  # fmt: skip
        self.requests = ReqToTokenPool(12, CONTEXT, "cpu", False)
        if hybrid:
            ids = [[i for i, window in enumerate(windows) if (window > -1) is windowed] for windowed in (True, False)]
            self.pool = SWAKVPool(
                size=slots, size_swa=slots, swa_attention_layer_ids=ids[0], full_attention_layer_ids=ids[1], **common
            )
        else:
            self.pool = MHATokenToKVPool(size=slots, layer_num=len(windows), **common)
        order = torch.randperm(pages + 3, generator=self.random)[:pages] + 1
        self.rows = torch.randperm(11, generator=self.random)[: len(lengths)] + 1
        used = 0
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            count = -(-length // page_size)
            slot = (order[used : used + count, None] * page_size + torch.arange(page_size)).flatten()[:length]
            self.requests.req_to_token[row, :length] = slot.int()
            used += count
        self.layers = [
            RadixAttention(heads[0], dim, dim**-0.5, heads[1], layer_id=i, sliding_window_size=window)
            for i, window in enumerate(windows)
        ]
        if hybrid:
            self._map_window(max(windows), pages)
        for layer in self.layers:
            for buffer in self.pool.get_kv_buffer(layer.layer_id):
                buffer.copy_(torch.randn(buffer.shape, generator=self.random).to(buffer.dtype))
        self.runner = SimpleNamespace(device="cpu", req_to_token_pool=self.requests, token_to_kv_pool=self.pool)
        facts = dict(dtype=torch.bfloat16, kv_dtype=dtype, device="cpu", page_size=page_size, context_len=CONTEXT)
        self.backend = HpcAttentionBackend(self.runner, Server(**{**facts, **server}), self.layers)

    def _map_window(self, window: int, pages: int) -> None:
        """Slots inside the window lie in another page of the window's pool; those before it have none."""
        mapping = torch.full((self.pool.size + self.page_size + 1,), -1, dtype=torch.int64)
        order = torch.randperm(pages + 3, generator=self.random) + 1
        for row, length in zip(self.rows.tolist(), self.lengths, strict=True):
            first = max(0, length - window - 1 - 8) // self.page_size * self.page_size  # 8: rows to verify
            slots = self.requests.req_to_token[row, first:length].long()
            mapping[slots] = order[slots // self.page_size - 1] * self.page_size + slots % self.page_size
        self.pool.register_mapping(mapping)

    def batch(self, mode: str = "DECODE", new: Sequence[int] | None = None, **more: Any) -> SimpleNamespace:
        """What SGLang hands the backend: a decode step, or ``new`` tokens of each request (verified or extended)."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        kind = getattr(ForwardMode, mode)
        new = [1] * len(self.lengths) if new is None else list(new)
        where = [torch.empty(0)] + [
            self.requests.req_to_token[row, length - count : length]
            for row, length, count in zip(self.rows.tolist(), self.lengths, new, strict=True)
        ]
        lengths = torch.tensor(self.lengths)
        if kind.is_target_verify():
            lengths = lengths - torch.tensor(new)  # SGLang's lengths leave the drafts out
        fields = dict(
            forward_mode=kind, batch_size=len(new), req_pool_indices=self.rows, seq_lens=lengths,
            out_cache_loc=torch.cat(where).long(), extend_seq_lens=torch.tensor(new), extend_seq_lens_cpu=new,
            spec_info=SimpleNamespace(draft_token_num=max(new, default=1)),
        )  # fmt: skip
        return SimpleNamespace(**{**fields, **more})

    def inputs(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (
            torch.randn(rows, heads * self.dim, generator=self.random).to(torch.bfloat16)
            for heads in (self.heads[0], self.heads[1], self.heads[1])
        )
        return q, k.view(rows, self.heads[1], self.dim), v.view(rows, self.heads[1], self.dim)

    def expected(self, q: torch.Tensor, layer: Any, new: Sequence[int], **options: Any) -> torch.Tensor:
        """Float64, after the backend has stored the new tokens."""
        table = self.requests.req_to_token[self.rows].long()
        window = None if layer.sliding_window_size < 0 else layer.sliding_window_size + 1
        if getattr(self.pool, "full_to_swa_index_mapping", None) is not None and window is not None:
            table = self.pool.full_to_swa_index_mapping[table].clamp(min=0)
        k, v = (buffer.unsqueeze(1) for buffer in self.pool.get_kv_buffer(layer.layer_id))
        starts = [0]
        for count in new:
            starts.append(starts[-1] + count)
        rows = q.view(-1, self.heads[0], self.dim)
        return paged_attention(rows, k, v, table, starts, self.lengths, window=window, **options)[0]

    def check(self, batch: Any, new: Sequence[int], given: dict[str, Any] | None = None, **options: Any) -> None:
        """Every layer of one step against float64, each row by itself: a wrong page shows in one request's rows.

        given: keyword arguments of the backend's call; options: the reference's.
        """
        self.backend.init_forward_metadata(batch)
        for layer in self.layers:
            q, k, v = self.inputs(sum(new))
            out = self.backend.forward(q, k, v, layer, batch, **(given or {}))
            assert out.shape == q.shape and out.dtype == q.dtype
            close(out, self.expected(q, layer, new, **options))


def close(out: torch.Tensor, want: torch.Tensor) -> None:
    """2^-7 of each row: probabilities and outputs are rounded to bf16 (2^-9 each)."""
    error = relative_rms_rows(out.reshape(len(want), -1), want.reshape(len(want), -1))
    assert float(error.max()) < 2**-7, error


MIXED = (1, 17, 64, 200, 33)


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128, 256])
def test_decode_over_pages(page_size: int) -> None:
    scene = Scene(MIXED, page_size)
    scene.check(scene.batch(), [1] * 5)


@pytest.mark.parametrize(("heads", "dim"), [((2, 2), 128), ((16, 1), 64), ((12, 2), 128), ((8, 4), 256)])
def test_decode_head_counts(heads: tuple[int, int], dim: int) -> None:
    scene = Scene(MIXED, 16, heads, dim)
    scene.check(scene.batch(), [1] * 5)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("mode", ["DECODE", "EXTEND", "TARGET_VERIFY"])
def test_windows(mode: str, hybrid: bool) -> None:
    """SGLang's window of n is the token itself and n before it; layers with and without one alternate."""
    new = {"DECODE": [1] * 5, "EXTEND": [1, 5, 8, 2, 3], "TARGET_VERIFY": [3] * 5}[mode]
    lengths = [max(length, count) for length, count in zip(MIXED, new, strict=True)]
    scene = Scene(lengths, 16, windows=(-1, 24, -1, 24), hybrid=hybrid, **_chain(3))
    scene.check(scene.batch(mode, new), new)
    assert {plan.window for plan in scene.backend.plans[1].values()} == {None, 25}


def test_window_counts_as_in_sglangs_own_backend() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    scene = Scene((40, 90), 1, windows=(7,))
    batch = scene.batch(encoder_lens=None)
    theirs = TorchNativeAttnBackend(scene.runner)
    q, k, v = scene.inputs(2)
    outs = []
    for backend in (scene.backend, theirs):
        backend.init_forward_metadata(batch)
        outs.append(backend.forward_decode(q, k, v, scene.layers[0], batch))
    close(outs[0], outs[1].double())


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("new", [(1, 17, 64, 200, 33), (1, 3, 10, 100, 33), (1, 1, 1, 1, 1)])
def test_extend_over_cached_prefixes(new: Sequence[int], page_size: int) -> None:
    scene = Scene(MIXED, page_size, windows=(-1, 30))
    scene.check(scene.batch("EXTEND", new), new)
    assert counters.calls["attention.prefill"] == 2 and not counters.calls["attention.update"]


def _chain(draft_tokens: int) -> dict[str, Any]:
    return dict(speculative="EAGLE", topk=1, draft_tokens=draft_tokens)


@pytest.mark.parametrize("draft_tokens", [2, 5, 8])
def test_verification_of_a_chain(draft_tokens: int) -> None:
    lengths = [length + 8 for length in MIXED]
    scene = Scene(lengths, 16, windows=(-1, 30), **_chain(draft_tokens))
    new = [draft_tokens] * 5
    scene.check(scene.batch("TARGET_VERIFY", new), new)
    scene.check(scene.batch(), [1] * 5)  # the same backend decodes too
    assert counters.calls["attention.decode"] == 4


@pytest.mark.parametrize(("mode", "new"), [("DECODE", [1] * 5), ("EXTEND", [1, 2, 3, 40, 5])])
def test_options_of_a_layer(mode: str, new: Sequence[int]) -> None:
    """Scale, logit cap and sinks together; models bring sinks in bf16."""
    scene = Scene(MIXED, 16)
    (layer,) = scene.layers
    layer.scaling, layer.logit_cap = 0.2, 3.0
    sinks = torch.randn(4, generator=scene.random).to(torch.bfloat16)
    scene.check(scene.batch(mode, new), new, {"sinks": sinks}, sm_scale=0.2, softcap=3.0, sinks=sinks.float())


@pytest.mark.parametrize("scales", ["numbers", "tensors", "none"])
@pytest.mark.parametrize("mode", ["DECODE", "EXTEND"])
def test_fp8_cache_of_a_bf16_model(mode: str, scales: str) -> None:
    """SGLang stores keys and values divided by the layer's scales; the backend multiplies them back."""
    scene = Scene(MIXED, 64, dtype=FP8)
    (layer,) = scene.layers
    k_scale, v_scale = (1.0, 1.0) if scales == "none" else (0.5, 0.25)
    if scales != "none":
        layer.k_scale, layer.v_scale = torch.tensor(k_scale), torch.tensor(v_scale)
    if scales == "numbers":
        layer.k_scale_float, layer.v_scale_float = k_scale, v_scale
    new = [1] * 5 if mode == "DECODE" else [1, 2, 3, 40, 5]
    scene.check(scene.batch(mode, new), new, k_scale=k_scale, v_scale=v_scale)


def test_16_bit_cache_ignores_scales() -> None:
    """SGLang applies scales only where it converts; a checkpoint may bring them all the same."""
    scene = Scene(MIXED, 16)
    layer = scene.layers[0]
    layer.k_scale = layer.v_scale = torch.tensor(0.5)
    layer.k_scale_float = layer.v_scale_float = 0.5
    scene.check(scene.batch(), [1] * 5)


def test_plan_is_updated_once_a_step_and_buffers_stay() -> None:
    scene = Scene(MIXED, 16, windows=(-1, 30, -1, 30))
    backend = scene.backend
    places = []
    for step in range(3):
        scene.check(scene.batch(), [1] * 5)
        assert counters.calls["attention.update"] == 2 * (step + 1)  # two windows, not four layers
        assert counters.calls["attention.decode"] == 4 * (step + 1)
        plans = [tensor for plan in backend.plans[1].values() for tensor in (plan.map, plan.workspace)]
        places.append([tensor.data_ptr() for tensor in (*plans, backend.lengths, *backend._tables.values())])
    assert places[0] == places[1] == places[2]


def test_captured_step_follows_lengths_and_tables() -> None:
    """What a graph replays: only ``_in_graph``, on the tensors of the capture, whose contents change."""
    scene = Scene(MIXED, 16)
    backend = scene.backend
    backend.init_cuda_graph_state(8, 8)
    batch = scene.batch()
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    scene.lengths = [1, 9, 64, 111, 20]  # within what each request has
    batch.seq_lens.copy_(torch.tensor(scene.lengths))
    batch.out_cache_loc.copy_(scene.batch().out_cache_loc)
    backend.init_forward_metadata_in_graph(batch)
    q, k, v = scene.inputs(5)
    out = backend.forward_decode(q, k, v, scene.layers[0], batch)
    close(out, scene.expected(q, scene.layers[0], [1] * 5))
    held = backend._graph_tables[False].data_ptr()
    assert backend.forward_metadata.tables[False].data_ptr() == held
    grown = SimpleNamespace(**{**vars(batch), "batch_size": 12})
    backend.init_forward_metadata_out_graph(grown)  # beyond the captured ones: other tables; the graphs keep theirs
    assert len(backend.forward_metadata.tables[False]) == 12 and backend._graph_tables[False].data_ptr() == held


def test_unused_requests_of_a_graph_give_zeros() -> None:
    scene = Scene(MIXED, 16)
    fill = scene.backend.get_cuda_graph_seq_len_fill_value()
    batch = scene.batch()
    batch.seq_lens[3:] = fill
    batch.req_pool_indices = torch.cat([scene.rows[:3], torch.zeros(2, dtype=torch.long)])
    scene.backend.init_forward_metadata(batch)
    q, _, _ = scene.inputs(5)
    out = scene.backend.forward_decode(q, None, None, scene.layers[0], batch)
    assert not out[3:].any() and out[:3].any(1).all()


def test_empty_batch() -> None:
    scene = Scene(())
    batch = scene.batch("IDLE", [], out_cache_loc=torch.empty(0, dtype=torch.long), spec_info=None)
    scene.backend.init_forward_metadata(batch)
    q, k, v = scene.inputs(0)
    assert scene.backend.forward(q, k, v, scene.layers[0], batch).shape == (0, 4 * 64)


def test_deterministic_inference_does_not_see_the_batch() -> None:
    scene = Scene(MIXED, 16, deterministic=True)
    assert all(plan.batch_invariant for plan in scene.backend.plans[1].values())
    q, _, _ = scene.inputs(5)
    together = _decode(scene, range(5), q)
    for request in range(5):
        assert torch.equal(_decode(scene, [request], q[[request]])[0], together[request])


def _decode(scene: Scene, requests: Sequence[int], q: torch.Tensor) -> torch.Tensor:
    some = list(requests)
    batch = scene.batch()
    batch.batch_size, batch.req_pool_indices, batch.seq_lens = len(some), scene.rows[some], batch.seq_lens[some]
    scene.backend.init_forward_metadata(batch)
    return scene.backend.forward_decode(q, None, None, scene.layers[0], batch)


def test_what_the_backend_does_not_know_is_refused() -> None:
    scene = Scene(MIXED, 16)
    batch = scene.batch()
    scene.backend.init_forward_metadata(batch)
    q, k, v = scene.inputs(5)
    with pytest.raises(ValueError, match="layer 0: q_rope: not supported"):
        scene.backend.forward_decode(q, k, v, scene.layers[0], batch, q_rope=q)
    many = SimpleNamespace(**{**vars(batch), "batch_size": 13})
    with pytest.raises(ValueError, match="at most 12 requests, got 13"):
        scene.backend.init_forward_metadata_out_graph(many)
    with pytest.raises(ValueError, match="max_bs: expected at most 12"):
        scene.backend.init_cuda_graph_state(13, 13)


def test_another_layout_of_the_pool() -> None:
    """[pages, heads, page_size, head_dim], and buffers whose slots are strided views."""
    from hpc_sglang.attention import pages

    hnd = torch.arange(2 * 3 * 4 * 8).view(2, 3, 4, 8)
    assert torch.equal(pages.paged(hnd, 4), hnd.transpose(1, 2))
    strided = torch.arange(8 * 2 * 3 * 4).view(8, 2, 3, 4)[:, 1]
    for page_size in (1, 4):
        view = pages.paged(strided, page_size)
        assert view.shape == (8 // page_size, page_size, 3, 4) and view.stride(1) == strided.stride(0)
        assert torch.equal(view.reshape(8, 3, 4), strided)
