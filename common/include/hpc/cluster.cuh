// Thread block clusters: ranks, barriers, and stores into another CTA's shared memory. Cluster addresses are 32 bits
// wide and come from cluster_address().
//
// A split sum over a cluster: every CTA owns a part of the tile and an mbarrier that expects the bytes of all ranks'
// partials of that part; each CTA pushes with store_async and leaves when its own barrier has completed, so nobody
// exits while somebody still writes to it. All mbarriers must be initialised before the first push:
// mbarrier_init_fence() by the thread that initialised them, cluster_arrive_relaxed() early, cluster_wait() before the
// push. The owner's mbarrier_wait() needs no wider scope than its CTA: an asynchronous store is performed in its shared
// memory before the barrier counts it.
#pragma once

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

// Arrives and makes this thread's earlier writes (to shared memory too) visible to who waits.
__device__ __forceinline__ void cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
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

// Arrives at an mbarrier of a CTA of the cluster. It orders this thread's earlier accesses within its own CTA alone:
// with a release over the cluster the compiler waits for all memory accesses of the thread, over the GPU. Enough where
// what was done before are reads that have returned (operands of products that were waited for), as of a stage given
// back.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}

// Reads an int from another CTA's shared memory.
__device__ __forceinline__ int32_t load_cluster_s32(uint32_t address) {
  int32_t value;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// Stores 16 bytes in another CTA (both are cluster addresses there) and reports them to its mbarrier.
__device__ __forceinline__ void store_async_16(uint32_t address, uint32_t barrier, float4 v) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(address),
      "r"(barrier), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

}  // namespace hpc
