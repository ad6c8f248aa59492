// The issuing side of the decode kernel: each warp walks over its slices of its CTA's pieces, ahead of the arithmetic
// and across the ends of pieces and requests, and copies keys and values into its ring.
#pragma once

#include "../config/decode.hpp"
#include "decode_params.cuh"
#include "hpc/fifo.cuh"

namespace hpc::attention {

constexpr unsigned kAllLanes = 0xffffffffu;

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

// The slices (of 16 tokens, counted from position 0) of a piece; warp w takes every eighth, from first(w) on. The
// slices of a CTA's pieces are dealt out in one round, so that many short pieces keep every warp busy; the order of the
// slices inside a piece, and of the warps that share them, does not depend on where the round stands.
struct SliceSpan {
  int32_t begin;
  int32_t count;
  int32_t turn;  // slices of the CTA's pieces before

  __device__ __forceinline__ int32_t end() const { return begin + count; }
  __device__ __forceinline__ int32_t first(int32_t warp) const { return begin + ((warp - turn) & (kDecodeWarps - 1)); }
};

__device__ __forceinline__ SliceSpan slice_span(const DecodePiece& piece, int32_t first_tile, const TokenRange& range,
                                                int32_t turn) {
  const int32_t low = max((first_tile + piece.tile_begin) * kTileTokens, range.low);
  const int32_t high = min((first_tile + piece.tile_end) * kTileTokens, range.high);
  const int32_t begin = low / kSliceTokens;
  return {begin, max((high + kSliceTokens - 1) / kSliceTokens - begin, 0), turn};
}

// How a lane's vectors lie in a slot of the ring, for a kind of cache and a head_dim.
template <KvKind kKind, int kDim>
struct SliceLayout {
  static constexpr int kElementBytes = kv_bytes(kKind);
  static constexpr int kRowBytes = kDim * kElementBytes;
  // Keys: lane (g, t) takes bytes 16 t of every 64 of tokens g and g + 8.
  static constexpr int kKeyChunks = kRowBytes / 64;
  static constexpr int kKeyVectors = 2 * kKeyChunks;
  // Values: lane (g, t) takes its share g of tokens 2t, 2t + 1, 2t + 8, 2t + 9, in chunks of at most 16 bytes.
  static constexpr int kValueChunkBytes = kRowBytes / 8 < 16 ? kRowBytes / 8 : 16;
  static constexpr int kValueChunks = kRowBytes / 8 / kValueChunkBytes;
  static constexpr int kValueVectors = 4 * kValueChunks;
  static constexpr int kValueElements = kValueChunkBytes / kElementBytes;  // of a chunk

  template <int kStages>
  using Ring = LaneRing<kStages, kKeyVectors + kValueVectors>;
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
static_assert(sizeof(WarpState) <= kDecodeStateBytes / kDecodeWarps);

template <KvKind kKind, int kDim, int kStages>
class Feed {
 public:
  using Layout = SliceLayout<kKind, kDim>;
  using Ring = typename Layout::template Ring<kStages>;

  // `state`: this warp's, with `feed` set. `scales`: shared address of this warp's ring of key scales, [stage][lane] of
  // 8 bytes.
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
      const int32_t g = lane_ >> 2, t = lane_ & 3;
      const int32_t token = slice_ * kSliceTokens;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const char* source = p_.k.data + row(p_.k, token, g + 8 * i) * 16 + 16 * t;
        const int bytes = visible(token + g + 8 * i) ? 16 : 0;
#pragma unroll
        for (int chunk = 0; chunk < Layout::kKeyChunks; ++chunk) {
          cp_async16(ring.at(i * Layout::kKeyChunks + chunk), source + 64 * chunk, bytes);
        }
      }
      if (p_.per_token_scale) push_scales(ring, token, g);
    }
    cp_async_commit();
  }

  // Asks for the values of the current slice, as one group, and goes to the next slice.
  __device__ __forceinline__ void push_values(const Ring& ring) {
    if (slice_ < end_) {
      const int32_t g = lane_ >> 2, t = lane_ & 3;
      const int32_t token = slice_ * kSliceTokens;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t r = 2 * t + (i & 1) + 8 * (i >> 1);
        const char* source = p_.v.data + row(p_.v, token, r) * 16 + Layout::kValueChunkBytes * g;
        const bool seen = visible(token + r);
#pragma unroll
        for (int chunk = 0; chunk < Layout::kValueChunks; ++chunk) {
          const uint32_t shared = ring.at(Layout::kKeyVectors + i * Layout::kValueChunks + chunk);
          if constexpr (Layout::kValueChunkBytes == 16) {
            cp_async16(shared, source + 128 * chunk, seen ? 16 : 0);
          } else {
            cp_async8(shared, source, seen ? 8 : 0);
          }
        }
      }
      slice_ += kDecodeWarps;
      ++index_;
      if (slice_ >= end_) advance_block();
    }
    cp_async_commit();
  }

 private:
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
      while (slice >= end && next_piece(cursor, *p_.header, p_.requests, &piece)) {
        const DecodeRequest& row = p_.requests[piece.request];
        const TokenRange range = visible_tokens(row, p_);
        const SliceSpan span = slice_span(piece, row.first_tile, range, turn);
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

  __device__ __forceinline__ bool visible(int32_t token) const { return token >= low_ && token < high_; }

  __device__ __forceinline__ uint32_t page_of(int32_t r) const {
    return __shfl_sync(kAllLanes, ids_, p_.page_shift == 0 ? (index_ << 4) + r : index_);
  }

  // Where the row of token `token` + r of a slice begins, in units of 16 bytes.
  __device__ __forceinline__ uint64_t row(const CacheView& cache, int32_t token, int32_t r) const {
    const uint32_t inside = static_cast<uint32_t>(token + r) & ((1u << p_.page_shift) - 1);
    return static_cast<uint64_t>(page_of(r)) * cache.page_stride + static_cast<uint64_t>(inside) * cache.token_stride +
           static_cast<uint64_t>(kv_head_) * cache.head_stride;
  }

  __device__ __forceinline__ void push_scales(const Ring& ring, int32_t token, int32_t g) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t r = g + 8 * i;
      const int64_t inside = (token + r) & ((1 << p_.page_shift) - 1);
      const float* source = p_.k_scale + page_of(r) * p_.k_scale_page_stride + inside * p_.k_scale_token_stride +
                            kv_head_ * p_.k_scale_head_stride;
      cp_async4(scales_ + ring.slot() * 256 + lane_ * 8 + 4 * i, source, visible(token + r) ? 4 : 0);
    }
  }

  const DecodeParams& p_;
  WarpState& state_;
  const int32_t warp_, lane_;
  const uint32_t scales_;
  // The current block: slices from slice_ on (>= end_: nothing is left), the tokens that any row sees, this lane's id.
  int32_t slice_ = 0, end_ = 0, low_ = 0, high_ = 0, kv_head_ = 0;
  uint32_t ids_ = 0, next_ids_ = 0;
  int32_t index_ = 0;  // of the current slice in its block
};

}  // namespace hpc::attention
