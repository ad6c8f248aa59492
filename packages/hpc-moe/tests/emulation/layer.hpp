// One small layer of random numbers, what its kernels are given, and what each must leave, from what the kernel before
// it left, in double precision.
#pragma once

#include <random>
#include <string>

#include "emulation.hpp"
#include "hpc/grouped.hpp"
#include "hpc/tma.cuh"
#include "kernels/gate_up.cuh"
#include "kernels/panels.hpp"
#include "kernels/reduce.cuh"

using namespace hpc::moe;
using hpc::bf16_value;
using hpc::e4m3_value;

inline std::mt19937 generator(1);

struct Case {
  std::string quant;
  int tokens, top_k, experts, hidden, inter, grid;
  std::string pick;
  int promoted, widest;
  bool tokens_are_m = false, clusters = false, even = false, threes = false;
};

struct Layer {
  Case c;
  bool block, tensor;
  int element, rows, scale_block;
  std::vector<uint8_t> x, w13, w2, h, y, out, shared;
  std::vector<float> x_scale, w13_scale, w2_scale, h_scale, weights;
  float act_scale = 0.02f;
  std::vector<int> ids, offsets, tile_offsets, row_to_slot, slot_to_row;
  std::vector<hpc::grouped::TileTask> tiles;

  double value(const std::vector<uint8_t>& from, size_t index) const {
    return element == 1 ? e4m3_value(from[index]) : bf16_value(&from[2 * index]);
  }

  std::vector<uint8_t> random_values(size_t count) const {
    std::normal_distribution<float> normal;
    std::vector<uint8_t> values(count * static_cast<size_t>(element));
    for (size_t i = 0; i < count; ++i) {
      if (element == 1) {
        values[i] = __nv_cvt_float_to_fp8(8 * normal(generator), __NV_SATFINITE, __NV_E4M3);
      } else {
        const __nv_bfloat16 half = __float2bfloat16_rn(normal(generator) / 2);
        std::memcpy(&values[2 * i], &half, 2);
      }
    }
    return values;
  }

  static std::vector<float> random_scales(size_t count, float size) {
    std::uniform_real_distribution<float> factor(0.25f, 4.0f);
    std::vector<float> scales(count);
    for (float& scale : scales) scale = size * factor(generator);
    return scales;
  }

  explicit Layer(const Case& of) : c(of), block(c.quant == "block"), tensor(c.quant == "tensor") {
    const auto size = [](auto... factors) { return (static_cast<size_t>(factors) * ...); };
    element = block || tensor ? 1 : 2;
    rows = c.tokens * c.top_k;
    scale_block = c.inter % 128 == 0 ? 128 : 64;
    x = random_values(size(c.tokens, c.hidden));
    w13 = random_values(size(c.experts, 2 * c.inter, c.hidden));
    w2 = random_values(size(c.experts, c.hidden, c.inter));
    x_scale = random_scales(block ? size(c.tokens, c.hidden / 128) : 1, 0.05f);
    w13_scale =
        random_scales(block ? size(c.experts, 2 * c.inter / scale_block, c.hidden / 128) : size(c.experts), 0.02f);
    w2_scale = random_scales(block ? size(c.experts, c.hidden / 128, c.inter / scale_block) : size(c.experts), 0.1f);
    weights = random_scales(size(rows), 1.0f);
    h.assign(size(rows, c.inter, element), 0xEE);
    h_scale.assign(size(rows, c.inter / scale_block), NAN);
    y.assign(size(rows, c.hidden, 2), 0xFF);
    out.assign(size(c.tokens, c.hidden, 2), 0xFF);
    shared.resize(out.size());
    for (size_t i = 0; i < shared.size(); i += 2) {
      const __nv_bfloat16 value = __float2bfloat16_rn(static_cast<float>(generator() % 512) / 256 - 1);
      std::memcpy(&shared[i], &value, 2);
    }
    ids.resize(size(rows));
    for (int& id : ids) {
      id = static_cast<int>(generator() % static_cast<unsigned>(c.experts + 1));
      if (id == c.experts || c.pick == "none") id = -1;
      if (c.pick == "one") id = c.experts - 1;
    }
    const hpc::grouped::TileRule rule =
        c.tokens_are_m ? kTokenTileRule : hpc::grouped::TileRule{c.widest, kTileRule.granule, c.even};
    offsets.resize(size(c.experts + 1));
    row_to_slot.resize(size(rows));
    slot_to_row.resize(size(rows));
    std::vector<int> cursor(size(c.experts));
    tiles.resize(static_cast<size_t>(hpc::grouped::max_tiles(rows, c.experts, rule)));
    const hpc::grouped::IdView<int> view = {ids.data(), c.tokens, c.top_k, c.top_k, 1, 0, c.experts};
    hpc::grouped::build_index(
        view, rule,
        {offsets.data(), row_to_slot.data(), slot_to_row.data(), tiles.data(), static_cast<int64_t>(tiles.size())},
        cursor.data());
    tile_offsets.push_back(0);
    for (int e = 0; e < c.experts; ++e) {
      const int count = offsets[size(e + 1)] - offsets[size(e)];
      tile_offsets.push_back(tile_offsets.back() + hpc::grouped::num_tiles(count, rule));
    }
  }

  int expert(int row) const { return ids[static_cast<size_t>(row_to_slot[static_cast<size_t>(row)])]; }
  int live() const { return offsets.back(); }

  GemmParams params(bool up) {
    GemmParams p{};
    p.routing = {offsets.data(), tile_offsets.data(), row_to_slot.data(), slot_to_row.data(), tiles.data()};
    p.b = up ? x.data() : h.data();
    p.b_stride = static_cast<uint32_t>((up ? c.hidden : c.inter) * element / 16);
    p.b_scale = up ? x_scale.data() : h_scale.data();
    p.b_scale_stride = up ? c.hidden / 128 : c.inter / scale_block;
    p.b_scale_step = 1;
    p.experts = c.experts;
    p.w_scale = up ? w13_scale.data() : w2_scale.data();
    p.w_scale_rows = up ? 2 * c.inter / scale_block : c.hidden / 128;
    p.w_scale_cols = up ? c.hidden / 128 : c.inter / scale_block;
    p.act_scale = &act_scale;
    p.out = up ? h.data() : y.data();
    p.out_scale = h_scale.data();
    p.k_bytes = (up ? c.hidden : c.inter) * element;
    p.units = up ? c.inter / 64 : c.hidden / 128;
    p.out_columns = up ? c.inter : c.hidden;
    p.weight_rows = up ? 2 * c.inter : c.hidden;
    p.top_k = c.top_k;
    p.swiglu_limit = 3.0f;
    return p;
  }

  static CUtensorMap as_map(const EmulatedMap& made) {
    CUtensorMap map;
    std::memcpy(&map, &made, sizeof(made));
    return map;
  }

  // As launch/weight_map.cu makes them; down: of a panel that begins at column `first`.
  CUtensorMap map(bool up, int first = 0) const {
    const uint64_t k = static_cast<uint64_t>((up ? c.hidden : c.inter) * element);
    const uint64_t all = static_cast<uint64_t>(c.experts * (up ? 2 * c.inter : c.hidden) - first);
    const uint8_t* w = up ? w13.data() : panel_weights(w2.data(), static_cast<int64_t>(k), first);
    if (c.tokens_are_m) {
      return up ? as_map({w, {k, 2, 4, 8, all / 64}, {1, k, 16 * k, 2 * k, 64 * k}, {128, 2, 4, 8, 1}})
                : as_map({w, {k, 2, 4, 4, all / 32}, {1, k, 8 * k, 2 * k, 32 * k}, {128, 2, 4, 4, 4}});
    }
    return up ? as_map({w, {k, 8, 2, all / 16, 1}, {1, 2 * k, k, 16 * k, 0}, {128, 8, 2, 4, 1}})
              : as_map({w, {k, 8, 2, all / 32, 2}, {1, 4 * k, k, 32 * k, 2 * k}, {128, 8, 2, 4, 2}});
  }

  // Down's of short rows, from column `first` on.
  CUtensorMap short_map(int first = 0) const {
    const auto k = static_cast<uint64_t>(c.inter);
    const auto all = static_cast<uint64_t>(c.experts * c.hidden - first);
    const uint8_t* w = panel_weights(w2.data(), c.inter, first);
    return as_map({w, {128, 8, 2, all / 32, k / 64}, {1, 4 * k, 2 * k, 32 * k, 128}, {128, 8, 2, 4, 1}});
  }

  CUtensorMap half_map() const {
    const auto k = static_cast<uint64_t>(c.hidden * element), inter = static_cast<uint64_t>(c.inter);
    return as_map({w13.data(), {k, 8, 2, w13.size() / k / 8, 1}, {1, k, inter * k, 8 * k, 0}, {128, 8, 2, 4, 1}});
  }

  CUtensorMap row_map() const {
    const auto k = static_cast<uint64_t>(c.inter * element);
    return as_map({h.data(), {k, static_cast<uint64_t>(rows), 1, 1, 1}, {1, k, 0, 0, 0}, {128, kRowsBox, 1, 1, 1}});
  }

  // Product of a row of B and a weight row over K, with its scales.
  template <class B>
  double product(const B& b, int k, const std::vector<uint8_t>& w, size_t weight_row, int group, const float* w_scales,
                 const float* b_scales) const {
    double sum = 0;
    for (int g = 0; g < k / group; ++g) {
      double part = 0;
      for (int i = g * group; i < (g + 1) * group; ++i) {
        part += b(i) * value(w, weight_row * static_cast<size_t>(k) + static_cast<size_t>(i));
      }
      sum += block ? part * w_scales[g] * b_scales[g] : part;
    }
    return sum;
  }

  double act_value(int row, int column) const {
    const double stored =
        value(h, static_cast<size_t>(row) * static_cast<size_t>(c.inter) + static_cast<size_t>(column));
    if (tensor) return stored * act_scale;
    return block ? stored * h_scale[static_cast<size_t>(row * (c.inter / scale_block) + column / scale_block)] : stored;
  }

  int check_h() const {
    int bad = 0;
    for (int row = 0; row < live(); ++row) {
      const int token = row_to_slot[static_cast<size_t>(row)] / c.top_k, e = expert(row), groups = c.hidden / 128;
      std::vector<double> act(static_cast<size_t>(c.inter));
      for (int i = 0; i < c.inter; ++i) {
        double of[2];
        for (int m = 0; m < 2; ++m) {
          const int weight_row = m * c.inter + i;
          const float* scales =
              &w13_scale[block ? static_cast<size_t>((e * (2 * c.inter / scale_block) + weight_row / scale_block) *
                                                     groups)
                               : static_cast<size_t>(e)];
          of[m] = product(
              [&](int k) {
                return value(x, static_cast<size_t>(token) * static_cast<size_t>(c.hidden) + static_cast<size_t>(k));
              },
              c.hidden, w13, static_cast<size_t>(e * 2 * c.inter + weight_row), 128, scales,
              &x_scale[block ? static_cast<size_t>(token * groups) : 0]);
          if (tensor) of[m] *= static_cast<double>(x_scale[0]) * *scales;
        }
        const double gate = min(of[0], 3.0);
        act[static_cast<size_t>(i)] = gate / (1 + std::exp(-gate)) * max(min(of[1], 3.0), -3.0);
      }
      for (int i = 0; i < c.inter; ++i) {
        double largest = 0;
        for (int j = i / scale_block * scale_block; j < (i / scale_block + 1) * scale_block; ++j) {
          largest = max(largest, std::abs(act[static_cast<size_t>(j)]));
        }
        const double want = act[static_cast<size_t>(i)], size = std::abs(want);
        const double allowed = block    ? size * 0.07 + largest * 1e-4
                               : tensor ? size * 0.07 + act_scale * 0.01
                                        : size * 0.01 + 1e-3;
        if (!(std::abs(act_value(row, i) - want) <= allowed)) ++bad;  // NaN counts
        if (block) {
          const double scale = h_scale[static_cast<size_t>(row * (c.inter / scale_block) + i / scale_block)];
          if (!(std::abs(scale * 448 - largest) <= largest * 0.01)) ++bad;
        }
      }
    }
    return bad;
  }

  int check_y() const {
    int bad = 0;
    for (int row = 0; row < rows; ++row) {
      const size_t first = static_cast<size_t>(row) * static_cast<size_t>(c.hidden);
      if (row >= live()) {  // nobody's rows stay as they were
        for (size_t i = 2 * first; i < 2 * (first + static_cast<size_t>(c.hidden)); ++i) bad += y[i] != 0xFF;
        continue;
      }
      const int e = expert(row), groups = c.inter / scale_block;
      std::vector<double> want(static_cast<size_t>(c.hidden));
      double square = 0;
      for (int j = 0; j < c.hidden; ++j) {
        const float* scales =
            &w2_scale[block ? static_cast<size_t>((e * (c.hidden / 128) + j / 128) * groups) : static_cast<size_t>(e)];
        const std::vector<float> ones(static_cast<size_t>(groups), 1.0f);
        double sum = product([&](int k) { return act_value(row, k); }, c.inter, w2,
                             static_cast<size_t>(e * c.hidden + j), scale_block, scales, ones.data());
        if (tensor) sum *= *scales;
        want[static_cast<size_t>(j)] = sum;
        square += sum * sum;
      }
      const double size = std::sqrt(square / c.hidden);
      for (int j = 0; j < c.hidden; ++j) {
        const double off = bf16_value(&y[2 * (first + static_cast<size_t>(j))]) - want[static_cast<size_t>(j)];
        if (!(std::abs(off) <= std::abs(want[static_cast<size_t>(j)]) * 0.005 + size * 0.002)) ++bad;
      }
    }
    return bad;
  }

  ReduceParams reduce_params() {
    ReduceParams p{};
    p.slot_to_row = slot_to_row.data();
    p.topk_weights = weights.data();
    p.weight_token_stride = c.top_k;
    p.weight_slot_stride = 1;
    p.out = out.data();
    p.out_stride = c.hidden;
    p.routed_scaling_factor = 1.5f;
    p.num_tokens = c.tokens;
    p.hidden = c.hidden;
    p.top_k = c.top_k;
    p.shared_output = shared.data();
    p.shared_stride = c.hidden;
    return p;
  }

  void reduce(const ReduceParams& p) const {
    emulation::run(static_cast<unsigned>(c.tokens < 5 ? c.tokens : 5), kReduceThreads,
                   [&] { c.promoted ? reduce_kernel<true>(p) : reduce_kernel<false>(p); });
  }

  // Down and the reduction in panels of 256 and 512 columns, in a place for one, as launch/call.cu has them: the same
  // bits. `down`: the kernel, of a map and parameters; `threads` of a CTA; `lines`: its map is short_map().
  template <class Down>
  int check_panels(Down down, const GemmParams& whole, Quant quant, bool of_two, int threads = kGemmThreads,
                   bool lines = false) {
    int bad = 0;
    const std::vector<uint8_t> want = out;
    for (const int columns : {256, 512}) {
      if (columns >= c.hidden) continue;
      std::vector<uint8_t> place(static_cast<size_t>(rows * columns * 2));
      out.assign(out.size(), 0xFF);
      for (int first = 0; first < c.hidden; first += columns) {
        const int own = min(columns, c.hidden - first);
        place.assign(place.size(), 0xFF);
        GemmParams d = panel_of(whole, quant, first, own);
        d.out = place.data();
        d.pairs = 1;
        const CUtensorMap of = lines ? short_map(first) : map(false, first);
        emulation::run(static_cast<unsigned>(c.grid), threads, [&] { down(of, d); }, of_two);
        ReduceParams r = panel_of(reduce_params(), first, own);
        r.y = place.data();
        reduce(r);
      }
      for (size_t i = 0; i < out.size(); ++i) bad += out[i] != want[i];
    }
    return bad;
  }

  int check_out() {
    ReduceParams p = reduce_params();
    std::vector<uint8_t> dropped = y;
    p.y = dropped.data();
    reduce(p);
    int bad = 0;
    for (int token = 0; token < c.tokens; ++token) {
      for (int j = 0; j < c.hidden; ++j) {
        double sum = bf16_value(&shared[2 * static_cast<size_t>(token * c.hidden + j)]), size = std::abs(sum);
        for (int slot = 0; slot < c.top_k; ++slot) {
          const size_t pair = static_cast<size_t>(token * c.top_k + slot);
          if (slot_to_row[pair] < 0) continue;
          const size_t at =
              static_cast<size_t>(slot_to_row[pair]) * static_cast<size_t>(c.hidden) + static_cast<size_t>(j);
          const double term = 1.5 * weights[pair] * bf16_value(&y[2 * at]);
          sum += term;
          size += std::abs(term);
        }
        const size_t at = static_cast<size_t>(token) * static_cast<size_t>(c.hidden) + static_cast<size_t>(j);
        if (!(std::abs(bf16_value(&out[2 * at]) - sum) <= std::abs(sum) * 0.004 + size * 1e-5)) ++bad;
      }
    }
    return bad;
  }
};
