// Decode attention over a paged cache.
//
// Grid: one CTA a row of the plan's `ctas` and row group (row groups of one run side by side, so that the second reads
// the cache from L2). A CTA attends over its pieces one after the other; its 8 warps share the slices of a piece
// (decode_attend.cuh), or take short whole pieces (solo pieces) one each, side by side. With many query rows a slice is
// not one warp's but a team's of four (decode_team.cuh). A worker is what a slice belongs to: a warp or a team.
// With kCluster > 2 every pair of the plan has a cluster, whose CTAs add its pieces themselves (decode_cluster.cuh); in
// clusters of two those pairs that are couples.
//
// Memory: each worker's own ring in shared memory (decode_feed.cuh), kept full across pieces. No barrier of the CTA
// inside a piece. At a piece's end the workers' results go through shared memory, are added in the order of their
// slices, and become the output (whole pieces) or a partial result for combine.cuh. A solo piece's warp writes the
// output from its registers. Where what lies: decode_smem().
//
// Programmatic launch: the plan, page ids and slices without this step's tokens are read before the wait; the query,
// the scales and everything else after it; nothing is written to global memory before it.
#pragma once

#include "decode_attend.cuh"
#include "decode_cluster.cuh"
#include "decode_team.cuh"
#include "decode_merge.cuh"
#include "hpc/pdl.cuh"

#include <type_traits>

namespace hpc::attention {

template <KvKind kKind, int kDim, int kRowTiles, int kStages, bool kAbreast, int kCluster>
class DecodeWorker {
 public:
  static constexpr bool kTeams = decode_has_teams(kDim, kRowTiles);
  using Attention = std::conditional_t<kTeams, TeamAttention<kKind, kDim, kRowTiles, kStages>,
                                       SliceAttention<kKind, kDim, kRowTiles, kStages>>;
  static constexpr bool kQueryInSmem = Attention::kQueryInSmem;
  static constexpr int kWorkers = decode_workers(kDim, kRowTiles), kShare = kDecodeWarps / kWorkers;
  static constexpr int kLogWorkers = kWorkers == 8 ? 3 : 1;
  static constexpr int kOutTiles = kDim / 16;             // m16 tiles of a worker's output
  static constexpr int kMerged = kTeams ? kRowTiles : 1;  // row tiles that are merged at once
  static constexpr int kTilePitch = 36 * 16;              // bytes of a merged m16 tile, padded against bank conflicts
  static constexpr int kMergeBytes = kWorkers * kOutTiles * kTilePitch;  // of a row tile
  static constexpr DecodeSmem kSmem = Attention::kSmem;
  using Layout = typename Attention::Layout;
  static constexpr bool kSolos = decode_has_solos(kDim, kRowTiles);
  static_assert(kSolos || !kAbreast);
  using Feed = attention::Feed<kKind, kDim, kRowTiles, kStages, kAbreast>;
  using Pieces = typename Feed::Pieces;
  using Row = typename Pieces::Row;
  static constexpr int kTokens = Layout::kTokens;  // of a slice
  static constexpr int kQueryPitch = decode_query_pitch(kDim);
  static constexpr int kQueryBarriers = 2 * kDecodeEpoch;
  static constexpr int kQueryDepth = decode_query_depth(kDim, kRowTiles);
  // Whether a warp asks for its first slices before the list of pieces is made, takes up its first piece before the
  // wait, and loads that piece's query itself, right behind it: a trip shorter than the bulk copies. (Where there are
  // more rows or columns, registers have no room for it.)
  static constexpr bool kQuickStart = kSolos;
  // Whether of a team's first slice keys alone are asked for before the wait: values are wanted much later.
  static constexpr bool kKeysFirst = kTeams && kRowTiles == 4 && kKind == KvKind::kE4m3;
  // Whether a CTA with many tiles asks for more before the wait: see decode_pace().
  static constexpr DecodePace kPace = decode_pace(kKind);
  static constexpr bool kPaced = kQuickStart && kStages == 2 && kDim == 128 && kCluster <= kDecodeCouple;
  static constexpr bool kGroups = kRowTiles > 1;  // whether there can be several row groups
  using Ring = typename Feed::Ring;
  __device__ __forceinline__ DecodeWorker(const DecodeParams& p, char* smem, const ClusterRun& own = {})
      : p_(p),
        warp_(__shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x) / 32, 0)),  // so that it is known to be uniform
        worker_(warp_ / kShare),
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        g_(lane_ >> 2),
        t_(lane_ & 3),
        group_(!kGroups || p.row_groups == 1 ? 0 : static_cast<int32_t>(blockIdx.x) % p.row_groups),
        first_row_(group_ * kRowTile * kRowTiles),
        base_(shared_address(smem)),
        pieces_(p, *reinterpret_cast<typename Pieces::State*>(smem + kSmem.walk),
                reinterpret_cast<DecodeRequest*>(smem + kSmem.requests), reinterpret_cast<Row*>(smem + kSmem.pieces)),
        own_(p, base_, first_row_, warp_, lane_),
        cluster_(p, base_ + kSmem.cluster, cluster_full(), own) {}

  // cta: row of the plan; run: that row, and `after` the next one (but of the `last` its own), and the plan's split
  // pairs have been asked for before anything else. before: the count of the row before, wanted in
  // clusters of two.
  __device__ __forceinline__ void run(int32_t cta, const DecodeCta& run, const DecodeCta& after, bool last,
                                      int32_t splits, int32_t before) {
    // A plan that the kernel just before may have written is not touched before the wait. Otherwise the combine kernel
    // may start when every CTA of this one has: it waits for this kernel's end, and this one for what came before. Its
    // CTAs then find all SMs alike and spread over them, and the next call's CTAs can enter as these leave.
    bool waited = p_.early_slices == 0, touched = false;
    pdl_trigger();
    if (warp_ == 0) pieces_.start(cta);
    // Three a warp, for a warp makes one after the other. The last: merge_free(), cluster_full().
    static_assert(kQueryDepth <= kQueryBarriers && kQueryBarriers + 1 < 3 * (kDecodeWarps - 1));
    const int32_t barrier = 3 * (warp_ - 1) + lane_;
    if (warp_ > 0 && lane_ < 3 && barrier <= kQueryBarriers + (kCluster > 1)) {
      mbarrier_init(query_full(barrier), barrier == kQueryBarriers ? kDecodeThreads : 1);
      mbarrier_init_fence();
    }
    cluster_.begin();
    Ring ring(base_ + kSmem.rings + worker_ * Ring::kBytes);
    Feed feed(p_, pieces_, warp_, lane_, own_.scales_);
    const RunOrder order = kQuickStart ? run_order(run, after, p_.batch_invariant) : RunOrder{run, {}};
    typename Feed::Lead lead = {};
    if (kQuickStart) {
      lead = feed.ask(order.first, !kAbreast || order.rest.count > 0 ? 0 : log_first_group(run, after, last, p_));
    }
    if (warp_ == 0) {
      pieces_.begin(cta, order);
      if (kQuickStart) pieces_.refill(-1);  // while what was asked for is on its way
    }

    // One loop for everything, so that each part's instructions are there once. A step asks for a slice; from step
    // kStages on it attends over the slice whose place that one takes.
    int32_t index = -1;  // of the current piece
    int32_t slice = 0, end = 0, step = 0;
    bool chores = true;   // something besides attending is to be done
    bool listed = false;  // the list of pieces is there
    bool unread = false;  // the current piece's query is still to be read
    bool known = false;   // the first piece is known without the list
    bool halved = false;  // of the current slice keys alone have been asked for
    // Whether a team asks for a slice in two groups, its keys as soon as those before them have been read. Not where
    // row groups get the same slices from L2: there a team waits for its own instructions.
    const bool early_keys = p_.row_groups == 1;
    typename Feed::Slice following;
    const bool paced = kPaced && p_.early_slices == 1 && order.first.count >= kPace.least_tiles;
    const int32_t early = p_.early_slices + (paced && warp_ >= kDecodeWarps / 2);
    if constexpr (kCluster == kDecodeCouple) {
      // A couple's run has no other piece. (Where the last one goes first, `lead` is of that one's request.)
      coupled_ = order.rest.count == 0 &&
                 is_couple(run, cta % 2 > 0, cta % 2 > 0 ? before : after.count, lead.request.num_tiles);
    }
    const bool pauses = paced && splits > 0 && !coupled_;
    if (kQuickStart && feed.push_first(ring, lead, waited, pauses ? kPace.values : 0)) {
      ring.advance();
      step = 1;
    }
    if (kQuickStart && feed.take(lead, 2 * cta + (order.rest.count > 0), piece_)) {
      known = true;
      if (warp_ == 1 || piece_.log_group() > 0) touch_query(piece_);
      index = piece_.number();
      slice = piece_.first(worker_);
      end = piece_.end(worker_);
      unread = slice < end;
      own_.begin(piece_.high, piece_.limit);
    }
    if (pauses && early > step && step > 0) pause(kPace.second);
#pragma unroll 1
    for (;;) {
      if (chores) {
        const int32_t epoch = index < 0 ? -1 : index / kDecodeEpoch;
        if (warp_ == 0 && (!kQuickStart || listed) && pieces_.stale(epoch)) pieces_.refill(epoch);
        if (!kQuickStart || listed || step >= early || !feed.leads()) {
          const bool lists = !listed;
          if (lists) {
            __syncthreads();
            cluster_.wait_for_others();
            listed = true;
            if (kQuickStart) feed.follow();
            if (known) {
              fetched_ = 1 << piece_.log_group();  // by every warp's own loads; its barrier goes to the next phase
              if (warp_ == 0 && (kAbreast ? lane_ < fetched_ : lane_ == 0)) mbarrier_arrive(query_full(lane_));
            } else {
              if (kQuickStart) index = begin_first();
              if (kQuickStart && index >= 0) {
                slice = piece_.first(worker_);
                end = piece_.end(worker_);
                unread = slice < end;
              }
              if (warp_ == 1 && pieces_.known(0).pieces > 0) touch_query(pieces_[0]);
            }
          }
          feed.prepare(max(index, 0));
          const bool waits = !waited && (halved || step >= early || !feed.is_old());
          const bool asks = kQuickStart && unread && (waits || (lists && waited));
          const char* row =
              asks ? query_row<kKind, kDim>(p_, piece_.request, piece_.kv_head, min(g_, p_.rows - 1)) : nullptr;
          // Teams: a row tile of the first query a warp.
          const bool has_query = kTeams && waits && pieces_.known(0).pieces > 0;
          const char* team_row = nullptr;
          if (kTeams && has_query && warp_ < kRowTiles) {
            const Row& first = pieces_[0];
            team_row = query_row<kKind, kDim>(p_, first.request, first.kv_head,
                                              min(first_row_ + kRowTile * warp_ + g_, p_.rows - 1));
          }
          // The slice behind the early ones follows at once: its addresses are made before the wait.
          const bool pushes = kQuickStart && waits && step < kStages && feed.plain(following);
          if constexpr (kPaced) {
            if (waits && step > p_.early_slices) feed.touch_keys();
          }
          if (waits) pdl_wait();
          waited |= waits;
          if (asks) load_query(row);
          if (pushes) {
            feed.push(ring, following);
            ring.advance();
            ++step;
          }
          if (has_query) load_first_query(team_row);
          if (warp_ == 0 && waited) fetch_queries();
          // Before many more slices are asked for, all of the query is.
          if (kTeams && !kKeysFirst && waits && pieces_[0].count >= 2 * kStages * kWorkers) __syncthreads();
          if (warp_ == kDecodeWarps - 1 && !touched && feed.final()) {
            pieces_.touch(cta, max(index, 0) / kDecodeEpoch, lane_);
            touched = true;
          }
          chores = !waited || (pushes && feed.ended());
          if (pushes) continue;
        }
      }
      if (step >= kStages) {
        if (slice >= end) {
          if (index >= 0) finish();
          bool any;
          do {  // goes past pieces that are other warps' alone, but stops for an epoch's chores
            any = next(++index);
          } while (kSolos && any && !mine() && index % kDecodeEpoch != 0);
          if (!any) break;
          slice = piece_.first(worker_);
          end = piece_.end(worker_);
          chores = warp_ == 0 || !feed.final();
          continue;
        }
        if (kQuickStart && unread) {
          load_rows(index, true);
          unread = false;
        }
        if constexpr (kTeams) {
          own_.attend(slice * Row::kUnit, ring, early_keys, [&] { feed.push_keys(ring); });
        } else {
          own_.attend(slice * Row::kUnit, ring);
        }
        slice += piece_.step();
      }
      if (kTeams && early_keys) {
        if (step < kStages && !halved) feed.push_keys(ring);
        halved = kKeysFirst && !waited;
        if (halved) {
          chores = true;  // the wait
          continue;
        }
        feed.push_values(ring);
      } else {
        feed.push(ring);
      }
      chores |= feed.ended();
      ring.advance();
      ++step;
    }
    cluster_.finish();
  }

 private:
  __device__ __forceinline__ uint32_t query_full(int32_t slot) const { return base_ + kSmem.walk + slot * 8; }
  __device__ __forceinline__ uint32_t merge_free() const { return query_full(kQueryBarriers); }
  __device__ __forceinline__ uint32_t cluster_full() const { return query_full(kQueryBarriers + 1); }
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
        const Row& piece = pieces_[index];
        bulk_load(query_at(slot) + row * kQueryPitch,
                  query_row<kKind, kDim>(p_, piece.request, piece.kv_head, first_row_ + row), bytes, query_full(slot));
      }
    }
    fetched_ = min(fetched_, end);
  }

  // Asks for the first piece's query, a row tile a warp: for its beginning a shorter way than bulk copies. Until then
  // the words lie where the output will.
  __device__ __forceinline__ void load_first_query(const char* row) {
    if constexpr (kTeams) {
      if (warp_ < kRowTiles) {
        QueryRow<kDim> query;
        read_query<kKind, kDim>(
            p_, [&](int offset) { return *reinterpret_cast<const uint4*>(row + offset); },
            first_row_ + kRowTile * warp_ + g_ < p_.rows, t_, query);
#pragma unroll
        for (int i = 0; i < kDim / 8; ++i) own_.out_[i / 8][i / 4 % 2][i % 4] = __uint_as_float(query.words[i]);
      }
      if (warp_ == 0 && lane_ == 0) mbarrier_arrive(query_full(0));  // its barrier goes to the next phase
      fetched_ = 1;
      loaded_ = true;
    }
  }

  // Takes up this warp's first piece before the wait, all but its query, where it is known without going past others'
  // barriers: one of the pieces that begin the list, up to the first that all warps share. Returns its index, else -1.
  __device__ __forceinline__ int32_t begin_first() {
    const int32_t known = min(pieces_.known(0).pieces, kDecodeEpoch);
    if (known == 0) return -1;
    const unsigned shared = ~__ballot_sync(kAllLanes, lane_ < known && pieces_[lane_].solo >= 0);
    const int32_t solos = __ffs(static_cast<int>(shared)) - 1;
    const int32_t grouped = kAbreast ? 1 << pieces_[0].log_group() : 1;
    fetched_ = max(solos, grouped);  // by their warps' own loads; their barriers go to the next phase
    if (warp_ == 0 && lane_ < fetched_) mbarrier_arrive(query_full(lane_));
    if (solos > 0 && warp_ >= solos) return -1;
    const int32_t index = solos > 0 ? warp_ : pieces_[0].number_of(warp_);
    piece_ = pieces_[index];
    own_.begin(piece_.high, piece_.limit);
    return index;
  }

  // Asks for this lane's part of a query row, as it lies in memory.
  __device__ __forceinline__ void load_query(const char* row) {
    QueryRow<kDim> query;
    read_query<kKind, kDim>(
        p_, [&](int offset) { return *reinterpret_cast<const uint4*>(row + offset); }, g_ < p_.rows, t_, query);
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) own_.fragment_[0][i] = query.words[i];
  }

  // Brings the first query's lines (the beginnings of its rows) into L2 before it may be read.
  __device__ __forceinline__ void touch_query(const Row& piece) {
    if (lane_ >= min(kRowTiles * kRowTile, p_.rows - first_row_)) return;
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
    load_rows(index, kTeams && loaded_);
    loaded_ = false;
    if (kQueryInSmem) query_limit_ = index + kQueryDepth + 1;  // every warp has passed load_rows's barrier
    own_.begin(piece_.high, piece_.limit);
    return true;
  }

  // Makes fragments of the piece's query: from shared memory, or, where it is `loaded`, from fragment_ itself.
  __device__ __forceinline__ void load_rows(int32_t index, bool loaded) {
    float scale = p_.scale;
    if (p_.k_scale != nullptr && !p_.per_token_scale) scale *= p_.k_scale[piece_.kv_head * p_.k_scale_head_stride];
    const int32_t slot = index % kQueryDepth;
    if (!loaded) mbarrier_wait(query_full(slot), static_cast<uint32_t>((index / kQueryDepth) & 1));
    if constexpr (kQueryInSmem) {
      // One warp a row tile. The barrier of the merge before is behind every warp's last reading.
      if (warp_ < kRowTiles) {
        uint32_t fragment[kDim / 8];
        float factor;
        if constexpr (kTeams) {
#pragma unroll
          for (int i = 0; i < kDim / 8; ++i) fragment[i] = __float_as_uint(own_.out_[i / 8][i / 4 % 2][i % 4]);
        }
        load_row_tile(warp_, slot, loaded, fragment, factor);
        own_.store_fragment(warp_, fragment);
        if (t_ == 0) own_.store_factor(kRowTile * warp_ + g_, factor * scale);
      }
      wait_for_all();
    } else {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        float factor;
        load_row_tile(n, slot, loaded, own_.fragment_[n], factor);
        // Lane (g, t) holds row g; scores of rows 2t and 2t + 1 lie in lane (g, t).
        own_.factor_[2 * n] = scale * __shfl_sync(kAllLanes, factor, 8 * t_);
        own_.factor_[2 * n + 1] = scale * __shfl_sync(kAllLanes, factor, 8 * t_ + 4);
      }
    }
  }

  // A row tile's fragments; `factor` of row g.
  __device__ __forceinline__ void load_row_tile(int32_t n, int32_t slot, bool loaded, uint32_t (&fragment)[kDim / 8],
                                                float& factor) {
    const int32_t own = kRowTile * n + g_, row = first_row_ + own;
    QueryRow<kDim> query;
    if (loaded) {
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) query.words[i] = fragment[i];
    } else {
      const uint32_t from = query_at(slot) + own * kQueryPitch;
      read_query<kKind, kDim>(p_, [&](int offset) { return lds128(from + offset); }, row < p_.rows, t_, query);
    }
    query_fragment<kKind, kDim>(p_, query, fragment, factor);
    if (p_.q_scale != nullptr && row < p_.rows) {
      const RowPlace place = row_place(p_, piece_.kv_head, row);
      const int64_t token = static_cast<int64_t>(piece_.request) * p_.q_len + place.token;
      factor *= p_.q_scale[token * p_.q_scale_token_stride + place.head * p_.q_scale_head_stride];
    }
  }

  // Writes the piece's result.
  __device__ __forceinline__ void finish() {
    if (kAbreast && !mine()) return;
    // Of a group of eight a warp has a whole piece.
    const bool alone = kSolos && (piece_.solo >= 0 || (kAbreast && piece_.log_group() == kLogWorkers));
    if (!alone) {
      merge();
    } else if (mine()) {
      if constexpr (kSolos) write_solo();
    }
  }

  // Whether this warp has a part in the current piece.
  __device__ __forceinline__ bool mine() const { return !kSolos || piece_.has(warp_); }

  // A solo piece's output, from registers.
  __device__ __forceinline__ void write_solo() {
    constexpr int kElements = Layout::kValueElements;
    float l[2];
    own_.row_sums(0, l[0], l[1]);
    const float v_scale = p_.v_scale != nullptr ? p_.v_scale[piece_.kv_head * p_.v_scale_head_stride] : p_.v_factor;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t row = 2 * t_ + i;
      if (row >= p_.rows) continue;
      const OutputPlace to = output_place(p_, piece_.request, piece_.kv_head, row);
      const float factor = output_factor(p_, to, own_.reference_[i], l[i], v_scale, p_.sinks != nullptr);
#pragma unroll
      for (int m = 0; m < kOutTiles; ++m) {
        const int32_t d = m / (kElements / 2) * 8 * kElements + kElements * g_ + 2 * (m % (kElements / 2));
        store_pair(p_, to.element + d, own_.out_[m][0][i] * factor, own_.out_[m][0][i + 2] * factor);
      }
      if (p_.lse != nullptr && g_ == 0) store_lse(p_, to, own_.reference_[i], l[i]);
    }
  }

  // Adds the workers' results, one row tile after the other (of teams all at once), and writes them.
  __device__ __forceinline__ void merge() {
    const int32_t tiles = min(kRowTiles, p_.row_tiles - group_ * kRowTiles);
#pragma unroll 1
    for (int32_t n = 0; n < tiles; n += kMerged) {
      // What was merged before has been read by every warp.
      if (merged_ > 0) mbarrier_wait(merge_free(), static_cast<uint32_t>((merged_ - 1) & 1));
      ++merged_;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        if (kTeams || i == n) put(i, kTeams ? i : 0);  // registers have no run-time index
      }
      wait_for_all();
      if constexpr (kTeams) {
        own_.template add_columns<kTilePitch>(group_ * kRowTiles, tiles, piece_.slot, piece_.request, piece_.kv_head);
      } else {
        if constexpr (kAbreast) {
          if (piece_.group > 0) {
            merge_group();
            mbarrier_arrive(merge_free());
            return;
          }
        }
        for (int32_t vector = static_cast<int32_t>(threadIdx.x); vector < 2 * kDim * min(kMerged, tiles);
             vector += kDecodeThreads) {
          const int32_t buffer = vector / (2 * kDim), position = vector % (2 * kDim);
          const int32_t row_tile = group_ * kRowTiles + n + buffer;
          float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f), ml = make_float4(kNoMax, 0.0f, kNoMax, 0.0f);
          sum_of_workers<kWorkers>(buffer, position, 0, 0, o, ml);
          if constexpr (kCluster == kDecodeCouple) {
            if (coupled_ && !cluster_.add(position, o, ml)) continue;
          }
          if (piece_.slot < 0 || coupled_) {
            store_result(p_, result_place(p_, piece_.request, piece_.kv_head, row_tile, position), piece_.kv_head, o,
                         ml);
          } else if constexpr (kCluster > kDecodeCouple) {
            cluster_.push(position, o, ml);
          } else if (row_tile * kRowTile + 2 * (position & 3) < p_.rows) {
            const int64_t at = static_cast<int64_t>(piece_.slot) * p_.row_tiles + row_tile;
            p_.partial[at * (2 * kDim) + position] = o;
            if (position < 4) p_.partial_ml[at * 4 + position] = ml;
          }
        }
      }
      mbarrier_arrive(merge_free());  // every lane for itself: racecheck doesn't follow one that speaks for its warp
    }
  }

  // Of a group, whose pieces are whole.
  __device__ __forceinline__ void merge_group() {
    const int32_t log_group = piece_.log_group(), first_head = piece_.kv_head - piece_.number();
#pragma unroll 1
    for (int32_t vector = static_cast<int32_t>(threadIdx.x); vector < 2 * kDim << log_group; vector += kDecodeThreads) {
      const int32_t number = vector / (2 * kDim), position = vector % (2 * kDim), kv_head = first_head + number;
      float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f), ml = make_float4(kNoMax, 0.0f, kNoMax, 0.0f);
      sum_of_workers<kWorkers / 2>(0, position, number, log_group, o, ml);
      store_result(p_, result_place(p_, piece_.request, kv_head, 0, position), kv_head, o, ml);
    }
  }

  // What all warps have stored is there. Of teams it waits twice: racecheck takes a barrier of a block behind its
  // teams' named ones for none (tests/racecheck_barriers.cu).
  __device__ __forceinline__ void wait_for_all() {
    __syncthreads();
    if (kTeams) __syncthreads();
  }

  // This warp's result of row tile n into a merge buffer, at its worker's place in the order of the slices. A worker
  // that had none puts zeros.
  __device__ __forceinline__ void put(int n, int buffer) {
    float s0, s1;
    own_.row_sums(n, s0, s1);
    const int32_t place = piece_.place(worker_), part = warp_ % kShare;
    const uint32_t at = base_ + kSmem.merge + buffer * kMergeBytes + place * (kOutTiles * kTilePitch) +
                        part * (Attention::kOutTiles * kTilePitch) + lane_ * 16;
    // Of a team's sums a copy is stored: as operands of this store ptxas would keep them elsewhere than wgmma has them,
    // and move all of them before and behind each slice.
    const float one = kTeams ? __uint_as_float(0x3f800000u | lane_zero()) : 1.0f;
#pragma unroll
    for (int m = 0; m < Attention::kOutTiles; ++m) {
      uint32_t o[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) o[i] = __float_as_uint(own_.out_[m][n][i] * one);
      sts128(at + m * kTilePitch, make_uint4(o[0], o[1], o[2], o[3]));
    }
    if (g_ == 0) {
      sts128(base_ + kSmem.pairs + ((buffer * kDecodeWarps + place * kShare + part) * 4 + t_) * 16,
             make_uint4(__float_as_uint(own_.reference_[2 * n]), __float_as_uint(s0),
                        __float_as_uint(own_.reference_[2 * n + 1]), __float_as_uint(s1)));
    }
  }

  // Adds vector `position` of all workers, or of those that share piece `number` of a group (kMost at most), in the
  // order of their slices. (Of teams: add_columns().)
  template <int kMost>
  __device__ __forceinline__ void sum_of_workers(int32_t buffer, int32_t position, int32_t number, int32_t log_group,
                                                 float4& o, float4& ml) {
    constexpr int kElements = Layout::kValueElements;
    const int32_t d = 2 * (position >> 2);
    const int32_t tile = d / (8 * kElements) * (kElements / 2) + d % kElements / 2;
    const uint32_t merge = base_ + kSmem.merge + buffer * kMergeBytes + tile * kTilePitch +
                           (4 * (d / kElements % 8) + (position & 3)) * 16;
    const uint32_t all_pairs = base_ + kSmem.pairs + buffer * (kDecodeWarps * 64) + (position & 3) * 16;
    // All are asked for at once.
    float4 pairs[kMost], outputs[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int32_t worker = kMost < kWorkers ? number + (i << log_group) : i;
      pairs[i] = make_float4(kNoMax, 0.0f, kNoMax, 0.0f);
      outputs[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (kMost < kWorkers && worker >= kWorkers) continue;
      pairs[i] = lds_float4(all_pairs + worker * 64);
      outputs[i] = lds_float4(merge + worker * (kOutTiles * kTilePitch));
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) ml.x = fmaxf(ml.x, pairs[i].x), ml.z = fmaxf(ml.z, pairs[i].z);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const float f0 = exp2_approx(pairs[i].x - ml.x), f1 = exp2_approx(pairs[i].z - ml.z);
      ml.y += pairs[i].y * f0, ml.w += pairs[i].w * f1;
      o.x += outputs[i].x * f0, o.y += outputs[i].y * f1, o.z += outputs[i].z * f0, o.w += outputs[i].w * f1;
    }
  }

  const DecodeParams& p_;
  const int32_t warp_, worker_, lane_;
  const int32_t g_, t_;
  const int32_t group_, first_row_;
  const uint32_t base_;  // shared address
  Pieces pieces_;
  Row piece_;                                        // the current one
  int32_t fetched_ = 0, query_limit_ = kQueryDepth;  // queries of pieces that are, and may be, asked for
  bool loaded_ = false;                              // of teams: the next piece's query lies where the output will
  bool coupled_ = false;                             // see is_couple()
  int32_t merged_ = 0;                               // row tiles that went through the merge buffer
  Attention own_;                                    // this warp's part
  const ClusterSum<kDim, kCluster> cluster_;
};

}  // namespace hpc::attention
