// The choice of experts: the k best of each row of scores [m, n], and their weights. route.py words the contract.
//
// Order   keys are 32-bit unsigned: an fp32 value's bits made monotone, NaN below -inf, 0 for experts that cannot be
//         chosen. Equal keys go to the lower id. Without a bias the raw scores are compared, else probability + bias.
// Small   (n <= 1,024, k <= 32, at most 32 groups) one CTA a token. Rounds of one choice after the other would wait for
//         each other; instead everybody counts who comes before it. Of each two threads the best candidate is ranked
//         among all such: the k-th of them (there are 32 or more) is not above the k-th of all, so only candidates that
//         are not below it (k to 2 Items k) are ranked among each other, and a rank is a place in the result.
// Large   one CTA a token; the i-th choice is the largest (key, id) below the one before, so nothing is marked, and any
//         n and k do. Sums run in a fixed order in both.
// PDL     everything read was written by the predecessor: wait first.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hpc/pdl.cuh"
#include "kernels/params.hpp"

namespace hpc::router {

constexpr int kTopkThreads = 256;
constexpr int kTopkSmallExperts = 1024;
constexpr int kTopkSmallChoices = 32;
constexpr int kTopkSmallGroups = 32;

__device__ __forceinline__ uint32_t topk_key(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 becomes +0
  const uint32_t key = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return value == value ? key : 1;
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

// An fp32 value whose key this is.
__device__ __forceinline__ float topk_value(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Orders candidates: larger keys, then lower ids. Never 0.
__device__ __forceinline__ uint64_t topk_candidate(uint32_t key, int id) {
  return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(id);
}

template <int Threads, int Items>
struct TopkShared {
  float scores[Threads * Items];  // or probabilities, where those choose
  uint32_t keys[Threads * Items];
  uint64_t pairs[Threads / 2];                    // the best of each two threads
  uint64_t found[kTopkSmallChoices * 2 * Items];  // candidates that are not below `least`: k pairs have all of them
  uint64_t least;
  uint32_t groups[kTopkSmallGroups];
  uint32_t largest[Threads / 32];
  float sums[Threads / 32];
  int ids[kTopkSmallChoices];
  float weights[kTopkSmallChoices];
  int count;
};

// How many of `count` candidates, every step-th from `from` on, come before `mine`.
__device__ __forceinline__ int topk_before(const uint64_t* candidates, int from, int count, int step, uint64_t mine) {
  int before = 0;
#pragma unroll 8
  for (int i = from; i < count; i += step) before += candidates[i] > mine;
  return before;
}

// A CTA a token: thread t has experts t, t + Threads, ...
template <int Threads, int Items>
__global__ void __launch_bounds__(Threads) router_topk_small_kernel(const TopkParams p) {
  __shared__ TopkShared<Threads, Items> s;
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int64_t token = blockIdx.x;
  const auto expert = [&](int j) { return j * Threads + thread; };
  pdl_wait();
  pdl_trigger();
  const float* scores = p.scores + token * p.n;
  float score[Items];
  float bias[Items];
#pragma unroll
  for (int j = 0; j < Items; ++j) {
    score[j] = expert(j) < p.n ? scores[expert(j)] : -INFINITY;
    bias[j] = expert(j) < p.n && p.bias != nullptr ? p.bias[expert(j)] : 0.0f;
  }
  uint32_t key[Items];
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < Items; ++j) {
    key[j] = expert(j) < p.n ? topk_key(score[j]) : 0;
    most = max(most, key[j]);
    s.scores[expert(j)] = score[j];
  }
  most = __reduce_max_sync(0xFFFFFFFF, most);
  if (lane == 0) s.largest[warp] = most;
  if (thread == 0) s.count = 0, s.least = 0;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < Threads / 32; ++w) most = max(most, s.largest[w]);
  const float largest = topk_value(most);
  float sum = 0.0f;
  if (!p.sigmoid) {
#pragma unroll
    for (int j = 0; j < Items; ++j) sum += expf(score[j] - largest);
    sum = warp_sum(sum);
    if (lane == 0) s.sums[warp] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < Threads / 32; ++w) sum += s.sums[w];
  }
  const auto probability = [&](float v) { return p.sigmoid ? 1.0f / (1.0f + expf(-v)) : expf(v - largest) / sum; };

  const bool of_probabilities = p.bias != nullptr || p.num_groups > 1;
  if (of_probabilities) {
#pragma unroll
    for (int j = 0; j < Items; ++j) {
      score[j] = probability(score[j]);
      s.scores[expert(j)] = score[j];
      if (key[j] > 0 && p.bias != nullptr) key[j] = topk_key(score[j] + bias[j]);
      s.keys[expert(j)] = p.bias != nullptr ? key[j] : topk_key(score[j]);
    }
  }
  if (p.num_groups > 1) {
    __syncthreads();
    const int size = p.n / p.num_groups;
#pragma unroll 1
    for (int g = warp; g < p.num_groups; g += Threads / 32) {
      uint32_t first = 0, second = 0;
#pragma unroll 1
      for (int i = g * size + lane; i < (g + 1) * size; i += 32) {
        second = max(second, min(first, s.keys[i]));
        first = max(first, s.keys[i]);
      }
      const uint32_t best = __reduce_max_sync(0xFFFFFFFF, first);
      const int winner = __ffs(__ballot_sync(0xFFFFFFFF, first == best)) - 1;
      const uint32_t next = __reduce_max_sync(0xFFFFFFFF, lane == winner ? second : first);
      if (lane == 0) s.groups[g] = topk_key(topk_value(best) + topk_value(next));
    }
    __syncthreads();
    const uint32_t mine = lane < p.num_groups ? s.groups[lane] : 0;
    int before = 0;
#pragma unroll 4
    for (int g = 0; g < p.num_groups; ++g) before += s.groups[g] > mine || (s.groups[g] == mine && g < lane);
    const uint32_t chosen = __ballot_sync(0xFFFFFFFF, lane < p.num_groups && before < p.topk_groups);
    const float per_size = 1.0f / static_cast<float>(size);
#pragma unroll
    for (int j = 0; j < Items; ++j) {  // the quotient of i + 0.5 is 1/1024 or more from a whole number
      const int group = static_cast<int>((static_cast<float>(expert(j)) + 0.5f) * per_size);
      if ((chosen >> (group % 32) & 1) == 0) key[j] = 0;
    }
  }

  uint64_t best = 0;
#pragma unroll
  for (int j = 0; j < Items; ++j) {
    const uint64_t candidate = topk_candidate(key[j], expert(j));
    if (expert(j) < p.n && candidate > best) best = candidate;
  }
  const uint64_t other = __shfl_xor_sync(0xFFFFFFFF, best, 1);
  if (other > best) best = other;
  if (thread % 2 == 0) s.pairs[thread / 2] = best;
  __syncthreads();
  int before = topk_before(s.pairs, thread % 2, Threads / 2, 2, best);
  before += __shfl_xor_sync(0xFFFFFFFF, before, 1);
  if (best != 0 && before == p.k - 1) s.least = best;  // stays 0 where fewer than k pairs have an expert
  __syncthreads();
  const uint64_t least = s.least;
  int mine = 0;
#pragma unroll
  for (int j = 0; j < Items; ++j) mine += expert(j) < p.n && topk_candidate(key[j], expert(j)) >= least;
  if (mine > 0) {
    int at = atomicAdd(&s.count, mine);
#pragma unroll
    for (int j = 0; j < Items; ++j) {
      const uint64_t candidate = topk_candidate(key[j], expert(j));
      if (expert(j) < p.n && candidate >= least) s.found[at++] = candidate;
    }
  }
  __syncthreads();
  const int count = s.count;
#pragma unroll 1
  for (int i = thread; i < count; i += Threads) {
    const uint64_t candidate = s.found[i];
    const int rank = topk_before(s.found, 0, count, 1, candidate);
    if (rank < p.k) {
      const int id = static_cast<int>(~static_cast<uint32_t>(candidate));
      const float v = s.scores[id];
      s.ids[rank] = id;
      s.weights[rank] = of_probabilities ? v : probability(v);
    }
  }
  __syncthreads();
  if (thread >= p.k) return;
  float weight = s.weights[thread];
  if (p.renormalize) {
    float total = 0.0f;
#pragma unroll 4
    for (int i = 0; i < p.k; ++i) total += s.weights[i];
    weight = total == 0.0f ? 0.0f : weight / total;
  }
  p.ids[token * p.k + thread] = s.ids[thread];
  p.weights[token * p.k + thread] = weight * p.scale;
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
