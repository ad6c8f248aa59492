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
// Shared memory: see decode_smem().
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
  static constexpr int kValueWords = SliceLayout<kKind, kDim>::kValueChunkBytes / 4;
  // Chunks of a slice's values (16 registers) that are read before the softmax: as far as registers reach.
  static constexpr int kAhead = kRowTiles == 1 && kDim <= 128 ? decode_slice_tokens(kKind, kDim) / 16 : 0;
  static constexpr int kTilePitch = 36 * 16;  // bytes of a merged m16 tile, padded against bank conflicts
  static constexpr DecodeSmem kSmem = decode_smem(kKind, kDim, kRowTiles, kStages, false);
  using Layout = SliceLayout<kKind, kDim>;
  static constexpr bool kSolos = decode_has_solos(kDim, kRowTiles);
  using Pieces = PieceList<kKind, kDim, kSolos>;
  static constexpr int kTokens = Layout::kTokens, kHalves = kTokens / 16;  // of a slice
  static constexpr int kQueryPitch = decode_query_pitch(kDim);
  static constexpr int kQueryBarriers = 2 * kDecodeEpoch;
  static constexpr int kQueryDepth = decode_query_depth(kDim, kRowTiles);
  using Feed = attention::Feed<kKind, kDim, kStages, kSolos>;
  using Ring = typename Feed::Ring;

  __device__ __forceinline__ DecodeWorker(const DecodeParams& p, char* smem)
      : p_(p),
        warp_(__shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x) / 32, 0)),  // so that it is known to be uniform
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        g_(lane_ >> 2),
        t_(lane_ & 3),
        group_(static_cast<int32_t>(blockIdx.x) % p.row_groups),
        first_row_(group_ * kRowTile * kRowTiles),
        base_(shared_address(smem)),
        scales_(base_ + kSmem.scales + warp_ * (kStages * kTokens * 4)),
        pieces_(p, *reinterpret_cast<typename Pieces::State*>(smem + kSmem.walk),
                reinterpret_cast<DecodeRequest*>(smem + kSmem.requests),
                reinterpret_cast<PieceRow*>(smem + kSmem.pieces)) {
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int32_t row = first_row_ + kRowTile * (i >> 1) + 2 * t_ + (i & 1);
      row_tokens_ |= static_cast<uint32_t>(row_token(p, min(row, p.rows - 1))) << (4 * i);
    }
  }

  __device__ __forceinline__ void run() {
    // A plan that the kernel just before may have written is not touched before the wait. Otherwise the combine kernel
    // may start when every CTA of this one has: it waits for this kernel's end, and this one for what came before. Its
    // CTAs then find all SMs alike and spread over them, and the next call's CTAs can enter as these leave.
    bool waited = p_.early_slices == 0;
    if (waited) pdl_wait();
    pdl_trigger();
    const int32_t cta = static_cast<int32_t>(blockIdx.x) / p_.row_groups;
    if (warp_ == 0) pieces_.start(cta);
    static_assert(kQueryDepth <= kQueryBarriers && kQueryBarriers < 32);
    if (warp_ == 1 && lane_ <= kQueryBarriers) {
      mbarrier_init(query_full(lane_), lane_ < kQueryBarriers ? 1 : kDecodeWarps);  // the last: merge_free()
      mbarrier_init_fence();
    }
    Ring ring(base_ + kSmem.rings + warp_ * Ring::kBytes);
    Feed feed(p_, pieces_, warp_, lane_, scales_);

    // One loop for everything, so that each part's instructions are there once. A step asks for a slice; from step
    // kStages on it attends over the one whose place that takes.
    int32_t index = -1;  // of the current piece
    int32_t slice = 0, end = 0;
    bool chores = true;  // something besides attending is to be done
#pragma unroll 1
    for (int32_t step = 0;;) {
      if (chores) {
        const int32_t epoch = index < 0 ? -1 : index / kDecodeEpoch;
        if (warp_ == 0 && pieces_.stale(epoch)) pieces_.refill(epoch);
        if (step == 0) __syncthreads();
        feed.prepare(max(index, 0));
        if (!waited && (step >= p_.early_slices || !feed.is_old())) {
          pdl_wait();
          waited = true;
        }
        if (warp_ == 0 && waited) fetch_queries();
        if (warp_ == 1 && step == 0) touch_query();
        chores = !waited;
      }
      if (step >= kStages) {
        if (slice >= end) {
          if (index >= 0) finish();
          bool any;
          do {  // goes past pieces that are other warps' alone, but stops for an epoch's chores
            any = next(++index);
          } while (kSolos && any && !mine() && index % kDecodeEpoch != 0);
          if (!any) break;
          slice = piece_.first(warp_);
          end = piece_.end(warp_);
          chores = true;
          continue;
        }
        attend(slice * kTokens, ring);
        slice += piece_.step();
      }
      feed.push(ring);
      chores |= feed.ended();
      ring.advance();
      ++step;
    }
    if (warp_ == 0) touch_plan(cta);
  }

 private:
  // The next layer's call begins with the same rows of the same plan and page table. The caches' flood may have driven
  // them from L2: brings them back while nothing waits for them.
  __device__ __forceinline__ void touch_plan(int32_t cta) {
    if (pieces_.added() == 0 || pieces_.added() > kDecodePieces) return;
    const PieceRow piece = pieces_[0];
    const int32_t page = min(piece.begin * kTokens, p_.capacity - 1) >> p_.page_shift;
    const void* lines[4] = {p_.ctas + cta, p_.requests + piece.request, p_.header,
                            p_.page_table + piece.request * p_.page_table_stride + page};
    if (lane_ < 4) prefetch_l2(lane_ == 0 ? lines[0] : (lane_ == 1 ? lines[1] : (lane_ == 2 ? lines[2] : lines[3])));
  }

  __device__ __forceinline__ uint32_t query_full(int32_t slot) const { return base_ + kSmem.walk + slot * 8; }
  __device__ __forceinline__ uint32_t merge_free() const { return query_full(kQueryBarriers); }
  __device__ __forceinline__ uint32_t query_at(int32_t slot) const {
    return base_ + kSmem.rows + slot * (kRowTiles * kRowTile * kQueryPitch);
  }

  // Warp 0 asks for the query rows of the next pieces, as far as there is room; a row a lane.
  __device__ __forceinline__ void fetch_queries() {
    constexpr int kRows = kRowTiles * kRowTile, kPieces = 32 / kRows;  // at once
    const int32_t end = min(query_limit_, pieces_.added());
#pragma unroll 1
    for (; fetched_ < end; fetched_ += kPieces) {
      const int32_t index = fetched_ + lane_ / kRows, row = lane_ % kRows;
      const int32_t rows = min(kRows, p_.rows - first_row_), slot = index % kQueryDepth;
      const int32_t bytes = query_row_bytes<kKind, kDim>(p_);
      if (index < end && row == 0) mbarrier_arrive_expect_tx(query_full(slot), static_cast<uint32_t>(rows * bytes));
      __syncwarp();
      if (index < end && row < rows) {
        const PieceRow& piece = pieces_[index];
        bulk_load(query_at(slot) + row * kQueryPitch,
                  query_row<kKind, kDim>(p_, piece.request, piece.kv_head, first_row_ + row), bytes, query_full(slot));
      }
    }
    fetched_ = min(fetched_, end);
  }

  // Brings the first query's lines (the beginnings of its rows) into L2 before it may be read.
  __device__ __forceinline__ void touch_query() {
    if (pieces_.known(0).pieces == 0 || lane_ >= min(kRowTiles * kRowTile, p_.rows - first_row_)) return;
    const PieceRow& piece = pieces_[0];
    const char* row = query_row<kKind, kDim>(p_, piece.request, piece.kv_head, first_row_ + lane_);
    prefetch_l2(row);
    prefetch_l2(row + query_row_bytes<kKind, kDim>(p_) - 16);
  }

  // Goes to the CTA's piece `index`: its query rows, the factors of their scores, nothing of the piece before.
  __device__ __forceinline__ bool next(int32_t index) {
    // Between epochs every warp is done with the rows and queries of the one before.
    if (index % kDecodeEpoch == 0 && index > 0) __syncthreads();
    if (index >= pieces_.known(index / kDecodeEpoch).pieces) return false;
    piece_ = pieces_[index];
    if (!kSolos) {  // every warp has passed the barrier that ended piece index - 1, so its query has been used
      query_limit_ = index + kQueryDepth;
    } else if (index % kDecodeEpoch == 0) {  // the same of the epoch before
      static_assert(!kSolos || kQueryDepth == 2 * kDecodeEpoch);
      query_limit_ = index + 2 * kDecodeEpoch;
    }
    if (!mine()) return true;
    load_rows(index);
    if (kQueryInSmem) query_limit_ = index + kQueryDepth + 1;  // every warp has passed load_rows's barrier
    // Row j sees [end + j - window, end + j); nothing is masked in slices that every row sees whole.
    end_ = piece_.high - p_.q_len + 1;
    all_from_ = p_.window > 0 ? piece_.high - p_.window : 0;
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

  __device__ __forceinline__ void load_rows(int32_t index) {
    float scale = p_.scale;
    if (p_.k_scale != nullptr && !p_.per_token_scale) scale *= p_.k_scale[piece_.kv_head * p_.k_scale_head_stride];
    const int32_t slot = index % kQueryDepth;
    mbarrier_wait(query_full(slot), static_cast<uint32_t>((index / kQueryDepth) & 1));
    if constexpr (kQueryInSmem) {
      // One warp a row tile. The barrier of the merge before is behind every warp's last reading.
      if (warp_ < kRowTiles) {
        uint32_t fragment[kDim / 8];
        float factor;
        load_row_tile(warp_, slot, fragment, factor);
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
        load_row_tile(n, slot, fragment_[n], factor);
        // Lane (g, t) holds row g; scores of rows 2t and 2t + 1 lie in lane (g, t).
        factor_[2 * n] = scale * __shfl_sync(kAllLanes, factor, 8 * t_);
        factor_[2 * n + 1] = scale * __shfl_sync(kAllLanes, factor, 8 * t_ + 4);
      }
    }
  }

  // A row tile's fragments from its rows in shared memory; `factor` of row g.
  __device__ __forceinline__ void load_row_tile(int32_t n, int32_t slot, uint32_t (&fragment)[kDim / 8],
                                                float& factor) {
    const int32_t own = kRowTile * n + g_, row = first_row_ + own;
    QueryRow<kDim> query;
    read_query<kKind, kDim>(p_, query_at(slot) + own * kQueryPitch, row < p_.rows, t_, query);
    query_fragment<kKind, kDim>(p_, query, fragment, factor);
    if (p_.q_scale != nullptr && row < p_.rows) {
      const RowPlace place = row_place(p_, piece_.kv_head, row);
      const int64_t token = static_cast<int64_t>(piece_.request) * p_.q_len + place.token;
      factor *= p_.q_scale[token * p_.q_scale_token_stride + place.head * p_.q_scale_head_stride];
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

  // Writes the piece's result.
  __device__ __forceinline__ void finish() {
    if (!kSolos || piece_.solo < 0) {
      merge();
    } else if (mine()) {
      if constexpr (kSolos) write_solo();
    }
  }

  // Whether this warp has a part in the current piece.
  __device__ __forceinline__ bool mine() const { return !kSolos || piece_.solo < 0 || piece_.solo == warp_; }

  // A solo piece's output, from registers.
  __device__ __forceinline__ void write_solo() {
    constexpr int kElements = Layout::kValueElements;
    float l[2];
    row_sums(0, l[0], l[1]);
    const float v_scale = p_.v_scale != nullptr ? p_.v_scale[piece_.kv_head * p_.v_scale_head_stride] : p_.v_factor;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t row = 2 * t_ + i;
      if (row >= p_.rows) continue;
      const OutputRow to = output_row(p_, piece_.request, piece_.kv_head, row, reference_[i], l[i], v_scale);
#pragma unroll
      for (int m = 0; m < kOutTiles; ++m) {
        const int32_t d = m / (kElements / 2) * 8 * kElements + kElements * g_ + 2 * (m % (kElements / 2));
        store_pair(p_, to.element + d, out_[m][0][i] * to.factor, out_[m][0][i + 2] * to.factor);
      }
      if (p_.lse != nullptr && g_ == 0) store_lse(p_, to, reference_[i], l[i]);
    }
  }

  // Adds the warps' results, one row tile after the other, and writes them.
  __device__ __forceinline__ void merge() {
    const int32_t warps = min(piece_.count, kDecodeWarps);
    const int32_t lead = piece_.turn & (kDecodeWarps - 1);  // the warp with the piece's first slice
    const bool mine = piece_.place(warp_) < warps;
    const int32_t tiles = min(kRowTiles, p_.row_tiles - group_ * kRowTiles);
#pragma unroll 1
    for (int32_t n = 0; n < tiles; ++n) {
      const int32_t row_tile = group_ * kRowTiles + n;
      // What was merged before has been read by every warp.
      if (merged_ > 0) mbarrier_wait(merge_free(), static_cast<uint32_t>((merged_ - 1) & 1));
      ++merged_;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        if (mine && i == n) put(i);  // registers have no run-time index
      }
      __syncthreads();
      for (int32_t position = static_cast<int32_t>(threadIdx.x); position < 2 * kDim; position += kDecodeThreads) {
        float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f), ml = make_float4(kNoMax, 0.0f, kNoMax, 0.0f);
        sum_of_warps(position, lead, warps, o, ml);
        if (piece_.slot < 0) {
          store_result(p_, piece_.request, piece_.kv_head, row_tile, position, o, ml);
        } else if (row_tile * kRowTile + 2 * (position & 3) < p_.rows) {
          const int64_t at = static_cast<int64_t>(piece_.slot) * p_.row_tiles + row_tile;
          p_.partial[at * (2 * kDim) + position] = o;
          if (position < 4) p_.partial_ml[at * 4 + position] = ml;
        }
      }
      __syncwarp();
      if (lane_ == 0) mbarrier_arrive(merge_free());
    }
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

  // This warp's result of a row tile into the merge buffer.
  __device__ __forceinline__ void put(int n) {
    float s0, s1;
    row_sums(n, s0, s1);
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
    // All are asked for at once; behind the last warp it is read again, with weight 0.
    float4 pairs[kDecodeWarps], outputs[kDecodeWarps];
#pragma unroll
    for (int i = 0; i < kDecodeWarps; ++i) {
      const int32_t warp = (lead + min(i, warps - 1)) & (kDecodeWarps - 1);
      pairs[i] = lds_float4(base_ + kSmem.pairs + (warp * 4 + (position & 3)) * 16);
      outputs[i] = lds_float4(base_ + kSmem.merge + warp * kOutTiles * kTilePitch + inside);
    }
#pragma unroll
    for (int i = 0; i < kDecodeWarps; ++i) ml.x = fmaxf(ml.x, pairs[i].x), ml.z = fmaxf(ml.z, pairs[i].z);
#pragma unroll
    for (int i = 0; i < kDecodeWarps; ++i) {
      const float f0 = i < warps ? exp2_approx(pairs[i].x - ml.x) : 0.0f;
      const float f1 = i < warps ? exp2_approx(pairs[i].z - ml.z) : 0.0f;
      ml.y += pairs[i].y * f0, ml.w += pairs[i].w * f1;
      o.x += outputs[i].x * f0, o.y += outputs[i].y * f1, o.z += outputs[i].z * f0, o.w += outputs[i].w * f1;
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
  const int32_t g_, t_;
  const int32_t group_, first_row_;
  const uint32_t base_, scales_;  // shared addresses
  Pieces pieces_;
  PieceRow piece_;                                   // the current one
  int32_t fetched_ = 0, query_limit_ = kQueryDepth;  // queries of pieces that are, and may be, asked for
  int32_t merged_ = 0;                               // row tiles that went through the merge buffer
  uint32_t row_tokens_ = 0;  // token of the request of rows 2t and 2t + 1 of each row tile, 4 bits each

  uint32_t fragment_[kQueryInSmem ? 1 : kRowTiles][kDim / 8];
  float factor_[kQueryInSmem ? 1 : 2 * kRowTiles];  // of the scores of rows 2t and 2t + 1
  float reference_[2 * kRowTiles];                  // of the softmax, log2
  float sum_[2 * kRowTiles];                        // of this lane's probabilities
  float out_[kOutTiles][kRowTiles][4];
  int32_t end_;       // one past the last token that row 0 sees
  int32_t all_from_;  // first token that the last row sees
};

template <KvKind kKind, int kDim, int kRowTiles, int kStages>
__global__ void __maxnreg__(decode_registers(kRowTiles)) decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) char smem[];
  DecodeWorker<kKind, kDim, kRowTiles, kStages>(p, smem).run();
}

}  // namespace hpc::attention
