// Thread block clusters: ranks, barriers, stores into another CTA's shared memory, and copies that arrive in several
// CTAs at once. Cluster addresses are 32 bits wide and come from cluster_address().
//
// A split sum over a cluster: every CTA owns a part of the tile and an mbarrier that expects the bytes of all ranks'
// partials of that part; each CTA pushes with store_async and leaves when its own barrier has completed, so nobody
// exits while somebody still writes to it. All mbarriers must be initialised before the first push:
// mbarrier_init_fence() by the thread that initialised them, cluster_arrive_relaxed() early, cluster_wait() before the
// push. The owner's mbarrier_wait() needs no wider scope than its CTA: an asynchronous store is performed in its shared
// memory before the barrier counts it.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace hpc {

// Rank of this CTA in its cluster; 0 where the kernel was launched without clusters.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all CTAs arrive once and wait once. The relaxed arrival orders nothing but what a fence before it
// does.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address in CTA `rank` of what lies at `smem` in this one.
__device__ __forceinline__ uint32_t cluster_address(uint32_t smem, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem), "r"(rank));
  return address;
}

// Stores 16 bytes in another CTA (both are cluster addresses there) and reports them to its mbarrier.
__device__ __forceinline__ void store_async_16(uint32_t address, uint32_t barrier, float4 v) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(address),
      "r"(barrier), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

// Arrives once at an mbarrier of any CTA of the cluster, to say that this thread has finished reading something.
// Relaxed: a release at cluster scope costs a fence of the whole GPU, and finished reads need none.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A tensor copy that arrives at the same offset in every CTA of `mask`, and completes on the mbarrier at the same offset
// in each of them.
__device__ __forceinline__ void tma_load_3d_multicast(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int c0,
                                                      int c1, int c2, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "h"(mask)
      : "memory");
}

}  // namespace hpc
