// Emulation of the grouped GEMM kernels on a CPU: their own sources, compiled by the host's C++ compiler with CUDA's
// headers, a thread of a block as a fiber, blocks one after the other, those of a cluster side by side.
//
// Copies are asynchronous and arrive in scrambled order, as late as the barriers allow; until then their place holds
// 0xFF (NaN). A warpgroup's products are computed when it waits for them, from what shared memory then holds: operands
// that were given back too early are wrong. Noticed besides wrong results: deadlocks, too many arrivals at a barrier,
// misaligned or outlying shared addresses, copies and products that nobody waits for, threads that end without
// pdl_wait. Not emulated: time, the memory model (a missing fence), how tensor cores round their sums, limits of
// registers, PTX that is no function of hpc/ (the test takes it out, or puts arithmetic in its place).
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#undef __shared__
#define __shared__ static  // one block at a time; the test writes `extern __shared__` as `extern`
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __forceinline__
#define __forceinline__ inline

using std::max;
using std::min;

extern dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace hpc::moe {
extern uint8_t raw[];  // the kernels' dynamic shared memory
}

namespace emulation {

extern bool clusters;  // whether blocks run in clusters of two
extern int fault;      // number of the planted fault that is on; 0: none

// Runs `body` once for each thread of each block; `of_two`: in clusters of two blocks.
void run(unsigned grid, int threads, const std::function<void()>& body, bool of_two = false);

// For the current thread:
int lane();
void yield();
void check(bool ok, const char* what);  // ends the process where it is not
uint8_t* shared(uint32_t address, size_t bytes);
uint32_t exchange(uint32_t value, int from);  // all lanes of the warp meet
void barrier_sync(int id, int threads);
void barrier_arrive(int id, int threads);
void mbarrier_init(uint32_t address, int count);
void mbarrier_arrive(uint32_t address, int bytes);
void mbarrier_expect(uint32_t address, int bytes);
bool mbarrier_done(uint32_t address, uint32_t parity);
void copy(uint32_t to, const void* from, int size, int bytes);  // cp.async
void arrive_after_copies(uint32_t barrier);
void bulk_copy(uint32_t to, std::vector<uint8_t> contents, uint32_t barrier);  // the copy engine's
void products(std::function<void()> compute);                                  // wgmma
void commit_products();
void wait_for_products(size_t pending);
void cluster_arrive();
void cluster_wait();
void cluster_mbarrier_arrive(uint32_t address, unsigned rank);
void peer_bulk_copy(uint32_t to, std::vector<uint8_t> contents, uint32_t barrier);
void predecessor_ended();

}  // namespace emulation

inline void __syncthreads() {
  emulation::barrier_sync(0, static_cast<int>(blockDim.x));
}
inline void __syncwarp() {
  emulation::exchange(0, 0);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = emulation::exchange(bits, lane & 31);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return __shfl_sync(0u, value, emulation::lane() ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int delta) {
  const int lane = emulation::lane();
  return __shfl_sync(0u, value, lane >= delta ? lane - delta : lane);
}
inline uint32_t __ballot_sync(unsigned, bool vote) {
  uint32_t votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= static_cast<uint32_t>(__shfl_sync(0u, vote ? 1 : 0, lane)) << lane;
  return votes;
}
inline int __popc(uint32_t bits) {
  return __builtin_popcount(bits);
}
inline int __ffs(int bits) {
  return __builtin_ffs(bits);
}
template <class T>
T atomicAdd(T* to, T value) {
  return std::exchange(*to, *to + value);
}
template <class T>
T atomicOr(T* to, T value) {
  return std::exchange(*to, *to | value);
}
inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float __expf(float x) {
  return std::exp(x);
}
