// Runs the low regime's routing of random calls in emulation and compares it with the host's index. Arguments: [fault]
// then cases "pairs,experts,live": of `experts` local experts, a share of `live` percent of the pairs. Prints "bad N" a
// case; exit status 1 where any is not 0.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sstream>
#include <string>

#include "emulation.hpp"
#include "hpc/grouped.hpp"
#include "kernels/low_route.cuh"

using namespace hpc::moe;

namespace {

template <bool kFew>
int check(const std::vector<int>& ids, int experts) {
  const int pairs = static_cast<int>(ids.size());
  static LowRoute route;
  alignas(16) static LowScratch scratch;
  std::memset(&route, 0xEE, sizeof(route));
  std::memset(&scratch, 0xEE, sizeof(scratch));
  IndexParams p{};
  p.topk_ids = ids.data();
  p.id_token_stride = p.id_slot_stride = p.top_k = 1;
  p.first_expert = 3;
  p.num_pairs = pairs;
  p.num_experts = experts;
  emulation::run(1, kLowThreads, [&] {
    emulation::predecessor_ended();
    low_route<int, kFew>(p, route, scratch);
  });
  const auto size = [](int count) { return static_cast<size_t>(count); };
  std::vector<int> offsets(size(experts + 1)), row_to_slot(size(pairs)), slot_to_row(size(pairs)),
      cursor(size(experts));
  const hpc::grouped::IdView<int> view = {ids.data(), pairs, 1, 1, 1, 3, experts};
  hpc::grouped::build_index(view, {8, 8, 0}, {offsets.data(), row_to_slot.data(), slot_to_row.data(), nullptr, 0},
                            cursor.data());
  int bad = 0;
  for (int pair = 0; pair < pairs; ++pair) {
    const int want = slot_to_row[size(pair)];
    bad += route.pair_to_row[pair] != (want < 0 ? kNoLowRow : want);
  }
  for (int row = 0; row < offsets.back(); ++row) bad += route.row_to_pair[row] != row_to_slot[size(row)];
  int tile = 0;
  for (int expert = 0; expert < experts; ++expert) {
    for (int row = offsets[size(expert)]; row < offsets[size(expert + 1)]; row += kLowTile, ++tile) {
      const LowTile& have = route.tiles[tile];
      bad += have.expert != expert || have.row != row || have.rows != min(kLowTile, offsets[size(expert + 1)] - row);
    }
  }
  return bad + (route.num_tiles != tile);
}

}  // namespace

int main(int argc, char** argv) {
  emulation::fault = std::atoi(argv[1]);
  std::mt19937 random(1);
  int total = 0;
  for (int i = 2; i < argc; ++i) {
    std::string text = argv[i];
    std::replace(text.begin(), text.end(), ',', ' ');
    std::istringstream in(text);
    int pairs = 0, experts = 0, live = 0;
    in >> pairs >> experts >> live;
    std::vector<int> ids(static_cast<size_t>(pairs));
    for (int& id : ids) {  // others are -1, or the neighbouring ranks'
      const int own = 3 + static_cast<int>(random() % static_cast<unsigned>(experts));
      const int other[] = {-1, 2, 3 + experts};
      id = static_cast<int>(random() % 100) < live ? own : other[random() % 3];
    }
    const int bad = (pairs <= kLowFewPairs ? check<true>(ids, experts) : 0) + check<false>(ids, experts);
    std::printf("%s: bad %d\n", argv[i], bad);
    total += bad;
  }
  return total != 0;
}
