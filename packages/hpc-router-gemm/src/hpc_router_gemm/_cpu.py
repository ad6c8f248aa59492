"""The operators on a CPU: the kernels' mathematics, with results that no matrix library can make depend on more.

Scores. The weight is split into bf16 terms; exact products run over K in blocks, smallest term first, into one
accumulator a block, which is added to a sum. A kernel has both in fp32 (and a tensor core truncates the first); here
both are float64 and the sum is rounded to fp32 once, so a score is the split's own value to half an fp32 ulp, which no
fp32 arithmetic can better.

Determinism. A library adds in an order of its own, which differs between columns, edges of tiles and values of M. Here
that order cannot be seen:

* A product of two bf16 has 16 bits. If the exponents within a row of x and a row of the weight's term spread by dx and
  dw over a block of B, every partial sum is a multiple of one unit and below 2^(dx + dw + 16 + log2 B) units. Up to
  2^53 of them are held exactly by float64, so every order gives the same bits.
* The few pairs of rows that spread further (for normal values about one in a thousand) are summed once more, element
  by element in the order of K.

Which way a pair goes depends on its two rows alone. So equal weight rows give bit-equal scores, and a row of x gives
the same scores whatever M is: on a CPU every call is batch-invariant.
"""

import torch

from .weight import split_terms

K_BLOCK = 256  # K of one accumulator
_ROW_CHUNK = 4096  # tokens at once: bounds the float64 temporaries
_PAIR_CHUNK = 8192  # row pairs at once on the element-by-element path
_PRODUCT_BITS = 16
_FLOAT64_BITS = 53


def exponent_spread(values: torch.Tensor) -> torch.Tensor:
    """Largest minus smallest exponent in each row of a bf16 tensor [R, B]: int32 [R].

    Zeros don't count. Nor do Inf and NaN: they make the sum Inf or NaN in every order.
    """
    exponent = ((values.view(torch.int16) >> 7) & 0xFF).to(torch.int32)
    exponent = exponent.clamp_min(1)  # a subnormal is a multiple of exponent 1's unit
    counts = (values != 0) & (exponent < 255)
    largest = torch.where(counts, exponent, 0).amax(1)
    smallest = torch.where(counts, exponent, 255).amin(1)
    return (largest - smallest).clamp_min(0)


def _ordered_sum(x: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
    """Row-by-row dot products of float64 x and term [P, B], summed in the order of K: [P]."""
    products = (x * term).T.contiguous()
    total = torch.zeros_like(products[0])
    for row in products:
        total += row
    return total


def _block_product(
    x: torch.Tensor, x_spread: torch.Tensor, term: torch.Tensor, term_spread: torch.Tensor
) -> torch.Tensor:
    """x [M, B] times term [N, B] transposed in float64; each element a function of its two rows alone."""
    product = x @ term.T
    limit = _FLOAT64_BITS - _PRODUCT_BITS - (x.shape[1] - 1).bit_length()
    if int(x_spread.max()) + int(term_spread.max()) > limit:
        pairs = (x_spread[:, None] + term_spread > limit).nonzero()
        for rows, columns in (chunk.unbind(1) for chunk in pairs.split(_PAIR_CHUNK)):
            product[rows, columns] = _ordered_sum(x[rows], term[columns])
    return product


def scores(x: torch.Tensor, weight: torch.Tensor, terms: int, out: torch.Tensor) -> None:
    """Write x [M, K] bf16 times weight [N, K] (fp32 or bf16) transposed to out [M, N] fp32."""
    if not x.shape[0]:
        return
    for x_rows, out_rows in zip(x.split(_ROW_CHUNK), out.split(_ROW_CHUNK), strict=True):
        total = torch.zeros(out_rows.shape, dtype=torch.float64, device=x.device)
        for x_block, weight_block in zip(x_rows.split(K_BLOCK, 1), weight.split(K_BLOCK, 1), strict=True):
            x_double, x_spread = x_block.double(), exponent_spread(x_block)
            accumulator = torch.zeros_like(total)
            for term in reversed(split_terms(weight_block, terms)):  # smallest term first
                accumulator += _block_product(x_double, x_spread, term.double(), exponent_spread(term))
            total += accumulator
        out_rows.copy_(total)


def _sort_key(values: torch.Tensor) -> torch.Tensor:
    """int64 keys in the order of fp32 ``values``; -0 equals +0, NaN comes below -inf."""
    bits = (values + 0.0).view(torch.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    return torch.where(values.isnan(), -(2**31), key)


def _best(key: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest keys of each row, best first, equal keys by rising index."""
    return key.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def choose(
    scores: torch.Tensor,
    k: int,
    scoring: str,
    bias: torch.Tensor | None,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scale: float,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Write the k best experts of fp32 scores [M, N] to ids [M, k] int32 and their weights to weights [M, k] fp32.

    Probabilities are computed in float64 and rounded once, so equal scores have equal probabilities.
    """
    tokens, experts = scores.shape
    if not tokens:
        return
    raw = scores.double()
    probabilities = raw.softmax(-1) if scoring == "softmax" else raw.sigmoid()
    value = (probabilities if bias is None else probabilities + bias).float()
    # Without a bias the raw scores choose: they keep differences that a probability rounds away.
    key = _sort_key(scores if bias is None else value)
    if num_groups > 1:
        grouped = value.view(tokens, num_groups, -1)
        two_best = grouped.gather(2, _best(_sort_key(grouped), 2)).sum(2)
        chosen = torch.zeros((tokens, num_groups), dtype=torch.bool, device=scores.device)
        chosen.scatter_(1, _best(_sort_key(two_best), topk_groups), True)
        left_out = ~chosen.repeat_interleave(experts // num_groups, dim=1)
        key = key.masked_fill(left_out, -(2**31) - 1)  # below NaN: an expert of another group is never chosen
    order = _best(key, k)
    picked = probabilities.gather(1, order)
    if renormalize:
        total = picked.sum(1, keepdim=True)
        picked = torch.where(total == 0, 0.0, picked / total)
    ids.copy_(order)
    weights.copy_(picked * scale)
