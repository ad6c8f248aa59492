// Tensor maps for the copy engine, made on the host. The driver's encoder is looked up through the runtime, so that no
// extension links libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <cudaTypedefs.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "hpc/checks.hpp"
#include "hpc/device.hpp"

namespace hpc {

// cuTensorMapEncodeTiled of this process's driver.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
               "cudaGetDriverEntryPointByVersion(cuTensorMapEncodeTiled)");
    if (found != cudaDriverEntryPointSuccess || entry == nullptr) {
      throw std::runtime_error("cuTensorMapEncodeTiled: not found in the CUDA driver (12.0 or newer is needed)");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  return encoder;
}

// A tensor of `Rank` dimensions as the copy engine sees it, innermost first. Dimensions need not be those of the tensor
// in memory: a permuted or split one puts rows in another order in shared memory at no cost.
template <size_t Rank>
struct TensorMapSpec {
  std::array<uint64_t, Rank> shape;       // elements
  std::array<uint64_t, Rank - 1> stride;  // bytes, of dimensions 1 and up; multiples of 16, in any order of size
  std::array<uint32_t, Rank> box;         // elements one copy brings; at most 256 in each dimension
};

// The map of `base` (16-byte aligned); what lies outside arrives as zeros. Throws std::runtime_error where the driver
// refuses it; `what` names the tensor. `promotion`: to how many bytes L2 extends what it reads from memory.
template <size_t Rank>
CUtensorMap make_tensor_map(const char* what, const void* base, CUtensorMapDataType type,
                            const TensorMapSpec<Rank>& spec, CUtensorMapSwizzle swizzle,
                            CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  static_assert(Rank >= 2 && Rank <= 5);
  CUtensorMap map;
  std::array<uint32_t, Rank> steps;
  steps.fill(1);
  const CUresult status = tensor_map_encoder()(
      &map, type, Rank, const_cast<void*>(base), spec.shape.data(), spec.stride.data(), spec.box.data(), steps.data(),
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error(text("cuTensorMapEncodeTiled(", what, "): error ", static_cast<int>(status)));
  }
  return map;
}

}  // namespace hpc
