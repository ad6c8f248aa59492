// The device of a call: a guard that makes it current, and its properties, cached per device (a machine may hold GPUs
// of several kinds). Every CUDA error becomes a std::runtime_error with CUDA's own text.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <mutex>
#include <stdexcept>

#include "hpc/checks.hpp"

namespace hpc {

inline void cuda_check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // a non-sticky error must not be found again by the next call
    throw std::runtime_error(text(what, ": ", cudaGetErrorName(status), ": ", cudaGetErrorString(status)));
  }
}

// Makes `device` current for the guard's life and restores the previous one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    cuda_check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (device != previous_) {
      cuda_check(cudaSetDevice(device), "cudaSetDevice");
      changed_ = true;
    }
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

struct DeviceProperties {
  int major = 0;
  int minor = 0;
  int num_sms = 0;
  int smem_per_sm = 0;     // bytes
  int smem_per_block = 0;  // bytes, after the opt-in attribute
  int l2_bytes = 0;
};

constexpr int kMaxDevices = 64;

// Properties of `device`, read once per device and process.
inline const DeviceProperties& device_properties(int device) {
  static std::array<DeviceProperties, kMaxDevices> cached;
  static std::array<std::once_flag, kMaxDevices> once;
  if (device < 0 || device >= kMaxDevices) throw std::invalid_argument(text("device index ", device, " out of range"));
  std::call_once(once[device], [device] {
    DeviceProperties p;
    const auto get = [device](cudaDeviceAttr attribute) {
      int value = 0;
      cuda_check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
      return value;
    };
    p.major = get(cudaDevAttrComputeCapabilityMajor);
    p.minor = get(cudaDevAttrComputeCapabilityMinor);
    p.num_sms = get(cudaDevAttrMultiProcessorCount);
    p.smem_per_sm = get(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    p.smem_per_block = get(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    p.l2_bytes = get(cudaDevAttrL2CacheSize);
    cached[device] = p;
  });
  return cached[device];
}

// Throws unless the kernels of this project (sm_90a) run on `device`.
inline void require_sm90(const char* where, int device) {
  const DeviceProperties& p = device_properties(device);
  if (p.major != 9 || p.minor != 0) {
    fail(where, "device", "compute capability 9.0 (sm_90a, Hopper)",
         text("cuda:", device, " with ", p.major, ".", p.minor));
  }
}

}  // namespace hpc
