"""The backend that SGLang calls: a step's metadata, then one call a layer.

A step: ``pages.fill`` writes lengths and page tables, every plan is updated from those lengths, and each layer of the
step decodes with the plan of its shape. On a GPU all of it is in the captured graph (``_in_graph``); a batch beyond
the captured sizes takes the same path eagerly, with the same plans.

``verify``: the draft chain of speculative decoding is decode with several rows a request.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hpc_attention import DecodePlan, decode, prefill
from hpc_attention.support import FP8

from .. import compat
from ..counters import count, made
from . import pages
from .limits import Server, Shape, shape_of

Base: Any = compat.find("sglang.srt.layers.attention.base_attn_backend:AttentionBackend")
KVWriteLoc: Any = compat.find("sglang.srt.mem_cache.memory_pool:KVWriteLoc")


@dataclass
class Step:
    """What the layers of one forward pass share.

    q_len: rows a request in decode or verification. lengths, tables: views of the backend's buffers, for this batch;
    tables[True] belongs to the pool of layers with a window. window_loc: where those layers write. cu_seqlens_q,
    longest_q: of prefill.
    """

    q_len: int
    lengths: torch.Tensor
    tables: dict[bool, torch.Tensor]
    window_loc: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    longest_q: int = 0


class HpcAttentionBackend(Base):
    """Decode, verification of draft chains and, on a CPU, prefill by hpc_attention.

    Args:
        runner: SGLang's ModelRunner; its pools, sizes and device are read.
        server, layers: what ``limits.refusal`` accepted: the facts and the model's attention layers.

    Plans and their workspaces are made here, for the largest batch that the request pool can hold. Page tables are
    large (rows of a whole context): those of captured graphs are made for the captured sizes, those of larger batches
    as they come, up to the same bound (``_rows``).
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, server: Server, layers: Iterable[Any]) -> None:
        super().__init__()
        self.device = torch.device(runner.device)
        self.page_size = server.page_size
        self.server = server
        self.req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.data_type = self.kv_cache_dtype = server.kv_dtype
        self.window_pool = compat.window_pool(runner)
        self.shapes: dict[int, Shape] = {layer.layer_id: shape_of(layer) for layer in layers}
        self.max_batch = min(runner.req_to_token_pool.size, 4096)
        self.max_pages = -(-self.req_to_token.shape[1] // self.page_size)
        self.plans: dict[int, dict[Shape, DecodePlan]] = {}
        self.lengths = torch.zeros(self.max_batch, dtype=torch.int32, device=self.device)
        self._graph_tables = self._tables = self._new_tables(0)
        self._held: list[dict[bool, torch.Tensor]] = []
        self.forward_metadata: Step | None = None
        self._plans_for(server.draft_tokens)
        if server.draft_tokens > 1:
            self._plans_for(1)

    # -- a step's metadata ---------------------------------------------------------------------------------------

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Choose the views and make the plans that this batch needs; nothing on the device."""
        batch, mode = forward_batch.batch_size, forward_batch.forward_mode
        q_len = forward_batch.spec_info.draft_token_num if mode.is_target_verify() else 1
        if batch > self.max_batch:
            raise ValueError(f"hpc_sglang attention: batch: expected at most {self.max_batch} requests, got {batch}")
        if mode.is_decode_or_idle() or mode.is_target_verify():
            self._plans_for(q_len)
        elif self.device.type != "cpu":
            raise ValueError(f"hpc_sglang attention: forward mode {mode.name}: only decode runs on a GPU")
        tables = self._rows(batch)
        self.forward_metadata = Step(q_len, self.lengths[:batch], {w: t[:batch] for w, t in tables.items()})

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Lengths, page tables and plans of this step, on the device; what a captured graph runs at every replay."""
        step, mode = self.forward_metadata, forward_batch.forward_mode
        batch = forward_batch.batch_size
        if not batch:
            return
        verify = mode.is_target_verify()
        pages.fill(
            self.req_to_token,
            forward_batch.req_pool_indices[:batch],
            forward_batch.seq_lens[:batch],
            step.q_len if verify else 0,
            self.page_size,
            step.lengths,
            step.tables[False],
            step.tables.get(True),
            self.window_pool.full_to_swa_index_mapping if self.window_pool is not None else None,
        )
        if self.window_pool is not None:
            step.window_loc = self.window_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
        if verify or mode.is_decode_or_idle():
            for plan in self.plans[step.q_len].values():
                plan.update(step.lengths)
                count("attention.update")
            return
        new = forward_batch.extend_seq_lens
        step.cu_seqlens_q = torch.nn.functional.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
        step.longest_q = max(int(length) for length in forward_batch.extend_seq_lens_cpu)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """The buffers that captured graphs hold, for batches of up to max_bs requests."""
        if max_bs > self.max_batch:
            raise ValueError(f"hpc_sglang attention: max_bs: expected at most {self.max_batch} requests, got {max_bs}")
        if max_bs > len(self._graph_tables[False]):
            self._held.append(self._graph_tables)  # graphs captured before have their addresses
            self._graph_tables = self._new_tables(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Of a graph's unused requests: none of the plan's tiles is theirs."""
        return 0

    def _plans_for(self, q_len: int) -> dict[Shape, DecodePlan]:
        if q_len not in self.plans:
            server = self.server
            self.plans[q_len] = {
                shape: DecodePlan(
                    self.max_batch, shape.num_q_heads, shape.num_kv_heads, shape.head_dim, self.page_size, q_len,
                    shape.window, server.kv_dtype, self.device, server.deterministic,
                    max_seq_len=self.max_pages * self.page_size,
                )
                for shape in dict.fromkeys(self.shapes.values())
            }  # fmt: skip
            made("attention.plans", sum(plan.workspace_bytes for plan in self.plans[q_len].values()))
        return self.plans[q_len]

    def _new_tables(self, rows: int) -> dict[bool, torch.Tensor]:
        kinds = (False,) if self.window_pool is None else (False, True)
        size = (rows, self.max_pages)
        made("attention.tables", 4 * len(kinds) * rows * self.max_pages)
        return {kind: torch.zeros(size, dtype=torch.int32, device=self.device) for kind in kinds}

    def _rows(self, batch: int) -> dict[bool, torch.Tensor]:
        """Tables of at least ``batch`` rows: those that captured graphs hold, which stay, where they are large enough;
        else another set, which a larger one replaces in doublings up to the request pool's size."""
        if batch <= len(self._graph_tables[False]):
            return self._graph_tables
        rows = len(self._tables[False])
        if batch > rows:
            self._tables = self._new_tables(min(self.max_batch, max(batch, 2 * rows, 16)))
        return self._tables

    # -- a layer -------------------------------------------------------------------------------------------------

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One layer's attention of a decode or verification step: [rows, Hq * D], as ``q`` in any shape."""
        step = self._write(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        count("attention.decode")
        out = decode(
            q.reshape(-1, layer.tp_q_head_num, layer.head_dim),
            *self._caches(layer),
            self._table(step, layer),
            self.plans[step.q_len][self.shapes[layer.layer_id]],
            **self._options(layer, sinks),
        )
        return out.view(len(out), -1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One layer's attention of new tokens over cached ones; a chain of drafts to verify is decode."""
        if forward_batch.forward_mode.is_target_verify():
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, sinks=sinks, **kwargs)
        step = self._write(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        count("attention.prefill")
        out = prefill(
            q.reshape(-1, layer.tp_q_head_num, layer.head_dim),
            *self._caches(layer),
            self._table(step, layer),
            step.cu_seqlens_q,
            step.lengths,
            step.longest_q,
            window=self.shapes[layer.layer_id].window,
            **self._options(layer, sinks),
        )
        return out.view(len(out), -1)

    def _write(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        kwargs: dict[str, Any],
    ) -> Step:
        """Store the new tokens' keys and values; SGLang divides them by the layer's scales in an FP8 cache."""
        given = [name for name, value in kwargs.items() if value is not None and value is not False]
        if given:
            raise ValueError(f"hpc_sglang attention: layer {layer.layer_id}: {', '.join(given)}: not supported")
        step = self.forward_metadata
        if save_kv_cache and k is not None:
            loc = forward_batch.out_cache_loc
            window_loc = None if step.window_loc is None else step.window_loc[: len(loc)]
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(loc, window_loc), k, v, layer.k_scale, layer.v_scale)
        return step

    def _caches(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        return pages.paged(k, self.page_size), pages.paged(v, self.page_size)

    def _table(self, step: Step, layer: Any) -> torch.Tensor:
        windowed = self.window_pool is not None and self.window_pool.layers_mapping[layer.layer_id][1]
        return step.tables[windowed]

    def _options(self, layer: Any, sinks: torch.Tensor | None) -> dict[str, Any]:
        fp8 = self.kv_cache_dtype == FP8
        return dict(
            sm_scale=layer.scaling,
            k_scale=_scale(layer.k_scale_float, layer.k_scale) if fp8 else None,
            v_scale=_scale(layer.v_scale_float, layer.v_scale) if fp8 else None,
            softcap=layer.logit_cap if layer.logit_cap > 0 else None,
            sinks=None if sinks is None else sinks.float(),
        )


def _scale(number: float | None, tensor: torch.Tensor | float | None) -> float | torch.Tensor | None:
    """A layer's static scale: the number that a graph can hold where SGLang has it, else the tensor."""
    if number is not None:
        return float(number)
    if isinstance(tensor, torch.Tensor):
        return tensor.reshape(1).float()
    return tensor
