// Fibers: first entered by setcontext, then changed by _setjmp and _longjmp, which make no system call.
#include "emulation.hpp"

#include <ucontext.h>

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <utility>

dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace hpc::moe {
alignas(1024) uint8_t raw[232448];
}

namespace emulation {

bool clusters = false;
int fault = 0;

namespace {

constexpr size_t kStackBytes = 256 * 1024;

// What a thread or the copy engine has yet to do: bytes to put somewhere, and a barrier to tell.
struct Errand {
  uint32_t to;
  std::vector<uint8_t> contents;
  uint32_t barrier;
  bool arrives;
};

struct Fiber {
  ucontext_t start;
  std::jmp_buf here;
  bool started, done, waited;
  std::deque<Errand> errands;  // in order
  std::vector<std::function<void()>> open;
  std::deque<std::vector<std::function<void()>>> groups;
};

struct Barrier {
  int count, pending, bytes;
  uint32_t phase;
};

struct Meeting {
  int arrived, generation;
  uint32_t values[2][32];
};

// A resident thread block; its shared memory is hpc::moe::raw while it runs.
struct Block {
  unsigned index;
  int left;
  std::unique_ptr<char[]> stacks;
  std::vector<Fiber> fibers;
  std::vector<uint8_t> shared;
  std::map<uint32_t, Barrier> barriers;
  std::deque<Errand> engine;  // the copy engine's, in any order
  Meeting named[16], warps[32];
  Block* peer;  // the other of the cluster, where it runs
  int cluster_arrived, cluster_passed;
};

std::jmp_buf scheduler;
Block* block;
int current;
unsigned seed = 12345;
long progress;
std::function<void()> thread_body;

unsigned random_number() {
  seed = seed * 1664525 + 1013904223;
  return seed >> 16;
}

void complete(Barrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes > 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.count;
  ++progress;
}

bool run_errand(Fiber& fiber) {
  if (fiber.errands.empty()) return false;
  const Errand errand = std::move(fiber.errands.front());
  fiber.errands.pop_front();
  if (errand.arrives) {
    mbarrier_arrive(errand.barrier, 0);
  } else {
    std::memcpy(shared(errand.to, errand.contents.size()), errand.contents.data(), errand.contents.size());
  }
  ++progress;
  return true;
}

bool run_engine() {
  auto& engine = block->engine;
  if (engine.empty()) return false;
  const auto at = engine.begin() + random_number() % engine.size();
  const Errand errand = std::move(*at);
  engine.erase(at);
  std::memcpy(shared(errand.to, errand.contents.size()), errand.contents.data(), errand.contents.size());
  Barrier& barrier = block->barriers.at(errand.barrier);
  barrier.bytes -= static_cast<int>(errand.contents.size());
  complete(barrier);
  ++progress;
  return true;
}

void run_thread() {
  thread_body();
  const Fiber& fiber = block->fibers[static_cast<size_t>(current)];
  check(fiber.groups.empty() && fiber.open.empty(), "a thread ended without waiting for its products");
  check(fiber.waited, "a thread ended without pdl_wait");
  block->fibers[static_cast<size_t>(current)].done = true;
  --block->left;
  ++progress;
  _longjmp(scheduler, 1);
}

void resume(int thread) {
  Fiber& fiber = block->fibers[static_cast<size_t>(thread)];
  current = thread;
  threadIdx = dim3(static_cast<unsigned>(thread));
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.here, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

void start_block(unsigned index, int threads) {
  block->index = index;
  block->left = threads;
  block->cluster_arrived = block->cluster_passed = 0;
  block->barriers.clear();
  std::memset(block->named, 0, sizeof(block->named));
  std::memset(block->warps, 0, sizeof(block->warps));
  block->shared.assign(sizeof(hpc::moe::raw), 0xFF);
  if (!block->stacks) block->stacks.reset(new char[static_cast<size_t>(threads) * kStackBytes]);
  block->fibers.resize(static_cast<size_t>(threads));
  for (size_t i = 0; i < block->fibers.size(); ++i) {
    Fiber& fiber = block->fibers[i];
    fiber.started = fiber.done = fiber.waited = false;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = block->stacks.get() + i * kStackBytes;
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, run_thread, 0);
  }
}

// Lets some of the block's warps go on, and some of what is on its way arrive. Returns whether anything could.
bool step(int threads) {
  const long before = progress;
  const int num_warps = threads / 32;
  const unsigned first = random_number();
  for (int i = 0; i < num_warps; ++i) {
    if (random_number() % 4 == 0) continue;  // this warp falls behind
    const int warp = static_cast<int>((first + static_cast<unsigned>(i)) % static_cast<unsigned>(num_warps));
    for (int thread = 32 * warp; thread < 32 * warp + 32; ++thread) {
      if (!block->fibers[static_cast<size_t>(thread)].done) resume(thread);
    }
  }
  for (Fiber& fiber : block->fibers) {
    for (unsigned n = random_number() % 12; n > 0 && run_errand(fiber); --n) {
    }
  }
  if (random_number() % 2) run_engine();
  if (progress != before) return true;
  bool any = run_engine();
  for (Fiber& fiber : block->fibers) any |= run_errand(fiber);
  return any;
}

}  // namespace

void run(unsigned grid, int threads, const std::function<void()>& body, bool of_two) {
  clusters = of_two;
  const unsigned resident = clusters ? 2 : 1;
  gridDim = dim3(grid);
  blockDim = dim3(static_cast<unsigned>(threads));
  thread_body = body;
  std::vector<std::unique_ptr<Block>> blocks;
  unsigned started = 0;
  for (; started < std::min(grid, resident); ++started) {
    blocks.push_back(std::make_unique<Block>());
    block = blocks.back().get();
    start_block(started, threads);
  }
  for (unsigned idle = 0; !blocks.empty();) {
    const size_t at = random_number() % blocks.size();
    block = blocks[at].get();
    block->peer = nullptr;
    for (auto& other : blocks) {
      if (other->index == (block->index ^ 1)) block->peer = other.get();
    }
    blockIdx = dim3(block->index, 0, 0);
    std::memcpy(hpc::moe::raw, block->shared.data(), sizeof(hpc::moe::raw));
    bool any = false;
    for (unsigned n = blocks.size() == 1 ? 64 : 1 + random_number() % 64; n > 0 && block->left > 0; --n) {
      any |= step(threads);
    }
    std::memcpy(block->shared.data(), hpc::moe::raw, sizeof(hpc::moe::raw));
    idle = any ? 0 : idle + 1;
    check(idle < 64 * blocks.size(), "deadlock");
    if (block->left > 0) continue;
    check(block->engine.empty(), "a bulk copy that nobody waited for");
    if (std::any_of(blocks.begin(), blocks.end(), [](auto& each) { return each->left > 0; })) continue;
    for (size_t i = 0; i < blocks.size() && started < grid; ++i) {  // the next, where all of these have ended
      block = blocks[i].get();
      start_block(started++, threads);
    }
    if (std::all_of(blocks.begin(), blocks.end(), [](auto& each) { return each->left == 0; })) break;
  }
}

int lane() {
  return current % 32;
}

void yield() {
  if (_setjmp(block->fibers[static_cast<size_t>(current)].here) == 0) _longjmp(scheduler, 1);
}

void check(bool ok, const char* what) {
  if (ok) return;
  std::printf("emulation: %s (block %u, thread %d)\n", what, blockIdx.x, current);
  std::fflush(stdout);
  std::_Exit(3);
}

uint8_t* shared(uint32_t address, size_t bytes) {
  check(address + bytes <= sizeof(hpc::moe::raw), "shared address out of range");
  return hpc::moe::raw + address;
}

uint32_t exchange(uint32_t value, int from) {
  Meeting& warp = block->warps[current / 32];
  const int generation = warp.generation;
  warp.values[generation & 1][current % 32] = value;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.generation;
    ++progress;
  }
  while (warp.generation == generation) yield();
  return warp.values[generation & 1][from];
}

void barrier_arrive(int id, int threads) {
  Meeting& barrier = block->named[id];
  if (++barrier.arrived < threads) return;
  barrier.arrived = 0;
  ++barrier.generation;
  ++progress;
}

void barrier_sync(int id, int threads) {
  const int generation = block->named[id].generation;
  barrier_arrive(id, threads);
  while (block->named[id].generation == generation) yield();
}

void mbarrier_init(uint32_t address, int count) {
  block->barriers[address] = {count, count, 0, 0};
}

void mbarrier_arrive(uint32_t address, int bytes) {
  Barrier& barrier = block->barriers.at(address);
  check(barrier.pending > 0, "too many arrivals at an mbarrier");
  barrier.bytes += bytes;
  --barrier.pending;
  complete(barrier);
}

void mbarrier_expect(uint32_t address, int bytes) {
  block->barriers.at(address).bytes += bytes;
}

void cluster_arrive() {
  ++block->cluster_arrived;
  ++progress;
}

void cluster_wait() {
  if (!clusters) return;
  const int round = block->cluster_passed / static_cast<int>(blockDim.x) + 1,
            all = round * static_cast<int>(blockDim.x);
  while (block->cluster_arrived < all || block->peer == nullptr || block->peer->cluster_arrived < all) yield();
  ++block->cluster_passed;
  ++progress;
}

void cluster_mbarrier_arrive(uint32_t address, unsigned rank) {
  Block* of = rank == (block->index & 1) ? block : block->peer;
  check(of != nullptr && of->left > 0, "an arrival at a block that has ended");
  Barrier& barrier = of->barriers.at(address);
  check(barrier.pending > 0, "too many arrivals at an mbarrier");
  --barrier.pending;
  complete(barrier);
}

void peer_bulk_copy(uint32_t to, std::vector<uint8_t> contents, uint32_t barrier) {
  check(block->peer != nullptr && block->peer->left > 0, "a copy to a block that has ended");
  std::memset(block->peer->shared.data() + to, 0xFF, contents.size());
  block->peer->engine.push_back({to, std::move(contents), barrier, false});
}

bool mbarrier_done(uint32_t address, uint32_t parity) {
  return block->barriers.at(address).phase != parity;
}

void copy(uint32_t to, const void* from, int size, int bytes) {
  check(to % static_cast<uint32_t>(size) == 0 && reinterpret_cast<uintptr_t>(from) % static_cast<uintptr_t>(size) == 0,
        "misaligned copy");
  Errand errand = {to, std::vector<uint8_t>(static_cast<size_t>(size)), 0, false};
  std::memcpy(errand.contents.data(), from, static_cast<size_t>(bytes));
  std::memset(shared(to, errand.contents.size()), 0xFF, errand.contents.size());
  block->fibers[static_cast<size_t>(current)].errands.push_back(std::move(errand));
}

void arrive_after_copies(uint32_t barrier) {
  block->fibers[static_cast<size_t>(current)].errands.push_back({0, {}, barrier, true});
}

void bulk_copy(uint32_t to, std::vector<uint8_t> contents, uint32_t barrier) {
  check(to % 1024 == 0, "misaligned bulk copy");
  std::memset(shared(to, contents.size()), 0xFF, contents.size());
  block->engine.push_back({to, std::move(contents), barrier, false});
}

void products(std::function<void()> compute) {
  block->fibers[static_cast<size_t>(current)].open.push_back(std::move(compute));
}

void commit_products() {
  block->fibers[static_cast<size_t>(current)].groups.push_back(
      std::exchange(block->fibers[static_cast<size_t>(current)].open, {}));
}

void wait_for_products(size_t pending) {
  auto& groups = block->fibers[static_cast<size_t>(current)].groups;
  for (; groups.size() > pending; groups.pop_front()) {
    for (const auto& compute : groups.front()) compute();
  }
  ++progress;
}

void predecessor_ended() {
  block->fibers[static_cast<size_t>(current)].waited = true;
}

}  // namespace emulation
