// The issuing side of the decode kernel: each warp walks over its slices of its CTA's pieces, ahead of the arithmetic
// and across the ends of pieces and requests, and copies keys and values into its ring.
#pragma once

#include "../config/decode.hpp"
#include "decode_query.cuh"
#include "hpc/fifo.cuh"

namespace hpc::attention {

constexpr unsigned kAllLanes = 0xffffffffu;

// The fields of the map's header that next_piece reads, without a trip to memory.
__device__ __forceinline__ DecodeHeader plan_fields(const DecodeParams& p) {
  DecodeHeader header = {};
  header.num_kv_heads = p.num_kv_heads;
  header.batch_invariant = p.batch_invariant;
  return header;
}

// First tokens any row sees and one past the last, of a request's row of the map.
struct TokenRange {
  int32_t low;
  int32_t high;
};
__device__ __forceinline__ TokenRange visible_tokens(const DecodeRequest& request, const DecodeParams& p) {
  const int32_t high = min(request.seq_len, p.capacity);
  const int32_t low = p.window > 0 ? max(high - p.q_len + 1 - p.window, 0) : 0;
  return {low, high};
}

// The slices (of 16 tokens, counted from position 0) of a piece; a warp takes every eighth, from first(warp) on. The
// slices of a CTA's pieces are dealt out in one round, so that many short pieces keep every warp busy; the order of the
// slices inside a piece, and of the warps that share them, does not depend on where the round stands.
struct SliceSpan {
  int32_t begin;
  int32_t count;
  int32_t turn;  // slices of the CTA's pieces before

  __device__ __forceinline__ int32_t end() const { return begin + count; }
  // The warp's place in the piece's order, and its first slice.
  __device__ __forceinline__ int32_t place(int32_t warp) const { return (warp - turn) & (kDecodeWarps - 1); }
  __device__ __forceinline__ int32_t first(int32_t warp) const { return begin + place(warp); }
};

__device__ __forceinline__ SliceSpan slice_span(const DecodePiece& piece, int32_t first_tile, const TokenRange& range,
                                                int32_t turn) {
  const int32_t low = max((first_tile + piece.tile_begin) * kTileTokens, range.low);
  const int32_t high = min((first_tile + piece.tile_end) * kTileTokens, range.high);
  const int32_t begin = low / kSliceTokens;
  return {begin, max((high + kSliceTokens - 1) / kSliceTokens - begin, 0), turn};
}

// A slice in shared memory: 16 rows of keys, then 16 rows of values, each row its bytes in global memory. Every
// 128-byte line is filled by neighbouring lanes from neighbouring addresses. Inside a line the 16-byte columns are
// exchanged by an XOR with a function of the row, so that neither the filling nor the reading of fragments meets a bank
// twice:
//   keys   lane (g, t) reads columns t + 4 j of rows g and g + 8               XOR 4 (row mod 2)
//   values lane (g, t) reads column g of rows 2t, 2t + 1, 2t + 8, 2t + 9       XOR 2 (row / 2 mod 4)
// (Rows of 64 bytes lie two in a line; keys then need no exchange, and a lane reads 8 bytes of values.)
template <KvKind kKind, int kDim>
struct SliceLayout {
  static constexpr int kElementBytes = kv_bytes(kKind);
  static constexpr int kRowBytes = kDim * kElementBytes;
  static constexpr int kValuesAt = kSliceTokens * kRowBytes;
  static constexpr int kSlotBytes = 2 * kValuesAt;
  // Filling: instruction i takes rows i * kRows + lane / kLanes, 16 bytes a lane.
  static constexpr int kLanes = kRowBytes / 16;
  static constexpr int kRows = 32 / kLanes;
  static constexpr int kFills = kSliceTokens / kRows;
  // Reading.
  static constexpr int kKeyChunks = kRowBytes / 64;
  static constexpr int kValueChunkBytes = kRowBytes / 8 < 16 ? kRowBytes / 8 : 16;
  static constexpr int kValueChunks = kRowBytes / 8 / kValueChunkBytes;
  static constexpr int kValueElements = kValueChunkBytes / kElementBytes;  // of a chunk

  // Where a lane's 16 bytes of instruction i go, from the beginning of the keys or the values.
  static __device__ __forceinline__ uint32_t fill_at(bool values, int i, int32_t lane) {
    const int32_t own = lane / kLanes;  // row of the instruction: row = i * kRows + own, the sum never carries
    uint32_t column = 0;
    if (values) {
      column = 2 * (own / 2 % 4) ^ 2 * (i * kRows / 2 % 4);
    } else if (kRowBytes > 64) {
      column = 4 * (own % 2) ^ 4 * (i * kRows % 2);
    }
    return (lane * 16 + i * 512) ^ (column * 16);
  }
  // Where a lane reads keys of row g in 16-byte column t + 4 * chunk; row g + 8 lies 8 rows on.
  static __device__ __forceinline__ uint32_t key_at(int chunk, int32_t g, int32_t t) {
    const uint32_t at = g * kRowBytes + 16 * t + (kRowBytes > 64 ? 64 * (g & 1) : 0);
    return (at ^ (64 * (chunk & 1))) + 128 * (chunk / 2);
  }
  // Where a lane reads its chunk of row 2t + odd; rows 2t + 8 and 2t + 9 lie 8 rows on.
  static __device__ __forceinline__ uint32_t value_at(int chunk, int odd, int32_t g, int32_t t) {
    if constexpr (kRowBytes == 64) {
      return (t * 128 + 16 * ((g >> 1) ^ (2 * t)) + 8 * (g & 1)) ^ (64 * odd);
    } else {
      return 2 * t * kRowBytes + 16 * (g ^ (2 * t)) + odd * kRowBytes + 128 * chunk;
    }
  }
};

// The walk over a CTA's pieces, twice: ahead (what is asked for) and behind (what is attended over). It changes seldom,
// so it lives in shared memory, one for each warp: all lanes read it, lane 0 writes, with __syncwarp() in between.
struct alignas(16) WarpState {
  // Ahead: the piece that is being cut into blocks, and the next block.
  DecodeCursor feed;
  int32_t feed_turn;
  int32_t feed_request;
  int32_t feed_slice, feed_end;
  int32_t feed_low, feed_high, feed_kv_head;
  int32_t next_slice, next_end, next_low, next_high, next_kv_head;
  // Behind.
  DecodeCursor read;
  DecodePiece piece;
  SliceSpan span;
};
static_assert(sizeof(WarpState) <= kDecodeStateBytes);

template <KvKind kKind, int kDim, int kStages>
class Feed {
 public:
  using Layout = SliceLayout<kKind, kDim>;
  using Ring = WarpRing<kStages, Layout::kSlotBytes>;

  // `state`: this warp's, with `feed` set. `scales`: shared address of this warp's ring of key scales, [stage][token].
  __device__ __forceinline__ Feed(const DecodeParams& p, WarpState& state, int32_t warp, int32_t lane, uint32_t scales)
      : p_(p), state_(state), warp_(warp), lane_(lane), scales_(scales) {
    if (lane_ == 0) state_.feed_turn = state_.feed_slice = state_.feed_end = 0;
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < 2; ++i) advance_block();
  }

  // Whether the current slice holds no token of this step, so that nothing the previous kernel writes is read.
  __device__ __forceinline__ bool is_old() const {
    return (slice_ + 1) * kSliceTokens <= high_ - p_.q_len || slice_ >= end_;
  }

  // Asks for the keys of the current slice, as one group (an empty one past the end).
  __device__ __forceinline__ void push_keys(const Ring& ring) {
    if (slice_ < end_) {
      if (p_.page_shift != 0) {
        page_ = __shfl_sync(kAllLanes, ids_, index_);
        push_page<false>(p_.k, ring.at());
      } else {
        push_tokens<false>(p_.k, ring.at());
      }
      if (p_.per_token_scale) push_scales(ring);
    }
    cp_async_commit();
  }

  // Asks for the values of the current slice, as one group, and goes to the next slice.
  __device__ __forceinline__ void push_values(const Ring& ring) {
    if (slice_ < end_) {
      if (p_.page_shift != 0) {
        push_page<true>(p_.v, ring.at() + Layout::kValuesAt);
      } else {
        push_tokens<true>(p_.v, ring.at() + Layout::kValuesAt);
      }
      slice_ += kDecodeWarps;
      ++index_;
      if (slice_ >= end_) advance_block();
    }
    cp_async_commit();
  }

 private:
  // The slice lies in one page.
  template <bool kValues>
  __device__ __forceinline__ void push_page(const CacheView& cache, uint32_t shared) {
    const int32_t lane = fresh_lane(), own = lane / Layout::kLanes, token = slice_ * kSliceTokens;
    const uint32_t inside = (static_cast<uint32_t>(token) & ((1u << p_.page_shift) - 1)) + own;
    const uint64_t units = static_cast<uint64_t>(page_) * cache.page_stride +
                           static_cast<uint64_t>(inside) * cache.token_stride +
                           static_cast<uint64_t>(kv_head_) * cache.head_stride + lane % Layout::kLanes;
    const char* source = cache.data + units * 16;
    const int64_t step = static_cast<int64_t>(cache.token_stride) * (16 * Layout::kRows);
    if (token >= low_ && token + kSliceTokens <= high_) {
#pragma unroll
      for (int i = 0; i < Layout::kFills; ++i) {
        cp_async16(shared + Layout::fill_at(kValues, i, lane), source);
        source += step;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Layout::kFills; ++i) {
        const int bytes = visible(token + own + i * Layout::kRows) ? 16 : 0;
        cp_async16(shared + Layout::fill_at(kValues, i, lane), source, bytes);
        source += step;
      }
    }
  }

  // Pages of one token.
  template <bool kValues>
  __device__ __forceinline__ void push_tokens(const CacheView& cache, uint32_t shared) {
    const int32_t own = lane_ / Layout::kLanes, token = slice_ * kSliceTokens;
#pragma unroll
    for (int i = 0; i < Layout::kFills; ++i) {
      const uint32_t page = __shfl_sync(kAllLanes, ids_, index_ * kSliceTokens + own + i * Layout::kRows);
      const uint64_t units = static_cast<uint64_t>(page) * cache.page_stride +
                             static_cast<uint64_t>(kv_head_) * cache.head_stride + lane_ % Layout::kLanes;
      const int bytes = visible(token + own + i * Layout::kRows) ? 16 : 0;
      cp_async16(shared + Layout::fill_at(kValues, i, lane_), cache.data + units * 16, bytes);
    }
  }

  __device__ __forceinline__ void push_scales(const Ring& ring) {
    const int32_t own = lane_ % kSliceTokens, token = slice_ * kSliceTokens + own;
    const uint32_t page = __shfl_sync(kAllLanes, ids_, p_.page_shift != 0 ? index_ : index_ * kSliceTokens + own);
    const int64_t inside = token & ((1 << p_.page_shift) - 1);
    const float* source = p_.k_scale + page * p_.k_scale_page_stride + inside * p_.k_scale_token_stride +
                          kv_head_ * p_.k_scale_head_stride;
    if (lane_ < kSliceTokens) {
      cp_async4(scales_ + (ring.slot() * kSliceTokens + own) * 4, source, visible(token) ? 4 : 0);
    }
  }

  // A block: up to 32 page ids of this warp's next slices, one a lane: one id a slice, or with one-token pages one id a
  // token of two slices. The block after the current one is always loaded, so the loop never waits for ids.
  __device__ __forceinline__ void advance_block() {
    slice_ = state_.next_slice;
    end_ = state_.next_end;
    low_ = state_.next_low;
    high_ = state_.next_high;
    kv_head_ = state_.next_kv_head;
    ids_ = next_ids_;
    index_ = 0;

    int32_t slice = state_.feed_slice, end = state_.feed_end;
    int32_t low = state_.feed_low, high = state_.feed_high, kv_head = state_.feed_kv_head;
    int32_t request = state_.feed_request;
    const bool walk = slice >= end;
    DecodeCursor cursor;
    int32_t turn = 0;
    if (walk) {
      cursor = state_.feed;
      turn = state_.feed_turn;
      DecodePiece piece;
      while (slice >= end && next_piece(cursor, plan_fields(p_), p_.requests, &piece)) {
        const DecodeRequest& row = p_.requests[piece.request];
        const TokenRange range = visible_tokens(row, p_);
        const SliceSpan span = slice_span(piece, row.first_tile, range, turn);
        if (warp_ == 0) prefetch_query<kKind, kDim>(p_, piece.request, piece.kv_head, lane_);
        turn += span.count;
        slice = span.first(warp_);
        end = span.end();
        low = range.low;
        high = range.high;
        kv_head = piece.kv_head;
        request = piece.request;
      }
    }
    const bool one_token_pages = p_.page_shift == 0;
    const int32_t slices = kDecodeWarps * (one_token_pages ? 2 : 32);
    const int32_t block_end = min(end, slice + slices);
    const int32_t mine = slice + kDecodeWarps * (one_token_pages ? lane_ >> 4 : lane_);
    const int32_t token = mine * kSliceTokens + (one_token_pages ? lane_ & 15 : 0);
    next_ids_ = 0;
    if (mine < block_end && token < high && (!one_token_pages || token >= low)) {
      const int32_t* table = p_.page_table + request * p_.page_table_stride;
      next_ids_ = min(static_cast<uint32_t>(table[token >> p_.page_shift]), p_.last_page);
    }
    __syncwarp();
    if (lane_ == 0) {
      if (walk) {
        state_.feed = cursor;
        state_.feed_turn = turn;
        state_.feed_request = request;
        state_.feed_low = low;
        state_.feed_high = high;
        state_.feed_kv_head = kv_head;
        state_.feed_end = end;
      }
      state_.feed_slice = slice + slices;
      state_.next_slice = slice;
      state_.next_end = block_end;
      state_.next_low = low;
      state_.next_high = high;
      state_.next_kv_head = kv_head;
    }
    __syncwarp();
  }

  // The lane's number in a form that keeps what follows from it out of the registers that live through the loop.
  __device__ __forceinline__ int32_t fresh_lane() const {
    int32_t lane = lane_;
    asm volatile("" : "+r"(lane));
    return lane;
  }

  __device__ __forceinline__ bool visible(int32_t token) const { return token >= low_ && token < high_; }

  const DecodeParams& p_;
  WarpState& state_;
  const int32_t warp_, lane_;
  const uint32_t scales_;
  // The current block: slices from slice_ on (>= end_: nothing is left), the tokens that any row sees, this lane's id.
  int32_t slice_ = 0, end_ = 0, low_ = 0, high_ = 0, kv_head_ = 0;
  uint32_t ids_ = 0, next_ids_ = 0;
  int32_t index_ = 0;  // of the current slice in its block
  uint32_t page_ = 0;  // of the current slice, between its keys and its values
};

}  // namespace hpc::attention
