// The functions of hpc_router_gemm._C: raw addresses and sizes in, kernels launched. Shapes, dtypes and devices have
// been checked in Python; what is checked here is what no Python check can be trusted with.
#pragma once

#include <cstdint>
#include <string>

#include "config/config.hpp"

namespace hpc::router {

// A call's tensors. Addresses as integers, row strides in elements.
struct GemmCall {
  uint64_t x = 0, weight = 0, y = 0;
  uint64_t terms = 0;  // the weight's terms, bf16, as RouterWeight.split has them; 0 where there are none
  int64_t m = 0, n = 0, k = 0;
  int64_t x_stride = 0, weight_stride = 0, y_stride = 0;
  Weight weight_type = Weight::kFloat2;
  bool batch_invariant = false;
  bool prefetch = false;
};

Weight weight_of(bool weight_is_bf16, int terms);

// choose(), remembered: the same sizes come again and again.
Config config_of(const Problem& problem);

// Scores on `device`. `forced`, where not null, replaces the chosen Config (its shared memory and grid are made anew).
void router_gemm(const GemmCall& call, const Config* forced, int device, uint64_t stream);

struct RouteCall {
  uint64_t scores = 0, bias = 0, ids = 0, weights = 0;
  int64_t m = 0;
  int n = 0, k = 0, num_groups = 1, topk_groups = 1;
  bool sigmoid = false, renormalize = true;
  float scale = 1.0f;
};

// The choice of experts from scores.
void topk(const RouteCall& call, int device, uint64_t stream);

}  // namespace hpc::router
