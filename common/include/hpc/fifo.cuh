// A FIFO in shared memory that is private to each lane: what a lane asks for with cp.async, the same lane reads back
// with LDS.128. So there is no barrier, no swizzle, no bank conflict and no descriptor in a streaming loop, and a warp
// never waits for another. Lanes address global memory freely: any strides, any gather.
//
// A ring has kSlots slots; a slot has kVectors vectors of 16 bytes a lane, stored [slot][vector][lane]. One pointer is
// enough, for the slot that was just read is the one to be filled next:
//
//   LaneRing<kSlots, kVectors> ring(shared address of this warp's ring.kBytes, lane);
//   kSlots times:        cp_async16(ring.at(v), address, bytes) for each v; cp_async_commit(); ring.advance();
//   then, for each slot: cp_async_wait<kSlots - 1>(); lds128(ring.at(v)) for each v; use the values; fill the same slot
//                        again and commit it (commit also where nothing is left to fetch, so that the count of pending
//                        groups stays the same); ring.advance().
// A slot may be filled in several groups (attention: keys, then values): all of them count in cp_async_wait. Fill a
// vector again only behind instructions that use what was read from it.
//
// What arrives is written to shared memory one 128-byte line of the source at a time, so a LaneRing is only fast where
// the lanes that read one line own slots in different 16-byte columns of 128 bytes (lane numbers that differ mod 8).
// Where they don't, use a WarpRing: any layout, filled by whole lines, at the price of a __syncwarp() behind
// cp_async_wait and one before a slot is filled again.
//
// Measured on an H200 (134 MB, 8 warps an SM): 32 KB in flight an SM read 4.26 TB/s, 64 KB 4.37, 128 KB 4.39. Two CTAs
// an SM want at most 48 KB each. cp.async with an L2 cache policy is an illegal instruction there; L2::128B works.
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
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns when at most kPending of this thread's groups are unfinished; what they wrote is then visible to this thread.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// One word, or four, loaded where this stands.
__device__ __forceinline__ int32_t ld_global32(const int32_t* from) {
  int32_t v;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

__device__ __forceinline__ uint4 ld_global128(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// Brings the 128-byte line of a global address into L2; harmless for data that another kernel is still to write.
__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

__device__ __forceinline__ uint4 lds128(uint32_t shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}

__device__ __forceinline__ uint2 lds64(uint32_t shared) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t lds32(uint32_t shared) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared) : "memory");
  return v;
}

__device__ __forceinline__ void sts32(uint32_t shared, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(v) : "memory");
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
  __device__ __forceinline__ LaneRing(uint32_t warp_base, int lane) : first_(warp_base + lane * 16), at_(first_) {}

  // This lane's 16 bytes of a vector of the current slot, and the slot's number.
  __device__ __forceinline__ uint32_t at(int vector) const { return at_ + vector * kVectorBytes; }
  __device__ __forceinline__ uint32_t slot() const { return (at_ - first_) / kSlotBytes; }

  __device__ __forceinline__ void advance() {
    if constexpr (kSlots > 1) {
      at_ += kSlotBytes;
      if (at_ == first_ + kBytes) at_ = first_;
    }
  }

 private:
  uint32_t first_, at_;
};

// A ring of slots that belongs to a warp, with any layout inside.
template <int kSlots, int kSlotBytes>
class WarpRing {
 public:
  static constexpr int kBytes = kSlots * kSlotBytes;  // of a warp

  __device__ __forceinline__ explicit WarpRing(uint32_t warp_base) : first_(warp_base), at_(warp_base) {}

  // Shared address of the current slot, and its number.
  __device__ __forceinline__ uint32_t at() const { return at_; }
  __device__ __forceinline__ uint32_t slot() const { return (at_ - first_) / kSlotBytes; }

  __device__ __forceinline__ void advance() {
    if constexpr (kSlots > 1) {
      at_ += kSlotBytes;
      if (at_ == first_ + kBytes) at_ = first_;
    }
  }

 private:
  uint32_t first_, at_;
};

}  // namespace hpc
