// Copies that complete behind a wait, mbarriers, and what the blocks of a cluster do to one another.
#include <cstring>
#include <deque>
#include <string>

#include "state.hpp"

namespace emulation {

void copy_async(uint32_t shared, const void* global, int size, int bytes) {
  require(reinterpret_cast<uintptr_t>(global) % static_cast<uintptr_t>(size) == 0, "misaligned source of a copy");
  Copy copy = {shared, size, {}};
  std::memcpy(copy.data, global, static_cast<size_t>(bytes));
  fiber().open.push_back(copy);
  std::memset(write_shared(shared, static_cast<uint32_t>(size)), 0xff, static_cast<size_t>(size));
}

void commit_copies() {
  fiber().groups.push_back(std::exchange(fiber().open, {}));
}

void init_barrier(uint32_t address, uint32_t count) {
  shared_pointer(address, 8);
  block->barriers[address] = {.count = count};
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
  for (const int thread : std::exchange(barrier.waiting, {})) block->fibers[thread].state = State::kReady;
}

static Barrier& barrier_at(uint32_t address) {
  require(block->barriers.count(address) == 1, "a barrier that was not initialised");
  return block->barriers[address];
}

void arrive(uint32_t address, uint32_t expected_bytes) {
  Barrier& barrier = barrier_at(address);
  require(barrier.arrived < barrier.count, "too many arrivals at a barrier");
  ++barrier.arrived;
  block->races.order_before(barrier.clock, current);
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
  block->races.order_behind(barrier.ended, current);
}

void bulk_copy(uint32_t shared, const void* global, uint32_t bytes, uint32_t address) {
  Barrier& barrier = barrier_at(address);
  require(reinterpret_cast<uintptr_t>(global) % 16 == 0 && bytes % 16 == 0, "misaligned bulk copy");
  shared_pointer(shared + bytes - 16, 16);
  block->races.check_write(current, shared, bytes);
  block->races.order_before(barrier.clock, current);
  std::memset(shared_pointer(shared, 16), 0xff, bytes);
  const char* source = static_cast<const char*>(global);
  barrier.copies.emplace_back(shared, std::vector<char>(source, source + bytes));
  barrier.missing_bytes -= bytes;
  end_phase(barrier);
}

// What is done in another block of the cluster, by its own addresses.
template <typename Action>
static void in_block(uint32_t address, const Action& action) {
  const int of = static_cast<int>(address / kBlockAddresses);
  require(of < num_blocks, "a cluster address of no block");
  require(fiber().joined, "an access to a block that may not have begun");
  bool runs = false;
  for (int i = 0; i < num_threads; ++i) runs |= blocks[of]->fibers[i].state != State::kDone;
  require(runs, "an access to a block that has ended");
  Block* own = std::exchange(block, blocks[of].get());
  action(address % kBlockAddresses);
  block = own;
}

int cluster_rank() {
  return rank;
}

uint32_t cluster_address(uint32_t shared, uint32_t of) {
  return shared + of * kBlockAddresses;
}

void cluster_arrive() {
  ++block->joined;
}

void cluster_wait() {
  const auto all_joined = [] {
    for (int i = 0; i < num_blocks; ++i) {
      if (blocks[i]->joined < num_threads) return false;
    }
    return true;
  };
  while (!all_joined()) suspend(State::kReady);  // lets others run
  fiber().joined = true;
}

void store_async(uint32_t address, uint32_t barrier, const void* data) {
  const auto* bytes = static_cast<const char*>(data);
  in_block(barrier, [&](uint32_t at) {
    require(address / kBlockAddresses == barrier / kBlockAddresses, "a store and its barrier in two blocks");
    shared_pointer(address % kBlockAddresses, 16);
    Barrier& counted = barrier_at(at);
    counted.copies.emplace_back(address % kBlockAddresses, std::vector<char>(bytes, bytes + 16));
    counted.missing_bytes -= 16;
    end_phase(counted);
  });
}

void wait_for_copies(size_t pending) {
  auto& groups = fiber().groups;
  for (; groups.size() > pending; groups.pop_front()) {
    for (const Copy& copy : groups.front()) {
      std::memcpy(write_shared(copy.shared, static_cast<uint32_t>(copy.size)), copy.data,
                  static_cast<size_t>(copy.size));
    }
  }
}

}  // namespace emulation
