// What a CTA of the decode kernel has to do: the list of its pieces, and which of its workers (warps or teams of them)
// has which slices of each.
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

// A piece of a CTA as its workers (warps or teams of them) need it. Its slices (see decode_slice_tokens(), numbered
// from position 0 on, those of 128 tokens by their first 64) are dealt out to the workers in one round with those of
// the CTA's other pieces: slice n of all goes to worker n mod 8 (or 2), so that many pieces keep every one busy. The
// order of the slices inside a piece, and of the workers that share them, does not depend on where the round stands.
// Solo pieces (see decode_solo_slices()) go to one warp each, in a round of their own. A group of 2, 4 or 8 pieces,
// whole ones of as many KV heads of one request, shares out the workers instead: each piece has every second, fourth or
// eighth of them, and all go abreast.
// kTokens: of a slice; kAbreast: whether there are groups.
template <int kTokens, int kWorkers, bool kAbreast>
struct alignas(16) PieceRow {
  static constexpr int kSoloSlices = decode_solo_slices(kTokens);
  static constexpr int kUnit = kTokens < kTileTokens ? kTokens : kTileTokens;  // tokens from one number to the next
  static constexpr int kNumbers = kTokens / kUnit;                             // numbers of a slice
  int32_t turn;       // slices of the pieces before, solo pieces left out
  int32_t solos;      // solo pieces before
  int32_t begin;      // its first slice
  int32_t count;      // slices, at least one (of no visible token where the page table is too short for the length)
  int32_t low, high;  // tokens that any row sees
  int32_t request, kv_head;
  int32_t slot;   // of its partial result; -1: the piece is whole
  int32_t solo;   // the warp that has all of it, or -1
  int32_t limit;  // one past its last token
  int32_t group;  // log2 of its group's pieces, and from bit 8 on its number there; 0: no group

  // Whether a piece whose solo is not yet known is a solo piece, where the kernel has such.
  __device__ __forceinline__ bool can_be_solo() const { return slot < 0 && count <= kSoloSlices; }

  // Of its group: log2 of the pieces, its number, and of a worker the number of the piece that it has a part in.
  __device__ __forceinline__ int32_t log_group() const { return kAbreast ? group & 255 : 0; }
  __device__ __forceinline__ int32_t number() const { return kAbreast ? group >> 8 : 0; }
  __device__ __forceinline__ int32_t number_of(int32_t worker) const {
    return place(worker) & ((1 << log_group()) - 1);
  }
  // Whether a worker has a part in the piece.
  __device__ __forceinline__ bool has(int32_t worker) const {
    if (!kAbreast) return solo < 0 || solo == worker;
    return solo < 0 ? number_of(worker) == number() : solo == worker;
  }

  // Slices of a worker in the pieces before.
  __device__ __forceinline__ int32_t before(int32_t worker) const {
    const int32_t shared =
        ((turn + kWorkers - 1 - worker) / kWorkers) + kSoloSlices * ((solos + kWorkers - 1 - worker) / kWorkers);
    if (!kAbreast) return shared;
    return shared + (number_of(worker) < number() ? divided(count) : 0);
  }
  // A worker's place in the order of a piece that is not solo.
  __device__ __forceinline__ int32_t place(int32_t worker) const { return (worker - turn) & (kWorkers - 1); }
  // A worker's first slice, the distance to its next, and one past its last (`begin`: it has none).
  __device__ __forceinline__ int32_t first(int32_t worker) const {
    return solo < 0 ? begin + kNumbers * (place(worker) >> log_group()) : begin;
  }
  __device__ __forceinline__ int32_t step() const { return solo < 0 ? kNumbers * (kWorkers >> log_group()) : 1; }
  __device__ __forceinline__ int32_t end(int32_t worker) const {
    if (!kAbreast) return solo < 0 ? begin + kNumbers * count : begin + (solo == worker ? kSoloSlices : 0);
    return begin + (has(worker) ? (solo < 0 ? kNumbers * count : kSoloSlices) : 0);
  }

  // Makes it piece number `own` of a group of 2^log: with as many slices for each of its workers.
  __device__ __forceinline__ void join(int32_t log, int32_t own) {
    if (!kAbreast || log == 0) return;
    const int32_t workers = kWorkers >> log;
    count = (count + workers - 1) & -workers;
    group = log | own << 8;
  }
  // Slices of each of the workers that have a part in it, of a group's piece.
  __device__ __forceinline__ int32_t divided(int32_t slices) const { return (slices << log_group()) / kWorkers; }
};
static_assert(sizeof(PieceRow<16, kDecodeWarps, true>) == kDecodePieceBytes);

// A piece as a row that may be the list's next; turn, solos and solo are the list's.
template <typename Row>
__device__ __forceinline__ Row piece_row(const DecodePiece& piece, const DecodeRequest& request,
                                         const DecodeParams& p) {
  const TokenRange range = visible_tokens(request, p);
  const int32_t low = max((request.first_tile + piece.tile_begin) * kTileTokens, range.low);
  const int32_t high = min((request.first_tile + piece.tile_end) * kTileTokens, range.high);
  constexpr int kTokens = Row::kUnit * Row::kNumbers;
  Row row = {};
  row.begin = low / row.kUnit;
  row.count = max((high - row.begin * row.kUnit + kTokens - 1) / kTokens, 1);
  row.limit = high;
  row.low = range.low;
  row.high = range.high;
  row.request = piece.request;
  row.kv_head = piece.kv_head;
  row.slot = piece.whole ? -1 : static_cast<int32_t>(piece.slot);
  row.solo = -1;
  return row;
}

// A row of the map, word by word: of four words that are loaded as one ptxas moves some elsewhere at once, and so waits
// for them before anything else.
__device__ __forceinline__ DecodeCta load_row(const DecodeCta& row) {
  return {ld_global32(&row.request), ld_global32(&row.kv_head), ld_global32(&row.tile), ld_global32(&row.count)};
}

// log2 of the pieces of a group, where `more` whole pieces like the first can follow it.
__device__ __forceinline__ int32_t log_group_of(int32_t more) {
  return more >= 7 ? 3 : (more >= 3 ? 2 : (more >= 1 ? 1 : 0));
}
// Of a CTA's first piece, from its row of the map and the next one's. Not where a run begins inside of a pair.
__device__ __forceinline__ int32_t log_first_group(const DecodeCta& run, const DecodeCta& after, bool last,
                                                   const DecodeParams& p) {
  if (run.tile > 0 || p.batch_invariant) return 0;
  // The run ends where the next one begins.
  const bool inside = !last && after.count > 0 && after.request == run.request;
  return log_group_of((inside ? after.kv_head : p.num_kv_heads) - run.kv_head - 1);
}

// How far a list has got: its pieces, and a row that would come next (its turn and solos).
struct Known {
  int32_t pieces;
  int32_t turn;
  int32_t solos;
  bool all;  // no piece comes after these
};

// The CTA's pieces, a ring of kDecodePieces rows in shared memory. Warp 0 writes it: as many as fit at the start, then
// in each epoch of kDecodeEpoch pieces as many as ended in the one before.
//
// Warp 0 adds during epoch e, behind the barrier between e - 1 and e; the others see what was added during e - 1. Rows
// of epochs before e may be overwritten: every warp is done with them. So a warp in epoch e sees at least 7 epochs'
// pieces, e's own among them. It asks for slices at most 4 rounds ahead, or 4 solo pieces: in at most 40 pieces from
// its own.
template <int kTokens, int kWorkers, int kDim, bool kSolos, bool kAbreast>
class PieceList {
 public:
  using Row = PieceRow<kTokens, kWorkers, kAbreast>;
  struct State {
    uint64_t query_full[2 * kDecodeEpoch];
    uint64_t merge_free;
    uint64_t cluster_full;
    DecodeCursor cursor, rest;
    Known known[2];  // by the parity of the epoch during which it was written
  };
  static_assert(sizeof(State) <= kDecodeWalkBytes);

  // State and arrays: in shared memory, as decode_smem() has them.
  __device__ __forceinline__ PieceList(const DecodeParams& p, State& state, DecodeRequest* requests, Row* pieces)
      : p_(p), state_(state), requests_(requests), pieces_(pieces) {}

  // Warp 0: asks for request rows, which it alone reads, in one trip to memory.
  __device__ __forceinline__ void start(int32_t cta) {
    const auto lane = static_cast<int32_t>(threadIdx.x);
    // A small batch's rows are read beside the CTA's row, a large one's from the CTA's first request on. (Volatile, so
    // that no select makes the small batch wait for the row.)
    if (p_.batch > kCached) first_ = static_cast<const volatile DecodeCta&>(p_.ctas[cta]).request;
    cached_ = min(p_.batch - first_, kCached);
    const auto* source = reinterpret_cast<const uint4*>(p_.requests + first_);  // two a row
    const uint32_t to = shared_address(requests_);
#pragma unroll 4
    for (int32_t i = lane; i < 2 * cached_; i += 32) cp_async16(to + 16 * i, source + i);
    cp_async_commit();
  }

  // Warp 0, before it asks for a slice: the rows are there; goes to the CTA's first piece.
  __device__ __forceinline__ void begin(int32_t cta, const RunOrder& order) {
    if (threadIdx.x == 0) {
      state_.cursor = decode_cursor(cta, order.first);
      state_.cursor.count += order.rest.count > 0;  // so that it is known not to begin the run
      state_.rest = decode_cursor(cta, order.rest);
    }
    cp_async_wait<0>();
    __syncwarp();
  }

  // Warp 0, during epoch `epoch` (-1: before the first): refills the list.
  __device__ __forceinline__ void refill(int32_t epoch) {
    filled_ = epoch;
    const int32_t most = max(epoch, 0) * kDecodeEpoch + kDecodePieces;
    DecodeCursor cursor = state_.cursor;
    DecodeHeader header = {};  // the fields that next_piece reads
    header.num_kv_heads = p_.num_kv_heads;
    header.batch_invariant = p_.batch_invariant;
    __syncwarp();
    int32_t log_group = 0, number = 0;  // of the piece: its group, and its number there
#pragma unroll 1
    while (added_.pieces < most && cursor.left > 0) {
      const int32_t request = cursor.request, cached = request - first_;
      const DecodeRequest row = cached < cached_ ? requests_[cached] : p_.requests[request];
      cursor.request = 0;  // of the one row that next_piece is given
      DecodePiece piece;
      next_piece(cursor, header, &row, &piece);
      piece.request = request;
      if (cursor.request == 0) cursor.request = request;  // else the next one, which is never 0
      Row made = piece_row<Row>(piece, row, p_);
      made.turn = added_.turn;
      made.solos = added_.solos;
      if (kSolos && made.can_be_solo()) {
        made.solo = added_.solos++ & (kWorkers - 1);
      } else {
        if constexpr (kAbreast) {
          if (number == 0) log_group = log_group_here(made, row.num_tiles, cursor.left);
          made.join(log_group, number);
          number = (number + 1) & ((1 << log_group) - 1);
          if (number == 0) added_.turn += made.count << log_group;
        } else {
          added_.turn += made.count;
        }
      }
      if (threadIdx.x == 0) pieces_[added_.pieces & (kDecodePieces - 1)] = made;
      ++added_.pieces;
      if (added_.pieces == 1 && cursor.left == 0) cursor = state_.rest;
    }
    const bool told = added_.all;  // so the other epochs' readers know it already
    added_.all = cursor.left <= 0;
    if (threadIdx.x == 0) {
      state_.cursor = cursor;
      state_.known[epoch & 1] = added_;
      if (epoch < 0) state_.known[0] = added_;
    }
    if (added_.all && (told || epoch < 0)) filled_ = kFilled;
    __syncwarp();
  }

  // Warp 0: whether this epoch's refill is still to be done, and how many pieces it has added.
  __device__ __forceinline__ bool stale(int32_t epoch) const { return filled_ != epoch && filled_ != kFilled; }
  __device__ __forceinline__ int32_t added() const { return added_.pieces; }

  // What every warp may read during an epoch.
  __device__ __forceinline__ Known known(int32_t epoch) const { return state_.known[(epoch + 1) & 1]; }

  __device__ __forceinline__ const Row& operator[](int32_t index) const { return pieces_[index & (kDecodePieces - 1)]; }

  // The next layer's call begins with the same rows of the same plan and page table. The caches' flood may have driven
  // them from L2: brings them back while nothing waits for them.
  __device__ __forceinline__ void touch(int32_t cta, int32_t epoch, int32_t lane) const {
    const int32_t pieces = known(epoch).pieces;
    if (pieces == 0 || pieces > kDecodePieces) return;  // else the first one's row is another's
    const Row piece = pieces_[0];
    const int32_t page = min(piece.begin * kTokens, p_.capacity - 1) >> p_.page_shift;
    const void* lines[4] = {p_.ctas + cta, p_.requests + piece.request, p_.header,
                            p_.page_table + piece.request * p_.page_table_stride + page};
    if (lane < 4) prefetch_l2(lane == 0 ? lines[0] : (lane == 1 ? lines[1] : (lane == 2 ? lines[2] : lines[3])));
  }

 private:
  // log2 of the pieces of the group that begins with a piece of `tiles` tiles, `left` behind it in the run: whole pairs
  // of one request, all in one epoch.
  __device__ __forceinline__ int32_t log_group_here(const Row& piece, int32_t tiles, int32_t left) const {
    if (piece.slot >= 0 || p_.batch_invariant) return 0;
    int32_t more = min(p_.num_kv_heads - 1 - piece.kv_head, kDecodeEpoch - 1 - added_.pieces % kDecodeEpoch);
    while (more > 0 && more * tiles > left) --more;
    return log_group_of(more);
  }

  static constexpr int kCached = decode_cached_requests(kDim);
  static constexpr int32_t kFilled = 0x7fffffff;  // no refill is left

  const DecodeParams& p_;
  State& state_;
  DecodeRequest* requests_;
  Row* pieces_;
  int32_t first_ = 0, cached_ = 0;  // requests whose rows are kept here
  int32_t filled_ = -2;             // epoch of the last refill
  Known added_ = {};
};

}  // namespace hpc::attention
