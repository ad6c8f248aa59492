// Argument checks of the extensions, with the wording every operator uses:
//   hpc_attention.decode: k_cache: expected page_size in (1, 16), got 48
// nanobind turns std::invalid_argument into ValueError and std::runtime_error into RuntimeError.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace hpc {

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Throws std::invalid_argument in the repository's wording.
template <typename Expected, typename Got>
[[noreturn]] void fail(const char* where, const char* argument, const Expected& expected, const Got& got) {
  throw std::invalid_argument(text(where, ": ", argument, ": expected ", expected, ", got ", got));
}

// `where`, `argument` and `expected` are only turned into text when the check fails.
template <typename Expected, typename Got>
void check(bool ok, const char* where, const char* argument, const Expected& expected, const Got& got) {
  if (!ok) fail(where, argument, expected, got);
}

// A pointer that a kernel loads 16 bytes at a time from; a null pointer passes (an absent optional tensor).
inline void check_aligned16(const char* where, const char* argument, const void* pointer) {
  auto address = reinterpret_cast<unsigned long long>(pointer);
  check(address % 16 == 0, where, argument, "a 16-byte aligned address", address);
}

}  // namespace hpc
