// Tensor views for kernels and launchers: a pointer with its shape and strides. Strides are int64 and count elements,
// so an offset into a tensor that a user sizes never wraps.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define HPC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HPC_HOST_DEVICE inline
#endif

namespace hpc {

template <typename T, int Rank>
struct TensorView {
  T* data = nullptr;
  int64_t shape[Rank] = {};
  int64_t stride[Rank] = {};  // in elements

  template <typename... Index>
  HPC_HOST_DEVICE int64_t offset(Index... index) const {
    static_assert(sizeof...(Index) == Rank, "one index per dimension");
    const int64_t indices[Rank] = {static_cast<int64_t>(index)...};
    int64_t sum = 0;
    for (int dim = 0; dim < Rank; ++dim) sum += indices[dim] * stride[dim];
    return sum;
  }

  template <typename... Index>
  HPC_HOST_DEVICE T& operator()(Index... index) const {
    return data[offset(index...)];
  }
};

// An address that came from Python (tensor.data_ptr()) as a typed pointer.
template <typename T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

}  // namespace hpc
