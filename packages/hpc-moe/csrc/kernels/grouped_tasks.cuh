// The tasks of a grouped GEMM, in the order in which its CTAs take them by static stride; grouped_gemm.cuh has the
// plan.
#pragma once

#include "kernels/grouped_gemm.cuh"

namespace hpc::moe {

// Pairs of units: all of an expert are neighbours, pair outermost, then token tile. And single units, or halves of them
// where there are CTAs enough (kHalfUnits), or halves of the tile's rows (kRowHalves): of the pairs that would start a
// round of which less than half the CTAs have a task; and, where the number of units is odd, single ones of the last
// unit, two token tiles of an expert at once where it has them. Singles come last: among the pairs they would give
// every other CTA half the work. Or first (singles_first), where the weights' bytes are what takes time: the CTAs that
// have one task more then end with pairs, and ask for twice the bytes at a time while others have ended.
template <class T>
struct Schedule {
  static constexpr Gemm kGemm = T::kGemm;
  static constexpr int kNoTile = -1;
  static constexpr bool kRowHalves = T::kRowHalves;
  const GemmParams& p;
  int tiles, whole, split, singles;  // token tiles; tasks of pairs; pairs that are split; tasks of less than a pair
  int length, groups;                // kKept: pairs of units of a task (else 1); tasks of pairs of a tile
  int parts = 2;                     // of a pair that is split: units, or 4 halves of them
  float scale;                       // per tensor: of B
  int cta;                           // whose tasks

  __device__ __forceinline__ Schedule(const GemmParams& params, int num_tiles, float b_scale, int of_cta = blockIdx.x)
      : p(params), tiles(num_tiles), scale(b_scale), cta(of_cta) {
    // Several pairs of units a task where that leaves every CTA two.
    length = T::kKept && tiles * (p.units / 2 / p.pairs) >= 2 * static_cast<int>(gridDim.x) ? p.pairs : 1;
    groups = p.units / T::kUnits / length;
    const int pairs = tiles * groups, rest = pairs % static_cast<int>(gridDim.x);
    // With an odd number of units only where all tasks are one round.
    const int halves = p.units % 2 == 0 ? 2 * rest : 2 * pairs + tiles;
    split = length == 1 && !T::kTriples && halves <= static_cast<int>(gridDim.x) ? rest : 0;
    const int lasts = T::kTriples ? 0 : p.units % 2 * tiles;  // of the odd last unit
    if constexpr (T::kOddHalves) {
      if (split > 0 && 4 * split + 2 * lasts <= static_cast<int>(gridDim.x)) parts = 4;
    } else if (T::kHalfUnits && p.units % 2 == 0 && 4 * split <= static_cast<int>(gridDim.x)) {
      parts = 4;
    }
    whole = pairs - split;
    singles = parts * split + (T::kOddHalves ? parts / 2 : 1) * lasts;
  }

  // Tasks of this CTA, or of another; the first has most.
  __device__ __forceinline__ int count() const { return count_of(cta); }
  __device__ __forceinline__ int count_of(int of_cta) const {
    const int rest = whole + singles - of_cta;
    return rest > 0 ? (rest - 1) / static_cast<int>(gridDim.x) + 1 : 0;
  }

  // The CTA's task `turn` if tile i were the only one of expert i: for what is likely before the index is known.
  __device__ __forceinline__ TurnTask likely(int turn) const {
    if (turn >= count()) return {};
    const Spot at = spot(turn);
    const int tile = tile_index(at);
    return task({tile, 0, 1, 8}, unit_if_alone(at, tile), units(at), 0);
  }
  __device__ __forceinline__ int likely_tile(int turn) const {
    return turn < count() ? tile_index(spot(turn)) : kNoTile;
  }

  // The CTA's task `turn`; past the last, the end. `known`: tile `index`, so that it need not be loaded.
  __device__ __forceinline__ TurnTask at(int turn, int index = kNoTile, const grouped::TileTask& known = {}) const {
    if (turn >= count()) return {};
    const Spot at = spot(turn);
    const int mine = tile_index(at);
    grouped::TileTask tile = mine == index ? known : p.routing.tiles[mine];
    // An expert with several tiles has wide ones.
    const bool alone = tile.width <= T::kWidth / 2;
    const bool last = at.single >= parts * split;
    if (kRowHalves && at.single >= 0) return half(at, mine, tile);
    if (alone) return task(tile, unit_if_alone(at, mine), units(at), 0);
    if (last && (!T::kTwoTiles || (T::kOddHalves && parts == 4)))
      return task(tile, p.units - 1, T::kOddHalves ? units(at) : 1, 0);
    const int first = p.routing.tile_offsets[tile.expert], own = p.routing.tile_offsets[tile.expert + 1] - first;
    if (last) {
      if ((mine - first) % 2) return task(tile, p.units - 1, 0, 0);  // with the tile before it
      return task(tile, p.units - 1, 1, mine + 1 < first + own ? p.routing.tiles[mine + 1].rows : 0);
    }
    const int local = at.pair - first * groups;
    if constexpr (T::kTall) {
      // Enough of them for half the CTAs, none that would be split; not with an odd last unit (uneven).
      constexpr int kTiles = T::kTallTiles;
      const int high = (own + kTiles - 1) / kTiles, tasks = high * p.units;
      if (p.units % 2 == 0 && own > 2 * kTiles && 2 * tasks >= static_cast<int>(gridDim.x) &&
          first * groups + tasks <= whole) {
        if (local >= tasks) return task(tile, 0, 0, 0);
        const int unit = local / high, from = first + (local - unit * high) * kTiles;
        tile = p.routing.tiles[from];
        const grouped::TileTask end = p.routing.tiles[min(from + kTiles, first + own) - 1];
        const int rows = end.row + end.rows - tile.row;
        tile.rows = tile.width = (rows + 15) / 16 * 8;
        return task(tile, unit, 1, rows - tile.rows);
      }
    }
    const int group = local / own;
    if (own > 1) tile = p.routing.tiles[first + local - group * own];
    return task(tile, T::kUnits * length * group + unit_of_pair(at), units(at), 0);
  }

 private:
  struct Spot;

  // Rows 0 to 63 of a split pair's tile, or those after them, if there are any.
  __device__ __forceinline__ TurnTask half(const Spot& at, int mine, grouped::TileTask tile) const {
    const int first = p.routing.tile_offsets[tile.expert], own = p.routing.tile_offsets[tile.expert + 1] - first;
    const int local = at.pair - first * (p.units / 2), unit = local / own;
    if (own > 1) tile = p.routing.tiles[first + local - unit * own];
    const int rows = tile.rows;
    tile.rows = at.single % 2 ? rows - 64 : min(rows, 64);
    if (at.single % 2) tile.row += 64;
    if (tile.rows <= 0) return {0, 0.0f, 0, 0, 0, 8, 0, 0};
    return task(tile, 2 * unit, 2, 0);
  }

  struct Spot {
    int pair, single;  // single < 0: the whole pair; at least parts * split: the last unit of a tile
  };

  // TurnTask::units, and which unit of its pair the task has or begins with.
  __device__ __forceinline__ int units(const Spot& at) const {
    return at.single < 0 || kRowHalves ? 2 : parts == 2 ? 1 : kHalfUnit + at.single % 2;
  }
  __device__ __forceinline__ int unit_of_pair(const Spot& at) const {
    return at.single < 0 || kRowHalves ? 0 : at.single % parts / (parts / 2);
  }

  __device__ __forceinline__ Spot spot(int turn) const {
    const int index = cta + turn * gridDim.x;
    const int single = p.singles_first ? index : index - whole;
    if (single < 0 || single >= singles) return {p.singles_first ? index - singles : index, -1};
    return {whole + single / parts, single};
  }

  // Of the odd last unit: even tiles, then odd ones, so that CTAs in a row have work where an expert's tiles pair up.
  __device__ __forceinline__ int tile_index(const Spot& at) const {
    if (at.single >= parts * split) {
      const int index = at.single - parts * split, half = (tiles + 1) / 2;
      if (T::kOddHalves && parts == 4) return index / 2;
      return !T::kTwoTiles ? index : index < half ? 2 * index : 2 * (index - half) + 1;
    }
    return at.pair / groups;
  }

  // First unit of the task, where its expert has but this tile.
  __device__ __forceinline__ int unit_if_alone(const Spot& at, int tile) const {
    if (at.single >= parts * split) return p.units - 1;
    return T::kUnits * length * (at.pair - tile * groups) + unit_of_pair(at);
  }

  __device__ __forceinline__ TurnTask task(grouped::TileTask tile, int unit, int units, int second) const {
    if (T::kShareRows && units != 2 && units != 0 && second == 0 && tile.rows > T::kLeastN) {
      tile.width = (tile.rows + 15) / 16 * 8;
      second = tile.rows - tile.width;
      tile.rows = tile.width;
    }
    return {tile.row,
            T::kTensor ? p.w_scale[tile.expert] * scale : 1.0f,
            static_cast<uint16_t>(tile.expert),
            static_cast<uint16_t>(unit),
            static_cast<uint8_t>(tile.rows),
            static_cast<uint8_t>(tile.width),
            static_cast<uint8_t>(units),
            static_cast<uint8_t>(T::kKept ? (units == 2 ? length : 1) : second)};
  }
};

}  // namespace hpc::moe
