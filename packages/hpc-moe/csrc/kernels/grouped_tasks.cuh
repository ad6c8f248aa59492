// The tasks of a grouped GEMM, in the order in which its CTAs take them by static stride; grouped_gemm.cuh has the
// plan.
#pragma once

#include "kernels/grouped_gemm.cuh"

namespace hpc::moe {

// Pairs of units first: all of an expert are neighbours, pair outermost, then token tile; or (down, columns_first) pair
// outermost over all experts, so that y is written column by column. Then single units: of the pairs
// that would start a round of which less than half the CTAs have a task (not where pairs must stay together), and,
// where the number of units is odd, of the last unit, two token tiles of an expert at once where it has them. Among the
// pairs these would give every other CTA half the work.
template <Gemm kGemm, class T, bool kTensorScale>
struct Schedule {
  const GemmParams& p;
  int tiles, whole, split;  // token tiles; tasks of pairs; pairs that are split
  float scale;              // per tensor: of B

  __device__ __forceinline__ explicit Schedule(const GemmParams& params)
      : p(params),
        tiles(params.routing.tile_offsets[params.experts]),
        scale(kTensorScale ? *(kGemm == Gemm::kUp ? params.b_scale : params.act_scale) : 1.0f) {
    const int pairs = tiles * (p.units / 2), rest = pairs % static_cast<int>(gridDim.x);
    split = !T::kPairsOnly && p.units % 2 == 0 && 2 * rest <= static_cast<int>(gridDim.x) ? rest : 0;
    whole = pairs - split;
  }

  // Tasks of this CTA.
  __device__ __forceinline__ int count() const {
    const int rest = whole + 2 * split + p.units % 2 * tiles - static_cast<int>(blockIdx.x);
    return rest > 0 ? (rest - 1) / static_cast<int>(gridDim.x) + 1 : 0;
  }

  // The CTA's task `turn`; past the last, the end.
  __device__ __forceinline__ TurnTask at(int turn) const {
    if (turn >= count()) return {};
    int pair = blockIdx.x + turn * gridDim.x, single = -1;
    if (pair >= whole) {
      single = pair - whole;
      if (single >= 2 * split) return last_unit(single - 2 * split);
      pair = whole + single / 2;
    }
    if constexpr (kGemm == Gemm::kDown) {
      if (p.columns_first) {
        const int unit = pair / tiles;
        const grouped::TileTask tile = p.routing.tiles[pair - unit * tiles];
        return single < 0 ? task(tile, 2 * unit, 2, 0) : task(tile, 2 * unit + single % 2, 1, 0);
      }
    }
    grouped::TileTask tile = p.routing.tiles[pair / (p.units / 2)];  // one of the expert's
    const int first = p.routing.tile_offsets[tile.expert], own = p.routing.tile_offsets[tile.expert + 1] - first;
    const int local = pair - first * (p.units / 2), unit = local / own;
    if (own > 1) tile = p.routing.tiles[first + local - unit * own];
    return single < 0 ? task(tile, 2 * unit, 2, 0) : task(tile, 2 * unit + single % 2, 1, 0);
  }

 private:
  // Of the odd last unit: even tiles, then odd ones, so that CTAs in a row have work where an expert's tiles pair up.
  __device__ __forceinline__ TurnTask last_unit(int index) const {
    if constexpr (!T::kTwoTiles) return task(p.routing.tiles[index], p.units - 1, 1, 0);
    const int half = (tiles + 1) / 2, at = index < half ? 2 * index : 2 * (index - half) + 1;
    const grouped::TileTask tile = p.routing.tiles[at];
    const int first = p.routing.tile_offsets[tile.expert], next = p.routing.tile_offsets[tile.expert + 1];
    if ((at - first) % 2) return task(tile, p.units - 1, 0, 0);  // with the tile before it
    return task(tile, p.units - 1, 1, at + 1 < next ? p.routing.tiles[at + 1].rows : 0);
  }

  __device__ __forceinline__ TurnTask task(const grouped::TileTask& tile, int unit, int units, int second) const {
    return {tile.row,
            kTensorScale ? p.w_scale[tile.expert] * scale : 1.0f,
            static_cast<uint16_t>(tile.expert),
            static_cast<uint16_t>(unit),
            static_cast<uint8_t>(tile.rows),
            static_cast<uint8_t>(tile.width),
            static_cast<uint8_t>(units),
            static_cast<uint8_t>(second)};
  }
};

}  // namespace hpc::moe
