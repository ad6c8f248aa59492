// Stand-in for hpc/mbarrier.cuh.
#pragma once

#include "emulation.hpp"

namespace hpc {

inline uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - moe::raw);
}
inline void mbarrier_init(uint32_t barrier, uint32_t count) {
  emulation::mbarrier_init(barrier, static_cast<int>(count));
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) {
  emulation::mbarrier_arrive(barrier, 0);
}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  emulation::mbarrier_arrive(barrier, static_cast<int>(bytes));
}
inline void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes) {
  emulation::mbarrier_expect(barrier, static_cast<int>(bytes));
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!emulation::mbarrier_done(barrier, parity)) emulation::yield();
}
inline bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  return emulation::mbarrier_done(barrier, parity);
}
inline void fence_proxy_async() {}
inline void named_barrier_sync(int id, int threads) {
  emulation::barrier_sync(id, threads);
}

}  // namespace hpc
