// Grouped GEMM of the experts, second (gate-up) and third (down) of the four kernels: weights as M, tokens as N;
// or, by block in larger calls, tokens as M (grouped_tokens.cuh).
//
// Grid: one CTA an SM, persistent. 384 threads:
//   warps 0-3, 4-7   two consumer warpgroups (grouped_consume.cuh); each has one unit of the task and multiplies two
//                    m64 tiles of it: gate-up: 64 columns of I (64 gate rows, then their 64 up rows); down: 128 of H;
//   warps 8-11       producers (grouped_produce.cuh): find the CTA's tasks; bring rows of B, gate-up by gathering
//                    tokens through the routing index by cp.async into the 128-byte swizzle, down (rows of h are
//                    neighbours) by TMA, and the scales; a warp each issues the TMA copies of weights and rows of a
//                    stage; one thread publishes each task.
// A task (grouped_tasks.cuh) is a token tile of an expert and one or two units, half a unit (gate-up, per tensor), or
// one unit and two token tiles or more (kTall); those of one expert and unit are neighbours, so that their weights come
// from L2 after the first. Shared memory: 4 to 6 stages (32 KB weights + rows of B: 16, 8 or 4 KB, as the call's token
// tiles are at most 128, 64 or 32 rows), scales of each stage, epilogue buffers, published tasks, barriers. Barriers:
// full[s] (the publishing thread's arrival and the bytes of all, one arrival a producer thread, when its cp.async have
// landed), empty[s] (one a consumer warp). Before the first stage of a task its TurnTask is written; the publishing
// thread's arrival releases it. Gate-up by block runs in clusters of two where a scale group's two units may be tasks
// of two CTAs (kExchange).
//
// kClusters: two neighbouring CTAs whose tasks have the same expert and units load each unit once, for both; their
// empty[s] count the consumer warps of both, and both take the same number of stages (kIdle).
// kTriples (gate-up, per tensor, in clusters): a task is three units and a tile of at most 96 rows; a warpgroup has one
// unit and half of the third, its three m64 tiles behind each other in each of three stages of 60 KB.
//
// K order: 128 bytes a stage; sums are promoted to fp32 registers every scale group (128, or 64 of I), per tensor every
// 128, or not at all (down of up to kDirectK of K); gate-up of Config::exact sums in fp32 (grouped_exact.cuh). It
// depends on nothing but the Config, so a row has the same bits in every tile width. Rows of a tile beyond its count
// hold whatever shared memory held: they only reach their own columns, which nobody stores. PDL: gate-up fills its
// first stages with the weights of its likely first task, then waits (the index is its predecessor's); a wrong guess
// costs those stages. Down reads the index (two kernels old) and fills its first stages with weights before it waits
// for h.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <type_traits>

#include "hpc/cluster.cuh"
#include "hpc/cp_async.cuh"
#include "hpc/mbarrier.cuh"
#include "hpc/pdl.cuh"
#include "hpc/tma.cuh"
#include "hpc/wgmma_ss.cuh"
#include "kernels/params.hpp"
#include "kernels/quantise.cuh"

namespace hpc::moe {

enum class Gemm { kUp, kDown };

constexpr int kMaxWidth = 128;                      // widest token tile
constexpr int kTripleWidth = kTripleRule.max_rows;  // of gate-up's tasks of three units (kTriples)
constexpr int kUnitBytes = 128 * 128;               // weights of a unit in a stage: two m64 tiles of 128 bytes a row
constexpr int kConsumers = 256, kProducers = 128;
constexpr int kGemmThreads = kConsumers + kProducers;
constexpr int kOutRow = 64 + 16;  // bytes of a staged output row (64 e4m3), padded against conflicts
constexpr uint32_t kNoRow = ~0u;
constexpr int kTurns = 8;                        // published tasks: more than producers can be ahead (a ring and one)
constexpr int kKeptStages = kKeptColumns / 128;  // of K, of rows that are kept
constexpr int kDirectK = 1536;  // of K that the tensor core sums by itself (per tensor, down): off by 0.0015 in rms

// A task as its CTA sees it.
struct TurnTask {
  int32_t row;            // first row of the token tile
  float scale;            // per tensor: of the expert's weights and of B
  uint16_t expert, unit;  // expert: with kShared; unit: the first
  uint8_t rows, width;    // of the tile; width 0: no more tasks
  uint8_t units;          // 1 or 2: warpgroup g has unit + g; 0: nothing to do; kHalfUnit and + 1: half of a unit
  uint8_t second_rows;    // not 0: one unit and two tiles, warpgroup 1 has the one that follows, with so many rows;
                          // kKept: pairs of units that follow each other
};
static_assert(sizeof(TurnTask) == 16);

// kClusters: in TurnTask::expert, where the other CTA of the cluster has another tile of the same expert and units.
// And a whole task of stages in which there is nothing to do, where only the other has a task (rows 0, units 0).
constexpr uint16_t kShared = 1 << 15, kIdle = 1 << 14;

// With kShared, tokens as M: the two tiles are three blocks of 64 rows (the last may be less), of which each CTA has
// one and half of the third, half the columns of each unit. Its rows here: 64 of its own, then the third's.
constexpr uint16_t kThree = 1 << 13, kFlags = kShared | kIdle | kThree;

// In TurnTask::units: the first 32 columns of a gate-up unit, in one m64 tile: 8 gate rows and their 8 up rows for each
// warp; + 1: the other 32.
constexpr int kHalfUnit = 3;

// kTall: tiles of a task of one unit, and their rows, both warpgroups' together, which lie behind the unit.
constexpr int tall_tiles(int width) {
  return width == 64 ? 3 : 4;
}
constexpr int tall_rows(int width) {
  return tall_tiles(width) * width;
}

// Sizes that follow from the widest token tile of a call: the narrower, the more stages. kKept: rows of B lie apart.
template <int kWidth, bool kKept = false>
struct Stages {
  static_assert(kWidth == 32 || kWidth == 64 || kWidth == kTripleWidth || kWidth == 128);
  static constexpr int kUnits = kWidth == kTripleWidth ? 3 : 2;
  static constexpr int kCount = kWidth == kTripleWidth ? 3 : kWidth == 128 ? 4 : kWidth == 64 ? 5 : 6;
  static constexpr int kBytes = kUnits * kUnitBytes + (kKept ? 0 : kWidth * 128);
  static constexpr int kScales = 2 * kWidth + 8;  // floats: B [2 groups or tiles][width], weights [2][4]
};

// Rows of B that are kept: of two tasks, so that the next one's come early.
template <int kWidth>
struct KeptRows {
  alignas(1024) uint8_t rows[2][kKeptStages][kWidth * 128];
};
struct NoRows {};

template <int kWidth, bool kKept = false>
struct GemmSmem : std::conditional_t<kKept, KeptRows<kWidth>, NoRows> {
  using Stage = Stages<kWidth, kKept>;

  alignas(1024) uint8_t stage[Stage::kCount][Stage::kBytes];
  alignas(16) float scale[Stage::kCount][Stage::kScales];
  alignas(16) uint8_t out[2][kWidth * kOutRow];  // gate-up: one a warpgroup
  float amax[2][8][kWidth];                      // gate-up: by parity of the task, a row a warp
  float inverse[2][kWidth];                      // gate-up: one a warpgroup
  float fixed_inverse;                           // gate-up, per tensor: factor that quantises
  alignas(16) TurnTask turns[kTurns];
  alignas(8) uint64_t full[Stage::kCount];
  uint64_t empty[Stage::kCount];
  uint64_t read[2];       // kKept, by parity of the task: its rows of B; one arrival a consumer warp
  uint64_t exchanged[2];  // kExchange, kThrees (by parity): the other CTA's largest magnitudes have come
  uint16_t token[kWidth < kTripleWidth ? tall_rows(kWidth) : 2 * kWidth];  // gate-up: tokens of the producers' tiles
};
template <int kWidth, bool kKept = false>
constexpr int kGemmSmemBytes = sizeof(GemmSmem<kWidth, kKept>) + 1024;  // the start is aligned by hand
static_assert(kGemmSmemBytes<32> <= 232448 && kGemmSmemBytes<64> <= 232448 && kGemmSmemBytes<128> <= 232448 &&
                  kGemmSmemBytes<kTripleWidth> <= 232448 && kGemmSmemBytes<128, true> <= 232448,
              "227 KB a CTA");

// Where a ring of kCount stages stands.
template <int kCount>
class StageRing {
 public:
  __device__ __forceinline__ uint32_t stage() const { return stage_; }
  __device__ __forceinline__ uint32_t phase() const { return phase_; }
  __device__ __forceinline__ void advance() {
    if (++stage_ == kCount) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  uint32_t stage_ = 0, phase_ = 0;
};

// A kernel. Elements of I that share a scale are 64 (kHalf) or 128; gate-up's K groups are 128 of H always. kExact
// (gate-up): sums are fp32 (grouped_exact.cuh). kTokens: tokens are M (grouped_tokens.cuh).
// kClusters: of two CTAs, which load a pair of units once where their tasks have the same. kKept (down, tokens as M):
// a task is a token tile and several pairs of units one after the other, for which the rows of B are loaded once.
// kThrees (tokens as M, in clusters): tasks of experts of three blocks of 64 rows are kThree. kSpread (down, tokens as
// M, not in clusters): of a tile of 65 to 96 rows a warpgroup has a unit, of all rows.
template <Gemm kTheGemm, Quant kTheQuant, bool kTheHalf, int kTheWidth, bool kTheExact = false, bool kTheTokens = false,
          bool kTheClusters = false, bool kTheKept = false, bool kTheThrees = false, bool kTheSpread = false>
struct Traits {
  static constexpr Gemm kGemm = kTheGemm;
  static constexpr Quant kQuant = kTheQuant;
  static constexpr bool kHalf = kTheHalf;
  static constexpr int kWidth = kTheWidth;
  static constexpr bool kExact = kTheExact;
  static constexpr bool kTokens = kTheTokens;
  static constexpr bool kClusters = kTheClusters;
  static constexpr bool kKept = kTheKept;
  static constexpr bool kThrees = kTheThrees;
  static_assert(!kThrees || (kTokens && kClusters));
  static constexpr bool kSpread = kTheSpread;
  static_assert(!kSpread || (kTokens && !kClusters && kGemm == Gemm::kDown));
  static constexpr bool kTriples = kWidth == kTripleWidth;
  static_assert(!kTriples || (kGemm == Gemm::kUp && kQuant == Quant::kTensor && kClusters));
  using Smem = GemmSmem<kWidth, kKept>;
  using Sizes = Stages<kWidth, kKept>;
  static constexpr int kUnits = Sizes::kUnits, kRowsAt = kUnits * kUnitBytes;  // units of a task; rows of B in a stage
  static constexpr int kStages = Sizes::kCount, kStageBytes = Sizes::kBytes;
  using Ring = StageRing<kStages>;

  static constexpr bool kBlock = kQuant == Quant::kBlock, kTensor = kQuant == Quant::kTensor;
  static constexpr int kGroups = kBlock && kHalf && kGemm == Gemm::kDown ? 2 : 1;  // scale groups a stage
  static constexpr int kRowBlock = kGemm == Gemm::kUp && kHalf ? 64 : 128;         // weight rows that share a scale
  // Gate-up: what is split of a pair in the last round. Scale groups of 128 columns of I span both units (kSpans): they
  // are tasks of the two CTAs of a cluster, which tell each other their largest magnitudes (kExchange), or, where
  // tokens are M, stay together and the tile's rows are split. Per tensor each unit may be split again.
  static constexpr bool kSpans = kGemm == Gemm::kUp && kBlock && !kHalf;
  static constexpr bool kExchange = kSpans && !kTokens, kRowHalves = kSpans && kTokens;
  // Where tasks of pairs or their halves are shared out unevenly, CTAs with fewer have fewer stages on their way, so
  // that the others get more of memory's rate: they could not use all of it when those are done.
  static constexpr bool kLevel = kSpans && !kClusters;
  // Stages of weights behind the ring's first that are brought to L2 right after the wait.
  static constexpr int kAhead = !kClusters && !kTokens && kWidth < kTripleWidth ? 3 : 0;
  static constexpr bool kHalfUnits = kGemm == Gemm::kUp && kTensor && !kClusters;
  // Narrowest N at which the consumers multiply a tile, with weights as M.
  static constexpr int kLeastN = kExact ? 16 : kQuant == Quant::kNone ? 32 : kWidth == 128 ? 96 : kWidth;
  static constexpr bool kTwoTiles = kGemm == Gemm::kUp && !kSpans && !kTriples;  // tasks of one unit and two tiles
  // An expert of very many rows has tasks of one unit and several tiles (tall_tiles), which the warpgroups share.
  static constexpr bool kTall = kGemm == Gemm::kUp && kTensor && !kExact && kWidth < kTripleWidth;
  static constexpr int kTallTiles = tall_tiles(kWidth);
  static constexpr int kMaxN = kTall ? tall_rows(kWidth) / 2 : kWidth;  // most rows of a warpgroup
  static constexpr int kTaskRows = kTall ? tall_rows(kWidth) : kWidth;
  static_assert(!kTall || kUnitBytes + kTaskRows * 128 <= kStageBytes);
  // Tasks of one unit and one tile: the warpgroups share its rows, as if they were two tiles'. With fp32 sums, where
  // products take the time.
  static constexpr bool kShareRows = kExact && kTwoTiles;
  static constexpr bool kOddHalves = kExact && kHalfUnits;  // halves of units where their number is odd, too
};

// Stores of y. kKeep: its lines leave L2 last, so that nothing of it is written to memory before the reduction has
// dropped it. A policy costs where it gains nothing: kernels of their own.
template <bool kKeep>
__device__ __forceinline__ uint64_t out_policy() {
  uint64_t policy = 0;
  if constexpr (kKeep) asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
template <bool kKeep>
__device__ __forceinline__ void store_out(void* to, const uint2& v, uint64_t policy) {
  if constexpr (kKeep) {
    asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(to), "r"(v.x), "r"(v.y), "l"(policy)
                 : "memory");
  } else {
    *static_cast<uint2*>(to) = v;
  }
}
template <bool kKeep>
__device__ __forceinline__ void store_out(void* to, const uint4& v, uint64_t policy) {
  if constexpr (kKeep) {
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w), "l"(policy)
                 : "memory");
  } else {
    *static_cast<uint4*>(to) = v;
  }
}

// kSpread: the shared row of a tile's row, and back. Of each 64 the first four eights lie at the even places, so that
// of up to 32 a thread has one row where it has room for two, in all warps alike.
template <class T>
__device__ __forceinline__ int shared_row(int row) {
  if constexpr (!T::kSpread) return row;
  return (row & ~56) | (row & 24) << 1 | (row & 32) >> 2;
}
template <class T>
__device__ __forceinline__ int row_in_tile(int shared) {
  if constexpr (!T::kSpread) return shared;
  return (shared & ~56) | (shared & 48) >> 1 | (shared & 8) << 2;
}

// Place of the scale of row r of B in a stage: a thread's rows 8 j + 2 t + c of two neighbouring j are four floats.
__device__ __forceinline__ int scale_place(int row) {
  return (row & ~15) | (row & 6) << 1 | (row & 8) >> 2 | (row & 1);
}

}  // namespace hpc::moe
