// The issuing side of the decode kernel: the copies of keys and values into each warp's ring, ahead of the arithmetic
// and across the ends of pieces and requests.
//
// In a full memory system every trip takes as long as what a CTA has asked for before: 128 KB in flight are 3.7 us at
// an SM's share. So nothing in the loop waits for a trip that was not started long before: request rows and pieces lie
// in shared memory, page ids are loaded 32 slices ahead, queries several pieces ahead.
#pragma once

#include "decode_pieces.cuh"
#include "decode_query.cuh"
#include "decode_slice.cuh"
#include "hpc/fifo.cuh"
#include "hpc/mbarrier.cuh"
#include "hpc/pdl.cuh"

namespace hpc::attention {

// One warp's copies: its slices of all pieces in the list, one after the other; of a team's slice its own tokens.
template <KvKind kKind, int kDim, int kRowTiles, int kStages, bool kAbreast>
class Feed {
 public:
  static constexpr bool kSolos = decode_has_solos(kDim, kRowTiles);
  static constexpr int kWorkers = decode_workers(kDim, kRowTiles), kShare = kDecodeWarps / kWorkers;
  static constexpr int kLogWorkers = kWorkers == 8 ? 3 : 1;
  using Layout = SliceLayout<kKind, kDim, decode_slice_tokens(kKind, kDim, kRowTiles, kStages)>;
  using Pieces = PieceList<Layout::kTokens, kWorkers, kDim, kSolos, kAbreast>;
  using Row = typename Pieces::Row;
  using Ring = WarpRing<kStages, Layout::kSlotBytes>;

  // `scales`: shared address of this warp's ring of key scales, [stage][token].
  __device__ __forceinline__ Feed(const DecodeParams& p, const Pieces& pieces, int32_t warp, int32_t lane,
                                  uint32_t scales)
      : p_(p),
        pieces_(pieces),
        worker_(warp / kShare),
        own_(warp % kShare * kOwn),
        lane_(lane),
        scales_(scales),
        log_ids_(p.one_page ? 0 : max((kOwn == 32 ? 5 : 4) - p.page_shift, 0)) {}

  // What the first block is made of before the list of pieces is there: the CTA's own row and its request's, and page
  // ids that are asked for beside the request's row, so as if nothing lay before a window.
  // log_group: log2 of the pieces of the first one's group.
  struct Lead {
    DecodeCta run;
    DecodeRequest request;
    uint32_t id;
    int32_t log_group;
  };
  __device__ __forceinline__ Lead ask(const DecodeCta& run, int32_t log_group) const {
    Lead lead = {};
    lead.run = run;
    lead.log_group = kAbreast ? log_group : 0;
    if (run.count == 0 || p_.batch_invariant) return lead;
    lead.request = p_.requests[run.request];
    const int32_t token = lead_token(run, log_group);
    if (token < min((run.tile + run.count) * kTileTokens, p_.capacity)) {
      lead.id = p_.page_table[run.request * p_.page_table_stride + (token >> p_.page_shift)];
    }
    return lead;
  }
  // Makes it, where the first piece is not a solo piece, and the plan an ordinary one: true, and that piece as the list
  // will have it. (Only kernels that have solo pieces call these.)
  __device__ __forceinline__ bool take(const Lead& lead, int32_t slot, Row& first) {
    const DecodeCta& run = lead.run;
    if (run.count == 0 || p_.batch_invariant) return false;
    DecodePiece piece = {};
    piece.tile_begin = run.tile;
    piece.tile_end = min(run.tile + run.count, lead.request.num_tiles);
    piece.whole = run.tile == 0 && piece.tile_end == lead.request.num_tiles;
    const int32_t number = worker_ & ((1 << lead.log_group) - 1);
    piece.request = run.request;
    piece.kv_head = run.kv_head + number;
    piece.slot = slot;
    Row row = piece_row<Row>(piece, lead.request, p_);
    if (row.begin * Row::kUnit != run.tile * kTileTokens || row.can_be_solo()) return false;
    row.join(lead.log_group, number);
    const int32_t place = worker_ >> lead.log_group, step = kWorkers >> lead.log_group;
    const int32_t slices = row.count + step - 1 - place;
    count_ = min(kAbreast ? slices >> (kLogWorkers - lead.log_group) : slices / kWorkers, 32 >> log_ids_);
    where_ = (row.begin + Row::kNumbers * (place + min(lane_, count_ - 1) * step)) * kDecodePieces + number;
    ids_[0] = lead_token(run, lead.log_group) < row.high ? min(lead.id, p_.last_page) : 0;
    low_ = row.low;
    high_ = row.high;
    limit_ = row.limit;
    kv_head_ = piece.kv_head;
    first = row;
    return true;
  }

  // Asks for the first slice before anything else is made of what ask() brought, where it is as most are: in one page,
  // all of its tokens seen, none of them this step's unless `all` may be read, of a piece that take() will take. False:
  // it is left to push(ring). Values are asked for `pace` cycles behind keys.
  __device__ __forceinline__ bool push_first(const Ring& ring, const Lead& lead, bool all, int32_t pace) {
    const DecodeCta& run = lead.run;
    if (run.count == 0 || p_.batch_invariant || log_ids_ > 0 || p_.per_token_scale || p_.window > 0) return false;
    const int32_t log_group = kAbreast ? lead.log_group : 0;
    const int32_t token = run.tile * kTileTokens + (worker_ >> log_group) * kTokens;
    const int32_t high = min(lead.request.seq_len, p_.capacity);
    if (run.tile == 0 && high <= Row::kSoloSlices * kTokens) return false;
    if (token + kTokens > min(kTileTokens * (run.tile + run.count), high - (all ? 0 : p_.q_len))) return false;
    kv_head_ = run.kv_head + (worker_ & ((1 << log_group) - 1));
    const uint32_t id = min(__shfl_sync(kAllLanes, lead.id, 0), p_.last_page);
    copy_page(ring.at(), first_row(p_.k, id, token), first_row(p_.v, id, token), fresh_lane(), pace);
    cp_async_commit();
    index_ = 1;
    return true;
  }

  // Where this lane's first rows of a slice lie.
  struct Slice {
    const char* k;
    const char* v;
  };
  // Whether the current slice is as most are, and where it is.
  __device__ __forceinline__ bool plain(Slice& slice) {
    if (index_ >= count_ || log_ids_ > 0 || p_.per_token_scale) return false;
    const int32_t where = __shfl_sync(kAllLanes, where_, index_), token = first_token(where);
    const Row& piece = pieces_[where];
    if (token < piece.low || token + kOwn > piece.limit) return false;
    kv_head_ = piece.kv_head;
    slice = slice_at(token);
    return true;
  }
  // Brings its keys into L2: a line a lane, of rows of 128 or 256 bytes. (Only kernels with a slice a warp call it.)
  __device__ __forceinline__ void touch_keys() {
    if (index_ >= count_ || log_ids_ > 0) return;
    constexpr int kLines = Layout::kRowBytes / 128, kRows = 32 / kLines;
    static_assert(kTokens == kRows && kLines * 128 == Layout::kRowBytes);
    const int32_t where = __shfl_sync(kAllLanes, where_, index_), token = first_token(where);
    const uint32_t id = page(), lane = fresh_lane(),
                   inside = static_cast<uint32_t>(token) & ((1u << p_.page_shift) - 1);
    kv_head_ = pieces_[where].kv_head;
    if (token + static_cast<int32_t>(lane / kLines) >= pieces_[where].limit) return;
    prefetch_l2(address(p_.k, id, inside + lane / kLines, lane % kLines * 8));
  }
  // Asks for it.
  __device__ __forceinline__ void push(const Ring& ring, const Slice& slice) {
    copy_page(ring.at() + own_ * Layout::kRowBytes, slice.k, slice.v, fresh_lane());
    cp_async_commit();
    ++index_;
  }

  // Whether the current slice is known without the list, and holds no token of this step.
  __device__ __forceinline__ bool leads() const {
    if (index_ == count_) return false;
    return first_token(__shfl_sync(kAllLanes, where_, index_)) + kOwn <= high_ - p_.q_len;
  }

  // The list is there: asks for the block behind the first one.
  __device__ __forceinline__ void follow() {
    listed_ = true;
    next_ = count_;
    if (count_ > 0) find_block(0);
  }

  // Whether every slice has been asked for.
  __device__ __forceinline__ bool final() const { return final_; }

  // Whether a block has ended, so that prepare() is to be called before anything else.
  __device__ __forceinline__ bool ended() const { return index_ == count_ && !done_; }

  // Takes up the next block: the places of this warp's next slices, lane i has slice i's, and these slices' page ids,
  // one a lane; where a slice has several pages two a lane, number i and i + 32 of all. The block after the current one
  // is on its way meanwhile. `index`: of the piece that the warp attends over.
  __device__ __forceinline__ void prepare(int32_t index) {
    while (index_ == count_ && !final_) {
      where_ = next_where_;
      ids_[0] = next_ids_[0];
      ids_[1] = next_ids_[1];
      count_ = next_count_;
      index_ = 0;
      find_block(index);
      done_ = count_ == 0 && next_count_ == 0;
      final_ = done_ && all_;
      if (next_count_ == 0) break;
    }
  }

  // Whether the current slice holds no token of this step, so that nothing the previous kernel writes is read.
  __device__ __forceinline__ bool is_old() const {
    if (index_ == count_) return true;
    const int32_t where = __shfl_sync(kAllLanes, where_, index_);
    return first_token(where) + kOwn <= pieces_[where].high - p_.q_len;
  }

  // Asks for the keys and the values of the current slice, as one group (an empty one past the end), and goes to the
  // next one.
  __device__ __forceinline__ void push(const Ring& ring) {
    if (index_ < count_) {
      look_up();
      if (log_ids_ == 0) {
        push_page(ring);
      } else {
        push_rows<false>(p_.k, ring.at() + own_ * Layout::kRowBytes);
        push_rows<true>(p_.v, ring.at() + own_ * Layout::kRowBytes + Layout::kValuesAt);
      }
      if (p_.per_token_scale) push_scales(ring);
      ++index_;
    }
    cp_async_commit();
  }

  // The same in two groups: keys, then values.
  __device__ __forceinline__ void push_keys(const Ring& ring) {
    if (index_ < count_) {
      look_up();
      push_half<false>(p_.k, ring.at() + own_ * Layout::kRowBytes);
    }
    cp_async_commit();
  }
  __device__ __forceinline__ void push_values(const Ring& ring) {
    if (index_ < count_) {
      look_up();
      push_half<true>(p_.v, ring.at() + own_ * Layout::kRowBytes + Layout::kValuesAt);
      if (p_.per_token_scale) push_scales(ring);
      ++index_;
    }
    cp_async_commit();
  }

 private:
  static constexpr int kTokens = Layout::kTokens, kOwn = kTokens / kShare;  // of a slice; of them this warp's
  static constexpr int kFills = Layout::kFills / kShare;

  // Of the current slice: first token, and what is seen of it.
  __device__ __forceinline__ void look_up() {
    const int32_t where = __shfl_sync(kAllLanes, where_, index_);
    token_ = first_token(where);
    if (!kSolos || listed_) {
      const Row& piece = pieces_[where];
      low_ = piece.low;
      high_ = piece.high;
      limit_ = piece.limit;
      kv_head_ = piece.kv_head;
    }
  }

  // Keys or values of the current slice.
  template <bool kValues>
  __device__ __forceinline__ void push_half(const CacheView& cache, uint32_t shared) {
    if (log_ids_ > 0) return push_rows<kValues>(cache, shared);
    const uint32_t lane = fresh_lane(), to = shared + Layout::fill_from(kValues, lane);
    const char* from = first_row(cache, page(), token_);
    const int64_t step = static_cast<int64_t>(cache.token_stride) * (16 * Layout::kRows);
    if (token_ >= low_ && token_ + kOwn <= limit()) {
#pragma unroll
      for (int i = 0; i < kFills; ++i, from += step) cp_async16(Layout::fill_of(kValues, to, i), from);
    } else {
      const int32_t token = token_ + static_cast<int32_t>(lane / Layout::kLanes);
#pragma unroll
      for (int i = 0; i < kFills; ++i, from += step) {
        cp_async16(Layout::fill_of(kValues, to, i), from, visible(token + i * Layout::kRows) ? 16 : 0);
      }
    }
  }

  // A slice that lies in one page.
  __device__ __forceinline__ void push_page(const Ring& ring) {
    const Slice slice = slice_at(token_);
    const uint32_t lane = fresh_lane();
    const uint32_t shared = ring.at() + own_ * Layout::kRowBytes;
    if (token_ >= low_ && token_ + kOwn <= limit()) {
      copy_page(shared, slice.k, slice.v, lane);
    } else {
      const int32_t own = lane / Layout::kLanes;
      const char *k = slice.k, *v = slice.v;
      const uint32_t keys = shared + Layout::fill_from(false, lane);
      const uint32_t values = shared + Layout::kValuesAt + Layout::fill_from(true, lane);
#pragma unroll
      for (int i = 0; i < kFills; ++i) {
        const int bytes = visible(token_ + own + i * Layout::kRows) ? 16 : 0;
        cp_async16(Layout::fill_of(false, keys, i), k, bytes);
        cp_async16(Layout::fill_of(true, values, i), v, bytes);
        k += static_cast<int64_t>(p_.k.token_stride) * (16 * Layout::kRows);
        v += static_cast<int64_t>(p_.v.token_stride) * (16 * Layout::kRows);
      }
    }
  }

  // The current slice, which begins with `token`, where it lies in one page.
  __device__ __forceinline__ Slice slice_at(int32_t token) const {
    const uint32_t id = page();
    return {first_row(p_.k, id, token), first_row(p_.v, id, token)};
  }
  __device__ __forceinline__ uint32_t page() const { return __shfl_sync(kAllLanes, ids_[0], index_); }

  // This lane's first row of a slice that begins with `token`.
  __device__ __forceinline__ const char* first_row(const CacheView& cache, uint32_t page, int32_t token) const {
    const uint32_t lane = fresh_lane(), first = static_cast<uint32_t>(token) & ((1u << p_.page_shift) - 1);
    return address(cache, page, first + lane / Layout::kLanes, lane);
  }

  // Copies a slice all of whose tokens are seen. k, v: where this lane's first rows lie.
  __device__ __forceinline__ void copy_page(uint32_t shared, const char* k, const char* v, uint32_t lane,
                                            int32_t pace = 0) const {
    const uint32_t keys = shared + Layout::fill_from(false, lane);
    const uint32_t values = shared + Layout::kValuesAt + Layout::fill_from(true, lane);
#pragma unroll
    for (int i = 0; i < kFills; ++i) {
      cp_async16(Layout::fill_of(false, keys, i), k);
      k += static_cast<int64_t>(p_.k.token_stride) * (16 * Layout::kRows);
    }
    if (pace > 0) pause(pace);
#pragma unroll
    for (int i = 0; i < kFills; ++i) {
      cp_async16(Layout::fill_of(true, values, i), v);
      v += static_cast<int64_t>(p_.v.token_stride) * (16 * Layout::kRows);
    }
  }

  __device__ __forceinline__ const char* address(const CacheView& cache, uint32_t page, uint32_t inside,
                                                 uint32_t lane) const {
    const uint64_t units = static_cast<uint64_t>(page) * cache.page_stride +
                           static_cast<uint64_t>(inside) * cache.token_stride +
                           static_cast<uint64_t>(kv_head_) * cache.head_stride + lane % Layout::kLanes;
    return cache.data + units * 16;
  }

  // A slice of several pages.
  template <bool kValues>
  __device__ __forceinline__ void push_rows(const CacheView& cache, uint32_t shared) {
    const uint32_t lane = fresh_lane(), own = lane / Layout::kLanes;
    const uint32_t from = shared + Layout::fill_from(kValues, lane);
#pragma unroll
    for (int i = 0; i < kFills; ++i) {
      const int32_t row = own + i * Layout::kRows;
      const uint32_t page = __shfl_sync(kAllLanes, ids_of_slice(), (index_ << log_ids_) + (row >> p_.page_shift));
      const int bytes = visible(token_ + row) ? 16 : 0;
      cp_async16(Layout::fill_of(kValues, from, i), address(cache, page, row & ((1 << p_.page_shift) - 1), lane),
                 bytes);
    }
  }

  __device__ __forceinline__ void push_scales(const Ring& ring) {
    const int32_t own = lane_ % kOwn, token = token_ + own;
    const int32_t number = log_ids_ == 0 ? 0 : own >> p_.page_shift;  // of its page in the slice
    const uint32_t page = __shfl_sync(kAllLanes, ids_of_slice(), (index_ << log_ids_) + number);
    const int64_t inside = token & ((1 << p_.page_shift) - 1);
    const float* source = p_.k_scale + page * p_.k_scale_page_stride + inside * p_.k_scale_token_stride +
                          kv_head_ * p_.k_scale_head_stride;
    if (lane_ < kOwn) cp_async4(scales_ + (ring.slot() * kOwn + own) * 4, source, visible(token) ? 4 : 0);
  }

  // Looks up the block that begins with this warp's slice next_ of all, and starts to load its ids.
  __device__ __forceinline__ void find_block(int32_t index) {
    const Known known = pieces_.known(index / kDecodeEpoch);
    Row behind = {};
    behind.turn = known.turn;
    behind.solos = known.solos;
    all_ = known.all;
    next_count_ = min(behind.before(worker_) - next_, log_ids_ == 0 ? 32 : 64 >> log_ids_);
    if (next_count_ == 0) return;
    next_where_ = place(next_ + min(lane_, next_count_ - 1), index, known.pieces);
    next_ids_[0] = page_id(lane_ >> log_ids_);
    if (log_ids_ > 0) next_ids_[1] = page_id((lane_ + 32) >> log_ids_);
    next_ += next_count_;
  }

  // The id of this lane's page of the next block's slice `number`.
  __device__ __forceinline__ uint32_t page_id(int32_t number) const {
    const int32_t where = __shfl_sync(kAllLanes, next_where_, number);
    const Row& piece = pieces_[where];
    const int32_t token = first_token(where) + page_of_slice();
    if (number >= next_count_ || token >= piece.limit) return 0;
    const int32_t* table = p_.page_table + piece.request * p_.page_table_stride;
    return min(static_cast<uint32_t>(table[token >> p_.page_shift]), p_.last_page);
  }

  // The register with the page ids of the current slice, where a slice has several.
  __device__ __forceinline__ uint32_t ids_of_slice() const { return (index_ << log_ids_) < 32 ? ids_[0] : ids_[1]; }

  // Where this warp's slice `number` of all lies: its number from position 0 on, times kDecodePieces, plus the row of
  // its piece in the list.
  __device__ __forceinline__ int32_t place(int32_t number, int32_t low, int32_t high) const {
#pragma unroll 1
    while (high - low > 1) {  // the last of these pieces that begins at or before the slice
      const int32_t middle = (low + high) / 2;
      if (pieces_[middle].before(worker_) <= number) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const Row& piece = pieces_[low];
    const int32_t slice = piece.first(worker_) + (number - piece.before(worker_)) * piece.step();
    return slice * kDecodePieces + (low & (kDecodePieces - 1));
  }

  // The first token of the page whose id this lane holds in the first block.
  __device__ __forceinline__ int32_t lead_token(const DecodeCta& run, int32_t log_group) const {
    const int32_t slice = (worker_ >> log_group) + (lane_ >> log_ids_) * (kWorkers >> log_group);
    return run.tile * kTileTokens + slice * kTokens + own_ + page_of_slice();
  }

  // Where the page whose id this lane holds begins, from the beginning of its slice (of several pages) on.
  __device__ __forceinline__ int32_t page_of_slice() const { return (lane_ & ((1 << log_ids_) - 1)) << p_.page_shift; }

  // This warp's first token of a slice.
  __device__ __forceinline__ int32_t first_token(int32_t where) const {
    static_assert(Row::kUnit <= kDecodePieces);
    return (where & -kDecodePieces) / (kDecodePieces / Row::kUnit) + own_;
  }

  // The lane's number in a form that keeps what follows from it out of the registers that live through the loop.
  __device__ __forceinline__ uint32_t fresh_lane() const {
    uint32_t lane = lane_;
    asm volatile("" : "+r"(lane));
    return lane;
  }

  // One past the last token of the slice that is pushed, where slices reach beyond pieces.
  __device__ __forceinline__ int32_t limit() const { return Row::kNumbers > 1 ? limit_ : high_; }
  __device__ __forceinline__ bool visible(int32_t token) const { return token >= low_ && token < limit(); }

  const DecodeParams& p_;
  const Pieces& pieces_;
  const int32_t worker_, own_, lane_;  // own_: this warp's first token of a slice
  const uint32_t scales_;
  const int32_t log_ids_;  // log2 of a slice's pages
  // The current block: slice index_ of count_, and the one after it.
  int32_t index_ = 0, count_ = 0, next_count_ = 0;
  bool listed_ = false;               // the list has been made
  bool done_ = false;                 // no slice is left of the pieces that are known
  bool all_ = false, final_ = false;  // these are all there are; and none of their slices is left
  int32_t where_ = 0, next_where_ = 0;
  uint32_t ids_[2] = {}, next_ids_[2] = {};
  int32_t next_ = 0;  // this warp's slice of all that the block after the next begins with
  // Of the slice that is pushed: first token, tokens that any row sees, one past its piece's last.
  int32_t token_ = 0, low_ = 0, high_ = 0, limit_ = 0, kv_head_ = 0;
};

}  // namespace hpc::attention
