// Decode attention over a paged cache.
//
// Grid: one CTA a row of the plan's `ctas` and row group (row groups of one run side by side, so that the second reads
// the cache from L2). A CTA attends over its pieces one after the other; its 8 warps share the 16-token slices of a
// piece.
//
// Warp: everything in registers with m16n8k16, the cache as operand A (no padding of rows), query rows as the 8
// columns.
//   S^T [16 tokens x 8 rows] = K [16 x D] Q^T, softmax, O^T [D x 8 rows] += V^T [D x 16] P^T.
// K comes in an order of k that its 16-byte chunks imply, with Q in the same order; V's bytes of neighbouring tokens
// are interleaved on the way; P^T is the transposed accumulator. e4m3 is converted to fp16 (exact); P is never
// quantised.
//
// Softmax in units of log2. Each warp keeps for each row a reference below the largest score it has seen: probabilities
// are 2^(score - reference), and the reference only moves when a score passes it by kHeadroom, so that the output is
// rarely rescaled. When it moves, it goes to the largest score less kShift; fp16 probabilities so reach from 2^-24 to
// 2^15.
//
// Memory: each warp's own ring in shared memory (decode_feed.cuh), kept full across pieces. No barrier inside a piece.
// At a piece's end the warps' results go through shared memory, are added in the order of their slices, and become the
// output (whole pieces) or a partial result for combine.cuh.
//
// Shared memory (decode_smem): warps' places in their walk | rings | merge buffer (one row tile of each warp) | (max,
// sum) | query and row factors (many rows) | key scales (per-token scales).
//
// Programmatic launch: the plan, page ids and slices without this step's tokens are read before the wait; the query,
// the scales and everything else after it; nothing is written before it.
#pragma once

#include "decode_feed.cuh"
#include "decode_merge.cuh"
#include "hpc/pdl.cuh"

namespace hpc::attention {

constexpr float kShift = 7.0f;
constexpr float kHeadroom = 15.0f;

template <KvKind kKind, int kDim, int kRowTiles, int kStages>
class DecodeWorker {
 public:
  static constexpr Half kType = kKind == KvKind::kBf16 ? Half::kBf16 : Half::kFp16;
  static constexpr bool kFp8 = kKind == KvKind::kE4m3;
  static constexpr bool kQueryInSmem = decode_query_in_smem(kDim, kRowTiles);
  static constexpr int kOutTiles = kDim / 16;  // m16 tiles of the output
  static constexpr int kTilePitch = 36 * 16;   // bytes of a merged m16 tile, padded against bank conflicts
  static constexpr DecodeSmem kSmem = decode_smem(kKind, kDim, kRowTiles, kStages, false);
  using Layout = SliceLayout<kKind, kDim>;
  using Feed = attention::Feed<kKind, kDim, kStages>;
  using Ring = typename Feed::Ring;

  __device__ __forceinline__ DecodeWorker(const DecodeParams& p, char* smem)
      : p_(p),
        warp_(static_cast<int32_t>(threadIdx.x) / 32),
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        state_(*reinterpret_cast<WarpState*>(smem + threadIdx.x / 32 * kDecodeStateBytes)),
        g_(lane_ >> 2),
        t_(lane_ & 3),
        group_(static_cast<int32_t>(blockIdx.x) % p.row_groups),
        first_row_(group_ * kRowTile * kRowTiles),
        base_(shared_address(smem)),
        scales_(base_ + kSmem.scales + warp_ * (kStages * kSliceTokens * 4)) {
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int32_t row = first_row_ + kRowTile * (i >> 1) + 2 * t_ + (i & 1);
      row_tokens_ |= static_cast<uint32_t>(min(row, p.rows - 1) / p.group) << (4 * i);
    }
  }

  __device__ __forceinline__ void run() {
    // A plan that the kernel just before may have written is not touched before the wait.
    bool waited = !p_.early;
    if (waited) start();
    const int32_t cta = static_cast<int32_t>(blockIdx.x) / p_.row_groups;
    const DecodeCursor cursor = decode_cursor(cta, p_.ctas[cta]);
    if (lane_ == 0) {
      state_.feed = state_.read = cursor;
      state_.span = {};
    }
    __syncwarp();
    Ring ring(base_ + kSmem.rings + warp_ * Ring::kBytes);
    Feed feed(p_, state_, warp_, lane_, scales_);
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) {
      if (!waited && !feed.is_old()) {
        start();
        waited = true;
      }
      feed.push_keys(ring);
      feed.push_values(ring);
      ring.advance();
    }
    if (!waited) start();

    peek(cursor);
    while (next()) {
      const int32_t end = state_.span.end();
      for (int32_t slice = state_.span.first(warp_); slice < end; slice += kDecodeWarps) {
        attend(slice * kSliceTokens, ring, feed);
        ring.advance();
      }
      merge();
    }
    if (warp_ == 0) touch_plan(cta);
  }

 private:
  __device__ __forceinline__ void start() {
    pdl_wait();
    pdl_trigger();
  }

  // The next layer's call begins with the same rows of the same plan and page table. The caches' flood may have driven
  // them from L2: brings them back while nothing waits for them.
  __device__ __forceinline__ void touch_plan(int32_t cta) {
    const DecodeCta run = p_.ctas[cta];
    if (run.count == 0 || p_.capacity == 0) return;
    const DecodeRequest& request = p_.requests[run.request];
    const int32_t token = min((request.first_tile + run.tile) * kTileTokens, p_.capacity - 1);
    const void* lines[4] = {p_.ctas + cta, &request, p_.header,
                            p_.page_table + run.request * p_.page_table_stride + (token >> p_.page_shift)};
    if (lane_ < 4) prefetch_l2(lane_ == 0 ? lines[0] : (lane_ == 1 ? lines[1] : (lane_ == 2 ? lines[2] : lines[3])));
  }

  // Goes to the CTA's next piece: loads the query rows and the factors of their scores, and forgets the piece before.
  __device__ __forceinline__ bool next() {
    DecodeCursor cursor = state_.read;
    DecodePiece piece;
    if (!next_piece(cursor, plan_fields(p_), p_.requests, &piece)) return false;
    const DecodeRequest& request = p_.requests[piece.request];
    const TokenRange range = visible_tokens(request, p_);
    const SliceSpan span = slice_span(piece, request.first_tile, range, state_.span.turn + state_.span.count);
    __syncwarp();
    if (lane_ == 0) {
      state_.read = cursor;
      state_.piece = piece;
      state_.span = span;
    }
    __syncwarp();
    load_rows(piece);
    peek(cursor);
    // Row j sees [end + j - window, end + j); nothing is masked in slices that every row sees whole.
    end_ = range.high - p_.q_len + 1;
    all_from_ = p_.window > 0 ? range.high - p_.window : 0;
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
    return true;
  }

  // Asks for the query rows of the piece that `cursor` comes to next, where registers hold them until then.
  __device__ __forceinline__ void peek(DecodeCursor cursor) {
    if constexpr (!kQueryInSmem) {
      DecodePiece piece;
      if (!next_piece(cursor, plan_fields(p_), p_.requests, &piece)) return;
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        load_query<kKind, kDim>(p_, piece.request, piece.kv_head, first_row_ + kRowTile * n + g_, t_, ahead_[n]);
      }
    }
  }

  __device__ __forceinline__ void load_rows(const DecodePiece& piece) {
    float scale = p_.scale;
    if (p_.k_scale != nullptr && !p_.per_token_scale) scale *= p_.k_scale[piece.kv_head * p_.k_scale_head_stride];
    if constexpr (kQueryInSmem) {
      // One warp a row tile. The barrier of the merge before is behind every warp's last reading.
      if (warp_ < kRowTiles) {
        uint32_t fragment[kDim / 8];
        float factor;
        QueryRow<kDim> query;
        load_query<kKind, kDim>(p_, piece.request, piece.kv_head, first_row_ + kRowTile * warp_ + g_, t_, query);
        query_fragment<kKind, kDim>(p_, query, fragment, factor);
#pragma unroll
        for (int i = 0; i < kDim / 32; ++i) {
          sts128(base_ + kSmem.query + (warp_ * (kDim / 32) + i) * 512 + lane_ * 16,
                 make_uint4(fragment[4 * i], fragment[4 * i + 1], fragment[4 * i + 2], fragment[4 * i + 3]));
        }
        if (t_ == 0) store_factor(kRowTile * warp_ + g_, factor * scale);
      }
      __syncthreads();
    } else {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        float factor;
        query_fragment<kKind, kDim>(p_, ahead_[n], fragment_[n], factor);
        // Lane (g, t) holds row g; scores of rows 2t and 2t + 1 lie in lane (g, t).
        factor_[2 * n] = scale * __shfl_sync(kAllLanes, factor, 8 * t_);
        factor_[2 * n + 1] = scale * __shfl_sync(kAllLanes, factor, 8 * t_ + 4);
      }
    }
  }

  // One slice of 16 tokens: waits for its keys, scores them, waits for its values, adds them; refills what it has read.
  __device__ __forceinline__ void attend(int32_t token, const Ring& ring, Feed& feed) {
    float scores[kRowTiles][4];
    cp_async_wait<2 * kStages - 1>();
    __syncwarp();
    score(ring, scores);
    float scales[2] = {1.0f, 1.0f};
    if (p_.per_token_scale) {
      const uint32_t at = scales_ + (ring.slot() * kSliceTokens + g_) * 4;
      scales[0] = __uint_as_float(lds32(at)), scales[1] = __uint_as_float(lds32(at + 32));
    }
    __syncwarp();
    feed.push_keys(ring);

#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const float2 factor = row_factors(n);
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] *= ((i & 1) == 0 ? factor.x : factor.y) * scales[i >> 1];
    }
    if (p_.softcap > 0.0f) cap(scores);
    if (token + kSliceTokens > end_ || token < all_from_) mask(token, scores);

    bool above = false;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) above |= scores[n][i] - reference_[2 * n + (i & 1)] > kHeadroom;
    }
    if (__any_sync(kAllLanes, above)) raise_references(scores);

    uint32_t p[kRowTiles][2];
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = exp2_approx(scores[n][i] - reference_[2 * n + (i & 1)]);
      sum_[2 * n] += scores[n][0] + scores[n][2];
      sum_[2 * n + 1] += scores[n][1] + scores[n][3];
      p[n][0] = transpose_8x8(pack_half2<kType>(scores[n][0], scores[n][1]));
      p[n][1] = transpose_8x8(pack_half2<kType>(scores[n][2], scores[n][3]));
    }
    cp_async_wait<2 * kStages - 1>();
    __syncwarp();
    add_values(ring, p);
    __syncwarp();
    feed.push_values(ring);
  }

  // scores = K Q^T, in the layout of an accumulator: tokens g and g + 8, rows 2t and 2t + 1.
  __device__ __forceinline__ void score(const Ring& ring, float (&scores)[kRowTiles][4]) {
    // Two chains of products where there is one row tile: a chain of dependent ones takes 33 cycles each.
    constexpr int kChains = kRowTiles == 1 ? 2 : 1;
    float sums[kChains][kRowTiles][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < Layout::kKeyChunks; ++chunk) {
      const uint32_t at = ring.at() + Layout::key_at(chunk, g_, t_);
      const uint4 x = lds128(at), y = lds128(at + 8 * Layout::kRowBytes);
      const uint32_t low[4] = {x.x, x.y, x.z, x.w}, high[4] = {y.x, y.y, y.z, y.w};
      constexpr int kSteps = kFp8 ? 4 : 2;  // k16 steps of a chunk
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t a0, a1, a2, a3;
        if constexpr (kFp8) {
          e4m3x4_to_half2x2(low[i], a0, a2);
          e4m3x4_to_half2x2(high[i], a1, a3);
        } else {
          a0 = low[2 * i], a2 = low[2 * i + 1];
          a1 = high[2 * i], a3 = high[2 * i + 1];
        }
        const int step = kSteps * chunk + i;
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          uint32_t b0, b1;
          key_partner(n, step, b0, b1);
          mma_m16n8k16<kType>(sums[step % kChains][n], a0, a1, a2, a3, b0, b1);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = kChains == 2 ? sums[0][n][i] + sums[kChains - 1][n][i] : sums[0][n][i];
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
  __device__ __forceinline__ void cap(float (&scores)[kRowTiles][4]) {
    const float inverse = 1.0f / p_.softcap;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = p_.softcap * kLog2e * tanhf(scores[n][i] * inverse);
    }
  }

  __device__ __forceinline__ void mask(int32_t token, float (&scores)[kRowTiles][4]) {
    asm volatile("" : "+r"(row_tokens_));  // seldom needed: keeps the unpacked tokens out of the loop's registers
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t end = end_ + static_cast<int32_t>((row_tokens_ >> (4 * (2 * n + (i & 1)))) & 15u);
        const int32_t position = token + g_ + 8 * (i >> 1);
        const bool seen = position < end && (p_.window == 0 || position >= end - p_.window);
        if (!seen) scores[n][i] = __uint_as_float(0xff800000u);
      }
    }
  }

  // Moves every row's reference up to its largest score less kShift and rescales what was summed with the old one.
  __device__ __forceinline__ void raise_references(const float (&scores)[kRowTiles][4]) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float largest = fmaxf(scores[n][i], scores[n][i + 2]);
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

  // out += V^T P^T. Tile m of a chunk's pair of elements (2u, 2u + 1): row g is element 2u, row g + 8 element 2u + 1.
  __device__ __forceinline__ void add_values(const Ring& ring, const uint32_t (&p)[kRowTiles][2]) {
    constexpr int kWords = Layout::kValueChunkBytes / 4;
    constexpr int kPairs = Layout::kValueElements / 2;
#pragma unroll
    for (int chunk = 0; chunk < Layout::kValueChunks; ++chunk) {
      uint32_t rows[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t shared =
            ring.at() + Layout::kValuesAt + Layout::value_at(chunk, i & 1, g_, t_) + (i >> 1) * 8 * Layout::kRowBytes;
        if constexpr (kWords == 4) {
          const uint4 v = lds128(shared);
          rows[i][0] = v.x, rows[i][1] = v.y, rows[i][2] = v.z, rows[i][3] = v.w;
        } else {
          const uint2 v = lds64(shared);
          rows[i][0] = v.x, rows[i][1] = v.y;
        }
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if constexpr (kFp8) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t first = half == 0 ? interleave_bytes_low(rows[0][w], rows[1][w])
                                             : interleave_bytes_high(rows[0][w], rows[1][w]);
            const uint32_t second = half == 0 ? interleave_bytes_low(rows[2][w], rows[3][w])
                                              : interleave_bytes_high(rows[2][w], rows[3][w]);
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
  }

  __device__ __forceinline__ void add_tile(int m, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                           const uint32_t (&p)[kRowTiles][2]) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) mma_m16n8k16<kType>(out_[m][n], a0, a1, a2, a3, p[n][0], p[n][1]);
  }

  // Adds the warps' results, one row tile after the other, and writes them.
  __device__ __forceinline__ void merge() {
    const DecodePiece piece = state_.piece;
    const SliceSpan span = state_.span;
    // Not the CTA's first piece: the merge buffer may still be being read.
    const bool later = state_.read.count - state_.read.left != piece.tile_end - piece.tile_begin;
    const int32_t warps = min(span.count, kDecodeWarps);
    const int32_t lead = span.turn & (kDecodeWarps - 1);  // the warp with the piece's first slice
    const bool mine = span.place(warp_) < warps;
    const int32_t tiles = min(kRowTiles, p_.row_tiles - group_ * kRowTiles);
#pragma unroll 1
    for (int32_t n = 0; n < tiles; ++n) {
      const int32_t row_tile = group_ * kRowTiles + n;
      if (later || n > 0) __syncthreads();
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        if (mine && i == n) put(i);  // registers have no run-time index
      }
      __syncthreads();
      for (int32_t position = static_cast<int32_t>(threadIdx.x); position < 2 * kDim; position += kDecodeThreads) {
        float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f), ml = make_float4(kNoMax, 0.0f, kNoMax, 0.0f);
        sum_of_warps(position, lead, warps, o, ml);
        if (piece.whole) {
          store_result(p_, piece.request, piece.kv_head, row_tile, position, o, ml);
        } else if (row_tile * kRowTile + 2 * (position & 3) < p_.rows) {
          const int64_t at = piece.slot * p_.row_tiles + row_tile;
          p_.partial[at * (2 * kDim) + position] = o;
          if (position < 4) p_.partial_ml[at * 4 + position] = ml;
        }
      }
    }
  }

  // This warp's result of a row tile into the merge buffer.
  __device__ __forceinline__ void put(int n) {
    float s0 = sum_[2 * n], s1 = sum_[2 * n + 1];
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
      s0 += __shfl_xor_sync(kAllLanes, s0, mask);
      s1 += __shfl_xor_sync(kAllLanes, s1, mask);
    }
    const uint32_t at = base_ + kSmem.merge + warp_ * kOutTiles * kTilePitch + lane_ * 16;
#pragma unroll
    for (int m = 0; m < kOutTiles; ++m) {
      sts128(at + m * kTilePitch, make_uint4(__float_as_uint(out_[m][n][0]), __float_as_uint(out_[m][n][1]),
                                             __float_as_uint(out_[m][n][2]), __float_as_uint(out_[m][n][3])));
    }
    if (g_ == 0) {
      sts128(base_ + kSmem.pairs + (warp_ * 4 + t_) * 16,
             make_uint4(__float_as_uint(reference_[2 * n]), __float_as_uint(s0), __float_as_uint(reference_[2 * n + 1]),
                        __float_as_uint(s1)));
    }
  }

  // Adds vector `position` of the warps that had slices, in the order of their slices.
  __device__ __forceinline__ void sum_of_warps(int32_t position, int32_t lead, int32_t warps, float4& o, float4& ml) {
    constexpr int kElements = Layout::kValueElements;
    const int32_t d = 2 * (position >> 2);
    const int32_t tile = d / (8 * kElements) * (kElements / 2) + d % kElements / 2;
    const uint32_t inside = tile * kTilePitch + (4 * (d / kElements % 8) + (position & 3)) * 16;
    float4 pairs[kDecodeWarps];
#pragma unroll
    for (int i = 0; i < kDecodeWarps; ++i) {
      pairs[i] = make_float4(kNoMax, 0.0f, kNoMax, 0.0f);
      const int32_t warp = (lead + i) & (kDecodeWarps - 1);
      if (i < warps) pairs[i] = lds_float4(base_ + kSmem.pairs + (warp * 4 + (position & 3)) * 16);
      ml.x = fmaxf(ml.x, pairs[i].x), ml.z = fmaxf(ml.z, pairs[i].z);
    }
#pragma unroll
    for (int i = 0; i < kDecodeWarps; ++i) {
      if (i >= warps) break;
      const int32_t warp = (lead + i) & (kDecodeWarps - 1);
      const float4 v = lds_float4(base_ + kSmem.merge + warp * kOutTiles * kTilePitch + inside);
      const float f0 = exp2_approx(pairs[i].x - ml.x), f1 = exp2_approx(pairs[i].z - ml.z);
      ml.y += pairs[i].y * f0, ml.w += pairs[i].w * f1;
      o.x += v.x * f0, o.y += v.y * f1, o.z += v.z * f0, o.w += v.w * f1;
    }
  }

  static __device__ __forceinline__ float4 lds_float4(uint32_t shared) {
    const uint4 v = lds128(shared);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
  }

  __device__ __forceinline__ uint32_t factor_address(int32_t row) const {
    return base_ + kSmem.query + kRowTiles * (kDim / 32) * 512 + row * 4;
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
  const int32_t warp_, lane_;
  WarpState& state_;
  const int32_t g_, t_;
  const int32_t group_, first_row_;
  const uint32_t base_, scales_;  // shared addresses
  uint32_t row_tokens_ = 0;       // token of the request of rows 2t and 2t + 1 of each row tile, 4 bits each

  uint32_t fragment_[kQueryInSmem ? 1 : kRowTiles][kDim / 8];
  QueryRow<kDim> ahead_[kQueryInSmem ? 1 : kRowTiles];  // the next piece's query
  float factor_[kQueryInSmem ? 1 : 2 * kRowTiles];      // of the scores of rows 2t and 2t + 1
  float reference_[2 * kRowTiles];                      // of the softmax, log2
  float sum_[2 * kRowTiles];                            // of this lane's probabilities
  float out_[kOutTiles][kRowTiles][4];
  int32_t end_;       // one past the last token that row 0 sees
  int32_t all_from_;  // first token that the last row sees
};

template <KvKind kKind, int kDim, int kRowTiles, int kStages>
__global__ void __launch_bounds__(kDecodeThreads, 1) decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) char smem[];
  DecodeWorker<kKind, kDim, kRowTiles, kStages>(p, smem).run();
}

}  // namespace hpc::attention
