// Stand-in for CUDA's header: the words, vector types, intrinsics and runtime functions that the attention kernels, the
// router's choice of experts (tests/test_choice_emulated.py of the repository) and their launchers use, for a host
// compiler. block.hpp says what the emulation is and what it is not.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "block.hpp"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static  // one block at a time; the test writes `extern __shared__` as `extern`

using std::max;
using std::min;

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return {x, y, z, w};
}
inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline int __popc(uint32_t bits) {
  return __builtin_popcount(bits);
}
inline int __clz(int bits) {
  return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits));
}
inline int __ffs(uint32_t bits) {
  return __builtin_ffs(static_cast<int>(bits));
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  }
  return result;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}

inline void __syncthreads() {
  emulation::sync_block();
}
inline void __syncwarp() {
  emulation::exchange(emulation::Meeting::kSync, nullptr, 0);
}

// The shuffles, votes and reductions. Masks are always all lanes here.
template <typename T>
T shuffle(T value, int from) {
  static_assert(sizeof(T) == 4);
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t received = emulation::exchange(emulation::Meeting::kShuffle, &bits, 1)[0][from & 31];
  std::memcpy(&value, &received, 4);
  return value;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return shuffle(value, lane);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return shuffle(value, emulation::lane() ^ mask);
}
inline uint64_t __shfl_xor_sync(unsigned, uint64_t value, int mask) {
  uint32_t words[2];
  std::memcpy(words, &value, 8);
  const auto received = emulation::exchange(emulation::Meeting::kShuffle, words, 2);
  const int from = (emulation::lane() ^ mask) & 31;
  return static_cast<uint64_t>(received[1][from]) << 32 | received[0][from];
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int delta) {
  return shuffle(value, emulation::lane() >= delta ? emulation::lane() - delta : emulation::lane());
}
inline uint32_t __ballot_sync(unsigned, bool vote) {
  const uint32_t mine = vote;
  const auto votes = emulation::exchange(emulation::Meeting::kVote, &mine, 1);
  uint32_t all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= votes[0][lane] << lane;
  return all;
}
inline bool __any_sync(unsigned mask, bool vote) {
  return __ballot_sync(mask, vote) != 0;
}
// The larger of each half.
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a & 0xffff0000u, b & 0xffff0000u) | std::max(a & 0xffffu, b & 0xffffu);
}
inline int32_t __reduce_add_sync(unsigned, int32_t value) {
  const uint32_t mine = static_cast<uint32_t>(value);
  const auto values = emulation::exchange(emulation::Meeting::kReduce, &mine, 1);
  uint32_t sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += values[0][lane];
  return static_cast<int32_t>(sum);
}
inline int32_t __reduce_or_sync(unsigned, int32_t value) {
  const uint32_t mine = static_cast<uint32_t>(value);
  const auto values = emulation::exchange(emulation::Meeting::kReduce, &mine, 1);
  uint32_t sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum |= values[0][lane];
  return static_cast<int32_t>(sum);
}
inline int32_t __reduce_max_sync(unsigned, int32_t value) {
  const uint32_t mine = static_cast<uint32_t>(value);
  const auto values = emulation::exchange(emulation::Meeting::kReduce, &mine, 1);
  int32_t most = value;
  for (int lane = 0; lane < 32; ++lane) most = std::max(most, static_cast<int32_t>(values[0][lane]));
  return most;
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  const auto values = emulation::exchange(emulation::Meeting::kReduce, &value, 1);
  return *std::max_element(values[0], values[0] + 32);
}
inline int32_t atomicAdd(int32_t* to, int32_t value) {  // one thread at a time runs
  const int32_t was = *to;
  *to += value;
  return was;
}

// The runtime: one device, a Hopper with few SMs; a launch runs the whole grid before it returns.
struct CUstream_st;
using cudaStream_t = CUstream_st*;
enum cudaError_t { cudaSuccess };
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
inline const char* cudaGetErrorName(cudaError_t) {
  return "";
}
inline const char* cudaGetErrorString(cudaError_t) {
  return "";
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
// An attribute's name is its value.
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMinor = 0,
  cudaDevAttrMultiProcessorCount = 5,
  cudaDevAttrComputeCapabilityMajor = 9,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = emulation::kSharedBytes,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrL2CacheSize = 50 << 20,
};
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute;
  return cudaSuccess;
}
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributeNonPortableClusterSizeAllowed,
  cudaFuncAttributePreferredSharedMemoryCarveout
};
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, Kernel*, int, size_t smem_bytes) {
  *count = static_cast<int>(emulation::kSharedBytes / smem_bytes);
  return cudaSuccess;
}
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, Kernel*, const cudaLaunchConfig_t*) {
  *count = 66;
  return cudaSuccess;
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  unsigned of = 1;  // blocks of a cluster
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) of = config->attrs[i].val.clusterDim.x;
  }
  for (unsigned first = 0; first < gridDim.x; first += of) {
    const auto enter = [&](int rank, int thread) {
      blockIdx.x = first + static_cast<unsigned>(rank);
      threadIdx.x = static_cast<unsigned>(thread);
    };
    emulation::run_cluster(static_cast<int>(of), static_cast<int>(blockDim.x), config->dynamicSmemBytes, enter,
                           [&] { kernel(arguments...); });
  }
  emulation::end_launch();
  return cudaSuccess;
}
