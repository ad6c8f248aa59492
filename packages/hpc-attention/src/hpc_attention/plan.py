"""DecodePlan: the decode task map of a step, made from the device's own lengths and read by every layer."""

from dataclasses import dataclass
from typing import Any

import torch
from hpc_common.capability import capability
from hpc_common.checks import check_contiguous, check_dtype, check_int, check_same_device, check_tensor, fail
from hpc_common.schedule import DecodeSchedule

from . import _C
from ._checks import check_memory, debug_values
from ._cuda import cluster_ctas, ctas_per_sm, map_updated
from .library import register
from .support import DTYPES_16, FP8, MAX_BATCH, MAX_SEQ_LEN, limit_error

_WHERE = "hpc_attention.DecodePlan"
_UPDATE = "hpc_attention.DecodePlan.update"
_CPU_CTAS = 132  # of a CPU plan: what one CTA on each SM of an H200 gives
_SCHEMA = (
    "(Tensor seq_lens, Tensor(a!) map, int num_kv_heads, int q_len, int window, int max_seq_len, int num_ctas, "
    "bool batch_invariant, int max_batch, int min_tiles) -> ()"
)


@dataclass(frozen=True)
class PlanSizes:
    """What a plan allocates, and the figures it follows from.

    num_ctas: CTAs that share the work. rows: query rows of one KV head. min_tiles: least tiles worth a CTA of its own.
    partial_slots: pieces whose partial results can live at once. map_bytes, workspace_bytes: of the two buffers; the
    workspace holds head_dim + 2 fp32 numbers for each row (rounded up to 8) of each slot.
    """

    num_ctas: int
    rows: int
    min_tiles: int
    partial_slots: int
    map_bytes: int
    workspace_bytes: int


class DecodePlan:
    """Which tiles of which request and KV head every CTA of the decode kernel reads, remade for every step.

    One plan serves every layer of a step and one stream at a time. Its buffers are allocated here, once; ``update`` and
    ``decode`` allocate nothing for it, and a workspace's contents never matter.

    Args:
        max_batch: most requests of a step, 1 to 4,096.
        num_q_heads, num_kv_heads: heads; their ratio is whole, 1 to 16.
        head_dim: 64, 128 or 256. page_size: tokens a page of the cache, 1, 16, 32, 64, 128 or 256.
        q_len: query rows a request, 1 to 8: its newest tokens, which seq_lens counts too.
        window: keys a row sees, itself included; None: all. Tiles outside every row's window are not scheduled.
        kv_dtype: of the cache: torch.bfloat16, torch.float16 or torch.float8_e4m3fn.
        device: where the plan and the tensors live; default the current GPU where there is one, else the CPU.
        batch_invariant: cut each request by its own length alone, so that its result does not depend on the batch.
        max_seq_len: longest request, at most 1,048,576 (the default). batch_invariant needs it: the workspace grows
            with it. Longer requests are cut to it.
        num_ctas: CTAs that share the work, 1 to 1,024; default what is resident on the device at once (132 on a CPU),
            or, where max_batch is 1 and max_seq_len at most 4,096 (head_dim 128, at most 8 query rows a KV head), a
            cluster of 16 for one KV head, and of 8 for each of 8 to 15 (no more than 528 tiles of 64 tokens in all with
            an e4m3 cache, 264 with 16 bits).
        workspace: a contiguous tensor of at least ``DecodePlan.sizes(...).workspace_bytes`` bytes on the device;
            default a new one.

    Attributes: the arguments; ``map`` [map_bytes] uint8 and ``workspace``, on the device; ``batch``, requests of the
    last update; ``rows``, ``min_tiles``, ``partial_slots``, ``workspace_bytes`` as in PlanSizes.

    Raises TypeError for a wrong type or dtype, ValueError for a value out of range, a device that runs no plan, a
    workspace too small, or under FakeTensorMode (a plan needs memory to write its map to); the message names argument,
    expected and got.
    """

    def __init__(
        self,
        max_batch: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        q_len: int = 1,
        window: int | None = None,
        kv_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        batch_invariant: bool = False,
        max_seq_len: int | None = None,
        *,
        num_ctas: int | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        self.device = _device(device)
        sizes = self.sizes(
            max_batch, num_q_heads, num_kv_heads, head_dim, page_size, q_len, window, kv_dtype, self.device,
            batch_invariant, max_seq_len, num_ctas=num_ctas,
        )  # fmt: skip
        self.max_batch, self.num_q_heads, self.num_kv_heads = max_batch, num_q_heads, num_kv_heads
        self.head_dim, self.page_size, self.q_len, self.window = head_dim, page_size, q_len, window
        self.kv_dtype, self.batch_invariant = kv_dtype, batch_invariant
        self.max_seq_len = MAX_SEQ_LEN if max_seq_len is None else max_seq_len
        self.num_ctas, self.rows, self.min_tiles = sizes.num_ctas, sizes.rows, sizes.min_tiles
        self.partial_slots, self.workspace_bytes = sizes.partial_slots, sizes.workspace_bytes
        if workspace is None:
            workspace = torch.empty(sizes.workspace_bytes // 4, dtype=torch.float32, device=self.device)
        else:
            _check_workspace(workspace, self.device, sizes.workspace_bytes)
        self.workspace = workspace
        # An empty batch's map until the first update, so that describe() and decode find a valid one.
        # The device is said, for a torch.device context or a default device would otherwise choose another.
        self.map = check_memory(_WHERE, "device", torch.zeros(sizes.map_bytes, dtype=torch.uint8, device="cpu"))
        none = torch.empty(0, dtype=torch.int32, device="cpu")
        _C.plan_update_cpu(none.data_ptr(), 0, self.map.data_ptr(), sizes.map_bytes, *self._shape())
        self.map = self.map.to(self.device)
        self.batch = 0

    @staticmethod
    def sizes(
        max_batch: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        q_len: int = 1,
        window: int | None = None,
        kv_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        batch_invariant: bool = False,
        max_seq_len: int | None = None,
        *,
        num_ctas: int | None = None,
    ) -> PlanSizes:
        """What a plan with these arguments allocates. Checks them and raises as the constructor does."""
        integers = dict(
            num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size, q_len=q_len
        )
        for name, value in integers.items():
            check_int(_WHERE, name, value, -(1 << 31), (1 << 31) - 1)  # the type; the ranges are limit_error's
        if window is not None:
            check_int(_WHERE, "window", window, -(1 << 63), (1 << 63) - 1)
        broken = limit_error(**integers, window=window)
        if broken:
            fail(_WHERE, *broken)
        check_int(_WHERE, "max_batch", max_batch, 1, MAX_BATCH)
        if not isinstance(kv_dtype, torch.dtype) or kv_dtype not in (*DTYPES_16, FP8):
            names = " or ".join(map(str, (*DTYPES_16, FP8)))
            fail(_WHERE, "kv_dtype", names, kv_dtype, ValueError if isinstance(kv_dtype, torch.dtype) else TypeError)
        if not isinstance(batch_invariant, bool):
            fail(_WHERE, "batch_invariant", "a bool", repr(batch_invariant), TypeError)
        if max_seq_len is None and batch_invariant:
            fail(_WHERE, "max_seq_len", "an int with batch_invariant=True (the workspace grows with it)", None)
        longest = MAX_SEQ_LEN if max_seq_len is None else check_int(_WHERE, "max_seq_len", max_seq_len, 1, MAX_SEQ_LEN)
        if num_ctas is None:
            alone = max_batch == 1 and not batch_invariant
            rows = q_len * (num_q_heads // num_kv_heads)
            num_ctas = _num_ctas(_device(device), kv_dtype, head_dim, rows, num_kv_heads, longest if alone else None)
        check_int(_WHERE, "num_ctas", num_ctas, 1, 1024)
        config = _C.plan_config(
            max_batch=max_batch, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, q_len=q_len,
            window=min(window or 0, longest), kv_bytes=kv_dtype.itemsize, num_ctas=num_ctas, max_seq_len=longest,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        names = ("rows", "min_tiles", "partial_slots", "map_bytes", "workspace_bytes")
        return PlanSizes(num_ctas, *(config[name] for name in names))

    def _shape(self) -> tuple[int, int, int, int, int, bool, int, int]:
        """The operator's last arguments; a window as long as the longest request is stored as that length."""
        window = min(self.window or 0, self.max_seq_len)
        return (
            self.num_kv_heads, self.q_len, window, self.max_seq_len, self.num_ctas, self.batch_invariant,
            self.max_batch, self.min_tiles,
        )  # fmt: skip

    def update(self, seq_lens: torch.Tensor) -> None:
        """Make the map of this step from ``seq_lens``; once a step, before its first ``decode``.

        Args:
            seq_lens: [B] int32 on the plan's device, contiguous, B at most max_batch: tokens of each request in the
                cache, this step's q_len included. A request of length 0 gives zeros.

        On a GPU it is one kernel launch, capturable: it reads lengths on the device alone, so a replay follows what
        ``seq_lens`` holds then. Lengths are cut to [0, max_seq_len]; on a CPU, and under HPC_DEBUG=1 outside a capture,
        one outside it is a ValueError.

        Raises TypeError for another dtype, ValueError for another shape, device or layout, or too many requests.
        """
        check_dtype(_UPDATE, "seq_lens", check_tensor(_UPDATE, "seq_lens", seq_lens), (torch.int32,))
        if seq_lens.dim() != 1 or seq_lens.shape[0] > self.max_batch:
            expected = f"shape [B] with B at most max_batch {self.max_batch}"
            fail(_UPDATE, "seq_lens", expected, f"shape {list(seq_lens.shape)}")
        check_contiguous(_UPDATE, "seq_lens", seq_lens)
        check_same_device(_UPDATE, "seq_lens", seq_lens, self.device, "the plan")
        _op(seq_lens, self.map, *self._shape())
        self.batch = seq_lens.shape[0]

    def host_map(self) -> DecodeSchedule:
        """The map parsed on the host, with every field of ``hpc_common.schedule.DecodeSchedule``. Synchronises."""
        return DecodeSchedule.from_map(self.map.cpu().numpy().tobytes())

    def describe(self, limit: int = 16) -> str:
        """The map as text: the batch, the loads, and the first ``limit`` CTAs with their pieces. Synchronises."""
        return f"{self!r}\n{self.host_map().describe(limit)}"

    def __repr__(self) -> str:
        options = "".join(
            f", {name}={getattr(self, name)}" for name in ("window", "batch_invariant") if getattr(self, name)
        )
        return (
            f"DecodePlan(max_batch={self.max_batch}, heads={self.num_q_heads}/{self.num_kv_heads}, head_dim="
            f"{self.head_dim}, page_size={self.page_size}, q_len={self.q_len}, kv_dtype={self.kv_dtype}{options}, "
            f"num_ctas={self.num_ctas}, device={self.device})"
        )


def _device(device: torch.device | str | None) -> torch.device:
    """``device`` with its index; ValueError where no plan runs, TypeError for what is no device."""
    machine = capability(device, _WHERE)
    if not machine.usable:
        fail(_WHERE, "device", "a CPU or a Hopper GPU", f"{machine.device} ({machine.name}): {machine.reason}")
    return torch.device(machine.device)


def _num_ctas(
    device: torch.device, kv_dtype: torch.dtype, head_dim: int, rows: int, num_kv_heads: int, alone: int | None
) -> int:
    """alone: the longest length, where the plan is for one request."""
    if device.type == "cpu":
        return _CPU_CTAS
    if alone is not None and (ctas := cluster_ctas(device, kv_dtype, head_dim, rows, num_kv_heads, alone)):
        return ctas
    return capability(device).num_sms * ctas_per_sm(device, kv_dtype, head_dim, rows)


def _check_workspace(workspace: Any, device: torch.device, needed: int) -> None:
    check_memory(_WHERE, "workspace", check_tensor(_WHERE, "workspace", workspace))
    check_same_device(_WHERE, "workspace", workspace, device, "the plan")
    check_contiguous(_WHERE, "workspace", workspace)
    have = workspace.numel() * workspace.element_size()
    if have < needed:
        fail(_WHERE, "workspace", f"at least {needed} bytes", f"{have} bytes")
    if needed and workspace.data_ptr() % 16:
        fail(_WHERE, "workspace", "a 16-byte aligned first element", f"address {workspace.data_ptr():#x}")


def _update_cpu(seq_lens: torch.Tensor, map: torch.Tensor, *shape: Any) -> None:
    _C.plan_update_cpu(seq_lens.data_ptr(), seq_lens.shape[0], map.data_ptr(), map.numel(), *shape)


def _update_cuda(seq_lens: torch.Tensor, map: torch.Tensor, *shape: Any) -> None:
    if debug_values():
        _check_lengths(seq_lens, max_seq_len=shape[3])
    device = seq_lens.device
    stream = torch.cuda.current_stream(device).cuda_stream
    _C.plan_update_cuda(
        device.index, stream, seq_lens.data_ptr(), seq_lens.shape[0], map.data_ptr(), map.numel(), *shape
    )
    map_updated(map)


def _check_lengths(seq_lens: torch.Tensor, max_seq_len: int) -> None:
    """ValueError naming the first length outside [0, max_seq_len]."""
    lengths = seq_lens.cpu()
    bad = ((lengths < 0) | (lengths > max_seq_len)).nonzero()
    if len(bad):
        request = int(bad[0])
        fail(_UPDATE, "seq_lens", f"lengths in [0, {max_seq_len}]", f"{int(lengths[request])} (request {request})")


_op = register("plan_update", _SCHEMA, _update_cpu, _update_cuda)
