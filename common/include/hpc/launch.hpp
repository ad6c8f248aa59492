// One way to launch a kernel: attributes (programmatic dependent launch, cluster), shared memory opt-in, and every
// error read. HPC_PDL=0 in the environment launches everything without PDL.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <string_view>

#include "hpc/device.hpp"

namespace hpc {

struct LaunchConfig {
  dim3 grid = dim3(1);
  dim3 block = dim3(1);
  int smem_bytes = 0;  // dynamic
  cudaStream_t stream = nullptr;
  bool pdl = true;  // may start before its predecessor ends; the kernel must call pdl_wait() in every CTA
  int cluster = 1;  // CTAs of a cluster along x
  // An SM divides its memory between L1 and shared memory anew only when it is empty: a kernel that needs little shared
  // memory, before one that needs much, keeps it off the SM to its end unless it asks for the larger share as well.
  bool shared_carveout = false;
};

// Whether PDL is on in this process (HPC_PDL unset or anything but "0").
inline bool pdl_enabled() {
  static const bool enabled = [] {
    const char* value = std::getenv("HPC_PDL");
    return value == nullptr || std::string_view(value) != "0";
  }();
  return enabled;
}

// Raises `kernel`'s dynamic shared memory limit on the current device. Cheap (no device work), so it is not cached: a
// cache would have to be kept per device and kernel.
template <typename Kernel>
void allow_smem(Kernel* kernel, int smem_bytes) {
  if (smem_bytes > 48 * 1024) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes),
               "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)");
  }
}

// More than 8 CTAs a cluster have to be asked for.
template <typename Kernel>
void allow_cluster(Kernel* kernel, int cluster) {
  if (cluster > 8) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               "cudaFuncSetAttribute(NonPortableClusterSizeAllowed)");
  }
}

// Launches `kernel` on the current device (see DeviceGuard). An empty grid launches nothing.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const LaunchConfig& config, Arguments&&... arguments) {
  if (config.grid.x == 0 || config.grid.y == 0 || config.grid.z == 0) return;
  allow_smem(kernel, config.smem_bytes);
  if (config.shared_carveout) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100),
               "cudaFuncSetAttribute(PreferredSharedMemoryCarveout)");
  }
  std::array<cudaLaunchAttribute, 2> attributes;
  unsigned count = 0;
  if (config.pdl && pdl_enabled()) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (config.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(config.cluster);
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
    allow_cluster(kernel, config.cluster);
  }
  cudaLaunchConfig_t raw = {};
  raw.gridDim = config.grid;
  raw.blockDim = config.block;
  raw.dynamicSmemBytes = static_cast<size_t>(config.smem_bytes);
  raw.stream = config.stream;
  raw.attrs = attributes.data();
  raw.numAttrs = count;
  cuda_check(cudaLaunchKernelEx(&raw, kernel, static_cast<Parameters>(arguments)...), "cudaLaunchKernelEx");
}

// CTAs of `kernel` that fit on one SM of the current device (at least 0).
template <typename Kernel>
int resident_ctas_per_sm(Kernel* kernel, int threads, int smem_bytes) {
  allow_smem(kernel, smem_bytes);
  int count = 0;
  cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads, static_cast<size_t>(smem_bytes)),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return count;
}

// Clusters of `kernel` that fit on the current device at once (at least 0).
template <typename Kernel>
int resident_clusters(Kernel* kernel, int threads, int smem_bytes, int cluster) {
  allow_smem(kernel, smem_bytes);
  allow_cluster(kernel, cluster);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t raw = {};
  raw.gridDim = dim3(static_cast<unsigned>(cluster));
  raw.blockDim = dim3(static_cast<unsigned>(threads));
  raw.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
  raw.attrs = &attribute;
  raw.numAttrs = 1;
  int count = 0;
  cuda_check(cudaOccupancyMaxActiveClusters(&count, kernel, &raw), "cudaOccupancyMaxActiveClusters");
  return count;
}

}  // namespace hpc
