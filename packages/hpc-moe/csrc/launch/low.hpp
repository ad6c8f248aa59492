// Launchers of the low regime's kernels. `wide_ids`: topk_ids are int64, else int32.
#pragma once

#include <cuda_runtime.h>

#include "kernels/params.hpp"

namespace hpc::moe {

// `few`: Config's; then x may be bf16.
void launch_low_up(Quant quant, bool bf16_x, bool few, bool wide_ids, const LowParams& p, int grid,
                   cudaStream_t stream);

// The steps of their own that quantise x before gate-up, and h before down (by block, `group` columns of I a scale).
void launch_low_quantise_x(Quant quant, const QuantiseParams& q, int num_sms, cudaStream_t stream);
void launch_low_quantise_h(const QuantiseParams& q, int group, int num_sms, cudaStream_t stream);

// `few`: Config's; h is then quantised by this kernel where it is bf16. `columns`: of H, that a CTA makes (16 or 32).
void launch_low_down(Quant quant, bool few, bool wide_ids, const LowParams& p, int columns, cudaStream_t stream);

}  // namespace hpc::moe
