"""What the router's kernels must do on a GPU, as plain functions for test_router_kernel_gpu.py and the device check.

Each function yields (name, ok, facts). They call the extension below the support table, and force Configs by hand, so
that every compiled tile is met. Nothing here needs pytest.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from hpc_router_gemm import _C, _cpu, _cuda
from hpc_router_gemm.weight import RouterWeight, split_terms

CASES = {
    (192, 4096): (1, 16, 48, 96, 208, 512, 1024, 2048, 4096),
    (384, 3072): (1, 8, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    (768, 6144): (1, 8, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
}
ROW_SCALES = (1.0, 1e4, 1e-6, 2.0**-131)
DEVICE = torch.device("cuda", 0)
Checks = Iterator[tuple[str, bool, dict[str, Any]]]


def result(name: str, ok: bool, **facts: Any) -> tuple[str, bool, dict[str, Any]]:
    return name, bool(ok), facts


def make_x(m: int, k: int, stride: int | None = None) -> torch.Tensor:
    """[m, k] bf16 standard normal; with a stride, a view whose padding is NaN."""
    stride = k if stride is None else stride
    storage = torch.full((m, stride), math.nan, device=DEVICE, dtype=torch.bfloat16)
    storage[:, :k] = torch.randn(m, k, device=DEVICE).to(torch.bfloat16)
    return storage[:, :k]


def make_config(x, weight, terms, **fields):
    return _C.make_config(
        m=x.shape[0],
        n=weight.shape[0],
        k=x.shape[1],
        weight_is_bf16=weight.dtype == torch.bfloat16,
        terms=terms,
        **fields,
    )


def split_of(weight, terms):
    """RouterWeight.split of a weight, or None where it has none."""
    return RouterWeight(weight, terms).split


def run(x, weight, terms, config=None, batch_invariant=False, updated=False, split=None):
    """Scores of the extension; split: what split_of gives, for the kernels that read it."""
    out = torch.full((x.shape[0], weight.shape[0]), math.nan, device=DEVICE)
    _cuda.router_gemm(x, weight, split, terms, batch_invariant, updated, out, config)
    return out


def error_use(y, x, weight, terms) -> tuple[float, float, float, float]:
    """(rms error, largest error, share of the rms bound, share of the bound of the largest)."""
    xd, wd = x.double(), weight.double()
    error = y.double() - xd @ wd.T
    lost = xd @ (sum(t.double() for t in split_terms(weight, terms)) - wd).T
    f = 2.0**-23 * math.sqrt(x.shape[1]) * xd.square().mean().sqrt() * wd.square().mean(1).sqrt()
    rms, largest = float(error.square().mean().sqrt()), float(error.abs().max())
    rms_bound = 1.15 * float(lost.square().mean().sqrt()) + float(f.square().mean().sqrt())
    largest_bound = 1.5 * float(lost.abs().max()) + 6 * float(f.max())
    if not bool(error.isfinite().all()):
        return math.inf, math.inf, math.inf, math.inf
    return rms, largest, rms / rms_bound, largest / largest_bound


def tile_fields(tiles, splits, **more) -> list[dict]:
    """Fields of tile Configs: each tile with each split and each value of the other fields."""
    return [
        {"kernel": "tile", "rows": r, "k_groups": g, "tokens": t, "split": s, **dict(zip(more, values, strict=True))}
        for (r, g, t), s, *values in itertools.product(tiles, splits, *more.values())
    ]


ONE_RING = 11  # stages of 64 x 64 that leave no room for a second CTA


def every_kernel() -> Checks:
    """Each compiled tile with several clusters, on sizes that are multiples of nothing."""
    for weight_type, terms in ((torch.float32, 2), (torch.float32, 3), (torch.float32, 1), (torch.bfloat16, 1)):
        for m, n, k in ((203, 200, 1160), (7, 37, 4104)):
            torch.manual_seed(m)
            x = make_x(m, k, k + 8)
            weight = torch.randn(n, k, device=DEVICE).to(weight_type)
            split = split_of(weight, terms)
            fields = [
                {"kernel": "stream", "rows": r, "tokens": t, "split": s, "stages": stages}
                for (r, t), (s, stages) in itertools.product(_C.STREAM_TILES, ((1, 0), (3, 2), (8, 1)))
            ]
            fields += tile_fields(_C.WGMMA_TILES, (1, 2, 4, 5, 8, 16))
            # Sums in memory of their own.
            fields += tile_fields(_C.WGMMA_TILES, (2, 3, 4, 8, 16), sums_apart=(True,), stages=(0, 4))
            # Two rings, of an odd number of stages, and one, where a CTA has its SM alone.
            fields += tile_fields([(64, 1, 64)], (1, 2, 3, 8), stages=(5, ONE_RING))
            if split is not None:
                terms_in_memory = {"sums_apart": (False, True), "presplit": (True,)}
                fields += tile_fields(_C.TERM_TILES, (1, 2, 3, 4, 8, 16), **terms_in_memory)
                fields += tile_fields(
                    _C.PAIRED_TILES, (1, 2, 3, 4, 8), **terms_in_memory, paired=(True,), stages=(0, 5)
                )
                pairs = {"paired": (True,), "pairs_experts": (True,)}
                fields += tile_fields(
                    _C.PAIRED_EXPERT_TILES, (1, 2, 3, 4, 8), **terms_in_memory, **pairs, stages=(0, 3, 5)
                )
            for f in fields:
                name = f"kernel {weight_type} terms={terms} {m}x{n}x{k} {f}"
                try:
                    config = make_config(x, weight, terms, **f)
                except ValueError:
                    continue
                try:
                    y = run(x, weight, terms, config, split=split)
                    torch.cuda.synchronize()
                except Exception as error:  # a sticky CUDA error ends the whole check
                    yield result(name, False, error=str(error))
                    return
                rms, largest, rms_use, largest_use = error_use(y, x, weight, terms)
                limit = 1.0 if terms == 2 else 40.0 if terms == 1 and weight_type == torch.bfloat16 else 8.0
                yield result(
                    name,
                    rms_use <= limit and largest_use <= limit,
                    rms=rms,
                    largest=largest,
                    use=(rms_use, largest_use),
                )
                if f.get("stages") == ONE_RING:
                    two = make_config(x, weight, terms, **{**f, "stages": 0})
                    yield result(f"{name} as with two rings", torch.equal(y, run(x, weight, terms, two)))
                if config.presplit and same_order(config):
                    from_fp32 = make_config(
                        x,
                        weight,
                        terms,
                        **{k: f[k] for k in ("kernel", "rows", "k_groups", "tokens", "split", "sums_apart")},
                    )
                    yield result(f"{name} as from fp32", torch.equal(y, run(x, weight, terms, from_fp32)))


def same_order(config) -> bool:
    """Whether a tile that reads terms exists for fp32 as well: the order of products is the same."""
    return (config.rows, config.k_groups, config.tokens) in _C.WGMMA_TILES


def values() -> Checks:
    """Chosen configs against the bounds, for standard-normal and heavy-tailed weights; three terms against cuBLAS."""
    torch.backends.cuda.matmul.allow_tf32 = False
    shapes = [(m, n, k) for (n, k), ms in CASES.items() for m in ms if m <= 4096]
    shapes += [
        (m, n, k) for m in (1, 5, 33, 64, 100, 300) for n, k in ((256, 7168), (128, 2048), (896, 7168), (64, 2048))
    ]
    shapes += [(3, 1, 8), (17, 5, 24), (1, 1000, 20480), (129, 63, 120), (2000, 1, 4096)]
    for m, n, k in shapes:
        torch.manual_seed(m + n)
        x = make_x(m, k)
        weight = torch.randn(n, k, device=DEVICE)
        y = run(x, weight, 2, split=split_of(weight, 2))
        rms, largest, rms_use, largest_use = error_use(y, x, weight, 2)
        yield result(
            f"values terms=2 {n}x{k} m={m}",
            rms_use <= 1 and largest_use <= 1,
            rms=rms,
            largest=largest,
            use=(rms_use, largest_use),
        )
        y3 = run(x, weight, 3, split=split_of(weight, 3))
        reference = x.double() @ weight.double().T
        e3, eb = (y3.double() - reference).abs(), ((x.float() @ weight.T).double() - reference).abs()
        facts = {
            "rms": float(e3.square().mean().sqrt()),
            "largest": float(e3.max()),
            "cublas_rms": float(eb.square().mean().sqrt()),
            "cublas_largest": float(eb.max()),
        }
        enough = m * n >= 100_000
        ok = (
            facts["rms"] <= facts["cublas_rms"] and facts["largest"] <= facts["cublas_largest"]
            if enough
            else bool(e3.isfinite().all()) and facts["rms"] <= 3 * facts["cublas_rms"] + 1e-6
        )
        yield result(f"values terms=3 {n}x{k} m={m}", ok, **facts)
        if m * n >= 10_000:  # rows of several scales in one matrix; x lifts the subnormal ones' scores
            scaled = weight.clamp(-4, 4)
            for kind, scale in enumerate(ROW_SCALES):
                scaled[kind :: len(ROW_SCALES)] *= scale
            lifted = x * 2.0**10
            ys = run(lifted, scaled, 2, split=split_of(scaled, 2))
            for kind, scale in enumerate(ROW_SCALES):
                rows = slice(kind, None, len(ROW_SCALES))
                part = error_use(ys[:, rows], lifted, scaled[rows], 2)
                yield result(f"values of rows by {scale} {n}x{k} m={m}", max(part[2:]) <= 1, use=part[2:])
            large = weight.clamp(-4, 4) * 8e37
            lowered = x * 2.0**-14
            part = error_use(run(lowered, large, 2, split=split_of(large, 2)), lowered, large, 2)
            yield result(f"values near the largest finite {n}x{k} m={m}", max(part[2:]) <= 1, use=part[2:])
    # Near the largest finite, infinite and NaN weights.
    x = torch.zeros(20, 512, device=DEVICE, dtype=torch.bfloat16)
    x[:, 3] = 0.25
    weight = torch.zeros(70, 512, device=DEVICE)
    weight[:, 3] = torch.tensor([3.4e38, -3.4e38, math.inf, -math.inf, math.nan, 1.0, 3.402e38], device=DEVICE).repeat(
        10
    )
    tile = {"kernel": "tile", "rows": 64, "tokens": 104, "presplit": True}
    for terms, m in itertools.product((1, 2, 3), (1, 20)):
        config = make_config(x[:m], weight, terms, **tile) if terms > 1 and m > 1 else None
        y = run(x[:m], weight, terms, config, split=split_of(weight, terms))
        want = 0.25 * weight[:, 3].expand(m, -1)
        close = torch.isclose(y, want, rtol=2.0**-8, atol=0, equal_nan=True)
        yield result(f"extreme weights terms={terms} m={m}", bool(close.all()), got=y[0, :7].tolist())


def planted_faults() -> Checks:
    """Terms in memory that are not the weight's: the bounds must fail."""
    for m, n, k in ((512, 192, 4096), (256, 768, 6144), (1024, 384, 3072)):
        torch.manual_seed(m)
        x, weight = make_x(m, k), torch.randn(n, k, device=DEVICE)
        hi, lo = split_terms(weight, 2)
        faults = {
            "none": lo,
            "lo dropped": torch.zeros_like(lo),
            "lo by 255/256": (lo.float() * (255 / 256)).bfloat16(),
        }
        for last in (128, 64, 16):
            faults[f"last {last} of lo missing"] = torch.cat([lo[:, :-last], torch.zeros_like(lo[:, -last:])], 1)
        for name, term in faults.items():
            use = error_use(run(x, weight, 2, split=torch.stack([hi, term])), x, weight, 2)[2:]
            yield result(f"fault {name} {n}x{k} m={m}", (max(use) <= 1) == (name == "none"), use=use)


def promises() -> Checks:
    """Determinism, equal rows, NaN rows, batch invariance, order of one-ulp rows, updates before a call."""
    for n, k in ((192, 4096), (768, 6144), (200, 1160)):
        weight = torch.randn(n, k, device=DEVICE)
        weight[n // 2] = weight[0]
        weight[n - 1] = weight[0]
        x_all = make_x(1024, k)
        splits = {terms: split_of(weight, terms) for terms in (2, 3)}
        alone = run(x_all[:1], weight, 2, batch_invariant=True)
        for m in (1, 2, 7, 8, 9, 17, 33, 64, 65, 100, 129, 200, 300, 512, 777, 1024):
            x = x_all[:m]
            for terms in (2, 3):
                y = run(x, weight, terms, split=splits[terms])
                yield result(
                    f"equal rows {n}x{k} m={m} terms={terms}",
                    bool((y[:, 0] == y[:, n // 2]).all() and (y[:, 0] == y[:, n - 1]).all()),
                )
                same = all(bool(torch.equal(y, run(x, weight, terms, split=splits[terms]))) for _ in range(5))
                yield result(f"same bits {n}x{k} m={m} terms={terms}", same)
            bad = x.clone()
            bad[m // 2, k // 3] = math.nan
            bad[m // 3, k - 1] = math.inf
            yb, y = run(bad, weight, 2, split=splits[2]), run(x, weight, 2, split=splits[2])
            others = [i for i in range(m) if i not in (m // 2, m // 3)]
            yield result(
                f"NaN row {n}x{k} m={m}",
                bool(
                    torch.equal(yb[others], y[others]) and yb[m // 2].isnan().all() and not yb[m // 3].isfinite().any()
                ),
            )
            yi = run(x, weight, 2, batch_invariant=True)
            yield result(f"batch invariant {n}x{k} m={m}", bool(torch.equal(yi[:1], alone)))
        for m in (1, 64, 512):
            for terms, batch_invariant in ((2, False), (3, False), (2, True)):
                first = run(x_all[:m], weight, terms, batch_invariant=batch_invariant, split=splits[terms])
                out = torch.empty_like(first)
                different = torch.zeros((), device=DEVICE, dtype=torch.int64)
                for _ in range(1000):
                    _cuda.router_gemm(x_all[:m], weight, splits[terms], terms, batch_invariant, False, out)
                    different += (out != first).sum()
                name = f"1000 runs {n}x{k} m={m} terms={terms} {batch_invariant=}"
                yield result(name, int(different) == 0, different=int(different))
            yield a_thousand_routes(x_all[:m], weight, splits[2])
    # One-hot tokens: three terms hold every bit of a weight.
    k = 2048
    weight = torch.randn(128, k, device=DEVICE)
    ulp = (weight.view(torch.int32) + 1).view(torch.float32)
    both = torch.cat([weight, ulp])
    for m in (1, 40, 300):
        x = torch.zeros(m, k, device=DEVICE, dtype=torch.bfloat16)
        hot = torch.randint(0, k, (m,), device=DEVICE)
        x[torch.arange(m, device=DEVICE), hot] = 1
        y = run(x, both, 3, split=split_of(both, 3))
        yield result(f"one-hot m={m}", bool(torch.equal(y, both[:, hot].T)))
    # x, or the weight, written by the kernel just before.
    for m, (n, k) in itertools.product((1, 64, 512, 2048), ((192, 4096), (768, 6144))):
        x, weight = make_x(m, k), torch.randn(n, k, device=DEVICE)
        wants = [run(x * s, weight * s, 2) for s in (1, 2, 4)]
        torch.cuda.synchronize()
        xs, ws = x.clone(), weight.clone()
        ok = True
        for _ in range(20):
            for s, want in zip((1, 2, 4), wants, strict=True):
                torch.mul(weight, s, out=ws)
                torch.mul(x, s, out=xs)
                torch.mul(weight, s, out=ws)
                ok &= bool(torch.equal(run(xs, ws, 2, updated=True), want))
        yield result(f"written just before {n}x{k} m={m}", ok)


def a_thousand_routes(x, weight, split) -> tuple[str, bool, dict[str, Any]]:
    """Scores and choice, chained: the same ids and weights every time."""
    m, experts = x.shape[0], weight.shape[0]
    ids, weights = (torch.empty(m, 8, device=DEVICE, dtype=t) for t in (torch.int32, torch.float32))
    different = torch.zeros((), device=DEVICE, dtype=torch.int64)
    first = None
    for _ in range(1000):
        _cuda.route(x, weight, split, 2, 8, "softmax", None, 1, 1, True, 2.5, False, ids, weights)
        first = first or (ids.clone(), weights.clone())
        different += (ids != first[0]).sum() + (weights != first[1]).sum()
    return result(f"1000 routes of {m} over {experts}", int(different) == 0, different=int(different))


def equal_rows_at_every_m() -> Checks:
    """Equal weight rows in each tile of experts, and at its edges, at every M from 1 to 1,024 and some above."""
    n, k = 192, 4096
    weight = torch.randn(n, k, device=DEVICE)
    twins = [0, 1, 7, 8, 63, 64, 100, 127, 128, 191]
    weight[twins] = weight[0].clone()
    x = make_x(4096, k)
    for terms in (2, 3):
        split = split_of(weight, terms)
        different = torch.zeros((), device=DEVICE, dtype=torch.int64)
        for m in (*range(1, 1025), 1300, 1999, 2048, 4096):
            y = run(x[:m], weight, terms, split=split)
            different += (y[:, twins] != y[:, :1]).sum()
        yield result(f"equal rows at every m terms={terms}", int(different) == 0, different=int(different))


def route() -> Checks:
    """The choice of experts: exact ids where raw scores choose; weights against the CPU's."""
    options = [
        (256, 8, "softmax", False, 1, 1),
        (256, 8, "sigmoid", True, 8, 4),
        (192, 8, "softmax", True, 1, 1),
        (384, 8, "softmax", False, 1, 1),
        (896, 16, "softmax", False, 1, 1),
        (128, 1, "sigmoid", False, 1, 1),
        (768, 32, "sigmoid", True, 16, 3),
        (5, 5, "softmax", False, 1, 1),
        (2000, 40, "softmax", False, 1, 1),
        (2048, 64, "sigmoid", True, 64, 7),
        (1, 1, "softmax", False, 1, 1),
        (96, 6, "softmax", True, 48, 5),
        (1024, 32, "softmax", False, 1, 1),
        (1000, 31, "sigmoid", True, 1, 1),
        (1024, 32, "softmax", True, 32, 2),
        (513, 7, "softmax", True, 27, 3),
        (33, 32, "sigmoid", False, 1, 1),
        (64, 32, "softmax", True, 32, 16),
    ]
    for (n, k, scoring, biased, groups, best), m in itertools.product(options, (1, 77, 513)):
        torch.manual_seed(n + m)
        scores = torch.randn(m, n, device=DEVICE) * 2
        scores[:, n // 2] = scores[:, 0]  # ties
        if m > 10:
            scores[3] = math.nan
            scores[4, ::2] = -math.inf
            scores[5] = 0
            scores[6] = scores[6].round()
            scores[7, torch.arange(n, device=DEVICE) % 128 < 3] += 20  # the best are few threads' all
        bias = torch.randn(n, device=DEVICE) * 0.2 if biased else None
        ids, weights = (torch.full((m, k), -7, device=DEVICE, dtype=t) for t in (torch.int32, torch.float32))
        _C.topk(
            scores.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            m,
            n,
            k,
            scoring == "sigmoid",
            groups,
            best,
            True,
            2.5,
            0,
            torch.cuda.current_stream().cuda_stream,
        )
        want_ids, want = torch.empty((m, k), dtype=torch.int32), torch.empty((m, k))
        _cpu.choose(
            scores.cpu(), k, scoring, None if bias is None else bias.cpu(), groups, best, True, 2.5, want_ids, want
        )
        wrong = int((ids.cpu() != want_ids).any(1).sum())
        exact = not biased and groups == 1
        same = (ids.cpu() == want_ids).all(1)
        close = torch.isclose(weights.cpu()[same], want[same], rtol=3e-6, atol=1e-7, equal_nan=True).all()
        distinct = all(len(set(row)) == k for row in ids.tolist())
        yield result(
            f"topk n={n} k={k} {scoring} bias={biased} groups={groups}/{best} m={m}",
            (wrong == 0 if exact else wrong <= 0.02 * m) and bool(close) and distinct,
            wrong=wrong,
            close=bool(close),
        )
