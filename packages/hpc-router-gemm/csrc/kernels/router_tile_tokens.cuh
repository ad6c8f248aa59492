// The tile kernel with tokens as the M of wgmma: y[m, n] = x[m, k] weight[n, k]^T, three terms in memory.
//
// Why     the N of wgmma is any multiple of 8, so a tile can have as many experts as give more SMs a CTA: 56, so that
//         768 x 6144 and 128 tokens have 112 CTAs, all resident in clusters of 8, where tiles of 64 experts have 96.
// Tile    kExperts experts (N) x 64 tokens (M), both from shared memory, by one consumer warpgroup. Grid, clusters,
//         pairs of token tiles, ring, sums apart and PDL as in router_tile.cuh; the producers are those of
//         router_tile_load.cuh.
// Stages  k = 64: a box of all terms and one of tokens, rows of 128 bytes in their swizzle.
// Math    a stage's 12 products on an accumulator of its own, the smaller terms first and the largest last; two
//         accumulators take turns, and one is added to the fp32 sum while the other's products run.
// PDL     the successor is let go when all but a few stages are requested. Its clusters that find room bring the first
//         weights of its other tiles to L2 while this call works off its ring: TileProducer::bring_others().
// Sum     blocks of 64 tokens x 8 experts, a quad a thread: {token, expert}, {token, expert + 1}, {token + 8, expert},
//         {token + 8, expert + 1}. Block b is rank b % split's; the thread that has a quad's place adds all ranks' in
//         their order, and four threads store 32 bytes of a token's scores.
#pragma once

#include "hpc/cluster.cuh"
#include "hpc/wgmma_ss.cuh"
#include "kernels/router_tile_load.cuh"
#include "kernels/router_tile_sum.cuh"

namespace hpc {

template <>
__device__ __forceinline__ void wgmma_ss<WgmmaType::kBf16, 56>(float (&d)[28], uint64_t a, uint64_t b,
                                                               bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %30, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n56k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, "
      "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27}, %28, %29, p, 1, 1, 0, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

}  // namespace hpc

namespace hpc::router {

template <int kExperts, Weight kWeight>
struct TokenTileShape {
  static_assert(kExperts % 8 == 0 && weight_is_split(kWeight) && weight_terms(kWeight) == 3);
  static constexpr int kTerms = 3;
  static constexpr bool kSplit = true, kChunks = true, kFloat = false, kTwoRings = false, kPairsExperts = false;
  static constexpr int kPair = weight_is_paired(kWeight) ? 2 : 1;
  static constexpr int kRows = kExperts;
  static constexpr int kTileTokens = 64, kTokens = kTileTokens;
  static constexpr int kConsumers = 1, kGroups = 1;
  static constexpr int kThreads = 128 * kConsumers + 32 * kTileFillers;
  static constexpr int kStageK = 64, kBlockK = kTileBlockK, kBlockStages = kBlockK / kStageK;
  static constexpr int kTokenBytes = kTileTokens * kStageK * 2;
  static constexpr int kBoxes = 1, kHalfBytes = 0;
  static constexpr int kTermBytes = kRows * kStageK * 2;
  static constexpr int kWeightBytes = kTerms * kTermBytes;
  static constexpr int kStageBytes = tile_stage_bytes(kRows, 1, kTileTokens, kWeight);
  static constexpr int kCopyBytes = kWeightBytes + kTokenBytes;
  static_assert(kStageBytes == kCopyBytes && kTermBytes % 1024 == 0, "swizzled rows are aligned");
  static constexpr int kAtOnce = 2;
  static constexpr int kLeft = 5;
  static constexpr int kBring = 3;  // stages: bring_others()
  static constexpr uint32_t kPace = kCopyBytes / 160;
  static constexpr int kBlocks = kRows / 8;  // of the sums
  static constexpr int kSums = 4 * kBlocks;
};

// The products, in sum[].
template <typename Shape>
__device__ __forceinline__ void multiply_tokens(const TileParams& p, const TileMemory& memory,
                                                float (&sum)[Shape::kSums]) {
  constexpr int kSums = Shape::kSums;
  const int lane = threadIdx.x % 32;
  const int total = TileBlocks(p, TilePlace<Shape>::rank()).count * Shape::kBlockStages;
  Ring ring;     // of the next stage
  int used = 0;  // slot of the next to be given back
  int refills = total - p.stages;
  const auto release = [&] {
    if (Shape::kPair == 1) {
      if (lane == 0) mbarrier_arrive(memory.empty + used * 8);
    } else if (--refills >= 0 && lane < 2) {  // to both of the pair, see multiply_terms()
      mbarrier_arrive_cluster(cluster_address(memory.empty + used * 8, (blockIdx.x & ~1) + lane));
    }
    used = used + 1 == p.stages ? 0 : used + 1;
  };

  const auto multiply = [&](float (&part)[kSums]) {
    mbarrier_wait(memory.full + ring.slot * 8, ring.phase);
    const uint32_t stage = memory.stages + ring.slot * Shape::kStageBytes;
    ring.advance(1, p.stages);
    const uint64_t weights = wgmma_descriptor(stage), x = wgmma_descriptor(stage + Shape::kWeightBytes);
    wgmma_fence(part);
    wgmma_arrive();
#pragma unroll
    for (int i = 0; i < 12; ++i) {
      const int step = i < 8 ? i / 2 : i % 4;
      const int term = i < 8 ? 2 - i % 2 : 0;
      wgmma_ss<WgmmaType::kBf16, Shape::kRows>(part, x + 2 * step, weights + term * (Shape::kTermBytes >> 4) + 2 * step,
                                               i > 0);
    }
    wgmma_commit();
  };
  const auto add = [&](float (&part)[kSums]) {
    wgmma_fence(part);
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i] += part[i];
  };
#pragma unroll
  for (int i = 0; i < kSums; ++i) sum[i] = 0.0f;
  float even[kSums], odd[kSums];
  const auto take_turn = [&](float (&now)[kSums], float (&before)[kSums]) {
    multiply(now);
    wgmma_wait<1>();
    release();
    add(before);
  };
  multiply(even);
  int turns = total - 1;
#pragma unroll 1
  while (turns > 0) {
    --turns;
    take_turn(odd, even);
    if (turns == 0) {
      wgmma_wait<0>();
      return add(odd);
    }
    --turns;
    take_turn(even, odd);
  }
  wgmma_wait<0>();
  add(even);
}

// What the consumer does with its sums.
template <typename Shape>
struct TokenTileEnd {
  using Place = TilePlace<Shape>;
  static constexpr int kBlocks = Shape::kBlocks;

  const TileParams& p;
  const TileMemory& memory;
  const int thread;
  float* y;  // at this thread's first token and expert
  int64_t tokens_left;
  int experts_left;
  bool vector;  // 8 bytes are aligned

  __device__ __forceinline__ TokenTileEnd(const TileParams& p, const TileMemory& memory, int thread)
      : p(p), memory(memory), thread(thread) {
    const int lane = thread % 32;
    const int64_t token = static_cast<int64_t>(Place::token_tile()) * Shape::kTileTokens + thread / 32 * 16 + lane / 4;
    const int expert = Place::expert_tile() * Shape::kRows + 2 * (lane % 4);
    y = p.y + token * p.y_stride + expert;
    tokens_left = p.m - token;
    experts_left = p.n - expert;
    vector = ((reinterpret_cast<uintptr_t>(p.y) | static_cast<uintptr_t>(p.y_stride) * 4) & 7) == 0;
  }

  __device__ __forceinline__ void put_pair(float* target, int experts, float a, float b) const {
    if (vector && experts > 1) {
      *reinterpret_cast<float2*>(target) = make_float2(a, b);
    } else {
      if (experts > 0) target[0] = a;
      if (experts > 1) target[1] = b;
    }
  }
  __device__ __forceinline__ void put(int block, float4 v) const {
    float* const target = y + 8 * block;
    const int experts = experts_left - 8 * block;
    if (tokens_left > 0) put_pair(target, experts, v.x, v.y);
    if (tokens_left > 8) put_pair(target + 8 * p.y_stride, experts, v.z, v.w);
  }
  static __device__ __forceinline__ float4 quad(const float (&sum)[Shape::kSums], int b) {
    return make_float4(sum[4 * b], sum[4 * b + 1], sum[4 * b + 2], sum[4 * b + 3]);
  }

  __device__ __forceinline__ void finish(const float (&sum)[Shape::kSums]) const {
    if (p.split == 1) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) put(b, quad(sum, b));
      return;
    }
    if (p.sums_offset == 0) {  // everybody has finished with its stages
      cluster_arrive_relaxed();
      cluster_wait();
    }
    if (p.split == 8) {
      add_ranks<8>(sum);
    } else if (p.split == 4) {
      add_ranks<4>(sum);
    } else {
      add_ranks<0>(sum);
    }
  }

  // kSplit 0: any.
  template <int kSplit>
  __device__ __forceinline__ void add_ranks(const float (&sum)[Shape::kSums]) const {
    const int split = kSplit > 0 ? kSplit : p.split;
    const uint32_t part_bytes =
        kSplit > 0 ? (kBlocks + kSplit - 1) / kSplit * kSumBlockBytes : p.sum_part * kSumBlockBytes;
    const int half = (kSplit > 0 ? (kBlocks + kSplit - 1) / kSplit : p.sum_part) / 2;
    const auto barrier = [&](int index) { return memory.sums_barrier + (index < half ? 8 : 0); };
    const int rank = Place::rank();
    const uint32_t sums = memory.stages + p.sums_offset + thread * 16;
    const uint32_t mine = sums + rank * part_bytes;
    int owner = 0, index = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      send_quad(owner == rank, mine + index * kSumBlockBytes, barrier(index), Place::cluster_rank(owner), quad(sum, b));
      if (++owner == split) owner = 0, ++index;
    }
    // A thread reads where it has written, of this rank's own part.
    index = 0;
#pragma unroll 1
    for (int b = rank; b < kBlocks; b += split, ++index) {
      mbarrier_wait(barrier(index), 0);
      const uint32_t source = sums + index * kSumBlockBytes;
      float4 v = load_shared_quad(source);
      if constexpr (kSplit > 0) {
        float4 parts[kSplit];
#pragma unroll
        for (int r = 1; r < kSplit; ++r) parts[r] = load_shared_quad(source + r * part_bytes);
#pragma unroll
        for (int r = 1; r < kSplit; ++r) v = add(v, parts[r]);
      } else {
#pragma unroll 4
        for (int r = 1; r < split; ++r) v = add(v, load_shared_quad(source + r * part_bytes));
      }
      put(b, v);
    }
  }
};

template <int kExperts, Weight kWeight>
__global__ void __launch_bounds__(TokenTileShape<kExperts, kWeight>::kThreads, 1)
    router_tile_tokens_kernel(const TileParams p, const __grid_constant__ CUtensorMap weight_map,
                              const __grid_constant__ CUtensorMap x_map) {
  using Shape = TokenTileShape<kExperts, kWeight>;
  using Place = TilePlace<Shape>;
  extern __shared__ uint8_t smem_raw[];
  TileMemory memory;
  memory.stages = (smem_address(smem_raw) + 1023) & ~1023u;
  memory.full = memory.stages + p.stages * Shape::kStageBytes;
  memory.empty = memory.full + kTileMaxSlots * 8;
  memory.sums_barrier = memory.empty + kTileMaxSlots * 8;
  const bool sums_apart = p.sums_offset > 0;
  const int rank = Place::rank();
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
  const bool producer = warp >= 4 * Shape::kConsumers;

  TileProducer<Shape> fill(p, warp - 4 * Shape::kConsumers, &weight_map, &x_map, memory);
  if (threadIdx.x == 32) mbarrier_init(memory.released(), 1);
  if (warp == 1 || warp == 4 * Shape::kConsumers) named_barrier_sync(1, 64);
  if (threadIdx.x % 32 == 0) {
    if (producer) {
      fill.start();
    } else if (warp == 1) {
      fill.bring_others(Shape::kBring);
    } else if (warp == 0 && p.split > 1) {
      const int owned = p.sum_blocks + (rank < p.sum_extra), half = p.sum_part / 2;
      mbarrier_init(memory.sums_barrier, 1);
      mbarrier_init(memory.sums_barrier + 8, 1);
      mbarrier_arrive_expect_tx(memory.sums_barrier, (owned - half) * (p.split - 1) * kSumBlockBytes);
      mbarrier_arrive_expect_tx(memory.sums_barrier + 8, half * (p.split - 1) * kSumBlockBytes);
      mbarrier_init_fence();
    }
  }
  __syncthreads();
  // The barriers of all ranks exist before a sum is sent, and those of pairs before weights are.
  const bool meets = sums_apart || Shape::kPair == 2;
  if (meets) cluster_arrive_relaxed();
  if (producer) {
    if (meets) cluster_wait();
    if (threadIdx.x % 32 == 0) {
      fill.run();
    } else {
      pdl_wait();
    }
    __syncwarp();
    if (!sums_apart && p.split > 1) {
      cluster_arrive_relaxed();
      cluster_wait();
    }
    return;
  }
  if (meets) cluster_wait();
  pdl_wait();
  // What the end needs comes to the constant cache meanwhile.
  asm volatile("" ::"l"(p.y), "l"(p.y_stride), "l"(p.m), "r"(p.n), "r"(p.sum_part), "r"(p.sums_offset));
  float sum[Shape::kSums];
  multiply_tokens<Shape>(p, memory, sum);

  // Anew: no register holds it during the products.
  int tid;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  TokenTileEnd<Shape>(p, memory, tid).finish(sum);
}

}  // namespace hpc::router
