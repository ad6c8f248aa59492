#include "api/router.hpp"

#include <map>
#include <mutex>
#include <tuple>

#include "hpc/device.hpp"
#include "hpc/tensor.hpp"
#include "launch/router.hpp"

namespace hpc::router {

namespace {

constexpr const char* kWhere = "hpc_router_gemm";

// Resident CTAs by cluster size of a device, asked once.
const std::array<int, kMaxCluster + 1>& resident_of(int device) {
  static std::array<std::array<int, kMaxCluster + 1>, kMaxDevices> cached;
  static std::array<std::once_flag, kMaxDevices> once;
  std::call_once(once.at(device), [device] {
    for (int cluster = 1; cluster <= kPortableCluster; ++cluster) cached[device][cluster] = resident_ctas(cluster);
    cached[device][kMaxCluster] = resident_ctas(kMaxCluster);
  });
  return cached[device];
}

}  // namespace

Weight weight_of(bool weight_is_bf16, int terms) {
  check(terms >= 1 && terms <= 3, kWhere, "terms", "1, 2 or 3", terms);
  return weight_is_bf16 ? Weight::kBf16 : static_cast<Weight>(terms);
}

Config config_of(const Problem& problem) {
  using Key = std::tuple<int64_t, int, int, Weight, bool, bool, bool, std::array<int, kMaxCluster + 1>>;
  static std::mutex mutex;
  static std::map<Key, Config> cache;
  const Key key(problem.m, problem.n, problem.k, problem.weight, problem.presplit, problem.batch_invariant,
                problem.overlapping_x, problem.resident);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = cache.find(key);
  if (found != cache.end()) return found->second;
  if (cache.size() >= 4096) cache.clear();
  return cache[key] = choose(problem);
}

void router_gemm(const GemmCall& call, const Config* forced, int device, uint64_t stream) {
  if (call.m == 0) return;
  require_sm90(kWhere, device);
  const DeviceGuard guard(device);
  check(call.n >= 1 && call.n <= (1 << 20), kWhere, "n", "1 to 2^20 experts", call.n);
  check(call.k >= 8 && call.k % 8 == 0 && call.k <= (1 << 24), kWhere, "k", "a multiple of 8 up to 2^24", call.k);
  check(call.m > 0 && call.m <= INT32_MAX, kWhere, "m", "at most 2^31 - 1 tokens", call.m);
  check_aligned16(kWhere, "x", pointer<void>(call.x));
  check_aligned16(kWhere, "weight", pointer<void>(call.weight));
  check_aligned16(kWhere, "terms", pointer<void>(call.terms));
  check(call.m == 1 || call.x_stride % 8 == 0, kWhere, "x", "a row stride of whole 16 bytes", call.x_stride);
  check(call.n == 1 || call.weight_stride * weight_bytes(call.weight_type) % 16 == 0, kWhere, "weight",
        "a row stride of whole 16 bytes", call.weight_stride);

  Problem problem;
  problem.m = call.m;
  problem.n = static_cast<int>(call.n);
  problem.k = static_cast<int>(call.k);
  problem.weight = call.weight_type;
  problem.presplit = call.terms != 0;
  problem.batch_invariant = call.batch_invariant;
  problem.overlapping_x = (call.m > 1 && call.x_stride < call.k) || (call.n > 1 && call.weight_stride < call.k);
  problem.resident = resident_of(device);
  Config config;
  if (forced == nullptr) {
    config = config_of(problem);
  } else {
    config = *forced;
    const char* expected = complete(problem, config, forced->stages);
    if (expected != nullptr) fail(kWhere, "config", expected, "another");
  }

  Gemm gemm;
  gemm.x = pointer<const void>(call.x);
  gemm.weight = pointer<const void>(config.presplit ? call.terms : call.weight);
  gemm.y = pointer<float>(call.y);
  gemm.x_stride = call.x_stride;
  gemm.weight_stride = call.weight_stride;
  gemm.y_stride = call.y_stride;
  gemm.m = call.m;
  gemm.n = problem.n;
  gemm.k = problem.k;
  gemm.prefetch = call.prefetch;
  const auto cuda_stream = pointer<CUstream_st>(stream);
  const bool stream_kernel = config.kernel == Kernel::kStream;
  switch (weight_read(problem, config)) {
    case Weight::kBf16:
      return stream_kernel ? launch_stream<Weight::kBf16>(gemm, config, cuda_stream)
                           : launch_tile<Weight::kBf16>(gemm, config, cuda_stream);
    case Weight::kFloat1:
      return stream_kernel ? launch_stream<Weight::kFloat1>(gemm, config, cuda_stream)
                           : launch_tile<Weight::kFloat1>(gemm, config, cuda_stream);
    case Weight::kFloat2:
      return stream_kernel ? launch_stream<Weight::kFloat2>(gemm, config, cuda_stream)
                           : launch_tile<Weight::kFloat2>(gemm, config, cuda_stream);
    case Weight::kFloat3:
      return stream_kernel ? launch_stream<Weight::kFloat3>(gemm, config, cuda_stream)
                           : launch_tile<Weight::kFloat3>(gemm, config, cuda_stream);
    case Weight::kTerms2:
      return launch_tile<Weight::kTerms2>(gemm, config, cuda_stream);
    case Weight::kTerms3:
      return launch_tile<Weight::kTerms3>(gemm, config, cuda_stream);
    case Weight::kPairedTerms2:
      return launch_tile<Weight::kPairedTerms2>(gemm, config, cuda_stream);
    case Weight::kPairedExperts2:
      return launch_tile<Weight::kPairedExperts2>(gemm, config, cuda_stream);
    case Weight::kPairedTerms3:
      return launch_tile<Weight::kPairedTerms3>(gemm, config, cuda_stream);
  }
}

void topk(const RouteCall& call, int device, uint64_t stream) {
  if (call.m == 0) return;
  require_sm90(kWhere, device);
  const DeviceGuard guard(device);
  check(call.m > 0 && call.m <= INT32_MAX, kWhere, "m", "at most 2^31 - 1 tokens", call.m);
  check(call.k >= 1 && call.k <= call.n, kWhere, "k", "1 to the number of experts", call.k);
  check(call.num_groups >= 1 && call.n % call.num_groups == 0 && call.topk_groups >= 1 &&
            call.topk_groups <= call.num_groups && call.k <= call.n / call.num_groups * call.topk_groups,
        kWhere, "num_groups", "groups of one size that hold k experts", call.num_groups);
  TopkParams params;
  params.scores = pointer<const float>(call.scores);
  params.bias = pointer<const float>(call.bias);
  params.ids = pointer<int32_t>(call.ids);
  params.weights = pointer<float>(call.weights);
  params.m = call.m;
  params.n = call.n;
  params.k = call.k;
  params.num_groups = call.num_groups;
  params.topk_groups = call.topk_groups;
  params.sigmoid = call.sigmoid;
  params.renormalize = call.renormalize;
  params.scale = call.scale;
  launch_topk(params, pointer<CUstream_st>(stream));
}

}  // namespace hpc::router
