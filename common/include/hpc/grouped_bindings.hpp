// nanobind functions over hpc/grouped.hpp: hpc_common._core and each operator's extension that uses the map bind the
// same ones, so an operator plans with exactly what it was compiled with. hpc_common.grouped is their Python face.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "hpc/checks.hpp"
#include "hpc/grouped.hpp"

namespace hpc::grouped {

namespace detail {

inline TileRule make_rule(int32_t max_rows, int32_t granule, bool even) {
  const char* where = "hpc_common.grouped";
  check(granule >= 1 && granule <= 4096, where, "granule", "an int in [1, 4096]", granule);
  check(max_rows >= granule && max_rows <= (1 << 20) && max_rows % granule == 0, where, "max_rows",
        text("a multiple of granule (", granule, ") up to 1048576"), max_rows);
  return {max_rows, granule, even};
}

inline int32_t checked_count(int64_t count) {
  check(count >= 0 && count < (int64_t{1} << 30), "hpc_common.grouped", "count", "an int in [0, 2^30)", count);
  return static_cast<int32_t>(count);
}

template <class Id>
nanobind::tuple run_index(const IdView<Id>& ids, TileRule rule, const IndexArrays& arrays) {
  IndexCounts counts;
  {
    nanobind::gil_scoped_release release;
    std::vector<int32_t> cursor(ids.num_local);
    counts = build_index(ids, rule, arrays, cursor.data());
  }
  check(counts.num_tiles >= 0, "hpc_common.grouped", "tasks", "room for every tile", arrays.task_capacity);
  return nanobind::make_tuple(counts.num_rows, counts.num_tiles);
}

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace detail

// Adds grouped_num_tiles, grouped_tile_rows, grouped_tile_span, grouped_max_tiles and grouped_build_index to `module`.
// A rule is passed as (max_rows, granule, even). Addresses are ints; the caller keeps the memory alive.
inline void bind(nanobind::module_& module) {
  namespace nb = nanobind;
  using nb::literals::operator""_a;

  module.def(
      "grouped_num_tiles",
      [](int64_t count, int32_t max_rows, int32_t granule, bool even) {
        return num_tiles(detail::checked_count(count), detail::make_rule(max_rows, granule, even));
      },
      "count"_a, "max_rows"_a = 128, "granule"_a = 8, "even"_a = true, "Tiles of an expert with `count` rows.");
  module.def(
      "grouped_tile_rows",
      [](int64_t count, int32_t max_rows, int32_t granule, bool even) {
        return tile_rows(detail::checked_count(count), detail::make_rule(max_rows, granule, even));
      },
      "count"_a, "max_rows"_a = 128, "granule"_a = 8, "even"_a = true, "Width of the tiles of an expert.");
  module.def(
      "grouped_tile_span",
      [](int64_t count, int32_t tile, int32_t max_rows, int32_t granule, bool even) {
        const TileRule rule = detail::make_rule(max_rows, granule, even);
        const int32_t rows = detail::checked_count(count), tiles = num_tiles(rows, rule);
        check(tile >= 0 && tile < tiles, "hpc_common.grouped", "tile", text("an int in [0, ", tiles, ")"), tile);
        const TileSpan span = tile_span(rows, tile, rule);
        return nb::make_tuple(span.first, span.rows);
      },
      "count"_a, "tile"_a, "max_rows"_a = 128, "granule"_a = 8, "even"_a = true,
      "(first row, rows) of a tile, counted from the expert's first row.");
  module.def(
      "grouped_max_tiles",
      [](int64_t rows, int32_t experts, int32_t max_rows, int32_t granule, bool even) {
        check(experts >= 1, "hpc_common.grouped", "experts", "a positive int", experts);
        return max_tiles(detail::checked_count(rows), experts, detail::make_rule(max_rows, granule, even));
      },
      "rows"_a, "experts"_a, "max_rows"_a = 128, "granule"_a = 8, "even"_a = true,
      "Most tiles that `rows` rows over `experts` experts can make.");
  module.def(
      "grouped_build_index",
      [](uintptr_t ids, int32_t id_bytes, int64_t tokens, int32_t top_k, int64_t token_stride, int64_t slot_stride,
         int64_t first, int32_t num_local, int32_t max_rows, int32_t granule, bool even, uintptr_t offsets,
         uintptr_t row_to_slot, uintptr_t slot_to_row, uintptr_t tasks, int64_t task_capacity) {
        const char* where = "hpc_common.grouped";
        check(id_bytes == 4 || id_bytes == 8, where, "topk_ids", "int32 or int64", text(id_bytes, " bytes an id"));
        check(top_k >= 1, where, "top_k", "a positive int", top_k);
        check(num_local >= 1, where, "num_local_experts", "a positive int", num_local);
        check(tokens >= 0, where, "topk_ids", "a number of tokens that is not negative", tokens);
        detail::checked_count(tokens * top_k);
        const TileRule rule = detail::make_rule(max_rows, granule, even);
        const IndexArrays arrays{detail::at<int32_t>(offsets), detail::at<int32_t>(row_to_slot),
                                 detail::at<int32_t>(slot_to_row), detail::at<TileTask>(tasks), task_capacity};
        if (id_bytes == 4) {
          return detail::run_index(IdView<int32_t>{detail::at<const int32_t>(ids), tokens, top_k, token_stride,
                                                   slot_stride, first, num_local},
                                   rule, arrays);
        }
        return detail::run_index(
            IdView<int64_t>{detail::at<const int64_t>(ids), tokens, top_k, token_stride, slot_stride, first, num_local},
            rule, arrays);
      },
      "ids"_a, "id_bytes"_a, "tokens"_a, "top_k"_a, "token_stride"_a, "slot_stride"_a, "first"_a, "num_local"_a,
      "max_rows"_a, "granule"_a, "even"_a, "offsets"_a, "row_to_slot"_a, "slot_to_row"_a, "tasks"_a, "task_capacity"_a,
      "Fills the arrays of hpc::grouped::IndexArrays (CPU addresses); returns (num_rows, num_tiles).");
}

}  // namespace hpc::grouped
