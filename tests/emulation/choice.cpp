// The router's choice of experts (hpc-router-gemm, kernels/router_topk.cuh, by its launcher) in hpc-attention's
// emulation of thread blocks, on random scores of many kinds, held to a plain sort of the same keys: ids and weights
// bit for bit. Arguments: fault, seed, number of problems. Stops at the first that is wrong, with exit status 1.
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "launch/router_topk.cu"

namespace {

using namespace hpc::router;

std::mt19937_64 generator;

int draw(int low, int high) {
  return low + static_cast<int>(generator() % static_cast<unsigned>(high - low + 1));
}
template <typename T>
T one_of(const std::vector<T>& values) {
  return values[static_cast<size_t>(draw(0, static_cast<int>(values.size()) - 1))];
}

// Sizes around those at which another kernel, or one with more items a thread, takes over.
TopkParams draw_sizes() {
  TopkParams p = {};
  const int kind = draw(0, 9);
  p.n = kind < 3   ? draw(1, 40)
        : kind < 6 ? draw(1, 1024)
        : kind < 9 ? one_of<int>({2, 32, 33, 64, 128, 129, 192, 256, 257, 384, 512, 513, 1023, 1024})
                   : draw(1025, 1300);
  p.k = min(p.n, draw(0, 3) ? draw(1, 16) : draw(0, 3) ? draw(30, 32) : draw(33, 40));
  p.num_groups = p.topk_groups = 1;
  if (draw(0, 2) == 0) {
    std::vector<int> divisors;
    for (int i = 2; 2 * i <= p.n; ++i) {
      if (p.n % i == 0) divisors.push_back(i);
    }
    if (!divisors.empty()) p.num_groups = one_of(divisors), p.topk_groups = draw(1, p.num_groups);
    p.k = min(p.k, p.n / p.num_groups * p.topk_groups);
  }
  p.m = draw(0, 19) ? draw(1, 4) : draw(257, 260);
  p.sigmoid = draw(0, 1);
  p.renormalize = draw(0, 1);
  p.scale = draw(0, 1) ? 1.0f : 2.5f;
  return p;
}

std::vector<float> draw_scores(size_t count) {
  static const std::vector<float> kOdd = {NAN, -INFINITY, INFINITY, 0.0f, -0.0f, 1.0f, -1e30f, 88.0f, 1e-40f, -1e-40f};
  std::normal_distribution<float> normal;
  std::vector<float> scores(count);
  const int kind = draw(0, 5);
  for (float& score : scores) {
    const float x = 3 * normal(generator);
    score = kind == 0   ? static_cast<float>(draw(0, 3))
            : kind == 1 ? (draw(0, 1) ? x : NAN)
            : kind == 2 ? (draw(0, 4) ? -INFINITY : x)
            : kind == 3 ? one_of(kOdd)
                        : x * (kind == 4 ? 60 : 1);
  }
  if (kind == 5 && draw(0, 1)) std::sort(scores.begin(), scores.end());  // the best ones are one thread's neighbours
  return scores;
}

// Sum of exp(score - largest) in the order of the kernels: each thread's, a butterfly of the warp, warp by warp.
float sum_of(const float* scores, const TopkParams& p, float largest, int threads, bool small) {
  std::vector<float> lanes(static_cast<size_t>(threads), 0.0f);
  for (int e = 0; e < (small ? 1024 : p.n); ++e) {
    lanes[static_cast<size_t>(e % threads)] += expf((e < p.n ? scores[e] : -INFINITY) - largest);
  }
  float sum = 0.0f;
  for (size_t warp = 0; warp < lanes.size(); warp += 32) {
    for (size_t mask = 16; mask > 0; mask /= 2) {
      const std::vector<float> before = lanes;
      for (size_t i = warp; i < warp + 32; ++i) lanes[i] = before[i] + before[i ^ mask];
    }
    sum += lanes[warp];
  }
  return sum;
}

// Indices by falling key, equal ones by rising index.
std::vector<int> sorted(const std::vector<uint32_t>& keys) {
  std::vector<int> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return keys[static_cast<size_t>(a)] > keys[static_cast<size_t>(b)]; });
  return order;
}

// Whether a token's choice is right.
bool right(const float* scores, const int32_t* ids, const float* weights, const TopkParams& p) {
  const bool small = p.n <= kTopkSmallExperts && p.k <= kTopkSmallChoices && p.num_groups <= kTopkSmallGroups;
  float largest = small ? NAN : -INFINITY;
  for (int e = 0; e < p.n; ++e) largest = fmaxf(largest, scores[e]);
  const int threads = small ? (p.m > 256 ? 64 : 128) : kTopkThreads;
  const float sum = p.sigmoid ? 0.0f : sum_of(scores, p, largest, threads, small);
  const auto probability = [&](int e) {
    return p.sigmoid ? 1.0f / (1.0f + expf(-scores[e])) : expf(scores[e] - largest) / sum;
  };
  const auto value = [&](int e) { return p.bias ? probability(e) + p.bias[e] : probability(e); };
  std::vector<uint32_t> keys, groups;
  for (int e = 0; e < p.n; ++e) keys.push_back(topk_key(p.bias ? value(e) : scores[e]));
  const int size = p.n / p.num_groups;
  for (int g = 0; g < p.num_groups && p.num_groups > 1; ++g) {
    std::vector<uint32_t> own;
    for (int e = g * size; e < (g + 1) * size; ++e) own.push_back(topk_key(value(e)));
    const std::vector<int> order = sorted(own);
    groups.push_back(topk_key(value(g * size + order[0]) + value(g * size + order[1])));
  }
  const std::vector<int> best = sorted(groups);
  for (size_t i = static_cast<size_t>(p.topk_groups); i < best.size(); ++i) {
    for (int e = best[i] * size; e < (best[i] + 1) * size; ++e) keys[static_cast<size_t>(e)] = 0;
  }
  const std::vector<int> order = sorted(keys);
  float total = 0.0f;
  for (int i = 0; i < p.k; ++i) total += probability(order[static_cast<size_t>(i)]);
  for (int i = 0; i < p.k; ++i) {
    const int id = order[static_cast<size_t>(i)];
    float want = probability(id);
    if (p.renormalize) want = total == 0.0f ? 0.0f : want / total;
    want *= p.scale;
    if (ids[i] != id || !(weights[i] == want || (weights[i] != weights[i] && want != want))) return false;
  }
  return true;
}

}  // namespace

int main(int, char** argv) {
  emulation::fault = std::atoi(argv[1]);
  generator.seed(static_cast<unsigned>(std::atoi(argv[2])));
  for (int i = std::atoi(argv[3]); i > 0; --i) {
    TopkParams p = draw_sizes();
    const auto rows = static_cast<size_t>(p.m), n = static_cast<size_t>(p.n), k = static_cast<size_t>(p.k);
    const std::vector<float> scores = draw_scores(rows * n), bias = draw_scores(n);
    std::vector<int32_t> ids(rows * k, -7);
    std::vector<float> weights(rows * k, -7.0f);
    p.scores = scores.data();
    p.bias = draw(0, 2) ? nullptr : bias.data();
    p.ids = ids.data();
    p.weights = weights.data();
    launch_topk(p, nullptr);
    size_t row = 0;
    while (row < rows && right(&scores[row * n], &ids[row * k], &weights[row * k], p)) ++row;
    if (row == rows) continue;
    std::printf("n %d, k %d, %d of %d groups, m %d, row %d: wrong\n", p.n, p.k, p.topk_groups, p.num_groups,
                static_cast<int>(p.m), static_cast<int>(row));
    return 1;
  }
  return 0;
}
