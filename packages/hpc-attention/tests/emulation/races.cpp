#include "races.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace emulation {

namespace {

// A thread's access; time: its own clock's then.
struct Access {
  int thread;
  uint32_t time;
};

struct Word {
  Access write;               // the last one; time 0: none
  std::vector<Access> reads;  // since then, without those that are ordered before a later one
};

std::vector<Clock> clocks;  // of the threads
std::vector<Word> words;    // of shared memory

void join(Clock& to, const Clock& from) {
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

Clock& clock_of(int thread) {
  return clocks[static_cast<size_t>(thread)];
}

uint32_t& own_time(int thread) {
  return clock_of(thread)[static_cast<size_t>(thread)];
}

bool is_before(const Access& access, const Clock& clock) {
  return access.time <= clock[static_cast<size_t>(access.thread)];
}

[[noreturn]] void report(const char* kind, int thread, const char* other_kind, int other, size_t word) {
  throw std::runtime_error(std::string("emulation: a race: ") + kind + " by thread " + std::to_string(thread) +
                           " after a " + other_kind + " by thread " + std::to_string(other) + " at shared byte " +
                           std::to_string(4 * word));
}

}  // namespace

void begin_races(int threads, size_t smem_bytes) {
  clocks.resize(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) {
    clock_of(i).assign(static_cast<size_t>(threads), 0);
    own_time(i) = 1;
  }
  words.resize((smem_bytes + 3) / 4);
  for (Word& word : words) {
    word.write = {};
    word.reads.clear();
  }
}

void order_threads(std::span<const int> threads) {
  if (threads.size() == clocks.size()) {  // nobody knows more of a thread than it does itself
    Clock all(clocks.size());
    for (const int thread : threads) all[static_cast<size_t>(thread)] = own_time(thread);
    for (Clock& clock : clocks) clock = all;
  } else {
    Clock all = clock_of(threads[0]);
    for (const int thread : threads.subspan(1)) join(all, clock_of(thread));
    for (const int thread : threads) clock_of(thread) = all;
  }
  for (const int thread : threads) ++own_time(thread);
}

void order_before(Clock& clock, int thread) {
  clock.resize(clocks.size());
  join(clock, clock_of(thread));
  ++own_time(thread);
}

void order_behind(const Clock& clock, int thread) {
  join(clock_of(thread), clock);
}

void check_read(int thread, uint32_t address, uint32_t bytes) {
  const Clock& clock = clock_of(thread);
  const Access mine = {thread, own_time(thread)};
  for (size_t i = address / 4; i < (address + bytes + 3) / 4; ++i) {
    Word& word = words[i];
    if (!is_before(word.write, clock)) report("read", thread, "write", word.write.thread, i);
    std::erase_if(word.reads, [&](const Access& read) { return is_before(read, clock); });
    word.reads.push_back(mine);
  }
}

void check_write(int thread, uint32_t address, uint32_t bytes) {
  const Clock& clock = clock_of(thread);
  for (size_t i = address / 4; i < (address + bytes + 3) / 4; ++i) {
    Word& word = words[i];
    if (!is_before(word.write, clock)) report("write", thread, "write", word.write.thread, i);
    for (const Access& read : word.reads) {
      if (!is_before(read, clock)) report("write", thread, "read", read.thread, i);
    }
    word.write = {thread, own_time(thread)};
    word.reads.clear();
  }
}

}  // namespace emulation
