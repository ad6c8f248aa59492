// Fibers: first entered by setcontext, then changed by _setjmp and _longjmp, which make no system call.
#include "block.hpp"
#include "races.hpp"

#include <csetjmp>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <ucontext.h>
#include <utility>
#include <vector>

namespace hpc::attention {
alignas(128) char smem[emulation::kSharedBytes];  // the kernels' extern __shared__
}

namespace emulation {

int fault = 0;

namespace {

constexpr size_t kStackBytes = 128 * 1024;

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

struct Late {
  char* address;
  std::vector<char> contents;
  int launches;
};

Fiber fibers[kMaxThreads];
std::unique_ptr<char[]> stacks;
Warp warps[kMaxThreads / 32];
std::jmp_buf scheduler;
int current, num_threads, arrived, left, threads_waited;
size_t shared_bytes;
bool predecessor_runs, block_waited;
std::vector<Late> late_memory;
std::map<uint32_t, Barrier> barriers;
NamedBarrier named_barriers[16];
std::exception_ptr error;
const std::function<void()>* block_body;
unsigned seed = 1;

unsigned random_number() {
  seed = seed * 1664525 + 1013904223;
  return seed >> 16;
}

void require(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(std::string("emulation: ") + what);
}

void suspend(State state) {
  fibers[current].state = state;
  if (_setjmp(fibers[current].here) == 0) _longjmp(scheduler, 1);
}

void run_thread() {
  try {
    (*block_body)();
    threads_waited += fibers[current].waited;
  } catch (...) {
    error = std::current_exception();
  }
  fibers[current].state = State::kDone;
  --left;
  _longjmp(scheduler, 1);
}

void resume(int thread) {
  Fiber& fiber = fibers[thread];
  current = thread;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.here, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

// Every ready lane of a warp, once; false where none is.
bool run_warp(int warp, const std::function<void(int)>& enter) {
  bool any = false;
  const unsigned first = random_number();
  for (unsigned i = 0; i < 32; ++i) {
    const int thread = 32 * warp + static_cast<int>((first + i) % 32);
    if (fibers[thread].state != State::kReady) continue;
    enter(thread);
    resume(thread);
    any = true;
    if (error) std::rethrow_exception(std::exchange(error, nullptr));
  }
  return any;
}

// `count` threads from `first` on have met.
void meet(int first, int count) {
  int threads[kMaxThreads];
  std::iota(threads, threads + count, first);
  for (int i = 0; i < count; ++i) fibers[threads[i]].state = State::kReady;
  order_threads({threads, static_cast<size_t>(count)});
}

// The predecessor ends as late as it can: when no thread gets on without it. False where none waits for it.
bool end_predecessor() {
  if (!std::exchange(predecessor_runs, false)) return false;
  for (const Late& memory : late_memory) std::memcpy(memory.address, memory.contents.data(), memory.contents.size());
  bool any = false;
  for (int i = 0; i < num_threads; ++i) {
    if (fibers[i].state != State::kInWait) continue;
    fibers[i].state = State::kReady;
    any = true;
  }
  return any;
}

}  // namespace

void run_block(int threads, size_t smem_bytes, const std::function<void(int)>& enter,
               const std::function<void()>& body) {
  require(threads % 32 == 0 && threads <= kMaxThreads && smem_bytes <= kSharedBytes, "launch out of range");
  if (!stacks) stacks.reset(new char[kMaxThreads * kStackBytes]);
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.started = fiber.waited = false;
    fiber.state = State::kReady;
    fiber.open.clear();
    fiber.groups.clear();
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = stacks.get() + static_cast<size_t>(i) * kStackBytes;
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, run_thread, 0);
  }
  for (Warp& warp : warps) warp.arrived = warp.generation = 0;
  begin_races(threads, smem_bytes);
  barriers.clear();
  for (NamedBarrier& barrier : named_barriers) barrier = {};
  std::memset(hpc::attention::smem, 0xff, sizeof(hpc::attention::smem));
  for (Late& memory : late_memory) {
    memory.contents.assign(memory.address, memory.address + memory.contents.size());
    std::memset(memory.address, 0xff, memory.contents.size());
  }
  predecessor_runs = true;
  block_body = &body;
  shared_bytes = smem_bytes;
  num_threads = left = threads;
  threads_waited = 0;
  arrived = 0;
  const unsigned num_warps = static_cast<unsigned>(threads) / 32;
  while (left > 0) {
    bool any = false;
    const unsigned first = random_number();
    for (unsigned i = 0; i < num_warps; ++i) {
      unsigned rounds = 1 + random_number() % 16;  // how far a warp gets ahead
      while (rounds-- > 0 && run_warp(static_cast<int>((first + i) % num_warps), enter)) any = true;
    }
    require(any || end_predecessor(), "deadlock");
  }
  require(threads_waited == 0 || threads_waited == threads, "a thread ended without pdl_wait");
  block_waited |= threads_waited > 0;
  end_predecessor();
}

void late(void* address, size_t bytes, int launches) {
  late_memory.push_back({static_cast<char*>(address), std::vector<char>(bytes), launches});
}

void forget_late() {
  late_memory.clear();
}

void end_launch() {
  require(std::exchange(block_waited, false), "a kernel ended without pdl_wait");
  std::erase_if(late_memory, [](Late& memory) { return --memory.launches == 0; });
}

int lane() {
  return current % 32;
}

const uint32_t (*exchange(Meeting meeting, const uint32_t* mine, int words))[32] {
  Warp& warp = warps[current / 32];
  const int generation = warp.generation;
  if (warp.arrived == 0) warp.meeting = meeting;
  require(warp.meeting == meeting, "the lanes of a warp meet at different instructions");
  for (int word = 0; word < words; ++word) warp.words[generation & 1][word][lane()] = mine[word];
  if (++warp.arrived < 32) {
    suspend(State::kInWarp);
  } else {
    warp.arrived = 0;
    ++warp.generation;
    const int first = current / 32 * 32;
    if (meeting == Meeting::kSync) {
      meet(first, 32);
    } else {
      for (int i = 0; i < 32; ++i) fibers[first + i].state = State::kReady;
    }
  }
  return warp.words[generation & 1];
}

void sync_block() {
  if (++arrived < num_threads) {
    suspend(State::kInBlock);
  } else {
    arrived = 0;
    meet(0, num_threads);
  }
}

bool sync_threads(int id, int threads, bool value) {
  require(id > 0 && id < 16 && threads % 32 == 0 && threads <= num_threads, "a named barrier out of range");
  NamedBarrier& barrier = named_barriers[id];
  bool& any = barrier.any[barrier.generation & 1];
  any = value || (any && !barrier.waiting.empty());
  barrier.waiting.push_back(current);
  if (static_cast<int>(barrier.waiting.size()) < threads) {
    suspend(State::kInBarrier);
  } else {
    ++barrier.generation;
    order_threads(barrier.waiting);
    for (const int thread : std::exchange(barrier.waiting, {})) fibers[thread].state = State::kReady;
  }
  return any;
}

void wait_for_predecessor() {
  fibers[current].waited = true;
  if (predecessor_runs) suspend(State::kInWait);
}

uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - hpc::attention::smem);
}

char* shared_pointer(uint32_t address, uint32_t bytes) {
  require(address % bytes == 0, "misaligned shared address");
  require(address + bytes <= shared_bytes, "shared address beyond what the launch asked for");
  return hpc::attention::smem + address;
}

const char* read_shared(uint32_t address, uint32_t bytes) {
  const char* pointer = shared_pointer(address, bytes);
  check_read(current, address, bytes);
  return pointer;
}

char* write_shared(uint32_t address, uint32_t bytes) {
  char* pointer = shared_pointer(address, bytes);
  check_write(current, address, bytes);
  return pointer;
}

void copy_async(uint32_t shared, const void* global, int size, int bytes) {
  require(reinterpret_cast<uintptr_t>(global) % static_cast<uintptr_t>(size) == 0, "misaligned source of a copy");
  Copy copy = {shared, size, {}};
  std::memcpy(copy.data, global, static_cast<size_t>(bytes));
  fibers[current].open.push_back(copy);
  std::memset(write_shared(shared, static_cast<uint32_t>(size)), 0xff, static_cast<size_t>(size));
}

void commit_copies() {
  Fiber& fiber = fibers[current];
  fiber.groups.push_back(std::exchange(fiber.open, {}));
}

void init_barrier(uint32_t address, uint32_t count) {
  shared_pointer(address, 8);
  barriers[address] = {.count = count};
}

// A phase ends when all have arrived and all bytes are there. Copies are held back until a thread waits for them.
static void end_phase(Barrier& barrier) {
  if (barrier.arrived < barrier.count || barrier.missing_bytes != 0) return;
  if (!barrier.copies.empty() && barrier.waiting.empty()) return;
  for (const auto& [shared, data] : barrier.copies) {
    std::memcpy(shared_pointer(shared, 16), data.data(), data.size());
  }
  barrier.copies.clear();
  barrier.arrived = 0;
  ++barrier.phase;
  barrier.ended = std::exchange(barrier.clock, {});
  for (const int thread : std::exchange(barrier.waiting, {})) fibers[thread].state = State::kReady;
}

static Barrier& barrier_at(uint32_t address) {
  require(barriers.count(address) == 1, "a barrier that was not initialised");
  return barriers[address];
}

void arrive(uint32_t address, uint32_t expected_bytes) {
  Barrier& barrier = barrier_at(address);
  require(barrier.arrived < barrier.count, "too many arrivals at a barrier");
  ++barrier.arrived;
  order_before(barrier.clock, current);
  barrier.missing_bytes += expected_bytes;
  end_phase(barrier);
}

void wait_barrier(uint32_t address, uint32_t parity) {
  Barrier& barrier = barrier_at(address);
  if ((barrier.phase & 1) == parity) {  // else the phase of this parity is over
    barrier.waiting.push_back(current);
    end_phase(barrier);
    if ((barrier.phase & 1) == parity) suspend(State::kInBarrier);
  }
  order_behind(barrier.ended, current);
}

void bulk_copy(uint32_t shared, const void* global, uint32_t bytes, uint32_t address) {
  Barrier& barrier = barrier_at(address);
  require(reinterpret_cast<uintptr_t>(global) % 16 == 0 && bytes % 16 == 0, "misaligned bulk copy");
  shared_pointer(shared + bytes - 16, 16);
  check_write(current, shared, bytes);
  order_before(barrier.clock, current);
  std::memset(shared_pointer(shared, 16), 0xff, bytes);
  const char* source = static_cast<const char*>(global);
  barrier.copies.emplace_back(shared, std::vector<char>(source, source + bytes));
  barrier.missing_bytes -= bytes;
  end_phase(barrier);
}

void wait_for_copies(size_t pending) {
  auto& groups = fibers[current].groups;
  for (; groups.size() > pending; groups.pop_front()) {
    for (const Copy& copy : groups.front()) {
      std::memcpy(write_shared(copy.shared, static_cast<uint32_t>(copy.size)), copy.data,
                  static_cast<size_t>(copy.size));
    }
  }
}

}  // namespace emulation
