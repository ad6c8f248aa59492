// A warp's attention over slices: scores of keys, softmax, sums of values, everything in registers with m16n8k16, the
// cache as operand A (no padding of rows), query rows as the 8 columns.
//   S^T [16 tokens x 8 rows] = K [16 x D] Q^T, softmax, O^T [D x 8 rows] += V^T [D x 16] P^T.
// K comes in an order of k that its 16-byte chunks imply, with Q in the same order; V's bytes of neighbouring tokens
// are interleaved on the way; P^T is the transposed accumulator. e4m3 is converted to fp16 (exact); P is never
// quantised.
//
// Softmax in units of log2. Each warp keeps for each row a reference below the largest score it has seen: probabilities
// are 2^(score - reference), and the reference only moves when a score passes it by kHeadroom, so that the output is
// rarely rescaled. When it moves, it goes to the largest score less kShift; fp16 probabilities so reach from 2^-24 to
// 2^15.
#pragma once

#include "decode_feed.cuh"

namespace hpc::attention {

constexpr float kShift = 7.0f;
constexpr float kHeadroom = 15.0f;

// What a warp holds of the current piece, and what it does with a slice. Its owner sets query and range, and takes the
// sums.
template <KvKind kKind, int kDim, int kRowTiles, int kStages>
struct SliceAttention {
  static constexpr Half kType = kKind == KvKind::kBf16 ? Half::kBf16 : Half::kFp16;
  static constexpr bool kFp8 = kKind == KvKind::kE4m3;
  static constexpr bool kQueryInSmem = decode_query_in_smem(kDim, kRowTiles);
  static constexpr int kOutTiles = kDim / 16;  // m16 tiles of the output
  using Layout = SliceLayout<kKind, kDim, decode_slice_tokens(kKind, kDim, kRowTiles, kStages)>;
  static constexpr int kTokens = Layout::kTokens, kHalves = kTokens / 16;  // of a slice
  static constexpr int kValueWords = Layout::kValueChunkBytes / 4;
  // Chunks of a slice's values (16 registers) that are read before the softmax: as far as registers reach.
  static constexpr int kAhead = kRowTiles == 1 && kDim <= 128 ? kHalves : 0;
  static constexpr DecodeSmem kSmem = decode_smem(kKind, kDim, kRowTiles, kStages, false);
  using Ring = WarpRing<kStages, Layout::kSlotBytes>;

  // base: shared address of the CTA's memory; first_row: of the CTA's rows.
  __device__ __forceinline__ SliceAttention(const DecodeParams& p, uint32_t base, int32_t first_row, int32_t warp,
                                            int32_t lane)
      : p_(p),
        lane_(lane),
        g_(lane >> 2),
        t_(lane & 3),
        base_(base),
        scales_(base + kSmem.scales + warp * (kStages * kTokens * 4)) {
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int32_t row = first_row + kRowTile * (i >> 1) + 2 * t_ + (i & 1);
      row_tokens_ |= static_cast<uint32_t>(row_token(p, min(row, p.rows - 1))) << (4 * i);
    }
  }

  // Forgets the piece before; high: one past the last token that any row sees.
  __device__ __forceinline__ void begin(int32_t high, int32_t) {
    // Row j sees [end + j - window, end + j); nothing is masked in slices that every row sees whole.
    end_ = high - p_.q_len + 1;
    all_from_ = p_.window > 0 ? high - p_.window : 0;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      reference_[i] = kNoMax;
      sum_[i] = 0.0f;
    }
#pragma unroll
    for (int m = 0; m < kOutTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[m][n][i] = 0.0f;
      }
    }
  }

  // One slice: waits for it, scores its keys, adds its values. Every lane has read the slice when it returns.
  __device__ __forceinline__ void attend(int32_t token, const Ring& ring) {
    float scores[kHalves][kRowTiles][4];
    cp_async_wait<kStages - 1>();
    __syncwarp();
    score(ring, scores);
    uint32_t ahead[kAhead > 0 ? kAhead : 1][4][4];  // values that are read while the scores are made
#pragma unroll
    for (int i = 0; i < kAhead; ++i) read_values(ring, i / Layout::kValueChunks, i % Layout::kValueChunks, ahead[i]);
    float scales[kHalves][2];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      scales[half][0] = scales[half][1] = 1.0f;
      if (p_.per_token_scale) {
        const uint32_t at = scales_ + (ring.slot() * kTokens + 16 * half + g_) * 4;
        scales[half][0] = __uint_as_float(lds32(at)), scales[half][1] = __uint_as_float(lds32(at + 32));
      }
    }

#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const float2 factor = row_factors(n);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[half][n][i] *= ((i & 1) == 0 ? factor.x : factor.y) * scales[half][i >> 1];
      }
    }
    if (p_.softcap > 0.0f) cap(scores);
    if (token + kTokens > end_ || token < all_from_) mask(token, scores);

    bool above = false;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) above |= scores[half][n][i] - reference_[2 * n + (i & 1)] > kHeadroom;
      }
    }
    if (__any_sync(kAllLanes, above)) raise_references(scores);

    uint32_t p[kHalves][kRowTiles][2];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        float (&s)[4] = scores[half][n];
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = exp2_approx(s[i] - reference_[2 * n + (i & 1)]);
        sum_[2 * n] += s[0] + s[2];
        sum_[2 * n + 1] += s[1] + s[3];
        p[half][n][0] = transpose_8x8(pack_half2<kType>(s[0], s[1]));
        p[half][n][1] = transpose_8x8(pack_half2<kType>(s[2], s[3]));
      }
    }
#pragma unroll
    for (int i = 0; i < kHalves * Layout::kValueChunks; ++i) {
      const int half = i / Layout::kValueChunks, chunk = i % Layout::kValueChunks;
      if (i < kAhead) {
        add_values(chunk, ahead[i], p[half]);
      } else {
        uint32_t rows[4][4];
        read_values(ring, half, chunk, rows);
        add_values(chunk, rows, p[half]);
      }
    }
    __syncwarp();
  }

  // scores = K Q^T, in the layout of an accumulator: tokens g and g + 8 of each half, rows 2t and 2t + 1.
  __device__ __forceinline__ void score(const Ring& ring, float (&scores)[kHalves][kRowTiles][4]) {
    // Two chains of products where there is one row tile: a chain of dependent ones takes 33 cycles each.
    constexpr int kChains = kRowTiles == 1 ? 2 : 1;
    float sums[kChains][kHalves][kRowTiles][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < Layout::kKeyChunks; ++chunk) {
      uint32_t low[kHalves][4], high[kHalves][4];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const uint32_t at = ring.at() + half * 16 * Layout::kRowBytes + Layout::key_at(chunk, g_, t_);
        const uint4 x = lds128(at), y = lds128(at + 8 * Layout::kRowBytes);
        low[half][0] = x.x, low[half][1] = x.y, low[half][2] = x.z, low[half][3] = x.w;
        high[half][0] = y.x, high[half][1] = y.y, high[half][2] = y.z, high[half][3] = y.w;
      }
      constexpr int kSteps = kFp8 ? 4 : 2;  // k16 steps of a chunk
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int step = kSteps * chunk + i;
        uint32_t a[kHalves][4];
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          if constexpr (kFp8) {
            e4m3x4_to_half2x2(low[half][i], a[half][0], a[half][2]);
            e4m3x4_to_half2x2(high[half][i], a[half][1], a[half][3]);
          } else {
            a[half][0] = low[half][2 * i], a[half][2] = low[half][2 * i + 1];
            a[half][1] = high[half][2 * i], a[half][3] = high[half][2 * i + 1];
          }
        }
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          uint32_t b0, b1;
          key_partner(n, step, b0, b1);
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
            mma_m16n8k16<kType>(sums[step % kChains][half][n], a[half][0], a[half][1], a[half][2], a[half][3], b0, b1);
          }
        }
      }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[half][n][i] = sums[0][half][n][i];
          if (kChains == 2) scores[half][n][i] += sums[kChains - 1][half][n][i];
        }
      }
    }
  }

  // The query's fragment of a row tile for one k16 step.
  __device__ __forceinline__ void key_partner(int n, int step, uint32_t& b0, uint32_t& b1) {
    if constexpr (kQueryInSmem) {
      const uint2 v = lds64(base_ + kSmem.query + (n * (kDim / 32) + step / 2) * 512 + lane_ * 16 + (step & 1) * 8);
      b0 = v.x, b1 = v.y;
    } else {
      b0 = fragment_[n][2 * step];
      b1 = fragment_[n][2 * step + 1];
    }
  }

  // c * tanh(s / c), then log2 units.
  __device__ __forceinline__ void cap(float (&scores)[kHalves][kRowTiles][4]) {
    const float inverse = 1.0f / p_.softcap;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[half][n][i] = p_.softcap * kLog2e * tanhf(scores[half][n][i] * inverse);
        }
      }
    }
  }

  __device__ __forceinline__ void mask(int32_t token, float (&scores)[kHalves][kRowTiles][4]) {
    asm volatile("" : "+r"(row_tokens_));  // seldom needed: keeps the unpacked tokens out of the loop's registers
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t end = end_ + static_cast<int32_t>((row_tokens_ >> (4 * (2 * n + (i & 1)))) & 15u);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const int32_t position = token + 16 * half + g_ + 8 * (i >> 1);
          const bool seen = position < end && (p_.window == 0 || position >= end - p_.window);
          if (!seen) scores[half][n][i] = __uint_as_float(0xff800000u);
        }
      }
    }
  }

  // Moves every row's reference up to its largest score less kShift and rescales what was summed with the old one.
  __device__ __forceinline__ void raise_references(const float (&scores)[kHalves][kRowTiles][4]) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float largest = fmaxf(scores[0][n][i], scores[0][n][i + 2]);
        if (kHalves == 2) largest = fmaxf(largest, fmaxf(scores[kHalves - 1][n][i], scores[kHalves - 1][n][i + 2]));
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, mask));
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

  // A chunk of a half's values: of tokens 2t, 2t + 1, 2t + 8, 2t + 9.
  __device__ __forceinline__ void read_values(const Ring& ring, int half, int chunk, uint32_t (&rows)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t shared = ring.at() + Layout::kValuesAt + Layout::value_at(chunk, i & 1, g_, t_) +
                              (16 * half + (i >> 1) * 8) * Layout::kRowBytes;
      if constexpr (kValueWords == 4) {
        const uint4 v = lds128(shared);
        rows[i][0] = v.x, rows[i][1] = v.y, rows[i][2] = v.z, rows[i][3] = v.w;
      } else {
        const uint2 v = lds64(shared);
        rows[i][0] = v.x, rows[i][1] = v.y;
      }
    }
  }

  // out += V^T P^T. Tile m of a chunk's pair of elements (2u, 2u + 1): row g is element 2u, row g + 8 element 2u + 1.
  __device__ __forceinline__ void add_values(int chunk, const uint32_t (&rows)[4][4],
                                             const uint32_t (&p)[kRowTiles][2]) {
    constexpr int kPairs = Layout::kValueElements / 2;
#pragma unroll
    for (int w = 0; w < kValueWords; ++w) {
      if constexpr (kFp8) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t first =
              half == 0 ? interleave_bytes_low(rows[0][w], rows[1][w]) : interleave_bytes_high(rows[0][w], rows[1][w]);
          const uint32_t second =
              half == 0 ? interleave_bytes_low(rows[2][w], rows[3][w]) : interleave_bytes_high(rows[2][w], rows[3][w]);
          uint32_t a0, a1, a2, a3;
          e4m3x4_to_half2x2(first, a0, a1);
          e4m3x4_to_half2x2(second, a2, a3);
          add_tile(chunk * kPairs + 2 * w + half, a0, a1, a2, a3, p);
        }
      } else {
        add_tile(chunk * kPairs + w, interleave_halves_low(rows[0][w], rows[1][w]),
                 interleave_halves_high(rows[0][w], rows[1][w]), interleave_halves_low(rows[2][w], rows[3][w]),
                 interleave_halves_high(rows[2][w], rows[3][w]), p);
      }
    }
  }

  __device__ __forceinline__ void add_tile(int m, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                           const uint32_t (&p)[kRowTiles][2]) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) mma_m16n8k16<kType>(out_[m][n], a0, a1, a2, a3, p[n][0], p[n][1]);
  }

  // Sums of this warp's probabilities of rows 2t and 2t + 1.
  __device__ __forceinline__ void row_sums(int n, float& s0, float& s1) const {
    s0 = sum_[2 * n], s1 = sum_[2 * n + 1];
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
      s0 += __shfl_xor_sync(kAllLanes, s0, mask);
      s1 += __shfl_xor_sync(kAllLanes, s1, mask);
    }
  }

  __device__ __forceinline__ uint32_t factor_address(int32_t row) const {
    return base_ + kSmem.query + kRowTiles * (kDim / 32) * 512 + row * 4;
  }
  // A row tile's fragment into shared memory.
  __device__ __forceinline__ void store_fragment(int32_t row_tile, const uint32_t (&fragment)[kDim / 8]) {
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      sts128(base_ + kSmem.query + (row_tile * (kDim / 32) + i) * 512 + lane_ * 16,
             make_uint4(fragment[4 * i], fragment[4 * i + 1], fragment[4 * i + 2], fragment[4 * i + 3]));
    }
  }
  __device__ __forceinline__ void store_factor(int32_t row, float value) {
    sts32(factor_address(row), __float_as_uint(value));
  }
  // Factors of the scores of rows 2t and 2t + 1 of a row tile.
  __device__ __forceinline__ float2 row_factors(int n) const {
    if constexpr (kQueryInSmem) {
      const uint2 v = lds64(factor_address(kRowTile * n + 2 * t_));
      return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
    } else {
      return make_float2(factor_[2 * n], factor_[2 * n + 1]);
    }
  }

  const DecodeParams& p_;
  const int32_t lane_, g_, t_;
  const uint32_t base_, scales_;  // shared addresses
  uint32_t row_tokens_ = 0;       // token of the request of rows 2t and 2t + 1 of each row tile, 4 bits each

  uint32_t fragment_[kQueryInSmem ? 1 : kRowTiles][kDim / 8];
  float factor_[kQueryInSmem ? 1 : 2 * kRowTiles];  // of the scores of rows 2t and 2t + 1
  float reference_[2 * kRowTiles];                  // of the softmax, log2
  float sum_[2 * kRowTiles];                        // of this lane's probabilities
  float out_[kOutTiles][kRowTiles][4];
  int32_t end_;       // one past the last token that row 0 sees
  int32_t all_from_;  // first token that the last row sees
};

}  // namespace hpc::attention
