// A panel of down and the reduction: columns [first, first + columns) of H, for which they are given what begins there.
#pragma once

#include "kernels/params.hpp"

namespace hpc::moe {

// Of the call's `whole`; y has the panel's columns alone. The weights' map must begin at panel_weights().
inline GemmParams panel_of(const GemmParams& whole, Quant quant, int32_t first, int32_t columns) {
  GemmParams p = whole;
  p.units = columns / 128;
  p.out_columns = columns;
  if (quant == Quant::kBlock) p.w_scale += static_cast<int64_t>(first / 128) * p.w_scale_cols;
  return p;
}

inline ReduceParams panel_of(const ReduceParams& whole, int32_t first, int32_t columns) {
  ReduceParams p = whole;
  p.hidden = columns;
  if (p.shared_output != nullptr) p.shared_output = static_cast<const uint8_t*>(p.shared_output) + first * int64_t{2};
  p.out = static_cast<uint8_t*>(p.out) + first * int64_t{2};
  return p;
}

// Row `first` of the first expert; E * H - first rows begin there, H from an expert's to the next's.
inline const uint8_t* panel_weights(const void* w2, int64_t row_bytes, int32_t first) {
  return static_cast<const uint8_t*>(w2) + first * row_bytes;
}

}  // namespace hpc::moe
