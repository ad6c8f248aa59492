// Programmatic dependent launch, device side. The rules every kernel of this project follows:
//  1. Every CTA calls pdl_wait() before it exits, empty ones too: the end of a kernel then implies the end of its
//     predecessor.
//  2. pdl_trigger() comes after pdl_wait(): a kernel that starts early finds everything older than its direct
//     predecessor complete and visible. (The kernels of decode go earlier; combine.cuh says why that is safe.)
//  3. Before pdl_wait() only constants are read (weights, the plan of this step, page ids of earlier tokens), and
//     nothing is written to global memory: the previous call may still use the workspace.
#pragma once

#include <cstdint>

namespace hpc {

// Returns when the predecessor in the stream has ended and its writes are visible. Without PDL it returns at once.
__device__ __forceinline__ void pdl_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the successor in the stream start when every CTA of this kernel has called it or exited.
__device__ __forceinline__ void pdl_trigger() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Lets so many clock cycles go by.
__device__ __forceinline__ void pause(uint32_t cycles) {
  uint32_t from, now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(from));
  do {
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  } while (now - from < cycles);
}

}  // namespace hpc
