"""``fused_moe`` on a CPU: the planner, Config and workspace of the GPU's kernels, then tile by tile in torch.

The steps are the kernels': index (and x's quantisation), gate-up tiles, down tiles, reduction in slot order, for every
chunk of tokens. All intermediate results lie in the workspace where Config.layout puts them.

FP8 products: an e4m3 value is an integer times 2^-9, so the products of 128 columns sum exactly in float64, in any
order. Each such sum is rounded to fp32 once, scaled, and added in ascending order of K: a row's bits depend neither on
the tile it lies in nor on the matrix library.
"""

from typing import TYPE_CHECKING

import torch
from hpc_common.grouped import MapBuffers, TileMap, TileRule, build_map

from . import _C
from .quant import E4M3_MAX, quantize_groups, quantize_static

if TYPE_CHECKING:
    from .fused_moe import Call

E4M3 = torch.float8_e4m3fn
K_STEP = 128


class _Chunk:
    """Views into the workspace and the tensors of one chunk's tokens."""

    def __init__(self, call: "Call", begin: int) -> None:
        config = call.config
        self.tokens = slice(begin, min(begin + config.chunk_tokens, call.x.shape[0]))
        self.x = call.x[self.tokens]
        self.x_scale = call.x_scale if call.quant == "tensor" else None
        if call.quant == "block" and call.x_scale is not None:
            self.x_scale = call.x_scale[self.tokens]
        self.map = _index(call, call.topk_ids[self.tokens])
        rows, hidden, inter = config.chunk_rows, call.x.shape[1], call.w2.shape[2]
        self.h = _view(call, config.layout.h, (rows, inter), torch.bfloat16 if config.h_is_bf16 else E4M3)
        self.h_scale = None
        if call.quant == "block" and not config.h_is_bf16:
            self.h_scale = _view(call, config.layout.h_scale, (rows, inter // config.act_group), torch.float32)
        self.y = _view(call, config.layout.y, (rows, hidden), torch.bfloat16)


def _view(call: "Call", offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Part of the workspace as a tensor."""
    count = 1
    for size in shape:
        count *= size
    nbytes = count * dtype.itemsize
    return call.workspace[offset : offset + nbytes].view(dtype).view(shape)


def _index(call: "Call", topk_ids: torch.Tensor) -> TileMap:
    """The chunk's index and tasks, written into the workspace by the C++ planner."""
    layout, experts = call.config.layout, call.w13.shape[0]
    pairs = topk_ids.numel()
    buffers = MapBuffers(
        _view(call, layout.offsets, (experts + 1,), torch.int32),
        _view(call, layout.row_to_slot, (pairs,), torch.int32),
        _view(call, layout.slot_to_row, (pairs,), torch.int32),
        _view(call, layout.tasks, (call.config.max_tiles, 4), torch.int32),
    )
    rule = TileRule(*call.config.rule)
    tile_map = build_map(topk_ids, experts, call.ep_rank, rule, buffers, core=_C)
    counters = _view(call, layout.counters, (64,), torch.int32).zero_()
    counters[0], counters[1] = tile_map.num_rows, tile_map.tasks.shape[0]
    return tile_map


def run(call: "Call") -> None:
    """Fill ``call.out``."""
    for begin in range(0, call.x.shape[0], call.config.chunk_tokens):
        chunk = _Chunk(call, begin)
        if call.config.x_in_workspace:
            _quantise_x(call, chunk)
        _gate_up(call, chunk)
        _down(call, chunk)
        _reduce(call, chunk)


def _quantise_x(call: "Call", chunk: _Chunk) -> None:
    """bf16 x of the chunk to e4m3 in the workspace (the mid and large regimes; low quantises what a tile reads)."""
    tokens, hidden = chunk.x.shape
    x_q = _view(call, call.config.layout.x_q, (tokens, hidden), E4M3)
    if call.quant == "block":
        scale = _view(call, call.config.layout.x_scale, (tokens, hidden // 128), torch.float32)
        q, s = quantize_groups(chunk.x, 128)
        scale.copy_(s)
        chunk.x_scale = scale
    else:
        q = quantize_static(chunk.x, call.x_scale)
    x_q.copy_(q)
    chunk.x = x_q


def _load_rows(
    rows: torch.Tensor, scale: torch.Tensor | None, quant: str, group: int, static: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows as a GEMM multiplies them, with their block scales: bf16 rows are quantised here unless quant is "none"."""
    if quant == "none" or rows.dtype == E4M3:
        return rows, scale
    if quant == "block":
        return quantize_groups(rows, group)
    return quantize_static(rows, static), None


def _gate_up(call: "Call", chunk: _Chunk) -> None:
    """h = activation of x @ w13^T for every tile, bf16 or quantised."""
    config, inter = call.config, call.w2.shape[2]
    tokens = chunk.map.row_to_token
    block_scale = chunk.x_scale if call.quant == "block" else None
    current, product = -1, _Product(call, call.w13, call.w13_scale, call.x_scale, K_STEP)
    for expert, row, rows, _ in chunk.map.tasks.tolist():
        if expert != current:
            product.load(expert)
            current = expert
        picked = tokens[row : row + rows]
        a = chunk.x.view(torch.uint8)[picked].view(E4M3) if chunk.x.dtype == E4M3 else chunk.x[picked]
        a, scale = _load_rows(a, None if block_scale is None else block_scale[picked], call.quant, 128, call.x_scale)
        gate_up = product(a, scale)
        gate, up = gate_up[:, :inter].contiguous(), gate_up[:, inter:].contiguous()
        if call.swiglu_limit is not None:
            gate, up = gate.clamp(max=call.swiglu_limit), up.clamp(-call.swiglu_limit, call.swiglu_limit)
        act = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)
        if config.h_is_bf16:
            chunk.h[row : row + rows] = act
        elif call.quant == "block":
            q, scale = quantize_groups(act, config.act_group)
            chunk.h[row : row + rows] = q
            chunk.h_scale[row : row + rows] = scale
        else:
            chunk.h[row : row + rows] = quantize_static(act, call.act_scale)


def _down(call: "Call", chunk: _Chunk) -> None:
    """y = h @ w2^T for every tile, each row rounded to bf16."""
    group = call.config.act_group
    current, product = (
        -1,
        _Product(call, call.w2, call.w2_scale, call.act_scale, group if call.quant == "block" else K_STEP),
    )
    for expert, row, rows, _ in chunk.map.tasks.tolist():
        if expert != current:
            product.load(expert)
            current = expert
        scale = None if chunk.h_scale is None else chunk.h_scale[row : row + rows]
        a, scale = _load_rows(chunk.h[row : row + rows], scale, call.quant, group, call.act_scale)
        chunk.y[row : row + rows] = product(a, scale).to(torch.bfloat16)


def _widen(weight: torch.Tensor) -> torch.Tensor:
    """e4m3 [N, K] to float64, exactly; four times as fast as ``.to``, and where the time of a decode step goes.

    An e4m3 code is an fp16 one with its exponent 8 lower: sign to bit 15, the other seven bits to 13..7, times 2^8.
    Only the NaN codes do not fit: they would read as 480, past the largest value.
    """
    half = weight.view(torch.int8).to(torch.int16)  # the sign is extended to bits 15..7
    half <<= 7
    half &= ~(1 << 14)
    wide = half.view(torch.float16).float()
    low, high = wide.aminmax()
    if max(-float(low), float(high)) > E4M3_MAX / 256:
        return weight.double()
    return wide.mul_(256.0).double()


class _Product:
    """a @ w[expert]^T in fp32 with the scales applied; ``load`` widens one expert's weight, once for all its tiles."""

    def __init__(
        self,
        call: "Call",
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None,
        static_scale: torch.Tensor | None,
        step: int,
    ) -> None:
        self.quant, self.row_by_row = call.quant, call.batch_invariant
        self.weight, self.weight_scale, self.static_scale, self.step = weight, weight_scale, static_scale, step
        self.wide = weight.new_empty(0)
        self.scale: torch.Tensor | None = None

    def load(self, expert: int) -> None:
        """Take the weight [N, K] and the scale of ``expert``."""
        self.wide = self.weight[expert].float() if self.quant == "none" else _widen(self.weight[expert])
        if self.quant == "block":  # [N / block, K / step] to [K / step, N]
            scale = self.weight_scale[expert]
            self.scale = scale.repeat_interleave(self.wide.shape[0] // scale.shape[0], 0).t().contiguous()
        elif self.quant == "tensor":
            self.scale = self.weight_scale[expert] * self.static_scale

    def __call__(self, a: torch.Tensor, a_scale: torch.Tensor | None) -> torch.Tensor:
        """[n, K] (e4m3 with fp32 [n, K / step] scales, e4m3, or bf16) to fp32 [n, N]."""
        if self.quant == "none":
            a = a.float()
            if self.row_by_row:  # the library's order of summation may change with n, so n is always 1
                return torch.stack([torch.mv(self.wide, row) for row in a.unbind(0)])
            return a @ self.wide.t()
        a = a.double()
        total = torch.zeros(a.shape[0], self.wide.shape[0], dtype=torch.float32, device=a.device)
        for index, begin in enumerate(range(0, a.shape[1], self.step)):
            columns = slice(begin, begin + self.step)
            part = (a[:, columns] @ self.wide[:, columns].t()).float()
            if self.quant == "block":
                part = part * a_scale[:, index, None] * self.scale[index]
            total += part
        return total * self.scale if self.quant == "tensor" else total


def _reduce(call: "Call", chunk: _Chunk) -> None:
    """out = routed_scaling_factor * (weighted rows, in slot order, in fp32) + shared_output, rounded once to bf16."""
    total = torch.zeros(chunk.x.shape, dtype=torch.float32, device=chunk.x.device)
    weights = call.topk_weights[chunk.tokens]
    for slot in range(weights.shape[1]):
        rows = chunk.map.slot_to_row[:, slot].long()
        live = (rows >= 0).nonzero().flatten()
        total[live] += weights[live, slot, None] * chunk.y[rows[live]].float()
    total *= call.routed_scaling_factor
    if call.shared_output is not None:
        total += call.shared_output[chunk.tokens].float()
    call.out[chunk.tokens] = total.to(torch.bfloat16)
