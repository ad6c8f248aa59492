// hpc_router_gemm._C: the router's Config and its kernels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "api/router.hpp"
#include "hpc/build_info.hpp"

namespace nb = nanobind;

namespace {

using namespace hpc::router;
using nb::literals::operator""_a;

Problem problem_of(int64_t m, int n, int k, bool weight_is_bf16, int terms, bool presplit, bool batch_invariant) {
  Problem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.weight = weight_of(weight_is_bf16, terms);
  problem.presplit = presplit;
  problem.batch_invariant = batch_invariant;
  return problem;
}

void bind_config(nb::module_& module) {
  nb::class_<Config>(module, "Config", "What one call was decided to be; csrc/config/config.hpp explains each field.")
      .def_prop_ro("kernel", [](const Config& c) { return c.kernel == Kernel::kStream ? "stream" : "tile"; })
      .def_ro("rows", &Config::rows)
      .def_ro("tokens", &Config::tokens)
      .def_ro("k_groups", &Config::k_groups)
      .def_ro("split", &Config::split)
      .def_ro("stages", &Config::stages)
      .def_ro("sums_apart", &Config::sums_apart)
      .def_ro("presplit", &Config::presplit)
      .def_ro("paired", &Config::paired)
      .def_ro("pairs_experts", &Config::pairs_experts)
      .def_ro("smem_bytes", &Config::smem_bytes)
      .def_ro("ctas", &Config::ctas)
      .def("__repr__", [](const Config& c) {
        return hpc::text("Config(", c.kernel == Kernel::kStream ? "stream" : "tile", ", rows=", c.rows,
                         ", tokens=", c.tokens, ", k_groups=", c.k_groups, ", split=", c.split, ", stages=", c.stages,
                         ", sums_apart=", static_cast<int>(c.sums_apart), ", presplit=", static_cast<int>(c.presplit),
                         ", paired=", static_cast<int>(c.paired), ", pairs_experts=", static_cast<int>(c.pairs_experts),
                         ", smem_bytes=", c.smem_bytes, ", ctas=", c.ctas, ")");
      });

  module.def(
      "choose_config",
      [](int64_t m, int n, int k, bool weight_is_bf16, int terms, bool presplit, bool batch_invariant) {
        return config_of(problem_of(m, n, k, weight_is_bf16, terms, presplit, batch_invariant));
      },
      nb::kw_only(), "m"_a, "n"_a, "k"_a, "weight_is_bf16"_a = false, "terms"_a = 2, "presplit"_a = false,
      "batch_invariant"_a = false, "The Config of a call on an H200; ValueError where a size is out of range.");
  module.def(
      "make_config",
      [](int64_t m, int n, int k, bool weight_is_bf16, int terms, const std::string& kernel, int rows, int tokens,
         int k_groups, int split, int stages, bool sums_apart, bool presplit, bool paired, bool pairs_experts) {
        const Problem problem = problem_of(m, n, k, weight_is_bf16, terms, presplit, false);
        Config config;
        config.kernel = kernel == "stream" ? Kernel::kStream : Kernel::kTile;
        config.rows = rows;
        config.tokens = tokens;
        config.k_groups = k_groups;
        config.split = split;
        config.sums_apart = sums_apart;
        config.presplit = presplit;
        config.paired = paired;
        config.pairs_experts = pairs_experts;
        const char* expected = complete(problem, config, stages);
        if (expected != nullptr) hpc::fail("hpc_router_gemm.make_config", "config", expected, "another");
        return config;
      },
      nb::kw_only(), "m"_a, "n"_a, "k"_a, "weight_is_bf16"_a = false, "terms"_a = 2, "kernel"_a, "rows"_a, "tokens"_a,
      "k_groups"_a = 1, "split"_a = 1, "stages"_a = 0, "sums_apart"_a = false, "presplit"_a = false, "paired"_a = false,
      "pairs_experts"_a = false,
      "A Config by hand, for tuning and tests; stages 0 takes what fits. ValueError where no kernel can run it.");
  module.def(
      "estimate_us",
      [](const Config& config, int64_t m, int n, int k, bool weight_is_bf16, int terms) {
        return estimate(problem_of(m, n, k, weight_is_bf16, terms, config.presplit, false), config);
      },
      "config"_a, nb::kw_only(), "m"_a, "n"_a, "k"_a, "weight_is_bf16"_a = false, "terms"_a = 2,
      "What the model of choose_config says a Config takes, in microseconds.");
  nb::list stream_tiles, wgmma_tiles, term_tiles, paired_tiles, paired_expert_tiles;
  for (const StreamTile& t : kStreamTiles) stream_tiles.append(nb::make_tuple(t.rows, t.tokens));
  for (const WgmmaTile& t : kWgmmaTiles) wgmma_tiles.append(nb::make_tuple(t.rows, t.k_groups, t.tokens));
  for (const WgmmaTile& t : kTermTiles) term_tiles.append(nb::make_tuple(t.rows, t.k_groups, t.tokens));
  for (const WgmmaTile& t : kPairedTiles) paired_tiles.append(nb::make_tuple(t.rows, t.k_groups, t.tokens));
  for (const WgmmaTile& t : kPairedExpertTiles) {
    paired_expert_tiles.append(nb::make_tuple(t.rows, t.k_groups, t.tokens));
  }
  module.attr("STREAM_TILES") = stream_tiles;  // (rows, tokens)
  module.attr("WGMMA_TILES") = wgmma_tiles;    // (rows, k_groups, tokens)
  module.attr("TERM_TILES") = term_tiles;      // the same, of terms in memory
  module.attr("PAIRED_TILES") = paired_tiles;  // the same, copied in pairs
  module.attr("PAIRED_EXPERT_TILES") = paired_expert_tiles;
}

void bind_kernels(nb::module_& module) {
  module.def(
      "router_gemm",
      [](uint64_t x, uint64_t weight, uint64_t split, uint64_t y, int64_t m, int64_t n, int64_t k, int64_t x_stride,
         int64_t weight_stride, int64_t y_stride, bool weight_is_bf16, int terms, bool batch_invariant, bool prefetch,
         int device, uint64_t stream, const Config* config) {
        GemmCall call;
        call.x = x;
        call.weight = weight;
        call.terms = split;
        call.y = y;
        call.m = m;
        call.n = n;
        call.k = k;
        call.x_stride = x_stride;
        call.weight_stride = weight_stride;
        call.y_stride = y_stride;
        call.weight_type = weight_of(weight_is_bf16, terms);
        call.batch_invariant = batch_invariant;
        call.prefetch = prefetch;
        router_gemm(call, config, device, stream);
      },
      "x"_a, "weight"_a, "split"_a, "y"_a, "m"_a, "n"_a, "k"_a, "x_stride"_a, "weight_stride"_a, "y_stride"_a,
      "weight_is_bf16"_a, "terms"_a, "batch_invariant"_a, "prefetch"_a, "device"_a, "stream"_a,
      "config"_a.none() = nb::none(),
      "y[m, n] = x[m, k] weight[n, k]^T. Addresses as integers, row strides in elements; split: the weight's terms, or "
      "0.");
  module.def(
      "topk",
      [](uint64_t scores, uint64_t bias, uint64_t ids, uint64_t weights, int64_t m, int n, int k, bool sigmoid,
         int num_groups, int topk_groups, bool renormalize, double scale, int device, uint64_t stream) {
        RouteCall call;
        call.scores = scores;
        call.bias = bias;
        call.ids = ids;
        call.weights = weights;
        call.m = m;
        call.n = n;
        call.k = k;
        call.sigmoid = sigmoid;
        call.num_groups = num_groups;
        call.topk_groups = topk_groups;
        call.renormalize = renormalize;
        call.scale = static_cast<float>(scale);
        topk(call, device, stream);
      },
      "scores"_a, "bias"_a, "ids"_a, "weights"_a, "m"_a, "n"_a, "k"_a, "sigmoid"_a, "num_groups"_a, "topk_groups"_a,
      "renormalize"_a, "scale"_a, "device"_a, "stream"_a,
      "The k best of each row of fp32 scores [m, n]: ids int32 [m, k] and weights fp32 [m, k]; bias 0 for none.");
}

}  // namespace

NB_MODULE(_C, module) {
  hpc::bind_build_info(module);
  bind_config(module);
  bind_kernels(module);
}
