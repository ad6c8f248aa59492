// Arithmetic of the decode kernel where a KV head has many query rows: a slice belongs to a team of four warps (a
// warpgroup), so that the output is held once, and each element of the cache is converted once for all rows.
//
//   S^T [tokens x rows] = K [tokens x D] Q^T, each warp's own tokens, softmax; P^T goes through shared memory;
//   O^T [D x rows] += V^T [D x tokens] P^T, each warp's own quarter of D.
//
// The cache is operand A of wgmma, in registers; fragments and softmax are those of decode_attend.cuh, but a row's
// reference is the team's. P is made with the reference as it is; where a probability then passes 2^kHeadroom (fp16 may
// be infinite by then), the team raises its references and makes P again. Two barriers a slice: P and the copies of all
// four warps are there; P and V have been read.
#pragma once

#include "decode_attend.cuh"
#include "decode_merge.cuh"
#include "hpc/wgmma_half.cuh"

namespace hpc::attention {

template <KvKind kKind, int kDim, int kRowTiles, int kStages>
struct TeamAttention {
  static_assert(kDim == 128 && (kRowTiles == 2 || kRowTiles == 4));
  static constexpr Half kType = kKind == KvKind::kBf16 ? Half::kBf16 : Half::kFp16;
  static constexpr bool kFp8 = kKind == KvKind::kE4m3;
  static constexpr bool kQueryInSmem = decode_query_in_smem(kDim, kRowTiles);
  static constexpr int kOutTiles = kDim / 16 / kDecodeTeamWarps;  // of this warp
  using Layout = SliceLayout<kKind, kDim, decode_slice_tokens(kKind, kDim, kRowTiles, kStages)>;
  static constexpr int kTokens = Layout::kTokens, kOwn = kTokens / kDecodeTeamWarps;  // of a slice; of them this warp's
  static constexpr int kBlocks = kOwn / 16;                                           // of 16 tokens, of this warp
  static constexpr int kTeamThreads = 32 * kDecodeTeamWarps;
  static constexpr int kWorkers = decode_workers(kDim, kRowTiles);  // teams of a CTA
  static constexpr DecodeSmem kSmem = decode_smem(kKind, kDim, kRowTiles, kStages, false);
  using Ring = WarpRing<kStages, Layout::kSlotBytes>;
  static_assert(kQueryInSmem && kOutTiles == 2);

  __device__ __forceinline__ TeamAttention(const DecodeParams& p, uint32_t base, int32_t first_row, int32_t warp,
                                           int32_t lane)
      : p_(p),
        lane_(lane),
        g_(lane >> 2),
        t_(lane & 3),
        part_(warp % kDecodeTeamWarps),
        team_(warp / kDecodeTeamWarps),
        base_(base + lane_zero()),
        scales_(base + kSmem.scales + warp * (kStages * kOwn * 4)),
        first_row_(first_row) {}

  // Forgets the piece before; high: one past the last token that any row sees; limit: one past the piece's last.
  __device__ __forceinline__ void begin(int32_t high, int32_t limit) {
    end_ = high - p_.q_len + 1;
    limit_ = limit;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) reference_[i] = kNoMax, sum_[i] = 0.0f;
#pragma unroll
    for (int m = 0; m < kOutTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[m][n][i] = 0.0f;
      }
    }
  }

  // First token that the last row sees.
  __device__ __forceinline__ int32_t seen_by_all() const { return p_.window > 0 ? end_ + p_.q_len - 1 - p_.window : 0; }

  // One slice: the whole team together. The slice has been read by all of it when it returns. Where keys are `early`,
  // ask_for_keys() is called as soon as this warp's have been read.
  template <typename AskForKeys>
  __device__ __forceinline__ void attend(int32_t token, const Ring& ring, bool early, const AskForKeys& ask_for_keys) {
    // Groups of copies: where keys are early keys, values, keys, ..., else slices.
    constexpr int kPending = 2 * kStages - 1;
    float scores[kBlocks][kRowTiles][4];
    if (early) {
      cp_async_wait<kPending>();
    } else {
      cp_async_wait<kStages - 1>();
    }
    __syncwarp();
    float factors[kRowTiles][2];  // of the scores, as long as these are not multiplied by them
    const auto read_factors = [&] {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        const float2 factor = row_factors(n);
        factors[n][0] = factor.x, factors[n][1] = factor.y;
      }
    };
    if (kFp8) read_factors();  // (bf16 has no registers for them so early)
    score(ring, scores, early, ask_for_keys);
    if (!kFp8) read_factors();
    const bool masked = token + kTokens > min(end_, limit_) || token < seen_by_all();
    if (masked || p_.softcap > 0.0f || p_.per_token_scale) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[b][n][i] *= factors[n][i & 1];
        }
        factors[n][0] = factors[n][1] = 1.0f;
      }
      if (p_.per_token_scale) {
        if (early) cp_async_wait<kPending>();  // scales come with values
        __syncwarp();
        scale_tokens(ring, scores);
      }
      if (p_.softcap > 0.0f) cap(scores);
      if (masked) mask(token + kOwn * part_, scores);
    }

    float sums[2 * kRowTiles];
    const bool above = weigh(scores, factors, sums);
    if (early) cp_async_wait<kPending>();  // values
    if (named_barrier_any(1 + team_, kTeamThreads, above)) {
      raise_references(scores, factors);
      weigh(scores, factors, sums);
      named_barrier_sync(1 + team_, kTeamThreads);
    }
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) sum_[i] += sums[i];
    add_values(ring);
    named_barrier_sync(1 + team_, kTeamThreads);
  }

  // scores = K Q^T of this warp's tokens, in the layout of accumulators: tokens g and g + 8 of each block, rows 2t and
  // 2t + 1.
  template <typename AskForKeys>
  __device__ __forceinline__ void score(const Ring& ring, float (&scores)[kBlocks][kRowTiles][4], bool early,
                                        const AskForKeys& ask_for_keys) {
    constexpr int kSteps = kFp8 ? 4 : 2;  // k16 steps of a chunk
    uint32_t a[2][kSteps][4];             // of this chunk and of the one before
    uint4 next[2];                        // keys of the chunk behind this one, of tokens g and g + 8
    const auto read = [&](int i) {
      const int b = i / Layout::kKeyChunks, chunk = i % Layout::kKeyChunks;
      const uint32_t at = ring.at() + (part_ * kOwn + 16 * b) * Layout::kRowBytes + Layout::key_at(chunk, g_, t_);
      next[0] = lds128(at), next[1] = lds128(at + 8 * Layout::kRowBytes);
    };
    read(0);
#pragma unroll
    for (int i = 0; i < kBlocks * Layout::kKeyChunks; ++i) {
      const int b = i / Layout::kKeyChunks, chunk = i % Layout::kKeyChunks;
      const uint4 x = next[0], y = next[1];
      if (i + 1 < kBlocks * Layout::kKeyChunks) read(i + 1);
      const uint32_t low[4] = {x.x, x.y, x.z, x.w}, high[4] = {y.x, y.y, y.z, y.w};
      if (i > 1) wgmma_wait<1>();  // so that registers can be used again
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        uint32_t (&to)[4] = a[i & 1][j];
        if constexpr (kFp8) {
          e4m3x4_to_half2x2(low[j], to[0], to[2]);
          e4m3x4_to_half2x2(high[j], to[1], to[3]);
        } else {
          to[0] = low[2 * j], to[2] = low[2 * j + 1];
          to[1] = high[2 * j], to[3] = high[2 * j + 1];
        }
      }
      const WgmmaBlocks query(warp_uniform(base_ + kSmem.query), kRowsOfK, 128);
      wgmma_arrive();
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const int step = kSteps * chunk + j;
        wgmma_half<kType, true>(scores[b], a[i & 1][j], query.at(step * 2 * kRowsOfK), step > 0);
      }
      wgmma_commit();
    }
    if (early) {
      __syncwarp();
      ask_for_keys();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) wgmma_registers(scores[b]);
  }

  // This warp's part of P^T into shared memory, and its sums. Returns whether a probability is too large.
  __device__ __forceinline__ bool weigh(const float (&scores)[kBlocks][kRowTiles][4],
                                        const float (&factors)[kRowTiles][2], float (&sums)[2 * kRowTiles]) {
    uint32_t largest = 0;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        float s[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[i] = exp2_approx(__fmaf_rn(scores[b][n][i], factors[n][i & 1], -reference_[2 * n + (i & 1)]));
        }
        sums[2 * n] = (b == 0 ? 0.0f : sums[2 * n]) + (s[0] + s[2]);
        sums[2 * n + 1] = (b == 0 ? 0.0f : sums[2 * n + 1]) + (s[1] + s[3]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t pair = pack_half2<kType>(s[2 * i], s[2 * i + 1]);
          largest = __vmaxu2(largest, pair);                   // as numbers, for none is negative
          const int32_t of_k = (part_ * kBlocks + b) * 2 + i;  // which 8 tokens
          sts32(weights() + of_k * kRowsOfK + n * 128 + lane_ * 4, pair);
        }
      }
    }
    fence_proxy_async();
    constexpr uint32_t kMost = kKind == KvKind::kBf16 ? 0x4700u : 0x7800u;  // 2^kHeadroom
    return max(largest & 0xffffu, largest >> 16) > kMost;
  }

  __device__ __forceinline__ void scale_tokens(const Ring& ring, float (&scores)[kBlocks][kRowTiles][4]) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint32_t at = scales_ + (ring.slot() * kOwn + 16 * b + g_) * 4;
      const float scales[2] = {__uint_as_float(lds32(at)), __uint_as_float(lds32(at + 32))};
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[b][n][i] *= scales[i >> 1];
      }
    }
  }

  // c * tanh(s / c), then log2 units.
  __device__ __forceinline__ void cap(float (&scores)[kBlocks][kRowTiles][4]) {
    const float inverse = 1.0f / p_.softcap;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[b][n][i] = p_.softcap * kLog2e * tanhf(scores[b][n][i] * inverse);
      }
    }
  }

  __device__ __forceinline__ void mask(int32_t token, float (&scores)[kBlocks][kRowTiles][4]) {
    int32_t first_row = first_row_;
    asm volatile("" : "+r"(first_row));  // seldom needed: keeps what follows from it out of the loop's registers
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t row = first_row + kRowTile * n + 2 * t_ + (i & 1);
        const int32_t end = end_ + row_token(p_, min(row, p_.rows - 1));
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const int32_t position = token + 16 * b + g_ + 8 * (i >> 1);
          const bool seen = position < min(end, limit_) && (p_.window == 0 || position >= end - p_.window);
          if (!seen) scores[b][n][i] = __uint_as_float(0xff800000u);
        }
      }
    }
  }

  // Moves every row's reference up to the team's largest score less kShift and rescales what was summed with the old
  // one. All four warps have made P when this begins.
  __device__ __forceinline__ void raise_references(const float (&scores)[kBlocks][kRowTiles][4],
                                                   const float (&factors)[kRowTiles][2]) {
    const uint32_t rows = base_ + kSmem.largest + team_ * (kDecodeTeamWarps * kRowTiles * kRowTile * 4) + 8 * t_;
    constexpr int kStep = kRowTiles * kRowTile * 4;  // bytes of a warp's
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float largest = kNoMax;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          largest = fmaxf(largest, fmaxf(scores[b][n][i] * factors[n][i], scores[b][n][i + 2] * factors[n][i]));
        }
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, mask));
        if (g_ == 0) sts32(rows + part_ * kStep + n * 32 + i * 4, __float_as_uint(largest));
      }
    }
    named_barrier_sync(1 + team_, kTeamThreads);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float largest = kNoMax;
#pragma unroll
        for (int w = 0; w < kDecodeTeamWarps; ++w) {
          largest = fmaxf(largest, __uint_as_float(lds32(rows + w * kStep + n * 32 + i * 4)));
        }
        float& reference = reference_[2 * n + i];
        const float raised = fmaxf(reference, largest - kShift);
        const float factor = exp2_approx(reference - raised);
        reference = raised;
        sum_[2 * n + i] *= factor;
#pragma unroll
        for (int m = 0; m < kOutTiles; ++m) {
          out_[m][n][i] *= factor;
          out_[m][n][i + 2] *= factor;
        }
      }
    }
  }

  // out += V^T P^T. Of its quarter of a token's values lane (g, t) takes elements 4g .. 4g + 3: the first two are rows
  // g and g + 8 of tile 0, the others those of tile 1.
  __device__ __forceinline__ void add_values(const Ring& ring) {
    constexpr int kBytes = 4 * Layout::kElementBytes;  // of a lane
    const uint32_t inside = part_ * (kDim / 4 * Layout::kElementBytes) + g_ * kBytes;
    const uint32_t values = ring.at() + Layout::kValuesAt + 2 * t_ * Layout::kRowBytes + (inside ^ (32 * t_));
    const WgmmaBlocks probabilities(warp_uniform(weights()), kRowsOfK, 128);
    constexpr int kSteps = 2;             // k16 steps that are converted before their products
    uint32_t a[2][kSteps][kOutTiles][4];  // of these and of the ones before
#pragma unroll
    for (int m = 0; m < kOutTiles; ++m) wgmma_registers(out_[m]);
    uint2 next[kSteps][4];  // of the steps behind these, of tokens 2t, 2t + 1, 2t + 8, 2t + 9
    const auto read = [&](int i) {
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint32_t at = values + (16 * (kSteps * i + j) + (k >> 1) * 8 + (k & 1)) * Layout::kRowBytes;
          if constexpr (kFp8) {
            next[j][k] = uint2{lds32(at), 0};
          } else {
            next[j][k] = lds64(at);
          }
        }
      }
    };
    read(0);
#pragma unroll
    for (int i = 0; i < kTokens / 16 / kSteps; ++i) {
      uint2 rows[kSteps][4];
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) rows[j][k] = next[j][k];
      }
      if (i + 1 < kTokens / 16 / kSteps) read(i + 1);
      if (i > 1) wgmma_wait<1>();  // so that registers can be used again
#pragma unroll
      for (int j = 0; j < kSteps; ++j) make_fragments(rows[j], a[i & 1][j]);
      wgmma_arrive();
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
#pragma unroll
        for (int m = 0; m < kOutTiles; ++m) {
          wgmma_half<kType, false>(out_[m], a[i & 1][j][m], probabilities.at((kSteps * i + j) * 2 * kRowsOfK), true);
        }
      }
      wgmma_commit();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < kOutTiles; ++m) wgmma_registers(out_[m]);
  }

  // A fragments of both tiles from four tokens' elements.
  static __device__ __forceinline__ void make_fragments(const uint2 (&rows)[4], uint32_t (&a)[kOutTiles][4]) {
    if constexpr (kFp8) {
      e4m3x4_to_half2x2(interleave_bytes_low(rows[0].x, rows[1].x), a[0][0], a[0][1]);
      e4m3x4_to_half2x2(interleave_bytes_low(rows[2].x, rows[3].x), a[0][2], a[0][3]);
      e4m3x4_to_half2x2(interleave_bytes_high(rows[0].x, rows[1].x), a[1][0], a[1][1]);
      e4m3x4_to_half2x2(interleave_bytes_high(rows[2].x, rows[3].x), a[1][2], a[1][3]);
    } else {
#pragma unroll
      for (int m = 0; m < kOutTiles; ++m) {
        const uint32_t r0 = m == 0 ? rows[0].x : rows[0].y, r1 = m == 0 ? rows[1].x : rows[1].y;
        const uint32_t r2 = m == 0 ? rows[2].x : rows[2].y, r3 = m == 0 ? rows[3].x : rows[3].y;
        a[m][0] = interleave_halves_low(r0, r1), a[m][1] = interleave_halves_high(r0, r1);
        a[m][2] = interleave_halves_low(r2, r3), a[m][3] = interleave_halves_high(r2, r3);
      }
    }
  }

  // Sums of this warp's probabilities of rows 2t and 2t + 1: of its own tokens.
  __device__ __forceinline__ void row_sums(int n, float& s0, float& s1) const {
    s0 = sum_[2 * n], s1 = sum_[2 * n + 1];
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
      s0 += __shfl_xor_sync(kAllLanes, s0, mask);
      s1 += __shfl_xor_sync(kAllLanes, s1, mask);
    }
  }

  // Adds the teams' results of all row tiles and writes them. A thread's vectors are columns of one row tile, which
  // have their (max, sum) in common.
  template <int kTilePitch>
  __device__ __forceinline__ void add_columns(int32_t first_tile, int32_t tiles, int32_t slot, int32_t request,
                                              int32_t kv_head) {
    constexpr int kShare = kDecodeTeamWarps;
    constexpr int kWorkerBytes = kDim / 16 * kTilePitch;                                  // of a row tile
    constexpr int kThreads = kDecodeThreads / kRowTiles, kColumns = 2 * kDim / kThreads;  // of a row tile, of a thread
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const int32_t buffer = thread / kThreads, row_tile = first_tile + buffer;
    if (buffer >= tiles) return;
    int32_t position = thread % kThreads;
    const uint32_t all_pairs = base_ + kSmem.pairs + buffer * (kDecodeWarps * 64) + (position & 3) * 16;
    // All are asked for at once, of the vectors the first.
    float4 pairs[kWorkers], outputs[kWorkers];
#pragma unroll
    for (int i = 0; i < kWorkers; ++i) {
      pairs[i] = lds_float4(all_pairs + i * (kShare * 64));
#pragma unroll
      for (int w = 1; w < kShare; ++w) {  // a team's warps have the same reference
        const float4 more = lds_float4(all_pairs + (i * kShare + w) * 64);
        pairs[i].y += more.y, pairs[i].w += more.w;
      }
      outputs[i] = lds_float4(merged_at<kTilePitch>(buffer, position) + i * kWorkerBytes);
    }
    float4 ml = make_float4(kNoMax, 0.0f, kNoMax, 0.0f);
#pragma unroll
    for (int i = 0; i < kWorkers; ++i) ml.x = fmaxf(ml.x, pairs[i].x), ml.z = fmaxf(ml.z, pairs[i].z);
    float factors[kWorkers][2];
#pragma unroll
    for (int i = 0; i < kWorkers; ++i) {
      factors[i][0] = exp2_approx(pairs[i].x - ml.x), factors[i][1] = exp2_approx(pairs[i].z - ml.z);
      ml.y += pairs[i].y * factors[i][0], ml.w += pairs[i].w * factors[i][1];
    }
    const bool stores = row_tile * kRowTile + 2 * (position & 3) < p_.rows;
    const int64_t at = static_cast<int64_t>(slot) * p_.row_tiles + row_tile;
    if (slot >= 0 && stores && position < 4) p_.partial_ml[at * 4 + position] = ml;
#pragma unroll 1
    for (int j = 0;;) {
      float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < kWorkers; ++i) {
        o.x += outputs[i].x * factors[i][0], o.y += outputs[i].y * factors[i][1];
        o.z += outputs[i].z * factors[i][0], o.w += outputs[i].w * factors[i][1];
      }
      if (slot < 0) {
        const ResultPlace to = result_place(p_, request, kv_head, row_tile, position);
        store_result(p_, to, kv_head, o, ml);
      } else if (stores) {
        p_.partial[at * (2 * kDim) + position] = o;
      }
      if (++j == kColumns) break;
      position += kThreads;
#pragma unroll
      for (int i = 0; i < kWorkers; ++i) {
        outputs[i] = lds_float4(merged_at<kTilePitch>(buffer, position) + i * kWorkerBytes);
      }
    }
  }
  // Where vector `position` of the first worker lies in a merge buffer.
  template <int kTilePitch>
  __device__ __forceinline__ uint32_t merged_at(int32_t buffer, int32_t position) const {
    constexpr int kMergeBytes = kWorkers * (kDim / 16) * kTilePitch;  // of a row tile
    const int32_t d = 2 * (position >> 2), tile = d / 32 * 2 + d % 4 / 2;
    return base_ + kSmem.merge + buffer * kMergeBytes + tile * kTilePitch + (4 * (d / 4 % 8) + (position & 3)) * 16;
  }

  static constexpr uint32_t kRowsOfK = kRowTiles * 128;  // bytes of 8 of k, all rows: of the query and of P^T

  __device__ __forceinline__ uint32_t weights() const {
    return base_ + kSmem.weights + team_ * (kTokens / 8 * kRowsOfK);
  }
  // A row tile's fragment into shared memory, as blocks.
  __device__ __forceinline__ void store_fragment(int32_t row_tile, const uint32_t (&fragment)[kDim / 8]) {
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      sts32(base_ + kSmem.query + i * kRowsOfK + row_tile * 128 + lane_ * 4, fragment[i]);
    }
    fence_proxy_async();
  }
  __device__ __forceinline__ uint32_t factor_address(int32_t row) const {
    return base_ + kSmem.query + kRowTiles * (kDim / 32) * 512 + row * 4;
  }
  __device__ __forceinline__ void store_factor(int32_t row, float value) {
    sts32(factor_address(row), __float_as_uint(value));
  }
  // Factors of the scores of rows 2t and 2t + 1 of a row tile.
  __device__ __forceinline__ float2 row_factors(int n) const {
    const uint2 v = lds64(factor_address(kRowTile * n + 2 * t_));
    return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
  }

  const DecodeParams& p_;
  const int32_t lane_, g_, t_;
  const int32_t part_, team_;     // this warp of its team, and the team
  const uint32_t base_, scales_;  // shared addresses
  const int32_t first_row_;       // of the CTA's rows

  uint32_t fragment_[1][kDim / 8];      // not used: the query lies in shared memory
  float factor_[1];                     // likewise
  float reference_[2 * kRowTiles];      // of the softmax, log2; the team's
  float sum_[2 * kRowTiles];            // of this lane's probabilities
  float out_[kOutTiles][kRowTiles][4];  // of all the team's tokens
  int32_t end_;                         // one past the last token that row 0 sees
  int32_t limit_;                       // one past the piece's last token
};

}  // namespace hpc::attention
