// The host side of the headers without Python: messages of checks, int64 offsets, and the decode map's limits.
#include <cstdio>
#include <stdexcept>
#include <string>

#include "hpc/checks.hpp"
#include "hpc/tensor.hpp"

static int failures = 0;

static void expect(bool ok, const char* what) {
  if (!ok) {
    std::printf("FAILED: %s\n", what);
    ++failures;
  }
}

int main() {
  try {
    hpc::check(false, "hpc_attention.decode", "q_len", "1 to 8", 9);
    expect(false, "a failed check throws");
  } catch (const std::invalid_argument& error) {
    expect(std::string(error.what()) == "hpc_attention.decode: q_len: expected 1 to 8, got 9", "the message's wording");
  }
  hpc::check(true, "operator", "argument", "anything", 0);

  // A page index times a page stride beyond 2^32 elements must not wrap.
  hpc::TensorView<char, 2> pool{nullptr, {70000, 65536}, {65536, 1}};
  expect(pool.offset(65536, 5) == 65536LL * 65536LL + 5, "offsets are 64-bit");

  try {
    hpc::check_aligned16("operator", "x", reinterpret_cast<void*>(8));
    expect(false, "a misaligned address throws");
  } catch (const std::invalid_argument&) {
  }
  hpc::check_aligned16("operator", "x", nullptr);

  if (failures == 0) std::printf("test_headers: all passed\n");
  return failures != 0;
}
