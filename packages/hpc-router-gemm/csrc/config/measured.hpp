// Configs that were the fastest of up to 680 (every tile, split and number of stages that fits; three terms, and sums
// apart: of up to 40) on one H200 (132 SMs, driver 580.159), 2026-11-30, cold, graph replay. A row serves up to `m_to`
// tokens; the last of a size, all above. tuned.py takes such a table of one's own GPU.
#pragma once

#include <cstdint>

namespace hpc::router {

struct Measured {
  int n, k;
  int64_t m_to;
  bool stream;
  int rows, tokens, k_groups, split, stages;  // stages 0: what complete() takes
  bool sums_apart = false;
  int terms = 2;          // of the weight; where a size has none for three, those for two serve
  bool presplit = false;  // serves where the terms are in memory; before the row for where they are not
  bool paired = false;
};

constexpr int kMeasuredSms = 132;
constexpr Measured kMeasured[] = {
    {192, 4096, 8, true, 32, 8, 1, 8, 0},
    {192, 4096, 16, true, 16, 16, 1, 8, 0},
    {192, 4096, 32, true, 16, 32, 1, 8, 0},
    {192, 4096, 64, true, 16, 64, 1, 8, 0},
    {192, 4096, 128, false, 64, 64, 1, 16, 6, true},
    {192, 4096, 208, false, 64, 104, 1, 16, 7},
    {192, 4096, 256, false, 64, 64, 1, 8, 0},
    {192, 4096, 520, false, 64, 104, 1, 8, 6, true, 2, true},
    {192, 4096, 520, false, 64, 104, 1, 8, 8, true},
    {192, 4096, 1040, false, 64, 104, 1, 4, 6, true, 2, true},
    {192, 4096, 1040, false, 64, 104, 2, 4, 6, true},
    {192, 4096, 2080, false, 64, 104, 1, 2, 6, true, 2, true},
    {192, 4096, 2080, false, 64, 104, 2, 2, 6, true},
    {192, 4096, 4160, false, 64, 104, 1, 1, 7, false, 2, true},
    {192, 4096, 4224, false, 64, 192, 2, 2, 5},
    {384, 3072, 8, true, 48, 8, 1, 6, 0},
    {384, 3072, 16, true, 16, 16, 1, 4, 0},
    {384, 3072, 64, false, 64, 64, 1, 16, 6, true},
    {384, 3072, 128, false, 64, 64, 1, 8, 9},
    {384, 3072, 256, false, 64, 64, 1, 4, 8, true, 2, true, true},
    {384, 3072, 256, false, 64, 128, 1, 8, 8, true},
    {384, 3072, 520, false, 64, 104, 1, 4, 5, true, 2, true},
    {384, 3072, 520, false, 64, 104, 2, 4, 6, true},
    {384, 3072, 1040, false, 64, 104, 1, 2, 6, true, 2, true},
    {384, 3072, 1040, false, 64, 104, 2, 2, 6, true},
    {384, 3072, 2080, false, 64, 104, 1, 1, 7, false, 2, true},
    {384, 3072, 2080, false, 64, 192, 2, 2, 5},
    {384, 3072, 4224, false, 64, 192, 1, 1, 5, false, 2, true},
    {384, 3072, 4224, false, 64, 192, 2, 1, 5},
    {384, 3072, INT64_MAX, false, 128, 192, 1, 1, 0},
    {768, 6144, 8, true, 32, 8, 1, 6, 3},
    {768, 6144, 64, false, 64, 64, 1, 8, 10},
    {768, 6144, 128, false, 64, 128, 2, 8, 6, true},
    {768, 6144, 256, false, 64, 128, 1, 4, 6, true, 2, true, true},
    {768, 6144, 256, false, 64, 128, 2, 4, 6, true},
    {768, 6144, 528, false, 64, 176, 1, 3, 5, false, 2, true},
    {768, 6144, 520, false, 64, 104, 2, 2, 6, true},
    {768, 6144, 1040, false, 64, 104, 1, 1, 7, false, 2, true},
    {768, 6144, 1040, false, 64, 208, 1, 2, 5},
    {768, 6144, 2112, false, 64, 192, 2, 1, 5},
    {768, 6144, INT64_MAX, false, 128, 192, 1, 1, 0},
    {192, 4096, 8, true, 32, 8, 1, 8, 0, false, 3},
    {192, 4096, 16, true, 16, 16, 1, 8, 0, false, 3},
    {192, 4096, 32, true, 16, 32, 1, 8, 0, false, 3},
    {192, 4096, 64, true, 16, 64, 1, 8, 0, false, 3},
    {192, 4096, 128, false, 64, 64, 1, 16, 8, false, 3},
    {192, 4096, 208, false, 64, 104, 1, 16, 7, false, 3},
    {192, 4096, 256, false, 64, 64, 1, 8, 0, false, 3},
    {192, 4096, 520, false, 64, 104, 1, 8, 5, true, 3, true},
    {192, 4096, 520, false, 64, 104, 2, 8, 6, true, 3},
    {192, 4096, 1040, false, 64, 104, 1, 4, 5, true, 3, true},
    {192, 4096, 1040, false, 64, 104, 2, 4, 6, true, 3},
    {192, 4096, 2080, false, 64, 104, 1, 2, 5, true, 3, true},
    {192, 4096, 2080, false, 64, 104, 2, 2, 6, true, 3},
    {192, 4096, 4160, false, 64, 104, 1, 1, 5, false, 3, true},
    {192, 4096, 4224, false, 64, 104, 2, 1, 7, false, 3},
    {384, 3072, 8, true, 48, 8, 1, 6, 0, false, 3},
    {384, 3072, 16, true, 16, 16, 1, 4, 0, false, 3},
    {384, 3072, 64, false, 64, 64, 1, 16, 6, true, 3},
    {384, 3072, 128, false, 64, 64, 1, 8, 9, false, 3},
    {384, 3072, 256, false, 64, 64, 1, 4, 6, true, 3, true, true},
    {384, 3072, 256, false, 64, 128, 2, 8, 5, true, 3},
    {384, 3072, 520, false, 64, 104, 1, 4, 5, true, 3, true},
    {384, 3072, 520, false, 64, 104, 2, 4, 6, true, 3},
    {384, 3072, 1040, false, 64, 104, 1, 2, 5, true, 3, true},
    {384, 3072, 1040, false, 64, 104, 2, 2, 6, true, 3},
    {384, 3072, 2080, false, 64, 104, 1, 1, 5, false, 3, true},
    {384, 3072, 2080, false, 64, 104, 2, 1, 7, false, 3},
    {384, 3072, 4224, false, 64, 208, 1, 1, 4, false, 3, true},
    {384, 3072, 4224, false, 128, 192, 1, 2, 4, false, 3},
    {384, 3072, INT64_MAX, false, 128, 192, 1, 1, 0, false, 3},
    {768, 6144, 8, true, 32, 8, 1, 6, 3, false, 3},
    {768, 6144, 64, false, 64, 64, 1, 8, 10, true, 3},
    {768, 6144, 128, false, 64, 128, 2, 8, 6, true, 3},
    {768, 6144, 256, false, 64, 128, 1, 4, 5, false, 3, true, true},
    {768, 6144, 256, false, 64, 128, 2, 4, 6, true, 3},
    {768, 6144, 520, false, 64, 104, 1, 2, 5, true, 3, true},
    {768, 6144, 520, false, 64, 104, 2, 2, 6, true, 3},
    {768, 6144, 1040, false, 64, 104, 1, 1, 5, false, 3, true},
    {768, 6144, 1040, false, 64, 104, 2, 1, 7, false, 3},
    {768, 6144, 2112, false, 128, 192, 1, 2, 4, false, 3},
    {768, 6144, INT64_MAX, false, 128, 192, 1, 1, 0, false, 3},
};

}  // namespace hpc::router
