// Launchers of the low regime's two kernels. `wide_ids`: topk_ids are int64, else int32.
#pragma once

#include <cuda_runtime.h>

#include "kernels/params.hpp"

namespace hpc::moe {

void launch_low_up(Quant quant, bool bf16_x, bool wide_ids, const LowParams& p, int grid, cudaStream_t stream);

// `columns`: of H, that a CTA makes (16 or 32).
void launch_low_down(Quant quant, bool wide_ids, const LowParams& p, int columns, cudaStream_t stream);

}  // namespace hpc::moe
