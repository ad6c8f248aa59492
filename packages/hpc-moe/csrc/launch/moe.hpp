// Launchers of the four kernels of a fused_moe call, one after another in a stream; run_chunk() is the order.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "kernels/params.hpp"

namespace hpc::moe {

// Routing index and tiles; quantises x where q.x is set. `wide_ids`: topk_ids are int64, else int32.
void launch_index(Quant quant, const IndexParams& p, const QuantiseParams& q, grouped::TileRule rule, bool wide_ids,
                  int num_sms, cudaStream_t stream);

// The grouped GEMMs. `half`: I % 128 != 0, so that its scales are per 64. `map`: see weight_map().
// `half_map`: gate_up_half_map(). `tokens`: are M; `clusters`: of two CTAs; `widest`: of the token tiles; `exact`:
// Config's.
void launch_gate_up(Quant quant, bool half, const CUtensorMap& map, const CUtensorMap& half_map, const GemmParams& p,
                    bool tokens, bool clusters, int widest, bool exact, int grid, cudaStream_t stream);
void launch_down(Quant quant, bool half, const CUtensorMap& map, const CUtensorMap& h_map, const GemmParams& p,
                 bool tokens, bool clusters, int widest, int grid, cudaStream_t stream);

// Down where Config::short_rows; `map`: down_short_map().
void launch_down_short(Quant quant, const CUtensorMap& map, const CUtensorMap& h_map, const GemmParams& p, int widest,
                       int grid, cudaStream_t stream);

void launch_reduce(const ReduceParams& p, bool discard, int num_sms, cudaStream_t stream);

// Tensor maps of the weights, with the row orders that kernels/gate_up.cuh and kernels/down.cuh describe.
// `rows`: E * 2 I or E * H; `row_bytes`: of K.
CUtensorMap gate_up_weight_map(const void* w13, int64_t rows, int64_t row_bytes, bool tokens);
CUtensorMap down_weight_map(const void* w2, int64_t rows, int64_t row_bytes, bool tokens);
// Down's of short rows, by the lines of each two.
CUtensorMap down_short_map(const void* w2, int64_t rows, int64_t row_bytes);
// Of gate-up's half units, per tensor.
CUtensorMap gate_up_half_map(const void* w13, int64_t rows, int64_t row_bytes, int64_t intermediate);
// And of h, `rows` of it.
CUtensorMap down_row_map(const void* h, int64_t rows, int64_t row_bytes);

}  // namespace hpc::moe
