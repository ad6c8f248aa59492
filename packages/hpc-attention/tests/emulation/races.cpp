#include "races.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace emulation {

namespace {

void join(Clock& to, const Clock& from) {
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

[[noreturn]] void report(const char* kind, int thread, const char* other_kind, int other, size_t word) {
  throw std::runtime_error(std::string("emulation: a race: ") + kind + " by thread " + std::to_string(thread) +
                           " after a " + other_kind + " by thread " + std::to_string(other) + " at shared byte " +
                           std::to_string(4 * word));
}

}  // namespace

void Races::begin(int threads, size_t smem_bytes) {
  clocks_.resize(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) {
    clock_of(i).assign(static_cast<size_t>(threads), 0);
    own_time(i) = 1;
  }
  words_.resize((smem_bytes + 3) / 4);
  for (Word& word : words_) {
    word.write = {};
    word.reads.clear();
  }
}

void Races::order_threads(std::span<const int> threads) {
  if (threads.size() == clocks_.size()) {  // nobody knows more of a thread than it does itself
    Clock all(clocks_.size());
    for (const int thread : threads) all[static_cast<size_t>(thread)] = own_time(thread);
    for (Clock& clock : clocks_) clock = all;
  } else {
    Clock all = clock_of(threads[0]);
    for (const int thread : threads.subspan(1)) join(all, clock_of(thread));
    for (const int thread : threads) clock_of(thread) = all;
  }
  for (const int thread : threads) ++own_time(thread);
}

void Races::order_before(Clock& clock, int thread) {
  clock.resize(clocks_.size());
  join(clock, clock_of(thread));
  ++own_time(thread);
}

void Races::order_behind(const Clock& clock, int thread) {
  join(clock_of(thread), clock);
}

void Races::check_read(int thread, uint32_t address, uint32_t bytes) {
  const Clock& clock = clock_of(thread);
  const Access mine = {thread, own_time(thread)};
  for (size_t i = address / 4; i < (address + bytes + 3) / 4; ++i) {
    Word& word = words_[i];
    if (!is_before(word.write, clock)) report("read", thread, "write", word.write.thread, i);
    std::erase_if(word.reads, [&](const Access& read) { return is_before(read, clock); });
    word.reads.push_back(mine);
  }
}

void Races::check_write(int thread, uint32_t address, uint32_t bytes) {
  const Clock& clock = clock_of(thread);
  for (size_t i = address / 4; i < (address + bytes + 3) / 4; ++i) {
    Word& word = words_[i];
    if (!is_before(word.write, clock)) report("write", thread, "write", word.write.thread, i);
    for (const Access& read : word.reads) {
      if (!is_before(read, clock)) report("write", thread, "read", read.thread, i);
    }
    word.write = {thread, own_time(thread)};
    word.reads.clear();
  }
}

}  // namespace emulation
