// The choice of experts: the k best of each row of scores [m, n], and their weights. route.py words the contract.
//
// Order   keys are 32-bit unsigned: an fp32 value's bits made monotone, NaN below -inf, 0 for experts that cannot be
//         chosen. Equal keys go to the lower id. Without a bias the raw scores are compared, else probability + bias.
// Small   (n <= 1,024, k <= 32, at most 32 groups) one warp a token, expert i in lane i % 32, all in registers; each
//         choice is one warp maximum of keys and one minimum of ids, and only the chosen lane looks for its next best.
// Large   one CTA a token; the i-th choice is the largest (key, id) below the one before, so nothing is marked, and any
// n
//         and k do. Sums run in a fixed order in both.
// PDL     everything read was written by the predecessor: wait first.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hpc/pdl.cuh"
#include "kernels/params.hpp"

namespace hpc::router {

constexpr int kTopkWarps = 4;      // small: tokens of a CTA
constexpr int kTopkThreads = 256;  // large
constexpr int kTopkSmallExperts = 1024;
constexpr int kTopkSmallChoices = 32;
constexpr int kTopkSmallGroups = 32;

__device__ __forceinline__ uint32_t topk_key(float value) {
  if (isnan(value)) return 1;
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 becomes +0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFF, v, i));
  return v;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) v += __shfl_xor_sync(0xFFFFFFFF, v, i);
  return v;
}

template <int Items>
__global__ void __launch_bounds__(32 * kTopkWarps) router_topk_small_kernel(const TopkParams p) {
  pdl_wait();
  pdl_trigger();
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kTopkWarps + threadIdx.x / 32;
  if (token >= p.m) return;
  const float* scores = p.scores + token * p.n;
  float probability[Items];
  uint32_t key[Items];
  float largest = -INFINITY;
#pragma unroll
  for (int j = 0; j < Items; ++j) {
    const int i = j * 32 + lane;
    probability[j] = i < p.n ? scores[i] : -INFINITY;
    key[j] = i < p.n ? topk_key(probability[j]) : 0;
    largest = fmaxf(largest, probability[j]);
  }
  if (p.sigmoid) {
#pragma unroll
    for (int j = 0; j < Items; ++j) probability[j] = 1.0f / (1.0f + expf(-probability[j]));
  } else {
    largest = warp_max(largest);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < Items; ++j) {
      probability[j] = expf(probability[j] - largest);
      sum += j * 32 + lane < p.n ? probability[j] : 0.0f;
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int j = 0; j < Items; ++j) probability[j] /= sum;
  }

  if (p.bias != nullptr) {
#pragma unroll
    for (int j = 0; j < Items; ++j) {
      const int i = j * 32 + lane;
      if (i < p.n) key[j] = topk_key(probability[j] + p.bias[i]);
    }
  }

  if (p.num_groups > 1) {
    // Lane g keeps the value of group g: the sum of its two best.
    const int size = p.n / p.num_groups;
    float group_value = 0.0f;
    for (int g = 0; g < p.num_groups; ++g) {
      uint32_t first = 0, second = 0;
      float first_value = 0.0f, second_value = 0.0f;
#pragma unroll
      for (int j = 0; j < Items; ++j) {
        const int i = j * 32 + lane;
        if (i >= g * size && i < (g + 1) * size) {
          const float value = p.bias != nullptr ? probability[j] + p.bias[i] : probability[j];
          const uint32_t k = topk_key(value);
          if (k > first) {
            second = first, second_value = first_value;
            first = k, first_value = value;
          } else if (k > second) {
            second = k, second_value = value;
          }
        }
      }
      const uint32_t best = __reduce_max_sync(0xFFFFFFFF, first);
      const int winner = __ffs(__ballot_sync(0xFFFFFFFF, first == best)) - 1;
      const float best_value = __shfl_sync(0xFFFFFFFF, first_value, winner);
      if (lane == winner) first = second, first_value = second_value;
      const uint32_t next = __reduce_max_sync(0xFFFFFFFF, first);
      const int runner_up = __ffs(__ballot_sync(0xFFFFFFFF, first == next)) - 1;
      const float next_value = __shfl_sync(0xFFFFFFFF, first_value, runner_up);
      if (lane == g) group_value = best_value + next_value;
    }
    const uint32_t group_key = lane < p.num_groups ? topk_key(group_value) : 0;
    uint32_t left = group_key;
    uint32_t chosen = 0;
    for (int i = 0; i < p.topk_groups; ++i) {
      const uint32_t best = __reduce_max_sync(0xFFFFFFFF, left);
      const int winner = __ffs(__ballot_sync(0xFFFFFFFF, left == best)) - 1;
      chosen |= 1u << winner;
      if (lane == winner) left = 0;
    }
#pragma unroll
    for (int j = 0; j < Items; ++j) {
      const int i = j * 32 + lane;
      if (i < p.n && (chosen >> (i / size) & 1) == 0) key[j] = 0;
    }
  }

  // This lane's best: the smallest j among equal keys is the smallest id.
  uint32_t best_key = 0;
  int best_j = 0;
  const auto find_best = [&] {
    best_key = key[0];
    best_j = 0;
#pragma unroll
    for (int j = 1; j < Items; ++j) {
      if (key[j] > best_key) best_key = key[j], best_j = j;
    }
  };
  find_best();
  int my_id = 0;
  float my_weight = 0.0f;
  float total = 0.0f;
  for (int i = 0; i < p.k; ++i) {
    const uint32_t best = __reduce_max_sync(0xFFFFFFFF, best_key);
    const unsigned candidate = best_key == best ? best_j * 32 + lane : 0xFFFFFFFFu;
    const int id = static_cast<int>(__reduce_min_sync(0xFFFFFFFF, candidate));
    float weight = 0.0f;
    if (lane == id % 32) {
#pragma unroll
      for (int j = 0; j < Items; ++j) {
        if (j == best_j) {
          weight = probability[j];
          key[j] = 0;
        }
      }
      find_best();
    }
    weight = __shfl_sync(0xFFFFFFFF, weight, id % 32);
    total += weight;
    if (lane == i) my_id = id, my_weight = weight;
  }
  if (lane < p.k) {
    if (p.renormalize) my_weight = total == 0.0f ? 0.0f : my_weight / total;
    p.ids[token * p.k + lane] = my_id;
    p.weights[token * p.k + lane] = my_weight * p.scale;
  }
}

// A candidate of a search: larger keys first, then lower ids.
struct TopkBest {
  uint32_t key;
  uint32_t id;
  __device__ __forceinline__ bool before(const TopkBest& other) const {
    return key > other.key || (key == other.key && id < other.id);
  }
};

// The first in order over the CTA, in all threads. `scratch` has a place for each warp.
__device__ __forceinline__ TopkBest cta_best(TopkBest mine, TopkBest* scratch) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    const TopkBest other = {__shfl_xor_sync(0xFFFFFFFF, mine.key, i), __shfl_xor_sync(0xFFFFFFFF, mine.id, i)};
    if (other.before(mine)) mine = other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = mine;
  __syncthreads();
  for (int w = 0; w < kTopkThreads / 32; ++w) {
    if (scratch[w].before(mine)) mine = scratch[w];
  }
  return mine;
}

// Dynamic shared memory: one float a group where there are groups.
__global__ void __launch_bounds__(kTopkThreads) router_topk_large_kernel(const TopkParams p) {
  pdl_wait();
  pdl_trigger();
  extern __shared__ float group_values[];
  __shared__ TopkBest scratch[kTopkThreads / 32];
  __shared__ float sums[kTopkThreads / 32];
  const int64_t token = blockIdx.x;
  const float* scores = p.scores + token * p.n;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  float largest = -INFINITY;
  float sum = 0.0f;
  if (!p.sigmoid) {
    for (int i = threadIdx.x; i < p.n; i += kTopkThreads) largest = fmaxf(largest, scores[i]);
    largest = warp_max(largest);
    if (lane == 0) sums[warp] = largest;
    __syncthreads();
    for (int w = 0; w < kTopkThreads / 32; ++w) largest = fmaxf(largest, sums[w]);
    __syncthreads();
    for (int i = threadIdx.x; i < p.n; i += kTopkThreads) sum += expf(scores[i] - largest);
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < kTopkThreads / 32; ++w) sum += sums[w];
  }
  const auto probability = [&](int i) {
    return p.sigmoid ? 1.0f / (1.0f + expf(-scores[i])) : expf(scores[i] - largest) / sum;
  };
  const auto value = [&](int i) { return p.bias != nullptr ? probability(i) + p.bias[i] : probability(i); };

  const int size = p.n / p.num_groups;
  TopkBest last_group = {0, 0};  // the last group chosen; all before it in order are chosen too
  if (p.num_groups > 1) {
    for (int g = threadIdx.x; g < p.num_groups; g += kTopkThreads) {
      uint32_t first = 0, second = 0;
      float first_value = 0.0f, second_value = 0.0f;
      for (int i = g * size; i < (g + 1) * size; ++i) {
        const float v = value(i);
        const uint32_t key = topk_key(v);
        if (key > first) {
          second = first, second_value = first_value;
          first = key, first_value = v;
        } else if (key > second) {
          second = key, second_value = v;
        }
      }
      group_values[g] = first_value + second_value;
    }
    __syncthreads();
    TopkBest last = {0xFFFFFFFFu, 0};
    for (int i = 0; i < p.topk_groups; ++i) {
      TopkBest best = {0, 0xFFFFFFFFu};
      for (uint32_t g = threadIdx.x; g < static_cast<uint32_t>(p.num_groups); g += kTopkThreads) {
        const TopkBest candidate = {topk_key(group_values[g]), g};
        if (last.before(candidate) && candidate.before(best)) best = candidate;
      }
      last = cta_best(best, scratch);
    }
    last_group = last;
  }

  TopkBest last = {0xFFFFFFFFu, 0};
  float total = 0.0f;
  for (int i = 0; i < p.k; ++i) {
    TopkBest best = {0, 0xFFFFFFFFu};
    for (uint32_t e = threadIdx.x; e < static_cast<uint32_t>(p.n); e += kTopkThreads) {
      if (p.num_groups > 1) {
        const uint32_t g = e / size;
        if (last_group.before({topk_key(group_values[g]), g})) continue;
      }
      const TopkBest candidate = {topk_key(p.bias != nullptr ? value(e) : scores[e]), e};
      if (last.before(candidate) && candidate.before(best)) best = candidate;
    }
    last = cta_best(best, scratch);
    const float weight = probability(static_cast<int>(last.id));
    total += weight;
    if (threadIdx.x == 0) {
      p.ids[token * p.k + i] = static_cast<int32_t>(last.id);
      p.weights[token * p.k + i] = weight;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.k; i += kTopkThreads) {
    float weight = p.weights[token * p.k + i];
    if (p.renormalize) weight = total == 0.0f ? 0.0f : weight / total;
    p.weights[token * p.k + i] = weight * p.scale;
  }
}

}  // namespace hpc::router
