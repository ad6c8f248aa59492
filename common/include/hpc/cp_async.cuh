// cp.async: copies global -> shared by ordinary threads, without registers between. They belong to the generic proxy:
// before wgmma or the copy engine reads the bytes, each copying thread waits for its copies (cp_async_wait), executes
// fence_proxy_async(), and then arrives at a barrier (mbarrier.cuh).
#pragma once

#include <cstdint>

namespace hpc {

// 16 bytes past L1 (both addresses 16-byte aligned).
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
}

// The first `bytes` (0 to 16) of 16, and zeros after them. Nothing is read beyond them.
__device__ __forceinline__ void cp_async_16_zfill(uint32_t smem, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(bytes) : "memory");
}

// 4 bytes through L1: the sector's other words are likely wanted soon.
__device__ __forceinline__ void cp_async_4(uint32_t smem, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem), "l"(global) : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Arrives at an mbarrier (an arrival that its count was initialised with) when all of this thread's earlier copies have
// landed; the thread goes on. Where the async proxy reads them (wgmma), the reader executes fence_proxy_async() between
// its wait for the barrier and the read.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until at most `Pending` of this thread's groups are unfinished.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace hpc
