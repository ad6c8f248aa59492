// plan_host() for Python: hpc_common._core and every extension that plans export the same function, each compiled from
// the header it was built with.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "hpc/schedule_host.hpp"

namespace hpc {

using HostLengths = nanobind::ndarray<const int32_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

inline DecodeShape decode_shape(int32_t batch, int32_t num_kv_heads, int32_t q_len, int32_t window, int32_t max_seq_len,
                                int32_t num_ctas, bool batch_invariant, int32_t max_batch, int32_t min_tiles) {
  return {batch, num_kv_heads, q_len, window, max_seq_len, num_ctas, batch_invariant, max_batch, min_tiles};
}

// Adds plan_host(seq_lens, num_kv_heads, q_len, window, max_seq_len, num_ctas, batch_invariant, max_batch, min_tiles)
// -> bytes: the map of one step. Lengths are clamped to [0, max_seq_len]; ValueError for a shape out of range.
inline void bind_plan_host(nanobind::module_& module) {
  namespace nb = nanobind;
  module.def(
      "plan_host",
      [](HostLengths seq_lens, int32_t num_kv_heads, int32_t q_len, int32_t window, int32_t max_seq_len,
         int32_t num_ctas, bool batch_invariant, int32_t max_batch, int32_t min_tiles) {
        const DecodeShape shape = decode_shape(static_cast<int32_t>(seq_lens.shape(0)), num_kv_heads, q_len, window,
                                               max_seq_len, num_ctas, batch_invariant, max_batch, min_tiles);
        check_decode_shape("plan_host", shape);
        std::string map(static_cast<size_t>(decode_map_bytes(max_batch, num_ctas)), '\0');
        plan_decode(seq_lens.data(), shape, map.data());
        return nb::bytes(map.data(), map.size());
      },
      nb::arg("seq_lens"), nb::arg("num_kv_heads"), nb::arg("q_len"), nb::arg("window"), nb::arg("max_seq_len"),
      nb::arg("num_ctas"), nb::arg("batch_invariant"), nb::arg("max_batch"), nb::arg("min_tiles"));
}

}  // namespace hpc
