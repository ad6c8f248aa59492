// Tensor maps of w13, w2 and h. A map of more dimensions than the matrix has permutes its rows within a unit, so that a
// thread of the GEMM ends up with neighbouring output columns (the accumulator's layout gives it rows g and g + 8).
#include "hpc/tensor_map.hpp"
#include "launch/moe.hpp"

namespace hpc::moe {

namespace {

// Of the weights: with reads from memory extended to 256 bytes, calls that read all experts once are 2 to 4 us slower.
constexpr CUtensorMapL2promotion kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

}  // namespace

// Weight row 16 w + 2 g + h (g < 8, h < 2) as coordinates (g, h, w); a copy brings 64 rows: w < 4. Where tokens are M:
// row 64 u + 16 t + 2 j + c (t < 4, j < 8, c < 2) as (c, t, j, u).
CUtensorMap gate_up_weight_map(const void* w13, int64_t rows, int64_t row_bytes, bool tokens) {
  const auto bytes = static_cast<uint64_t>(row_bytes);
  if (tokens) {
    TensorMapSpec<5> spec;
    spec.shape = {bytes, 2, 4, 8, static_cast<uint64_t>(rows) / 64};
    spec.stride = {bytes, 16 * bytes, 2 * bytes, 64 * bytes};
    spec.box = {128, 2, 4, 8, 1};
    return make_tensor_map("w13", w13, CU_TENSOR_MAP_DATA_TYPE_UINT8, spec, CU_TENSOR_MAP_SWIZZLE_128B, kPromotion);
  }
  TensorMapSpec<4> spec;
  spec.shape = {bytes, 8, 2, static_cast<uint64_t>(rows) / 16};
  spec.stride = {2 * bytes, bytes, 16 * bytes};
  spec.box = {128, 8, 2, 4};
  return make_tensor_map("w13", w13, CU_TENSOR_MAP_DATA_TYPE_UINT8, spec, CU_TENSOR_MAP_SWIZZLE_128B, kPromotion);
}

// Half units: 8 rows of gate, the 8 of up that belong to them, and so on, 4 times: (row % 8, gate or up, row / 8).
CUtensorMap gate_up_half_map(const void* w13, int64_t rows, int64_t row_bytes, int64_t intermediate) {
  const auto bytes = static_cast<uint64_t>(row_bytes);
  TensorMapSpec<4> spec;
  spec.shape = {bytes, 8, 2, static_cast<uint64_t>(rows) / 8};
  spec.stride = {bytes, static_cast<uint64_t>(intermediate) * bytes, 8 * bytes};
  spec.box = {128, 8, 2, 4};
  return make_tensor_map("w13", w13, CU_TENSOR_MAP_DATA_TYPE_UINT8, spec, CU_TENSOR_MAP_SWIZZLE_128B, kPromotion);
}

// Weight row 32 w + 4 g + 2 m + h (g < 8, m < 2, h < 2) as coordinates (g, h, w, m); a copy brings 128 rows: w < 4.
// Where tokens are M: row 32 i + 8 t + 2 j + c (t < 4, j < 4, c < 2) as (c, t, j, i); i < 4.
CUtensorMap down_weight_map(const void* w2, int64_t rows, int64_t row_bytes, bool tokens) {
  const auto bytes = static_cast<uint64_t>(row_bytes);
  if (tokens) {
    TensorMapSpec<5> spec;
    spec.shape = {bytes, 2, 4, 4, static_cast<uint64_t>(rows) / 32};
    spec.stride = {bytes, 8 * bytes, 2 * bytes, 32 * bytes};
    spec.box = {128, 2, 4, 4, 4};
    return make_tensor_map("w2", w2, CU_TENSOR_MAP_DATA_TYPE_UINT8, spec, CU_TENSOR_MAP_SWIZZLE_128B, kPromotion);
  }
  TensorMapSpec<5> spec;
  spec.shape = {bytes, 8, 2, static_cast<uint64_t>(rows) / 32, 2};
  spec.stride = {4 * bytes, bytes, 32 * bytes, 2 * bytes};
  spec.box = {128, 8, 2, 4, 2};
  return make_tensor_map("w2", w2, CU_TENSOR_MAP_DATA_TYPE_UINT8, spec, CU_TENSOR_MAP_SWIZZLE_128B, kPromotion);
}

// The lines of 128 bytes of two rows each: line j of rows 32 w + 4 g + 2 h and the next as coordinates (g, h, w, j); a
// copy brings line j of 128 rows: w < 4.
CUtensorMap down_short_map(const void* w2, int64_t rows, int64_t row_bytes) {
  const auto bytes = static_cast<uint64_t>(row_bytes);
  TensorMapSpec<5> spec;
  spec.shape = {128, 8, 2, static_cast<uint64_t>(rows) / 32, bytes / 64};
  spec.stride = {4 * bytes, 2 * bytes, 32 * bytes, 128};
  spec.box = {128, 8, 2, 4, 1};
  return make_tensor_map("w2", w2, CU_TENSOR_MAP_DATA_TYPE_UINT8, spec, CU_TENSOR_MAP_SWIZZLE_128B, kPromotion);
}

// Rows of h; a copy brings kRowsBox.
CUtensorMap down_row_map(const void* h, int64_t rows, int64_t row_bytes) {
  TensorMapSpec<2> spec;
  spec.shape = {static_cast<uint64_t>(row_bytes), static_cast<uint64_t>(rows)};
  spec.stride = {static_cast<uint64_t>(row_bytes)};
  spec.box = {128, kRowsBox};
  return make_tensor_map("h", h, CU_TENSOR_MAP_DATA_TYPE_UINT8, spec, CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace hpc::moe
