// What the PTX functions of hpc/cluster.cuh, fifo.cuh, fp8.cuh, mbarrier.cuh, mma.cuh, pdl.cuh and wgmma_half.cuh do.
// Those headers come without them: the test takes every function that is PTX out of its copies. Everything else in them
// is the kernels' own. What a kernel begins to use is added here.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cfloat>

#include "block.hpp"
namespace hpc {
inline bool mbarrier_try_wait(uint32_t barrier, uint32_t parity);  // its header's mbarrier_wait calls it
}

#include "hpc/cluster.cuh"
#include "hpc/fifo.cuh"
#include "hpc/fp8.cuh"
#include "hpc/mbarrier.cuh"
#include "hpc/mma.cuh"
#include "hpc/pdl.cuh"
#include "hpc/wgmma_half.cuh"

namespace hpc {

// pdl.cuh
inline void pdl_wait() {
  emulation::wait_for_predecessor();
}
inline void pdl_trigger() {}
inline void pause(uint32_t) {}

inline void prefetch_l2(const void*) {}
inline int32_t ld_global32(const int32_t* from) {
  return *from;
}

inline uint4 ld_global128(const void* from) {
  return *static_cast<const uint4*>(from);
}

// cluster.cuh
inline uint32_t cluster_rank() {
  return static_cast<uint32_t>(emulation::cluster_rank());
}
inline void cluster_arrive_relaxed() {
  emulation::cluster_arrive();
}
inline void cluster_wait() {
  emulation::cluster_wait();
}
inline uint32_t cluster_address(uint32_t shared, uint32_t rank) {
  return emulation::cluster_address(shared, rank);
}
inline void store_async_16(uint32_t address, uint32_t barrier, float4 v) {
  emulation::store_async(address, barrier, &v);
}

// mbarrier.cuh
inline void mbarrier_init(uint32_t barrier, uint32_t count) {
  emulation::init_barrier(barrier, count);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) {
  emulation::arrive(barrier, 0);
}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  emulation::arrive(barrier, bytes);
}
inline bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  emulation::wait_barrier(barrier, parity);
  return true;
}
inline void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  emulation::bulk_copy(shared, global, bytes, barrier);
}

inline void named_barrier_sync(int id, int threads) {
  emulation::sync_threads(id, threads, false);
}
inline bool named_barrier_any(int id, int threads, bool value) {
  return emulation::sync_threads(id, threads, value);
}

// fifo.cuh
using emulation::shared_address;
inline void cp_async16(uint32_t shared, const void* global, int bytes) {
  emulation::copy_async(shared, global, 16, bytes);
}
inline void cp_async16(uint32_t shared, const void* global) {
  emulation::copy_async(shared, global, 16, 16);
}
inline void cp_async4(uint32_t shared, const void* global, int bytes) {
  emulation::copy_async(shared, global, 4, bytes);
}
inline void cp_async_commit() {
  emulation::commit_copies();
}
template <int kPending>
void cp_async_wait() {
  emulation::wait_for_copies(kPending);
}
template <typename T>
T load_shared(uint32_t shared) {
  T value;
  std::memcpy(&value, emulation::read_shared(shared, sizeof(T)), sizeof(T));
  return value;
}
inline uint4 lds128(uint32_t shared) {
  return load_shared<uint4>(shared);
}
inline uint2 lds64(uint32_t shared) {
  return load_shared<uint2>(shared);
}
inline uint32_t lds32(uint32_t shared) {
  return load_shared<uint32_t>(shared);
}
inline void sts32(uint32_t shared, uint32_t value) {
  std::memcpy(emulation::write_shared(shared, 4), &value, 4);
}
inline void sts128(uint32_t shared, uint4 value) {
  std::memcpy(emulation::write_shared(shared, 16), &value, 16);
}

// 16-bit numbers, by their bits: not every host compiler has the types.
template <Half kType>
float half_to_float(uint32_t bits) {
  if constexpr (kType == Half::kBf16) return __uint_as_float(bits << 16);
  const uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 13) * 0x1p112f));  // exact
}
template <Half kType>
uint32_t float_to_half(float value) {
  if (value != value) return 0x7fffu;
  const uint32_t bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if constexpr (kType == Half::kBf16) return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u) {  // subnormal: units of 2^-24, rounded to even by the addition
    return sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u);
  }
  return sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
}

// mma.cuh
template <Half kType>
uint32_t pack_half2(float low, float high) {
  return float_to_half<kType>(low) | float_to_half<kType>(high) << 16;
}

// Of one bf16 value of each.
template <typename Of>
uint32_t each_bf16(uint32_t a, uint32_t b, const Of& of) {
  uint32_t result = 0;
  for (int i = 0; i < 32; i += 16) result |= of(a >> i & 0xffffu, b >> i & 0xffffu) << i;
  return result;
}
inline uint32_t larger_bf16x2(uint32_t a, uint32_t b) {
  return each_bf16(a, b, [](uint32_t x, uint32_t y) {
    const uint32_t p = x & 0x7fffu, q = y & 0x7fffu, infinity = 0x7f80u;
    const uint32_t larger = p > infinity ? (q > infinity ? 0x7fffu : q) : (q > infinity || p > q ? p : q);
    return larger | ((x ^ y) & 0x8000u);
  });
}
inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  return each_bf16(a, b, [](uint32_t x, uint32_t y) {
    return float_to_half<Half::kBf16>(half_to_float<Half::kBf16>(x) * half_to_float<Half::kBf16>(y));
  });
}

// The fragments as mma.cuh describes them. Sums in double, rounded once.
template <Half kType>
void mma_m16n8k16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const uint32_t registers[6] = {a0, a1, a2, a3, b0, b1};
  uint32_t mine[12];
  for (int i = 0; i < 12; ++i) {
    mine[i] = __float_as_uint(half_to_float<kType>(registers[i / 2] >> (16 * (i % 2)) & 0xffffu));
  }
  const auto all = emulation::exchange(emulation::Meeting::kMma, mine, 12);
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int high_row = i / 2, column = 2 * t + i % 2;  // row g + 8 * high_row
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int register_of_k = k / 8, lane_of_k = k % 8 / 2;
      const uint32_t a = all[2 * (high_row + 2 * register_of_k) + k % 2][4 * g + lane_of_k];
      const uint32_t b = all[2 * (4 + register_of_k) + k % 2][4 * column + lane_of_k];
      sum += static_cast<double>(__uint_as_float(a)) * static_cast<double>(__uint_as_float(b));
    }
    c[i] = static_cast<float>(sum);
  }
}

// wgmma_half.cuh: done at once, each warp its 16 rows.
inline uint32_t lane_zero() {
  return 0;
}
inline void wgmma_arrive() {}
inline void wgmma_commit() {}
template <int kPending>
void wgmma_wait() {}
inline void fence_proxy_async() {}
template <int kTiles>
void wgmma_registers(float (&)[kTiles][4]) {}
template <Half kType, bool kByColumns, int kTiles>
void wgmma_half(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  uint32_t mine[8];
  for (int i = 0; i < 8; ++i) mine[i] = __float_as_uint(half_to_float<kType>(a[i / 2] >> (16 * (i % 2)) & 0xffffu));
  const auto all = emulation::exchange(emulation::Meeting::kMma, mine, 8);
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  const auto field = [&](int bit) { return static_cast<uint32_t>(b >> bit & 0x3fffu) << 4; };
  // The warp's reads, of each block of 8 rows a word a lane: not the one that this lane may have written itself.
  const uint32_t word = static_cast<uint32_t>(4 * (31 - emulation::lane()));
  for (int j = 0; j < kTiles; ++j) {
    for (uint32_t k = 0; k < 2; ++k) {
      emulation::read_shared(field(0) + k * field(16) + static_cast<uint32_t>(j) * field(32) + word, 4);
    }
    for (int i = 0; i < 4; ++i) {
      const int column = 2 * t + i % 2;
      double sum = accumulate ? d[j][i] : 0.0;
      for (int k = 0; k < 16; ++k) {
        const uint32_t block =
            field(0) + static_cast<uint32_t>(k / 8) * field(16) + static_cast<uint32_t>(j) * field(32);
        const int row = kByColumns ? column : k % 8, inside = kByColumns ? k % 8 : column;
        uint16_t bits;
        std::memcpy(&bits, emulation::shared_pointer(block + static_cast<uint32_t>(16 * row + 2 * inside), 2), 2);
        const uint32_t of_a = all[2 * (i / 2 + 2 * (k / 8)) + k % 2][4 * g + k % 8 / 2];
        sum += static_cast<double>(__uint_as_float(of_a)) * static_cast<double>(half_to_float<kType>(bits));
      }
      d[j][i] = static_cast<float>(sum);
    }
  }
}

inline uint32_t transpose_8x8(uint32_t value) {
  const auto all = emulation::exchange(emulation::Meeting::kTranspose, &value, 1);
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  const auto entry = [&](int row, int column) { return all[0][4 * row + column / 2] >> (16 * (column % 2)) & 0xffffu; };
  return entry(2 * t, g) | entry(2 * t + 1, g) << 16;
}

inline float exp2_approx(float x) {
  const float result = std::exp2(x);
  return result < FLT_MIN ? 0.0f : result;  // NaN stays
}
inline float log2_approx(float x) {
  return std::log2(x);
}
inline float reciprocal_approx(float x) {
  return 1.0f / x;
}

// fp8.cuh
inline void e4m3x4_to_half2x2(uint32_t bytes, uint32_t& low, uint32_t& high) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> halves = {};
    for (uint32_t code = 0; code < 256; ++code) {
      const int exponent = static_cast<int>(code >> 3 & 15u), mantissa = static_cast<int>(code & 7u);
      const float magnitude =
          exponent > 0 ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 7) : std::ldexp(mantissa / 8.0f, -6);
      halves[code] = (code & 127u) == 127u ? 0x7fffu : float_to_half<Half::kFp16>(code & 128u ? -magnitude : magnitude);
    }
    return halves;
  }();
  low = table[bytes & 255u] | table[bytes >> 8 & 255u] << 16;
  high = table[bytes >> 16 & 255u] | table[bytes >> 24] << 16;
}
inline void e4m3x4_to_bf16x2x2(uint32_t bytes, uint32_t& low, uint32_t& high) {
  uint32_t halves[2];
  e4m3x4_to_half2x2(bytes, halves[0], halves[1]);
  const auto both = [](uint32_t pair) {
    return pack_half2<Half::kBf16>(half_to_float<Half::kFp16>(pair & 0xffffu), half_to_float<Half::kFp16>(pair >> 16));
  };
  low = both(halves[0]), high = both(halves[1]);
}

}  // namespace hpc
