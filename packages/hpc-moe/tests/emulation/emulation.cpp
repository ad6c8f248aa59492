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

Fiber fibers[1024];
std::unique_ptr<char[]> stacks;
std::jmp_buf scheduler;
int current, left;
unsigned seed = 12345;
long progress;
std::function<void()> thread_body;
std::map<uint32_t, Barrier> barriers;
std::deque<Errand> engine;  // the copy engine's, in any order
Meeting named[16], warps[32];

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
  if (engine.empty()) return false;
  const auto at = engine.begin() + random_number() % engine.size();
  const Errand errand = std::move(*at);
  engine.erase(at);
  std::memcpy(shared(errand.to, errand.contents.size()), errand.contents.data(), errand.contents.size());
  Barrier& barrier = barriers.at(errand.barrier);
  barrier.bytes -= static_cast<int>(errand.contents.size());
  complete(barrier);
  ++progress;
  return true;
}

void run_thread() {
  thread_body();
  const Fiber& fiber = fibers[current];
  check(fiber.groups.empty() && fiber.open.empty(), "a thread ended without waiting for its products");
  check(fiber.waited, "a thread ended without pdl_wait");
  fibers[current].done = true;
  --left;
  ++progress;
  _longjmp(scheduler, 1);
}

void resume(int thread) {
  Fiber& fiber = fibers[thread];
  current = thread;
  threadIdx = dim3(static_cast<unsigned>(thread));
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.here, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

void start_block(int threads) {
  barriers.clear();
  std::memset(named, 0, sizeof(named));
  std::memset(warps, 0, sizeof(warps));
  std::memset(hpc::moe::raw, 0xFF, sizeof(hpc::moe::raw));
  left = threads;
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.started = fiber.done = fiber.waited = false;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = stacks.get() + static_cast<size_t>(i) * kStackBytes;
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, run_thread, 0);
  }
}

}  // namespace

void run(unsigned grid, int threads, const std::function<void()>& body) {
  if (!stacks) stacks.reset(new char[1024 * kStackBytes]);
  gridDim = dim3(grid);
  blockDim = dim3(static_cast<unsigned>(threads));
  thread_body = body;
  const int num_warps = threads / 32;
  for (unsigned block = 0; block < grid; ++block) {
    blockIdx = dim3(block, 0, 0);
    start_block(threads);
    for (int idle = 0; left > 0;) {
      const long before = progress;
      const unsigned first = random_number();
      for (int i = 0; i < num_warps; ++i) {
        if (random_number() % 4 == 0) continue;  // this warp falls behind
        const int warp = static_cast<int>((first + static_cast<unsigned>(i)) % static_cast<unsigned>(num_warps));
        for (int thread = 32 * warp; thread < 32 * warp + 32; ++thread) {
          if (!fibers[thread].done) resume(thread);
        }
      }
      for (int i = 0; i < threads; ++i) {
        for (unsigned n = random_number() % 12; n > 0 && run_errand(fibers[i]); --n) {
        }
      }
      if (random_number() % 2) run_engine();
      if (progress != before) {
        idle = 0;
        continue;
      }
      bool any = run_engine();
      for (int i = 0; i < threads; ++i) any |= run_errand(fibers[i]);
      check(any || ++idle < 64, "deadlock");
    }
    check(engine.empty(), "a bulk copy that nobody waited for");
  }
}

int lane() {
  return current % 32;
}

void yield() {
  if (_setjmp(fibers[current].here) == 0) _longjmp(scheduler, 1);
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
  Meeting& warp = warps[current / 32];
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
  Meeting& barrier = named[id];
  if (++barrier.arrived < threads) return;
  barrier.arrived = 0;
  ++barrier.generation;
  ++progress;
}

void barrier_sync(int id, int threads) {
  const int generation = named[id].generation;
  barrier_arrive(id, threads);
  while (named[id].generation == generation) yield();
}

void mbarrier_init(uint32_t address, int count) {
  barriers[address] = {count, count, 0, 0};
}

void mbarrier_arrive(uint32_t address, int bytes) {
  Barrier& barrier = barriers.at(address);
  check(barrier.pending > 0, "too many arrivals at an mbarrier");
  barrier.bytes += bytes;
  --barrier.pending;
  complete(barrier);
}

void mbarrier_expect(uint32_t address, int bytes) {
  barriers.at(address).bytes += bytes;
}

bool mbarrier_done(uint32_t address, uint32_t parity) {
  return barriers.at(address).phase != parity;
}

void copy(uint32_t to, const void* from, int size, int bytes) {
  check(to % static_cast<uint32_t>(size) == 0 && reinterpret_cast<uintptr_t>(from) % static_cast<uintptr_t>(size) == 0,
        "misaligned copy");
  Errand errand = {to, std::vector<uint8_t>(static_cast<size_t>(size)), 0, false};
  std::memcpy(errand.contents.data(), from, static_cast<size_t>(bytes));
  std::memset(shared(to, errand.contents.size()), 0xFF, errand.contents.size());
  fibers[current].errands.push_back(std::move(errand));
}

void arrive_after_copies(uint32_t barrier) {
  fibers[current].errands.push_back({0, {}, barrier, true});
}

void bulk_copy(uint32_t to, std::vector<uint8_t> contents, uint32_t barrier) {
  check(to % 1024 == 0, "misaligned bulk copy");
  std::memset(shared(to, contents.size()), 0xFF, contents.size());
  engine.push_back({to, std::move(contents), barrier, false});
}

void products(std::function<void()> compute) {
  fibers[current].open.push_back(std::move(compute));
}

void commit_products() {
  fibers[current].groups.push_back(std::exchange(fibers[current].open, {}));
}

void wait_for_products(size_t pending) {
  auto& groups = fibers[current].groups;
  for (; groups.size() > pending; groups.pop_front()) {
    for (const auto& compute : groups.front()) compute();
  }
  ++progress;
}

void predecessor_ended() {
  fibers[current].waited = true;
}

}  // namespace emulation
