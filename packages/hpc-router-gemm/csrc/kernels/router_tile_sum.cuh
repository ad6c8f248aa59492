// The end of router_tile.cuh: what a consumer warpgroup does with its sums.
//
// A block is 64 rows x 8 tokens, one float4 (quad) a thread: {row, token}, {row, token + 1}, {row + 8, token}, {row +
// 8, token + 1}. Block index, in each token group: row group * NT / 8 + token block. In a split sum block b is rank
// b % split's, its block b / split; every rank sends it there, the owner adds them in the order of ranks and stores.
// There a thread has four rows of one token instead, so that 16 bytes are stored at once and 16 threads store 256 in a
// row.
#pragma once

#include "hpc/cluster.cuh"
#include "kernels/router_tile_load.cuh"

namespace hpc::router {

// Stores quads of one thread.
struct TileStore {
  float* y;  // at this thread's first row and token
  int64_t stride;
  int64_t tokens_left;
  int rows_left;
  bool whole;  // the tile has no row or token outside

  // `lane_row`: of each 8, the row that this thread has.
  __device__ __forceinline__ TileStore(const TileParams& p, int row0, int rows, int64_t token0, int tokens, int thread,
                                       int lane_row) {
    const int lane = thread % 32;
    const int row = row0 + thread / 32 * 16 + lane_row;
    const int64_t token = token0 + 2 * (lane % 4);
    stride = p.y_stride;
    y = p.y + token * stride + row;
    rows_left = p.n - row;
    tokens_left = p.m - token;
    whole = row0 + rows <= p.n && token0 + tokens <= p.m;
  }
  __device__ __forceinline__ float* at(int row_group, int token_block) const {
    return y + 8 * token_block * stride + 64 * row_group;
  }
  // `target` is at(row_group, token_block).
  __device__ __forceinline__ void put(float* target, int row_group, int token_block, float4 v) const {
    if (whole) {
      target[0] = v.x;
      target[8] = v.z;
      target[stride] = v.y;
      target[stride + 8] = v.w;
      return;
    }
    const int64_t tokens = tokens_left - 8 * token_block;
    const int rows = rows_left - 64 * row_group;
    if (tokens > 0) {
      if (rows > 0) target[0] = v.x;
      if (rows > 8) target[8] = v.z;
    }
    if (tokens > 1) {
      if (rows > 0) target[stride] = v.y;
      if (rows > 8) target[stride + 8] = v.w;
    }
  }
};

__device__ __forceinline__ float4 add(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// A quad for `slot`, an address in shared memory: of this CTA where `own`, else of CTA `rank`, whose barrier counts it.
__device__ __forceinline__ void send_quad(bool own, uint32_t slot, uint32_t barrier, uint32_t rank, float4 v) {
  asm volatile(
      "{\n.reg .pred own;\nsetp.ne.b32 own, %0, 0;\n"
      "@own st.shared.v4.f32 [%1], {%4, %5, %6, %7};\n"
      "@!own st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%2], {%4, %5, %6, %7}, [%3];\n}\n" ::
          "r"(static_cast<int>(own)),
      "r"(slot), "r"(cluster_address(slot, rank)), "r"(cluster_address(barrier, rank)), "f"(v.x), "f"(v.y), "f"(v.z),
      "f"(v.w)
      : "memory");
}

// Stores four rows of one token from each thread: 16 threads have the 64 rows of a block.
struct RowStore {
  float* y;  // at this thread's first row and token
  int64_t stride;
  int64_t tokens_left;
  int rows_left;
  bool vector;  // the tile has no row outside, and 16 bytes are aligned

  __device__ __forceinline__ RowStore(const TileParams& p, int row0, int rows, int64_t token0, int thread) {
    const int row = row0 + thread % 16 * 4;
    const int64_t token = token0 + thread / 16;
    stride = p.y_stride;
    y = p.y + token * stride + row;
    rows_left = p.n - row;
    tokens_left = p.m - token;
    const bool aligned = ((reinterpret_cast<uintptr_t>(p.y) | static_cast<uintptr_t>(stride) * 4) & 15) == 0;
    vector = aligned && row0 + rows <= p.n;
  }
  __device__ __forceinline__ float* at(int row_group, int token_block) const {
    return y + 8 * token_block * stride + 64 * row_group;
  }
  // `target` is at(row_group, token_block).
  __device__ __forceinline__ void put_vector(float* target, int token_block, float4 v) const {
    if (tokens_left > 8 * token_block) *reinterpret_cast<float4*>(target) = v;
  }
  __device__ __forceinline__ void put(float* target, int row_group, int token_block, float4 v) const {
    if (vector) return put_vector(target, token_block, v);
    if (tokens_left <= 8 * token_block) return;
    const int rows = rows_left - 64 * row_group;
    if (rows > 0) target[0] = v.x;
    if (rows > 1) target[1] = v.y;
    if (rows > 2) target[2] = v.z;
    if (rows > 3) target[3] = v.w;
  }
};

// For consumer kGroup, whose place in the tile and share of the blocks are constants: the code runs once a CTA, and
// what it computes about addresses would take longer than what it moves.
template <int WM, int WK, int WN, int NT, Weight kWeight, int kGroup>
struct TileEnd {
  using Shape = TileShape<WM, WK, WN, NT, kWeight>;
  using Place = TilePlace<Shape>;
  static constexpr int kRowGroup = kGroup % WM;
  static constexpr int kPartner = WK == 1 ? 0 : kGroup / WM;                          // of the k groups
  static constexpr int kTokenBlock = WN == 1 ? 0 : kGroup / WM * Shape::kTokens / 8;  // first of the sums'
  static constexpr int kBlocks = Shape::kTokens / 8;
  static constexpr int kSumBlocks = WM * kBlocks;  // of a split sum, and the first of them
  static constexpr int kFirst = kRowGroup * kBlocks;
  static constexpr int kTokenGroup = WN == 1 ? 0 : kGroup / WM;
  // The blocks that are this consumer's when the k groups have exchanged theirs.
  static constexpr int kBegin = WK == 2 && kPartner == 1 ? kBlocks / 2 : 0;
  static constexpr int kEnd = WK == 2 && kPartner == 0 ? kBlocks / 2 : kBlocks;

  const TileParams& p;
  const TileMemory& memory;
  const int thread;

  __device__ __forceinline__ TileEnd(const TileParams& p, const TileMemory& memory, int thread)
      : p(p), memory(memory), thread(thread) {}

  // Where the quad of `thread` lies in a block that is sent: turned within each eight, so that a warp meets no bank
  // twice, be it that it writes quads or that it reads rows.
  static __device__ __forceinline__ uint32_t quad_offset(int thread) {
    const int g = thread / 4 % 8;
    const int turn = (Shape::kSplit ? g / 4 : g / 2 % 2) * 4 + thread / 32;
    return (thread ^ turn) * 16;
  }
  // Rows 4 (thread % 16) and up of token thread / 16 of a block: `odd` are the second and fourth of them, or, in the
  // order of tile_lane_row<false>(), the third and fourth.
  struct RowOffset {
    uint32_t even, odd;
  };
  static __device__ __forceinline__ RowOffset row_offset(int thread) {
    const int q = thread % 16, t = thread / 16;
    const uint32_t slot = (t / 2) ^ (q % 2 * 4 + q / 4);
    const uint32_t at = q / 4 * 512 + q % 2 * (Shape::kSplit ? 256 : 128) + q / 2 % 2 * 8 + t % 2 * 4;
    return {at + slot * 16, at + (slot ^ 4) * 16};
  }
  static __device__ __forceinline__ float4 load_rows(uint32_t block, RowOffset offset) {
    constexpr int kNext = Shape::kSplit ? 128 : 256;
    const auto load = [&](uint32_t at) { return __uint_as_float(load_shared_word(block + at)); };
    const float a = load(offset.even), b = load(offset.odd);
    const float c = load(offset.even + kNext), d = load(offset.odd + kNext);
    return Shape::kSplit ? make_float4(a, b, c, d) : make_float4(a, c, b, d);
  }

  static __device__ __forceinline__ float4 quad(const float (&sum)[Shape::kTokens / 2], int b) {
    return make_float4(sum[4 * b], sum[4 * b + 1], sum[4 * b + 2], sum[4 * b + 3]);
  }

  __device__ __forceinline__ void finish(float (&sum)[Shape::kTokens / 2]) const {
    if constexpr (WK == 2) exchange_groups(sum);
    const int row0 = Place::expert_tile() * Shape::kRows;
    const int64_t token0 = static_cast<int64_t>(Place::token_tile()) * NT;
    if (p.split == 1) {
      const TileStore store(p, row0, Shape::kRows, token0, NT, thread, tile_lane_row<Shape::kSplit>(thread % 32));
      const auto store_all = [&] {
#pragma unroll
        for (int b = kBegin; b < kEnd; ++b) {
          store.put(store.at(kRowGroup, kTokenBlock + b), kRowGroup, kTokenBlock + b, quad(sum, b));
        }
      };
      if (store.whole) {
        store_all();
      } else {
        store_all();
      }
      return;
    }
    // Everybody has finished with its stages (relaxed: they were only read), and its barrier exists. Where the first
    // token group's sums lie apart it need not wait for that.
    const bool apart = p.sums_offset > 0;
    if (!apart || WN == 2) cluster_arrive_relaxed();
    if (!apart || kTokenGroup == 1) cluster_wait();
    add_ranks(RowStore(p, row0, Shape::kRows, token0, thread), sum);
    if (apart && WN == 2 && kTokenGroup == 0) cluster_wait();
  }

  __device__ __forceinline__ void add_ranks(const RowStore& store, float (&sum)[Shape::kTokens / 2]) const {
    if (store.vector) {
      if (split_is(2)) return sum_split<2>(store, sum);
      if constexpr (WN == 2) {
        if (split_is(3)) return sum_split<3>(store, sum);
      }
      if (split_is(4)) return sum_split<4>(store, sum);
      if (split_is(8)) return sum_split<8>(store, sum);
      if constexpr (Shape::kConsumers == 1) {
        if (split_is(16)) return sum_split<16>(store, sum);
      }
    }
    sum_any_split(store, sum);
  }

  // Where this token group's sums lie, and the barrier that counts them.
  __device__ __forceinline__ uint32_t sums(uint32_t part_bytes) const {
    if (WN == 1 || kTokenGroup == 0) return memory.stages + p.sums_offset;
    return memory.stages + (p.sums_offset > 0 ? 0 : p.split * part_bytes);
  }
  // Of a rank's blocks from `half` on, or of those before.
  __device__ __forceinline__ uint32_t barrier(int block, int half) const {
    return memory.sums_barrier + kTokenGroup * 16 + (block < half ? 8 : 0);
  }

  // Compares one by one: the compiler would make a jump of them whose table it reads from memory that is not cached.
  __device__ __forceinline__ bool split_is(int split) const {
    int value;
    asm volatile("mov.u32 %0, %1;" : "=r"(value) : "r"(p.split));
    return value == split;
  }

  // The k groups exchange halves of their sums over the stages.
  __device__ __forceinline__ void exchange_groups(float (&sum)[Shape::kTokens / 2]) const {
    const uint32_t mine = memory.stages + (kRowGroup * 128 + thread) * 16;
    constexpr int kStride = WM * kSumBlockBytes;
    named_barrier_sync(1, 128 * Shape::kConsumers);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (b < kBegin || b >= kEnd) store_shared_quad(mine + b * kStride, quad(sum, b));
    }
    named_barrier_sync(1, 128 * Shape::kConsumers);
#pragma unroll
    for (int b = kBegin; b < kEnd; ++b) {
      const float4 v = load_shared_quad(mine + b * kStride);
      sum[4 * b] += v.x;
      sum[4 * b + 1] += v.y;
      sum[4 * b + 2] += v.z;
      sum[4 * b + 3] += v.w;
    }
  }

  // The common splits, of tiles without a row outside.
  template <int kSplit>
  __device__ __forceinline__ void sum_split(const RowStore& store, const float (&sum)[Shape::kTokens / 2]) const {
    constexpr int kPartBytes = (kSumBlocks + kSplit - 1) / kSplit * kSumBlockBytes;
    constexpr int kMost = (kEnd - kBegin + kSplit - 1) / kSplit;  // blocks of a rank
    constexpr int kHalf = Shape::kSumHalves ? kMost / 2 : 0;
    const int rank = Place::rank();
    const uint32_t sums = this->sums(kPartBytes);
    const uint32_t mine = sums + quad_offset(thread) + rank * kPartBytes;
#pragma unroll
    for (int b = kBegin; b < kEnd; ++b) {
      const int owner = (kFirst + b) % kSplit;
      const int block = (kFirst + b) / kSplit;
      send_quad(owner == rank, mine + block * kSumBlockBytes, barrier(block, kHalf), Place::cluster_rank(owner),
                quad(sum, b));
    }
    named_barrier_sync(2 + kGroup, 128);  // other threads read what this one wrote of this rank's own blocks
    const int first = kBegin + (rank + kSplit - (kFirst + kBegin) % kSplit) % kSplit;
    if (first >= kEnd) return;
    const uint32_t source = sums + (kFirst + first) / kSplit * kSumBlockBytes;
    float* const target = store.at(kRowGroup, kTokenBlock + first);
    const int64_t next = 8 * kSplit * store.stride;
    const RowOffset offset = row_offset(thread);
    const auto add_blocks = [&]<int kFrom, int kTo>() {
      if constexpr (kFrom < kTo) {
        mbarrier_wait(barrier(kFrom, kHalf), 0);
        float4 parts[kTo - kFrom][kSplit];
#pragma unroll
        for (int i = kFrom; i < kTo; ++i) {
#pragma unroll
          for (int r = 0; r < kSplit; ++r) {
            const int at = first + i * kSplit < kEnd ? i : kFrom;
            parts[i - kFrom][r] = load_rows(source + at * kSumBlockBytes + r * kPartBytes, offset);
          }
        }
#pragma unroll
        for (int i = kFrom; i < kTo; ++i) {
          float4 v = parts[i - kFrom][0];
#pragma unroll
          for (int r = 1; r < kSplit; ++r) v = add(v, parts[i - kFrom][r]);
          if (first + i * kSplit < kEnd) store.put_vector(target + i * next, kTokenBlock + first + i * kSplit, v);
        }
      }
    };
    add_blocks.template operator()<0, kHalf>();
    add_blocks.template operator()<kHalf, kMost>();
  }

  __device__ __forceinline__ void sum_any_split(const RowStore& store, const float (&sum)[Shape::kTokens / 2]) const {
    const int rank = Place::rank();
    const int split = p.split;
    const uint32_t part_bytes = p.sum_part * kSumBlockBytes;
    const int half = Shape::kSumHalves ? p.sum_part / 2 : 0;
    const uint32_t sums = this->sums(part_bytes);
    const uint32_t mine = sums + quad_offset(thread) + rank * part_bytes;
    int owner = (kFirst + kBegin) % split;
    int index = (kFirst + kBegin) / split;
#pragma unroll
    for (int b = kBegin; b < kEnd; ++b) {
      send_quad(owner == rank, mine + index * kSumBlockBytes, barrier(index, half), Place::cluster_rank(owner),
                quad(sum, b));
      if (++owner == split) owner = 0, ++index;
    }
    int b = kBegin + (rank + split - (kFirst + kBegin) % split) % split;
    uint32_t source = sums + (kFirst + b) / split * kSumBlockBytes;
    named_barrier_sync(2 + kGroup, 128);
    if (b >= kEnd) return;
    const RowOffset offset = row_offset(thread);
    if constexpr (!Shape::kSumHalves) mbarrier_wait(barrier(0, 0), 0);
#pragma unroll 1
    for (int block = 0; b < kEnd; b += split, source += kSumBlockBytes, ++block) {
      if constexpr (Shape::kSumHalves) mbarrier_wait(barrier(block, half), 0);
      float4 v = load_rows(source, offset);
#pragma unroll 4
      for (int r = 1; r < split; ++r) v = add(v, load_rows(source + r * part_bytes, offset));
      store.put(store.at(kRowGroup, kTokenBlock + b), kRowGroup, kTokenBlock + b, v);
    }
  }
};

}  // namespace hpc::router
