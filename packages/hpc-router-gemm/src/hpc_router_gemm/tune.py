"""Measures Configs of the kernels and cuBLAS fp32 on this GPU, for tuned.py: what ``hpc tune router`` runs."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from hpc_common.capability import capability
from hpc_common.checks import fail
from hpc_common.timing import Candidate, Row, buffer_sets, measure, results

from . import _C
from .tuned import CONFIG_FIELDS
from .weight import RouterWeight

SIZES = ((192, 4096), (384, 3072), (768, 6144))
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_MAX_SETS = 48
_LIGHT_SMEM = 113 * 1024  # of a CTA where two share an SM: more stages than fit need to be tried by hand


def candidate_configs(m: int, n: int, k: int, terms: int, count: int, presplit: bool = False) -> list["_C.Config"]:
    """The chosen Config first, then up to ``count`` - 1 others by the model's estimate.

    presplit: the weight's terms are in memory, and Configs that read them are among the candidates.

    At most five have the same tile, form and way of the weight and place for the sums.
    """
    stream = [
        {"kernel": "stream", "rows": r, "tokens": t, "split": s}
        for (r, t), s in itertools.product(_C.STREAM_TILES, range(1, 9))
        if t <= max(8, 2 * m) and m <= 1024
    ]
    tile = [
        {
            "kernel": "tile",
            "rows": r,
            "k_groups": g,
            "tokens": t,
            "split": s,
            "sums_apart": apart,
            "presplit": split,
            "paired": paired,
            "pairs_experts": experts,
        }
        for split, paired, experts, tiles in (
            (False, False, False, _C.WGMMA_TILES),
            (True, False, False, _C.TERM_TILES if presplit else []),
            (True, True, False, _C.PAIRED_TILES if presplit else []),
            (True, True, True, _C.PAIRED_EXPERT_TILES if presplit else []),
        )
        for (r, g, t), s, apart in itertools.product(tiles, (*range(1, 9), 16), (False, True))
        if t <= max(32, 2 * m) and m >= 16
    ]
    found: dict[str, tuple[float, _C.Config]] = {}
    for fields, stages in itertools.product(stream + tile, (0, 3, 4, 5, 6, 7, 8, 10, 12)):
        try:
            config = _C.make_config(m=m, n=n, k=k, terms=terms, stages=stages, **fields)
        except ValueError:
            continue
        if stages == 0 or config.smem_bytes > _LIGHT_SMEM:
            found[repr(config)] = (_C.estimate_us(config, m=m, n=n, k=k, terms=terms), config)
    chosen = _C.choose_config(m=m, n=n, k=k, terms=terms, presplit=presplit)
    result, per_tile = [chosen], {}
    for name, (_, config) in sorted(found.items(), key=lambda item: item[1][0]):
        tile_name = tuple(getattr(config, name) for name in CONFIG_FIELDS if name not in ("split", "stages"))
        per_tile[tile_name] = per_tile.get(tile_name, 0) + 1
        if name != repr(chosen) and per_tile[tile_name] <= 5 and len(result) < count:
            result.append(config)
    return result


def _cublas(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.float() @ weight.T


def _times(m: int, n: int, k: int, count: int, device: torch.device, timer: Callable[..., list[Row]]) -> dict[str, Any]:
    """The fastest Config for two terms and for three, and for three of linear; two of their times, and cuBLAS's."""
    from . import _cuda

    sets = buffer_sets(4 * n * k + 2 * m * k + 4 * m * n, _MAX_SETS)
    xs = [torch.randn(m, k, device=device).to(torch.bfloat16) for _ in range(sets)]
    weights = [RouterWeight(torch.randn(n, k, device=device), terms=3) for _ in range(sets)]
    out = torch.empty(m, n, device=device)
    pairs = list(zip(xs, weights, strict=True))
    case = f"{n}x{k} m={m}"

    def ours(config: "_C.Config", terms: int, owned: bool) -> list[Callable[[], None]]:
        # Two terms lie otherwise than the first two of three.
        splits = [RouterWeight(w.weight, terms).presplit() if owned else None for w in weights]
        return [
            lambda x=x, w=w, split=split: _cuda.scores(x, w.weight, split, terms, False, owned, out, config)
            for (x, w), split in zip(pairs, splits, strict=True)
        ]

    def fastest(op: str, terms: int, owned: bool) -> tuple[float, dict[str, Any]]:
        configs = candidate_configs(m, n, k, terms, count, presplit=owned)
        rows = timer([Candidate(op, case, repr(c), ours(c, terms, owned)) for c in configs], rounds=5, device=device)
        us, best = min(((row.us, i) for i, row in enumerate(rows)), key=lambda pair: pair[0])
        return us, {name: getattr(configs[best], name) for name in CONFIG_FIELDS}

    us, config = fastest("router-2", 2, True)
    _, owned_three = fastest("router-3", 3, True)
    linear_us, three = fastest("linear-3", 3, False)
    calls = [lambda x=x, w=w: _cublas(x, w.weight) for x, w in pairs]
    cublas_us = timer([Candidate("linear-3", case, "cuBLAS fp32", calls)], rounds=5, device=device)[0].us
    times = {"us": round(us, 3), "linear_us": round(linear_us, 3), "cublas_us": round(cublas_us, 3)}
    return {"n": n, "k": k, "m_to": m, **config, "owned_three": owned_three, "three": three, **times}


def tune(
    sizes: Iterable[tuple[int, int]] = SIZES,
    tokens: Sequence[int] = TOKENS,
    device: torch.device | str | None = None,
    count: int = 16,
    progress: Callable[[str], None] | None = None,
    timer: Callable[..., list[Row]] = measure,
) -> dict[str, Any]:
    """Measure, cold, and return the document that ``tuned.load`` reads: device, date, command, build and rows.

    Args:
        sizes: (N, K) of fp32 weights. tokens: numbers of tokens; a row serves those from the one before it on.
        device: a Hopper GPU; default the current one. count: Configs tried for each case, the present choice first.
        progress: called with a line about each case. timer: in place of ``hpc_common.timing.measure``.

    Raises ValueError where the device runs no kernels, or a size or number of tokens that they do not take.
    """
    where = "hpc_router_gemm.tune"
    machine = capability(device, where)
    if machine.compute is None or not machine.usable:
        fail(where, "device", "a Hopper GPU", machine.reason or machine.name)
    sizes, tokens = list(sizes), sorted(set(tokens))
    if not sizes or not tokens or count < 1:
        fail(where, "sizes, tokens, count", "at least one each", f"{len(sizes)}, {len(tokens)}, {count}")
    for (n, k), m in itertools.product(sizes, tokens):
        _C.choose_config(m=m, n=n, k=k)  # raises for what no kernel takes, before minutes of measuring
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    try:
        for (n, k), m in itertools.product(sizes, tokens):
            row = _times(m, n, k, count, torch.device(machine.device), timer)
            rows.append(row)
            if progress is not None:
                progress(
                    f"{n}x{k} m={m}: {row['kernel']} {row['rows']}x{row['tokens']}, {row['us']:.2f} us; "
                    f"linear {row['linear_us']:.2f}, cuBLAS fp32 {row['cublas_us']:.2f}"
                )
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    document = results([], {"hpc_router_gemm": _C.build_info()}, machine.device)
    return {**document, "device": machine.name, "rows": rows}
