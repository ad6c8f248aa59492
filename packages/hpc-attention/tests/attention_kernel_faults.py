"""Problems of the emulated decode kernels' test, and the mistakes that are planted into them."""

from dataclasses import dataclass, replace

import torch
from hpc_attention.support import FP8
from hpc_attention.testing import Problem

BF16 = torch.bfloat16

SMALL = Problem(lengths=(150, 0, 65, 1), num_q_heads=8, num_kv_heads=2, num_ctas=3)
LONG = replace(SMALL, lengths=(700,), num_kv_heads=1, sm_scale=1.0)
# CTAs that begin in one request and go on in others.
LATER = replace(LONG, lengths=(70, 200, 150, 300), num_ctas=3)
# A CTA that begins with more pieces of one warp alone than it has warps.
SOLOS = replace(LONG, lengths=(60, 100, 20, 3, 9, 80, 33, 120, 64), num_ctas=1)
# Several slices a warp, each of 32 pages.
SMALL_PAGES = replace(LONG, lengths=(1500,), num_ctas=1, page_size=1, kv_dtype=FP8)
# Forty pairs in two pieces.
PAIRS = replace(LONG, lengths=(400,) * 40, num_ctas=80)
# Teams of warps: more than 8 query rows a KV head of D = 128.
TEAMS = replace(LONG, lengths=(1100, 5, 300), num_q_heads=16, q_len=2, kv_dtype=FP8, num_ctas=3)
# Teams of bf16, with slices of a CTA one after the other.
LONG_TEAMS = replace(TEAMS, num_q_heads=32, num_kv_heads=2, kv_dtype=BF16, lengths=(900, 300, 5), num_ctas=2)
# More pieces a CTA than its list and its queries have room for; most are one warp's alone.
MANY = replace(SMALL, lengths=(*(1 + 5 * i % 130 for i in range(60)), 200, 0, 270), head_dim=64, num_ctas=1)
# Whole pairs of several heads of a request, one behind the other in a CTA.
GROUPS = replace(SMALL, lengths=(300, 200, 0, 450), num_q_heads=16, num_kv_heads=8, kv_dtype=FP8, num_ctas=1)
GROUPS_OF_FOUR = replace(GROUPS, lengths=(400, 0, 400), num_ctas=4)
# The same behind a pair that is cut.
GROUPS_CUT = replace(GROUPS, lengths=(1100, 330, 140, 129), num_ctas=3)
# Long runs: of CTAs that ask for more than half of their ring before the wait.
RUNS = {
    "long runs": replace(LONG, lengths=(1300, 1100, 40, 700), num_ctas=2),
    "long runs, e4m3": replace(LONG, lengths=(2500, 3000, 70, 1111), kv_dtype=FP8, num_q_heads=4, q_len=2, num_ctas=3),
    "heads abreast, behind a cut pair": GROUPS_CUT,
}

# One (request, KV head), whose pieces are a cluster's.
ALONE = replace(LONG, lengths=(2100,), num_q_heads=5, kv_dtype=FP8, num_ctas=16)
# The same with what the kernel for one pair alone leaves out.
CLUSTER = replace(ALONE, sinks=True)
# One request with several KV heads, a cluster each.
HEADS = replace(CLUSTER, lengths=(700,), num_kv_heads=8, num_q_heads=16, num_ctas=64)
# The same in the other kernel.
ALONE_HEADS = replace(HEADS, lengths=(1503,), num_q_heads=32, q_len=2, page_size=32, sinks=False)

# Pairs in two pieces, each a cluster's; some beside others in one piece, in three and in none.
COUPLES = replace(ALONE, lengths=(512,) * 60, kv_dtype=BF16, num_q_heads=8, num_ctas=132)
COUPLES_MIXED = replace(
    COUPLES, lengths=(*(512,) * 7, 200, *(512,) * 18, 700, 0, *(512,) * 25, 690, 0, 704, 70), num_q_heads=2, q_len=3
)
# A run of as many tiles as the next one, whose last piece, taken first, is of a request with twice as many.
COUPLES_NONE = replace(COUPLES, lengths=(64, 1280, 512, 3520, 1024, 960, 1280, 1792), num_kv_heads=8)


@dataclass(frozen=True)
class Fault:
    """A mistake: a file of csrc/kernels, its text, the expression that takes its place, a problem that must show it.

    wrong: None leaves out the statement that `right` begins with.
    """

    file: str
    right: str
    wrong: str | None
    problem: Problem = SMALL


FAULTS = {
    "a tile is dropped": Fault(
        "decode_pieces.cuh", "request.first_tile + piece.tile_end", "request.first_tile + piece.tile_end - 1"),
    "another head's keys and values": Fault(
        "decode_feed.cuh", "static_cast<uint64_t>(kv_head_) * cache.head_stride + lane % Layout::kLanes",
        "lane % Layout::kLanes",
    ),
    "columns of V are exchanged": Fault(
        "decode_attend.cuh", "chunk * kPairs + 2 * w + half", "chunk * kPairs + 2 * w + 1 - half",
        replace(SMALL, kv_dtype=FP8),
    ),
    "the output is not rescaled": Fault(
        "decode_attend.cuh", "exp2_approx(reference - raised)", "1.0f", replace(LONG, num_ctas=1)),
    "partial results of one thread are not rescaled": Fault(
        "combine.cuh", "exp2_approx(w[i].x - m0)", "1.0f", replace(LONG, lengths=(1536,), num_ctas=24)),
    "partial results of two threads are not rescaled": Fault(
        "decode_merge.cuh", "exp2_approx(b_ml.x - m0)", "1.0f", replace(LONG, num_ctas=6)),
    "the next row tile's threads take the first one's": Fault(
        "combine_wide.cuh", "(kWide ? group - share : 0)", "0", replace(TEAMS, lengths=(600,), num_ctas=2)),
    "four vectors of a thread are one": Fault(
        "combine_wide.cuh", "j * step", "0", replace(TEAMS, lengths=(600,), num_ctas=2)),
    "all vectors go to one place": Fault(
        "combine_wide.cuh", "to.d += vectors / 2", None, replace(TEAMS, lengths=(600,), num_ctas=2)),
    "pieces of a second round are left out": Fault(
        "combine_wide.cuh", "base < job.pieces", "false", replace(TEAMS, lengths=(9000,), num_ctas=141)),
    "partial results of a wide unit are read before pdl_wait": Fault(
        "combine_wide.cuh", "pdl_wait();\n    waited = true;", None, TEAMS),
    "wide partial results are not rescaled": Fault(
        "combine_wide.cuh", "exp2_approx(w[i].x - m0)", "1.0f", replace(TEAMS, lengths=(600,), num_ctas=2)),
    "pairs are counted from the wrong one": Fault(
        "combine.cuh", "unit -= __shfl_sync(kAllLanes, end, 31)", None, PAIRS),
    "partial results are read before pdl_wait": Fault(
        "combine.cuh", "pdl_wait();\n    waited = true;", None, LONG),
    "the causal mask is off by one": Fault(
        "decode_attend.cuh", "position < end", "position <= end", replace(SMALL, q_len=2)),
    "the window is off by one": Fault(
        "decode_attend.cuh", "position >= end - p_.window", "position > end - p_.window", replace(SMALL, window=20)
    ),
    "copies are not waited for": Fault(
        "decode_attend.cuh", "cp_async_wait<kStages - 1>();\n    __syncwarp();\n    score", None
    ),
    "a team's values are not waited for": Fault(
        "decode_team.cuh", "if (early) cp_async_wait<kPending>();  // values", None, TEAMS),
    "a query's copy is not waited for": Fault("decode.cuh", "if (!loaded) mbarrier_wait(", None, TEAMS),
    "a team's first query is looked for where the others are": Fault("decode.cuh", "loaded_ = true", None, TEAMS),
    "lanes do not wait for each other's copies": Fault("decode_attend.cuh", "__syncwarp();\n    score", None),
    "warps do not wait for each other's results": Fault(
        "decode.cuh", "wait_for_all();\n      if constexpr", None
    ),
    "queries are overwritten before they are used": Fault(
        "decode.cuh", "index + 2 * kDecodeEpoch", "index + 3 * kDecodeEpoch", MANY
    ),
    "page ids of a block's first half for its second": Fault(
        "decode_feed.cuh", "(index_ << log_ids_) < 32", "true", SMALL_PAGES
    ),
    "a block ends without pdl_wait": Fault("decode.cuh", "if (waits) pdl_wait();", None, LONG),
    "the first query is read before pdl_wait": Fault("decode.cuh", "waits || (lists && waited)", "lists", SOLOS),
    "the last piece, taken first, for the first one": Fault(
        "decode_pieces.cuh", "state_.cursor.count += order.rest.count > 0", None, replace(LATER, window=190)),
    "the last piece, taken before the list, for the first one": Fault(
        "decode.cuh", "2 * cta + (order.rest.count > 0)", "2 * cta", LATER),
    "nothing follows the last piece": Fault(
        "decode_pieces.cuh", "if (added_.pieces == 1 && cursor.left == 0) cursor = state_.rest", None, LATER),
    "the list is asked for the first block again": Fault("decode_feed.cuh", "next_ = count_;\n", None, LATER),
    "a team's causal mask is off by one": Fault(
        "decode_team.cuh", "position < min(end, limit_)", "position <= min(end, limit_)", replace(TEAMS, num_ctas=1)),
    "a team does not wait for its probabilities": Fault(
        "decode_team.cuh", "named_barrier_any(1 + team_, kTeamThreads, above)", "above", TEAMS),
    "a slice is filled again before its team has read it": Fault(
        "decode_team.cuh", "named_barrier_sync(1 + team_, kTeamThreads);\n  }\n\n  // scores = K", None,
        replace(TEAMS, lengths=(1500,), num_ctas=1),
    ),
    "a warp's largest scores for the team's": Fault(
        "decode_team.cuh", "rows + w * kStep", "rows + part_ * kStep", TEAMS),
    "a team's slice goes past its piece": Fault(
        "decode_team.cuh", "position < min(end, limit_)", "position < end",
        replace(TEAMS, lengths=(1100,), num_ctas=6, sm_scale=0.05)),
    "a team's output is not rescaled": Fault(
        "decode_team.cuh", "exp2_approx(reference - raised)", "1.0f", replace(TEAMS, num_ctas=1)),
    "one warp's sums for the team's": Fault("decode_team.cuh", "pairs[i].y += more.y", None, TEAMS),
    "a team's columns are one": Fault("decode_team.cuh", "position += kThreads", None, TEAMS),
    "the first slice has tokens of this step": Fault(
        "decode_feed.cuh", "(all ? 0 : p_.q_len)", "0",
        replace(LONG, lengths=(576,), num_q_heads=1, q_len=8, num_ctas=9),
    ),
    "a first slice reaches into the next piece": Fault(
        "decode_feed.cuh", "kTileTokens * (run.tile + run.count)", "high",
        replace(LONG, lengths=(300, 250, 190), num_ctas=2)),
    "a short piece's first slice is asked for by all": Fault(
        "decode_feed.cuh", "run.tile == 0 && high <= Row::kSoloSlices * kTokens", "false", SOLOS),
    "the second slice is of the first one's page": Fault(
        "decode_feed.cuh", "__shfl_sync(kAllLanes, ids_[0], index_)", "__shfl_sync(kAllLanes, ids_[0], 0)", LONG
    ),
    "warps put their results in one place": Fault("decode.cuh", "place * (kOutTiles * kTilePitch)", "0", LONG),
    "heads abreast are written as one": Fault(
        "decode.cuh", "first_head + number", "first_head", GROUPS_OF_FOUR),
    "a head's results are those of other heads' warps": Fault(
        "decode.cuh", "number + (i << log_group)", "number + i", GROUPS_OF_FOUR),
    "a warp of a group that shares a head writes it alone": Fault(
        "decode.cuh", "piece_.log_group() == kLogWorkers", "piece_.log_group() > 0", GROUPS_OF_FOUR),
    "slices of a group are those of one head": Fault(
        "decode_pieces.cuh", "made.count << log_group", "made.count", GROUPS),
    "a head's slices come before its warps' last ones": Fault(
        "decode_pieces.cuh", "number_of(worker) < number() ? divided(count) : 0", "0", GROUPS),
    "warps of a head have unlike numbers of slices": Fault(
        "decode_pieces.cuh", "(count + workers - 1) & -workers", "count",
        replace(GROUPS, num_kv_heads=3, num_q_heads=6)),
    "a group goes past its CTA's run": Fault(
        "decode_pieces.cuh", "more * tiles > left", "false",
        replace(GROUPS, lengths=(640,), num_ctas=3)),
    "a group goes past its request": Fault(
        "decode_pieces.cuh", "p_.num_kv_heads - 1 - piece.kv_head", "7",
        replace(GROUPS, num_kv_heads=5, num_q_heads=10)),
    "a group goes past its epoch": Fault(
        "decode_pieces.cuh", "kDecodeEpoch - 1 - added_.pieces % kDecodeEpoch", "7",
        replace(GROUPS, lengths=(100, 300), num_kv_heads=5, num_q_heads=10)),
    "a group's first queries are waited for again": Fault(
        "decode.cuh", "1 << piece_.log_group()", "1", GROUPS),
    "a query's second elements are scaled by nothing": Fault(
        "decode_query.cuh", "0x00800080u", "0x00000080u", replace(SMALL, kv_dtype=FP8)),
    "pieces of a cluster are read before they are there": Fault(
        "decode_cluster.cuh", "if (pieces_ > 0) mbarrier_wait(barrier_, 0)", None, CLUSTER),
    "a cluster does not wait for all of its bytes": Fault(
        "decode_cluster.cuh", "pieces_ * (kVectors + 4) * 16", "(pieces_ - 1) * (kVectors + 4) * 16", CLUSTER),
    "a piece is pushed to a CTA that may not have begun": Fault(
        "decode.cuh", "cluster_.wait_for_others();", None, CLUSTER),
    "a cluster's pieces are not rescaled": Fault(
        "decode_cluster.cuh", "exp2_approx(ml[i].x - sum_ml.x)", "1.0f", CLUSTER),
    "pieces that a cluster has not": Fault("decode_cluster.cuh", "piece < pieces_", "true", CLUSTER),
    "one owner's vectors for all": Fault(
        "decode_cluster.cuh", "static_cast<int32_t>(cluster_rank()) * kVectors + vector", "vector", CLUSTER),
    "a request without tokens is left out": Fault(
        "decode_cluster.cuh", "pieces_ == 1", "pieces_ < 2", replace(CLUSTER, lengths=(0,))),
    "one head's cluster writes another's output": Fault(
        "decode_cluster.cuh", "own.pair", "0", HEADS),
    "a head's cluster runs another's pieces": Fault("decode_cluster.cuh", "split.first_cta + rank", "rank", HEADS),
    "clusters of whole heads run one": Fault(
        "decode_cluster.cuh", "kOne ? block : pair", "kOne ? block : 0", replace(HEADS, lengths=(100,))),
    "CTAs of a cluster beyond its pieces have some": Fault(
        "decode_cluster.cuh", "rank >= own.pieces", "false", replace(HEADS, lengths=(300,))),
    "a couple's second piece is added before it is there": Fault(
        "decode_cluster.cuh", "mbarrier_wait(barrier_, 0);\n    add_result", None, COUPLES),
    "a couple's second piece is left out": Fault("decode_cluster.cuh", "add_result(o, ml, lds", None, COUPLES),
    "couples are added once more": Fault(
        "combine.cuh", "is_couple(ctas[0], false, ctas[1].count, p.requests[split.request].num_tiles)", "false",
        COUPLES,
    ),
    "two CTAs of three are a couple": Fault(
        "decode_params.cuh", "run.count + other_count == num_tiles", "true", COUPLES_MIXED),
    "what is taken first makes a couple of its CTA": Fault(
        "decode.cuh", "order.rest.count == 0", "true", COUPLES_NONE),
    "a couple is any two CTAs'": Fault(
        "combine.cuh", "split.first_cta % 2 == 0", "true", COUPLES_MIXED),
    "alone: this step's tokens are read before pdl_wait": Fault(
        "decode_alone.cuh", "min(end_, length_ - p_.q_len)", "end_", ALONE),
    "alone: this step's values are left out": Fault(
        "decode_alone.cuh", "sts128(fresh_at, fresh_words)", None, replace(ALONE, lengths=(9,), sm_scale=0.05)),
    "alone: this step's keys are left out": Fault(
        "decode_alone.cuh", "warp_ == kDecodeWarps - 1 && old_ < end_", "false", replace(ALONE, lengths=(9,))),
    "alone: one page's values for all": Fault(
        "decode_alone.cuh", "ids[i * kRows / 8]", "ids[0]", replace(ALONE, page_size=32)),
    "alone: one page's keys for all": Fault(
        "decode_alone.cuh", "ids[2 * half + i]", "ids[0]", replace(ALONE, page_size=32)),
    "alone: one head's keys and values for all": Fault(
        "decode_alone.cuh", "static_cast<uint64_t>(kv_head_) * cache.head_stride", "0", ALONE_HEADS),
    "alone: one warp's values for all": Fault(
        "decode_alone.cuh", "values[2 * w + half]", "values[half]", ALONE),
    "alone: a row sees later tokens": Fault(
        "decode_alone.cuh", "token < begin_ || token >= row_ends[i & 1]", "token < begin_",
        replace(ALONE, lengths=(20,), num_q_heads=2, q_len=4)),
    "alone: each warp has a reference of its own": Fault(
        "decode_alone.cuh", "fmaxf(reference[0], __uint_as_float(m.x))", "reference[0]", ALONE),
    "alone: values are read before they have arrived": Fault(
        "decode_alone.cuh", "cp_async_wait<0>();", None, ALONE),
    "alone: a result is pushed to a CTA that may not have begun": Fault(
        "decode_alone.cuh", "cluster.wait_for_others();", None, ALONE),
    "this step's tokens are read before pdl_wait": Fault(
        "decode_feed.cuh", "first_token(where) + kOwn <= pieces_[where].high - p_.q_len", "true"
    ),
}  # fmt: skip


# Barriers that are missing: each shows as a race, whether or not a result is wrong.
RACES = {
    "a merge is read before it is there": Fault(
        "decode.cuh", "wait_for_all();\n      if constexpr", None,
        replace(SMALL, lengths=(1, 64, 700, 0, 130, 65), num_q_heads=32, kv_dtype=BF16, num_ctas=132)),
    "a merge overwrites one that is still read": Fault(
        "decode.cuh", "merged_ > 0", "false", replace(SMALL, head_dim=64, num_q_heads=32, q_len=2)),
    "a query's fragments are read before they are there": Fault(
        "decode.cuh", "wait_for_all();\n    } else {", None, TEAMS),
    "a team's copies and probabilities are not waited for": Fault(
        "decode_team.cuh", "named_barrier_any(1 + team_, kTeamThreads, above)", "above", LONG_TEAMS),
    "a team goes on before its slice has been read": Fault(
        "decode_team.cuh", "named_barrier_sync(1 + team_, kTeamThreads);\n  }\n\n  // scores = K", None, LONG_TEAMS),
    "largest scores are read before they are there": Fault(
        "decode_team.cuh", "named_barrier_sync(1 + team_, kTeamThreads);\n#pragma unroll", None, LONG_TEAMS),
    "probabilities made again are not waited for": Fault(
        "decode_team.cuh", "named_barrier_sync(1 + team_, kTeamThreads);\n    }\n", None, LONG_TEAMS),
    "keys are asked for before the old ones have been read": Fault(
        "decode_team.cuh", "__syncwarp();\n      ask_for_keys", None, LONG_TEAMS),
    "alone: largest scores are read before they are there": Fault(
        "decode_alone.cuh", "__syncthreads();\n#pragma unroll\n    for (int w", None, ALONE),
    "alone: weights are read before they are there": Fault(
        "decode_alone.cuh", "__syncthreads();\n    read_values", None, ALONE),
    "lanes of a team do not wait for each other's keys": Fault(
        "decode_team.cuh", "__syncwarp();\n    float factors", None, LONG_TEAMS),
}  # fmt: skip
