// Fibers: first entered by setcontext, then changed by _setjmp and _longjmp, which make no system call.
#include <cstring>
#include <exception>
#include <numeric>
#include <stdexcept>
#include <string>

#include "state.hpp"

namespace emulation {

int fault = 0;
std::unique_ptr<Block> blocks[kMaxBlocks];
Block* block;
int current, rank, num_blocks, num_threads;

namespace {

constexpr size_t kStackBytes = 128 * 1024;

struct Late {
  char* address;
  std::vector<char> contents;
  int launches;
};

std::jmp_buf scheduler;
int left, threads_waited;
size_t shared_bytes;
bool predecessor_runs, block_waited;
std::vector<Late> late_memory;
std::exception_ptr error;
const std::function<void()>* block_body;
unsigned seed = 1;

unsigned random_number() {
  seed = seed * 1664525 + 1013904223;
  return seed >> 16;
}

}  // namespace

void require(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(std::string("emulation: ") + what);
}

Fiber& fiber() {
  return block->fibers[current];
}

void suspend(State state) {
  fiber().state = state;
  if (_setjmp(fiber().here) == 0) _longjmp(scheduler, 1);
}

namespace {

void run_thread() {
  try {
    (*block_body)();
    threads_waited += fiber().waited;
  } catch (...) {
    error = std::current_exception();
  }
  fiber().state = State::kDone;
  --left;
  _longjmp(scheduler, 1);
}

void resume(int thread) {
  current = thread;
  if (_setjmp(scheduler) != 0) return;
  if (fiber().started) _longjmp(fiber().here, 1);
  fiber().started = true;
  setcontext(&fiber().start);
}

// Every ready lane of a warp of the current block, once; false where none is.
bool run_warp(int warp, const std::function<void(int, int)>& enter) {
  bool any = false;
  const unsigned first = random_number();
  for (unsigned i = 0; i < 32; ++i) {
    const int thread = 32 * warp + static_cast<int>((first + i) % 32);
    if (block->fibers[thread].state != State::kReady) continue;
    enter(rank, thread);
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
  for (int i = 0; i < count; ++i) block->fibers[threads[i]].state = State::kReady;
  block->races.order_threads({threads, static_cast<size_t>(count)});
}

// The predecessor ends as late as it can: when no thread gets on without it. False where none waits for it.
bool end_predecessor() {
  if (!std::exchange(predecessor_runs, false)) return false;
  for (const Late& memory : late_memory) std::memcpy(memory.address, memory.contents.data(), memory.contents.size());
  bool any = false;
  for (int i = 0; i < num_blocks; ++i) {
    for (int thread = 0; thread < num_threads; ++thread) {
      Fiber& waiting = blocks[i]->fibers[thread];
      if (waiting.state != State::kInWait) continue;
      waiting.state = State::kReady;
      any = true;
    }
  }
  return any;
}

void start_block(int number) {
  if (!blocks[number]) blocks[number] = std::make_unique<Block>();
  Block& started = *blocks[number];
  for (int i = 0; i < num_threads; ++i) {
    Fiber& fiber = started.fibers[i];
    std::unique_ptr<char[]>& stacks = started.stacks[i / 32];
    if (!stacks) stacks.reset(new char[32 * kStackBytes]);
    fiber.started = fiber.waited = fiber.joined = false;
    fiber.state = State::kReady;
    fiber.open.clear();
    fiber.groups.clear();
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = stacks.get() + static_cast<size_t>(i % 32) * kStackBytes;
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, run_thread, 0);
  }
  for (Warp& warp : started.warps) warp.arrived = warp.generation = 0;
  started.arrived = started.joined = 0;
  started.races.begin(num_threads, shared_bytes);
  started.barriers.clear();
  for (NamedBarrier& barrier : started.named_barriers) barrier = {};
  std::memset(started.smem, 0xff, sizeof(started.smem));
}

}  // namespace

void run_cluster(int of, int threads, size_t smem_bytes, const std::function<void(int, int)>& enter,
                 const std::function<void()>& body) {
  require(threads % 32 == 0 && threads <= kMaxThreads && smem_bytes <= kSharedBytes && of <= kMaxBlocks,
          "launch out of range");
  num_blocks = of;
  num_threads = threads;
  shared_bytes = smem_bytes;
  for (int i = 0; i < of; ++i) start_block(i);
  for (Late& memory : late_memory) {
    memory.contents.assign(memory.address, memory.address + memory.contents.size());
    std::memset(memory.address, 0xff, memory.contents.size());
  }
  predecessor_runs = true;
  block_body = &body;
  left = of * threads;
  threads_waited = 0;
  const unsigned num_warps = static_cast<unsigned>(of * threads) / 32;
  while (left > 0) {
    bool any = false;
    const unsigned first = random_number();
    for (unsigned i = 0; i < num_warps; ++i) {
      unsigned rounds = 1 + random_number() % 16;  // how far a warp gets ahead
      const int warp = static_cast<int>((first + i) % num_warps);
      rank = warp / (threads / 32);
      block = blocks[rank].get();
      while (rounds-- > 0 && run_warp(warp % (threads / 32), enter)) any = true;
    }
    require(any || end_predecessor(), "deadlock");
  }
  require(threads_waited == 0 || threads_waited == of * threads, "a thread ended without pdl_wait");
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
  Warp& warp = block->warps[current / 32];
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
      for (int i = 0; i < 32; ++i) block->fibers[first + i].state = State::kReady;
    }
  }
  return warp.words[generation & 1];
}

void sync_block() {
  if (++block->arrived < num_threads) {
    suspend(State::kInBlock);
  } else {
    block->arrived = 0;
    meet(0, num_threads);
  }
}

bool sync_threads(int id, int threads, bool value) {
  require(id > 0 && id < 16 && threads % 32 == 0 && threads <= num_threads, "a named barrier out of range");
  NamedBarrier& barrier = block->named_barriers[id];
  bool& any = barrier.any[barrier.generation & 1];
  any = value || (any && !barrier.waiting.empty());
  barrier.waiting.push_back(current);
  if (static_cast<int>(barrier.waiting.size()) < threads) {
    suspend(State::kInBarrier);
  } else {
    ++barrier.generation;
    block->races.order_threads(barrier.waiting);
    for (const int thread : std::exchange(barrier.waiting, {})) block->fibers[thread].state = State::kReady;
  }
  return any;
}

void wait_for_predecessor() {
  fiber().waited = true;
  if (predecessor_runs) suspend(State::kInWait);
}

char* shared_memory() {
  return block->smem;
}

uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - block->smem);
}

char* shared_pointer(uint32_t address, uint32_t bytes) {
  require(address % bytes == 0, "misaligned shared address");
  require(address + bytes <= shared_bytes, "shared address beyond what the launch asked for");
  return block->smem + address;
}

const char* read_shared(uint32_t address, uint32_t bytes) {
  const char* pointer = shared_pointer(address, bytes);
  block->races.check_read(current, address, bytes);
  return pointer;
}

char* write_shared(uint32_t address, uint32_t bytes) {
  char* pointer = shared_pointer(address, bytes);
  block->races.check_write(current, address, bytes);
  return pointer;
}

}  // namespace emulation
