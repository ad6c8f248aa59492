// Races in shared memory: two threads' accesses of a word, one of them a write, with nothing that orders them. Found
// whatever order the threads happened to run in, by vector clocks: a thread's clock says how far each other thread had
// come when it last synchronised with it.
//
// Orders: __syncthreads, named barriers and __syncwarp, what all threads did before for all of them; an mbarrier's
//   phase, what threads did before they arrived (or asked for a copy) for those that wait for it.
// Accesses: loads and stores by shared addresses; cp.async, a write when it begins and again when its thread waits for
//   it; bulk copies, a write of the thread that asks for one; a wgmma's reads of its operand.
// Not seen: accesses by plain pointers: the list of pieces and its requests, the combine and plan kernels' memory;
//   stores from another block of the cluster. A thread that does not wait for its own copies (NaN until then shows
//   that), missing proxy fences, when a wgmma reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace emulation {

// How far each thread had come; empty: nothing is known of any.
using Clock = std::vector<uint32_t>;

// A block's.
class Races {
 public:
  // A new block of so many threads, in which nothing has been accessed.
  void begin(int threads, size_t smem_bytes);

  // What these threads have done comes before what any of them does from now on.
  void order_threads(std::span<const int> threads);
  // What `thread` has done comes before what those do that are ordered behind `clock`.
  void order_before(Clock& clock, int thread);
  void order_behind(const Clock& clock, int thread);

  // Throws std::runtime_error, "emulation: a race: ...", where nothing orders the access behind another thread's.
  void check_read(int thread, uint32_t address, uint32_t bytes);
  void check_write(int thread, uint32_t address, uint32_t bytes);

 private:
  // A thread's access; time: its own clock's then.
  struct Access {
    int thread;
    uint32_t time;
  };
  struct Word {
    Access write;               // the last one; time 0: none
    std::vector<Access> reads;  // since then, without those that are ordered before a later one
  };
  Clock& clock_of(int thread) { return clocks_[static_cast<size_t>(thread)]; }
  uint32_t& own_time(int thread) { return clock_of(thread)[static_cast<size_t>(thread)]; }
  static bool is_before(const Access& access, const Clock& clock) {
    return access.time <= clock[static_cast<size_t>(access.thread)];
  }

  std::vector<Clock> clocks_;  // of the threads
  std::vector<Word> words_;    // of shared memory
};

}  // namespace emulation
