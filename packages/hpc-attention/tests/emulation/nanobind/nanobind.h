// Stand-in for nanobind, as much as csrc/api/decode.cpp needs: keeps the functions that a module defines, to be called
// with a row of 8-byte slots: integers and bool as int64, numbers as double, a tuple as its entries.
#pragma once

#include <bit>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace nanobind {

struct arg {
  explicit arg(const char*) {}
};

template <typename T>
struct Slots {
  static T take(const int64_t*& slot) {
    if constexpr (std::is_floating_point_v<T>) {
      return static_cast<T>(std::bit_cast<double>(*slot++));
    } else {
      return static_cast<T>(*slot++);
    }
  }
};
template <typename... T>
struct Slots<std::tuple<T...>> {
  static std::tuple<T...> take(const int64_t*& slot) { return {Slots<T>::take(slot)...}; }
};

class module_ {
 public:
  template <typename Result, typename... Arguments, typename... Names>
  void def(const char* name, Result (*function)(Arguments...), const Names&...) {
    functions_[name] = [function](const int64_t* slots, int64_t count) -> int64_t {
      const int64_t* end = slots + count;
      const std::tuple<Arguments...> arguments = {Slots<Arguments>::take(slots)...};  // in order
      if (slots != end) return -1;
      if constexpr (std::is_void_v<Result>) {
        std::apply(function, arguments);
        return 0;
      } else {
        return std::apply(function, arguments);
      }
    };
  }

  // The function's result, 0 for none; -1 where the number of slots is not the function's.
  int64_t call(const char* name, const int64_t* slots, int64_t count) const {
    return functions_.at(name)(slots, count);
  }

 private:
  std::map<std::string, std::function<int64_t(const int64_t*, int64_t)>> functions_;
};

}  // namespace nanobind
