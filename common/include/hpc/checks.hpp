// Argument checks of the extensions, with the wording every operator uses:
//   hpc_attention.decode: k_cache: expected page_size in (1, 16), got 48
// nanobind turns std::invalid_argument into ValueError and std::runtime_error into RuntimeError.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace hpc {

// Appends a number or text. No iostream: an extension may carry a libstdc++ of its own beside the process's (a static
// one), and the two share locale facets of different layouts.
template <typename Part>
void append_text(std::string& out, const Part& part) {
  if constexpr (std::is_same_v<Part, bool>) {
    out += part ? "true" : "false";
  } else if constexpr (std::is_integral_v<Part> || std::is_enum_v<Part>) {
    out += std::to_string(+part);
  } else if constexpr (std::is_floating_point_v<Part>) {
    char buffer[32];
    std::snprintf(buffer, sizeof(buffer), "%g", static_cast<double>(part));
    out += buffer;
  } else {
    out += std::string_view(part);
  }
}

// The parts one after the other, as text.
template <typename... Parts>
std::string text(const Parts&... parts) {
  std::string out;
  (append_text(out, parts), ...);
  return out;
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
