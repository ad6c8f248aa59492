// Launches the plan kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hpc/schedule.hpp"

namespace hpc::attention {

// Writes the map of one step on the current device; one kernel, no allocation, no synchronisation.
// seq_lens: [shape.batch] on the device. map: decode_map_bytes(...) on the device, 16-byte aligned; contents don't
// matter. The shape must have passed check_decode_shape.
void launch_plan(const int32_t* seq_lens, const DecodeShape& shape, void* map, cudaStream_t stream);

}  // namespace hpc::attention
