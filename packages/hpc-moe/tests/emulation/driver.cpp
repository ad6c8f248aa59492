// Runs gate-up, down and reduction of one small layer in emulation and compares each with double precision, made from
// what the kernel before it left. Arguments: [fault] then cases "quant,T,k,E,H,I,grid,pick,promoted,widest[,KERNELS]":
// quant none, block or tensor; pick random, one (all on the last expert) or none; promoted 1 for the down kernel that
// promotes, or, by block, keeps rows of h in clusters and does not keep y in L2 with tokens as M, and the reduction
// that drops y; widest of the token tiles: 32, 64 or 128 (or 96: gate-up's tasks of three units, KERNELS even); KERNELS
// tokens: are M; clusters: of two CTAs, per tensor, or by block with tokens as M; threes: these where experts of three
// blocks are shared evenly; even: clusters and an even number of tiles. Down and the reduction run for all columns,
// then once more in panels of them. Prints "bad N" a case; exit status 1 where any is not 0, 3 where the emulation
// found a fault.
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>

#include "kernels/down.cuh"
#include "kernels/down_short.cuh"
#include "layer.hpp"

namespace {

struct Run : Layer {
  using Layer::Layer;

  template <Quant kQuant, bool kHalf>
  int run_clusters(const CUtensorMap& up_map, const CUtensorMap& down_map, const CUtensorMap& h_map) {
    GemmParams up = params(true), down = params(false);
    down.pairs = c.hidden / 256 % kKeptPairs ? 1 : kKeptPairs;
    const auto gate_up = [&] {
      if constexpr (kQuant == Quant::kBlock) {
        c.threes ? gate_up_tokens_kernel<kHalf, true, true>(up_map, up)
                 : gate_up_tokens_kernel<kHalf, true>(up_map, up);
      } else {
        if (c.widest == kTripleWidth) {
          return gate_up_kernel<kQuant, kHalf, kTripleWidth, false, true>(up_map, half_map(), up);
        }
        gate_up_kernel<kQuant, kHalf, 128, false, true>(up_map, half_map(), up);
      }
    };
    const auto of_down = [&](const CUtensorMap& of, const GemmParams& p) {
      if constexpr (kQuant == Quant::kBlock) {
        if (c.threes && kHalf == (c.promoted != 0)) return down_tokens_kernel<kHalf, true, kHalf, true>(of, h_map, p);
        if (kHalf && c.promoted) return down_tokens_kernel<kHalf, true, kHalf>(of, h_map, p);
        down_tokens_kernel<kHalf, true>(of, h_map, p);
      } else if (c.promoted) {
        down_kernel<kQuant, kHalf, 128, false, true>(of, h_map, p);
      } else {
        down_kernel<kQuant, kHalf, 128, true, true>(of, h_map, p);
      }
    };
    emulation::run(static_cast<unsigned>(c.grid), kGemmThreads, gate_up, true);
    int bad = check_h();
    emulation::run(static_cast<unsigned>(c.grid), kGemmThreads, [&] { of_down(down_map, down); }, true);
    bad += check_y() + check_out();
    return bad + check_panels(of_down, down, kQuant, true);
  }

  template <Quant kQuant, bool kHalf, int kWidth>
  int run() {
    const CUtensorMap up_map = map(true), down_map = map(false), h_map = row_map();
    GemmParams up = params(true), down = params(false);
    int bad = 0;
    constexpr bool kFp8 = kQuant != Quant::kNone;
    if constexpr (kFp8 && kWidth == 128) {
      if (c.clusters) return run_clusters<kQuant, kHalf>(up_map, down_map, h_map);
    }
    for (const int way : {0, 1}) {
      up.guess = way == 0 && static_cast<int>(tiles.size()) >= c.experts;
      up.singles_first = way == 0;
      h.assign(h.size(), 0xEE);
      const auto gate_up = [&] {
        if constexpr (kQuant == Quant::kBlock) {
          if (c.tokens_are_m) return gate_up_tokens_kernel<kHalf, false>(up_map, up);
        }
        way == 0 ? gate_up_kernel<kQuant, kHalf, kWidth, kFp8>(up_map, half_map(), up)
                 : gate_up_kernel<kQuant, kHalf, kWidth, false>(up_map, half_map(), up);
      };
      emulation::run(static_cast<unsigned>(c.grid), kGemmThreads, gate_up,
                     kQuant == Quant::kBlock && !kHalf && !c.tokens_are_m);
      bad += check_h();
    }
    const auto of_down = [&](const CUtensorMap& of, const GemmParams& p) {
      if constexpr (kQuant == Quant::kTensor) {
        if (!c.promoted) return down_kernel<kQuant, kHalf, kWidth, true>(of, h_map, p);
      }
      if constexpr (kQuant == Quant::kBlock) {
        if (c.tokens_are_m && c.promoted) return down_tokens_kernel<kHalf, false>(of, h_map, p);
        if (c.tokens_are_m) return down_tokens_kernel<kHalf, false, false, false, true>(of, h_map, p);
      }
      down_kernel<kQuant, kHalf, kWidth, false>(of, h_map, p);
    };
    emulation::run(static_cast<unsigned>(c.grid), kGemmThreads, [&] { of_down(down_map, down); });
    bad += check_y() + check_out();
    bad += check_panels(of_down, down, kQuant, false);
    if constexpr (kFp8 && kWidth < 128) {
      if (c.inter == kShortK && !c.tokens_are_m) bad += check_short<kQuant, kWidth>(down, h_map);
    }
    return bad;
  }

  // Short rows: the same bits, where the other kernel does not promote per tensor.
  template <Quant kQuant, int kWidth>
  int check_short(GemmParams down, const CUtensorMap& h_map) {
    const auto of_down = [&](const CUtensorMap& of, const GemmParams& p) {
      down_short_kernel<kQuant, kWidth, kWidth == 32>(of, h_map, p);
    };
    const std::vector<uint8_t> want = y;
    y.assign(y.size(), 0xFF);
    emulation::run(static_cast<unsigned>(c.grid), kShortThreads, [&] { of_down(short_map(), down); });
    int bad = check_y() + check_out();
    for (size_t i = 0; i < y.size() && !(kQuant == Quant::kTensor && c.promoted); ++i) bad += y[i] != want[i];
    return bad + check_panels(of_down, down, kQuant, false, kShortThreads, true);
  }

  template <Quant kQuant, bool kHalf>
  int run_width() {
    return c.widest == 32   ? run<kQuant, kHalf, 32>()
           : c.widest == 64 ? run<kQuant, kHalf, 64>()
                            : run<kQuant, kHalf, 128>();
  }

  int run_any() {
    if (tensor) return run_width<Quant::kTensor, false>();
    if (!block) return run<Quant::kNone, false, 128>();
    return scale_block == 64 ? run_width<Quant::kBlock, true>() : run_width<Quant::kBlock, false>();
  }
};

}  // namespace

int main(int argc, char** argv) {
  int total = 0;
  emulation::fault = std::atoi(argv[1]);
  for (int i = 2; i < argc; ++i) {
    std::string text = argv[i], kernels;
    std::replace(text.begin(), text.end(), ',', ' ');
    std::istringstream in(text);
    Case c;
    in >> c.quant >> c.tokens >> c.top_k >> c.experts >> c.hidden >> c.inter >> c.grid >> c.pick >> c.promoted >>
        c.widest >> kernels;
    c.even = kernels == "even";
    c.threes = kernels == "threes";
    c.clusters = c.even || c.threes || kernels == "clusters";
    c.tokens_are_m = kernels == "tokens" || (c.clusters && c.quant == "block");
    const int bad = Run(c).run_any();
    std::printf("%s: bad %d\n", argv[i], bad);
    std::fflush(stdout);
    total += bad;
  }
  return total != 0;
}
