// What the emulation's own files share: the blocks of the cluster that runs, their threads and what they wait for.
#pragma once

#include <csetjmp>
#include <deque>
#include <map>
#include <memory>
#include <ucontext.h>
#include <utility>
#include <vector>

#include "block.hpp"
#include "races.hpp"

namespace emulation {

constexpr int kMaxBlocks = 16;                  // of a cluster
constexpr uint32_t kBlockAddresses = 1u << 24;  // a cluster address: the block's rank times this, and the shared one

struct Copy {
  uint32_t shared;
  int size;
  char data[16];
};

enum class State { kReady, kInWarp, kInBlock, kInBarrier, kInWait, kDone };

struct Fiber {
  ucontext_t start;
  std::jmp_buf here;
  bool started;
  State state;
  bool waited;                           // has called pdl_wait
  bool joined;                           // has waited for the cluster's other blocks to begin
  std::vector<Copy> open;                // asynchronous copies since the last commit
  std::deque<std::vector<Copy>> groups;  // committed ones
};

struct Warp {
  uint32_t words[2][kMaxWords][32];  // of this exchange and of the one before
  int arrived, generation;
  Meeting meeting;
};

struct Barrier {
  uint32_t count, arrived, phase;
  int64_t missing_bytes;  // announced and not yet copied
  std::vector<std::pair<uint32_t, std::vector<char>>> copies;
  std::vector<int> waiting;  // threads
  Clock clock, ended;        // of this phase and of the one before
};

// A named barrier: who waits, and the results of this round and of the one before.
struct NamedBarrier {
  std::vector<int> waiting;
  bool any[2];
  int generation;
};

// A block of the cluster that runs.
struct Block {
  alignas(128) char smem[kSharedBytes];  // the kernels' extern __shared__
  Fiber fibers[kMaxThreads];
  std::unique_ptr<char[]> stacks[kMaxThreads / 32];  // of a warp
  Warp warps[kMaxThreads / 32];
  int arrived, joined;  // threads at the block's barrier; arrivals at the cluster's
  std::map<uint32_t, Barrier> barriers;
  NamedBarrier named_barriers[16];
  Races races;
};

extern std::unique_ptr<Block> blocks[kMaxBlocks];
extern Block* block;  // whose thread `current` runs
extern int current, rank, num_blocks, num_threads;

Fiber& fiber();             // of the current thread
void suspend(State state);  // the current thread, until its state is kReady
void require(bool ok, const char* what);

}  // namespace emulation
