// The plan's functions for Python: sizes, the host planner, and the update on either device.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "config/plan.hpp"
#include "hpc/checks.hpp"
#include "hpc/device.hpp"
#include "hpc/schedule_bind.hpp"
#include "hpc/tensor.hpp"
#include "launch/plan.hpp"

namespace nb = nanobind;

namespace {

constexpr const char* kPlan = "hpc_attention.DecodePlan";
constexpr const char* kUpdate = "hpc_attention.DecodePlan.update";

nb::dict plan_config(int32_t max_batch, int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim, int32_t q_len,
                     int32_t window, int32_t kv_bytes, int32_t num_ctas, int32_t max_seq_len, bool batch_invariant) {
  const hpc::attention::PlanConfig config =
      hpc::attention::plan_config(kPlan, {max_batch, num_q_heads, num_kv_heads, head_dim, q_len, window, kv_bytes,
                                          num_ctas, max_seq_len, batch_invariant});
  nb::dict result;
  result["window"] = config.shape.window;
  result["min_tiles"] = config.shape.min_tiles;
  result["rows"] = config.rows;
  result["map_bytes"] = config.map_bytes;
  result["partial_slots"] = config.partial_slots;
  result["workspace_bytes"] = config.workspace_bytes;
  return result;
}

// Checks what both updates share; the pointers' devices are the caller's to know.
hpc::DecodeShape checked_shape(int32_t batch, int64_t map_bytes, int32_t num_kv_heads, int32_t q_len, int32_t window,
                               int32_t max_seq_len, int32_t num_ctas, bool batch_invariant, int32_t max_batch,
                               int32_t min_tiles) {
  const hpc::DecodeShape shape = hpc::decode_shape(batch, num_kv_heads, q_len, window, max_seq_len, num_ctas,
                                                   batch_invariant, max_batch, min_tiles);
  hpc::check_decode_shape(kUpdate, shape);
  hpc::check(map_bytes == hpc::decode_map_bytes(max_batch, num_ctas), kUpdate, "map",
             hpc::text(hpc::decode_map_bytes(max_batch, num_ctas), " bytes"), map_bytes);
  return shape;
}

void plan_update_cpu(uint64_t seq_lens, int32_t batch, uint64_t map, int64_t map_bytes, int32_t num_kv_heads,
                     int32_t q_len, int32_t window, int32_t max_seq_len, int32_t num_ctas, bool batch_invariant,
                     int32_t max_batch, int32_t min_tiles) {
  const hpc::DecodeShape shape = checked_shape(batch, map_bytes, num_kv_heads, q_len, window, max_seq_len, num_ctas,
                                               batch_invariant, max_batch, min_tiles);
  const auto* lengths = hpc::pointer<const int32_t>(seq_lens);
  hpc::check_seq_lens(kUpdate, lengths, shape);
  hpc::plan_decode(lengths, shape, hpc::pointer<void>(map));
}

void plan_update_cuda(int device, uint64_t stream, uint64_t seq_lens, int32_t batch, uint64_t map, int64_t map_bytes,
                      int32_t num_kv_heads, int32_t q_len, int32_t window, int32_t max_seq_len, int32_t num_ctas,
                      bool batch_invariant, int32_t max_batch, int32_t min_tiles) {
  const hpc::DecodeShape shape = checked_shape(batch, map_bytes, num_kv_heads, q_len, window, max_seq_len, num_ctas,
                                               batch_invariant, max_batch, min_tiles);
  hpc::check_aligned16(kUpdate, "map", hpc::pointer<void>(map));
  hpc::require_sm90(kUpdate, device);
  const hpc::DeviceGuard guard(device);
  hpc::attention::launch_plan(hpc::pointer<const int32_t>(seq_lens), shape, hpc::pointer<void>(map),
                              hpc::pointer<CUstream_st>(stream));
}

}  // namespace

void bind_plan(nb::module_& module) {
  hpc::bind_plan_host(module);
  module.def("plan_config", &plan_config, nb::arg("max_batch"), nb::arg("num_q_heads"), nb::arg("num_kv_heads"),
             nb::arg("head_dim"), nb::arg("q_len"), nb::arg("window"), nb::arg("kv_bytes"), nb::arg("num_ctas"),
             nb::arg("max_seq_len"), nb::arg("batch_invariant"));
  module.def("plan_update_cpu", &plan_update_cpu);
  module.def("plan_update_cuda", &plan_update_cuda);
}
