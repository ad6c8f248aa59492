// A FIFO in shared memory that is private to each lane: what a lane asks for with cp.async, the same lane reads back with
// LDS.128. So there is no barrier, no swizzle, no bank conflict and no descriptor in a streaming loop, and a warp never
// waits for another. Lanes address global memory freely: any strides, any gather.
//
// A ring has kSlots slots; a slot has kVectors vectors of 16 bytes a lane, stored [slot][vector][lane]. Two rings may
// share the order of commits (attention alternates a slot of keys and a slot of values).
//
//   LaneRing<kSlots, kVectors> ring(warp's shared memory);
//   fill kSlots slots:   cp_async16(ring.in(v), address, bytes) for each v; cp_async_commit(); ring.pushed();
//   then, for each slot: cp_async_wait<slots in flight - 1>(); lds128(ring.out(v)) for each v; use the values;
//                        ring.popped(); fill the next slot and commit it (commit also where nothing is left to fetch, so
//                        that the count of pending groups stays the same).
// A slot may be filled again once instructions that use the values read from it have been issued.
//
// Measured on an H200 (134 MB, 8 warps an SM): 32 KB in flight an SM read 4.26 TB/s, 64 KB 4.37, 128 KB 4.39. Two CTAs an
// SM want at most 48 KB each. cp.async with an L2 cache policy is an illegal instruction there; L2::128B works.
#pragma once

#include <cstdint>

namespace hpc {

// Shared-memory address of a generic pointer, as ld.shared and cp.async take it.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies `bytes` (0 or 16) bytes and zero-fills the rest of 16. With 0 bytes the source is not read.
__device__ __forceinline__ void cp_async16(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// The same for 8 and 4 bytes; these pass through L1.
__device__ __forceinline__ void cp_async8(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async4(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Closes the group of this thread's copies since the last commit (an empty group is a group too).
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when at most kPending of this thread's groups are unfinished; what they wrote is then visible to this thread.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint4 lds128(uint32_t shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}

__device__ __forceinline__ void sts128(uint32_t shared, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

template <int kSlots, int kVectors>
class LaneRing {
 public:
  static constexpr int kVectorBytes = 32 * 16;  // of a warp
  static constexpr int kSlotBytes = kVectors * kVectorBytes;
  static constexpr int kBytes = kSlots * kSlotBytes;  // of a warp

  // `warp_base`: shared address of this warp's kBytes bytes, 16-byte aligned.
  __device__ __forceinline__ LaneRing(uint32_t warp_base, int lane)
      : first_(warp_base + lane * 16), in_(first_), out_(first_) {}

  __device__ __forceinline__ uint32_t in(int vector) const { return in_ + vector * kVectorBytes; }
  __device__ __forceinline__ uint32_t out(int vector) const { return out_ + vector * kVectorBytes; }
  __device__ __forceinline__ void pushed() { in_ = next(in_); }
  __device__ __forceinline__ void popped() { out_ = next(out_); }

 private:
  __device__ __forceinline__ uint32_t next(uint32_t at) const {
    if constexpr (kSlots == 1) return at;
    at += kSlotBytes;
    return at == first_ + kBytes ? first_ : at;
  }

  uint32_t first_, in_, out_;
};

}  // namespace hpc
