// The pieces of a (request, KV head) pair that has a whole cluster, added through distributed shared memory: no partial
// result in global memory, and no second kernel. Every pair of the plan, heads of one request, has one. (Clusters of
// two, of any plan: below.)
//
// CTA r of a cluster has piece r. Each adds a share of the vectors (see decode_merge.cuh) of all pieces: every CTA
// pushes its merged vectors to their owners, whose barrier counts the bytes. An owner leaves when all have come; so
// nobody writes to a CTA that has ended. A vector's pieces are added by 4 threads, each in the order of the keys, then
// in pairs.
#pragma once

#include "decode_merge.cuh"
#include "hpc/cluster.cuh"
#include "hpc/mbarrier.cuh"

namespace hpc::attention {

// What CTA number `block` of the grid has to do: its row of the map, the KV head of its cluster's pair, and how many
// pieces that has (0 where there are no tokens). none: 0 that the compiler doesn't know, see run_decode().
struct ClusterRun {
  int32_t cta, pair, pieces;
  DecodeCta run;
};
template <int kCluster>
__device__ __forceinline__ ClusterRun cluster_run(const DecodeParams& p, int32_t block, int32_t none) {
  // Pairs have as many pieces each, one behind the other in the map: all of them are cut, or none is.
  constexpr bool kOne = kCluster == kDecodeCluster;  // there is one pair alone
  const int32_t pair = kOne ? 0 : block / kCluster, rank = block % kCluster, whole = kOne ? block : pair;
  const DecodeSplit split = p.splits[pair + none];
  const bool cut = split.pieces > 0;
  ClusterRun own = {!kOne && cut ? split.first_cta + rank : whole, pair, split.pieces, {}};
  own.run = p.ctas[own.cta + none];
  if (!cut) own.pieces = (kOne ? p.ctas[none].count : own.run.count) > 0;
  if (rank >= own.pieces) own.run = {};
  return own;
}

template <int kDim, int kCluster>
class ClusterSum {
 public:
  static constexpr int kVectors = 2 * kDim / kCluster, kShares = 4, kThreads = kShares * kVectors;  // of an owner
  static constexpr int kPitch = (kCluster + 4) * 16;  // bytes of a vector's pieces, padded against bank conflicts
  static constexpr int kPairsAt = kVectors * kPitch;  // of the (max, sum) vectors
  static constexpr int kBytes = kPairsAt + 4 * kPitch;
  static_assert(kBytes == decode_cluster_bytes(kDim, kCluster) && kVectors % 4 == 0 && kCluster % kShares == 0);

  // base: shared address of kBytes bytes; barrier: of an mbarrier for one arrival. Every CTA's barrier is initialised
  // before the first push.
  __device__ __forceinline__ ClusterSum(const DecodeParams& p, uint32_t base, uint32_t barrier, const ClusterRun& own)
      : p_(p), base_(base), barrier_(barrier), kv_head_(own.pair), pieces_(own.pieces) {}

  // This thread has initialised what it had to of the barriers. All threads, then all before the first push.
  __device__ __forceinline__ void begin() const {
    __syncwarp();
    cluster_arrive_relaxed();
  }
  __device__ __forceinline__ void wait_for_others() const { cluster_wait(); }

  // This CTA's vector `position`, the results of all its workers together; and in two steps.
  __device__ __forceinline__ void push(int32_t position, const float4& o, const float4& ml) const {
    push(owner_of(position), o, ml);
  }
  struct Owner {
    uint32_t at, barrier;  // cluster addresses
    bool pairs;            // it is given rows 2t and 2t + 1 as well, t = position % 4
  };
  __device__ __forceinline__ Owner owner_of(int32_t position) const {
    const uint32_t owner = position / kVectors, inside = position % kVectors;
    return {cluster_address(base_ + cluster_rank() * 16 + inside * kPitch, owner), cluster_address(barrier_, owner),
            inside < 4};
  }
  __device__ __forceinline__ void push(const Owner& to, const float4& o, const float4& ml) const {
    store_async_16(to.at, to.barrier, o);
    if (to.pairs) store_async_16(to.at + kPairsAt, to.barrier, ml);
  }

  // One thread, behind the barrier's initialisation: announces what is pushed here.
  __device__ __forceinline__ void expect() const {
    if (pieces_ > 0) mbarrier_arrive_expect_tx(barrier_, pieces_ * (kVectors + 4) * 16);
  }

  // Adds this CTA's share and writes it; zeros where there is no piece. One piece alone has been written as it is. All
  // lanes call it together.
  __device__ __forceinline__ void finish() const {
    if (pieces_ == 1) return;
    const ResultPlace to = place();
    if (threadIdx.x == 0) expect();
    add([&](const float4& o, const float4& ml) { store_result(p_, to, kv_head_, o, ml); });
  }
  // Where this thread's vector goes.
  __device__ __forceinline__ ResultPlace place() const {
    const int32_t vector = static_cast<int32_t>(threadIdx.x) / kShares;
    return result_place(p_, 0, kv_head_, 0, static_cast<int32_t>(cluster_rank()) * kVectors + vector);
  }
  // The same without these, and of one piece too: what is to be written is given to `store`.
  template <typename Store>
  __device__ __forceinline__ void add(const Store& store) const {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    if (p_.batch == 0 || thread >= kThreads) return;
    const int32_t vector = thread / kShares, share = thread % kShares;
    if (pieces_ > 0) mbarrier_wait(barrier_, 0);
    constexpr int kLoads = kCluster / kShares;
    float4 o[kLoads], ml[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int32_t piece = kLoads * share + i;
      o[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      ml[i] = make_float4(kNoMax, 0.0f, kNoMax, 0.0f);
      if (piece < pieces_) {
        o[i] = lds_float4(base_ + vector * kPitch + piece * 16);
        ml[i] = lds_float4(base_ + kPairsAt + vector % 4 * kPitch + piece * 16);
      }
    }
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f), sum_ml = make_float4(kNoMax, 0.0f, kNoMax, 0.0f);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) sum_ml.x = fmaxf(sum_ml.x, ml[i].x), sum_ml.z = fmaxf(sum_ml.z, ml[i].z);
#pragma unroll
    for (int mask = 1; mask < kShares; mask *= 2) {
      sum_ml.x = fmaxf(sum_ml.x, __shfl_xor_sync(0xffffffffu, sum_ml.x, mask));
      sum_ml.z = fmaxf(sum_ml.z, __shfl_xor_sync(0xffffffffu, sum_ml.z, mask));
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const float f0 = exp2_approx(ml[i].x - sum_ml.x), f1 = exp2_approx(ml[i].z - sum_ml.z);
      sum_ml.y += ml[i].y * f0, sum_ml.w += ml[i].w * f1;
      sum.x += o[i].x * f0, sum.y += o[i].y * f1, sum.z += o[i].z * f0, sum.w += o[i].w * f1;
    }
#pragma unroll
    for (int mask = 1; mask < kShares; mask *= 2) {
      sum.x += __shfl_xor_sync(0xffffffffu, sum.x, mask), sum.y += __shfl_xor_sync(0xffffffffu, sum.y, mask);
      sum.z += __shfl_xor_sync(0xffffffffu, sum.z, mask), sum.w += __shfl_xor_sync(0xffffffffu, sum.w, mask);
      sum_ml.y += __shfl_xor_sync(0xffffffffu, sum_ml.y, mask),
          sum_ml.w += __shfl_xor_sync(0xffffffffu, sum_ml.w, mask);
    }
    if (share == 0) store(sum, sum_ml);
  }

 private:
  const DecodeParams& p_;
  const uint32_t base_, barrier_;
  const int32_t kv_head_, pieces_;
};

// Clusters of two CTAs of any plan, which add what is_couple() says: the first adds the second's piece to its own.
template <int kDim>
class ClusterSum<kDim, kDecodeCouple> {
 public:
  static constexpr int kBytes = (2 * kDim + 4) * 16;
  static_assert(kBytes <= decode_cluster_bytes(kDim, kDecodeHeadsCluster));

  __device__ __forceinline__ ClusterSum(const DecodeParams&, uint32_t base, uint32_t barrier, const ClusterRun&)
      : base_(base), barrier_(barrier) {}
  __device__ __forceinline__ void begin() const {
    __syncwarp();
    cluster_arrive_relaxed();
  }
  __device__ __forceinline__ void wait_for_others() const { cluster_wait(); }
  __device__ __forceinline__ void finish() const {}

  // Of a couple's piece, each thread once: this CTA's vector. True: now it is the pair's, and is to be written.
  __device__ __forceinline__ bool add(int32_t position, float4& o, float4& ml) const {
    const uint32_t at = base_ + position * 16, pairs_at = base_ + (2 * kDim + (position & 3)) * 16;
    if (cluster_rank() > 0) {
      const uint32_t barrier = cluster_address(barrier_, 0);
      store_async_16(cluster_address(at, 0), barrier, o);
      if (position < 4) store_async_16(cluster_address(pairs_at, 0), barrier, ml);
      return false;
    }
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(barrier_, kBytes);
    mbarrier_wait(barrier_, 0);
    add_result(o, ml, lds_float4(at), lds_float4(pairs_at));
    return true;
  }

 private:
  const uint32_t base_, barrier_;
};

// Without clusters.
template <int kDim>
class ClusterSum<kDim, 1> {
 public:
  __device__ __forceinline__ ClusterSum(const DecodeParams&, uint32_t, uint32_t, const ClusterRun&) {}
  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void wait_for_others() const {}
  __device__ __forceinline__ void finish() const {}
};

}  // namespace hpc::attention
